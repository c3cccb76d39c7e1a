"""Trees in Orbax's form: nested dicts and lists with string keys. Templates restore others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from ostraka.tree.nodes import Branch, Leaf, Node

Keys = tuple[str, ...]

_EMPTY: dict[str, Any] = {"dict": {}, "list": [], "tuple": ()}
_SequenceKey = jax.tree_util.SequenceKey
_TRANSPARENT = ("nnx", "variable")
_SEQUENCES = ("list", "tuple")
_LEAF_TYPES: set[type] = {np.ndarray, jax.ShapeDtypeStruct, bool, int, float, str, type(...)}
"""Types that JAX always takes for leaves. Its own arrays are added when met."""
ARRAY_TYPES: set[type] = {np.ndarray}
"""The array types among them."""


@dataclass(frozen=True, slots=True)
class FlatTree:
    """The leaves of a tree with their keys. `in_sequence` is True for keys that are indexes."""

    keys: list[Keys]
    in_sequence: list[tuple[bool, ...]]
    leaves: list[Any]
    tree: Any
    stops: Callable[[Any], bool]
    """The `is_leaf` with which JAX finds the same leaves."""

    @property
    def by_keys(self) -> dict[Keys, Any]:
        return dict(zip(self.keys, self.leaves, strict=True))

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        structure = jax.tree_util.tree_structure(self.tree, is_leaf=self.stops)
        return jax.tree_util.tree_unflatten(structure, list(leaves))

    def nested(self, leaves: Iterable[Any]) -> Any:
        """Return the tree as dicts and lists alone, with other leaves."""
        return nest(zip(self.keys, self.in_sequence, leaves, strict=True))


def is_plain_leaf(node: Any) -> bool:
    """True for arrays, numbers and strings, which JAX never takes for containers."""
    if type(node) in _LEAF_TYPES:
        return True
    if isinstance(node, jax.Array):
        _LEAF_TYPES.add(type(node))
        ARRAY_TYPES.add(type(node))
        return True
    return False


def is_empty(node: Any) -> bool:
    """True for None and for empty containers. Orbax counts both as leaves."""
    kind = type(node)
    if kind is dict or kind is list or kind is tuple:
        return not node
    if kind in _LEAF_TYPES:
        return False
    return node is None or (isinstance(node, Mapping | list | tuple) and not node)


def empty_as_saved(node: Any) -> Any:
    """Return an empty container as a restore returns it. Custom classes become None."""
    for kind in (dict, list, tuple):
        if type(node) is kind:
            return kind()
    return {} if isinstance(node, Mapping) else None


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> FlatTree:
    """Take a tree apart, in JAX's order. `is_leaf` is not asked of dicts, lists and tuples."""

    def stops(node: Any) -> bool:
        return is_empty(node) or (is_leaf is not None and is_leaf(node))

    flat = FlatTree([], [], [], tree, is_empty if is_leaf is None else stops)
    _flatten(tree, (), (), flat)
    return flat


def _flatten(node: Any, keys: Keys, flags: tuple[bool, ...], flat: FlatTree) -> None:
    """Add the leaves below a node.

    Following dicts and sequences here is faster than having JAX call `is_leaf` for each node.
    """
    kind = type(node)
    if kind is dict and node:
        below = (*flags, False)
        for key in in_order(node):
            _flatten(node[key], (*keys, str(key)), below, flat)
    elif (kind is list or kind is tuple) and node:
        below = (*flags, True)
        for number, child in enumerate(node):
            _flatten(child, (*keys, str(number)), below, flat)
    elif is_plain_leaf(node):
        flat.keys.append(keys)
        flat.in_sequence.append(flags)
        flat.leaves.append(node)
    elif (names := fields_of(node)) is not None:
        below = (*flags, False)
        for name, child in zip(names, node, strict=True):
            _flatten(child, (*keys, name), below, flat)
    else:
        for path, leaf in jax.tree_util.tree_flatten_with_path(node, is_leaf=flat.stops)[0]:
            flat.keys.append((*keys, *[key_text(key) for key in path]))
            flat.in_sequence.append((*flags, *[type(key) is _SequenceKey for key in path]))
            flat.leaves.append(leaf)


