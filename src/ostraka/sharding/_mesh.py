"""Meshes from callers: converted to data or to devices, and the types of their axes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ostraka._capture import Devices
from ostraka._spec import MeshSpec
from ostraka.errors import InvalidSharding, count_of, warn_caller

AnyMesh = Mesh | AbstractMesh | Mapping[str, int]
"""A mesh, or the sizes of its axes."""


class ExplicitAxes(UserWarning):
    """A mesh has Explicit axes, under which only models run that are written for them."""


def make_mesh(mesh: Mapping[str, int] | Mesh) -> Mesh:
    """A mesh of Auto axes, under which any model trains: XLA works out how to compute.

    Of axis sizes it is made over the first devices there are; of a mesh over the same devices. What
    `jax.make_mesh` gives has Explicit axes, where each operation must say how its result is cut.

        mesh = make_mesh({"data": 4, "model": 2})
    """
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)
    sizes = _sizes_of(mesh)
    count = prod(sizes.values())
    if count > jax.device_count():
        raise InvalidSharding(
            f"the mesh ({_shown(sizes)}) has {count_of(count, 'device')}, and there are "
            f"{jax.device_count():,}"
        )
    auto = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto, devices=devices)


def mesh_spec(mesh: AnyMesh | None) -> MeshSpec:
    """A mesh as data; None means the one that `jax.set_mesh` has set."""
    if mesh is None:
        current: Any = jax.sharding.get_abstract_mesh()
        if not current.axis_names:
            raise InvalidSharding(
                "these rules need the sizes of the mesh's axes: give mesh=, or call under "
                "jax.set_mesh(mesh)"
            )
        mesh = current
    sizes = _sizes_of(mesh)
    if isinstance(mesh, Mesh):
        devices = Devices()
        numbers = tuple(devices.number(device) for device in mesh.devices.flat)
    else:
        numbers = tuple(range(prod(sizes.values())))
    return MeshSpec(tuple(sizes), tuple(sizes.values()), numbers)


def as_mesh(mesh: Any) -> Mesh:
    """A mesh of devices; axis sizes make one, and None means the one set by `jax.set_mesh`."""
    if mesh is None:
        mesh = jax.sharding.get_mesh()
    if isinstance(mesh, AbstractMesh) or (isinstance(mesh, Mesh) and mesh.empty):
        raise InvalidSharding(
            "the mesh has no devices to put arrays on: give a jax.sharding.Mesh, or axis sizes "
            'such as {"data": 4, "model": 2}'
        )
    return mesh if isinstance(mesh, Mesh) else make_mesh(mesh)


def mesh_to_use(mesh: Mesh, *, explicit: bool) -> Mesh:
    """The mesh to place arrays on: `mesh`, with Auto axes unless Explicit ones are wanted or set.

    A plain model fails under Explicit axes in its first step. But under a mesh with such axes, as
    `jax.set_mesh` has set it, JAX refuses arrays of any other.
    """
    if explicit or not has_explicit_axes(mesh):
        return mesh
    shown = mesh_spec(mesh)
    why = (
        f"the mesh ({shown}) has Explicit axes, as those of jax.make_mesh are, under which only "
        "models run that are written for them"
    )
    remedy = "; explicit=True says that they are meant"
    made = f"sharding.make_mesh({dict(mesh.shape)!r})"
    if has_explicit_axes(jax.sharding.get_abstract_mesh()):
        warn_caller(
            ExplicitAxes(
                f"{why}. They stay, since jax.set_mesh has set such a mesh: set {made} to train "
                f"any model{remedy}"
            )
        )
        return mesh
    warn_caller(
        ExplicitAxes(
            f"{why}. The arrays are put on the same devices with Auto axes, which do not mix with "
            f"others: use mesh = {made} here and for batches{remedy}"
        )
    )
    return make_mesh(mesh)


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
