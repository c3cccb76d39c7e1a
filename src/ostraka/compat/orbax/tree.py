"""Trees in Orbax's form: nested dicts and lists with string keys. Templates restore others.

Below are the functions of Orbax's modules `tree` and `transform_utils`: trees as flat dicts, as
shapes, and as other trees with renamed keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._names import absent
from ostraka.errors import InvalidTree
from ostraka.tree.nodes import Branch, Leaf, Node, nest

PyTree = PyTreeKey = PyTreePath = PyTreeOf = Any
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


# tree


def to_flat_dict(
    tree: Any, sep: str | None = None, keep_empty_nodes: bool = False, is_leaf: Any = None
) -> dict[Any, Any]:
    """Return the leaves by their tuple of keys, or by their keys joined with `sep`."""
    if keep_empty_nodes:
        found = flatten(tree, is_leaf).by_keys
    else:
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        found = {str_keypath(path): leaf for path, leaf in pairs}
    return {keys if sep is None else sep.join(keys): leaf for keys, leaf in found.items()}


def str_keypath(keypath: Any) -> tuple[str, ...]:
    """Return the keys of a JAX path as strings."""
    return tuple(key_text(key) for key in keypath)


def from_flat_dict(flat_dict: Any, target: Any = None, sep: str | None = None) -> Any:
    """Return a flat dict as nested dicts, or with the structure of `target`."""
    split = {
        (key if sep is None else tuple(str(key).split(sep))): leaf
        for key, leaf in flat_dict.items()
    }
    if target is None:
        return _nested(split)
    flat = flatten(target)
    return flat.rebuild(split.get(keys, leaf) for keys, leaf in flat.by_keys.items())


def _nested(leaves: Mapping[Keys, Any]) -> Any:
    """Return leaves by their keys as nested dicts. Raises ValueError if one is below another."""
    try:
        return nest(leaves.items())
    except InvalidTree as error:
        raise ValueError(str(error)) from None


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Return a tree as nested dicts and lists with string keys."""
    return as_saved(
        tree, lambda _, leaf: leaf if keep_empty_nodes or not is_empty(leaf) else NOTHING
    )


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """Return the values of nested dicts and lists with the structure of `target`."""
    flat = flatten(target)
    results: list[Any] = []
    for keys, leaf in flat.by_keys.items():
        node: Any = serialized
        for key in keys:
            if isinstance(node, list | tuple):
                node = node[int(key)]
            elif isinstance(node, Mapping):
                node = node.get(key)
        results.append(leaf if node is None else node)
    return flat.rebuild(results)