def in_order(node: dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict in JAX's order. Raises ValueError if they can't be ordered."""
    try:
        return sorted(node)
    except TypeError as error:
        raise ValueError(f"the keys of a dict can't be compared with each other: {error}") from None


_FIELDS: dict[type, tuple[str, ...] | None] = {}


def fields_of(node: Any) -> tuple[str, ...] | None:
    """Return the fields of a named tuple that JAX takes for one, or None for other nodes."""
    kind = type(node)
    if not isinstance(node, tuple) or not node or not hasattr(kind, "_fields"):
        return None
    if kind not in _FIELDS:
        found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        names = tuple(key_text(path[0]) if path else "" for path, _ in found)
        # A class that was registered with JAX may have children of other names.
        known: Any = node
        _FIELDS[kind] = names if names == known._fields else None
    return _FIELDS[kind]


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
    """Build dicts and lists from leaves with keys. Raises ValueError if two keys are one string."""
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
            raise _same_text(keys)
        node.children[keys[-1]] = leaf
    return _closed(root)


def _closed(node: Any) -> Any:
    if not isinstance(node, _Open):
        return node
    if node.is_sequence and node.children:
        return [_closed(child) for child in node.children.values()]
    return {key: _closed(child) for key, child in node.children.items()}


_NOTHING: Any = object()
"""Stands for a node without any leaf, not even an empty one."""


def as_saved(tree: Any, prepare: Callable[[Keys, Any], Any], plain: Container[type]) -> Any:
    """Return a tree as dicts and lists alone. Raises ValueError as `nest` does.

    `prepare` converts leaves, but for those of the types in `plain`.
    """
    made = _as_saved(tree, (), prepare, plain)
    return {} if made is _NOTHING else made


def _as_saved(node: Any, keys: Keys, prepare: Any, plain: Container[type]) -> Any:
    kind = type(node)
    if kind in plain:
        return node
    if kind is dict and node:
        return _as_dict(in_order(node), node.__getitem__, keys, prepare, plain)
    if (kind is list or kind is tuple) and node:
        children = [
            child if type(child) in plain else _as_saved(child, (*keys, str(n)), prepare, plain)
            for n, child in enumerate(node)
        ]
        return [child for child in children if child is not _NOTHING]
    if is_plain_leaf(node):
        return prepare(keys, node)
    if (names := fields_of(node)) is not None:
        return _as_dict(names, partial(getattr, node), keys, prepare, plain)
    flat = flatten(node)
    leaves = [prepare((*keys, *k), leaf) for k, leaf in zip(flat.keys, flat.leaves, strict=True)]
    return flat.nested(leaves) if leaves else _NOTHING


def _as_dict(
    names: Sequence[Any], child_of: Any, keys: Keys, prepare: Any, plain: Container[type]
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in names:
        text, child = str(name), child_of(name)
        if text in made:
            raise _same_text((*keys, text))
        if type(child) not in plain:
            child = _as_saved(child, (*keys, text), prepare, plain)
        made[text] = child
    for text in [text for text, child in made.items() if child is _NOTHING]:
        del made[text]
    return made


def _same_text(keys: Keys) -> ValueError:
    return ValueError(f"two keys of the tree are {'/'.join(keys)!r} as text, as 1 and '1'")


# Saved trees


@dataclass(frozen=True, slots=True)
class SavedTree:
    """A saved tree, and its leaves by their keys, in order."""

    node: Node
    leaves: dict[Keys, Any]
    nodes: dict[Keys, Leaf]
    """The nodes of those leaves that are no empty containers."""

    def nested(self, values: Iterable[Any]) -> Any:
        """Return dicts and lists with a value for each leaf, in order."""
        return _rebuilt(self.node, iter(values))


def saved_tree(node: Node) -> SavedTree:
    """Return the leaves of a checkpoint's tree, or of a part of it. Raises ValueError."""
    tree = SavedTree(node, {}, {})
    _walk(node, (), tree)
    return tree


def _walk(node: Node, keys: Keys, tree: SavedTree) -> None:
    if isinstance(node, Leaf):
        if keys in tree.leaves:
            raise _same_text(keys)
        tree.leaves[keys], tree.nodes[keys] = node.value, node
        return
    if node.kind in _TRANSPARENT:
        _walk(node.children[0], keys, tree)
        return
    if not node.children:
        tree.leaves[keys] = _EMPTY.get(node.kind)
        return
    names = range(len(node.children)) if node.kind in _SEQUENCES else node.keys
    for name, child in zip(names, node.children, strict=True):
        _walk(child, (*keys, str(name)), tree)


def _rebuilt(node: Node, values: Iterator[Any]) -> Any:
    if isinstance(node, Leaf) or not node.children:
        return next(values)
    if node.kind in _TRANSPARENT:
        return _rebuilt(node.children[0], values)
    if node.kind in _SEQUENCES:
        return [_rebuilt(child, values) for child in node.children]
    return {
        str(k): _rebuilt(child, values) for k, child in zip(node.keys, node.children, strict=True)
    }


def child_of(node: Node, name: str) -> Node | None:
    if isinstance(node, Branch) and node.kind == "dict":
        for key, child in zip(node.keys, node.children, strict=True):
            if key == name:
                return child
    return None
