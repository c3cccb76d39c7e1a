"""The plan of a save: its files, and the bytes, requests and memory that follow."""

from __future__ import annotations

import os
import platform
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import prod
from operator import add
from typing import Any, cast

import numpy as np

from ostraka._version import __version__
from ostraka.common import html
from ostraka.common.dtypes import DTYPES, is_floating
from ostraka.common.record import Stopwatch, summarize, timeline
from ostraka.common.threads import paused_gc
from ostraka.common.units import bytes_per_second, human_bytes
from ostraka.errors import count_of
from ostraka.layout import metadata as _metadata
from ostraka.layout import shard_file
from ostraka.layout.codec import check_rule
from ostraka.layout.metadata import IndexEntry, Metadata
from ostraka.layout.parity_file import Parity, ParityFile, layouts_of
from ostraka.layout.plan_parity import (
    GROUPS_AT_ONCE,
    Covers,
    check_parity,
    plan_parity,
    planned_digests,
)
from ostraka.layout.plan_write import (
    BAND_BYTES,
    STAGING_BYTES,
    WritePlan,
    check_file_bytes,
    plan_write,
)
from ostraka.layout.shard_file import FileEntry
from ostraka.layout.spec import (
    HOST_LOCAL,
    LeafSpec,
    MeshSpec,
    check_partition,
    holders,
    largest_cell_bytes,
    partition_grid,
)
from ostraka.planner import time as _time
from ostraka.planner._restore_plan import RestorePlan, Spread, plan_restore, spread_of
from ostraka.planner.state import SAMPLED_PROCESSES, PlanOptions, State
from ostraka.planner.time import Bandwidths, Times, work_out_times
from ostraka.reading.html import array_line, draw_leaves
from ostraka.sharding.findings import Finding
from ostraka.storage import USUAL_WRITERS
from ostraka.storage.requests import COMMIT_REQUESTS, JOIN_REQUESTS, upload_requests

_NO_DIGEST = "0" * 16
_NO_INDEX_DIGEST = "0" * 32
_EXACT_ENTRIES = 200_000
"""Up to this number of boxes, every index is computed. Above, two of them are."""
_PHASES = ("wait", "capture", "agree", "plan", "write")
"""The phases that `save` has timed when it writes `_METADATA`."""
_SOME_SECONDS = 0.1234
_MOST_BYTES = 1 << 62
_DTYPES_SHOWN = 4
_OPTIMIZER = "optimizer"
_WIDE = "float32"


@dataclass(frozen=True, slots=True)
class PlannedParity:
    """The parity files of a save."""

    table: Parity
    covers: Covers | None
    """The things that may be lost, `table.count` of them. None for an existing checkpoint."""
    is_read_back: bool
    """True if shard files are read back. A single process has them in memory."""
    bytes_by_process: tuple[int, ...]
    """Bytes of parity files that each process writes."""
    read_bytes_by_process: tuple[int, ...]
    """Bytes that each process reads back: once the members of a group that it writes parity for."""
    requests_by_process: tuple[int, ...]
    """Requests of each process, to write parity files and to read shard files back."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all parity files."""
        return sum(self.bytes_by_process)

    @property
    def memory_bytes(self) -> int:
        """The most memory that a process takes for parity."""
        most = max((len(members) for members in self.table.groups), default=0)
        if not self.is_read_back:
            return USUAL_WRITERS * self.table.count * shard_file.BLOCK_BYTES
        return GROUPS_AT_ONCE * (most + self.table.count) * shard_file.BLOCK_BYTES


def plan_parity_files(
    write: WritePlan, count: int, index_bytes: Mapping[int, int]
) -> PlannedParity:
    """The parity files of a save by a process on each host."""
    processes = max(write.process_of) + 1
    planned = plan_parity(write.files, write.process_of, range(processes), count=count)
    groups = tuple(group.members for group in planned.groups)
    layouts = layouts_of(groups, write.files, write.process_of, index_bytes)
    files = [
        ParityFile(number, place, process, layout.header_bytes, layout.size, _NO_DIGEST)
        for number, (group, layout) in enumerate(zip(planned.groups, layouts, strict=True))
        for place, process in enumerate(group.writers)
    ]
    table = Parity(count, groups, tuple(files))
    return count_parity(write, table, planned.covers, processes > 1 or bool(write.codecs))


