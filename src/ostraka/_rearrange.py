"""The same elements in two arrangements: axes in another order, split, merged. Pure integers.

Both shapes are made of the same factors. A kernel of attention that one library has as
`(heads * size, inputs)` and another as `(inputs, heads, size)` has the factors heads, size and
inputs; on each side, every dimension is the product of some of them, the first varying slowest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ostraka._box import Box

Shape = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]
"""For each dimension the factors, by number, that it is the product of."""


class Piece(NamedTuple):
    """Elements that are a box in both arrangements, and a box of the factors, too."""

    factors: Box
    before: Box
    after: Box


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """How an array becomes another of the same elements."""

    factors: Shape
    before: Groups
    after: Groups

    @property
    def shape_before(self) -> Shape:
        return self._shape(self.before)

    @property
    def shape_after(self) -> Shape:
        return self._shape(self.after)

    @property
    def is_identity(self) -> bool:
        return self.before == self.after

    def inverse(self) -> Rearrangement:
        return Rearrangement(self.factors, self.after, self.before)

    def pieces(self, wanted: Box) -> Iterator[Piece]:
        """Cut a box of the new arrangement into boxes of the old one; none if it is empty."""
        if any(start >= stop for start, stop in wanted):
            return
        for factors in self._factor_boxes(wanted):
            for part in self._contiguous(factors, self.before):
                yield self._piece(part)

    def cut(self, piece: Piece, most_elements: int) -> Iterator[Piece]:
        """Cut a piece until each has no more elements, across the old arrangement's first axes."""
        sizes = [stop - start for start, stop in piece.factors]
        if prod(sizes) <= most_elements:
            yield piece
            return
        order = (factor for group in self.before for factor in group)
        slowest = next(factor for factor in order if sizes[factor] > 1)
        row = prod(sizes) // sizes[slowest]
        step = max(most_elements // row, 1)
        start, stop = piece.factors[slowest]
        for low in range(start, stop, step):
            span = (low, min(low + step, stop))
            slab = (*piece.factors[:slowest], span, *piece.factors[slowest + 1 :])
            for part in self._contiguous(slab, (*self.before, *self.after)):
                yield from self.cut(self._piece(part), most_elements)

    def _piece(self, factors: Box) -> Piece:
        return Piece(factors, self._box(factors, self.before), self._box(factors, self.after))

    def apply(self, array: Any, factors: Box) -> Any:
        """A numpy array that holds the old arrangement of a piece, in the new one.

        It is a view, unless dimensions are merged that are not neighbours in memory.
        """
        old = [factor for group in self.before for factor in group]
        new = [factor for group in self.after for factor in group]
        extents = [factors[factor][1] - factors[factor][0] for factor in old]
        turned = array.reshape(extents).transpose([old.index(factor) for factor in new])
        shape = [prod(factors[f][1] - factors[f][0] for f in group) for group in self.after]
        return turned.reshape(shape)

    def _shape(self, groups: Groups) -> Shape:
        return tuple(prod(self.factors[factor] for factor in group) for group in groups)

    def _factor_boxes(self, wanted: Box) -> Iterator[Box]:
        """A box of the new arrangement as boxes of the factors."""
        boxes: list[dict[int, tuple[int, int]]] = [{}]
        for (start, stop), group in zip(wanted, self.after, strict=True):
            sizes = [self.factors[factor] for factor in group]
            spans = list(_product_ranges(start, stop, sizes))
            boxes = [
                {**box, **dict(zip(group, span, strict=True))} for box in boxes for span in spans
            ]
        for box in boxes:
            yield tuple(box[factor] for factor in range(len(self.factors)))

    def _contiguous(self, factors: Box, groups: Groups) -> Iterator[Box]:
        """Cut a box of the factors until every dimension of an arrangement is one range."""
        for group in groups:
            ranged = [factor for factor in group if factors[factor] != (0, self.factors[factor])]
            if not ranged:
                continue
            # All but one element of what comes before the last factor that is cut must be fixed.
            before = group[: group.index(ranged[-1])]
            loose = [f for f in before if factors[f][1] - factors[f][0] > 1]
            if loose:
                start, stop = factors[loose[0]]
                for at in range(start, stop):
                    fixed = (*factors[: loose[0]], (at, at + 1), *factors[loose[0] + 1 :])
                    yield from self._contiguous(fixed, groups)
                return
        yield factors

    def _box(self, factors: Box, groups: Groups) -> Box:
        spans: list[tuple[int, int]] = []
        for group in groups:
            first = last = 0
            for factor in group:
                size, (start, stop) = self.factors[factor], factors[factor]
                first, last = first * size + start, last * size + stop - 1
            spans.append((first, last + 1))
        return tuple(spans)


def _product_ranges(start: int, stop: int, sizes: Sequence[int]) -> Iterator[Box]:
    """The elements `[start, stop)` of a product of sizes, as boxes of the factors.

    Each box is one range of the product; there are at most two for each factor but the first.
    """
    if not sizes:
        yield ()
        return
    inner = prod(sizes[1:])
    first, last = start // inner, (stop - 1) // inner
    low, high = start - first * inner, stop - last * inner
    if first == last:
        if (low, high) != (0, inner):
            yield from (
                ((first, first + 1), *rest) for rest in _product_ranges(low, high, sizes[1:])
            )
            return
        yield ((first, first + 1), *((0, size) for size in sizes[1:]))
        return
    if low:
        yield from _product_ranges(start, (first + 1) * inner, sizes)
        first += 1
    whole = last + 1 if high == inner else last
    if first < whole:
        yield ((first, whole), *((0, size) for size in sizes[1:]))
    if whole == last:
        yield from _product_ranges(last * inner, stop, sizes)


def rearranged(
    shape: Shape,
    axes: Sequence[int] | None = None,
    split: Mapping[int, Sequence[int]] | None = None,
    merge: Mapping[int, Sequence[int]] | None = None,
) -> Rearrangement:
    """What becomes of an array of this shape: its axes in the order `axes`, then split or merged.

    `split` says into which sizes an axis is split, `merge` of which sizes a new axis is made; one
    of the sizes may be -1. Both speak of axes after the transposition, `merge` of the new ones.
    Raises ValueError, a sentence without a subject, for what does not fit.
    """
    order = tuple(range(len(shape))) if axes is None else tuple(axes)
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"has {len(shape)} axes, which can't be put in the order {list(order)}")
    factors: list[int] = []
    before: dict[int, tuple[int, ...]] = {}
    after: list[tuple[int, ...]] = []
    for position, axis in enumerate(order):
        parts = [shape[axis]]
        if split is not None and position in split:
            parts = _sizes(shape[axis], split[position], position)
        numbers = tuple(range(len(factors), len(factors) + len(parts)))
        factors += parts
        before[axis] = numbers
        after += [(number,) for number in numbers] if split and position in split else [numbers]
    for position in split or ():
        if position >= len(shape):
            raise ValueError(f"has {len(shape)} axes, of which number {position} can't be split")
    if merge:
        after = _merged(factors, after, merge)
    return Rearrangement(tuple(factors), tuple(before[a] for a in range(len(shape))), tuple(after))


