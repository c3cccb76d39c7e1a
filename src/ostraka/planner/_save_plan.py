"""The plan of a save: what it will write, and what follows from that."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add, attrgetter
from typing import Any, cast

from ostraka import _format, _metadata
from ostraka._checkpoint import open_at
from ostraka._codec import CompressRule, check_rule, codecs_of
from ostraka._damage import damage_on_contradiction
from ostraka._format import FileEntry
from ostraka._lifetime import paused_gc
from ostraka._metadata import Metadata, take_entries
from ostraka._names_given import NamesLike
from ostraka._plan_parity import check_parity
from ostraka._plan_write import MAX_FILE_BYTES, WritePlan, plan_write
from ostraka._record import Stopwatch, summarize, timeline
from ostraka._source import Saved
from ostraka._spec import HOST_LOCAL, LeafSpec, MeshSpec, check_partition
from ostraka._units import human_bytes
from ostraka._version import __version__
from ostraka.formats._ostraka import OstrakaSource
from ostraka.planner import _account, _time
from ostraka.planner._account import LostDisk, LostProcess, LostShard, Spread
from ostraka.planner._groups import bytes_by_group, bytes_in_float32
from ostraka.planner._parity import PlannedParity, plan_parity_files
from ostraka.planner._rates import bytes_per_second
from ostraka.planner._restore import RestorePlan, Written, plan_restore
from ostraka.planner._state import SAMPLED_PROCESSES, State
from ostraka.planner._time import Bandwidths, Times, work_out_times
from ostraka.sharding._findings import Finding
from ostraka.storage import USUAL_WRITERS, PathLike

_EXACT_ENTRIES = 200_000
"""Up to this number of boxes the index of every process is computed; above, that of two."""
_PHASES = ("wait", "capture", "agree", "plan", "write")
"""What `save` has timed when it writes `_METADATA`."""
_SOME_SECONDS = 0.1234
_MOST_BYTES = 1 << 62
_LEAST_FILE_BYTES = 2 * _format.PAGE_BYTES
_DTYPES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Compressed:
    """All that is written, if it is compressed: of a checkpoint that is there, or an estimate."""

    total_bytes: int
    is_estimate: bool


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What a checkpoint is made of, to the byte."""

    write: WritePlan
    """The plan that `save` executes."""
    metadata: Metadata
    """What `_METADATA` says, but for the id, the digests and the times."""
    metadata_bytes: int
    """The size of `_METADATA`; how long a save took is written there, give or take a few digits."""
    index_bytes: Mapping[int, int]
    """By process, the size of its index."""
    indexes_are_exact: bool
    """Whether each index was computed; if not, all are assumed to be as large as two of them."""
    parameters: int | None
    findings: tuple[Finding, ...]
    adds_optimizer: bool = False
    """Whether the optimizer's state is what optax would make, rather than one that is there."""
    compressed: Compressed | None = None
    """What it takes with compression, if it has any. All other sizes are those without."""
    parity: PlannedParity | None = None
    """Its parity files, if it has any; all sizes are those with them."""

    def __repr__(self) -> str:
        dtypes = sorted({leaf.spec.dtype for leaf in self.write.leaves})
        names = ", ".join(dtypes) if len(dtypes) <= _DTYPES_SHOWN else f"{len(dtypes)} dtypes"
        processes = "1 process" if self.process_count == 1 else f"{self.process_count:,} processes"
        files = len(self.files) + self.metadata_files
        return (
            f"<Plan: {human_bytes(self.total_bytes)} in {files:,} files, "
            f"{len(self.write.leaves):,} arrays ({names}), {processes}>"
        )

    @property
    def files(self) -> dict[str, int]:
        """Every file of the checkpoint with its size, but `_METADATA`.

        The names are those in the directory of shards, which is named after a random id.
        """
        files = {file.name: file.size for file in self.write.files}
        if self.parity is not None:
            files |= {file.name: file.size for file in self.parity.table.files}
        return files | {_format.index_name(p): n for p, n in self.index_bytes.items() if n}

    @property
    def data_bytes(self) -> int:
        """The bytes of all arrays, each counted once."""
        return sum(leaf.spec.nbytes for leaf in self.write.leaves)

    @property
    def total_bytes(self) -> int:
        """All that is written: shards, parity, indexes and `_METADATA`, which is there twice."""
        shards = sum(file.size for file in self.write.files)
        parity = 0 if self.parity is None else self.parity.total_bytes
        metadata = self.metadata_bytes * self.metadata_files
        return shards + parity + sum(self.index_bytes.values()) + metadata

    @property
    def metadata_files(self) -> int:
        """How many times `_METADATA` is written: there is a copy of it among shards."""
        return 2 if self.write.files else 1

    @property
    def bytes_by_group(self) -> dict[str, dict[str, int]]:
        """By topmost name, and for each moment of an optimizer: the bytes of each dtype.

        >>> plan("gpt2", optimizer="adamw").bytes_by_group["optimizer mu"]
        {'float32': 497759232}
        """
        return bytes_by_group([leaf.spec for leaf in self.write.leaves])

    def data_bytes_in_float32(self, *, parameters: bool) -> int:
        """What `data_bytes` would be with float32 in the place of the optimizer's narrower floats.

        With `parameters`, in the place of all others, too: as where the parameters are kept in
        float32 and only computed with in bfloat16.
        """
        specs = [leaf.spec for leaf in self.write.leaves]
        return bytes_in_float32(specs, all_leaves=parameters)

    @property
    def elements(self) -> int:
        return sum(prod(leaf.spec.shape) for leaf in self.write.leaves)

    @property
    def process_count(self) -> int:
        return max(self.write.process_of) + 1

    @property
    def bytes_by_process(self) -> list[int]:
        """What each process writes: its shards, its parity files and its index."""
        sizes = _file_bytes(self.write, self.parity)
        return [size + self.index_bytes.get(p, 0) for p, size in enumerate(sizes)]

    @property
    def process_spread(self) -> Spread:
        return _account.spread_of(self.bytes_by_process)

    @property
    def requests_by_process(self) -> list[int]:
        """The requests of each process for a save to a new place in a bucket.

        Retries, and the marker that is renewed every 5 s while a save lasts, are not counted.
        """
        requests = _account.requests_by_process(self.write, self.index_bytes)
        if self.parity is None:
            return requests
        return list(map(add, requests, self.parity.requests_by_process(self.write)))

    @property
    def shard_spread(self) -> Spread:
        """The data bytes that the devices contribute."""
        return _account.spread_of(_account.bytes_by_device(self.write))

    @property
    def largest_file(self) -> FileEntry | None:
        return max(self.write.files, key=lambda file: file.size, default=None)

    def staging_bytes(self, *, on_accelerators: bool = True) -> int:
        """The most host memory that a save takes on one host, besides the state itself."""
        staging = _account.staging_bytes(
            self.write, writers=USUAL_WRITERS, on_accelerators=on_accelerators
        )
        if self.parity is None:
            return staging
        parity = self.parity.memory_bytes(USUAL_WRITERS)
        # What is read back is read when all else is done.
        return max(staging, parity) if self.parity.is_read_back else staging + parity

    def lost_shard(self) -> LostShard | None:
        """What it takes to bring back the largest shard file."""
        return _account.lost_shard(self.write)

    def lost_process(self) -> LostProcess:
        """What it takes to bring back the host that holds the most."""
        return _account.lost_process(self.write)

    def lost_disk(self) -> LostDisk:
        """What it takes to bring back the shards of the process that wrote the most."""
        return _account.lost_disk(self.write)

    def restore(
        self,
        *,
        mesh: Any = None,
        specs: Any = None,
        processes: int | None = None,
        only: Any = None,
        sampled: Sequence[int] | None = None,
    ) -> RestorePlan:
        """What a restore of this checkpoint onto another mesh reads, process by process.

        `mesh`, `specs` and `only` are those of `ostraka.restore`; a mesh may be axis sizes, and
        specs rules. Without them all goes back to where it was. Of very many processes a few are
        worked out; `sampled` says which.

        >>> plan.restore(mesh={"data": 128, "model": 8}, processes=128).read_bytes.most
        """
        written = Written(self.metadata, self.metadata_bytes, self.index_bytes)
        with paused_gc():
            return plan_restore(written, mesh, specs, processes, only, sampled)

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
        """How long a save and a restore take, and how often to save.

        `write_bandwidth` and `read_bandwidth` are those of one host, `storage_bandwidth` is that of
        the storage for all hosts together, `device_bandwidth` that from a host's devices to its
        memory: bytes a second, or text such as `"2GB/s"` and `"25Gbit/s"`. `probe` is a directory
        in which what this machine writes and reads is measured. With `mtbf_s`, the mean time
        between failures of the whole job, it is worked out how often to save.

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
        """What a restore to where everything was reads."""
        # One host of very many is like the others.
        return self.restore(sampled=None if self.indexes_are_exact else (0,))

    def times_at(self, bandwidths: Bandwidths, mtbf_s: float | None, back: RestorePlan) -> Times:
        return work_out_times(
            bandwidths,
            save_s=bandwidths.write_s(self.process_spread.most, self.total_bytes),
            restore_s=back.time_s_at(bandwidths),
            held_bytes=self.lost_process().held_bytes,
            mtbf_s=mtbf_s,
        )


def plan_state(
    state: State, *, max_file_bytes: int, compress: CompressRule = None, parity: int = 0
) -> Plan:
    """The plan of a state. Raises InvalidSharding where a spec does not fit."""
    check_rule(compress, state.leaves)
    check_parity(parity)
    if max_file_bytes < _LEAST_FILE_BYTES:
        raise ValueError(
            f"max_file_bytes is {max_file_bytes:,}; it must be at least {_LEAST_FILE_BYTES:,}"
        )
    if sum(leaf.nbytes for leaf in state.leaves) > _MOST_BYTES:
        largest = max(state.leaves, key=lambda leaf: leaf.nbytes)
        raise ValueError(
            f"the state is too large to be planned: leaf {largest.path!r} {largest.shape} alone "
            f"has {largest.nbytes:,} bytes, and {_MOST_BYTES:,} is the most in all"
        )
    _check_fit(state.leaves, state.meshes)
    with paused_gc():
        write = plan_write(
            state.leaves,
            state.meshes,
            state.process_of,
            max_file_bytes=max_file_bytes,
            compressed=codecs_of(compress, state.leaves),
        )
        sizes, exact = _index_bytes(write)
        sums = plan_parity_files(write, parity, sizes) if parity else None
    writer = _writer(write, sums)
    metadata = _account.describe_metadata(
        write, tree=state.tree, user=state.user, writer=writer, indexes=sizes
    )
    if sums is not None:
        metadata = replace(metadata, parity=sums.table)
    size = len(_metadata.encode_metadata(metadata))
    planned = Plan(
        write=write,
        metadata=metadata,
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
    estimate = planned.total_bytes - _account.typical_savings(write)
    return replace(planned, compressed=Compressed(estimate, is_estimate=True))


def _check_fit(leaves: Sequence[LeafSpec], meshes: Sequence[MeshSpec]) -> None:
    checked: set[Any] = set()
    for leaf in leaves:
        key = (leaf.mesh, leaf.partition, leaf.shape)
        if leaf.mesh != HOST_LOCAL and key not in checked:
            check_partition(leaf.path, leaf.logical_shape, meshes[leaf.mesh], leaf.partition)
            checked.add(key)


def _index_bytes(write: WritePlan) -> tuple[dict[int, int], bool]:
    """The size of each process's index; from a few of them if there are very many boxes."""
    writing = sorted({write.process_of[file.device] for file in write.files})
    boxes = sum(len(write.layouts[leaf.layout].owners) for leaf in write.leaves)
    if boxes <= _EXACT_ENTRIES or len(writing) <= SAMPLED_PROCESSES:
        return _account.index_bytes(write, set(writing)), True
    found = _account.index_bytes(write, {writing[0], writing[-1]})
    return dict.fromkeys(writing, max(found.values())), False