def count_parity(
    write: WritePlan, table: Parity, covers: Covers | None, is_read_back: bool
) -> PlannedParity:
    count = max(write.process_of) + 1
    written, read, requests = [0] * count, [0] * count, [0] * count
    for file in table.files:
        written[file.process] += file.size
        requests[file.process] += upload_requests(file.size)
    indexes: list[set[int]] = [set() for _ in range(count)]
    copied: set[int] = set()
    for group, members in enumerate(table.groups if is_read_back else ()):
        files = [write.files[row] for row in members]
        owners = {write.process_of[file.device] for file in files}
        for process in {file.process for file in table.files_of(group)}:
            read[process] += sum(file.size for file in files)
            # Each file is opened, and read in blocks. An index that is copied is read again.
            ranges = sum(1 + -(-file.size // shard_file.BLOCK_BYTES) for file in files)
            requests[process] += ranges + len(owners - copied)
            indexes[process] |= owners
        copied |= owners
    requests = [asked + len(known) for asked, known in zip(requests, indexes, strict=True)]
    return PlannedParity(table, covers, is_read_back, tuple(written), tuple(read), tuple(requests))


@dataclass(frozen=True, slots=True)
class CompressedSize:
    """The size of a compressed checkpoint: that of an existing one, or an estimate."""

    total_bytes: int
    is_estimate: bool


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


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The files of a checkpoint, to the byte, before it is written.

    `ostraka.plan` returns one. Sizes are in bytes, and those without compression, unless a name
    says otherwise. A notebook shows the numbers and the planned arrays.

    Example:
        >>> planned = ostraka.plan("llama-3.1-8b", mesh={"data": 64}, optimizer="adamw")
        >>> planned.total_bytes, planned.process_spread.most
        >>> planned.restore(mesh={"data": 32}, processes=4).over_read
        >>> planned.times(write_bandwidth="2GB/s").save_s
    """

    _write: WritePlan
    """The plan that `save` executes."""
    _metadata: Metadata
    """`_METADATA`, with placeholders for the id, the digests and the times."""
    metadata_bytes: int
    """The size of `_METADATA`. It has how long the save took, give or take a few digits."""
    index_bytes: Mapping[int, int]
    """By process, the size of its index."""
    indexes_are_exact: bool
    """True if each index was computed. If not, all are assumed to be as large as two of them."""
    parameters: int | None
    """The number of the model's parameters, if it is known which leaves they are."""
    findings: tuple[Finding, ...]
    """Warnings about the sharding."""
    adds_optimizer: bool = False
    """True if the optimizer's state is what optax would make, rather than an existing one."""
    compressed: CompressedSize | None = None
    """The size with compression, if there is any."""
    parity: PlannedParity | None = None
    """The parity files, if there are any. All sizes include them."""

    def __repr__(self) -> str:
        dtypes = sorted({leaf.spec.dtype for leaf in self._write.leaves})
        names = ", ".join(dtypes) if len(dtypes) <= _DTYPES_SHOWN else f"{len(dtypes)} dtypes"
        files = len(self.files) + self.metadata_files
        return (
            f"<Plan: {human_bytes(self.total_bytes)} in {files:,} files, "
            f"{self.arrays:,} arrays ({names}), {count_of(self.process_count, 'process')}>"
        )

    def _repr_html_(self) -> str:
        largest, spread = self.largest_file, self.process_spread
        meshes = dict.fromkeys(str(mesh) for mesh in self.meshes)
        entries = {
            "mesh": "; ".join(meshes),
            "devices": f"{self.device_count:,} on {count_of(self.process_count, 'host')}",
            "parameters": None if self.parameters is None else f"{self.parameters:,}",
            "arrays": f"{self.arrays:,}, {html.size(self.data_bytes)}",
            "files": f"{len(self.files) + self.metadata_files:,}, {html.size(self.total_bytes)}",
            "compressed": self.compressed and html.size(self.compressed.total_bytes),
            "parity": self.parity and html.size(self.parity.total_bytes),
            "largest file": largest and f"{largest.name}, {html.size(largest.size)}",
            "a host writes": f"{human_bytes(spread.least)} to {human_bytes(spread.most)}",
            "staging memory": f"{human_bytes(self.staging_bytes())} on a host, with accelerators",
        }
        groups = [
            (name, ", ".join(sizes), human_bytes(sum(sizes.values())))
            for name, sizes in self.bytes_by_group.items()
        ]
        specs = (leaf.spec for leaf in self._write.leaves)
        return html.frame(
            "Plan",
            "",
            html.facts(entries),
            html.sentences("finding", [str(finding) for finding in self.findings], is_open=True),
            html.table(count_of(len(groups), "group"), ("group", "dtypes", "size"), groups),
            draw_leaves([array_line(spec.path, spec, self.meshes) for spec in specs]),
            html.table("if something is lost", ("lost", "costs"), list(self._losses())),
        )

    def _losses(self) -> Iterator[tuple[str, str]]:
        """Each thing that may be lost, and its cost, for people."""
        shard, process, disk = self.lost_shard(), self.lost_process(), self.lost_disk()
        if shard is not None:
            size, elsewhere = human_bytes(shard.size_bytes), human_bytes(shard.held_elsewhere_bytes)
            yield "the largest shard file", f"{size} to write, {elsewhere} held elsewhere"
        held, sole = human_bytes(process.held_bytes), human_bytes(process.sole_bytes)
        yield "a host", f"{held} to restore, {sole} held by it alone"
        size, elsewhere = human_bytes(disk.written_bytes), human_bytes(disk.held_elsewhere_bytes)
        yield "the disk of a host", f"{size} to write, {elsewhere} held elsewhere"

    @property
    def files(self) -> dict[str, int]:
        """Every file of the checkpoint with its size, but `_METADATA`.

        The names are those in the directory of shards, which is named after a random id.
        """
        files = {file.name: file.size for file in self._write.files}
        if self.parity is not None:
            files |= {file.name: file.size for file in self.parity.table.files}
        return files | {shard_file.index_name(p): n for p, n in self.index_bytes.items() if n}

    @property
    def data_bytes(self) -> int:
        """The bytes of all arrays, each counted once."""
        return sum(leaf.spec.nbytes for leaf in self._write.leaves)

    @property
    def total_bytes(self) -> int:
        """The bytes of all files: shards, parity, indexes and both copies of `_METADATA`."""
        shards = sum(file.size for file in self._write.files)
        parity = 0 if self.parity is None else self.parity.total_bytes
        metadata = self.metadata_bytes * self.metadata_files
        return shards + parity + sum(self.index_bytes.values()) + metadata

    @property
    def metadata_files(self) -> int:
        """How many times `_METADATA` is written: a copy is among the shards."""
        return 2 if self._write.files else 1

    @property
    def bytes_by_group(self) -> dict[str, dict[str, int]]:
        """By topmost name, and for each moment of an optimizer: the bytes of each dtype.

        Example:
            >>> plan("gpt2", optimizer="adamw").bytes_by_group["optimizer mu"]
            {'float32': 497759232}
        """
        groups: dict[str, dict[str, int]] = {}
        for leaf in (stored.spec for stored in self._write.leaves):
            group = groups.setdefault(_group_of(leaf.path), {})
            group[leaf.dtype] = group.get(leaf.dtype, 0) + leaf.nbytes
        return groups

    def data_bytes_in_float32(self, *, parameters: bool) -> int:
        """`data_bytes` with float32 in the place of the optimizer's narrower floats.

        Args:
            parameters: True for float32 in the place of all other narrower floats, too. That is
                the size if parameters are kept in float32 and only computed with in bfloat16.

        Returns:
            A number of bytes.
        """
        total = 0
        for leaf in (stored.spec for stored in self._write.leaves):
            is_narrow = is_floating(leaf.dtype) and DTYPES[leaf.dtype].bits < DTYPES[_WIDE].bits
            is_widened = is_narrow and (parameters or leaf.path.startswith(f"{_OPTIMIZER}/"))
            total += DTYPES[_WIDE if is_widened else leaf.dtype].nbytes(prod(leaf.shape))
        return total

    @property
    def arrays(self) -> int:
        """The number of arrays."""
        return len(self._write.leaves)

    @property
    def elements(self) -> int:
        """The number of elements of all arrays."""
        return sum(prod(leaf.spec.shape) for leaf in self._write.leaves)

    @property
    def meshes(self) -> tuple[MeshSpec, ...]:
        """The meshes that arrays are on."""
        return tuple(self._write.meshes)

    @property
    def device_count(self) -> int:
        """The number of devices."""
        return len(self._write.process_of)

    @property
    def process_count(self) -> int:
        """The number of processes that save."""
        return max(self._write.process_of) + 1

    @property
    def shard_count(self) -> int:
        """The number of shard files."""
        return len(self._write.files)

    @property
    def bytes_by_process(self) -> list[int]:
        """The bytes that each process writes: its shards, its parity files and its index."""
        sizes = _file_bytes(self._write, self.parity)
        return [size + self.index_bytes.get(p, 0) for p, size in enumerate(sizes)]

    @property
    def process_spread(self) -> Spread:
        """How `bytes_by_process` differ."""
        return spread_of(self.bytes_by_process)

    @property
    def requests_by_process(self) -> list[int]:
        """The requests of each process for a save to a new path in a bucket.

        Retries, and the lock that is renewed every 5 s while a save lasts, are not counted.
        """
        write = self._write
        totals = [COMMIT_REQUESTS, *[JOIN_REQUESTS] * (self.process_count - 1)]
        totals[0] += bool(write.files)  # the second copy of `_METADATA`
        for file in write.files:
            totals[write.process_of[file.device]] += upload_requests(file.size)
        for process, size in self.index_bytes.items():
            totals[process] += upload_requests(size)
        if self.parity is None:
            return totals
        return list(map(add, totals, self.parity.requests_by_process))

    @property
    def shard_spread(self) -> Spread:
        """How the data bytes that devices contribute differ."""
        totals = [0] * self.device_count
        for file in self._write.files:
            totals[file.device] += file.size - file.header_bytes
        return spread_of(totals)

    @property
    def largest_file(self) -> FileEntry | None:
        """The largest shard file. None if there is none."""
        return max(self._write.files, key=lambda file: file.size, default=None)

    def staging_bytes(self, *, on_accelerators: bool = True) -> int:
        """The most host memory that a save takes on one host, besides the state itself.

        Args:
            on_accelerators: True if arrays must be copied to the host. On CPUs they are there.

        Returns:
            A number of bytes.
        """
        staging = staging_bytes(self._write, on_accelerators=on_accelerators)
        if self.parity is None:
            return staging
        parity = self.parity.memory_bytes
        # Shards are read back when all else is done.
        return max(staging, parity) if self.parity.is_read_back else staging + parity

    def lost_shard(self) -> LostShard | None:
        """The cost of losing the largest shard file. None if there is none."""
        plan = self._write
        if not plan.files:
            return None
        file = max(plan.files, key=lambda f: (f.size, -f.device, -f.part))
        entries = shard_file.entries_by_file(plan.leaves, plan.layouts, {file.device})
        listed = entries[file.device, file.part]
        elsewhere = sum(
            entry.nbytes
            for entry in listed
            if _copies(plan.leaves[entry.leaf].spec, plan.meshes, len(plan.process_of)) > 1
        )
        return LostShard(file.name, file.size, len({entry.leaf for entry in listed}), elsewhere)

    def lost_process(self) -> LostProcess:
        """The cost of losing the host that holds the most."""
        held, sole = held_by_process(self._write)
        process = max(range(len(held)), key=lambda p: (held[p], sole[p], -p))
        return LostProcess(process, held[process], sole[process])

    def lost_disk(self) -> LostDisk:
        """The cost of losing the shards of the process that wrote the most."""
        written = file_bytes_by_process(self._write)
        process = max(range(len(written)), key=lambda p: (written[p], -p))
        data = sum(file.size - file.header_bytes for file in self._write.files_of(process))
        # Only the process that holds data alone could have written it.
        sole = held_by_process(self._write)[1][process]
        return LostDisk(process, written[process], data - sole)

    def restore(
        self,
        *,
        mesh: Any = None,
        specs: Any = None,
        processes: int | None = None,
        only: Any = None,
        sampled: Sequence[int] | None = None,
    ) -> RestorePlan:
        """Plan a restore of this checkpoint, process by process.

        Args:
            mesh: The mesh to restore onto, or axis sizes such as `{"data": 8}`. By default arrays
                go back to the meshes that they were on.
            specs: How arrays are sharded on `mesh`, as in `ostraka.restore`, or rules. By default
                they keep their specs.
            processes: How many processes share the devices of `mesh`, 1 by default.
            only: Patterns of the paths to restore.
            sampled: The processes to work out. By default all, or a few of very many.

        Returns:
            The bytes, ranges and requests of each process.

        Raises:
            InvalidSharding: A spec does not fit the mesh.
            Mismatch: `only` or `specs` name arrays that do not exist, or arrays with a value for
                each process would go to another number of processes.
            ValueError: `specs` or `processes` are given without `mesh`.

        Example:
            >>> planned.restore(mesh={"data": 128, "model": 8}, processes=128).read_bytes.most
        """
        return plan_restore(
            self._metadata, self.metadata_bytes, mesh, specs, processes, only, sampled
        )

    def times(
        self,
        *,
        write_bandwidth: float | str | None = None,
        read_bandwidth: float | str | None = None,
        storage_bandwidth: float | str | None = None,
        device_bandwidth: float | str | None = None,
        probe: str | os.PathLike[str] | None = None,
        mtbf_s: float | None = None,
    ) -> Times:
        """Estimate how long a save and a restore take, and how often to save.

        Bandwidths are bytes a second, or text such as `"2GB/s"` and `"25Gbit/s"`.

        Args:
            write_bandwidth: What one host writes.
            read_bandwidth: What one host reads.
            storage_bandwidth: What the storage takes from all hosts together.
            device_bandwidth: From the devices of a host to its memory.
            probe: A directory in which to measure what this machine writes and reads.
            mtbf_s: The mean time between failures of the whole job, to work out how often to save.

        Returns:
            The times that the given bandwidths allow to work out.

        Raises:
            ValueError: No bandwidth is given, or none for writing although `mtbf_s` is.

        Example:
            >>> planned.times(write_bandwidth="2GB/s", device_bandwidth="20GB/s", mtbf_s=4 * 3600)
        """
        known = Bandwidths() if probe is None else _time.probe(os.fspath(probe))
        bandwidths = Bandwidths(
            host_write=bytes_per_second("write_bandwidth", write_bandwidth) or known.host_write,
            host_read=bytes_per_second("read_bandwidth", read_bandwidth) or known.host_read,
            storage=bytes_per_second("storage_bandwidth", storage_bandwidth),
            device=bytes_per_second("device_bandwidth", device_bandwidth),
        )
        if bandwidths == Bandwidths():
            raise ValueError("times need a bandwidth, such as write_bandwidth='2GB/s', or probe=")
        if mtbf_s is not None and not isinstance(cast(Any, mtbf_s), int | float):
            raise TypeError(f"mtbf_s is {mtbf_s!r}; it must be a number of seconds")
        if mtbf_s is not None and bandwidths.peak_write(1) is None:
            raise ValueError(
                "mtbf_s needs to know how long a save takes: give write_bandwidth, "
                "storage_bandwidth or probe"
            )
        return self.times_at(bandwidths, mtbf_s, self.restore_in_place())

    def restore_in_place(self) -> RestorePlan:
        """Plan a restore with the shardings of the save."""
        # One host of very many is like the others.
        return self.restore(sampled=None if self.indexes_are_exact else (0,))

    def times_at(self, bandwidths: Bandwidths, mtbf_s: float | None, back: RestorePlan) -> Times:
        """As `times`, with the plan of a restore."""
        return work_out_times(
            bandwidths,
            save_s=bandwidths.write_s(self.process_spread.most, self.total_bytes),
            restore_s=back.time_s_at(bandwidths),
            held_bytes=self.lost_process().held_bytes,
            mtbf_s=mtbf_s,
        )


def _group_of(path: str) -> str:
    """`optimizer mu` for `optimizer/opt_state/1/0/mu/kernel`, else the topmost name."""
    top, *names = path.split("/")
    if top != _OPTIMIZER:
        return top
    # Transformations in a chain, and chains within them, have numbers.
    named = [name for name in names if name != "opt_state" and not name.isdigit()]
    return f"{top} {named[0]}" if len(named) > 1 else top


def plan_state(state: State, options: PlanOptions) -> Plan:
    """The plan of a state. Raises InvalidSharding if a spec does not fit."""
    compress, parity = options.compress, options.parity
    check_rule(compress, state.leaves)
    check_parity(parity)
    check_file_bytes(options.max_file_bytes)
    if sum(leaf.nbytes for leaf in state.leaves) > _MOST_BYTES:
        largest = max(state.leaves, key=lambda leaf: leaf.nbytes)
        raise ValueError(
            f"the state is too large to be planned: leaf {largest.path!r} {largest.shape} alone "
            f"has {largest.nbytes:,} bytes, and {_MOST_BYTES:,} is the most in all"
        )
    checked: set[Any] = set()
    for leaf in state.leaves:
        key = (leaf.mesh, leaf.partition, leaf.shape)
        if leaf.mesh != HOST_LOCAL and key not in checked:
            mesh = state.meshes[leaf.mesh]
            check_partition(leaf.path, leaf.logical_shape, mesh, leaf.partition)
            checked.add(key)
    with paused_gc():
        write = plan_write(
            state.leaves,
            state.meshes,
            state.process_of,
            max_file_bytes=options.max_file_bytes,
            compress=compress,
        )
        sizes, exact = _index_bytes(write)
        sums = plan_parity_files(write, parity, sizes) if parity else None
    # The placeholders for the id, the digests and the writer make it as long as the real one.
    metadata = Metadata(
        id=_NO_DIGEST,
        writer=_describe_writer(_file_bytes(write, sums), has_parity=sums is not None),
        process_of=write.process_of,
        tree=state.tree,
        meshes=write.meshes,
        layouts=write.layouts,
        leaves=write.leaves,
        files=write.files,
        indexes={p: IndexEntry(size, _NO_INDEX_DIGEST) for p, size in sizes.items() if size},
        user=state.user,
        parity=None if sums is None else sums.table,
    )
    size = len(_metadata.encode_metadata(metadata))
    planned = Plan(
        _write=write,
        _metadata=metadata,
        metadata_bytes=size,
        index_bytes=sizes,
        indexes_are_exact=exact,
        parameters=state.parameters,
        findings=state.findings,
        adds_optimizer=state.adds_optimizer,
        parity=sums,
    )
    if compress is None:
        return planned
    estimate = planned.total_bytes - _typical_savings(write)
    return replace(planned, compressed=CompressedSize(estimate, is_estimate=True))


def _index_bytes(write: WritePlan) -> tuple[dict[int, int], bool]:
    """The size of the index of each process that writes shards, and True if all are exact.

    If there are very many boxes, the sizes are estimated from two.
    """
    files: dict[int, list[FileEntry]] = {}
    for file in write.files:
        files.setdefault(write.process_of[file.device], []).append(file)
    writing = sorted(files)
    boxes = sum(len(write.layouts[leaf.layout].owners) for leaf in write.leaves)
    is_exact = boxes <= _EXACT_ENTRIES or len(writing) <= SAMPLED_PROCESSES
    sampled = writing if is_exact else [writing[0], writing[-1]]
    devices = {file.device for process in sampled for file in files[process]}
    contents = shard_file.entries_by_file(write.leaves, write.layouts, devices)
    sizes: dict[int, int] = {}
    for process in sampled:
        digests = {
            file.name: planned_digests(file, contents[file.device, file.part])
            for file in files[process]
        }
        sizes[process] = len(shard_file.encode_index(_NO_DIGEST, process, digests))
    return sizes if is_exact else dict.fromkeys(writing, max(sizes.values())), is_exact


def _file_bytes(write: WritePlan, parity: PlannedParity | None) -> list[int]:
    """The bytes of all shard files and parity files of each process."""
    sizes = file_bytes_by_process(write)
    return sizes if parity is None else list(map(add, sizes, parity.bytes_by_process))


def _describe_writer(sizes: Sequence[int], *, has_parity: bool) -> dict[str, Any]:
    """The writer in `_METADATA`, for processes that write files of these sizes.

    The durations and the names of the hosts are placeholders. The real ones may be longer or
    shorter.
    """
    phases = (*_PHASES, "parity") if has_parity else _PHASES
    watch = Stopwatch(phases=dict.fromkeys(phases, _SOME_SECONDS), blocked_s=_SOME_SECONDS)
    by_process = [(size, _SOME_SECONDS) for size in sizes]
    return {
        "ostraka": __version__,
        "jax": version("jax"),  # without importing it
        "python": platform.python_version(),
        "time": "2000-01-01T00:00:00.000+00:00",
        "hosts": [socket.gethostname()] * len(sizes),
        "timeline": timeline(watch, summarize(by_process), by_process),
    }


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


def _copies(leaf: LeafSpec, meshes: Sequence[MeshSpec], devices: int) -> int:
    """How many devices hold each part of a leaf."""
    if leaf.per_process:
        return 1
    if leaf.mesh == HOST_LOCAL:
        return devices
    mesh = meshes[leaf.mesh]
    return len(mesh.devices) // prod(partition_grid(mesh, leaf.partition, len(leaf.shape)))


def staging_bytes(write: WritePlan, *, on_accelerators: bool) -> int:
    """The most host memory that a save takes on one process, besides the state itself.

    Each of the threads puts small boxes together in a block of its own. Arrays on
    accelerators come to the host shard by shard, large ones in bands, as many at a time as the
    budget admits. On CPUs no copy is made.
    """
    files = Counter(write.process_of[file.device] for file in write.files)
    threads = min(USUAL_WRITERS, max(files.values(), default=0))
    scratch = threads * shard_file.BLOCK_BYTES
    if not on_accelerators:
        return scratch
    kinds = {
        (leaf.layout, leaf.spec.shape, leaf.spec.dtype, leaf.spec.mesh, leaf.spec.partition): leaf
        for leaf in write.leaves
    }
    staged = 0
    for leaf in kinds.values():
        spec = leaf.spec
        box = largest_cell_bytes(spec, write.layouts[leaf.layout].grid)
        if spec.mesh == HOST_LOCAL or box == 0:
            continue
        grid = partition_grid(write.meshes[spec.mesh], spec.partition, len(spec.shape))
        shard = DTYPES[spec.dtype].nbytes(prod(spec.shape) // prod(grid))
        at_once = min(threads, max(STAGING_BYTES // min(box, BAND_BYTES), 1))
        staged = max(staged, at_once * min(shard, BAND_BYTES))
    return scratch + staged


def file_bytes_by_process(plan: WritePlan) -> list[int]:
    """The bytes of all shard files of each process, headers included."""
    totals = [0] * (max(plan.process_of) + 1)
    for file in plan.files:
        totals[plan.process_of[file.device]] += file.size
    return totals


_TYPICAL_RATIOS = {"bfloat16": 0.67, "float16": 0.85, "float32": 0.84, "float64": 0.88}
"""Measured for normal weights. There is no general figure for other dtypes."""


def _typical_savings(plan: WritePlan) -> int:
    """The bytes that compression saves for normal weights."""
    saved = 0.0
    for leaf in (plan.leaves[number] for number in plan.codecs):
        nbytes = leaf.spec.nbytes
        if nbytes // len(plan.layouts[leaf.layout].owners) >= shard_file.LEAST_COMPRESSED_BYTES:
            saved += nbytes * (1 - _TYPICAL_RATIOS.get(leaf.spec.dtype, 1.0))
    return round(saved)
