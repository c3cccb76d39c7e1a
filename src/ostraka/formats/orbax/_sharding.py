"""The shardings of Orbax arrays, as Ostraka's meshes and partitions. No JAX.

Orbax saves only the ids of devices. So devices are numbered in the order of their ids, and each
process is assumed to have had an equal share of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ostraka.formats.orbax.files import as_list, as_object, as_sizes, as_text
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec, Partition, check_partition

_AXIS_TYPES = {f"AxisType.{kind}": kind.lower() for kind in ("Auto", "Explicit", "Manual")}
_NUMBER_AT_END = re.compile(r"(?<![0-9])([0-9]{1,9})\)?$")
_MOST_DEVICES = 1 << 24


@dataclass(frozen=True, slots=True)
class Sharding:
    """One sharding. `mesh.devices` has Orbax's device ids."""

    mesh: MeshSpec
    partition: Partition = ()
    memory: str | None = None


def parse_sharding(found: Any) -> Sharding | None:
    """A sharding of `_sharding`, or None for unknown kinds and kinds without a mesh.

    Raises ValueError, TypeError or KeyError for malformed ones.
    """
    about = as_object(found)
    memory = about.get("memory_kind")
    memory = None if memory in (None, "device") else as_text(memory)
    if about["sharding_type"] == "SingleDeviceSharding":
        number = _NUMBER_AT_END.search(as_text(about["device_str"]))
        device = int(number[1]) if number else 0
        return Sharding(MeshSpec((), (), (device,)), memory=memory)
    if about["sharding_type"] != "NamedSharding":
        return None
    names = tuple(as_text(name) for name in as_list(about["axis_names"]))
    sizes = as_sizes(about["shape"], least=1)
    if len(names) != len(sizes) or len({*names}) != len(names) or prod(sizes) > _MOST_DEVICES:
        raise ValueError(f"a mesh of {sizes} can't have the axes {names}")
    types = tuple(_AXIS_TYPES[as_text(kind)] for kind in about.get("axis_types") or ())
    mesh = MeshSpec(names, sizes, _devices(about, prod(sizes)), types)
    if len(types) not in (0, len(names)):
        raise ValueError(f"the axes {names} have the types {types}")
    partition = tuple(_axes(entry) for entry in as_list(about["partition_spec"]))
    while partition and not partition[-1]:
        partition = partition[:-1]
    return Sharding(mesh, partition, memory)


def _devices(about: Mapping[str, Any], count: int) -> tuple[int, ...]:
    mesh = about.get("device_mesh")
    if mesh is None:
        return tuple(range(count))
    devices = tuple(_ids(mesh["mesh"]))
    if len(devices) != count or len({*devices}) != count:
        raise ValueError(f"a mesh of {count} devices has the ids {devices[:8]}")
    return devices


def _ids(mesh: Any) -> Iterator[int]:
    if isinstance(mesh, list):
        for part in as_list(mesh):
            yield from _ids(part)
    else:
        (found,) = as_sizes([as_object(mesh)["id"]], least=0)
        yield found


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return tuple(as_text(axis) for axis in (as_list(entry) if isinstance(entry, list) else [entry]))


class Meshes:
    """The meshes of a checkpoint, numbered as its leaves are placed on them."""

    def __init__(self, shardings: Sequence[Sharding | None], processes: int):
        found = [sharding for sharding in shardings if sharding is not None]
        ids = sorted({device for sharding in found for device in sharding.mesh.devices})
        self._numbers = {device: number for number, device in enumerate(ids)}
        self._meshes: dict[MeshSpec, int] = {}
        count = max(len(ids), 1)
        self.process_of = tuple(device * min(processes, count) // count for device in range(count))

    @property
    def meshes(self) -> tuple[MeshSpec, ...]:
        return tuple(self._meshes)

    def place(self, leaf: LeafSpec, sharding: Sharding | None) -> LeafSpec:
        """The leaf with its saved sharding. Raises ValueError if the sharding does not fit."""
        if sharding is None:
            return replace(leaf, mesh=HOST_LOCAL)
        mesh = sharding.mesh
        check_partition(leaf.path, leaf.logical_shape, mesh, sharding.partition)
        mesh = replace(mesh, devices=tuple(self._numbers[device] for device in mesh.devices))
        number = self._meshes.setdefault(mesh, len(self._meshes))
        # Orbax does not say whether an array was committed to its device. What is on the first one
        # most often was not, and could not be used beside sharded arrays if it came back so.
        is_free = not mesh.axis_names and mesh.devices == (0,)
        return replace(
            leaf,
            mesh=number,
            partition=sharding.partition,
            memory=sharding.memory,
            uncommitted=is_free,
        )
