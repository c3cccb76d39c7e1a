"""Pytrees to leaves and back: the only place that captures values.

A tree is parsed into branches and leaves, each leaf at a path such as `model/layers/0/kernel`. The
same parse serves a save (leaves become specs and values) and a restore (the leaves of `like` say
what is wanted, its branches how to put the result together).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ostraka.errors import InvalidTree
from ostraka.live.nnx import named_spec, parse_nnx
from ostraka.tree.json_tree import builder, encode_factory
from ostraka.tree.json_values import SCALARS, class_name, encode_writable, mro_lookup
from ostraka.tree.nodes import (
    MAX_DEPTH,
    ROOT,
    Branch,
    BranchKind,
    Kept,
    Leaf,
    Node,
    Stateful,
    join,
    segment,
)

_NUMPY = (np.ndarray, np.generic)
_OBJECTS = (jax.Array, np.ndarray)
_PLAIN = frozenset((type(None), *SCALARS))
BUILTIN: Mapping[type, BranchKind] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    defaultdict: "defaultdict",
    list: "list",
    tuple: "tuple",
}


def parse(tree: Any) -> Node:
    """Take a tree apart. Raises InvalidTree, with the path, if it can't be parsed."""
    return _parse(tree, "", 0)


def is_array(value: Any) -> bool:
    """True if a leaf goes into shard files, False if it goes into `_METADATA`."""
    if isinstance(value, jax.Array):
        return True
    return isinstance(value, _NUMPY) and not isinstance(value, np.ma.MaskedArray)


def is_object(value: Any) -> bool:
    """True for arrays that a tree may share: the same object at two paths is saved once."""
    return isinstance(value, _OBJECTS)


def is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or isinstance(dtype, np.dtype):
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _parse(value: Any, path: str, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise InvalidTree(
            f"the tree is more than {MAX_DEPTH} containers deep at {path[:80]!r}…: does one of "
            "them contain itself?"
        )
    kind = type(value)
    if kind in BUILTIN:
        return _parse_builtin(value, path, depth)
    if kind in _PLAIN or is_array(value) or isinstance(value, jax.ShapeDtypeStruct):
        return Leaf(path or ROOT, value)
    if (found := parse_nnx(value, path, depth, _parse)) is not None:
        return found
    # On the type: asking the value itself may run any code, or be answered whatever the name.
    if all(callable(mro_lookup(kind, name)) for name in ("get_state", "set_state")):
        return Leaf(path or ROOT, Stateful(value))
    return _parse_registered(value, path, depth)


def _parse_builtin(value: Any, path: str, depth: int) -> Branch:
    kind = BUILTIN[type(value)]
    items: dict[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
    children = [_parse(v, join(path, segment(k, path)), depth + 1) for k, v in items.items()]
    about: dict[str, Any] = {}
    if isinstance(value, defaultdict):
        about = {"factory": encode_factory(value.default_factory, path)}
    keys = list(items)
    return Branch(kind, path, tuple(children), builder(kind, None, keys, about), keys, about=about)


def _parse_registered(value: Any, path: str, depth: int) -> Node:
    """Parse anything else that JAX can flatten: namedtuples, dataclasses, custom nodes."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    if len(pairs) == 1 and pairs[0][1] is value:
        return _parse_unknown(value, path)
    names = [_key_of(keys[0]) for keys, _ in pairs]
    paths = [join(path, segment(name, path)) for name in names]
    below = zip(paths, pairs, strict=True)
    children = tuple([_parse(child, inner, depth + 1) for inner, (_, child) in below])
    meta: Any = sys.modules.get("flax.core.meta")
    is_linen_box = meta is not None and isinstance(value, meta.Partitioned)
    if is_linen_box and isinstance(children[0], Leaf):  # It names the axes of its value.
        about = {"sharding": value.names, "sharding_rules": getattr(value, "rules", None)}
        children = (replace(children[0], spec=named_spec(about)),)

    rebuild = partial(jax.tree_util.tree_unflatten, treedef)
    cls = class_name(type(value))
    if isinstance(value, tuple) and mro_lookup(type(value), "_fields") is not None:
        return Branch("namedtuple", path, children, rebuild, names, cls)
    if dataclasses.is_dataclass(value):
        static: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            if field.name not in names:
                with suppress(Exception):  # A field without a value: classes raise what they like.
                    static[field.name] = getattr(value, field.name)
        written = encode_writable(static)
        if children or len(written) == len(static):
            about = {"static": written}
            return Branch("dataclass", path, children, rebuild, names, cls, about)
    if not children and mro_lookup(type(value), "__len__") is None:
        # All there is to it only the template has, such as the GraphDef of a module.
        return Leaf(path or ROOT, Kept(value, ".".join(cls), is_structure=True))
    return Branch("node", path, children, rebuild, names, cls)


def _parse_unknown(value: Any, path: str) -> Leaf:
    """Parse a JAX leaf that is no array. A function is left to the template."""
    if isinstance(value, type):
        raise InvalidTree(
            f"the tree has the class {value.__qualname__} itself at {path or ROOT!r}, not an "
            f"instance of it: did you mean {value.__name__}(…)?"
        )
    if callable(value):
        name = text_at(value, "__qualname__") or type(value).__qualname__
        module = text_at(value, "__module__") or type(value).__module__
        return Leaf(path or ROOT, Kept(value, f"{module}.{name}", is_structure=False))
    return Leaf(path or ROOT, value)


def text_at(value: Any, name: str) -> str | None:
    """An attribute that is a string, or None."""
    with suppress(Exception):
        found = getattr(value, name)
        return found if isinstance(found, str) else None
    return None


def _key_of(key: Any) -> Any:
    found = [getattr(key, name) for name in ("key", "idx", "name") if hasattr(key, name)]
    return found[0] if found else str(key)
