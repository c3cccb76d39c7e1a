"""All numbers of a plan as one document of plain values, for people and for scripts. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ostraka._account import Spread
from ostraka._spec import MeshSpec
from ostraka.errors import InvalidSharding
from ostraka.planner._plan import Plan, RestorePlan
from ostraka.planner._time import Bandwidths, advise_interval


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked of a plan, besides its bytes."""

    bandwidths: Bandwidths = field(default_factory=Bandwidths)
    onto: tuple[MeshSpec, ...] = ()
    onto_hosts: int | None = None
    keep: int | None = None
    mtbf_s: float | None = None
    max_file_bytes: int | None = None
    max_host_memory_bytes: int | None = None


Document = dict[str, Any]


def describe_plan(plan: Plan, questions: Questions) -> Document:
    """Everything that is known of a plan. Sizes are in bytes, times in seconds."""
    bandwidths = questions.bandwidths
    host_bytes = plan.process_spread.most
    # Where everything goes back to its place, one host of very many is like the others.
    back = plan.restore(sampled=None if plan.indexes_are_exact else (0,))
    save_s = bandwidths.write_s(host_bytes, plan.total_bytes)
    restore_s = _restore_s(back, bandwidths)
    return {
        "meshes": [_describe_mesh(mesh) for mesh in plan.write.meshes],
        "devices": len(plan.write.process_of),
        "hosts": plan.process_count,
        "parameters": plan.parameters,
        "arrays": len(plan.write.leaves),
        "elements": plan.elements,
        "data_bytes": plan.data_bytes,
        "total_bytes": plan.total_bytes,
        "groups": _bytes_by_group(plan),
        "shard_bytes": _describe_spread(plan.shard_spread),
        "host_bytes": _describe_spread(plan.process_spread),
        "files": _describe_files(plan),
        "metadata_bytes": plan.metadata_bytes,
        "index_bytes": sum(plan.index_bytes.values()),
        "index_bytes_are_exact": plan.indexes_are_exact,
        "staging_bytes": {
            "accelerators": plan.staging_bytes(on_accelerators=True),
            "cpu": plan.staging_bytes(on_accelerators=False),
            "held_by_save_async": plan.lost_process().held_bytes,
        },
        "save": _describe_save(plan, bandwidths, save_s),
        "restore": _describe_restore(back, bandwidths),
        "onto": [_describe_onto(plan, mesh, questions) for mesh in questions.onto],
        "recovery": _describe_recovery(plan, bandwidths),
        "retention": _describe_retention(plan, questions.keep),
        "interval": _describe_interval(save_s, restore_s, questions.mtbf_s),
        "problems": [asdict(problem) for problem in plan.problems],
        "limits": _describe_limits(plan, questions),
    }


def _describe_mesh(mesh: MeshSpec) -> dict[str, int]:
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


def _describe_spread(spread: Spread) -> Document:
    return {**asdict(spread), "skew": spread.skew}


def _describe_files(plan: Plan) -> Document:
    largest = plan.largest_file
    return {
        "shards": len(plan.write.files),
        "in_all": len(plan.write.files) + len(plan.index_bytes) + 1,
        "largest": None if largest is None else {"name": largest.name, "bytes": largest.size},
    }


def _bytes_by_group(plan: Plan) -> dict[str, int]:
    """The bytes below each of the topmost names; those of an optimizer by its moments."""
    totals: dict[str, int] = {}
    for leaf in plan.write.leaves:
        names = leaf.spec.path.split("/")
        moments = names[0] == "optimizer" and names[1:2] == ["opt_state"] and len(names) > 4
        group = f"optimizer {names[3]}" if moments else names[0]
        totals[group] = totals.get(group, 0) + leaf.spec.nbytes
    return totals


def _describe_save(plan: Plan, bandwidths: Bandwidths, save_s: float | None) -> Document:
    copied = None
    if bandwidths.device is not None:
        copied = plan.lost_process().held_bytes / bandwidths.device
    return {
        "seconds": save_s,
        "blocked_seconds": save_s,
        "save_async_blocked_seconds": copied,
        "peak_bytes_per_second_host": bandwidths.host_write,
        "peak_bytes_per_second": bandwidths.peak_write(plan.process_count),
    }


