"""The fourth stage of a save: one process's shard files, each block digested on its way.

Several threads write blocks of several files in turn. One thread takes the views of live values,
ahead of the writing. For many small leaves this is most of the work. Threads that all did it would
only wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import accumulate, chain, compress, count, repeat
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from ostraka.common.dtypes import DTYPES, to_bytes
from ostraka.common.progress import Count
from ostraka.common.threads import ByteBudget, StopSignal, in_turn, run_all
from ostraka.formats.buffers import aligned
from ostraka.layout import box as _box
from ostraka.layout import shard_file as _format
from ostraka.layout.box import Box
from ostraka.layout.metadata import IndexEntry, Metadata
from ostraka.layout.plan_write import STAGING_BYTES, WritePlan
from ostraka.layout.runs import encode_runs
from ostraka.layout.shard_file import Entry, FileDigests, FileEntry, StoredRange
from ostraka.layout.spec import StoredLeaf
from ostraka.live.values import Value
from ostraka.processes.operation import Operation
from ostraka.saving._write_compressed import CompressedFile, SpooledFile
from ostraka.saving.agree import Agreed, RunningSave
from ostraka.storage import FileWriter, Store

Array = np.ndarray[Any, Any]
_OPEN_FILES = 64
_COPY_BYTES = 4 << 20
"""The size of a band, for boxes that have gaps in memory."""
_SENT_BYTES = 8 << 20
"""The largest band for a store that takes files in order, and keeps bytes until it sends them."""
_SMALL_BYTES = 1 << 20
"""The calling thread writes a single file up to this size itself."""


class BlockTarget(Protocol):
    """A file, or several, made of numbered blocks."""

    def blocks(self) -> Iterator[tuple[int, Any]]:
        """The blocks in order, each with its number."""
        ...

    def write(self, number: int, pieces: Any) -> int:
        """Write a block and return its bytes of a shard file. Any thread may call this."""
        ...

    def abandon(self) -> None:
        """Give up an unfinished file."""


_Task = tuple[BlockTarget, Iterable[tuple[int, Any]]]


class Companion(Protocol):
    """Files beside the shards, made of the same blocks."""

    name: str
    """The name of its field in `_METADATA`, and of its phase in the record of a save."""

    def take_blocks(self, job: WriteJob, shards: Sequence[ShardWriter]) -> Sequence[BlockTarget]:
        """The files to write in the same pass as the shards."""
        ...

    def finish(
        self, operation: Operation, store: Store, save_id: str, written: WrittenFiles
    ) -> Sequence[Any]:
        """Finish all files of this process, once its shards are written.

        Returns a dataclass for each, with its `size`.
        """
        ...

    def describe(self, rows: Sequence[Sequence[Any]]) -> Any:
        """Its field in `_METADATA`, from the fields of the files of all processes."""
        ...


@dataclass(frozen=True, slots=True)
class WriteJob:
    """The plan, the values and the store from which one process writes all of its files."""

    operation: Operation
    store: Store
    save_id: str
    plan: WritePlan
    values: Sequence[Value]
    copied: frozenset[int]
    """The leaves to copy: in host memory they differ from the file, or are not there at all."""
    live: frozenset[int]
    """The leaves that the program may write to meanwhile."""
    threads: int
    """How many threads write at the same time."""
    beside: int
    """How many files this process writes at the same time."""
    scratch: threading.local = field(default_factory=threading.local)
    """For each thread, memory for a block."""
    staging: ByteBudget = field(default_factory=lambda: ByteBudget(STAGING_BYTES))
    stop: StopSignal = field(default_factory=StopSignal)

    def check(self) -> None:
        """Raise if this save has failed, on any process or in any thread."""
        self.operation.check()
        self.stop.check()


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The shard files that a process has written, and their index."""

    sizes: tuple[int, ...] = ()
    """In the order of the plan."""
    index: IndexEntry | None = None
    """None if it has nothing to write."""
    index_data: bytes = b""

    def report(self, plan: WritePlan) -> list[Any]:
        """The index and the sizes, as JSON for `metadata_of`."""
        index = self.index and astuple(self.index)
        return [index, encode_runs(self.sizes) if plan.codecs else []]


