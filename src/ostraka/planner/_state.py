"""A state to be planned, as plain data, and meshes that need no device. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

from ostraka._spec import LeafSpec, MeshSpec
from ostraka.errors import InvalidSharding
from ostraka.sharding._findings import Finding

SAMPLED_PROCESSES = 2
"""Where computing all processes would take long, this number is: the first and the last."""

_MOST_DEVICES = 1 << 20
_USUAL_AXES = ("data", "model")


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
    findings: tuple[Finding, ...] = ()
    adds_optimizer: bool = False
    """Whether the optimizer's state is what optax would make, rather than one that is there."""


def check_mesh_has_names(mesh: Any) -> None:
    """Raise TypeError for sizes without names, such as `(4, 2)`."""
    if not isinstance(mesh, tuple | list | int):
        return
    sizes = [mesh] if isinstance(mesh, int) else list(cast("Sequence[Any]", mesh))
    names = [*_USUAL_AXES, *(f"axis{n}" for n in range(len(_USUAL_AXES), len(sizes)))]
    named = ", ".join(f'"{name}": {size}' for name, size in zip(names, sizes, strict=False))
    raise TypeError(
        f"mesh is {mesh!r}, sizes without names; name the axes, such as mesh={{{named}}}"
    )


def mesh_of_sizes(sizes: Mapping[str, int], axis_types: Sequence[str] = ()) -> MeshSpec:
    """A mesh over the devices 0, 1, … in row-major order."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise ValueError(
                f"the mesh axis {name!r} has the size {size!r}; it must be an integer, at least 1"
            )
    sizes = {name: int(size) for name, size in sizes.items()}
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
