"""A source seen under other names, and in other shapes. No JAX.

    renamed(source, names)               tensors of files as the leaves of a tree
    renamed(source, names, back=True)    the leaves of a tree as tensors for files

`names` is anything that `restore` takes as `names=`. What is read of the result reads just the
ranges of the source that it is made of; arrays are rearranged piece by piece on their way, so that
no more than a few pieces are held besides the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ostraka import _box
from ostraka._box import Box
from ostraka._document import encode
from ostraka._format import BLOCK_BYTES
from ostraka._names import Names
from ostraka._names_given import NamesLike, read_names
from ostraka._nodes import ArrayNumber, Branch, Lost, Node, leaves_of, prune
from ostraka._rearrange import Piece, Rearrangement, Shape
from ostraka._source import (
    CONFIG,
    OnBytes,
    Saved,
    Source,
    StoredBox,
    StoredFile,
    shortest_range_bytes,
)
from ostraka._spec import HOST_LOCAL, LeafSpec, Target, numpy_dtype
from ostraka._view_leaves import Seen, named_leaves, put_together, shape_of, taken_apart
from ostraka._view_tree import flat_tree, nested_tree
from ostraka.errors import Mismatch
from ostraka.storage import Store

if TYPE_CHECKING:
    import numpy as np


def renamed(source: Source, names: NamesLike, *, back: bool = False) -> Source:
    """A source whose leaves are made of those of another, as `names` say.

    With `back`, `source` is a tree and the result has the tensors that it is taken apart into, as a
    flat dict. Raises Mismatch for what does not correspond, ValueError for names that can't be
    understood.
    """
    config = source.saved.user.get(CONFIG)
    known = read_names(names, config if isinstance(config, dict) else None)
    return _Renamed(source, known, back=back)


class _Renamed:
    """A source seen through `Names`."""

    def __init__(self, source: Source, names: Names, *, back: bool):
        self._source = source
        self._is_flat = back
        self._shortest_bytes = shortest_range_bytes(source.store)
        there = named_leaves(source)
        shapes = {name: shape_of(leaf.value, source) for name, leaf in there.items()}
        where = source.location
        compositions = names.decompose(shapes, where) if back else names.compose(shapes, where)
        seen = taken_apart(compositions) if back else put_together(compositions)
        self._seen: list[Seen] = []
        """The arrays, by number."""
        self._others: list[tuple[Seen, Any]] = []
        """Leaves with a value of their own, or that can't be read."""
        leaves: list[LeafSpec] = []
        problems: list[str] = []
        for found, sources in seen:
            values = [there[name].value for name in sources]
            try:
                spec, other = self._resolve(found, values)
            except ValueError as error:
                problems.append(str(error))
                continue
            if spec is None:
                self._others.append((found, other))
                continue
            numbers = [value.number for value in values]
            parts = zip(found.parts, numbers, strict=True)
            self._seen.append(
                replace(found, parts=tuple(part._replace(leaf=n) for part, n in parts))
            )
            leaves.append(spec)
        if problems:
            raise Mismatch(f"{names.given} does not fit {where}", problems)
        self._numbers = {found.path: number for number, found in enumerate(self._seen)}
        self._tree = self._tree_of(lambda found: not found.stands_in)
        # As JSON without what can't be read, which is no value.
        known = prune(self._tree, lambda leaf: not isinstance(leaf.value, Lost))
        tree = Branch("dict", "", (), dict) if known is None else known
        self.saved = Saved(
            id=xxhash.xxh3_128_hexdigest(repr((source.saved.id, self._seen)).encode()),
            tree=encode(tree, self._numbers, {}),
            leaves=tuple(leaves),
            user=source.saved.user,
            writer=source.saved.writer,
        )

    def _resolve(self, found: Seen, values: Sequence[Any]) -> tuple[LeafSpec | None, Any]:
        """What an array of the view is; or None, and the value that stands in its place."""
        lost = next((value for value in values if isinstance(value, Lost)), None)
        if lost is not None:
            return None, lost
        arrays = [value for value in values if isinstance(value, ArrayNumber)]
        if not arrays:
            if found.stack or not found.is_same:
                raise ValueError(f"leaf {found.path!r} would be made of what is no array")
            return None, values[0]
        specs = [self._source.saved.leaves[value.number] for value in arrays]
        kinds = sorted({spec.dtype for spec in specs})
        kinds += ["what is no array"] if len(arrays) < len(values) else []
        if len(kinds) > 1:
            how = "stacked" if found.stack else "put together"
            raise ValueError(f"leaf {found.path!r} would be {how} of {' and '.join(kinds)}")
        spec = specs[0]
        if found.is_same:
            if spec.mesh == HOST_LOCAL:
                return replace(spec, path=found.path), None
            return replace(spec, path=found.path, mesh=HOST_LOCAL, partition=(), memory=None), None
        if any(spec.kind == "key" or spec.per_process for spec in specs):
            raise ValueError(
                f"leaf {found.path!r} would be rearranged, and is a PRNG key or has a value for "
                "each process"
            )
        return LeafSpec(found.path, "jax", spec.dtype, found.shape, uncommitted=True), None

    # What is there

    @property
    def store(self) -> Store:
        return self._source.store

    @property
    def location(self) -> str:
        return self._source.location

    @property
    def tree(self) -> Node:
        return self._tree

    def tree_for(self, like: Node) -> Node:
        paths = {leaf.path for leaf in leaves_of(like)}
        if all(found.path in paths for found in self._seen if found.optional) and not any(
            found.stands_in for found in self._seen
        ):
            return self._tree
        return self._tree_of(lambda found: not found.optional or found.path in paths)

    def _tree_of(self, is_there: Any) -> Node:
        leaves: dict[str, tuple[str, Any]] = {}
        for found in filter(is_there, self._seen):
            leaves[found.path] = (found.key, ArrayNumber(self._numbers[found.path]))
        for found, value in self._others:
            if is_there(found):
                leaves[found.path] = (found.key, value)
        return flat_tree(leaves) if self._is_flat else nested_tree(leaves)

    def order(self) -> Sequence[int]:
        return self._order

    @cached_property
    def _order(self) -> list[int]:
        turns = {leaf: turn for turn, leaf in enumerate(self._source.order())}
        last = [max(turns[part.leaf] for part in found.parts) for found in self._seen]
        return sorted(range(len(self._seen)), key=lambda number: (last[number], number))

    @property
    def reads_whole_rows(self) -> bool:
        return self._source.reads_whole_rows

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        found = self._seen[leaf]
        if found.is_same:
            return self._source.grid_of(found.parts[0].leaf)
        part = found.parts[0]
        cuts = [1] * len(part.form.after)
        nbytes = self.saved.leaves[leaf].nbytes // max(len(found.parts), 1)
        # Bands of what is one after the other in a file, so that whoever reads some reads ranges.
        order = [factor for group in part.form.before for factor in group]
        sizes = _box.shape_of(part.form.held_after)
        slowest = next((f for f in order if sizes[f] > 1), None)
        for dimension, group in enumerate(part.form.after):
            if group and group[0] == slowest:
                rows = prod(sizes[factor] for factor in group)
                cuts[dimension] = min(-(-nbytes // BLOCK_BYTES) or 1, rows)
        return (*found.stack, *cuts)

    def files_of(self, leaf: int) -> Sequence[Any]:
        found = self._seen[leaf]
        if found.is_same:
            return self._source.files_of(found.parts[0].leaf)
        # What is put together of several leaves may lie in as many files: that of the first stands
        # for all.
        parts = found.parts if found.stack else found.parts[:1]
        cells = prod(self.grid_of(leaf)) // max(len(parts), 1)
        firsts = [self._source.files_of(part.leaf)[0] for part in parts]
        return [first for first in firsts for _ in range(cells)]

    def boxes_of(self, leaf: int) -> list[StoredBox]:
        found = self._seen[leaf]
        boxes: list[StoredBox] = []
        for part in found.parts:
            above, back = _spans(part.at), part.form.inverse()
            for stored in self._source.boxes_of(part.leaf):
                own = _below(stored.box, part.within)
                for box in () if own is None else back.places(own):
                    share = _box.count(box) / max(_box.count(stored.box), 1)
                    nbytes = round(stored.nbytes * share)
                    kept = round(stored.stored_bytes * share)
                    boxes.append(
                        stored._replace(box=(*above, *box), nbytes=nbytes, stored_bytes=kept)
                    )
        return sorted(boxes)

    def files(self) -> Sequence[StoredFile]:
        return self._source.files()

    def is_current(self) -> bool:
        return self._source.is_current()

    # Reading

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        from ostraka._view_read import read_pieces

        return read_pieces(self._source, self.saved.leaves, targets, self._pieces_of, on_bytes)

    def _pieces_of(self, target: Target, most_bytes: int) -> Iterator[SourcePiece]:
        """What of the source a target is made of, in pieces of no more bytes than that."""
        found = self._seen[target.leaf]
        if found.is_same:
            yield SourcePiece(Target(found.parts[0].leaf, target.box), target.box, None, None)
            return
        rank = len(found.stack)
        itemsize = numpy_dtype(self.saved.leaves[target.leaf].dtype).itemsize
        most, shortest = max(most_bytes // itemsize, 1), self._shortest_bytes // itemsize
        cells = _box.overlapping_cells(found.stack, found.stack, target.box[:rank])
        for number in cells if found.stack else range(len(found.parts)):
            part = found.parts[number]
            above, within = _spans(part.at), _spans(part.within)
            for whole in part.form.pieces(target.box[rank:], shortest):
                for piece in part.form.cut(whole, most, shortest):
                    wanted = Target(part.leaf, (*within, *piece.before))
                    after = (*above, *piece.after)
                    yield SourcePiece(wanted, after, part.form, piece)


class SourcePiece(NamedTuple):
    """A box of the source, and the box of a leaf of the view that it becomes."""

    wanted: Target
    box: Box
    form: Rearrangement | None
    """None if it is the whole target as it is."""
    piece: Piece | None


def _spans(index: Shape) -> Box:
    return tuple((at, at + 1) for at in index)


def _below(box: Box, index: Shape) -> Box | None:
    """A box without its first axes; None if it does not have that position of them."""
    for at, (start, stop) in zip(index, box, strict=False):
        if not start <= at < stop:
            return None
    return box[len(index) :]