def metadata_of(
    plan: WritePlan, save_id: str, reports: Sequence[Sequence[Any]], **others: Any
) -> Metadata:
    """The `_METADATA` for the files of all processes, from their reports and the other fields."""
    return Metadata(
        id=save_id,
        process_of=plan.process_of,
        meshes=plan.meshes,
        layouts=plan.layouts,
        leaves=plan.leaves,
        files=plan.stored_files(sizes for _, sizes in reports),
        indexes={p: IndexEntry(*index) for p, (index, _) in enumerate(reports) if index},
        version=plan.version,
        **others,
    )


def write_shards(
    save: RunningSave, agreed: Agreed, plan: WritePlan, companions: Sequence[Companion]
) -> WrittenFiles:
    """Write the files of this process, and last its index.

    It checks the operation between blocks, and stops if the save has failed.
    """
    operation, store, progress = save.operation, save.place.store, save.progress
    files = plan.files_of(operation.process)
    contents = _format.entries_by_file(
        plan.leaves, plan.layouts, set(map(attrgetter("device"), files))
    )
    values, threads = agreed.values, store.traits.at_once
    if (limit := save.limit) is not None:
        threads = limit.threads(threads)
        entries = [(file.device, contents[file.device, file.part]) for file in files]
        cut = partial(_cut, store=store)
        values = limit.take_over(values, plan.leaves, entries, threads, cut)
    if not files:
        return WrittenFiles()
    copied = frozenset(
        number
        for number, (leaf, value) in enumerate(zip(plan.leaves, values, strict=True))
        if not value.in_host_memory or DTYPES[leaf.spec.dtype].packed
    )
    live = frozenset(compress(count(), map(attrgetter("may_change"), values)))
    live, beside = live - copied, min(len(files), threads)
    job = WriteJob(operation, store, agreed.save_id, plan, values, copied, live, threads, beside)
    shards = [ShardWriter(job, file, contents[file.device, file.part]) for file in files]
    progress.total = sum(map(attrgetter("size"), files))
    targets: list[BlockTarget] = list(shards)
    try:
        for companion in companions:
            targets += companion.take_blocks(job, shards)
        _write_all(job, targets, progress, in_threads=len(files) > 1)
        digests = {shard.name: shard.digests() for shard in shards}
        # Companions may have copies of the index, whose length must be known before: identities
        # have any length.
        location = "" if companions else store.location
        index = _format.encode_index(
            agreed.save_id, operation.process, digests, version=plan.version, location=location
        )
        name = _format.index_name(operation.process)
        store.put(f"{_format.shards_directory(agreed.save_id)}/{name}", index)
    except BaseException:
        for target in targets:
            target.abandon()
        raise
    sizes = tuple(map(attrgetter("size"), digests.values()))
    return WrittenFiles(sizes, IndexEntry(len(index), _format.digest(index)), index)


def _write_all(
    job: WriteJob, targets: Sequence[BlockTarget], progress: Count, *, in_threads: bool
) -> None:
    if not in_threads and progress.total <= _SMALL_BYTES:
        for target in targets:
            for number, pieces in target.blocks():
                target.write(number, pieces)
        progress.done = progress.total
        if progress.on_bytes is not None:
            progress.on_bytes(progress.total, progress.total)
        return

    def write(task: _Task) -> None:
        target, blocks = task
        for number, pieces in blocks:
            job.check()
            progress.add(target.write(number, pieces))

    run_all(write, _tasks(job, targets), threads=job.threads, stop=job.stop)


