"""Trees as flat dicts, as nested dicts, as shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax._tree import flatten, nest
from ostraka.compat.orbax.transform_utils import merge_trees as merge_trees

__getattr__ = refuse(__name__)

PyTree = Any


def to_flat_dict(
    tree: Any, sep: str | None = None, keep_empty_nodes: bool = False, is_leaf: Any = None
) -> dict[Any, Any]:
    """The leaves by the tuple of their keys; with `sep` by their keys joined."""
    found: list[Any]
    if keep_empty_nodes:
        flat = flatten(tree, is_leaf)
        found = list(zip(flat.keys, flat.leaves, strict=True))
    else:
        pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        found = [(_keys(path), leaf) for path, leaf in pairs]
    return {keys if sep is None else sep.join(keys): leaf for keys, leaf in found}


def _keys(path: Any) -> tuple[str, ...]:
    from ostraka.compat.orbax._tree import key_text

    return tuple(key_text(key) for key in path)


def from_flat_dict(flat_dict: Any, target: Any = None, sep: str | None = None) -> Any:
    """The tree of a flat dict: with `target` in its structure, else of nested dicts."""
    split = {
        (key if sep is None else tuple(str(key).split(sep))): leaf
        for key, leaf in flat_dict.items()
    }
    if target is None:
        return nest((tuple(keys), (False,) * len(keys), leaf) for keys, leaf in split.items())
    flat = flatten(target)
    return flat.rebuild(
        split.get(keys, leaf) for keys, leaf in zip(flat.keys, flat.leaves, strict=True)
    )


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Nested dicts and lists with keys that are text."""
    flat = flatten(tree)
    entries = zip(flat.keys, flat.in_sequence, flat.leaves, strict=True)
    from ostraka.compat.orbax._tree import is_empty

    return nest(entry for entry in entries if keep_empty_nodes or not is_empty(entry[2]))


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """The values of nested dicts and lists in the structure of `target`."""
    flat = flatten(target)
    results: list[Any] = []
    for keys, leaf in zip(flat.keys, flat.leaves, strict=True):
        node: Any = serialized
        for key in keys:
            if isinstance(node, list | tuple):
                node = node[int(key)]
            elif isinstance(node, Mapping):
                node = node.get(key)
        results.append(leaf if node is None else node)
    return flat.rebuild(results)


def to_shape_dtype_struct(tree: Any, dtype: Any = None, scalar_dtype: Any = None) -> Any:
    """Arrays as `jax.ShapeDtypeStruct` with their shardings; numbers as they are."""

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

    return jax.tree.map(abstract, getattr(tree, "tree", tree) if _is_meta(tree) else tree)


def _is_meta(tree: Any) -> bool:
    return type(tree).__name__ == "TreeMetadata"


def is_flat_dict(tree: Any) -> bool:
    return isinstance(tree, Mapping) and not any(isinstance(v, Mapping) for v in tree.values())


def get_param_names(item: Any) -> Any:
    """The same tree, each leaf the name that it has on disk: its keys with dots."""
    flat = flatten(item)
    return flat.rebuild(".".join(keys) for keys in flat.keys)


def tree_difference(a: Any, b: Any) -> Any:
    """Where two trees differ in their keys: a dict by path, of what each has. None if nowhere."""
    flats = [dict(zip(f.keys, f.leaves, strict=True)) for f in (flatten(a), flatten(b))]
    keys = sorted(flats[0].keys() ^ flats[1].keys())
    return {"/".join(k): (flats[0].get(k), flats[1].get(k)) for k in keys} or None
