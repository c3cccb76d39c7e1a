"""A checkpoint as abstract state: the shapes, dtypes and shardings of its arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from ostraka.common.dtypes import numpy_dtype
from ostraka.errors import InvalidSharding, UnsupportedFormat
from ostraka.formats.source import Source
from ostraka.layout.spec import LeafSpec, iter_misfits
from ostraka.live.shardings import Devices, describe_mesh, spec_entries
from ostraka.sharding.mesh import as_mesh
from ostraka.sharding.specs import array_leaf, from_partition, resolve, to_spec
from ostraka.tree.nodes import (
    ArrayNumber,
    Kept,
    Node,
    UnreadableLeaf,
    at_path,
    branches_of,
    check_unique,
    leaves_of,
    nested_tree,
    prune,
    rebuild,
)

_NAMED = 3
"""The most misfits that a message lists."""


def abstract_state(source: Source, within: str, mesh: Any, specs: Any) -> Any:
    """The part of a checkpoint at a path, as `Checkpoint.abstract` describes it."""
    tree = prune(_part(source.tree, within), lambda leaf: not isinstance(leaf.value, Kept))
    if tree is None:
        return {}
    leaves = list(leaves_of(tree))
    check_unique(leaves)
    arrays = {
        leaf.path: source.saved.leaves[leaf.value.number]
        for leaf in leaves
        if isinstance(leaf.value, ArrayNumber)
    }
    shardings: Mapping[str, Any] = {}
    if mesh is not None or specs is not None:
        known = [leaf.path for leaf in leaves]
        shardings = _shardings(source, arrays, as_mesh(mesh), specs, known)
    blanks: dict[int, Any] = {}
    """By number: an array that the tree has at several paths stays one."""
    values: dict[str, Any] = {}
    for leaf in leaves:
        path, value = leaf.path, leaf.value
        if isinstance(value, ArrayNumber) and arrays[path].kind in ("numpy", "scalar"):
            value = blanks.setdefault(value.number, _blank(arrays[path]))
        elif isinstance(value, ArrayNumber):
            value = _shape_of(source, arrays[path], shardings.get(path))
        elif isinstance(value, UnreadableLeaf):
            raise UnsupportedFormat(
                f"leaf {path!r} of {source.location} can't be read: {value.why}; take a part of "
                'the checkpoint without it, such as checkpoint["model"]'
            )
        values[path] = value
    return rebuild(tree, values)


def _part(tree: Node, within: str) -> Node:
    """The part of a tree at a path, as a tree by itself."""
    if not within:
        return tree
    for branch in branches_of(tree):
        if branch.path == within:
            return at_path(branch, "")
    # The tree of other formats may have all leaves in one dict, whatever their paths.
    below = {
        leaf.path.removeprefix(f"{within}/"): ("", leaf.value)
        for leaf in leaves_of(tree)
        if leaf.path.startswith(f"{within}/")
    }
    return nested_tree(below)


def _blank(leaf: LeafSpec) -> Any:
    """A template in host memory that takes no memory."""
    zero = np.zeros((), numpy_dtype(leaf.dtype))
    return zero[()] if leaf.kind == "scalar" else np.broadcast_to(zero, leaf.logical_shape)


def _shape_of(source: Source, leaf: LeafSpec, sharding: Any) -> jax.ShapeDtypeStruct:
    dtype: Any = numpy_dtype(leaf.dtype)
    if leaf.kind == "key":
        dtype = _key_dtype(leaf.prng or "")
        if dtype is None:
            raise UnsupportedFormat(
                f"leaf {leaf.path!r} of {source.location} has keys of the generator {leaf.prng!r}, "
                "which JAX does not have: define it, and restore with a template that has its keys"
            )
    return jax.ShapeDtypeStruct(leaf.logical_shape, dtype, sharding=sharding, weak_type=leaf.weak)


@cache
def _key_dtype(generator: str) -> Any:
    """The dtype of keys, or None if JAX does not know the generator."""
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=generator)).dtype
    except (TypeError, ValueError):
        return None


def _shardings(
    source: Source, arrays: Mapping[str, LeafSpec], mesh: Mesh, specs: Any, known: Sequence[str]
) -> dict[str, Sharding]:
    """The shardings of JAX arrays on a mesh, by path: by `specs`, else by the saved specs."""
    on_devices = {path: leaf for path, leaf in arrays.items() if leaf.kind in ("jax", "key")}
    given: Mapping[str, Any] = {}
    problems: list[str] = []
    if specs is not None:
        shaped = [
            array_leaf(path, leaf.logical_shape, _shape_of(source, leaf, None), None)
            for path, leaf in on_devices.items()
        ]
        found = resolve(shaped, mesh, specs, known=known)
        given = found.specs
        problems += [finding.message for finding in found.unknown]
    described = describe_mesh(mesh, Devices())
    made: dict[str, Sharding] = {}
    for path, leaf in on_devices.items():
        if isinstance(given.get(path), Sharding):
            made[path] = given[path]
            continue
        axes = to_spec(path, given[path]) if path in given else from_partition(leaf.partition)
        entries = spec_entries(path, axes)
        misfits = [m.message for m in iter_misfits(path, leaf.logical_shape, described, entries)]
        problems += misfits
        if not misfits:
            made[path] = NamedSharding(mesh, axes, memory_kind=leaf.memory)
    if problems:
        more = f" and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise InvalidSharding(
            f"checkpoint {source.location} does not fit the mesh ({described}): "
            f"{'; '.join(problems[:_NAMED])}{more}; pass specs= for the axes of this mesh"
        )
    return made
