"""Where the arrays of a restore go: shardings for them, and the boxes that this process needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ostraka._box import Box
from ostraka._capture import Devices, describe_mesh, describe_sharding, spec_entries
from ostraka._nodes import Leaf
from ostraka._plan_restore import needed_boxes
from ostraka._source import Saved
from ostraka._spec import (
    HOST_LOCAL,
    LeafSpec,
    MeshSpec,
    find_misfits,
    numpy_dtype,
)
from ostraka.sharding._data import ArrayLeaf
from ostraka.sharding._mesh import mesh_to_use
from ostraka.sharding._specs import resolve

_config: Any = jax.config
"""JAX's flags, which its type declarations leave out."""


class Placer:
    """Finds the sharding of each leaf."""

    def __init__(
        self,
        saved: Saved,
        *,
        mesh: Mesh | None,
        process: int,
        process_count: int,
    ):
        self._meshes = saved.meshes
        self._process_of = saved.process_of
        self._mesh = mesh
        self._said: Mapping[str, Any] = {}
        self._process = process
        self._process_count = process_count
        self._devices = Devices()
        self._settled: set[Any] = set()
        self._boxes: dict[Any, tuple[Box, ...]] = {}

    def resolve(
        self,
        leaves: Sequence[tuple[str, LeafSpec, Any]],
        specs: Any,
        like: Sequence[Any],
        known: Sequence[str],
        *,
        has_modules: bool,
    ) -> list[str]:
        """Find what `specs` says, and the mesh to use; returns what of `specs` means no leaf.

        `like` are the shardings that a template has, `known` the paths of all that was saved.
        """
        named = [sharding for sharding in like if isinstance(sharding, NamedSharding)]
        if has_modules:
            self._mesh = self._fitting_mesh([sharding.mesh for sharding in named])
        mesh = self._mesh or next((sharding.mesh for sharding in named), None)
        self._said, unknown = resolve_specs(leaves, specs, mesh, known)
        return unknown

    def _fitting_mesh(self, like: Sequence[Any]) -> Mesh | None:
        """The mesh that was given, with Auto axes if a model had such: under others it may fail."""
        types = [kind.name.lower() for mesh in like for kind in mesh.axis_types]
        if not like:
            saved = [mesh for mesh in self._meshes if mesh.axis_names]
            types = [kind for mesh in saved for kind in mesh.axis_types or ("auto",)]
        if self._mesh is None or not types or "explicit" in types:
            return self._mesh
        return mesh_to_use(self._mesh, explicit=False)

    def local_boxes(self, spec: LeafSpec, sharding: Any) -> tuple[Box, ...]:
        key = (sharding, spec.shape, spec.per_process)
        found = self._boxes.get(key)
        if found is None:
            mesh, partition = describe_sharding(spec.path, sharding, self._devices)
            here = [self._devices.number(device) for device in sharding.addressable_devices]
            placed = replace(spec, partition=partition)
            found = self._boxes[key] = needed_boxes(placed, mesh, here, self._process)
        return found

    def sharding(self, spec: LeafSpec, wanted: Any, leaf: Leaf) -> tuple[Any, bool]:
        """Where a leaf goes, and whether it must stay there.

        `specs` decide, then the sharding of `like`, then what was saved; on `mesh` if it is given.
        """
        path = leaf.path
        given = self._said.get(path)
        if isinstance(given, tuple | list):
            given = PartitionSpec(*cast("Sequence[Any]", given))
        like = getattr(wanted, "sharding", None) if wanted is not spec else None
        if given is not None and not isinstance(given, PartitionSpec):
            return self._fitting(spec, path, given), True
        if given is not None:
            mesh = self._mesh or _mesh_of(like)
            if mesh is None:
                raise Unfit(f"leaf {path!r} has a spec in `specs` but no mesh: pass mesh=")
            return self._named(spec, path, mesh, given), True
        if self._mesh is not None:
            placed = self._named(spec, path, self._mesh, self._spec_on_mesh(spec, like, leaf))
            return _in_memory(placed, spec.memory if like is None else like.memory_kind), True
        if isinstance(like, NamedSharding) and isinstance(like.mesh, AbstractMesh):
            return self._named(spec, path, _mesh_in_force(path, like.mesh), like.spec), True
        if like is not None:
            return self._fitting(spec, path, like), is_committed(wanted)
        return self._as_saved(spec, path), not spec.uncommitted

    def _spec_on_mesh(self, spec: LeafSpec, like: Any, leaf: Leaf) -> Any:
        assert self._mesh is not None
        if like is None and leaf.spec is not None:
            return leaf.spec
        if isinstance(like, NamedSharding) and set(like.mesh.axis_names) <= set(
            self._mesh.axis_names
        ):
            return like.spec
        return PartitionSpec(*(_entry(axes) for axes in spec.partition))

    def _fitting(self, spec: LeafSpec, path: str, sharding: Any) -> Any:
        """Check that a sharding fits the leaf; the same sharding is looked at once per shape."""
        shape = spec.own_shape
        key = (sharding, shape)
        if key in self._settled:
            return sharding
        if isinstance(sharding, NamedSharding):
            self._check_fit(spec, path, sharding.mesh, sharding.spec)
        self._settled.add(key)
        return sharding

    def _named(self, spec: LeafSpec, path: str, mesh: Any, partition_spec: Any) -> Any:
        self._check_fit(spec, path, mesh, partition_spec)
        return NamedSharding(mesh, partition_spec)

    def _check_fit(self, spec: LeafSpec, path: str, mesh: Any, partition_spec: Any) -> None:
        entries = spec_entries(path, partition_spec)
        described = describe_mesh(mesh, self._devices)
        misfits = find_misfits(path, spec.logical_shape, described, entries)
        if misfits:
            raise Unfit(*[misfit.message for misfit in misfits])

    def _as_saved(self, spec: LeafSpec, path: str) -> Any:
        """The mesh it was saved on if this run has as many devices; one device otherwise."""
        if spec.mesh == HOST_LOCAL or spec.uncommitted:
            return self._default_device
        devices: Sequence[Any] = jax.devices()
        mesh = self._meshes[spec.mesh]
        if len(devices) == len(self._process_of):
            return self._rebuilt(mesh, spec, path, devices)
        if self._process_count == 1:
            return self._default_device
        raise Unfit(
            f"leaf {path!r} was saved on {len(self._process_of)} devices and this run has "
            f"{len(devices)}: pass mesh= or like="
        )

    def _rebuilt(self, mesh: MeshSpec, spec: LeafSpec, path: str, devices: Sequence[Any]) -> Any:
        if not mesh.axis_names:
            device = devices[mesh.devices[0]]
            return _on_device(path, SingleDeviceSharding(device), spec.memory)
        partition_spec = PartitionSpec(*map(_entry, spec.partition))
        placed = self._named(spec, path, self._mesh_again(mesh), partition_spec)
        return _on_device(path, placed, spec.memory)

    def _mesh_again(self, mesh: MeshSpec) -> Mesh:
        devices = np.array(jax.devices(), dtype=object)[list(mesh.devices)]
        types = tuple(
            jax.sharding.AxisType[name.capitalize()]
            for name in mesh.axis_types or ("auto",) * len(mesh.axis_names)
        )
        return Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=types)

    @cached_property
    def _default_device(self) -> Any:
        return SingleDeviceSharding(_default_device())


