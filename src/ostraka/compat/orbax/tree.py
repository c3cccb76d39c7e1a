"""Trees as flat dicts, as nested dicts, as shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._tree import flatten, is_empty, key_text, nest
from ostraka.compat.orbax.transform_utils import merge_trees as merge_trees

PyTree = PyTreeKey = PyTreePath = Any
PyTreeOf = Any


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
        return nest((tuple(keys), (False,) * len(keys), leaf) for keys, leaf in split.items())
    flat = flatten(target)
    return flat.rebuild(split.get(keys, leaf) for keys, leaf in flat.by_keys.items())


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Return a tree as nested dicts and lists with string keys."""
    flat = flatten(tree)
    entries = zip(flat.keys, flat.in_sequence, flat.leaves, strict=True)
    return nest(entry for entry in entries if keep_empty_nodes or not is_empty(entry[2]))


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


def tree_difference(a: Any, b: Any) -> Any:
    """Return the leaves that only one of two trees has, by path. None if there are none."""
    first, second = flatten(a).by_keys, flatten(b).by_keys
    keys = sorted(first.keys() ^ second.keys())
    return {"/".join(k): (first.get(k), second.get(k)) for k in keys} or None