def to_shape_dtype_struct(
    arr: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Turn arrays into `jax.ShapeDtypeStruct` with their shardings. Numbers stay numbers."""

    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, str):
            return leaf
        if isinstance(leaf, bool | int | float | np.number):
            return leaf if scalar_dtype is None else scalar_dtype(leaf)
        sharding: Any = getattr(leaf, "sharding", None)
        if hasattr(sharding, "to_jax_sharding"):
            sharding = sharding.to_jax_sharding()
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype if dtype is None else dtype, sharding=sharding
        )

    return jax.tree.map(abstract, arr.tree if type(arr).__name__ == "TreeMetadata" else arr)


def is_flat_dict(tree: Any) -> bool:
    return isinstance(tree, Mapping) and not any(isinstance(v, Mapping) for v in tree.values())


def get_param_names(item: Any, include_empty_nodes: bool = True) -> Any:
    """Return the tree with each leaf replaced by its name on disk: its keys joined by dots."""
    flat = flatten(item)
    return flat.rebuild(".".join(keys) for keys in flat.keys)


tree_difference = absent("tree.tree_difference", "compare what to_flat_dict returns")


# transform_utils


@dataclass
class Transform:
    """The origin of a leaf: `original_key`, `value_fn` of it, or `use_fallback`.

    `multi_value_fn(key, original_tree)` computes the leaf at `key`. `use_fallback` takes the leaf
    from the other tree: from the new one by default.
    """

    original_key: str | tuple[str, ...] | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None


@dataclass
class RestoreTransform(Transform):
    """A transform for restores.

    It calls `multi_value_fn(key, tree, restore_args)`. The tree has the leaves that
    `multi_value_fn_input_args` names, each with its RestoreArgs.
    """

    multi_value_fn_input_args: Any = None


def rules_of(transformations: Any) -> dict[str, Any]:
    """Return the transforms of a tree by the patterns that their keys are."""
    found = flatten(transformations, lambda node: hasattr(node, "original_key")).by_keys
    return {"/".join(keys): rule for keys, rule in found.items() if not is_empty(rule)}


def origins_of(
    new: FlatTree, original: Container[str], rules: Mapping[str, Any], default_to_original: bool
) -> list[tuple[Any, str | None]]:
    """Return the transform of each leaf, and its key in the original tree, None if it has none."""
    return [
        (None, None)
        if is_empty(leaf)
        else _origin_of("/".join(keys), original, rules, default_to_original)
        for keys, leaf in zip(new.keys, new.leaves, strict=True)
    ]


def transformed(
    new: FlatTree,
    origins: Sequence[tuple[Any, str | None]],
    values: Mapping[str, Any],
    tree: Any,
    *extra: Mapping[str, Any],
) -> Any:
    """Return a new tree with values of an original one.

    Functions of several values receive `tree`, and for their path what each of `extra` has.
    """
    results: list[Any] = []
    for (rule, key), keys, leaf in zip(origins, new.keys, new.leaves, strict=True):
        path = "/".join(keys)
        if key is not None:
            value_fn: Any = None if rule is None else rule.value_fn
            results.append(values[key] if value_fn is None else value_fn(values[key]))
        elif rule is not None and rule.multi_value_fn is not None:
            results.append(rule.multi_value_fn(path, tree, *[more.get(path) for more in extra]))
        else:
            results.append(leaf)
    return new.rebuild(results)


def _origin_of(
    path: str, original: Container[str], rules: Mapping[str, Any], default_to_original: bool
) -> tuple[Any, str | None]:
    """Return the transform of a leaf, and its key in the original tree, each None if it has none.

    Raises ValueError for a key that the original tree lacks.
    """
    for pattern, rule in rules.items():
        match = re.fullmatch(pattern, path)
        if match is None:
            continue
        if rule.multi_value_fn is not None or (rule.use_fallback and default_to_original):
            return rule, None
        key = path if rule.original_key is None else rule.original_key
        key = match.expand(key if isinstance(key, str) else "/".join(key))
        if key not in original:
            why = " (`use_fallback` requested)" if rule.use_fallback else ""
            raise ValueError(f"Transformation key {key!r} is not in the original tree{why}")
        return rule, key
    return None, path if default_to_original and path in original else None


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool = True
) -> Any:
    """Return `new_tree` with values of `original_tree`.

    The keys of the tree of `Transform` are regular expressions over paths. A leaf without a
    transform comes from the original tree if that has it, else from `new_tree`. With
    `default_to_original=False` it comes from `new_tree`, and `use_fallback` takes it from the
    original tree.
    """
    values = {"/".join(keys): leaf for keys, leaf in flatten(original_tree).by_keys.items()}
    new = flatten(new_tree)
    origins = origins_of(new, values, rules_of(transformations), default_to_original)
    return transformed(new, origins, values, original_tree)


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """Merge the leaves of several trees. At one path the last tree wins.

    Without a target the result has dicts alone, and no empty nodes.
    """
    found: dict[Keys, Any] = {}
    for tree in trees:
        found.update(_leaves(tree))
    return _as_tree(found, target)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """Return the leaves at paths that all trees have, with the values of the last one."""
    flats = [_leaves(tree) for tree in trees]
    common = set(flats[0]).intersection(*flats[1:])
    return _as_tree({keys: leaf for keys, leaf in flats[-1].items() if keys in common}, target)


def _leaves(tree: Any) -> dict[Keys, Any]:
    """Return the leaves of a tree by their keys, without empty nodes."""
    return {keys: leaf for keys, leaf in flatten(tree).by_keys.items() if not is_empty(leaf)}


def _as_tree(found: dict[Keys, Any], target: Any) -> Any:
    if target is None:
        return _nested(found)
    flat = flatten(target)
    return flat.rebuild(found[keys] for keys in flat.keys)