def is_committed(wanted: Any) -> bool:
    """Whether a template's array must stay on its devices; a shape with a sharding must."""
    return bool(getattr(wanted, "committed", True))


def _mesh_in_force(path: str, abstract: Any) -> Mesh:
    """The mesh that `jax.set_mesh` has set, for a template that was made under it."""
    found = jax.sharding.get_mesh()
    if not found.empty and set(abstract.axis_names) <= set(found.axis_names):
        return found
    raise Unfit(
        f"leaf {path!r} of `like` is sharded over an abstract mesh, which has no devices: pass "
        "mesh=, or restore under jax.set_mesh(mesh)"
    )


def _in_memory(sharding: Any, kind: str | None) -> Any:
    return sharding if kind is None else sharding.with_memory_kind(kind)


def _on_device(path: str, sharding: Any, kind: str | None) -> Any:
    """In the kind of memory that it was saved from, where there is such."""
    if kind is None:
        return sharding
    device = next(iter(sharding.device_set))
    there = [memory.kind for memory in device.addressable_memories()]
    if kind not in there:
        raise Unfit(
            f"leaf {path!r} was saved from {kind} memory, which {device} does not have (it has "
            f"{', '.join(there)}): pass like="
        )
    return sharding.with_memory_kind(kind)


class Unfit(Exception):
    """A leaf can't be placed."""

    def __init__(self, *problems: str):
        self.problems = list(problems)
        super().__init__(*problems)


def resolve_specs(
    leaves: Sequence[tuple[str, LeafSpec, Any]], specs: Any, mesh: Any, known: Sequence[str]
) -> tuple[Mapping[str, Any], list[str]]:
    """By path, what `specs` says of leaves, and what of it means none of the paths in `known`.

    A leaf is its path, what was saved, and the spec that the tree itself names for it, or None.
    """
    if specs is None:
        return {}, []
    shaped = [
        ArrayLeaf(path, spec.logical_shape, _outline(spec), named) for path, spec, named in leaves
    ]
    found = resolve(shaped, mesh, specs, known=known)
    return found.said, [finding.message for finding in found.unknown]


def _outline(spec: LeafSpec) -> jax.ShapeDtypeStruct:
    """The array that a leaf is, without its values."""
    if spec.kind == "key":
        return jax.eval_shape(lambda: jax.random.key(0, impl=spec.prng))
    return jax.ShapeDtypeStruct(spec.logical_shape, numpy_dtype(spec.dtype))


def _default_device() -> Any:
    device = _config.jax_default_device
    if device is not None and not isinstance(device, str):
        return device
    return jax.local_devices(backend=device)[0] if device else jax.local_devices()[0]


def _mesh_of(sharding: Any) -> Mesh | None:
    mesh = getattr(sharding, "mesh", None)
    return mesh if isinstance(mesh, Mesh) else None


def _entry(axes: tuple[str, ...]) -> Any:
    return None if not axes else axes[0] if len(axes) == 1 else axes
