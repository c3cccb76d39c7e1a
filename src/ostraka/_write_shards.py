"""The fourth stage of a save: one process's shard files, each block digested on its way.

Blocks of several files are written in turn, from several threads. The views of live values that a
block is made of are taken by one thread, ahead of the writing: for many small leaves that is most
of the work, and threads that all did it would only wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress, count
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ostraka import _box, _format, _header, _pack
from ostraka._box import Box
from ostraka._codec import Zstd, element_bytes
from ostraka._coordinate import Operation
from ostraka._format import Entry, FileDigests, FileEntry, StoredRange
from ostraka._metadata import IndexEntry
from ostraka._parallel import ByteBudget, StopSignal, in_turn, run_all
from ostraka._parity_format import ParityFile
from ostraka._plan_parity import ParityPlan
from ostraka._plan_write import STAGING_BYTES, WritePlan
from ostraka._spec import DTYPES, StoredLeaf
from ostraka._values import HostValue, Value, flat_bytes
from ostraka._write_compressed import CompressedFile, SpooledFile
from ostraka._write_parity import GroupOfViews, groups_of_views
from ostraka.storage import FileWriter, Parts, Store

Array = np.ndarray[Any, Any]
NumberedBlock = tuple[int, list[Array]]
"""A block's number in its file, and the bytes it is made of."""
_Task = tuple["_Shard | GroupOfViews", Iterable[tuple[int, Any]]]

_OPEN_FILES = 64
_COPY_BYTES = 4 << 20
"""How much of a box that is not contiguous in memory is copied at a time."""
_SENT_BYTES = 8 << 20
"""What is copied at a time where files are written in order: what waits to be sent is kept."""
_SMALL_BYTES = 1 << 20
"""A single file up to this size is written by the caller, without a thread."""
_HELD_BYTES = 1 << 20
"""What the program may write to, up to this size, is copied once if it is looked at twice."""


class Progress:
    """How far a save has come, in bytes of this process's files before compression."""

    def __init__(self) -> None:
        self.total = 0
        self.written = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes


