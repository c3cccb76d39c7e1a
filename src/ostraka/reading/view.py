"""A source with other names, other shapes, or a part of its tree. No JAX.

    renamed(source, names)               tensors of files as the leaves of a tree
    renamed(source, names, back=True)    the leaves of a tree as tensors for files

`names` is the argument `names=` of `restore`. Reading the result reads just the ranges of the
source that it is made of. Arrays are rearranged piece by piece, so a few pieces are in memory
besides the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from ostraka.common.dtypes import numpy_dtype
from ostraka.errors import InvalidTree, Mismatch, nearest_path
from ostraka.formats.source import (
    CONFIG,
    OnBytes,
    Saved,
    Source,
    StoredBox,
    shortest_range_bytes,
)
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.shard_file import BLOCK_BYTES
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, Target
from ostraka.reading.names.given import NamesLike, read_names
from ostraka.reading.names.rearrange import MovedBox, Rearrangement, Shape
from ostraka.reading.names.rules import Composition, indices_of
from ostraka.tree import patterns as _pattern
from ostraka.tree.json_tree import encode
from ostraka.tree.nodes import (
    ArrayNumber,
    Branch,
    Leaf,
    Node,
    UnreadableLeaf,
    at_path,
    branches_of,
    escape,
    flat_tree,
    leaves_of,
    nested_tree,
    prune,
)
from ostraka.tree.patterns import Patterns

if TYPE_CHECKING:
    import numpy as np


class LeafPart(NamedTuple):
    """A part of a leaf of the view, or all of it, and the part of the source it is made of."""

    at: Shape
    """Positions of the part along the first axes of the leaf."""
    leaf: int
    """The leaf of the source."""
    within: Shape
    """Positions along the first axes of the source's leaf."""
    form: Rearrangement
    """From the source to the view."""


@dataclass(frozen=True, slots=True)
class ViewLeaf:
    """A leaf of the view."""

    path: str
    key: str
    """Its key in a flat dict."""
    shape: Shape
    parts: tuple[LeafPart, ...]
    """Row-major over their indices if the leaf is a stack, else all that it is put together of."""
    stack: Shape = ()
    optional: bool = False
    stands_in: bool = False

    @property
    def is_same(self) -> bool:
        """True if it is an unchanged leaf of the source."""
        part = self.parts[0]
        return len(self.parts) == 1 and not (part.at or part.within) and part.form.is_identity


class SourcePiece(NamedTuple):
    """A box of the source, and the box of a leaf of the view that it becomes."""

    wanted: Target
    box: Box
    form: Rearrangement | None
    """None if the box is the whole target, unchanged."""
    moved: MovedBox | None


# Other names


def renamed(source: Source, names: NamesLike, *, back: bool = False) -> Source:
    """A source whose leaves are made of those of another, as `names` say.

    With `back`, `source` is a tree and the result has the tensors that it is taken apart into, as a
    flat dict. Raises Mismatch for leaves and tensors that do not correspond, ValueError for names
    that can't be understood.
    """
    config = source.saved.user.get(CONFIG)
    known = read_names(names, config if isinstance(config, dict) else None)
    named = _named_leaves(source)
    shapes = {name: _shape_of(leaf.value, source) for name, leaf in named.items()}
    where = source.location
    made = (
        _taken_apart(known.decompose(shapes, where))
        if back
        else _put_together(known.compose(shapes, where))
    )
    arrays: list[ViewLeaf] = []
    others: list[tuple[ViewLeaf, Any]] = []
    specs: list[LeafSpec] = []
    problems: list[str] = []
    for leaf, sources in made:
        values = [named[name].value for name in sources]
        try:
            found = _resolve(leaf, values, source.saved.leaves)
        except ValueError as error:
            problems.append(str(error))
            continue
        if isinstance(found, LeafSpec):
            parts = zip(leaf.parts, values, strict=True)
            parts = tuple(part._replace(leaf=value.number) for part, value in parts)
            arrays.append(replace(leaf, parts=parts))
            specs.append(found)
        else:
            others.append((leaf, found))
    if problems:
        raise Mismatch(f"{known.given} does not fit {where}", problems)
    all_leaves = [*((leaf, ArrayNumber(number)) for number, leaf in enumerate(arrays)), *others]

    def tree_with(is_wanted: Callable[[ViewLeaf], bool]) -> Node:
        wanted = {leaf.path: (leaf.key, value) for leaf, value in all_leaves if is_wanted(leaf)}
        return flat_tree(wanted) if back else nested_tree(wanted)

    tree = tree_with(lambda leaf: not leaf.stands_in)
    saved = Saved(
        id=xxhash.xxh3_128_hexdigest(repr((source.saved.id, arrays)).encode()),
        tree=_encode(tree, {leaf.path: number for number, leaf in enumerate(arrays)}),
        leaves=tuple(specs),
        user=source.saved.user,
        writer=source.saved.writer,
        seen=source.saved,
    )
    return _View(source, tree, saved, arrays, tree_with)


