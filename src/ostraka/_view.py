"""A source seen under other names, and in other shapes. No JAX.

    renamed(source, names)               tensors of files as the leaves of a tree
    renamed(source, names, back=True)    the leaves of a tree as tensors for files

`names` is anything that `restore` takes as `names=`. What is read of the result reads just the
ranges of the source that it is made of; arrays are rearranged piece by piece on their way, so that
no more than a few pieces are held besides the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ostraka import _box
from ostraka._box import Box
from ostraka._document import encode
from ostraka._format import BLOCK_BYTES
from ostraka._names import Composition, Names
from ostraka._names_given import NamesLike, read_names
from ostraka._nodes import (
    ROOT,
    ArrayNumber,
    Branch,
    Leaf,
    Lost,
    Node,
    dict_builder,
    escape,
    leaves_of,
    prune,
)
from ostraka._rearrange import Rearrangement, Shape
from ostraka._source import CONFIG, OnBytes, Saved, Source, StoredBox, StoredFile
from ostraka._spec import HOST_LOCAL, LeafSpec, Target, numpy_dtype
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


class _Part(NamedTuple):
    """A part of a leaf of the view, or all of it, and what it is in the source."""

    at: Shape
    """Which part of the leaf: positions along its first axes."""
    leaf: int
    """The leaf of the source."""
    within: Shape
    """Which part of that: positions along its first axes."""
    form: Rearrangement
    """From the source to the view."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A leaf of the view."""

    path: str
    key: str
    """Its key in a flat dict."""
    shape: Shape
    parts: tuple[_Part, ...]
    """Row-major over their indices."""
    stack: Shape = ()
    optional: bool = False
    stands_in: bool = False

    @property
    def is_same(self) -> bool:
        """Whether it is a leaf of the source as it is."""
        part = self.parts[0]
        return not (part.at or part.within) and part.form.is_identity


