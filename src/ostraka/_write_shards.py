"""The fourth stage of a save: one process's shard files, each block digested on its way.

Blocks of several files are written in turn, from several threads. The views of live values that a
block is made of are taken by one thread, ahead of the writing: for many small leaves that is most
of the work, and threads that all did it would only wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np

from ostraka import _format, _pack
from ostraka._box import Box
from ostraka._format import Entry, FileDigests, FileEntry
from ostraka._metadata import IndexEntry
from ostraka._parallel import ByteBudget, StopSignal, in_turn, run_all
from ostraka._plan_write import STAGING_BYTES, WritePlan
from ostraka._spec import DTYPES, StoredLeaf
from ostraka._values import Value, flat_bytes
from ostraka.storage import FileWriter, Parts, Store

Array = np.ndarray[Any, Any]
NumberedBlock = tuple[int, list[Array]]
"""A block's number in its file, and the bytes it is made of."""

_OPEN_FILES = 64
_COPY_BYTES = 16 << 20
"""How much of a box that is not contiguous in memory is copied at a time."""
_SMALL_BYTES = 1 << 20
"""A single file up to this size is written by the caller."""
_LIVE_BYTES = 1 << 20
"""How much of what the program may write to meanwhile is copied at a time."""


class Progress:
    """How far a save has come, in bytes of this process's files."""

    def __init__(self) -> None:
        self.total = 0
        self.written = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes


@dataclass(frozen=True, slots=True)
class Written:
    """What one process has written."""

    index: IndexEntry | None
    """Its process index; None if the process has nothing to write."""
    nbytes: int
    time_s: float


def write_shards(
    store: Store,
    save_id: str,
    plan: WritePlan,
    process: int,
    values: Sequence[Value],
    *,
    check: Callable[[], None],
    progress: Progress,
) -> IndexEntry | None:
    """Write the files of a process, and last its index; None if it has nothing to write.

    `check` is called between blocks and may raise, so that nobody goes on writing for a save that
    has failed.
    """
    files = plan.files_of(process)
    if not files:
        return None
    devices = set(map(attrgetter("device"), files))
    contents = _format.entries_by_file(plan.leaves, plan.layouts, devices)
    progress.total = sum(map(attrgetter("size"), files))
    shards = [
        _Shard(store, save_id, file, contents[file.device, file.part], plan.leaves)
        for file in files
    ]
    _write_all(shards, values, _must_be_copied(plan, values), check, progress, store.parts)
    digests = {shard.name: shard.digests() for shard in shards}
    index = _format.encode_index(save_id, process, digests)
    store.put(f"{_format.shards_directory(save_id)}/{_format.index_name(process)}", index)
    return IndexEntry(len(index), _format.digest(index))


def _write_all(
    shards: Sequence[_Shard],
    values: Sequence[Value],
    copied: frozenset[int],
    check: Callable[[], None],
    progress: Progress,
    parts: Parts,
) -> None:
    staging = ByteBudget(STAGING_BYTES)
    if len(shards) == 1 and progress.total <= _SMALL_BYTES:
        _write_small(shards[0], _stream(shards[0], values, copied, staging, check))
        progress.written = progress.total
        return
    stop = StopSignal()

    def check_all() -> None:
        check()
        stop.check()

    def write(task: tuple[_Shard, Iterable[NumberedBlock]]) -> None:
        shard, blocks = task
        for number, pieces in blocks:
            check_all()
            progress.add(shard.write(number, pieces))

    try:
        tasks = _tasks(shards, values, copied, staging, check_all, parts)
        run_all(write, tasks, threads=parts.at_once, stop=stop)
    except BaseException:
        for shard in shards:
            shard.abandon()
        raise


def _write_small(shard: _Shard, stream: Iterator[Array]) -> None:
    """Write a file that is written before a thread would have begun."""
    try:
        for number, pieces in shard.blocks(stream):
            shard.write(number, pieces)
    except BaseException:
        shard.abandon()
        raise


class _Shard:
    """A shard file that is being written: opened for its first block, closed after its last."""

    def __init__(
        self,
        store: Store,
        save_id: str,
        file: FileEntry,
        entries: list[Entry],
        leaves: Sequence[StoredLeaf],
    ):
        self.file = file
        self.name = file.name
        self.entries = entries
        self.leaves = leaves
        self.save_id = save_id
        self._store = store
        self._lengths = _format.block_lengths(file.header_bytes, entries)
        self._offsets = [0, *accumulate(self._lengths)]
        self._digests = [""] * len(self._lengths)
        self._blocks_left = len(self._lengths)
        self._writer: FileWriter | None = None
        self._lock = threading.Lock()

    def write(self, number: int, pieces: list[Array]) -> int:
        """Digest a block and put it in its place; returns its length."""
        self._digests[number] = _format.block_digest(pieces)
        writer = self._opened()
        writer.write(self._offsets[number], pieces)
        with self._lock:
            self._blocks_left -= 1
            is_last = self._blocks_left == 0
        if is_last:
            writer.finish()
        return self._lengths[number]

    def abandon(self) -> None:
        if self._writer is not None and self._blocks_left:
            self._writer.abandon()

    def digests(self) -> FileDigests:
        return FileDigests(self.file.size, tuple(self._lengths), tuple(self._digests))

    def blocks(self, stream: Iterator[Array]) -> Iterator[NumberedBlock]:
        """A file's bytes, cut into its blocks."""
        return enumerate(_format.regroup(stream, self._lengths))

    def _opened(self) -> FileWriter:
        with self._lock:
            if self._writer is None:
                name = f"{_format.shards_directory(self.save_id)}/{self.name}"
                self._writer = self._store.create(name, self.file.size)
            return self._writer


