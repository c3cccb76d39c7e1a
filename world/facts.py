"""What a state is, leaf by leaf, as plain data that processes can compare.

Taken with JAX and Flax alone, so that it does not believe what Ostraka does.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

Facts = dict[str, Any]
_SHOWN = 3


def facts_of(tree: Any) -> Facts:
    """Values, types, commitment, weak types, and what is one object at several places."""
    places: dict[int, list[str]] = defaultdict(list)
    leaves: dict[str, dict[str, Any]] = {}
    kept: list[Any] = []  # an id is only that of one object while the object lives
    for path, value in _walk(tree):
        if isinstance(value, nnx.Variable | jax.Array | np.ndarray):
            kept.append(value)
            kind = "variable" if isinstance(value, nnx.Variable) else "array"
            places[id(value)].append(f"{kind} {path}")
        if not isinstance(value, nnx.Variable):
            leaves[path] = _leaf(value)
    shared = sorted(sorted(paths) for paths in places.values() if len(paths) > 1)
    return {"leaves": leaves, "shared": shared}


def adopt(fresh: Any, restored: Any) -> Any:
    """The new tree with the leaves that came back, each under its path."""
    found = dict(_walk(restored))
    flat, structure = jax.tree_util.tree_flatten_with_path(fresh)
    return jax.tree.unflatten(structure, [found["/".join(map(_name, keys))] for keys, _ in flat])


def _walk(tree: Any) -> Iterator[tuple[str, Any]]:
    """Variables, and every leaf, those of variables included."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)
    for keys, value in flat:
        path = "/".join(_name(key) for key in keys)
        yield path, value
        if isinstance(value, nnx.Variable):
            below, _ = jax.tree_util.tree_flatten_with_path(value.get_raw_value())
            for more, leaf in below:
                yield "/".join([path, *(_name(key) for key in more)]), leaf


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def _name(key: Any) -> str:
    match key:
        case DictKey(name) | FlattenedIndexKey(name):
            return str(name)
        case SequenceKey(index):
            return str(index)
        case GetAttrKey(name):
            return name
        case _:
            return str(key)


def _leaf(value: Any) -> dict[str, Any]:
    if isinstance(value, jax.Array):
        return _array(value)
    if isinstance(value, np.ndarray | np.generic):
        return {"type": "numpy", "dtype": value.dtype.name, **_bytes(np.asarray(value))}
    if hasattr(value, "get_state") and hasattr(value, "set_state"):
        return {"type": type(value).__name__, "value": repr(value.get_state())}
    if callable(value):
        return {"type": "function", "value": getattr(value, "__qualname__", type(value).__name__)}
    return {"type": type(value).__name__, "value": repr(value)}


def _array(array: jax.Array) -> dict[str, Any]:
    about: dict[str, Any] = {
        "type": "jax",
        "committed": array.committed,
        "weak": array.aval.weak_type,
    }
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = np.asarray(jax.random.key_data(array))
        return {**about, "dtype": str(array.dtype), **_bytes(words)}
    return {**about, "dtype": array.dtype.name, **_bytes(np.asarray(array))}


def _bytes(array: np.ndarray) -> dict[str, Any]:
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
    about: dict[str, Any] = {"shape": list(array.shape), "value": digest}
    # A template may ask for a plain number where training has left an array.
    return {**about, "number": repr(array.item())} if array.ndim == 0 else about


def compare(
    expected: Facts, found: Facts, where: str, *, ignore: tuple[str, ...] = ()
) -> list[str]:
    """In what they differ, shortly; nothing if they don't."""
    problems = _compare_paths(expected["leaves"], found["leaves"])
    for aspect in ("type", "dtype", "shape", "value", "weak", "committed"):
        if aspect not in ignore:
            problems += _compare_aspect(aspect, expected["leaves"], found["leaves"])
    if "shared" not in ignore and expected["shared"] != found["shared"]:
        problems.append(f"one object: {expected['shared'][:2]}, now {found['shared'][:2]}")
    return [f"{where}: {problem}" for problem in problems]


def _compare_paths(expected: Facts, found: Facts) -> list[str]:
    lost = [path for path in expected if path not in found]
    added = [path for path in found if path not in expected]
    return [
        f"{len(paths)} leaves {what}: {paths[:_SHOWN]}"
        for what, paths in (("are gone", lost), ("are new", added))
        if paths
    ]


def _compare_aspect(aspect: str, expected: Facts, found: Facts) -> list[str]:
    different = [
        (path, leaf.get(aspect), found[path].get(aspect))
        for path, leaf in expected.items()
        if path in found and leaf.get(aspect) != found[path].get(aspect)
    ]
    if not different:
        return []
    shown = "; ".join(f"{path}: {was}, now {now}" for path, was, now in different[:_SHOWN])
    return [f"{aspect} of {len(different)} leaves: {shown}"]


def as_in(template: Facts, expected: Facts) -> Facts:
    """What a restore with a template gives: saved values, its types of numbers, its commitment."""
    return {
        "leaves": {
            path: _as_leaf(template["leaves"].get(path, leaf), leaf)
            for path, leaf in expected["leaves"].items()
        },
        "shared": expected["shared"],
    }


def once(expected: Facts, found: Facts) -> Facts:
    """Without the further places of a tied variable, which `nnx.state` has at one of them only."""
    repeated: set[str] = set()
    for places in expected["shared"]:
        paths = [place.removeprefix("variable ") for place in places]
        if any(path in found["leaves"] for path in paths):
            repeated.update(path for path in paths if path not in found["leaves"])
    leaves = {path: leaf for path, leaf in expected["leaves"].items() if path not in repeated}
    return {**expected, "leaves": leaves}


def _as_leaf(template: dict[str, Any], leaf: dict[str, Any]) -> dict[str, Any]:
    if "number" in leaf and template["type"] in ("int", "float", "bool"):
        return {"type": template["type"], "value": leaf["number"]}
    if template["type"] == "numpy":
        return {k: v for k, v in leaf.items() if k not in ("committed", "weak")} | {"type": "numpy"}
    if template["type"] == "jax" and leaf["type"] in ("jax", "numpy"):
        weak = leaf.get("weak", template["weak"])
        return {**leaf, "type": "jax", "weak": weak, "committed": template["committed"]}
    return leaf