def _named_leaves(source: Source) -> dict[str, Leaf]:
    """By name: by the keys of a flat dict, such as tensors of files are, else by path."""
    tree = source.tree
    leaves = list(leaves_of(tree))
    if (
        isinstance(tree, Branch)
        and tree.kind == "dict"
        and all(isinstance(child, Leaf) for child in tree.children)
        and all(type(key) is str for key in tree.keys)
    ):
        return dict(zip(tree.keys, leaves, strict=True))
    return {leaf.path: leaf for leaf in leaves}


def _shape_of(value: Any, source: Source) -> Shape:
    if isinstance(value, ArrayNumber):
        return source.saved.leaves[value.number].shape
    return value.shape if isinstance(value, UnreadableLeaf) else ()


def _put_together(compositions: Sequence[Composition]) -> Iterator[tuple[ViewLeaf, Sequence[str]]]:
    """The leaves of a tree, and the tensors of each."""
    seen: set[str] = set()
    for found in compositions:
        parts = tuple(LeafPart(at, -1, (), found.form) for at in indices_of(found.stack))
        stands_in = found.optional and found.tensors[0] in seen
        seen.update(found.tensors)
        path, shape, stack = found.path, found.shape, found.stack
        yield ViewLeaf(path, path, shape, parts, stack, found.optional, stands_in), found.tensors


def _taken_apart(compositions: Sequence[Composition]) -> Iterator[tuple[ViewLeaf, Sequence[str]]]:
    """Tensors, and the leaves of each: one, or those that it is put together of."""
    parts: dict[str, list[tuple[LeafPart, str]]] = {}
    shapes: dict[str, Shape] = {}
    for found in compositions:
        form = found.form.inverse()
        for index, name in zip(indices_of(found.stack), found.tensors, strict=True):
            parts.setdefault(name, []).append((LeafPart((), -1, index, form), found.path))
            shapes[name] = found.form.shape_before
    for name, shape in shapes.items():
        made, paths = zip(*parts[name], strict=True)
        yield ViewLeaf(escape(name), name, shape, made), paths


def _resolve(leaf: ViewLeaf, values: Sequence[Any], leaves: Sequence[LeafSpec]) -> LeafSpec | Any:
    """The spec of an array of the view, or the value of another leaf."""
    lost = next((value for value in values if isinstance(value, UnreadableLeaf)), None)
    if lost is not None:
        return lost
    specs = [leaves[value.number] for value in values if isinstance(value, ArrayNumber)]
    if not specs:
        if leaf.stack or not leaf.is_same:
            raise ValueError(f"leaf {leaf.path!r} would be made of what is no array")
        return values[0]
    kinds = sorted({spec.dtype for spec in specs})
    kinds += ["what is no array"] if len(specs) < len(values) else []
    if len(kinds) > 1:
        how = "stacked" if leaf.stack else "put together"
        raise ValueError(f"leaf {leaf.path!r} would be {how} of {' and '.join(kinds)}")
    if leaf.is_same:
        return replace(specs[0], path=leaf.path, mesh=HOST_LOCAL, partition=(), memory=None)
    if any(spec.kind == "key" or spec.per_process for spec in specs):
        raise ValueError(
            f"leaf {leaf.path!r} would be rearranged, and is a PRNG key or has a value for "
            "each process"
        )
    return LeafSpec(leaf.path, "jax", specs[0].dtype, leaf.shape, uncommitted=True)