def _tasks(
    shards: Sequence[_Shard],
    values: Sequence[Value],
    copied: frozenset[int],
    staging: ByteBudget,
    check: Callable[[], None],
    parts: Parts,
) -> Iterator[tuple[_Shard, Iterable[NumberedBlock]]]:
    """What a thread does at a time: blocks whose views are there, or all of a file.

    A file with something in it that must first be copied (from an accelerator, to another dtype)
    is done by one thread from its first byte to its last, so that no more is copied than is needed
    soon; so is every file where the store wants it written in order. Blocks of the others come in
    turn, so that a leaf's shards are looked at together: one by one, or as many as the store likes.
    """
    of_views: list[Iterator[tuple[_Shard, Iterable[NumberedBlock]]]] = []
    for shard in shards:
        blocks = shard.blocks(_stream(shard, values, copied, staging, check))
        if parts.in_any_order and copied.isdisjoint(entry.leaf for entry in shard.entries):
            of_views.append(_in_parts(shard, blocks, parts.size_bytes))
        else:
            yield shard, blocks
    for task in in_turn(of_views, at_a_time=_OPEN_FILES):
        check()
        yield task


def _in_parts(
    shard: _Shard, blocks: Iterator[NumberedBlock], least_bytes: int
) -> Iterator[tuple[_Shard, Iterable[NumberedBlock]]]:
    """Blocks that follow each other, as few as have `least_bytes` together."""
    part: list[NumberedBlock] = []
    nbytes = 0
    for block in blocks:
        part.append(block)
        if least_bytes:
            nbytes += sum(piece.nbytes for piece in block[1])
        if nbytes >= least_bytes:
            yield shard, part
            part, nbytes = [], 0
    if part:
        yield shard, part


def _must_be_copied(plan: WritePlan, values: Sequence[Value]) -> frozenset[int]:
    """The leaves that are not in host memory as they will be in the files."""
    return frozenset(
        number
        for number, (leaf, value) in enumerate(zip(plan.leaves, values, strict=True))
        if not value.in_host_memory or DTYPES[leaf.spec.dtype].packed
    )


def _stream(
    shard: _Shard,
    values: Sequence[Value],
    copied: frozenset[int],
    staging: ByteBudget,
    check: Callable[[], None],
) -> Iterator[Array]:
    """The bytes of a shard file in order, as views of the live values where that can be."""
    device, leaves = shard.file.device, shard.leaves
    header = _format.encode_header(shard.entries, leaves, shard.save_id, shard.file.header_bytes)
    yield np.frombuffer(header, np.uint8)
    for leaf, box, _, nbytes in shard.entries:
        if nbytes == 0:
            continue
        value = values[leaf]
        if leaf not in copied:
            array = value.read(device, box)
            if array.nbytes != nbytes:
                raise _wrong_size(array, nbytes, box, leaves[leaf])
            if value.may_change:
                yield from _snapshots(array)
            elif array.flags.c_contiguous:
                yield array.reshape(-1).view(np.uint8)  # as flat_bytes: most come this way
            else:
                yield from _bands(array)
            continue
        with staging.hold(nbytes, check):
            array = value.read(device, box)
            is_packed = DTYPES[leaves[leaf].spec.dtype].packed
            array = _pack.pack(array) if is_packed else array
            if array.nbytes != nbytes:
                raise _wrong_size(array, nbytes, box, leaves[leaf])
            yield from _bands(array)
            del array


def _wrong_size(array: Array, nbytes: int, box: Box, leaf: StoredLeaf) -> AssertionError:
    """What is written must be what was planned, or all that follows in the file would be wrong."""
    return AssertionError(
        f"leaf {leaf.spec.path!r} gives {array.nbytes:,} bytes for box {box}, and {nbytes:,} were "
        "planned"
    )


def _snapshots(array: Array) -> Iterator[Array]:
    """Copies of an array's bytes: what is digested must be what is written, whoever changes it."""
    for band in _bands(array):
        for start in range(0, band.size, _LIVE_BYTES):
            yield band[start : start + _LIVE_BYTES].copy()


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
