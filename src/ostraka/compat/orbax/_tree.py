"""Trees in Orbax's form: nested dicts and lists with string keys. Templates restore others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
    """The leaves of a tree with their keys."""

    keys: list[Keys]
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

    flat = FlatTree([], [], tree, is_empty if is_leaf is None else stops)
    _flatten(tree, (), flat)
    return flat


def _flatten(node: Any, keys: Keys, flat: FlatTree) -> None:
    """Add the leaves below a node.

    Following dicts and sequences here is faster than having JAX call `is_leaf` for each node.
    """
    kind = type(node)
    if kind is dict and node:
        for key in in_order(node):
            _flatten(node[key], (*keys, str(key)), flat)
    elif (kind is list or kind is tuple) and node:
        for number, child in enumerate(node):
            _flatten(child, (*keys, str(number)), flat)
    elif is_plain_leaf(node):
        flat.keys.append(keys)
        flat.leaves.append(node)
    elif isinstance(node, tuple) and (children := children_of(node)):
        for key, child in children:
            _flatten(child, (*keys, key_text(key)), flat)
    else:
        for path, leaf in jax.tree_util.tree_flatten_with_path(node, is_leaf=flat.stops)[0]:
            flat.keys.append((*keys, *[key_text(key) for key in path]))
            flat.leaves.append(leaf)


def in_order(node: dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict in JAX's order. Raises ValueError if they can't be ordered."""
    try:
        return sorted(node)
    except TypeError as error:
        raise ValueError(f"the keys of a dict can't be compared with each other: {error}") from None


def children_of(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the children of a node by their JAX keys, or None for a leaf."""
    found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(path[0], child) for path, child in found] if all(path for path, _ in found) else None


def key_text(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


NOTHING: Any = object()
"""Stands for a node without any leaf, not even an empty one."""


def as_saved(
    tree: Any, prepare: Callable[[Keys, Any], Any], plain: Container[type] = frozenset()
) -> Any:
    """Return a tree as dicts and lists alone. Raises ValueError if two keys are one string.

    `prepare` converts leaves, but for those of the types in `plain`. It may return NOTHING.
    """
    made = _as_saved(tree, (), prepare, plain)
    return {} if made is NOTHING else made


def _as_saved(node: Any, keys: Keys, prepare: Any, plain: Container[type]) -> Any:
    kind = type(node)
    if kind in plain:
        return node
    if kind is dict and node:
        return _as_dict({key: node[key] for key in in_order(node)}.items(), keys, prepare, plain)
    if (kind is list or kind is tuple) and node:
        return _as_list(node, keys, prepare, plain)
    if is_plain_leaf(node) or is_empty(node):
        return prepare(keys, node)
    found = children_of(node)
    if found is None:
        return prepare(keys, node)
    if all(type(key) is _SequenceKey for key, _ in found):
        return _as_list([child for _, child in found], keys, prepare, plain)
    return _as_dict([(key_text(key), child) for key, child in found], keys, prepare, plain)


def _as_list(node: Any, keys: Keys, prepare: Any, plain: Container[type]) -> Any:
    children = [
        child if type(child) in plain else _as_saved(child, (*keys, str(n)), prepare, plain)
        for n, child in enumerate(node)
    ]
    return [child for child in children if child is not NOTHING] or NOTHING


def _as_dict(
    entries: Iterable[tuple[Any, Any]], keys: Keys, prepare: Any, plain: Container[type]
) -> Any:
    made: dict[str, Any] = {}
    for name, child in entries:
        text = str(name)
        if text in made:
            raise _same_text((*keys, text))
        if type(child) not in plain:
            child = _as_saved(child, (*keys, text), prepare, plain)
        made[text] = child
    for text in [text for text, child in made.items() if child is NOTHING]:
        del made[text]
    return made or NOTHING


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
