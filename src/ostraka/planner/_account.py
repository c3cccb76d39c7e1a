"""Files, bytes, memory and recovery, from plans. Pure: the numbers of the plans that are executed.

All numbers come from the write plan of a save or the read plan of a restore. Estimates are named
so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from ostraka.common.dtypes import DTYPES
from ostraka.layout import box as _box
from ostraka.layout import index as _index
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import Metadata, shard_contents
from ostraka.layout.plan_parity import planned_digests
from ostraka.layout.plan_read import plan_chunks, plan_read
from ostraka.layout.plan_write import BAND_BYTES, STAGING_BYTES, WritePlan
from ostraka.layout.shard_file import FileEntry
from ostraka.layout.spec import (
    HOST_LOCAL,
    LeafSpec,
    MeshSpec,
    Target,
    holders,
    largest_cell_bytes,
    needed_boxes,
    partition_grid,
)
from ostraka.storage.requests import (
    COMMIT_REQUESTS,
    JOIN_REQUESTS,
    OPEN_REQUESTS,
    opening_bytes,
    upload_requests,
)

_NO_ID = "0" * 16


@dataclass(frozen=True, slots=True)
class Spread:
    """How a number differs between devices, or between processes."""

    least: int
    mean: float
    most: int

    @property
    def skew(self) -> float:
        """The fraction by which the most exceeds the mean. 0 is perfectly even."""
        return self.most / self.mean - 1 if self.mean else 0.0


def spread_of(numbers: Sequence[int]) -> Spread:
    if not numbers:
        return Spread(0, 0.0, 0)
    return Spread(min(numbers), sum(numbers) / len(numbers), max(numbers))


# What a save writes


def bytes_by_device(plan: WritePlan) -> list[int]:
    """The data bytes that each device contributes, headers not counted."""
    totals = [0] * len(plan.process_of)
    for file in plan.files:
        totals[file.device] += file.size - file.header_bytes
    return totals


def file_bytes_by_process(plan: WritePlan) -> list[int]:
    """The bytes of all shard files of each process, headers included."""
    totals = [0] * (max(plan.process_of) + 1)
    for file in plan.files:
        totals[plan.process_of[file.device]] += file.size
    return totals


def requests_by_process(plan: WritePlan, index_bytes: Mapping[int, int]) -> list[int]:
    """The requests of each process for a save to a new path in a bucket.

    Renewing the lock of a long save costs a few more.
    """
    totals = [COMMIT_REQUESTS, *[JOIN_REQUESTS] * max(plan.process_of)]
    totals[0] += bool(plan.files)  # the second copy of `_METADATA`
    for file in plan.files:
        totals[plan.process_of[file.device]] += upload_requests(file.size)
    for process, size in index_bytes.items():
        totals[process] += upload_requests(size)
    return totals


def index_bytes(plan: WritePlan, processes: Collection[int]) -> dict[int, int]:
    """The size of the index of each of these processes, except those that write no shard."""
    files: dict[int, list[FileEntry]] = {}
    for file in plan.files:
        if plan.process_of[file.device] in processes:
            files.setdefault(plan.process_of[file.device], []).append(file)
    devices = {file.device for listed in files.values() for file in listed}
    contents = _format.entries_by_file(plan.leaves, plan.layouts, devices)
    sizes: dict[int, int] = {}
    for process in sorted(files):
        digests = {
            file.name: planned_digests(file, contents[file.device, file.part])
            for file in files[process]
        }
        sizes[process] = len(_index.encode_index(_NO_ID, process, digests))
    return sizes


# Compression

_TYPICAL_RATIOS = {"bfloat16": 0.67, "float16": 0.85, "float32": 0.84, "float64": 0.88}
"""Measured for normal weights. There is no general figure for other dtypes."""


def typical_savings(plan: WritePlan) -> int:
    """The bytes that compression saves for normal weights."""
    saved = 0.0
    for number in plan.codecs:
        leaf = plan.leaves[number]
        nbytes = leaf.spec.nbytes
        if nbytes // len(plan.layouts[leaf.layout].owners) >= _format.LEAST_COMPRESSED_BYTES:
            saved += nbytes * (1 - _TYPICAL_RATIOS.get(leaf.spec.dtype, 1.0))
    return round(saved)


def files_before_compression(metadata: Metadata) -> tuple[FileEntry, ...]:
    """The files of a checkpoint with their uncompressed sizes."""
    if metadata.version < _format.COMPRESSED_VERSION:
        return metadata.files
    return tuple(
        replace(file, size=file.header_bytes + entries[-1].offset + entries[-1].nbytes)
        for file, entries in shard_contents(metadata).values()
    )


# Memory


def staging_bytes(plan: WritePlan, *, writers: int, on_accelerators: bool) -> int:
    """The most host memory that a save takes on one process, besides the state itself.

    Each of the `writers` threads puts small boxes together in a block of its own. Arrays on
    accelerators come to the host shard by shard, large ones in bands, as many at a time as the
    budget admits. On CPUs no copy is made.
    """
    files = Counter(plan.process_of[file.device] for file in plan.files)
    threads = min(writers, max(files.values(), default=0))
    scratch = threads * _format.BLOCK_BYTES
    if not on_accelerators:
        return scratch
    kinds = {
        (leaf.layout, leaf.spec.shape, leaf.spec.dtype, leaf.spec.mesh, leaf.spec.partition): leaf
        for leaf in plan.leaves
    }
    staged = 0
    for leaf in kinds.values():
        spec = leaf.spec
        box = largest_cell_bytes(spec, plan.layouts[leaf.layout].grid)
        if spec.mesh == HOST_LOCAL or box == 0:
            continue
        grid = partition_grid(plan.meshes[spec.mesh], spec.partition, len(spec.shape))
        shard = DTYPES[spec.dtype].nbytes(prod(spec.shape) // prod(grid))
        at_once = min(threads, max(STAGING_BYTES // min(box, BAND_BYTES), 1))
        staged = max(staged, at_once * min(shard, BAND_BYTES))
    return scratch + staged


# What a loss costs


@dataclass(frozen=True, slots=True)
class LostShard:
    """A shard file that is gone, the largest one."""

    file: str
    size_bytes: int
    leaves: int
    held_elsewhere_bytes: int
    """Bytes of its data that another device holds, too, while the run is active."""


@dataclass(frozen=True, slots=True)
class LostProcess:
    """A host that is gone with the memory of its devices, the one with the most to bring back."""

    process: int
    held_bytes: int
    """Bytes that its replacement needs."""
    sole_bytes: int
    """Bytes that no other process holds. If there are any, all go back to the last checkpoint."""


@dataclass(frozen=True, slots=True)
class LostDisk:
    """The shards of one process that are gone, where every host has a disk of its own."""

    process: int
    written_bytes: int
    held_elsewhere_bytes: int
    """Bytes of its data that other processes hold, too, while the run is active."""


def lost_shard(plan: WritePlan) -> LostShard | None:
    """The loss of the largest shard file. None if there are no files."""
    if not plan.files:
        return None
    file = max(plan.files, key=lambda f: (f.size, -f.device, -f.part))
    entries = _format.entries_by_file(plan.leaves, plan.layouts, {file.device})
    listed = entries[file.device, file.part]
    elsewhere = sum(
        entry.nbytes
        for entry in listed
        if _copies(plan.leaves[entry.leaf].spec, plan.meshes, len(plan.process_of)) > 1
    )
    return LostShard(file.name, file.size, len({entry.leaf for entry in listed}), elsewhere)


def _copies(leaf: LeafSpec, meshes: Sequence[MeshSpec], devices: int) -> int:
    """How many devices hold each part of a leaf."""
    if leaf.per_process:
        return 1
    if leaf.mesh == HOST_LOCAL:
        return devices
    mesh = meshes[leaf.mesh]
    return len(mesh.devices) // prod(partition_grid(mesh, leaf.partition, len(leaf.shape)))


def held_by_process(plan: WritePlan) -> tuple[list[int], list[int]]:
    """For each process: the bytes that it holds, and those that it alone holds."""
    count = max(plan.process_of) + 1
    process_of = np.asarray(plan.process_of, dtype=np.int64)
    held = np.zeros(count, dtype=np.int64)
    sole = np.zeros(count, dtype=np.int64)
    tables: dict[Any, Any] = {}
    for leaf in (stored.spec for stored in plan.leaves):
        if leaf.per_process or leaf.mesh == HOST_LOCAL:
            share = leaf.nbytes // count if leaf.per_process else leaf.nbytes
            held += share
            sole += share if leaf.per_process or count == 1 else 0
            continue
        key = (leaf.mesh, leaf.partition, len(leaf.shape))
        if key not in tables:
            tables[key] = _cells_by_process(plan.meshes, process_of, count, *key)
        cells, held_cells, sole_cells = tables[key]
        # By the cell: where several elements share a byte, each begins with a byte of its own.
        cell_bytes = DTYPES[leaf.dtype].nbytes(prod(leaf.shape) // cells)
        held += held_cells * cell_bytes
        sole += sole_cells * cell_bytes
    return held.tolist(), sole.tolist()


def _cells_by_process(
    meshes: Sequence[MeshSpec], process_of: Any, count: int, mesh: int, partition: Any, rank: int
) -> tuple[int, Any, Any]:
    """How many cells there are, how many each process holds, and how many it alone holds."""
    table = holders(meshes[mesh], partition, rank)
    processes = np.sort(process_of[table], axis=1)
    is_new = np.ones(processes.shape, dtype=bool)
    is_new[:, 1:] = processes[:, 1:] != processes[:, :-1]
    held = np.bincount(processes[is_new], minlength=count)
    alone = processes[:, 0] == processes[:, -1]
    return len(table), held, np.bincount(processes[alone, 0], minlength=count)


def lost_process(plan: WritePlan) -> LostProcess:
    """The loss of the host that holds the most."""
    held, sole = held_by_process(plan)
    process = max(range(len(held)), key=lambda p: (held[p], sole[p], -p))
    return LostProcess(process, held[process], sole[process])


def lost_disk(plan: WritePlan) -> LostDisk:
    """The loss of the shards of the process that wrote the most."""
    written = file_bytes_by_process(plan)
    data = plan.bytes_by_process()
    process = max(range(len(written)), key=lambda p: (written[p], -p))
    # Only the process that holds data alone could have written it.
    sole = held_by_process(plan)[1][process]
    return LostDisk(process, written[process], data[process] - sole)


# What a restore reads


@dataclass(frozen=True, slots=True)
class ReadAccount:
    """The reads of one process from shard files."""

    process: int
    needed_bytes: int
    """Bytes that its devices and host arrays need, each counted once."""
    read_bytes: int
    """Bytes that are read: whole blocks, and the header of every file."""
    ranges: int
    """The number of reads."""
    files: int
    index_processes: tuple[int, ...] = field(repr=False)
    """Processes whose indexes are read, too."""
    far_ranges: int = field(repr=False)
    """The number of reads beyond the bytes that come with opening a file."""

    @property
    def requests(self) -> int:
        """The requests in a bucket, where a file's first bytes come with opening it."""
        return OPEN_REQUESTS + len(self.index_processes) + self.files + self.far_ranges

    @property
    def over_read_bytes(self) -> int:
        return self.read_bytes - self.needed_bytes

    @property
    def over_read(self) -> float:
        """The bytes read beyond the needed ones, as a fraction of the latter."""
        return self.over_read_bytes / self.needed_bytes if self.needed_bytes else 0.0


