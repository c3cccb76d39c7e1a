"""What becomes of a tensor's axes on the way to a leaf, or to several. Pure.

A `Form` transposes, then splits axes, then cuts one of them into parts that are leaves, then merges
axes. A tensor that has queries, keys and values one after the other in its rows:

    Form("reversed", cut=Cut(1, ("q/kernel", "k/kernel", "v/kernel"), (4096, 1024, 1024)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from ostraka._rearrange import Rearrangement, Shape, Taken, rearranged, restored, unmerged


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis, cut into the parts that become leaves."""

    axis: int
    """Of the tensor once it is transposed and split."""
    paths: tuple[str, ...]
    """Of the leaves, in the order of their parts."""
    sizes: tuple[int, ...] | None = None
    """How long each part is; one may be -1. None for one position each: then the axis is gone."""

    def part(self, number: int, extent: int) -> Taken:
        """A part of an axis of this extent. Raises ValueError, a sentence without its subject."""
        has = f"has {extent:,} elements along axis {self.axis}"
        if self.sizes is None:
            if extent != len(self.paths):
                raise ValueError(
                    f"{has} to cut, and {len(self.paths)} leaves are to have one each: split the "
                    "axis first, or give the size of each leaf"
                )
            return Taken(self.axis, number, number + 1, is_dropped=True)
        rest = extent - sum(size for size in self.sizes if size != -1)
        if rest < 1 if -1 in self.sizes else rest != 0:
            raise ValueError(f"{has}, which can't be cut into {list(self.sizes)}")
        ends = list(accumulate((rest if size == -1 else size for size in self.sizes), initial=0))
        return Taken(self.axis, ends[number], ends[number + 1], is_dropped=False)


@dataclass(frozen=True, slots=True)
class Form:
    """What becomes of a tensor's axes; as `rearranged` has it."""

    axes: tuple[int, ...] | Literal["reversed"] | None = None
    split: Mapping[int, tuple[int, ...]] | None = None
    merge: Mapping[int, tuple[int, ...]] | None = None
    cut: Cut | None = None

    def of_tensor(self, shape: Shape, part: int = 0) -> Rearrangement:
        """From a tensor of this shape to a leaf, or to that of a part of it.

        Raises ValueError, a sentence without its subject, if it does not fit.
        """
        axes = self._axes(len(shape))
        if self.cut is None:
            return rearranged(shape, axes, self.split, self.merge)
        wide = rearranged(shape, axes, self.split).shape_after
        if self.cut.axis >= len(wide):
            raise ValueError(
                f"has {len(wide)} axes when it is to be cut, of which none is number "
                f"{self.cut.axis}"
            )
        taken = self.cut.part(part, wide[self.cut.axis])
        return rearranged(shape, axes, self.split, self.merge, taken)

    def of_leaf(self, shape: Shape) -> Rearrangement:
        """From a tensor that is not cut to a leaf of this shape. Raises ValueError likewise."""
        return self._restored(shape, None, 0)

    def of_leaves(self, leaves: Sequence[tuple[str, Shape]]) -> list[Rearrangement]:
        """From a tensor to each of the leaves that it is cut into, given their paths and shapes.

        Raises ValueError, a sentence that names the leaf.
        """
        assert self.cut is not None
        extents: list[int] = []
        others: list[list[int]] = []
        for number, (path, shape) in enumerate(leaves):
            try:
                extent, rest = self._extent(self.cut, number, shape)
            except ValueError as error:
                raise ValueError(f"leaf {path!r} {error}") from error
            extents.append(extent)
            others.append(rest)
            if rest != others[0]:
                raise ValueError(
                    f"leaves {leaves[0][0]!r} and {path!r} can't be put together: they have the "
                    f"shapes {leaves[0][1]} and {shape}"
                )
        ends = list(accumulate(extents, initial=0))
        is_dropped = self.cut.sizes is None
        made: list[Rearrangement] = []
        for number, (path, shape) in enumerate(leaves):
            taken = Taken(self.cut.axis, ends[number], ends[number + 1], is_dropped)
            try:
                made.append(self._restored(shape, taken, ends[-1]))
            except ValueError as error:
                raise ValueError(f"leaf {path!r} {error}") from error
        return made

    def _extent(self, cut: Cut, number: int, shape: Shape) -> tuple[int, list[int]]:
        """How long the part of a leaf is along the axis that is cut, and its other axes."""
        wide = unmerged(shape, self.merge)
        if cut.axis >= len(wide) + (cut.sizes is None):
            raise ValueError(f"has the shape {shape}, which has no axis {cut.axis}")
        if cut.sizes is None:
            return 1, wide
        extent = wide.pop(cut.axis)
        if cut.sizes[number] not in (-1, extent):
            raise ValueError(
                f"has {extent:,} elements along axis {cut.axis}, where its rule cuts off "
                f"{cut.sizes[number]:,}"
            )
        return extent, wide

    def _restored(self, shape: Shape, taken: Taken | None, extent: int) -> Rearrangement:
        joined = sum(len(sizes) - 1 for sizes in (self.split or {}).values())
        parted = sum(len(sizes) - 1 for sizes in (self.merge or {}).values())
        rank = len(shape) - joined + parted + (taken is not None and taken.is_dropped)
        return restored(shape, self._axes(rank), self.split, self.merge, taken, extent)

    def _axes(self, rank: int) -> tuple[int, ...] | None:
        return tuple(reversed(range(rank))) if self.axes == "reversed" else self.axes


AS_IT_IS = Form()
TRANSPOSED = Form("reversed")