class _Renamed:
    """A source seen through `Names`."""

    def __init__(self, source: Source, names: Names, *, back: bool):
        self._source = source
        self._is_flat = back
        there = _named_leaves(source)
        shapes = {name: _shape_of(leaf.value, source) for name, leaf in there.items()}
        where = source.location
        compositions = names.decompose(shapes, where) if back else names.compose(shapes, where)
        seen = _taken_apart(compositions) if back else _put_together(compositions)
        self._seen: list[_Seen] = []
        """The arrays, by number."""
        self._others: list[tuple[_Seen, Any]] = []
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

    def _resolve(self, found: _Seen, values: Sequence[Any]) -> tuple[LeafSpec | None, Any]:
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
        if len(arrays) < len(values) or len({spec.dtype for spec in specs}) > 1:
            dtypes = sorted({spec.dtype for spec in specs})
            raise ValueError(f"leaf {found.path!r} would be stacked of {' and '.join(dtypes)}")
        spec = specs[0]
        if found.is_same:
            if spec.mesh == HOST_LOCAL:
                return replace(spec, path=found.path), None
            return replace(spec, path=found.path, mesh=HOST_LOCAL, partition=(), memory=None), None
        if spec.kind == "key" or spec.per_process:
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
        return _flat(leaves) if self._is_flat else _nested(leaves)

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
        slowest = next((f for f in order if part.form.factors[f] > 1), None)
        for dimension, group in enumerate(part.form.after):
            if group == (slowest,):
                cuts[dimension] = min(-(-nbytes // BLOCK_BYTES) or 1, part.form.factors[group[0]])
        return (*found.stack, *cuts)

    def files_of(self, leaf: int) -> Sequence[Any]:
        found = self._seen[leaf]
        if found.is_same:
            return self._source.files_of(found.parts[0].leaf)
        cells = prod(self.grid_of(leaf)) // max(len(found.parts), 1)
        firsts = [self._source.files_of(part.leaf)[0] for part in found.parts]
        return [first for first in firsts for _ in range(cells)]

    def boxes_of(self, leaf: int) -> list[StoredBox]:
        found = self._seen[leaf]
        boxes: list[StoredBox] = []
        for part in found.parts:
            above, back = _spans(part.at), part.form.inverse()
            for stored in self._source.boxes_of(part.leaf):
                own = _below(stored.box, part.within)
                pieces = [] if own is None else list(back.pieces(own))
                for piece in pieces:
                    share = _box.count(piece.before) / max(_box.count(stored.box), 1)
                    nbytes = round(stored.nbytes * share)
                    kept = round(stored.stored_bytes * share)
                    boxes.append(
                        stored._replace(
                            box=(*above, *piece.before), nbytes=nbytes, stored_bytes=kept
                        )
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
            yield SourcePiece(Target(found.parts[0].leaf, target.box), target.box, None, ())
            return
        rank = len(found.stack)
        itemsize = numpy_dtype(self.saved.leaves[target.leaf].dtype).itemsize
        for number in _box.overlapping_cells(found.stack, found.stack, target.box[:rank]):
            part = found.parts[number]
            above, within = _spans(part.at), _spans(part.within)
            for whole in part.form.pieces(target.box[rank:]):
                for piece in part.form.cut(whole, max(most_bytes // itemsize, 1)):
                    wanted = Target(part.leaf, (*within, *piece.before))
                    after = (*above, *piece.after)
                    yield SourcePiece(wanted, after, part.form, piece.factors)


class SourcePiece(NamedTuple):
    """A box of the source, and the box of a leaf of the view that it becomes."""

    wanted: Target
    box: Box
    form: Rearrangement | None
    """None if it is the whole target as it is."""
    factors: Box


def _spans(index: Shape) -> Box:
    return tuple((at, at + 1) for at in index)


def _below(box: Box, index: Shape) -> Box | None:
    """A box without its first axes; None if it does not have that position of them."""
    for at, (start, stop) in zip(index, box, strict=False):
        if not start <= at < stop:
            return None
    return box[len(index) :]


# Leaves of the source


def _named_leaves(source: Source) -> dict[str, Leaf]:
    """By name: by the keys of a flat dict, such as tensors of files are, else by path."""
    tree = source.tree
    if isinstance(tree, Branch) and tree.kind == "dict":
        children = tree.children
        if all(isinstance(c, Leaf) for c in children) and all(type(k) is str for k in tree.keys):
            return {
                key: child
                for key, child in zip(tree.keys, children, strict=True)
                if isinstance(child, Leaf)
            }
    return {leaf.path: leaf for leaf in leaves_of(tree)}


def _shape_of(value: Any, source: Source) -> Shape:
    if isinstance(value, ArrayNumber):
        return source.saved.leaves[value.number].shape
    return value.shape if isinstance(value, Lost) else ()


def _put_together(compositions: Sequence[Composition]) -> Iterator[tuple[_Seen, tuple[str, ...]]]:
    """Leaves of a tree, and the tensors of each."""
    seen: set[str] = set()
    for found in compositions:
        parts = tuple(_Part(at, -1, (), found.form) for at in _indices(found.stack))
        stands_in = found.optional and found.tensors[0] in seen
        seen.update(found.tensors)
        leaf = _Seen(
            found.path,
            found.path,
            found.shape,
            tuple(parts),
            found.stack,
            found.optional,
            stands_in,
        )
        yield leaf, found.tensors


def _taken_apart(compositions: Sequence[Composition]) -> Iterator[tuple[_Seen, tuple[str, ...]]]:
    """Tensors, and the leaf of each."""
    for found in compositions:
        form = found.form.inverse()
        for index, name in zip(_indices(found.stack), found.tensors, strict=True):
            part = _Part((), -1, index, form)
            yield _Seen(escape(name), name, found.tensor_shape, (part,)), (found.path,)


def _indices(stack: Shape) -> list[Shape]:
    cells = (_box.cell(stack, stack, number) for number in range(prod(stack)))
    return [tuple(start for start, _ in cell) for cell in cells]


# Trees


def _flat(leaves: Mapping[str, tuple[str, Any]]) -> Branch:
    keys = [key for key, _ in leaves.values()]
    children = tuple(Leaf(path, value) for path, (_, value) in leaves.items())
    return Branch("dict", "", children, dict_builder(keys), keys)


def _nested(leaves: Mapping[str, tuple[str, Any]]) -> Node:
    """Dicts in dicts; a name that is a number is one, as NNX has it for lists."""
    if ROOT in leaves and len(leaves) == 1:
        return Leaf(ROOT, leaves[ROOT][1])
    top: dict[str, Any] = {}
    for path, (_, value) in leaves.items():
        *above, last = path.split("/")
        node = top
        for name in above:
            node = node.setdefault(name, {})
        node[last] = Leaf(path, value)

    def build(node: dict[str, Any], path: str) -> Branch:
        names = sorted(node, key=_order_of)
        keys = [_key(name) for name in names]
        children = [
            build(node[name], f"{path}/{name}" if path else name)
            if isinstance(node[name], dict)
            else node[name]
            for name in names
        ]
        return Branch("dict", path, tuple(children), dict_builder(keys), keys)

    return build(top, "")


def _order_of(name: str) -> tuple[bool, int, str]:
    """By name, numbers by their value: the order of `nnx.State`."""
    is_number = isinstance(_key(name), int)
    return (not is_number, int(name) if is_number else 0, name)


def _key(name: str) -> str | int:
    """The key that a part of a path stands for."""
    if name.isascii() and name.isdigit() and (name == "0" or name[0] != "0") and len(name) < 10:
        return int(name)
    return name.removeprefix("~2").replace("~1", "/").replace("~0", "~")
