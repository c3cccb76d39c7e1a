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

from ostraka.formats.orbax.files import as_list, as_object, as_sizes, as_text, malformed
from ostraka.formats.orbax.names import SHARDING
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec, Partition, check_partition
from ostraka.storage import Store

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


def place_leaves(
    leaves: Sequence[LeafSpec], shardings: Sequence[tuple[Store, Sharding | None]]
) -> tuple[list[LeafSpec], tuple[MeshSpec, ...], int]:
    """The leaves with their saved shardings, the meshes of these, and the number of devices.

    Each sharding comes with the item that has it. Raises Damaged if it does not fit its leaf.
    """
    saved = [sharding.mesh.devices for _, sharding in shardings if sharding is not None]
    ids = sorted({device for devices in saved for device in devices})
    numbers = {device: number for number, device in enumerate(ids)}
    meshes: dict[MeshSpec, int] = {}
    placed: list[LeafSpec] = []
    for leaf, (store, sharding) in zip(leaves, shardings, strict=True):
        if sharding is None:
            placed.append(replace(leaf, mesh=HOST_LOCAL))
            continue
        mesh, partition = sharding.mesh, sharding.partition
        with malformed(store, SHARDING):
            check_partition(leaf.path, leaf.logical_shape, mesh, partition)
        mesh = replace(mesh, devices=tuple(numbers[device] for device in mesh.devices))
        number = meshes.setdefault(mesh, len(meshes))
        # Orbax does not say whether an array was committed to its device. What is on the first one
        # most often was not, and could not be used beside sharded arrays if it came back so.
        is_free = not mesh.axis_names and mesh.devices == (0,)
        leaf = replace(leaf, mesh=number, partition=partition, memory=sharding.memory)
        placed.append(replace(leaf, uncommitted=is_free))
    return placed, tuple(meshes), max(len(ids), 1)