class ShardWriter:
    """Writes one shard file from live values."""

    def __init__(self, job: WriteJob, file: FileEntry, entries: list[Entry]):
        self.file = file
        self.name = file.name
        self.entries = entries
        self._job = job
        codecs = job.plan.codecs
        self._lengths = _format.block_lengths(file.header_bytes, entries, codecs)
        self._is_compressed = bool(codecs) and any(
            entry.leaf in codecs and entry.nbytes >= _format.LEAST_COMPRESSED_BYTES
            for entry in entries
        )
        """True if some box is compressed. The header, with the offsets, then comes last."""
        self._target = (
            CompressedFile(
                entries,
                self._lengths,
                job.plan.leaves,
                codecs,
                self._header,
                self._create,
                job.check,
            )
            if self._is_compressed
            else _PlainFile(self._lengths, self._create)
        )
        is_live = not job.live.isdisjoint(map(attrgetter("leaf"), entries))
        self.write = self._write_copy if is_live else self._target.write
        self.abandon = self._target.abandon
        self.digests = self._target.digests

    def _write_copy(self, number: int, pieces: list[Array]) -> int:
        """Write a block that the program may write to meanwhile, from memory of our own.

        The digest must match the written bytes, even if the program changes its own.
        """
        nbytes = self._lengths[number]
        if number == 0:
            return self._target.write(number, pieces)  # the header
        # Blocks are kept until those before them are placed, or for as long as the store likes.
        keeps = self._is_compressed or not self._job.store.traits.in_any_order
        if keeps or not _SMALL_BYTES < nbytes <= _format.BLOCK_BYTES:
            return self._target.write(number, [np.concatenate(pieces)])
        # Each thread has its memory: to take new memory for every block costs more than to copy.
        # It begins with a page, for writes past the page cache.
        scratch = self._job.scratch
        memory = getattr(scratch, "memory", None)
        if memory is None:
            memory = scratch.memory = aligned(_format.BLOCK_BYTES)
        return self._target.write(number, [np.concatenate(pieces, out=memory[:nbytes])])

    def blocks(self) -> Iterator[tuple[int, list[Array]]]:
        """Each block of the file, in order: its number, and its bytes in pieces.

        The header of a compressed file is left out.
        """
        if self._is_compressed:
            return enumerate(_format.regroup(self._stream(), self._lengths[1:]), 1)
        return enumerate(_format.regroup(self.stream(), self._lengths))

    def stream(self) -> Iterator[Array]:
        """The bytes of an uncompressed file in order, header included."""
        return chain([np.frombuffer(self._header({}), np.uint8)], self._stream())

    def _create(self) -> FileWriter:
        job = self._job
        name = f"{_format.shards_directory(job.save_id)}/{self.name}"
        if self._is_compressed and not job.store.traits.in_any_order:
            return SpooledFile(job.store, name, job.beside, job.check)
        return job.store.create(name, self.file.size, beside=job.beside)

    def _header(self, stored: Mapping[int, StoredRange]) -> bytes:
        plan, header_bytes = self._job.plan, self.file.header_bytes
        return _format.encode_header(
            self.entries,
            plan.leaves,
            self._job.save_id,
            header_bytes,
            version=plan.version,
            stored=stored,
            codecs={leaf: codec.name for leaf, codec in plan.codecs.items()} if stored else None,
        )

    def _stream(self) -> Iterator[Array]:
        """The file's data in order, as views of the live values where that can be."""
        job, leaves = self._job, self._job.plan.leaves
        for leaf, box, _, nbytes in self.entries:
            if nbytes == 0:
                continue
            value = job.values[leaf]
            if leaf in job.copied:
                yield from self._staged(value, leaves[leaf], box)
                continue
            array = _read(value, leaves[leaf], self.file.device, box, nbytes)
            if array.flags.c_contiguous:
                yield array.reshape(-1).view(np.uint8)  # as to_bytes: most come this way
            else:
                yield from _bands(array)

    def _staged(self, value: Value, leaf: StoredLeaf, box: Box) -> Iterator[Array]:
        """Copy a box in bands, to have only a few of them in memory."""
        job, dtype = self._job, DTYPES[leaf.spec.dtype]
        item_bytes = 1 if dtype.packed else dtype.bits // 8  # in memory
        packing = _Packing(dtype.bits)
        for band in _cut(value, leaf, box, store=job.store):
            nbytes = _box.count(band) * item_bytes
            with job.staging.hold(nbytes, job.check):
                array = _read(value, leaf, self.file.device, band, nbytes)
                yield from packing.pack(array) if dtype.packed else _bands(array)
        yield from packing.end()


