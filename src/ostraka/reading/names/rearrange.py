"""The same elements in two arrangements: axes in another order, split, cut, merged. Pure integers.

Both shapes are made of the same factors. A kernel of attention may have the shape
`(heads * size, inputs)` in one library and `(inputs, heads, size)` in another. Its factors are
heads, size and inputs. On each side, every dimension is the product of some of them, the first
varying slowest.

One side may hold a part of the other. A tensor `(heads * 3 * size, inputs)` has queries, keys and
values. The keys hold the range (1, 2) of the factor 3, and all of the other factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any, Literal, NamedTuple

from ostraka.layout import box as _box
from ostraka.layout.box import Box

Shape = tuple[int, ...]
Axes = Sequence[int] | Literal["reversed"] | None
"""The order of the axes of an array. None to keep it."""
Groups = tuple[tuple[int, ...], ...]
"""For each dimension the factors, by number, that it is the product of."""


class Taken(NamedTuple):
    """The range of an axis that is kept."""

    axis: int
    start: int
    stop: int
    is_dropped: bool
    """True if the axis is removed. One position of it is left."""


class MovedBox(NamedTuple):
    """A box of the factors, and its boxes in both arrangements."""

    factors: Box
    read: Box
    """The factors of `before`: the same, or more to avoid short ranges."""
    fill: Box
    """The factors of `after`: the same, or more if other pieces fill the rest."""
    before: Box
    after: Box


@dataclass(frozen=True, slots=True)
class Rearrangement:
    """Turns an array into another with the same elements, or with some of them.

    A factor that one side holds a single position of may be in none of its dimensions.
    """

    factors: Shape
    before: Groups
    after: Groups
    held_before: Box
    """The range of each factor that the old arrangement holds."""
    held_after: Box

    @property
    def shape_before(self) -> Shape:
        return _shape(self.before, self.held_before)

    @property
    def shape_after(self) -> Shape:
        return _shape(self.after, self.held_after)

    @property
    def is_identity(self) -> bool:
        return (self.before, self.held_before) == (self.after, self.held_after)

    def inverse(self) -> Rearrangement:
        return Rearrangement(
            self.factors, self.after, self.before, self.held_after, self.held_before
        )

    def pieces(self, wanted: Box, shortest: int = 0) -> Iterator[MovedBox]:
        """Cut a box of the new arrangement into boxes of the old one, where they overlap.

        Runs of fewer than `shortest` elements are read with the elements between them.
        """
        for fill, factors in self._shared(wanted):
            yield from self._contiguous(factors, factors, fill, shortest)

    def cut(self, piece: MovedBox, most_elements: int, shortest: int = 0) -> Iterator[MovedBox]:
        """Cut a piece along the old first axes until each reads at most `most_elements`."""
        sizes = _box.shape_of(piece.read)
        if prod(sizes) <= most_elements:
            yield piece
            return
        order = (factor for group in self.before for factor in group)
        slowest = next(factor for factor in order if sizes[factor] > 1)
        row = prod(sizes) // sizes[slowest]
        step = max(most_elements // row, 1)
        start, stop = piece.read[slowest]
        for low in range(start, stop, step):
            read = _with(piece.read, slowest, (low, min(low + step, stop)))
            factors = _box.intersect(piece.factors, read)
            if factors is not None:
                for part in self._contiguous(factors, read, piece.fill, shortest):
                    yield from self.cut(part, most_elements, shortest)

    def place(self, piece: MovedBox, array: Any, memory: Any) -> None:
        """Copy a piece, of a numpy array of its `before`, to its places in one of its `after`."""
        old, new = self._order(self.before), self._order(self.after)
        read = array.reshape([piece.read[f][1] - piece.read[f][0] for f in old])
        # Axes of memory are only split here, so that this is a view, however it is strided.
        fill = memory.reshape([piece.fill[f][1] - piece.fill[f][0] for f in new])
        taken, put = _box.slices(piece.factors, piece.read), _box.slices(piece.factors, piece.fill)
        wanted = read[tuple(taken[f] for f in old)]
        fill[tuple(put[f] for f in new)] = wanted.transpose([old.index(f) for f in new])

    def _order(self, groups: Groups) -> list[int]:
        """All factors in the order of an arrangement. Factors in no dimension come last."""
        order = [factor for group in groups for factor in group]
        return [*order, *(f for f in range(len(self.factors)) if f not in order)]

    def _shared(self, wanted: Box) -> Iterator[tuple[Box, Box]]:
        """A box of the new arrangement as boxes of the factors, and their overlaps with the old."""
        if any(start >= stop for start, stop in wanted):
            return
        boxes: list[dict[int, tuple[int, int]]] = [dict(enumerate(self.held_after))]
        for (start, stop), group in zip(wanted, self.after, strict=True):
            held = [self.held_after[factor] for factor in group]
            spans = [
                [(low + a, low + b) for (low, _), (a, b) in zip(held, box, strict=True)]
                for box in _product_ranges(start, stop, _box.shape_of(tuple(held)))
            ]
            boxes = [
                {**box, **dict(zip(group, span, strict=True))} for box in boxes for span in spans
            ]
        for box in boxes:
            factors = tuple(box[factor] for factor in range(len(self.factors)))
            shared = _box.intersect(factors, self.held_before)
            if shared is not None:
                yield factors, shared

    def _contiguous(self, factors: Box, read: Box, fill: Box, shortest: int) -> Iterator[MovedBox]:
        """Cut a box of the factors until it is read as one box of the old arrangement."""
        found = _find_loose(read, self.before, self.held_before)
        if found is None:
            if _find_loose(factors, self.after, self.held_after) is None:
                fill = factors
            before = _box_of(read, self.before, self.held_before)
            after = _box_of(fill, self.after, self.held_after)
            yield MovedBox(factors, read, fill, before, after)
        elif _run(read, self.before, self.held_before, found) < shortest:
            wider = _with(read, found.ranged, self.held_before[found.ranged])
            yield from self._contiguous(factors, wider, fill, shortest)
        else:
            for at in range(*factors[found.loose]):
                span = (at, at + 1)
                one, of_read = _with(factors, found.loose, span), _with(read, found.loose, span)
                yield from self._contiguous(one, of_read, fill, shortest)


class _Loose(NamedTuple):
    """Why a box of the factors is not one range of a dimension."""

    group: int
    """The dimension."""
    ranged: int
    """A factor that the box has only a range of."""
    loose: int
    """A factor before it that the box has several positions of."""


def _find_loose(factors: Box, groups: Groups, held: Box) -> _Loose | None:
    for number, group in enumerate(groups):
        ranged = [factor for factor in group if factors[factor] != held[factor]]
        before = group[: group.index(ranged[-1])] if ranged else ()
        for factor in before:
            if factors[factor][1] - factors[factor][0] > 1:
                return _Loose(number, ranged[-1], factor)
    return None


def _run(factors: Box, groups: Groups, held: Box, found: _Loose) -> int:
    """The number of adjacent elements if a box is cut where it is loose."""
    run = 1
    for number in reversed(range(len(groups))):
        group = groups[number]
        inner = group[group.index(found.ranged) :] if number == found.group else group
        run *= prod(factors[factor][1] - factors[factor][0] for factor in inner)
        if number == found.group or any(factors[factor] != held[factor] for factor in inner):
            return run
    return run


def _with(factors: Box, factor: int, span: tuple[int, int]) -> Box:
    return (*factors[:factor], span, *factors[factor + 1 :])


def _shape(groups: Groups, factors: Box) -> Shape:
    return tuple(prod(factors[f][1] - factors[f][0] for f in group) for group in groups)


def _box_of(factors: Box, groups: Groups, held: Box) -> Box:
    """A box of the factors as one of an arrangement that holds ranges of them."""
    spans: list[tuple[int, int]] = []
    for group in groups:
        first = last = 0
        for factor in group:
            (low, high), (start, stop) = held[factor], factors[factor]
            first, last = first * (high - low) + start - low, last * (high - low) + stop - 1 - low
        spans.append((first, last + 1))
    return tuple(spans)


def _product_ranges(start: int, stop: int, sizes: Sequence[int]) -> Iterator[Box]:
    """The elements `[start, stop)` of a product of sizes, as boxes of the factors.

    Each box is one range of the product. There are at most two for each factor but the first.
    """
    if not sizes:
        yield ()
        return
    inner = prod(sizes[1:])
    first, last = start // inner, (stop - 1) // inner
    low, high = start - first * inner, stop - last * inner
    if first == last and (low, high) != (0, inner):
        yield from (((first, last + 1), *rest) for rest in _product_ranges(low, high, sizes[1:]))
        return
    if low:
        yield from _product_ranges(start, (first + 1) * inner, sizes)
        first += 1
    whole = last + 1 if high == inner else last
    if first < whole:
        yield ((first, whole), *_box.full(sizes[1:]))
    if whole == last:
        yield from _product_ranges(last * inner, stop, sizes)


def rearranged(
    shape: Shape,
    axes: Axes = None,
    split: Mapping[int, Sequence[int]] | None = None,
    merge: Mapping[int, Sequence[int]] | None = None,
    taken: Taken | None = None,
) -> Rearrangement:
    """Rearrange an array of this shape: axes in the order `axes`, split, cut, then merged.

    `split` maps an axis to the sizes it is split into, `merge` a new axis to the sizes it is made
    of. One of the sizes may be -1. `taken` is the range of an axis that is kept. `split` numbers
    the axes after the transposition, `taken` those after `split`, `merge` those of the result.
    Raises ValueError, a sentence without a subject, if the shape does not fit.
    """
    order = _order(axes, len(shape), "has {} axes, which can't be put in the order {}")
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
        after += [(number,) for number in numbers]
    for position in split or ():
        if position >= len(shape):
            raise ValueError(f"has {len(shape)} axes, of which number {position} can't be split")
    held = list(_box.full(factors))
    if taken is not None:
        if taken.axis >= len(after):
            raise ValueError(f"becomes one of {len(after)} axes, of which none is {taken.axis}")
        (factor,) = after[taken.axis]
        held[factor] = (taken.start, taken.stop)
        if taken.is_dropped:
            del after[taken.axis]
    if merge:
        after = _merged([high - low for low, high in held], after, merge)
    groups = tuple(before[axis] for axis in range(len(shape)))
    return Rearrangement(tuple(factors), groups, tuple(after), _box.full(factors), tuple(held))


def _order(axes: Axes, rank: int, otherwise: str) -> list[int]:
    """The order of so many axes. Raises ValueError with the sentence `otherwise`."""
    usual = list(range(rank))
    order = usual if axes is None else usual[::-1] if axes == "reversed" else list(axes)
    if sorted(order) != usual:
        raise ValueError(otherwise.format(rank, order))
    return order


def _merged(
    factors: Sequence[int], after: Sequence[tuple[int, ...]], merge: Mapping[int, Sequence[int]]
) -> list[tuple[int, ...]]:
    merged: list[tuple[int, ...]] = []
    at = 0
    while at < len(after):
        wanted = merge.get(len(merged), (-1,))
        numbers = tuple(n for group in after[at : at + len(wanted)] for n in group)
        found = [factors[number] for number in numbers]
        kept = [size if asked == -1 else asked for asked, size in zip_longest(wanted, found)]
        if len(merged) in merge and kept != found:
            raise ValueError(
                f"has axes of {found}, which are not those of {list(wanted)} that make up "
                f"axis {len(merged)}"
            )
        merged.append(numbers)
        at += len(wanted)
    for axis in merge:
        if axis >= len(merged):
            raise ValueError(f"becomes one of {len(merged)} axes, of which none is number {axis}")
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
    axes: Axes = None,
    split: Mapping[int, Sequence[int]] | None = None,
    merge: Mapping[int, Sequence[int]] | None = None,
    taken: Taken | None = None,
    extent: int = 0,
) -> Rearrangement:
    """The rearrangement of `rearranged` whose result has this shape: the same, seen from its end.

    `extent` is the length of the axis that `taken` cuts. Raises ValueError as `rearranged` does.
    """
    parted = unmerged(shape, merge)
    if taken is not None:
        parted[taken.axis : taken.axis + (not taken.is_dropped)] = [extent]
    wide: list[int] = []
    """After the transposition, before splitting."""
    at = 0
    while at < len(parted):
        count = len(split[len(wide)]) if split is not None and len(wide) in split else 1
        wide.append(prod(parted[at : at + count]))
        at += count
    order = _order(axes, len(wide), "is made of {} axes, which can't be in the order {}")
    whole = tuple(wide[order.index(a)] for a in range(len(wide)))
    found = rearranged(whole, axes, split, merge, taken)
    if found.shape_after != shape:
        raise ValueError(f"has the shape {shape}, where {found.shape_after} would follow")
    return found


def unmerged(shape: Shape, merge: Mapping[int, Sequence[int]] | None) -> list[int]:
    """The axes that those of a result were before they were merged. Raises ValueError."""
    parted: list[int] = []
    for axis, size in enumerate(shape):
        parted += _sizes(size, merge[axis], axis) if merge and axis in merge else [size]
    return parted
