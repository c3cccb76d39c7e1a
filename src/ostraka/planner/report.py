"""All numbers of a plan as one document of plain values, for people and for scripts. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ostraka.errors import InvalidSharding
from ostraka.layout.spec import MeshSpec
from ostraka.planner._restore_plan import RestorePlan, Spread, spread_of
from ostraka.planner._save_plan import Plan
from ostraka.planner.time import Bandwidths, Times

Document = dict[str, Any]


def describe_plan(
    plan: Plan,
    bandwidths: Bandwidths,
    *,
    onto: Sequence[MeshSpec] = (),
    onto_hosts: int | None = None,
    keep: int | None = None,
    mtbf_s: float | None = None,
    max_file: int | None = None,
    max_host_memory: int | None = None,
) -> Document:
    """All numbers of a plan. Sizes are in bytes, times in seconds."""
    largest, requests = plan.largest_file, plan.requests_by_process
    back, moved = plan.restore_in_place(), [_restore_onto(plan, mesh, onto_hosts) for mesh in onto]
    times = plan.times_at(bandwidths, mtbf_s, back)
    limits = {
        "max_file": (max_file, 0 if largest is None else largest.size),
        "max_host_memory": (max_host_memory, plan.staging_bytes()),
    }
    return {
        "meshes": [_describe_mesh(mesh) for mesh in plan.meshes],
        "devices": plan.device_count,
        "hosts": plan.process_count,
        "parameters": plan.parameters,
        "arrays": plan.arrays,
        "elements": plan.elements,
        "data_bytes": plan.data_bytes,
        "total_bytes": plan.total_bytes,
        "compressed": None if plan.compressed is None else asdict(plan.compressed),
        "parity": _describe_parity(plan),
        "groups": {
            name: {"bytes": sum(dtypes.values()), "dtypes": dtypes}
            for name, dtypes in plan.bytes_by_group.items()
        },
        "data_bytes_in_float32": _describe_float32(plan),
        "shard_bytes": _describe_spread(plan.shard_spread),
        "host_bytes": _describe_spread(plan.process_spread),
        "files": {
            "shards": plan.shard_count,
            "in_all": len(plan.files) + plan.metadata_files,
            "largest": None if largest is None else {"name": largest.name, "bytes": largest.size},
        },
        "metadata_bytes": plan.metadata_bytes,
        "index_bytes": sum(plan.index_bytes.values()),
        "index_bytes_are_exact": plan.indexes_are_exact,
        "staging_bytes": {
            "accelerators": plan.staging_bytes(on_accelerators=True),
            "cpu": plan.staging_bytes(on_accelerators=False),
            "held_by_save_async": plan.lost_process().held_bytes,
        },
        "save": {
            "duration_s": times.save_s,
            "blocked_s": times.save_s,
            "save_async_blocked_s": times.save_async_blocked_s,
            "requests": {**_describe_spread(spread_of(requests)), "in_all": sum(requests)},
            "peak_bytes_per_second_host": bandwidths.host_write,
            "peak_bytes_per_second": bandwidths.peak_write(plan.process_count),
        },
        "restore": _describe_restore(back, bandwidths),
        "onto": [_describe_restore(restore, bandwidths) for restore in moved],
        "recovery": _describe_recovery(plan, bandwidths),
        "retention": None
        if keep is None
        else {
            "keep": keep,
            "bytes": keep * plan.total_bytes,
            # The oldest step is deleted when the newest is complete.
            "bytes_while_saving": (keep + 1) * plan.total_bytes,
        },
        "interval": _describe_interval(times, mtbf_s),
        "findings": [asdict(finding) for finding in plan.findings],
        "limits": [
            {"name": name, "limit_bytes": limit, "found_bytes": size, "ok": size <= limit}
            for name, (limit, size) in limits.items()
            if limit is not None
        ],
    }


def _describe_mesh(mesh: MeshSpec) -> dict[str, int]:
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def _describe_spread(spread: Spread) -> Document:
    return {**asdict(spread), "skew": spread.skew}


def _describe_parity(plan: Plan) -> Document | None:
    if plan.parity is None:
        return None
    table, size = plan.parity.table, plan.parity.total_bytes
    return {
        "count": table.count,
        "covers": plan.parity.covers,
        "groups": len(table.groups),
        "files": len(table.files),
        "bytes": size,
        "share": size / max(plan.total_bytes - size, 1),
        "read_back_bytes": _describe_spread(spread_of(plan.parity.read_bytes_by_process)),
    }


def _describe_float32(plan: Plan) -> Document | None:
    """The size in float32, if the plan itself has chosen narrower dtypes."""
    if not plan.adds_optimizer:
        return None
    moments = plan.data_bytes_in_float32(parameters=False)
    everything = plan.data_bytes_in_float32(parameters=True)
    if everything == plan.data_bytes:
        return None
    return {"optimizer": moments, "everything": everything}


def _describe_restore(restore: RestorePlan, bandwidths: Bandwidths) -> Document:
    return {
        "mesh": None if restore.mesh is None else _describe_mesh(restore.mesh),
        "hosts": restore.process_count,
        "hosts_worked_out": len(restore.processes),
        "needed_bytes": _describe_spread(restore.needed_bytes),
        "read_bytes": _describe_spread(restore.read_bytes),
        "over_read": restore.over_read,
        "ranges": _describe_spread(restore.ranges),
        "files": _describe_spread(restore.files),
        "requests": _describe_spread(restore.requests),
        "opening_bytes": max(restore.opening_bytes),
        "duration_s": restore.time_s_at(bandwidths),
        "peak_bytes_per_second_host": bandwidths.host_read,
        "peak_bytes_per_second": bandwidths.peak_read(restore.process_count),
    }


def _restore_onto(plan: Plan, mesh: MeshSpec, hosts: int | None) -> RestorePlan:
    if hosts is None:
        each = plan.device_count // plan.process_count
        hosts = max(len(mesh.devices) // each, 1) if len(mesh.devices) % each == 0 else 1
    try:
        return plan.restore(mesh=mesh, processes=hosts)
    except InvalidSharding as error:
        raise InvalidSharding(
            f"{error}; a restore keeps the specs: name the axes as they are named for the save, "
            "with sizes that divide"
        ) from error


def _describe_recovery(plan: Plan, bandwidths: Bandwidths) -> Document:
    shard, process, disk = plan.lost_shard(), plan.lost_process(), plan.lost_disk()
    document: Document = {"lost_shard": None}
    if shard is not None:
        duration_s = bandwidths.write_s(shard.size_bytes, shard.size_bytes)
        document["lost_shard"] = {**asdict(shard), "duration_s": duration_s}
    duration_s = bandwidths.read_s(process.held_bytes, process.held_bytes)
    document["lost_host"] = {**asdict(process), "duration_s": duration_s}
    duration_s = bandwidths.write_s(disk.written_bytes, disk.written_bytes)
    document["lost_disk"] = {**asdict(disk), "duration_s": duration_s}
    return document


def _describe_interval(times: Times, mtbf_s: float | None) -> Document | None:
    if mtbf_s is None or times.save_every is None:
        return None
    return {
        "mtbf_s": mtbf_s,
        "restore_is_counted": times.restore_s is not None,
        "save": asdict(times.save_every),
        "save_async": None if times.save_async_every is None else asdict(times.save_async_every),
    }


# Several variants

CONTESTS = (
    ("total_bytes", "bytes in all"),
    ("host_bytes.most", "bytes on the busiest host"),
    ("host_bytes.skew", "even load"),
    ("files.shards", "shard files"),
    ("files.largest.bytes", "largest file"),
    ("metadata_bytes", "metadata"),
    ("staging_bytes.accelerators", "staging memory"),
    ("save.duration_s", "time to save"),
    ("restore.duration_s", "time to restore"),
    ("recovery.lost_host.sole_bytes", "bytes that are lost with a host"),
)
"""The numbers that are better when smaller: the keys on the way to each, and its name."""


_ALIKE = 0.01
"""Numbers that differ by less than this share are shown as equal."""


def compare_plans(documents: Mapping[str, Document]) -> list[Document]:
    """For each number that is better when smaller: every variant's, and the best variants.

    Numbers within a hundredth of the least count as equal to it. If all are equal, none is best.
    """
    rows: list[Document] = []
    for key, title in CONTESTS:
        numbers: dict[str, Any] = {}
        for name, document in documents.items():
            found: Any = document
            for part in key.split("."):
                found = None if found is None else found[part]
            numbers[name] = found
        known = [number for number in numbers.values() if number is not None]
        if len(known) < len(numbers):
            continue
        # Skew is a share by itself.
        limit = min(known) + _ALIKE if key.endswith("skew") else min(known) * (1 + _ALIKE)
        best = [name for name, number in numbers.items() if number <= limit]
        wins = best if len(best) < len(numbers) else []
        equal = len(set(known)) == 1
        rows.append({"key": key, "title": title, "values": numbers, "best": wins, "equal": equal})
    return rows