def _encode(tree: Node, numbers: Mapping[str, int]) -> Any:
    """A tree as JSON, without leaves that can't be read: they have no value."""
    known = prune(tree, lambda leaf: not isinstance(leaf.value, UnreadableLeaf))
    return encode(known or Branch("dict", "", (), dict), numbers, {})


# A part of a tree, or the same leaves at other paths


def select(source: Source, only: Patterns) -> Source:
    """The leaves of a source that patterns choose.

    If `only` is a single name above leaves, such as `model`, paths begin below it. Then the result
    is the model itself. Raises ValueError for a pattern that matches nothing.
    """
    paths = [leaf.path for leaf in leaves_of(source.tree)]
    listed = [only] if isinstance(only, str) else list(only)
    _pattern.refuse_unmatched("only", listed, paths, f"leaf of {source.location}")
    above = listed[0].removesuffix("/**") if len(listed) == 1 else ""
    found = next((b for b in branches_of(source.tree) if above and b.path == above), None)
    if found is not None:
        return _part_of(source, at_path(found, ""))
    tree = prune(source.tree, lambda leaf: _pattern.selects(listed, leaf.path))
    if tree is None:
        raise ValueError(f"only={only!r} leaves out every leaf of {source.location}")
    return _part_of(source, tree)


def without_random_state(source: Source) -> tuple[Source, list[str]]:
    """A source without PRNG keys and the counts beside them, and the paths of these."""
    paths = find_random_state(source.tree, source.saved.leaves)
    tree = prune(source.tree, lambda leaf: leaf.path not in paths)
    # If there is nothing else, whoever writes it says so.
    return (source, paths) if tree is None or not paths else (_part_of(source, tree), paths)


def moved(source: Source, rename: Mapping[str, str]) -> Source:
    """A source whose leaves have other paths, in dicts. Raises as `rename_leaves` does."""
    leaves = list(leaves_of(source.tree))
    paths = rename_leaves([leaf.path for leaf in leaves], rename, source.location)
    named = {new: (new, leaf.value) for new, leaf in zip(paths, leaves, strict=True)}
    return _part_of(source, nested_tree(named))


def with_config(source: Source, config: Mapping[str, Any]) -> Source:
    """A source with another config.json."""
    return _part_of(source, source.tree, {**source.saved.user, CONFIG: dict(config)})


def _part_of(source: Source, tree: Node, user: Mapping[str, Any] | None = None) -> Source:
    """A source with another tree. Arrays keep their numbers."""
    leaves = list(source.saved.leaves)
    numbers: dict[str, int] = {}
    for leaf in leaves_of(tree):
        if isinstance(leaf.value, ArrayNumber):
            numbers[leaf.path] = number = leaf.value.number
            leaves[number] = replace(leaves[number], path=leaf.path)
    saved = replace(
        source.saved,
        leaves=tuple(leaves),
        tree=source.saved.tree if tree is source.tree else _encode(tree, numbers),
        user=source.saved.user if user is None else user,
    )
    return _View(source, tree, saved)


_RANDOM = ("RngKey", "RngCount", "RngState")
"""Variables of Flax NNX."""


