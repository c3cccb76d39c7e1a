"""A state to be planned, as plain data, and meshes that need no device. No JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ostraka._spec import LeafSpec, MeshSpec
from ostraka.errors import InvalidSharding

SAMPLED_PROCESSES = 2
"""Where working out all processes would take long, so many of them are: the first and the last."""

_MOST_DEVICES = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing about the sharding: an error can't be placed, a warning can and costs something."""

    severity: str
    path: str
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class State:
    """Everything that decides what a save writes."""

    leaves: tuple[LeafSpec, ...]
    meshes: tuple[MeshSpec, ...]
    process_of: tuple[int, ...]
    tree: Any
    """The tree as `_METADATA` will have it."""
    parameters: int | None = None
    """How many elements the model's parameters have, if it is known which leaves they are."""
    user: Mapping[str, Any] = field(default_factory=dict[str, Any])
    problems: tuple[Problem, ...] = ()


def mesh_of_sizes(sizes: Mapping[str, int], axis_types: Sequence[str] = ()) -> MeshSpec:
    """A mesh over the devices 0, 1, … in row-major order."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"the mesh axis {name!r} has the size {size!r}; it must be at least 1")
    count = prod(sizes.values())
    if count > _MOST_DEVICES:
        raise ValueError(
            f"the mesh has {count:,} devices; at most {_MOST_DEVICES:,} can be planned for"
        )
    return MeshSpec(tuple(sizes), tuple(sizes.values()), tuple(range(count)), tuple(axis_types))


def share_devices(devices: int, processes: int) -> tuple[int, ...]:
    """The process of each device: as many devices for each, one after the other."""
    if processes < 1 or devices % processes:
        close = [n for n in range(1, devices + 1) if devices % n == 0]
        nearest = min(close, key=lambda n: (abs(n - processes), n))
        raise InvalidSharding(
            f"{devices:,} devices do not divide evenly among {processes:,} processes; the nearest "
            f"number that does is {nearest:,}"
        )
    each = devices // processes
    return tuple(device // each for device in range(devices))


def default_writers() -> int:
    """How many threads a save writes with, on a host with as many cores as this one."""
    return max(4, min(os.cpu_count() or 1, 16))
