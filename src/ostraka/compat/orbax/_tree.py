"""Trees as Orbax has them on disk: nested dicts and lists, keys as text; and back by a template."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from ostraka._nodes import ArrayNumber, Branch, Leaf, Node

Keys = tuple[str, ...]

_EMPTY: dict[str, Any] = {"dict": {}, "list": [], "tuple": ()}


@dataclass(frozen=True, slots=True)
class Flat:
    """A tree taken apart: for each leaf its keys, which of those are of a sequence, and itself."""

    keys: list[Keys]
    in_sequence: list[tuple[bool, ...]]
    leaves: list[Any]
    structure: Any

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        return jax.tree_util.tree_unflatten(self.structure, list(leaves))

    def nested(self, leaves: Iterable[Any]) -> Any:
        """The same tree of dicts and lists alone, with other leaves."""
        return nest(zip(self.keys, self.in_sequence, leaves, strict=True))


def is_empty(node: Any) -> bool:
    """Whether a container holds nothing, or this is None: Orbax counts both as leaves."""
    return node is None or (isinstance(node, Mapping | list | tuple) and not node)


def empty_as_saved(node: Any) -> Any:
    """What comes back of an empty container: None for those that have a class of their own."""
    for kind in (dict, list, tuple):
        if type(node) is kind:
            return kind()
    return {} if isinstance(node, Mapping) else None


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Flat:
    def stops(node: Any) -> bool:
        return is_empty(node) or (is_leaf is not None and is_leaf(node))

    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stops)
    keys = [tuple(key_text(key) for key in path) for path, _ in found]
    flags = [tuple(isinstance(k, jax.tree_util.SequenceKey) for k in path) for path, _ in found]
    return Flat(keys, flags, [leaf for _, leaf in found], structure)


def key_text(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


@dataclass(slots=True)
class _Open:
    children: dict[str, Any] = field(default_factory=dict[str, Any])
    is_sequence: bool = True


def nest(found: Iterable[tuple[Keys, tuple[bool, ...], Any]]) -> Any:
    """Dicts and lists from leaves with their keys. Raises ValueError if two keys are one text."""
    root = _Open()
    for keys, flags, leaf in found:
        if not keys:
            return leaf
        node = root
        for key, flag in zip(keys[:-1], flags[:-1], strict=True):
            node.is_sequence &= flag
            node = node.children.setdefault(key, _Open())
            if not isinstance(node, _Open):
                raise ValueError(f"{'/'.join(keys)!r} is below another leaf")
        node.is_sequence &= flags[-1]
        if keys[-1] in node.children:
            raise ValueError(f"two keys of the tree are {'/'.join(keys)!r} as text, as 1 and '1'")
        node.children[keys[-1]] = leaf
    return _closed(root)


def _closed(node: Any) -> Any:
    if not isinstance(node, _Open):
        return node
    if node.is_sequence and node.children:
        return [_closed(child) for child in node.children.values()]
    return {key: _closed(child) for key, child in node.children.items()}


# What was saved


@dataclass(frozen=True, slots=True)
class SavedTree:
    """A saved tree: its leaves by their keys, in order, and which keys are of sequences."""

    leaves: dict[Keys, Any]
    flags: dict[Keys, tuple[bool, ...]]

    def nested(self, values: Mapping[Keys, Any]) -> Any:
        return nest((keys, self.flags[keys], values[keys]) for keys in self.leaves)


def saved_tree(node: Node) -> SavedTree:
    """An opened checkpoint's tree, or a part of it, in Orbax's form."""
    tree = SavedTree({}, {})
    _walk(node, (), (), tree)
    return tree


def _walk(node: Node, keys: Keys, flags: tuple[bool, ...], tree: SavedTree) -> None:
    if isinstance(node, Leaf):
        tree.leaves[keys], tree.flags[keys] = node.value, flags
        return
    if node.kind in ("nnx", "variable"):
        _walk(node.children[0], keys, flags, tree)
        return
    if not node.children:
        tree.leaves[keys], tree.flags[keys] = _EMPTY.get(node.kind), flags
        return
    is_sequence = node.kind in ("list", "tuple")
    names = range(len(node.children)) if is_sequence else node.keys
    for name, child in zip(names, node.children, strict=True):
        _walk(child, (*keys, str(name)), (*flags, is_sequence), tree)


def child_of(node: Node, name: str) -> Node | None:
    if isinstance(node, Branch) and node.kind == "dict":
        for key, child in zip(node.keys, node.children, strict=True):
            if key == name:
                return child
    return None


def is_array_number(value: Any) -> bool:
    return isinstance(value, ArrayNumber)
