"""The destinations of restored arrays: their shardings, and the boxes that this process needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ostraka.common.dtypes import numpy_dtype
from ostraka.formats.source import Saved
from ostraka.layout.box import Box, full
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, iter_misfits, needed_boxes
from ostraka.live.shardings import Devices, describe_mesh, describe_sharding, spec_entries
from ostraka.sharding.mesh import mesh_to_use
from ostraka.sharding.specs import array_leaf, from_partition, resolve
from ostraka.tree.nodes import Leaf


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of one array of the checkpoint."""

    number: int
    path: str
    kind: str
    """"jax", "key", "numpy", "scalar", or "python" for a Python number."""
    sharding: Any
    """The sharding of a JAX array."""
    boxes: tuple[Box, ...]
    """The boxes that this process needs, each once."""
    cast: str | None = None
    """The dtype to cast it to, or None for the saved one."""
    committed: bool = True
    """True if JAX must leave it on its devices."""
    weak: bool = False
    layout: Any = None
    """The `jax.experimental.layout.Layout` that the template asks for, or None for the default."""
    host_dtype: Any = None
    """The template's numpy dtype, if its byte order is not this machine's."""
    generator: Any = None
    """Generator of the template's keys, or None to look up the saved name in JAX."""


class Unplaceable(Exception):
    """A leaf can't be placed. `args` are the reasons, as sentences that name it."""


class MissingAxes(Unplaceable):
    """A leaf's spec uses axes that the mesh does not have."""

    def __init__(self, messages: Sequence[str], path: str, mesh: str, axes: Sequence[str]):
        super().__init__(*messages)
        self.path = path
        self.mesh = mesh
        self.axes = tuple(axes)


class Placer:
    """Finds the sharding of each leaf."""

    def __init__(self, saved: Saved, mesh: Mesh | None):
        self._saved = saved
        self._mesh = mesh
        self.specs: Mapping[str, Any] = {}
        """The specs or shardings of `specs=`, by path."""
        self._meshes_again: dict[int, Mesh] = {}
        self._fitting: dict[Any, NamedSharding] = {}
        self._boxes: dict[Any, tuple[Box, ...]] = {}

    def settle_mesh(self, like: Sequence[Any], *, has_modules: bool) -> Any:
        """The mesh to use, or the first of a template. `like` has the template's shardings."""
        meshes = [sharding.mesh for sharding in like if isinstance(sharding, NamedSharding)]
        if self._mesh is not None and has_modules and self._should_have_auto_axes(meshes):
            self._mesh = mesh_to_use(self._mesh, explicit=False)
        return self._mesh or next(iter(meshes), None)

    def _should_have_auto_axes(self, like: Sequence[Any]) -> bool:
        """True if a model was on a mesh with Auto axes only. It may fail under others."""
        types = [kind.name.lower() for mesh in like for kind in mesh.axis_types]
        if not like:
            saved = [mesh for mesh in self._saved.meshes if mesh.axis_names]
            types = [kind for mesh in saved for kind in mesh.axis_types or ("auto",)]
        return bool(types) and "explicit" not in types

    @cached_property
    def _devices(self) -> Devices:
        return Devices()

    def local_boxes(self, spec: LeafSpec, sharding: Any) -> tuple[Box, ...]:
        """The boxes of a leaf that this process needs. A sharding of None means host memory."""
        if spec.per_process is False and sharding is not None and sharding.is_fully_replicated:
            return (full(spec.shape),) if sharding.addressable_devices else ()
        if sharding is None:
            return needed_boxes(spec, None, (), jax.process_index())
        key = (sharding, spec.shape, spec.per_process)
        found = self._boxes.get(key)
        if found is None:
            mesh, partition = describe_sharding(spec.path, sharding, self._devices)
            here = [self._devices.number(device) for device in sharding.addressable_devices]
            placed = replace(spec, partition=partition)
            found = self._boxes[key] = needed_boxes(placed, mesh, here, jax.process_index())
        return found

    def sharding(self, spec: LeafSpec, wanted: Any, leaf: Leaf) -> tuple[Any, bool]:
        """The sharding of a leaf, and True if it must stay there.

        `specs` decide, then the sharding of `like`, then the saved one, all on `mesh` if given.
        """
        path = leaf.path
        given = self.specs.get(path)
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
            axes = from_partition(spec.partition)
            if like is None and leaf.spec is not None:
                axes = leaf.spec
            elif isinstance(like, NamedSharding):
                is_part = {*like.mesh.axis_names} <= {*self._mesh.axis_names}
                axes = like.spec if is_part else axes
            return self._named(spec, path, self._mesh, axes, memory), True
        if isinstance(like, NamedSharding) and isinstance(like.mesh, AbstractMesh):
            return self._named(spec, path, _mesh_in_force(path, like.mesh), like.spec), True
        if like is not None:
            return self._checked(spec, path, like), is_committed(wanted)
        return self._as_saved(spec, path), not spec.uncommitted

    def _checked(self, spec: LeafSpec, path: str, sharding: Any) -> Any:
        """The given sharding, if it fits the leaf. Raises Unplaceable."""
        if isinstance(sharding, NamedSharding):
            self._named(spec, path, sharding.mesh, sharding.spec)
        return sharding

    def _named(
        self, spec: LeafSpec, path: str, mesh: Any, axes: Any, memory: str | None = None
    ) -> NamedSharding:
        """The sharding over a mesh, if it fits the leaf. Checked once per shape."""
        key = (mesh, axes, memory, spec.logical_shape)
        found = self._fitting.get(key)
        if found is None:
            described = describe_mesh(mesh, self._devices)
            entries = spec_entries(path, axes)
            misfits = list(iter_misfits(path, spec.logical_shape, described, entries))
            messages = [misfit.message for misfit in misfits]
            missing = [misfit.missing_axis for misfit in misfits if misfit.missing_axis]
            if missing:
                raise MissingAxes(messages, path, str(described), missing)
            if misfits:
                raise Unplaceable(*messages)
            found = self._fitting[key] = _in_memory(path, NamedSharding(mesh, axes), memory)
        return found

    def _as_saved(self, spec: LeafSpec, path: str) -> Any:
        """The saved mesh if this run has as many devices, else one device."""
        if spec.mesh == HOST_LOCAL or spec.uncommitted:
            return self._default_device
        devices, saved_on = jax.devices(), len(self._saved.process_of)
        if len(devices) == saved_on:
            mesh = self._saved.meshes[spec.mesh]
            if mesh.axis_names:
                axes = from_partition(spec.partition)
                return self._named(spec, path, self._mesh_again(spec.mesh), axes, spec.memory)
            return _in_memory(path, SingleDeviceSharding(devices[mesh.devices[0]]), spec.memory)
        if jax.process_count() == 1:
            return self._default_device
        raise Unplaceable(
            f"leaf {path!r} was saved on {saved_on} devices and this run has {len(devices)}: pass "
            "mesh= or like="
        )

    def _mesh_again(self, number: int) -> Mesh:
        """A saved mesh, made of the devices of this run."""
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
        """JAX's default device."""
        (device,) = jax.device_put(np.zeros(())).devices()
        return SingleDeviceSharding(device)


