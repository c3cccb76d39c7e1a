"""Which rows of a global batch belong to which logical shard, and which process runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ostraka.errors import InvalidSharding
from ostraka.processes.operation import name_processes
from ostraka.sharding.mesh import as_mesh


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The logical shards of a global batch, as one process sees them."""

    shards: int
    batch: int
    """The rows of a global batch."""
    sharding: Sharding
    runs: tuple[int, ...]
    """The shards whose rows are on this process's devices, in order."""
    saves: frozenset[int]
    """The shards that no process with a lower number runs."""
    processes: tuple[int, ...]
    """The processes that have a part of each batch, in order."""
    first_rows: Mapping[int, int]
    """By the first row of a part on a device: that row among those that this process has."""

    @property
    def rows_per_shard(self) -> int:
        return self.batch // self.shards

    @property
    def is_local(self) -> bool:
        """True if this process has all rows."""
        return len(self.processes) == 1


def plan_rows(shards: int, batch: int, sharding: Any) -> RowPlan:
    """Find the shards of this process. Raises ValueError or InvalidSharding if nothing fits."""
    for name, value in (("shards", shards), ("batch", batch)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a number of at least 1, not {value!r:.80}")
    if batch % shards:
        raise ValueError(
            f"a batch of {batch} rows can't take as many from each of {shards} shards: make "
            f"batch a multiple of {shards}"
        )
    made = _as_sharding(sharding)
    per_shard = batch // shards
    runners: list[set[int]] = [set() for _ in range(shards)]
    parts = {(device.process_index, *rows) for device, rows in _rows_by_device(made, batch).items()}
    for process, first, end in parts:
        for shard in range(first // per_shard, -(-end // per_shard)):
            runners[shard].add(process)
    me = jax.process_index()
    runs = tuple(shard for shard in range(shards) if me in runners[shard])
    processes = tuple(sorted({process for process, *_ in parts}))
    if not runs:
        raise InvalidSharding(
            f"process {me} has none of the devices of {made}: make the iterator on "
            f"{name_processes(processes)} only, or give a sharding over all processes"
        )
    order = {shard: number for number, shard in enumerate(runs)}
    first_rows = {
        first: order[first // per_shard] * per_shard + first % per_shard
        for process, first, _ in parts
        if process == me
    }
    saves = frozenset(shard for shard in runs if min(runners[shard]) == me)
    return RowPlan(shards, batch, made, runs, saves, processes, first_rows)


def _as_sharding(given: Any) -> Sharding:
    if given is None:
        if jax.process_count() > 1:
            raise InvalidSharding(
                "several processes need sharding=, which says whose devices hold which rows: give "
                'NamedSharding(mesh, PartitionSpec("data"))'
            )
        default = cast(Any, jax.config).jax_default_device
        found = default if isinstance(default, jax.Device) else jax.local_devices()[0]
        return SingleDeviceSharding(found)
    if isinstance(given, tuple):
        mesh, spec = given
        given = NamedSharding(as_mesh(mesh), spec)
    if not isinstance(given, NamedSharding | SingleDeviceSharding):
        raise InvalidSharding(
            f"sharding must be a NamedSharding, (mesh, spec), or None for one device, not "
            f"{given!r:.80}"
        )
    return given


def _rows_by_device(sharding: Sharding, batch: int) -> dict[Any, tuple[int, int]]:
    """The first row and the end of the rows on each device."""
    by_row = sharding
    if isinstance(sharding, NamedSharding):
        by_row = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    try:
        by_row.shard_shape((batch,))
    except ValueError:
        spec: Any = getattr(sharding, "spec", None)
        mesh: Any = getattr(sharding, "mesh", None)
        raise InvalidSharding(
            f"a batch of {batch} rows can't be split evenly by {spec} over the mesh "
            f"{dict(mesh.shape)}: make batch a multiple of the size of these axes"
        ) from None
    found = by_row.devices_indices_map((batch,))
    return {device: rows.indices(batch)[:2] for device, (rows,) in found.items()}