def find_random_state(tree: Node, leaves: Sequence[LeafSpec]) -> list[str]:
    """The paths of PRNG keys, and of the counts that belong to them, in tree order."""
    found: set[str] = set()
    for branch in branches_of(tree):
        if branch.kind == "variable" and branch.cls is not None and branch.cls[1] in _RANDOM:
            found.update(leaf.path for leaf in leaves_of(branch))
    arrays = [leaf for leaf in leaves_of(tree) if isinstance(leaf.value, ArrayNumber)]
    for leaf in arrays:
        if leaves[leaf.value.number].kind == "key":
            found.add(leaf.path)
            # What Orbax wrote does not say of which kind a variable is.
            end = "/value" if leaf.path.endswith("/value") else ""
            above, _, name = leaf.path.removesuffix(end).rpartition("/")
            if name == "key" and above:
                found.add(f"{above}/count{end}")
    return [leaf.path for leaf in arrays if leaf.path in found]


def rename_leaves(paths: Sequence[str], rename: Mapping[str, str], where: str) -> list[str]:
    """Paths whose longest beginning in `rename` is replaced, or removed if the new one is empty.

    Raises ValueError for a beginning that no path has, InvalidTree for two leaves of one path.
    """
    used: set[str] = set()
    ordered = sorted(rename, key=len, reverse=True)
    moved: dict[str, str] = {}
    for path in paths:
        old = next((o for o in ordered if path == o or path.startswith((f"{o}/", f"{o}."))), None)
        new = path
        if old is not None:
            used.add(old)
            new = f"{rename[old]}{path[len(old) :]}"
            new = new if rename[old] else new.lstrip("./")
        if not new:
            raise ValueError(f"rename leaves no name for {path!r} of {where}; give it one")
        if new in moved:
            raise InvalidTree(
                f"rename makes {moved[new]!r} and {path!r} of {where} the same, {new!r}; give them "
                "different names"
            )
        moved[new] = path
    for old in rename:
        if old not in used:
            raise ValueError(
                f"rename has {old!r}, which is not in {where}{nearest_path(old, paths)}"
            )
    return list(moved)


# The view as a source