def account_read(metadata: Metadata, process: int, targets: Sequence[Target]) -> ReadAccount:
    """Run the planning of a restore for one process, and count."""
    plan = plan_read(metadata, targets)
    read = ranges = far = 0
    for part in plan:
        header_bytes = part.file.header_bytes
        blocks = planned_digests(part.file, part.entries).blocks()
        chunks = plan_chunks(part.pieces, blocks)
        read += header_bytes + sum(chunk.stop - chunk.start for chunk in chunks)
        ranges += 1 + len(chunks)
        spans = [(header_bytes + chunk.start, header_bytes + chunk.stop) for chunk in chunks]
        opened = opening_bytes(header_bytes, *spans[0]) if spans else header_bytes
        far += sum(stop > opened for _, stop in spans)
    needed = sum(
        DTYPES[metadata.leaves[target.leaf].spec.dtype].nbytes(_box.count(target.box))
        for target in targets
    )
    owners = {metadata.process_of[part.file.device] for part in plan}
    return ReadAccount(process, needed, read, ranges, len(plan), tuple(sorted(owners)), far)


def local_targets(
    leaves: Sequence[tuple[int, LeafSpec]],
    meshes: Sequence[MeshSpec],
    process_of: Sequence[int],
    process: int,
) -> list[Target]:
    """The boxes that a process needs of leaves (with their numbers), each box once.

    The leaves say where they go: their mesh is one of `meshes`.
    """
    here = {device for device, owner in enumerate(process_of) if owner == process}
    boxes: dict[Any, Sequence[_box.Box]] = {}
    targets: list[Target] = []
    for number, leaf in leaves:
        key = (leaf.mesh, leaf.partition, leaf.shape, leaf.per_process)
        if key not in boxes:
            mesh = None if leaf.mesh == HOST_LOCAL else meshes[leaf.mesh]
            boxes[key] = needed_boxes(leaf, mesh, here, process)
        targets += [Target(number, box) for box in boxes[key]]
    return targets


def count_pieces(metadata: Metadata, targets: Sequence[Target]) -> int:
    """The number of pieces of files in these targets: the cost of planning their restore."""
    counts: dict[Any, int] = {}
    total = 0
    for target in targets:
        leaf = metadata.leaves[target.leaf]
        key = (leaf.layout, leaf.spec.shape, target.box)
        if key not in counts:
            grid = metadata.layouts[leaf.layout].grid
            counts[key] = _box.count_overlapping(leaf.spec.shape, grid, target.box)
        total += counts[key]
    return total