def is_committed(wanted: Any) -> bool:
    """True if a template's array, or an abstract one with a sharding, must stay on its devices."""
    return bool(getattr(wanted, "committed", True))


def layout_of(wanted: Any) -> Any:
    """The layout of a template's array, or None for the default (row-major)."""
    layout = getattr(getattr(wanted, "format", None), "layout", None)
    order = getattr(layout, "major_to_minor", None)  # Layout.AUTO has none
    return None if order is None or order == tuple(range(len(order))) else layout


def _mesh_in_force(path: str, abstract: Any) -> Mesh:
    """The mesh of `jax.set_mesh`, for a template that was made under it."""
    found = jax.sharding.get_mesh()
    if not found.empty and set(abstract.axis_names) <= set(found.axis_names):
        return found
    raise Unplaceable(
        f"leaf {path!r} of `like` is sharded over an abstract mesh, which has no devices: pass "
        "mesh=, or restore under jax.set_mesh(mesh)"
    )


def _in_memory(path: str, sharding: Any, kind: str | None) -> Any:
    """The same sharding in another kind of memory."""
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
    """The specs of leaves by path, and a sentence for each spec that matches no path in `known`.

    A leaf is a path, a saved spec, and the spec that the tree itself names, or None.
    """
    if specs is None:
        return {}, []
    # Where only the shape counts, keys of any generator do.
    key = jax.eval_shape(lambda: jax.random.key(0)).dtype
    shaped: list[Any] = []
    for path, spec, named in leaves:
        dtype = key if spec.kind == "key" else numpy_dtype(spec.dtype)
        like = jax.ShapeDtypeStruct(spec.logical_shape, dtype)
        shaped.append(array_leaf(path, spec.logical_shape, like, named))
    found = resolve(shaped, mesh, specs, known=known)
    return found.specs, [finding.message for finding in found.unknown]