def _restore_s(restore: RestorePlan, bandwidths: Bandwidths) -> float | None:
    in_all = round(restore.read_bytes.mean * restore.process_count)
    return bandwidths.read_s(restore.read_bytes.most, in_all)


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
        "opening_bytes": max(restore.opening_bytes),
        "seconds": _restore_s(restore, bandwidths),
        "peak_bytes_per_second_host": bandwidths.host_read,
        "peak_bytes_per_second": bandwidths.peak_read(restore.process_count),
    }


def _describe_onto(plan: Plan, mesh: MeshSpec, questions: Questions) -> Document:
    hosts = questions.onto_hosts
    if hosts is None:
        each = len(plan.write.process_of) // plan.process_count
        hosts = max(len(mesh.devices) // each, 1) if len(mesh.devices) % each == 0 else 1
    try:
        restore = plan.restore(mesh=mesh, processes=hosts)
    except InvalidSharding as error:
        raise InvalidSharding(
            f"{error}; a restore keeps the specs: name the axes as they are named for the save, "
            "with sizes that divide"
        ) from error
    return _describe_restore(restore, questions.bandwidths)


def _describe_recovery(plan: Plan, bandwidths: Bandwidths) -> Document:
    shard, process, disk = plan.lost_shard(), plan.lost_process(), plan.lost_disk()
    return {
        "lost_shard": None
        if shard is None
        else {**asdict(shard), "seconds": bandwidths.write_s(shard.size_bytes, shard.size_bytes)},
        "lost_host": {
            **asdict(process),
            "seconds": bandwidths.read_s(process.held_bytes, process.held_bytes),
        },
        "lost_disk": {
            **asdict(disk),
            "seconds": bandwidths.write_s(disk.written_bytes, disk.written_bytes),
        },
    }


def _describe_retention(plan: Plan, keep: int | None) -> Document | None:
    if keep is None:
        return None
    return {
        "keep": keep,
        "bytes": keep * plan.total_bytes,
        # The oldest goes when the newest is complete.
        "bytes_while_saving": (keep + 1) * plan.total_bytes,
    }


def _describe_interval(
    save_s: float | None, restore_s: float | None, mtbf_s: float | None
) -> Document | None:
    if mtbf_s is None or save_s is None:
        return None
    advice = advise_interval(save_s, restore_s or 0.0, mtbf_s)
    return {"mtbf_seconds": mtbf_s, **asdict(advice)}


def _describe_limits(plan: Plan, questions: Questions) -> list[Document]:
    largest = 0 if plan.largest_file is None else plan.largest_file.size
    found = {
        "max_file": (questions.max_file_bytes, largest),
        "max_host_memory": (questions.max_host_memory_bytes, plan.staging_bytes()),
    }
    return [
        {"name": name, "limit_bytes": limit, "found_bytes": size, "ok": size <= limit}
        for name, (limit, size) in found.items()
        if limit is not None
    ]


# Several variants

_CONTESTS = (
    ("total_bytes", "bytes in all"),
    ("host_bytes.most", "bytes on the busiest host"),
    ("host_bytes.skew", "even load"),
    ("files.shards", "number of files"),
    ("files.largest.bytes", "largest file"),
    ("metadata_bytes", "metadata"),
    ("staging_bytes.accelerators", "staging memory"),
    ("save.seconds", "time to save"),
    ("restore.seconds", "time to restore"),
    ("recovery.lost_host.sole_bytes", "bytes that are lost with a host"),
)


def compare_plans(documents: Mapping[str, Document]) -> list[Document]:
    """For each number that is better when smaller: every variant's, and which have the least."""
    rows: list[Document] = []
    for key, title in _CONTESTS:
        numbers = {name: _dig(document, key.split(".")) for name, document in documents.items()}
        known = [number for number in numbers.values() if number is not None]
        if len(known) < len(numbers):
            continue
        best = [name for name, number in numbers.items() if number == min(known)]
        wins = best if len(best) < len(numbers) else []
        rows.append({"key": key, "title": title, "values": numbers, "best": wins})
    return rows


def _dig(document: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        document = None if document is None else document[key]
    return document