class Journal(Protocol):
    """Which files of a save are finished, for one that goes on after it was killed."""

    save_id: str

    def find_finished(self, store: Store, files: Sequence[FileEntry]) -> Mapping[str, FileDigests]:
        """By name, the files that are there and whole; what else is there of them is removed."""
        ...

    def note(self, store: Store, name: str, digests: FileDigests) -> None:
        """Keep in mind that a file is finished; called by any thread."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    """What all files of one process are written from and with."""

    operation: Operation
    store: Store
    save_id: str
    directory: str
    """Of its shard files."""
    leaves: Sequence[StoredLeaf]
    values: Sequence[Value]
    copied: frozenset[int]
    """The leaves that are not in host memory as they will be in the files."""
    live: frozenset[int]
    """The leaves that the program may write to meanwhile."""
    codecs: Mapping[int, Zstd]
    """The leaves that are compressed, and how."""
    version: int
    beside: int
    """How many files are written at the same time."""
    journal: Journal | None
    scratch: threading.local = field(default_factory=threading.local)
    """For each thread, memory for a block."""
    staging: ByteBudget = field(default_factory=lambda: ByteBudget(STAGING_BYTES))
    stop: StopSignal = field(default_factory=StopSignal)

    def check(self) -> None:
        """Raise if this save has failed, on any process or in any thread."""
        self.operation.check()
        self.stop.check()


@dataclass(frozen=True, slots=True)
class Written:
    """What a process has written."""

    index: IndexEntry | None = None
    """None if it has nothing to write."""
    sizes: tuple[int, ...] = ()
    """Of its files, in the order of the plan."""
    parity: tuple[ParityFile, ...] = ()
    """The parity files that it has written so far."""


def write_shards(
    operation: Operation,
    store: Store,
    save_id: str,
    plan: WritePlan,
    values: Sequence[Value],
    codecs: Mapping[int, Zstd],
    progress: Progress,
    parity: ParityPlan | None = None,
    journal: Journal | None = None,
) -> Written:
    """Write the files of this process, and last its index.

    With them come parity files whose groups can be summed up in memory; others are left to
    `write_parity`. Between blocks the operation is checked, so that nobody goes on writing for a
    save that has failed. Files that `journal` knows to be finished are not written again.
    """
    files = plan.files_of(operation.process)
    if not files:
        return Written()
    finished = {} if journal is None else journal.find_finished(store, files)
    contents = _format.entries_by_file(
        plan.leaves, plan.layouts, set(map(attrgetter("device"), files))
    )
    copied = _must_be_copied(plan.leaves, values)
    live = frozenset(compress(count(), map(attrgetter("may_change"), values)))
    beside = min(len(files), store.parts.at_once)
    job = _Job(
        operation,
        store,
        save_id,
        _format.shards_directory(save_id),
        plan.leaves,
        values,
        copied,
        live - copied,
        codecs,
        plan.version,
        beside,
        journal,
    )
    missing = [file for file in files if file.name not in finished] if finished else files
    shards = [_Shard(job, file, contents[file.device, file.part]) for file in missing]
    progress.total = sum(map(attrgetter("size"), missing))
    groups = [] if parity is None else _plan_groups(job, shards, plan, parity)
    try:
        _write_all(job, shards, groups, progress)
        digests = {shard.name: shard.digests() for shard in shards}
        if finished:
            known = {**finished, **digests}
            digests = {file.name: known[file.name] for file in files}
        # Parity has copies of the index, whose length must be known before: not that of identities.
        where = "" if parity is not None else store.location
        index = _format.encode_index(
            save_id, operation.process, digests, version=plan.version, location=where
        )
        name = _format.index_name(operation.process)
        store.put(f"{job.directory}/{name}", index)
        sums = tuple(file for group in groups for file in group.finish(index))
    except BaseException:
        for target in (*shards, *groups):
            target.abandon()
        raise
    sizes = tuple(map(attrgetter("size"), digests.values()))
    return Written(IndexEntry(len(index), _format.digest(index)), sizes, sums)


def _plan_groups(
    job: _Job, shards: Sequence[_Shard], plan: WritePlan, parity: ParityPlan
) -> list[GroupOfViews]:
    """The groups of parity that can be summed up from views of what is written.

    Not those of which anything is copied or compressed, or may change meanwhile; nor those of
    several processes.
    """
    if job.operation.count > 1 or job.codecs:
        return []
    for value in job.values:
        if not isinstance(value, HostValue) or not value.may_change:
            continue
        if value.whole().nbytes <= _HELD_BYTES:
            value.hold()
    # Of JAX's arrays only those change that share memory with others, and are written to there
    # during the save. Parity can't mend such files then; what it gives is compared with digests.
    unfit = {
        number
        for number, value in enumerate(job.values)
        if isinstance(value, HostValue) and value.may_change
    } | job.copied
    index_bytes = _planned_index_bytes(job, shards)
    of_views = [unfit.isdisjoint(map(attrgetter("leaf"), shard.entries)) for shard in shards]
    return groups_of_views(
        job.store,
        job.save_id,
        plan,
        parity,
        {0: index_bytes},
        [shard.stream if fits else None for shard, fits in zip(shards, of_views, strict=True)],
    )


def _planned_index_bytes(job: _Job, shards: Sequence[_Shard]) -> int:
    """How long the index will be; exact, as long as nothing is compressed."""
    planned = {s.name: _format.planned_digests(s.file, s.entries) for s in shards}
    return len(_format.encode_index(job.save_id, job.operation.process, planned))


def _must_be_copied(leaves: Sequence[StoredLeaf], values: Sequence[Value]) -> frozenset[int]:
    return frozenset(
        number
        for number, (leaf, value) in enumerate(zip(leaves, values, strict=True))
        if not value.in_host_memory or DTYPES[leaf.spec.dtype].packed
    )


def _write_all(
    job: _Job, shards: Sequence[_Shard], groups: Sequence[GroupOfViews], progress: Progress
) -> None:
    if len(shards) == 1 and progress.total <= _SMALL_BYTES:
        for target in (*shards, *groups):
            blocks: Iterator[tuple[int, Any]] = target.blocks()
            for number, pieces in blocks:
                target.write(number, pieces)
        progress.written = progress.total
        return

    def write(task: _Task) -> None:
        shard, blocks = task
        for number, pieces in blocks:
            job.check()
            progress.add(shard.write(number, pieces))
        if job.journal is not None and isinstance(shard, _Shard) and shard.is_finished():
            job.journal.note(job.store, shard.name, shard.digests())

    parts = job.store.parts
    run_all(write, _tasks(job, shards, groups, parts), threads=parts.at_once, stop=job.stop)


class _Shard:
    """A shard file that is being written, from the values that it holds."""

    def __init__(self, job: _Job, file: FileEntry, entries: list[Entry]):
        self.file = file
        self.name = file.name
        self.entries = entries
        self._job = job
        self._lengths = _format.block_lengths(file.header_bytes, entries, job.codecs)
        codecs = (
            {
                leaf: (element_bytes(job.leaves[leaf].spec.dtype), job.codecs[leaf])
                for leaf, _, _, nbytes in entries
                if leaf in job.codecs and nbytes >= _format.LEAST_COMPRESSED_BYTES
            }
            if job.codecs
            else {}
        )
        self._has_header_first = not codecs
        self._target = (
            CompressedFile(entries, self._lengths, codecs, self._header, self._create, job.check)
            if codecs
            else _PlainFile(self._lengths, self._create)
        )
        # Until those before them are placed, or for as long as the store likes.
        self._keeps_blocks = bool(codecs) or not job.store.parts.in_any_order
        is_live = not job.live.isdisjoint(map(attrgetter("leaf"), entries))
        self.write = self._write_copy if is_live else self._target.write
        self.abandon = self._target.abandon
        self.digests = self._target.digests
        self.is_finished = self._target.is_finished

    def _write_copy(self, number: int, pieces: list[Array]) -> int:
        """Write a block that the program may write to meanwhile, from memory of our own.

        What is digested must be what is written, whoever changes it between the two.
        """
        nbytes = self._lengths[number]
        if number == 0:
            return self._target.write(number, pieces)  # the header
        if self._keeps_blocks or not _SMALL_BYTES < nbytes <= _format.BLOCK_BYTES:
            return self._target.write(number, [np.concatenate(pieces)])
        # Each thread has its memory: to take new memory for every block costs more than to copy.
        scratch = self._job.scratch
        memory = getattr(scratch, "memory", None)
        if memory is None:
            memory = scratch.memory = np.empty(_format.BLOCK_BYTES, np.uint8)
        return self._target.write(number, [np.concatenate(pieces, out=memory[:nbytes])])

    def blocks(self) -> Iterator[NumberedBlock]:
        """The blocks of the file, in order; without the header, where that is written last."""
        if self._has_header_first:
            return enumerate(_format.regroup(self.stream(), self._lengths))
        return enumerate(_format.regroup(self._stream(), self._lengths[1:]), 1)

    def stream(self) -> Iterator[Array]:
        """The whole file in order, where nothing is compressed."""
        return chain([np.frombuffer(self._header({}), np.uint8)], self._stream())

    def _create(self) -> FileWriter:
        job, name = self._job, f"{self._job.directory}/{self.name}"
        if job.store.parts.in_any_order or self._has_header_first:
            return job.store.create(name, self.file.size, beside=job.beside)
        return SpooledFile(job.store, name, job.beside, job.check)

    def _header(self, stored: Mapping[int, StoredRange]) -> bytes:
        job = self._job
        return _header.encode_header(
            self.entries,
            job.leaves,
            job.save_id,
            self.file.header_bytes,
            version=job.version,
            stored=stored,
        )

    def _stream(self) -> Iterator[Array]:
        """The file's data in order, as views of the live values where that can be."""
        job, file = self._job, self.file
        for leaf, box, _, nbytes in self.entries:
            if nbytes == 0:
                continue
            value = job.values[leaf]
            if leaf in job.copied:
                yield from self._staged(value, job.leaves[leaf], box)
                continue
            array = _read(value, job.leaves[leaf], file.device, box, nbytes)
            if array.flags.c_contiguous:
                yield array.reshape(-1).view(np.uint8)  # as flat_bytes: most come this way
            else:
                yield from _bands(array)

    def _staged(self, value: Value, leaf: StoredLeaf, box: Box) -> Iterator[Array]:
        """A box that must be copied, in bands, so that no more of it is in memory than a few."""
        job, most_bytes = self._job, value.band_bytes
        if not job.store.parts.in_any_order:
            most_bytes = min(most_bytes, _SENT_BYTES)
        for band in _cut_into_bands(leaf, box, most_bytes) if most_bytes else [box]:
            nbytes = DTYPES[leaf.spec.dtype].nbytes(_box.count(band))
            with job.staging.hold(nbytes, job.check):
                yield from _bands(_read(value, leaf, self.file.device, band, nbytes))


