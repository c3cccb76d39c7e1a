"""What is converted: the chosen leaves of a source, as the target is to have them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ostraka import _box, _format, _pack, _pattern
from ostraka._box import Box
from ostraka._capture import DtypeRule, check_dtype_rule, floating_dtype, may_cast
from ostraka._checkpoint import unless_replaced
from ostraka._document import encode
from ostraka._nodes import (
    ArrayNumber,
    Branch,
    Kept,
    Leaf,
    Lost,
    Node,
    find_shared,
    leaves_of,
    prune,
)
from ostraka._pattern import Patterns
from ostraka._recycle import Recycled, recycling
from ostraka._source import Source
from ostraka._spec import DTYPES, LeafSpec, Target, numpy_dtype
from ostraka._values import flat_bytes
from ostraka.errors import InvalidTree, name_few

Array = np.ndarray[Any, Any]
OnBytes = Callable[[int, int], None]
"""Told of progress: the bytes that are done, and those that there are."""

_ONE_BY_ONE_BYTES = 24 << 20
_IDLE_BYTES = 112 << 20
"""How much memory waits to be used again."""
_RESERVED = "__metadata__"
"""What safetensors has for something else than a tensor."""


class Item(NamedTuple):
    """An array that the target has under a path; another path may have the same one."""

    path: str
    number: int
    """In the source."""
    spec: LeafSpec
    """As the target is to have it."""
    name: str
    """What a file of tensors calls it: its key in a flat dict, such as tensors of files are; else
    its path."""


class Piece(NamedTuple):
    """A box of an item that is read at once."""

    item: int
    box: Box


@dataclass(frozen=True, slots=True)
class Work:
    """A source, and what of it is converted."""

    source: Source
    tree: Node
    items: tuple[Item, ...]
    is_whole: bool
    """Whether that is all of the source."""
    memory: Recycled = field(default_factory=lambda: Recycled(_IDLE_BYTES), compare=False)
    """For what is read of it, and of the result."""
    one_by_one: threading.Lock = field(default_factory=threading.Lock, compare=False)
    """Held while a large piece is read."""

    @property
    def nbytes(self) -> int:
        return sum(item.spec.nbytes for item in self.items)

    @property
    def other_leaves(self) -> list[Leaf]:
        """Leaves that are values and no arrays: numbers, texts, states of iterators.

        None, and what no checkpoint has the value of, is not among them.
        """
        return [
            leaf
            for leaf in leaves_of(self.tree)
            if leaf.value is not None and not isinstance(leaf.value, ArrayNumber | Kept)
        ]

    def read(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Array]]:
        """The elements of pieces, in the target's dtype, as they come."""
        targets = [Target(self.items[piece.item].number, piece.box) for piece in pieces]
        nbytes = sum(
            DTYPES[self.items[piece.item].spec.dtype].nbytes(_box.count(piece.box))
            for piece in pieces
        )
        with recycling(self.memory), unless_replaced(self.source):
            found = self.source.read(targets)
            if nbytes > _ONE_BY_ONE_BYTES:
                # To read an array takes memory besides its own, as to transpose it does.
                with self.one_by_one:
                    found = iter(list(found))
            for at, array in found:
                dtype = numpy_dtype(self.items[pieces[at].item].spec.dtype)
                yield pieces[at], array if array.dtype == dtype else array.astype(dtype)

    def document(self) -> tuple[Any, tuple[LeafSpec, ...], tuple[int, ...]]:
        """The tree as `_METADATA` has it, its arrays, and for each of them an item."""
        first: dict[int, int] = {}
        """By number in the source."""
        for at, item in enumerate(self.items):
            first.setdefault(item.number, at)
        if self.is_whole and len(first) == len(self.source.saved.leaves):
            order = range(len(self.source.saved.leaves))
            tree = self.source.saved.tree
        else:
            order = list(first)
            new = {number: at for at, number in enumerate(order)}
            numbers = {item.path: new[item.number] for item in self.items}
            tree = encode(self.tree, numbers, find_shared(self.tree, lambda value: False).variables)
        found = tuple(first[number] for number in order)
        return tree, tuple(self.items[at].spec for at in found), found


def choose(source: Source, *, only: Patterns | None, dtype: DtypeRule) -> Work:
    """What of a source is converted, and to which dtypes.

    Raises ValueError for a pattern that matches nothing, InvalidTree for what can't be read.
    """
    tree: Node | None = source.tree
    if only is not None:
        paths = [leaf.path for leaf in leaves_of(source.tree)]
        for pattern in _pattern.unmatched([only] if isinstance(only, str) else only, paths):
            raise ValueError(f"only has {pattern}, which matches no leaf of {source.location}")
        tree = prune(source.tree, lambda leaf: _pattern.selects(only, leaf.path))
    if tree is None:
        raise ValueError(f"only={only!r} leaves out every leaf of {source.location}")
    leaves = list(leaves_of(tree))
    lost = [leaf for leaf in leaves if isinstance(leaf.value, Lost)]
    if lost:
        raise InvalidTree(
            f"{name_few([leaf.path for leaf in lost])} of {source.location} can't be read: "
            f"{lost[0].value.why}; leave it out with only"
        )
    names = _keys_of(tree)
    items = [
        Item(
            leaf.path,
            leaf.value.number,
            source.saved.leaves[leaf.value.number],
            names.get(leaf.path, leaf.path),
        )
        for leaf in leaves
        if isinstance(leaf.value, ArrayNumber)
    ]
    if dtype is not None:
        check_dtype_rule(dtype, [item.spec for item in items])
        items = [item._replace(spec=_cast(item.spec, dtype)) for item in items]
    return Work(source, tree, tuple(items), is_whole=only is None)


def _keys_of(tree: Node) -> dict[str, str]:
    """By path, the keys of a flat dict whose keys are text; nothing for any other tree."""
    if not isinstance(tree, Branch) or tree.kind != "dict":
        return {}
    pairs = list(zip(tree.keys, tree.children, strict=True))
    if not all(type(key) is str and isinstance(child, Leaf) for key, child in pairs):
        return {}
    return {child.path: key for key, child in pairs if key != _RESERVED}


def _cast(spec: LeafSpec, rule: DtypeRule) -> LeafSpec:
    wanted = floating_dtype(rule, spec.path)
    if wanted is None or wanted == spec.dtype or not may_cast(spec):
        return spec
    return replace(spec, dtype=wanted, cast_from=spec.dtype)


def bytes_of(array: Array) -> Array:
    """The bytes of an array as files have them."""
    if array.dtype.name in DTYPES and DTYPES[array.dtype.name].packed:
        return _pack.pack(array)
    return flat_bytes(array)


def digest_of(array: Array) -> str:
    return _format.block_digest([bytes_of(array)])


class Tally:
    """How far a conversion has come; any thread may add to it.

    Every byte is written and read back: both count for half.
    """

    def __init__(self, total_bytes: int, on_bytes: OnBytes | None):
        self.kept = 0
        """Bytes that an unfinished conversion had written already."""
        self._total = total_bytes
        self._done = 0
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def add(self, nbytes: int, *, kept: bool = False) -> None:
        with self._lock:
            self._done += nbytes
            self.kept += nbytes if kept else 0
            if self._on_bytes is not None:
                self._on_bytes(min(self._done // 2, self._total), self._total)


Digests = Mapping[Piece, str]
"""Of what was read from the source, and is to be found in the target."""
