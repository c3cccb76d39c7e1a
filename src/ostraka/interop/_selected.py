"""A part of a source as a source: some leaves, or what is below a name. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ostraka import _pattern
from ostraka._document import encode
from ostraka._nodes import (
    ROOT,
    ArrayNumber,
    Branch,
    Leaf,
    Node,
    branches_of,
    leaves_of,
    mapped,
    prune,
)
from ostraka._pattern import Patterns
from ostraka._source import OnBytes, Saved, Source, StoredBox, StoredFile
from ostraka._spec import Target
from ostraka.storage import Store

if TYPE_CHECKING:
    import numpy as np


def select(source: Source, only: Patterns) -> Source:
    """The leaves of a source that patterns choose.

    If that is a single name above leaves, such as `model`, paths begin below it: then the result is
    the model itself. Raises ValueError for a pattern that matches nothing.
    """
    paths = [leaf.path for leaf in leaves_of(source.tree)]
    listed = [only] if isinstance(only, str) else list(only)
    for pattern in _pattern.unmatched(listed, paths):
        raise ValueError(f"only has {pattern}, which matches no leaf of {source.location}")
    above = listed[0].removesuffix("/**") if len(listed) == 1 else ""
    found = next((b for b in branches_of(source.tree) if above and b.path == above), None)
    if found is not None:
        return _Part(source, _moved_up(found))
    tree = prune(source.tree, lambda leaf: _pattern.selects(listed, leaf.path))
    if tree is None:
        raise ValueError(f"only={only!r} leaves out every leaf of {source.location}")
    return _Part(source, tree)


def _moved_up(branch: Branch) -> Node:
    """The tree that a branch is, by itself."""
    above = len(branch.path)

    def move(node: Node) -> Node:
        path = node.path[above:].removeprefix("/")
        return replace(node, path=path or ROOT if isinstance(node, Leaf) else path)

    return mapped(branch, move)


class _Part:
    """A source with a part of its tree; arrays keep their numbers."""

    def __init__(self, source: Source, tree: Node):
        self._source = source
        self.tree: Node = tree
        leaves = list(source.saved.leaves)
        numbers: dict[str, int] = {}
        for leaf in leaves_of(tree):
            if isinstance(leaf.value, ArrayNumber):
                numbers[leaf.path] = number = leaf.value.number
                leaves[number] = replace(leaves[number], path=leaf.path)
        self.saved: Saved = replace(
            source.saved, leaves=tuple(leaves), tree=encode(tree, numbers, {})
        )

    @property
    def store(self) -> Store:
        return self._source.store

    @property
    def location(self) -> str:
        return self._source.location

    def tree_for(self, like: Node) -> Node:
        return self.tree

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        return self._source.read(targets, on_bytes=on_bytes)

    def order(self) -> Sequence[int]:
        return self._source.order()

    @property
    def reads_whole_rows(self) -> bool:
        return self._source.reads_whole_rows

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        return self._source.grid_of(leaf)

    def files_of(self, leaf: int) -> Sequence[Any]:
        return self._source.files_of(leaf)

    def boxes_of(self, leaf: int) -> Sequence[StoredBox]:
        return self._source.boxes_of(leaf)

    def files(self) -> Sequence[StoredFile]:
        return self._source.files()

    def is_current(self) -> bool:
        return self._source.is_current()
