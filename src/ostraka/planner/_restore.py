"""What a restore reads, before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ostraka._metadata import Metadata
from ostraka._pattern import selects, unmatched
from ostraka._spec import LeafSpec, MeshSpec, Partition, check_partition
from ostraka._units import human_bytes
from ostraka.errors import Mismatch
from ostraka.planner import _account
from ostraka.planner._account import ReadAccount, Spread
from ostraka.planner._rates import bytes_per_second
from ostraka.planner._state import (
    SAMPLED_PROCESSES,
    check_mesh_has_names,
    mesh_of_sizes,
    share_devices,
)
from ostraka.planner._time import Bandwidths
from ostraka.sharding._combine import is_plain

_EXACT_TARGETS = 100_000
_MAX_PIECES = 2_000_000


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is there, or will be."""

    metadata: Metadata
    metadata_bytes: int
    index_bytes: Mapping[int, int]


@dataclass(frozen=True, slots=True, repr=False)
class RestorePlan:
    """What a restore reads."""

    mesh: MeshSpec | None
    """The mesh that all goes to; None where it goes back to those that it was on."""
    process_count: int
    processes: tuple[ReadAccount, ...]
    """All of them, or those that were computed."""
    opening_bytes: tuple[int, ...]
    """What each of them reads of `_METADATA` and the indexes."""

    @property
    def is_sampled(self) -> bool:
        return len(self.processes) < self.process_count

    @property
    def needed_bytes(self) -> Spread:
        return _account.spread_of([account.needed_bytes for account in self.processes])

    @property
    def read_bytes(self) -> Spread:
        """What each process reads of the shard files."""
        return _account.spread_of([account.read_bytes for account in self.processes])

    @property
    def ranges(self) -> Spread:
        return _account.spread_of([account.ranges for account in self.processes])

    @property
    def requests(self) -> Spread:
        """What each process asks of a bucket."""
        return _account.spread_of([account.requests for account in self.processes])

    @property
    def files(self) -> Spread:
        return _account.spread_of([account.files for account in self.processes])

    @property
    def over_read(self) -> float:
        """What is read beyond what is needed, as a share of what is needed."""
        needed = sum(account.needed_bytes for account in self.processes)
        read = sum(account.read_bytes for account in self.processes)
        return read / needed - 1 if needed else 0.0

    def time_s(self, *, read_bandwidth: Any = None, storage_bandwidth: Any = None) -> float:
        """How long the reading takes at these bandwidths of one host and of the storage.

        >>> planned.restore(mesh={"data": 16}, processes=2).time_s(read_bandwidth="2GB/s")
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
        in_all = round(self.read_bytes.mean * self.process_count)
        return bandwidths.read_s(self.read_bytes.most, in_all)

    def __repr__(self) -> str:
        where = "" if self.mesh is None else f" onto {self.mesh},"
        hosts = "1 process" if self.process_count == 1 else f"{self.process_count:,} processes"
        most = human_bytes(self.read_bytes.most)
        return f"<RestorePlan{where} {hosts}, each reads at most {most}>"


def plan_restore(
    written: Written,
    mesh: Any,
    specs: Any,
    processes: int | None,
    only: Any,
    sampled: Sequence[int] | None,
) -> RestorePlan:
    """Resolve where every leaf goes, and count what each process reads for it."""
    numbered = [(n, leaf.spec) for n, leaf in enumerate(written.metadata.leaves)]
    known = [leaf.spec.path for leaf in written.metadata.leaves]
    if only is not None:
        listed = [only] if isinstance(only, str) else only
        problems = [f"only has {p}, which matches no array" for p in unmatched(listed, known)]
        numbered = [(n, leaf) for n, leaf in numbered if selects(only, leaf.path)]
        if problems or not numbered:
            nothing = [f"no array is selected by only={only!r}"]
            raise Mismatch("can't plan the restore", problems or nothing)
    target = None
    meshes: Sequence[MeshSpec] = written.metadata.meshes
    process_of = written.metadata.process_of
    if mesh is not None:
        target = target_mesh(mesh)
        meshes = [target]
        process_of = share_devices(max(target.devices) + 1, 1 if processes is None else processes)
        numbered = _moved(numbered, target, specs, known)
    elif specs is not None or processes is not None:
        raise ValueError("specs and processes need mesh=, the mesh to restore onto")
    count = max(process_of) + 1
    _check_own_values(written, numbered, count)
    accounts = [
        _read_account(written, numbered, meshes, process_of, process)
        for process in _sampled_processes(sampled, count, len(numbered), len(process_of))
    ]
    opening = [
        written.metadata_bytes + sum(written.index_bytes.get(p, 0) for p in account.index_processes)
        for account in accounts
    ]
    return RestorePlan(target, count, tuple(accounts), tuple(opening))


def target_mesh(mesh: Any) -> MeshSpec:
    if isinstance(mesh, MeshSpec):
        return mesh
    if isinstance(mesh, Mapping):
        return mesh_of_sizes(cast("Mapping[str, int]", mesh))
    check_mesh_has_names(mesh)
    from ostraka.planner._tree import describe_target

    return describe_target(mesh)


def _moved(
    numbered: Sequence[tuple[int, LeafSpec]], mesh: MeshSpec, specs: Any, known: Sequence[str]
) -> list[tuple[int, LeafSpec]]:
    """The leaves on another mesh, by `specs` or cut as they were; host arrays are not moved."""
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
    """The partitions of the leaves that `specs` covers: rules, or what `ostraka.restore` takes."""
    from ostraka.planner._rules import resolve_rules

    if is_plain(specs):
        return resolve_rules(leaves, mesh, specs).partitions
    # All others involve JAX's types.
    from ostraka.planner._tree import partitions_given
    from ostraka.sharding._specs import is_rules

    if is_rules(specs):
        return resolve_rules(leaves, mesh, specs).partitions
    return partitions_given(leaves, specs, known)


def _check_own_values(
    written: Written, numbered: Sequence[tuple[int, LeafSpec]], count: int
) -> None:
    before = max(written.metadata.process_of) + 1
    different = [
        f"{leaf.path!r}: each of the {before} processes that saved it had its own value; this run "
        f"has {count}: restore with as many"
        for _, leaf in numbered
        if leaf.per_process and count != before
    ]
    if different:
        raise Mismatch("can't plan the restore", different)


def _sampled_processes(
    sampled: Sequence[int] | None, count: int, leaves: int, devices: int
) -> Sequence[int]:
    if sampled is not None:
        return sampled
    if leaves * devices <= _EXACT_TARGETS or count <= SAMPLED_PROCESSES:
        return range(count)
    return (0, count - 1)


def _read_account(
    written: Written,
    numbered: Sequence[tuple[int, LeafSpec]],
    meshes: Sequence[MeshSpec],
    process_of: Sequence[int],
    process: int,
) -> ReadAccount:
    targets = _account.local_targets(numbered, meshes, process_of, process)
    pieces = _account.count_pieces(written.metadata, targets)
    if pieces > _MAX_PIECES:
        raise ValueError(
            f"process {process} would put {pieces:,} pieces of files together, too many to plan "
            f"(at most {_MAX_PIECES:,}): restore onto more hosts, or only a part"
        )
    return _account.account_read(written.metadata, process, targets)
