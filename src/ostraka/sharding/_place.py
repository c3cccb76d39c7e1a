"""Put a tree onto a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from ostraka._nodes import Branch, Leaf, leaves_of, rebuild, unwrapped
from ostraka._tree import is_key, parse
from ostraka.errors import InvalidTree
from ostraka.sharding._check import resolve_checked
from ostraka.sharding._data import ArrayLeaf, array_leaves, parse_state
from ostraka.sharding._findings import Finding, raise_errors
from ostraka.sharding._mesh import as_mesh, mesh_spec, mesh_to_use, refuse_swapped


def place(tree: Any, mesh: Mesh | Mapping[str, int], specs: Any, *, explicit: bool = False) -> Any:
    """The same tree with every array on the mesh, cut as `specs` say.

    Modules and optimizers come back as such; the ones given are left as they are. numpy arrays
    become JAX arrays, abstract ones get a sharding, other values stay. `specs` is a tree as
    `spec_tree` makes it, or rules as it takes them. Nothing is placed if anything does not fit:
    InvalidSharding lists all of it. Of several processes every one calls this, with the same values
    in arrays that are its own.

    `mesh` may be axis sizes, of which `make_mesh` makes one. If it has Explicit axes, the arrays
    are placed on the same devices with Auto ones, with a warning, unless `explicit` is true: only
    models that are written for Explicit axes run under them.

        model = place(model, mesh, fsdp("data"))
    """
    refuse_swapped("place(tree, mesh, specs)", specs)
    parsed = parse(tree)
    given = as_mesh(mesh)
    found, findings = resolve_checked(parse_state(tree), given, specs)
    findings += _narrowed(parsed)
    raise_errors(f"can't place the tree on the mesh ({mesh_spec(given)})", findings)
    target = mesh_to_use(given, explicit=explicit)
    shardings = {path: NamedSharding(target, spec) for path, spec in found.items()}
    values = {leaf.path: unwrapped(leaf.value) for leaf in leaves_of(parsed)}
    arrays = list(array_leaves(parsed))
    values.update(_place_leaves(arrays, shardings))
    return rebuild(parsed, values)


def _place_leaves(leaves: list[ArrayLeaf], shardings: dict[str, NamedSharding]) -> dict[str, Any]:
    abstract = [leaf for leaf in leaves if isinstance(leaf.value, jax.ShapeDtypeStruct)]
    concrete = [leaf for leaf in leaves if not isinstance(leaf.value, jax.ShapeDtypeStruct)]
    placed = put([leaf.value for leaf in concrete], [shardings[leaf.path] for leaf in concrete])
    return {
        **{leaf.path: array for leaf, array in zip(concrete, placed, strict=True)},
        **{
            leaf.path: jax.ShapeDtypeStruct(
                leaf.shape, leaf.value.dtype, sharding=shardings[leaf.path]
            )
            for leaf in abstract
        },
    }


def put(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    """Put arrays onto meshes, also onto ones that reach over several processes."""
    # JAX can put keys only onto devices of this process, but their words onto any.
    impls = [
        jax.random.key_impl(array) if is_key(array) and not sharding.is_fully_addressable else None
        for array, sharding in zip(arrays, shardings, strict=True)
    ]
    words = [
        array if impl is None else jax.random.key_data(array)
        for array, impl in zip(arrays, impls, strict=True)
    ]
    return [
        array if impl is None else jax.random.wrap_key_data(array, impl=impl)
        for array, impl in zip(_device_put(words, shardings), impls, strict=True)
    ]


def _device_put(arrays: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    try:
        return jax.device_put(arrays, shardings)
    except AssertionError as error:
        raise InvalidTree(
            "can't place the tree: an array that each process has for itself is not the same on "
            "all of them; make it the same, or use jax.make_array_from_process_local_data"
        ) from error


def _narrowed(parsed: Branch | Leaf) -> Iterator[Finding]:
    """Errors for numpy arrays whose dtype JAX would silently change."""
    for leaf in array_leaves(parsed):
        if isinstance(leaf.value, jax.Array | jax.ShapeDtypeStruct) or is_key(leaf.value):
            continue
        dtype = np.dtype(leaf.value.dtype)
        becomes = jax.dtypes.canonicalize_dtype(dtype)
        if becomes != dtype:
            yield Finding(
                "error",
                leaf.path,
                f"leaf {leaf.path!r} is {dtype} and would become {becomes}: cast it, or turn on "
                "jax_enable_x64",
            )