def _merged(
    factors: Sequence[int], after: Sequence[tuple[int, ...]], merge: Mapping[int, Sequence[int]]
) -> list[tuple[int, ...]]:
    merged: list[tuple[int, ...]] = []
    left = list(after)
    position = 0
    while left:
        count = len(merge[position]) if position in merge else 1
        taken, left = left[:count], left[count:]
        numbers = tuple(number for group in taken for number in group)
        if position in merge:
            found = [factors[number] for number in numbers]
            wanted = merge[position]
            if len(found) != count or any(
                w not in (-1, f) for w, f in zip(wanted, found, strict=True)
            ):
                raise ValueError(
                    f"has axes of {found}, which are not those of {list(wanted)} that make up "
                    f"axis {position}"
                )
        merged.append(numbers)
        position += 1
    for at in merge:
        if at >= position:
            raise ValueError(f"becomes one of {position} axes, of which none is number {at}")
    return merged


def _sizes(extent: int, sizes: Sequence[int], axis: int) -> list[int]:
    """Sizes whose product is an extent, the one that is left open filled in."""
    known = prod(size for size in sizes if size != -1)
    found = [extent // known if size == -1 and known else size for size in sizes]
    if prod(found) != extent or min(found, default=1) < 0:
        raise ValueError(
            f"has {extent} elements along axis {axis}, which can't be split into {list(sizes)}"
        )
    return found


def restored(
    shape: Shape,
    axes: Sequence[int] | None = None,
    split: Mapping[int, Sequence[int]] | None = None,
    merge: Mapping[int, Sequence[int]] | None = None,
) -> Rearrangement:
    """The rearrangement of `rearranged` whose result has this shape: the same, seen from its end.

    Raises ValueError as `rearranged` does.
    """
    wide: list[int] = []
    """After the transposition, before splitting or merging."""
    at = 0
    position = 0
    while at < len(shape):
        if split is not None and position in split:
            count = len(split[position])
            wide.append(prod(shape[at : at + count]))
            at += count
        elif merge is not None and at in merge:
            wide += _sizes(shape[at], merge[at], at)
            at += 1
        else:
            wide.append(shape[at])
            at += 1
        position += 1
    order = tuple(range(len(wide))) if axes is None else tuple(axes)
    if sorted(order) != list(range(len(wide))):
        raise ValueError(f"is made of {len(wide)} axes, which can't be in the order {list(order)}")
    found = rearranged(tuple(wide[order.index(a)] for a in range(len(wide))), axes, split, merge)
    if found.shape_after != shape:
        raise ValueError(f"has the shape {shape}, where {found.shape_after} would follow")
    return found
