"""Pytrees to leaves and back: the only place that captures values.

A tree is parsed into branches and leaves, each leaf at a path such as `model/layers/0/kernel`. The
same parse serves a save (leaves become specs and values) and a restore (the leaves of `like` say
what is wanted, its branches how to put the result together).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ostraka._document import ROOT, SCALARS, Branch, Leaf, Stateful, encode_value, join, segment
from ostraka._nnx import named_spec, parse_nnx
from ostraka.errors import InvalidTree


def parse(tree: Any) -> Branch | Leaf:
    """Take a tree apart. Raises InvalidTree, naming the path, for keys that can't be written."""
    return _parse(tree, "")


def is_array(value: Any) -> bool:
    """Whether a leaf goes into shard files, rather than into `_METADATA`."""
    return isinstance(value, jax.Array | np.ndarray | np.generic) and not isinstance(
        value, np.ma.MaskedArray
    )


def is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _parse(value: Any, path: str) -> Branch | Leaf:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return _parse_dict(cast("dict[Any, Any]", value), path)
    if kind is list or kind is tuple:
        items = tuple(_parse(v, join(path, str(i))) for i, v in enumerate(value))
        return Branch({kind.__name__: None}, items, kind)
    if value is None or kind in SCALARS or is_array(value) or _is_abstract(value):
        return Leaf(path or ROOT, value)
    found = parse_nnx(value, path, _parse)
    if found is not None:
        return found
    if callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None)):
        return Leaf(path or ROOT, Stateful(value, None))
    return _parse_registered(value, path)


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _parse_dict(value: dict[Any, Any], path: str) -> Branch:
    keys = list(value)
    for key in keys:
        if type(key) not in (str, int):
            raise InvalidTree(
                f"the dict at {path or ROOT!r} has the key {key!r} of type {type(key).__name__}; "
                "keys must be str or int"
            )
    children = tuple(_parse(v, join(path, segment(k, path))) for k, v in value.items())
    kind = type(value)

    def rebuild(items: list[Any]) -> Any:
        return kind(zip(keys, items, strict=True))

    name = "dict" if kind is dict else "ordered_dict"
    return Branch({name: keys}, children, rebuild)


def _parse_registered(value: Any, path: str) -> Branch | Leaf:
    """Anything else that JAX knows how to flatten: namedtuples, dataclasses, custom nodes."""
    kind = type(value)
    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    if len(pairs) == 1 and pairs[0][1] is value:
        return Leaf(path or ROOT, value)
    names = [_key_of(keys[0]) for keys, _ in pairs]
    children = tuple(
        _parse(child, join(path, segment(name, path)))
        for name, (_, child) in zip(names, pairs, strict=True)
    )

    if _is_linen_box(value) and isinstance(children[0], Leaf):
        about = {"sharding": value.names, "sharding_rules": getattr(value, "rules", None)}
        children = (Leaf(children[0].path, children[0].value, named_spec(about)),)

    def rebuild(items: list[Any]) -> Any:
        return jax.tree_util.tree_unflatten(treedef, items)

    where = [kind.__module__, kind.__qualname__]
    described: dict[str, Any] = {"node": where, "keys": names}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        described = {"namedtuple": where, "keys": names}
    elif dataclasses.is_dataclass(value):
        static = {
            field.name: encode_value(Leaf(field.name, getattr(value, field.name)))
            for field in dataclasses.fields(value)
            if field.name not in names
            and isinstance(getattr(value, field.name, ...), (*SCALARS, type(None)))
        }
        described = {"dataclass": where, "keys": names, "static": static}
    return Branch(described, children, rebuild)


def _is_linen_box(value: Any) -> bool:
    """Whether Linen has put a value into a box that names its axes."""
    meta: Any = sys.modules.get("flax.core.meta")
    return meta is not None and isinstance(value, meta.Partitioned)


def _key_of(key: Any) -> str | int:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            found = getattr(key, attribute)
            return found if isinstance(found, int) else str(found)
    return str(key)


def check_savable(leaf: Leaf) -> None:
    """Raise InvalidTree for values that look like arrays and have no values to save."""
    if _is_abstract(leaf.value):
        raise InvalidTree(
            f"leaf {leaf.path!r} is abstract ({leaf.value}): it has no values to save"
        )
    if isinstance(leaf.value, Tracer):
        raise InvalidTree(
            f"leaf {leaf.path!r} is a traced value: call save outside of jit and other transforms"
        )
    if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
        raise InvalidTree(
            f"leaf {leaf.path!r} has been deleted or donated: its values are gone; save the arrays "
            "that the step returned"
        )