class _PlainFile:
    """A file whose blocks have their places: opened for its first one, closed after its last."""

    def __init__(self, lengths: list[int], create: Callable[[], FileWriter]):
        self._lengths = lengths
        self._offsets = [0, *accumulate(lengths)]
        self._digests = [""] * len(lengths)
        self._blocks_left = len(lengths)
        self._create = create
        self._writer: FileWriter | None = None
        self._identity = ""
        self._lock = threading.Lock()

    def write(self, number: int, pieces: list[Array]) -> int:
        """Digest a block and put it in its place; returns its length."""
        self._digests[number] = _format.block_digest(pieces)
        with self._lock:
            if self._writer is None:
                self._writer = self._create()
            writer = self._writer
        writer.write(self._offsets[number], pieces)
        with self._lock:
            self._blocks_left -= 1
            is_last = self._blocks_left == 0
        if is_last:
            self._identity = writer.finish() or ""
        return self._lengths[number]

    def abandon(self) -> None:
        if self._writer is not None and self._blocks_left:
            self._writer.abandon()

    def is_finished(self) -> bool:
        return self._blocks_left == 0

    def digests(self) -> FileDigests:
        return FileDigests(
            self._offsets[-1],
            tuple(self._lengths),
            tuple(self._digests),
            identity=self._identity,
        )