def _file_bytes(write: WritePlan, parity: PlannedParity | None) -> list[int]:
    """The bytes of all shard files and parity files of each process."""
    sizes = _account.file_bytes_by_process(write)
    return sizes if parity is None else list(map(add, sizes, parity.bytes_by_process(len(sizes))))


def _writer(write: WritePlan, parity: PlannedParity | None) -> dict[str, Any]:
    """What `_METADATA` says of its writer.

    The durations and the names of the hosts are placeholders, whose text may be longer or shorter
    than the real ones.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        jax_version = version("jax")
    except PackageNotFoundError:
        jax_version = "0.10.0"
    sizes = _file_bytes(write, parity)
    phases = _PHASES if parity is None else (*_PHASES, "parity")
    watch = Stopwatch(phases=dict.fromkeys(phases, _SOME_SECONDS))
    written = [(size, _SOME_SECONDS) for size in sizes]
    return {
        "ostraka": __version__,
        "jax": jax_version,
        "python": platform.python_version(),
        "time": "2000-01-01T00:00:00.000+00:00",
        "hosts": [socket.gethostname()] * len(sizes),
        "timeline": timeline(watch, summarize(written)),
    }


def plan_checkpoint(path: PathLike, names: NamesLike | None = None) -> Plan:
    """The plan that an existing checkpoint was written by.

    One of another format is planned as Ostraka would write it, under `names` if there are any.
    """
    source = open_at(path, names)
    if not isinstance(source, OstrakaSource):
        return _plan_foreign(source.saved)
    found = source.metadata
    with damage_on_contradiction(source.store):
        take_entries(found, None, source.shards.allowance())
        files = _account.files_before_compression(found)
    write = WritePlan(found.meshes, found.layouts, found.leaves, files, found.process_of)
    sizes = {process: index.size for process, index in found.indexes.items()}
    planned = Plan(write, found, source.metadata_bytes, sizes, True, None, ())
    if found.parity is not None:
        is_read_back = found.process_count > 1 or files != found.files
        planned = replace(planned, parity=PlannedParity(found.parity, None, is_read_back))
    if files == found.files:
        return planned
    saved_bytes = sum(map(attrgetter("size"), files)) - sum(map(attrgetter("size"), found.files))
    total_bytes = planned.total_bytes - saved_bytes
    return replace(planned, compressed=Compressed(total_bytes, is_estimate=False))


def _plan_foreign(saved: Saved) -> Plan:
    """A checkpoint of another format: what it costs to save it with Ostraka, as it was laid out."""
    state = State(saved.leaves, saved.meshes, saved.process_of, saved.tree, user=saved.user)
    return plan_state(state, max_file_bytes=MAX_FILE_BYTES)