class _Packing:
    """The elements of a box, packed band by band. A band may end within a byte."""

    def __init__(self, bits: int):
        self._per_byte = 8 // bits
        self._rest: Array | None = None
        """The elements that share a byte with the next ones."""

    def pack(self, array: Array) -> Iterator[Array]:
        """The whole bytes up to the end of this band."""
        flat = array.reshape(-1)
        if self._rest is not None:
            missing = self._per_byte - self._rest.size
            self._rest = np.concatenate([self._rest, flat[:missing]])
            flat = flat[missing:]
            if self._rest.size < self._per_byte:
                return
            yield to_bytes(self._rest)
        whole = flat.size - flat.size % self._per_byte
        self._rest = flat[whole:].copy() if whole < flat.size else None
        if whole:
            yield to_bytes(flat[:whole])

    def end(self) -> Iterator[Array]:
        """The last byte, if it is not full."""
        if self._rest is not None:
            yield to_bytes(self._rest)


class _PlainFile:
    """A file with fixed block offsets. The first block opens it and the last one closes it."""

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
        """Digest a block, write it and return its length."""
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

    def digests(self) -> FileDigests:
        size, lengths = self._offsets[-1], tuple(self._lengths)
        return FileDigests(size, lengths, tuple(self._digests), identity=self._identity)


def _tasks(job: WriteJob, targets: Sequence[BlockTarget]) -> Iterator[_Task]:
    """The work that a thread takes at a time: some blocks of a file, or all of them.

    One thread writes a whole file in order if the file has values to copy (from an accelerator, to
    another dtype). So only the next ones are copied ahead. It does so too if the store wants files
    in order. Blocks of the other files come in turn, one by one, to take the shards of one leaf
    together.
    """
    of_views: list[Iterator[_Task]] = []
    # What is beside comes after as many shards as it is made of: their blocks are in a cache still.
    for target in targets:
        entries = target.entries if isinstance(target, ShardWriter) else ()
        is_copied = not job.copied.isdisjoint(entry.leaf for entry in entries)
        if is_copied or not job.store.traits.in_any_order:
            yield target, target.blocks()
        else:
            of_views.append(zip(repeat(target), ([block] for block in target.blocks())))
    for task in in_turn(of_views, at_a_time=_OPEN_FILES):
        job.check()
        yield task


def _cut(value: Value, leaf: StoredLeaf, box: Box, *, store: Store) -> Sequence[Box]:
    """The bands in which to copy a box."""
    most_bytes = value.band_bytes
    if not store.traits.in_any_order:
        most_bytes = min(most_bytes, _SENT_BYTES)
    bits = DTYPES[leaf.spec.dtype].bits
    return list(_box.bands(box, box, most_bytes * 8 // bits)) if most_bytes else [box]


def _read(value: Value, leaf: StoredLeaf, device: int, box: Box, nbytes: int) -> Array:
    """A box. Its size must match the plan, since later offsets depend on it."""
    array = value.read(device, box)
    if array.nbytes != nbytes:
        raise AssertionError(
            f"leaf {leaf.spec.path!r} gives {array.nbytes:,} bytes for box {box}, and {nbytes:,} "
            "were planned"
        )
    return array


def _bands(array: Array) -> Iterator[Array]:
    """The bytes of an array in row-major order. Copies an array with gaps in bands."""
    if array.flags.c_contiguous or array.nbytes <= _COPY_BYTES or array.ndim == 0:
        yield to_bytes(array)
        return
    if array.shape[0] == 1 or array.nbytes // array.shape[0] > _COPY_BYTES:
        for row in array:
            yield from _bands(row)
        return
    step = max(_COPY_BYTES * array.shape[0] // array.nbytes, 1)
    for start in range(0, array.shape[0], step):
        yield to_bytes(array[start : start + step])
