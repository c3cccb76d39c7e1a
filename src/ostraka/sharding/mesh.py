"""Meshes of callers, as data or as devices, and the types of their axes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ostraka.errors import InvalidSharding, count_of, warn_caller
from ostraka.layout.spec import MeshSpec
from ostraka.live.shardings import Devices, describe_mesh

AnyMesh = Mesh | AbstractMesh | Mapping[str, int]
"""A mesh, or the sizes of its axes."""


class ExplicitAxes(UserWarning):
    """Warns that a mesh has Explicit axes. Only models that are written for them run under them."""


def make_mesh(mesh: Mapping[str, int] | Mesh) -> Mesh:
    """Make a mesh of Auto axes, under which any model trains.

    Under Auto axes XLA works out the shardings of results. Meshes of `jax.make_mesh` have Explicit
    axes, under which each operation must say how its result is sharded.

    Args:
        mesh: Axis sizes, or a mesh. Given axis sizes, uses the first devices. Given a mesh, uses
            the same devices.

    Returns:
        The mesh.

    Raises:
        InvalidSharding: There are fewer devices than the mesh needs, or a size is less than 1.
        TypeError: `mesh` is neither a mesh nor axis sizes by name.

    Example:
        >>> mesh = make_mesh({"data": 4, "model": 2})
    """
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)
    sizes = _sizes_of(mesh)
    count = prod(sizes.values())
    if count > jax.device_count():
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        remedy = f"; to simulate them on CPU, set {flag}" if jax.default_backend() == "cpu" else ""
        raise InvalidSharding(
            f"the mesh ({_shown(sizes)}) needs {count_of(count, 'device')}, but JAX sees "
            f"{jax.device_count():,}{remedy}"
        )
    auto = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=devices)


def mesh_spec(mesh: AnyMesh | None) -> MeshSpec:
    """Return a mesh as data. None means the mesh of `jax.set_mesh`."""
    if mesh is None:
        current: Any = jax.sharding.get_abstract_mesh()
        if not current.axis_names:
            raise InvalidSharding(
                "these rules need the sizes of the mesh's axes: give mesh=, or call under "
                "jax.set_mesh(mesh)"
            )
        mesh = current
    if isinstance(mesh, Mesh):
        return describe_mesh(mesh, Devices())
    sizes = _sizes_of(mesh)
    return MeshSpec(tuple(sizes), tuple(sizes.values()), tuple(range(prod(sizes.values()))))


def as_mesh(mesh: Any) -> Mesh:
    """Return a mesh of devices, made from axis sizes. None means the mesh of `jax.set_mesh`."""
    if mesh is None:
        mesh = jax.sharding.get_mesh()
    if isinstance(mesh, AbstractMesh) or (isinstance(mesh, Mesh) and mesh.empty):
        raise InvalidSharding(
            "the mesh has no devices to put arrays on: give a jax.sharding.Mesh, or axis sizes "
            'such as {"data": 4, "model": 2}'
        )
    return mesh if isinstance(mesh, Mesh) else make_mesh(mesh)


def mesh_to_use(mesh: Mesh, *, explicit: bool) -> Mesh:
    """Return `mesh`, with Auto axes unless Explicit ones are wanted or set.

    An unannotated model fails under Explicit axes in its first step. But if `jax.set_mesh` has set
    a mesh with such axes, JAX refuses arrays of any other mesh.
    """
    if explicit or not has_explicit_axes(mesh):
        return mesh
    is_set = has_explicit_axes(jax.sharding.get_abstract_mesh())
    made = f"sharding.make_mesh({dict(mesh.shape)!r})"
    result = (
        f"They stay, since jax.set_mesh has set such a mesh: set {made} to train any model"
        if is_set
        else "The arrays are put on the same devices with Auto axes, which do not mix with others: "
        f"use mesh = {made} here and for batches"
    )
    warn_caller(
        ExplicitAxes(
            f"the mesh ({mesh_spec(mesh)}) has Explicit axes, as those of jax.make_mesh are, under "
            f"which only models run that are written for them. {result}; explicit=True says that "
            "they are meant"
        )
    )
    return mesh if is_set else make_mesh(mesh)


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def refuse_swapped(call: str, specs: Any) -> None:
    """Raise TypeError if a mesh is given where specs belong."""
    is_mesh = isinstance(specs, Mesh | AbstractMesh)
    if isinstance(specs, Mapping):
        sizes = list(cast("Mapping[Any, Any]", specs).values())
        is_mesh = bool(sizes) and all(type(size) is int for size in sizes)
    if is_mesh:
        found = _shown(_sizes_of(specs))
        raise TypeError(f"the mesh ({found}) is given where specs belong: the order is {call}")


def _sizes_of(mesh: Any) -> dict[str, int]:
    if isinstance(mesh, Mesh | AbstractMesh):
        return {str(name): size for name, size in mesh.shape.items()}
    if not isinstance(mesh, Mapping):
        example = '{"data": 4, "model": 2}'
        raise TypeError(
            f"mesh is {mesh!r}, sizes without names: name the axes, as in {example}"
            if isinstance(mesh, tuple | list | int)
            else f"mesh is a {type(mesh).__name__}; it must be a jax.sharding.Mesh, or axis sizes "
            f"such as {example}"
        )
    sizes: Mapping[Any, Any] = mesh
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise InvalidSharding(
                f"the mesh axis {name!r} has the size {size!r}; it must be at least 1"
            )
    return {str(name): size for name, size in sizes.items()}


def _shown(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
