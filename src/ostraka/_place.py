"""Where the arrays of a restore go: shardings for them, and the boxes that this process needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from ostraka._spec import HOST_LOCAL, LeafSpec, find_misfits, numpy_dtype
from ostraka.sharding._data import ArrayLeaf, from_partition
from ostraka.sharding._mesh import mesh_to_use
from ostraka.sharding._specs import resolve


@dataclass(frozen=True, slots=True)
class Destination:
    """Where an array leaf of the checkpoint goes."""

    number: int
    path: str
    kind: str
    """"jax", "key", "numpy", "scalar", or "python" for a Python number."""
    sharding: Any
    """For JAX arrays."""
    boxes: tuple[Box, ...]
    """What this process needs of it, each once."""
    cast: str | None = None
    """The dtype to cast it to, if that was asked for."""
    committed: bool = True
    """Whether JAX must leave it on its devices."""
    weak: bool = False


class Unplaceable(Exception):
    """A leaf can't be placed; `args` are the reasons, as sentences that name it."""


class Placer:
    """Finds the sharding of each leaf."""

    def __init__(self, saved: Saved, *, mesh: Mesh | None, process: int, process_count: int):
        self._saved = saved
        self._mesh = mesh
        self._said: Mapping[str, Any] = {}
        self._process = process
        self._process_count = process_count
        self._devices = Devices()
        self._meshes_again: dict[int, Mesh] = {}
        self._fitting: dict[Any, NamedSharding] = {}
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
        meshes = [sharding.mesh for sharding in like if isinstance(sharding, NamedSharding)]
        if self._mesh is not None and has_modules and self._should_have_auto_axes(meshes):
            self._mesh = mesh_to_use(self._mesh, explicit=False)
        mesh = self._mesh or next(iter(meshes), None)
        self._said, unknown = resolve_specs(leaves, specs, mesh, known)
        return unknown

    def _should_have_auto_axes(self, like: Sequence[Any]) -> bool:
        """Whether a model was on a mesh with Auto axes only: under others it may fail."""
        types = [kind.name.lower() for mesh in like for kind in mesh.axis_types]
        if not like:
            saved = [mesh for mesh in self._saved.meshes if mesh.axis_names]
            types = [kind for mesh in saved for kind in mesh.axis_types or ("auto",)]
        return bool(types) and "explicit" not in types

    def local_boxes(self, spec: LeafSpec, sharding: Any) -> tuple[Box, ...]:
        """What this process needs of a leaf; a sharding of None means host memory."""
        if sharding is None:
            return needed_boxes(spec, None, (), self._process)
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
        if isinstance(given, PartitionSpec):
            mesh = self._mesh or getattr(like, "mesh", None)
            if not isinstance(mesh, Mesh):
                raise Unplaceable(f"leaf {path!r} has a spec in `specs` but no mesh: pass mesh=")
            return self._named(spec, path, mesh, given), True
        if given is not None:
            return self._checked(spec, path, given), True
        if self._mesh is not None:
            memory = spec.memory if like is None else like.memory_kind
            axes = self._spec_on_mesh(self._mesh, spec, like, leaf)
            return self._named(spec, path, self._mesh, axes, memory), True
        if isinstance(like, NamedSharding) and isinstance(like.mesh, AbstractMesh):
            return self._named(spec, path, _mesh_in_force(path, like.mesh), like.spec), True
        if like is not None:
            return self._checked(spec, path, like), is_committed(wanted)
        return self._as_saved(spec, path), not spec.uncommitted

    def _spec_on_mesh(self, mesh: Mesh, spec: LeafSpec, like: Any, leaf: Leaf) -> Any:
        if like is None and leaf.spec is not None:
            return leaf.spec
        if isinstance(like, NamedSharding) and {*like.mesh.axis_names} <= {*mesh.axis_names}:
            return like.spec
        return from_partition(spec.partition)

    def _checked(self, spec: LeafSpec, path: str, sharding: Any) -> Any:
        """A sharding that was given, if it fits the leaf."""
        if isinstance(sharding, NamedSharding):
            self._named(spec, path, sharding.mesh, sharding.spec)
        return sharding

    def _named(
        self, spec: LeafSpec, path: str, mesh: Any, axes: Any, memory: str | None = None
    ) -> NamedSharding:
        """The sharding over a mesh, if it fits the leaf; looked at once per shape."""
        key = (mesh, axes, memory, spec.logical_shape)
        found = self._fitting.get(key)
        if found is None:
            described = describe_mesh(mesh, self._devices)
            misfits = find_misfits(path, spec.logical_shape, described, spec_entries(path, axes))
            if misfits:
                raise Unplaceable(*[misfit.message for misfit in misfits])
            found = self._fitting[key] = _in_memory(path, NamedSharding(mesh, axes), memory)
        return found

    def _as_saved(self, spec: LeafSpec, path: str) -> Any:
        """The mesh it was saved on if this run has as many devices; one device otherwise."""
        if spec.mesh == HOST_LOCAL or spec.uncommitted:
            return self._default_device
        devices, saved_on = jax.devices(), len(self._saved.process_of)
        if len(devices) == saved_on:
            mesh = self._saved.meshes[spec.mesh]
            if mesh.axis_names:
                axes = from_partition(spec.partition)
                return self._named(spec, path, self._mesh_again(spec.mesh), axes, spec.memory)
            return _in_memory(path, SingleDeviceSharding(devices[mesh.devices[0]]), spec.memory)
        if self._process_count == 1:
            return self._default_device
        raise Unplaceable(
            f"leaf {path!r} was saved on {saved_on} devices and this run has {len(devices)}: pass "
            "mesh= or like="
        )

    def _mesh_again(self, number: int) -> Mesh:
        """A mesh that was saved, of the devices of this run."""
        if number not in self._meshes_again:
            mesh = self._saved.meshes[number]
            devices = np.array(jax.devices(), dtype=object)[list(mesh.devices)]
            names = mesh.axis_types or ("auto",) * len(mesh.axis_names)
            types = tuple(jax.sharding.AxisType[name.capitalize()] for name in names)
            self._meshes_again[number] = Mesh(
                devices.reshape(mesh.axis_sizes), mesh.axis_names, axis_types=types
            )
        return self._meshes_again[number]

    @cached_property
    def _default_device(self) -> SingleDeviceSharding:
        """Where JAX puts what nobody has placed."""
        (device,) = jax.device_put(np.zeros(())).devices()
        return SingleDeviceSharding(device)


def is_committed(wanted: Any) -> bool:
    """Whether a template's array must stay on its devices; a shape with a sharding must."""
    return bool(getattr(wanted, "committed", True))


def _mesh_in_force(path: str, abstract: Any) -> Mesh:
    """The mesh that `jax.set_mesh` has set, for a template that was made under it."""
    found = jax.sharding.get_mesh()
    if not found.empty and set(abstract.axis_names) <= set(found.axis_names):
        return found
    raise Unplaceable(
        f"leaf {path!r} of `like` is sharded over an abstract mesh, which has no devices: pass "
        "mesh=, or restore under jax.set_mesh(mesh)"
    )


def _in_memory(path: str, sharding: Any, kind: str | None) -> Any:
    """The sharding in a kind of memory, such as the one that a leaf was saved from."""
    if kind is None or kind == sharding.memory_kind:
        return sharding
    device = next(iter(sharding.device_set))
    there = [memory.kind for memory in device.addressable_memories()]
    if kind not in there:
        raise Unplaceable(
            f"leaf {path!r} was saved from {kind} memory, which {device} does not have (it has "
            f"{', '.join(there)}): pass like="
        )
    return sharding.with_memory_kind(kind)


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