def _tasks(
    job: _Job, shards: Sequence[_Shard], groups: Sequence[GroupOfViews], parts: Parts
) -> Iterator[_Task]:
    """What a thread does at a time: blocks whose views are there, or all of a file.

    A file with something in it that must first be copied (from an accelerator, to another dtype)
    is done by one thread from its first byte to its last, so that no more is copied than is needed
    soon; so is every file where the store wants it written in order. Blocks of the others come in
    turn, so that a leaf's shards are looked at together: one by one, or as many as the store likes.
    """
    of_views: list[Iterator[_Task]] = []
    for shard in shards:
        if parts.in_any_order and job.copied.isdisjoint(entry.leaf for entry in shard.entries):
            of_views.append(_in_parts(shard, parts.size_bytes))
        else:
            yield shard, shard.blocks()
    for group in groups:
        if parts.in_any_order:
            # After as many shards as it sums up, whose blocks are then in a cache still.
            of_views.append(_one_by_one(group))
        else:
            yield group, group.blocks()
    for task in in_turn(of_views, at_a_time=_OPEN_FILES):
        job.check()
        yield task


def _one_by_one(group: GroupOfViews) -> Iterator[_Task]:
    for block in group.blocks():
        yield group, [block]


def _in_parts(shard: _Shard, least_bytes: int) -> Iterator[_Task]:
    """Blocks that follow each other, as few as have `least_bytes` together."""
    part: list[NumberedBlock] = []
    nbytes = 0
    for block in shard.blocks():
        part.append(block)
        nbytes += sum(piece.nbytes for piece in block[1]) if least_bytes else 0
        if nbytes >= least_bytes:
            yield shard, part
            part, nbytes = [], 0
    if part:
        yield shard, part


def _cut_into_bands(leaf: StoredLeaf, box: Box, most_bytes: int) -> list[Box]:
    """Rows that follow each other, each time as many as have `most_bytes`; whole bytes each."""
    bits = DTYPES[leaf.spec.dtype].bits
    bands = list(_box.bands(box, box, most_bytes * 8 // bits))
    return [box] if any(_box.count(band) * bits % 8 for band in bands[:-1]) else bands


def _read(value: Value, leaf: StoredLeaf, device: int, box: Box, nbytes: int) -> Array:
    """A box as a file has it. What is read must be what was planned: all after it depends on it."""
    array = value.read(device, box)
    if DTYPES[leaf.spec.dtype].packed:
        array = _pack.pack(array)
    if array.nbytes != nbytes:
        raise AssertionError(
            f"leaf {leaf.spec.path!r} gives {array.nbytes:,} bytes for box {box}, and {nbytes:,} "
            "were planned"
        )
    return array


def _bands(array: Array) -> Iterator[Array]:
    """The bytes of an array in row-major order; what is not contiguous is copied in bands."""
    if array.flags.c_contiguous or array.nbytes <= _COPY_BYTES or array.ndim == 0:
        yield flat_bytes(array)
        return
    if array.shape[0] == 1 or array.nbytes // array.shape[0] > _COPY_BYTES:
        for row in array:
            yield from _bands(row)
        return
    step = max(_COPY_BYTES * array.shape[0] // array.nbytes, 1)
    for start in range(0, array.shape[0], step):
        yield flat_bytes(array[start : start + step])