class _View:
    """A source with another tree, and with other arrays if `leaves` are given."""

    def __init__(
        self,
        source: Source,
        tree: Node,
        saved: Saved,
        leaves: Sequence[ViewLeaf] | None = None,
        tree_with: Callable[[Callable[[ViewLeaf], bool]], Node] | None = None,
    ):
        self._source = source
        self._leaves = leaves
        """The arrays, by number. None for the arrays of the source."""
        self._tree_with = tree_with
        """Makes a tree of some of the leaves."""
        self.tree = tree
        self.saved = saved
        self.store = source.store
        self.location = source.location
        self.reads_whole_rows = source.reads_whole_rows
        self.files = source.files
        self.samples = source.samples
        self.is_current = source.is_current

    def tree_for(self, like: Node) -> Node:
        if self._tree_with is None or not any(leaf.optional for leaf in self._leaves or ()):
            return self.tree
        paths = {leaf.path for leaf in leaves_of(like)}
        return self._tree_with(lambda leaf: not leaf.optional or leaf.path in paths)

    def _changed(self, number: int) -> ViewLeaf | None:
        """A leaf that is made of others. None if it is a leaf of the source."""
        leaf = None if self._leaves is None else self._leaves[number]
        return None if leaf is None or leaf.is_same else leaf

    def _number(self, number: int) -> int:
        """The number that an unchanged leaf has in the source."""
        return number if self._leaves is None else self._leaves[number].parts[0].leaf

    def order(self) -> Sequence[int]:
        if self._leaves is None:
            return self._source.order()
        turns = {leaf: turn for turn, leaf in enumerate(self._source.order())}
        last = [max(turns[part.leaf] for part in leaf.parts) for leaf in self._leaves]
        return sorted(range(len(last)), key=lambda number: (last[number], number))

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        found = self._changed(leaf)
        if found is None:
            return self._source.grid_of(self._number(leaf))
        form = found.parts[0].form
        cuts = [1] * len(form.after)
        nbytes = self.saved.leaves[leaf].nbytes // max(len(found.parts), 1)
        # Bands of what is one after the other in a file, so that whoever reads some reads ranges.
        order = [factor for group in form.before for factor in group]
        sizes = _box.shape_of(form.held_after)
        slowest = next((f for f in order if sizes[f] > 1), None)
        for dimension, group in enumerate(form.after):
            if group and group[0] == slowest:
                rows = prod(sizes[factor] for factor in group)
                cuts[dimension] = min(-(-nbytes // BLOCK_BYTES) or 1, rows)
        return (*found.stack, *cuts)

    def files_of(self, leaf: int) -> Sequence[Any]:
        found = self._changed(leaf)
        if found is None:
            return self._source.files_of(self._number(leaf))
        # A leaf that is put together of several leaves may lie in as many files. The file of the
        # first stands for all.
        parts = found.parts if found.stack else found.parts[:1]
        cells = prod(self.grid_of(leaf)) // max(len(parts), 1)
        firsts = [self._source.files_of(part.leaf)[0] for part in parts]
        return [first for first in firsts for _ in range(cells)]

    def boxes_of(self, leaf: int) -> Sequence[StoredBox]:
        found = self._changed(leaf)
        if found is None:
            return self._source.boxes_of(self._number(leaf))
        boxes: list[StoredBox] = []
        for part in found.parts:
            above, back = _spans(part.at), part.form.inverse()
            for stored in self._source.boxes_of(part.leaf):
                own = _below(stored.box, part.within)
                for piece in () if own is None else back.pieces(own):
                    share = _box.count(piece.before) / max(_box.count(stored.box), 1)
                    nbytes, kept = round(stored.nbytes * share), round(stored.stored_bytes * share)
                    box = (*above, *piece.before)
                    boxes.append(stored._replace(box=box, nbytes=nbytes, stored_bytes=kept))
        return sorted(boxes)

    @property
    def version(self) -> str:
        return self._source.version

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        if self._leaves is None:
            return self._source.read(targets, on_bytes=on_bytes)
        from ostraka.reading._view_read import PIECE_BYTES, read_pieces

        pieces = [list(self._pieces_of(target, PIECE_BYTES)) for target in targets]
        return read_pieces(self._source, self.saved.leaves, targets, pieces, on_bytes)

    def _pieces_of(self, target: Target, most_bytes: int) -> Iterator[SourcePiece]:
        """The pieces of the source that a target is made of, each of at most that many bytes."""
        found = self._changed(target.leaf)
        if found is None:
            wanted = Target(self._number(target.leaf), target.box)
            yield SourcePiece(wanted, target.box, None, None)
            return
        rank = len(found.stack)
        itemsize = numpy_dtype(self.saved.leaves[target.leaf].dtype).itemsize
        shortest = shortest_range_bytes(self.store) // itemsize
        most = max(most_bytes // itemsize, 1)
        cells = _box.overlapping_cells(found.stack, found.stack, target.box[:rank])
        for number in cells if found.stack else range(len(found.parts)):
            part = found.parts[number]
            above, within = _spans(part.at), _spans(part.within)
            for whole in part.form.pieces(target.box[rank:], shortest):
                for piece in part.form.cut(whole, most, shortest):
                    wanted = Target(part.leaf, (*within, *piece.before))
                    yield SourcePiece(wanted, (*above, *piece.after), part.form, piece)


def _spans(index: Shape) -> Box:
    return tuple((at, at + 1) for at in index)


def _below(box: Box, index: Shape) -> Box | None:
    """A box without its first axes. None if it lacks that position of them."""
    for at, (start, stop) in zip(index, box, strict=False):
        if not start <= at < stop:
            return None
    return box[len(index) :]
