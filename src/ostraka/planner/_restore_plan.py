"""The plan of a restore: the bytes that each process reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ostraka.common import html
from ostraka.common.dtypes import DTYPES
from ostraka.common.threads import paused_gc
from ostraka.common.units import bytes_per_second, human_bytes
from ostraka.errors import Mismatch, count_of
from ostraka.layout import box as _box
from ostraka.layout.metadata import Metadata
from ostraka.layout.plan_parity import planned_digests
from ostraka.layout.plan_read import plan_chunks, plan_read
from ostraka.layout.spec import (
    HOST_LOCAL,
    LeafSpec,
    MeshSpec,
    Partition,
    Target,
    check_partition,
    needed_boxes,
)
from ostraka.planner.rules import resolve_rules
from ostraka.planner.state import SAMPLED_PROCESSES, share_devices, target_mesh
from ostraka.planner.time import Bandwidths
from ostraka.sharding.rules import is_plain
from ostraka.storage.requests import OPEN_REQUESTS, opening_bytes
from ostraka.tree.patterns import selects, unmatched

_EXACT_TARGETS = 100_000
_MAX_PIECES = 2_000_000


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


@dataclass(frozen=True, slots=True, repr=False)
class RestorePlan:
    """The bytes, ranges and requests of a restore, before it runs.

    `Plan.restore` returns one. A notebook shows its numbers.
    """

    mesh: MeshSpec | None
    """The mesh of the restored arrays. None if they go back to the meshes that they were on."""
    process_count: int
    """The number of processes that restore."""
    processes: tuple[ReadAccount, ...]
    """An account of each process, or of those that were worked out."""
    opening_bytes: tuple[int, ...]
    """The bytes of `_METADATA` and the indexes that each of them reads."""

    @property
    def is_sampled(self) -> bool:
        """True if only some of the processes were worked out."""
        return len(self.processes) < self.process_count

    @property
    def needed_bytes(self) -> Spread:
        """The bytes that the devices and host arrays of a process need."""
        return spread_of([account.needed_bytes for account in self.processes])

    @property
    def read_bytes(self) -> Spread:
        """The bytes of shard files that a process reads."""
        return spread_of([account.read_bytes for account in self.processes])

    @property
    def ranges(self) -> Spread:
        """The number of ranges that a process reads."""
        return spread_of([account.ranges for account in self.processes])

    @property
    def requests(self) -> Spread:
        """The number of requests that a process sends to a bucket."""
        return spread_of([account.requests for account in self.processes])

    @property
    def files(self) -> Spread:
        """The number of shard files that a process opens."""
        return spread_of([account.files for account in self.processes])

    @property
    def over_read(self) -> float:
        """The bytes that are read beyond those that are needed, as a share of the latter."""
        needed, read = self.needed_bytes.mean, self.read_bytes.mean
        return read / needed - 1 if needed else 0.0

    def duration_s(self, *, read_bandwidth: Any = None, storage_bandwidth: Any = None) -> float:
        """How long the reading takes.

        Args:
            read_bandwidth: What one host reads: bytes a second, or text such as `"2GB/s"`.
            storage_bandwidth: What the storage gives all hosts together.

        Returns:
            Seconds.

        Raises:
            ValueError: No bandwidth is given.

        Example:
            >>> planned.restore(mesh={"data": 16}, processes=2).duration_s(read_bandwidth="2GB/s")
        """
        rates = Bandwidths(
            host_read=bytes_per_second("read_bandwidth", read_bandwidth),
            storage=bytes_per_second("storage_bandwidth", storage_bandwidth),
        )
        found = self.time_s_at(rates)
        if found is None:
            raise ValueError("give read_bandwidth or storage_bandwidth, such as '2GB/s'")
        return found

    def time_s_at(self, bandwidths: Bandwidths) -> float | None:
        """As `duration_s`. None if the bandwidths are not known."""
        in_all = round(self.read_bytes.mean * self.process_count)
        return bandwidths.read_s(self.read_bytes.most, in_all)

    def __repr__(self) -> str:
        where = "" if self.mesh is None else f" onto {self.mesh},"
        hosts, most = count_of(self.process_count, "process"), human_bytes(self.read_bytes.most)
        return f"<RestorePlan{where} {hosts}, each reads at most {most}>"

    def _repr_html_(self) -> str:
        worked_out = f", {len(self.processes):,} of them worked out" if self.is_sampled else ""
        entries = {
            "mesh": "as saved" if self.mesh is None else str(self.mesh),
            "processes": f"{self.process_count:,}{worked_out}",
            "needed by a process": html.size(self.needed_bytes.most),
            "read by a process": html.size(self.read_bytes.most),
            "over-read": f"{self.over_read:.2%}",
            "reads of a process": f"{self.ranges.most:,} in {count_of(self.files.most, 'file')}",
            "requests of a process": f"{self.requests.most:,} in a bucket",
            "metadata and indexes": html.size(max(self.opening_bytes, default=0)),
        }
        rows = [
            (
                *(f"{p.process}", human_bytes(p.needed_bytes), human_bytes(p.read_bytes)),
                *(f"{p.ranges:,}", f"{p.files:,}", f"{p.requests:,}"),
            )
            for p in self.processes
        ]
        head = ("process", "needed", "read", "reads", "files", "requests")
        processes = html.table(count_of(len(rows), "process"), head, rows)
        return html.frame("RestorePlan", "", html.facts(entries), processes)


@paused_gc()
def plan_restore(
    metadata: Metadata,
    metadata_bytes: int,
    mesh: Any,
    specs: Any,
    processes: int | None,
    only: Any,
    sampled: Sequence[int] | None,
) -> RestorePlan:
    """Resolve the sharding of every leaf, and count what each process reads for it."""
    numbered = [(n, leaf.spec) for n, leaf in enumerate(metadata.leaves)]
    known = [leaf.spec.path for leaf in metadata.leaves]
    if only is not None:
        problems = [*unmatched("only", only, known, "array of the checkpoint").values()]
        numbered = [(n, leaf) for n, leaf in numbered if selects(only, leaf.path)]
        if problems or not numbered:
            nothing = [f"no array is selected by only={only!r}"]
            raise Mismatch("can't plan the restore", problems or nothing)
    target = None
    meshes: Sequence[MeshSpec] = metadata.meshes
    process_of = metadata.process_of
    if mesh is not None:
        target = target_mesh(mesh)
        meshes = [target]
        process_of = share_devices(max(target.devices) + 1, 1 if processes is None else processes)
        numbered = _moved(numbered, target, specs, known)
    elif specs is not None or processes is not None:
        raise ValueError("specs and processes need mesh=, the mesh to restore onto")
    count, before = max(process_of) + 1, metadata.process_count
    different = [
        f"{leaf.path!r}: each of the {before} processes that saved it had its own value; this run "
        f"has {count}: restore with as many"
        for _, leaf in numbered
        if leaf.per_process and count != before
    ]
    if different:
        raise Mismatch("can't plan the restore", different)
    if sampled is None:
        are_few = len(numbered) * len(process_of) <= _EXACT_TARGETS or count <= SAMPLED_PROCESSES
        sampled = range(count) if are_few else (0, count - 1)
    accounts: list[ReadAccount] = []
    for process in sampled:
        targets = local_targets(numbered, meshes, process_of, process)
        pieces = count_pieces(metadata, targets)
        if pieces > _MAX_PIECES:
            raise ValueError(
                f"process {process} would put {pieces:,} pieces of files together, too many to "
                f"plan (at most {_MAX_PIECES:,}): restore onto more hosts, or only a part"
            )
        accounts.append(account_read(metadata, process, targets))
    indexes = {p: index.size for p, index in metadata.indexes.items()}
    opening = [
        metadata_bytes + sum(indexes.get(p, 0) for p in account.index_processes)
        for account in accounts
    ]
    return RestorePlan(target, count, tuple(accounts), tuple(opening))


def _moved(
    numbered: Sequence[tuple[int, LeafSpec]], mesh: MeshSpec, specs: Any, known: Sequence[str]
) -> list[tuple[int, LeafSpec]]:
    """The leaves on another mesh, with `specs` or their saved ones. Host arrays stay."""
    placed = [leaf for _, leaf in numbered if leaf.kind in ("jax", "key")]
    found = {} if specs is None else _resolve(placed, mesh, specs, known)
    moved: list[tuple[int, LeafSpec]] = []
    for number, leaf in numbered:
        if leaf.kind in ("jax", "key"):
            leaf = replace(leaf, mesh=0, partition=found.get(leaf.path, leaf.partition))
            check_partition(leaf.path, leaf.logical_shape, mesh, leaf.partition)
        moved.append((number, leaf))
    return moved


def _resolve(
    leaves: Sequence[LeafSpec], mesh: MeshSpec, specs: Any, known: Sequence[str]
) -> Mapping[str, Partition]:
    """The partitions of the leaves that `specs` covers: rules, or specs of `ostraka.restore`."""
    if not is_plain(specs):  # All others involve JAX's types.
        from ostraka.planner._tree import partitions_given
        from ostraka.sharding.specs import is_rules

        if not is_rules(specs):
            return partitions_given(leaves, specs, known)
    return resolve_rules(leaves, mesh, specs)[0]


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
            under = _box.parts_under(leaf.spec.shape, grid, target.box)
            counts[key] = prod(map(len, under))
        total += counts[key]
    return total


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
