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
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ostraka._document import builder, encode_factory
from ostraka._nnx import named_spec, parse_nnx
from ostraka._nodes import (
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
from ostraka._plain import SCALARS, class_name, encode_writable
from ostraka.errors import InvalidTree

_NUMPY = (np.ndarray, np.generic)
_OBJECTS = (jax.Array, np.ndarray)
_PLAIN = frozenset((type(None), *SCALARS))
_MOST_DIMENSIONS = 63
"""One fewer than numpy has: of an array that each process has, the process is one more."""
_BUILTIN: Mapping[type, BranchKind] = {
    dict: "dict",
    OrderedDict: "ordered_dict",
    defaultdict: "defaultdict",
    list: "list",
    tuple: "tuple",
}


def parse(tree: Any) -> Node:
    """Take a tree apart. Raises InvalidTree, naming the path, for what is no tree."""
    return _parse(tree, "", 0)


def is_array(value: Any) -> bool:
    """Whether a leaf goes into shard files, rather than into `_METADATA`."""
    if isinstance(value, jax.Array):
        return True
    return isinstance(value, _NUMPY) and not isinstance(value, np.ma.MaskedArray)


def is_object(value: Any) -> bool:
    """Whether a leaf is an array whose identity counts: the same one elsewhere is the same."""
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
    if kind in _BUILTIN:
        return _parse_builtin(value, path, depth)
    if kind in _PLAIN or is_array(value) or isinstance(value, jax.ShapeDtypeStruct):
        return Leaf(path or ROOT, value)
    found = parse_nnx(value, path, depth, _parse)
    if found is not None:
        return found
    if callable(getattr(value, "get_state", None)) and callable(getattr(value, "set_state", None)):
        if isinstance(value, type):
            raise _is_a_class(value, path)
        return Leaf(path or ROOT, Stateful(value))
    return _parse_registered(value, path, depth)


def _parse_builtin(value: Any, path: str, depth: int) -> Branch:
    kind = _BUILTIN[type(value)]
    items: dict[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
    children = [_parse(v, join(path, segment(k, path)), depth + 1) for k, v in items.items()]
    about: dict[str, Any] = {}
    if isinstance(value, defaultdict):
        about = {"factory": encode_factory(value.default_factory, path)}
    keys = list(items)
    return Branch(kind, path, tuple(children), builder(kind, None, keys, about), keys, about=about)


def _parse_registered(value: Any, path: str, depth: int) -> Node:
    """Anything else that JAX knows how to flatten: namedtuples, dataclasses, custom nodes."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    if len(pairs) == 1 and pairs[0][1] is value:
        return _parse_unknown(value, path)
    names = [_key_of(keys[0]) for keys, _ in pairs]
    children = tuple(
        [
            _parse(child, join(path, segment(name, path)), depth + 1)
            for name, (_, child) in zip(names, pairs, strict=True)
        ]
    )

    if _is_linen_box(value) and isinstance(children[0], Leaf):
        about = {"sharding": value.names, "sharding_rules": getattr(value, "rules", None)}
        children = (replace(children[0], spec=named_spec(about)),)

    rebuild = partial(jax.tree_util.tree_unflatten, treedef)
    cls = class_name(type(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Branch("namedtuple", path, children, rebuild, names, cls)
    if dataclasses.is_dataclass(value):
        static = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.name not in names and hasattr(value, field.name)
        }
        written = encode_writable(static)
        if children or len(written) == len(static):
            about = {"static": written}
            return Branch("dataclass", path, children, rebuild, names, cls, about)
    if not children and not hasattr(value, "__len__"):
        # All there is to it only the template has, such as the GraphDef of a module.
        return Leaf(path or ROOT, Kept(value, ".".join(cls), is_structure=True))
    return Branch("node", path, children, rebuild, names, cls)


def _parse_unknown(value: Any, path: str) -> Leaf:
    """What JAX takes for a leaf and is no array: a function is left to the template."""
    if isinstance(value, type):
        raise _is_a_class(value, path)
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        module = getattr(value, "__module__", None) or type(value).__module__
        return Leaf(path or ROOT, Kept(value, f"{module}.{name}", is_structure=False))
    return Leaf(path or ROOT, value)


def _is_a_class(kind: type, path: str) -> InvalidTree:
    return InvalidTree(
        f"the tree has the class {kind.__qualname__} itself at {path or ROOT!r}, not an instance "
        f"of it: make one, as in {kind.__name__}(…)"
    )


def _is_linen_box(value: Any) -> bool:
    """Whether Linen has put a value into a box that names its axes."""
    meta: Any = sys.modules.get("flax.core.meta")
    return meta is not None and isinstance(value, meta.Partitioned)


def _key_of(key: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def check_savable(leaf: Leaf) -> None:
    """Raise InvalidTree for values that look like arrays and have no values to save."""
    value = leaf.value
    if isinstance(value, Tracer):
        raise InvalidTree(
            f"leaf {leaf.path!r} is a traced value: call save outside of jit and other transforms"
        )
    if isinstance(value, jax.Array):
        if value.is_deleted():
            raise InvalidTree(
                f"leaf {leaf.path!r} has been deleted or donated: its values are gone; save the "
                "arrays that the step returned"
            )
    elif isinstance(value, np.ndarray):
        if value.ndim > _MOST_DIMENSIONS:
            raise InvalidTree(
                f"leaf {leaf.path!r} has {value.ndim} dimensions; at most {_MOST_DIMENSIONS} can "
                "be saved"
            )
        if type(value) not in (np.ndarray, np.memmap):
            raise InvalidTree(
                f"leaf {leaf.path!r} is a {'.'.join(class_name(type(value)))}, which would come "
                "back as a plain numpy array: save np.asarray(…) of it"
            )
    elif isinstance(value, jax.ShapeDtypeStruct):
        raise InvalidTree(f"leaf {leaf.path!r} is abstract ({value}): it has no values to save")
