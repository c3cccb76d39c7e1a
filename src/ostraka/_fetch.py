"""Execute a read plan: blocks of files into buffers in memory, each block checked. No JAX.

Buffers are fresh and 64-byte aligned, because JAX takes such memory as it is, without a copy; a
buffer that was handed out is never written again. Small buffers are cut from larger pieces of
memory in the order in which their bytes lie in the files, so that one read fills many of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from ostraka import _box, _format, _pack
from ostraka._checkpoint import Source
from ostraka._format import FileDigests
from ostraka._parallel import StopSignal, in_turn, run_as_completed
from ostraka._plan_read import Chunk, Direct, FileRead, ReadPlan, Strided, plan_chunks, plan_read
from ostraka._spec import DTYPES, Target, numpy_dtype
from ostraka.errors import StoreError
from ostraka.storage import FileReader

Array = np.ndarray[Any, Any]

_READERS = max(2, min(os.cpu_count() or 1, 16))
_CHUNK_BYTES = 8 << 20
_OPEN_FILES = 64
_ALIGNMENT = 64
_ARENA_BYTES = 2 << 20
_ARENA_LIMIT_BYTES = 1 << 20
"""Buffers from this size on have memory of their own."""
_MAPPED_BYTES = 64 << 10
"""Less is not worth asking for."""
_ADVISED_BYTES = 4 << 20
"""From this size on numpy asks the kernel for huge pages."""


def fetch(source: Source, targets: Sequence[Target]) -> list[Array]:
    """The elements of each wanted box, in memory of its own."""
    job = FetchJob(source, targets, shared_memory=False)
    for _ in job.run(StopSignal()):
        pass
    return job.arrays


class FetchJob:
    """Reads the bytes of all targets, in threads. Targets may want the same elements.

    Raises Damaged, naming the file and the leaves, for bytes that are missing or not as written.
    """

    def __init__(self, source: Source, targets: Sequence[Target], *, shared_memory: bool):
        self._source = source
        self._targets = targets
        try:
            self.plan = plan_read(source.metadata, targets)
        except ValueError as error:
            raise source.damaged(
                _format.METADATA_NAME, f"it contradicts itself: {error}"
            ) from error
        self._files = [_File(source, read) for read in self.plan.files]
        self._memory = _Memory(source, self.plan, shared=shared_memory)
        self._waiting = [0] * len(targets)
        """Of each target: the files not yet looked at, and the moves that are yet to be made."""
        for file in self._files:
            for piece in file.read.pieces:
                self._waiting[piece.buffer] += 1
        self._complete = [n for n, count in enumerate(self._waiting) if count == 0]
        self._memory.allocate(self._complete)
        self.arrays = self._memory.arrays
        self.bytes_read = 0
        """What has been read in all, headers and unwanted parts of blocks included."""
        self._scratch = threading.local()

    def release(self, targets: Iterable[int]) -> None:
        """Let go of the memory of targets that have been taken."""
        for number in targets:
            self._memory.forget(number)

    def run(self, stop: StopSignal) -> Iterator[int]:
        """Yields the number of each target as soon as all of it is there."""
        started: list[Chunk] = []

        def tasks() -> Iterator[_Task]:
            # Of each file in turn: the parts of a leaf, which lie in all of them, come together,
            # and arrays are made of them while later ones are still being read.
            files = [self._chunks_of(file) for file in self._files]
            for task in in_turn(files, at_a_time=_OPEN_FILES):
                started.append(task[1])
                yield task

        try:
            done = run_as_completed(
                lambda task: self._execute(*task), tasks(), threads=_READERS, stop=stop
            )
            for number, _ in done:
                yield from self._take_complete()
                self.bytes_read += started[number].stop - started[number].start
                self._count_moves(started[number], -1)
                yield from self._take_complete()
            yield from self._take_complete()
        finally:
            for file in self._files:
                file.close()

    def _chunks_of(self, file: _File) -> Iterator[_Task]:
        """What to read of a file. Found out when its turn comes, while others are being read."""
        self._memory.allocate(piece.buffer for piece in file.read.pieces)
        chunks = plan_chunks(
            file.read,
            file.digests,
            self._source.metadata,
            self._targets,
            chunk_bytes=_CHUNK_BYTES,
        )
        # A file that gives nothing but empty boxes still must be there.
        chunks = chunks or [Chunk(0, 0, 0, 0, (), ())]
        file.chunks_left = len(chunks)
        self.bytes_read += file.read.file.header_bytes
        for chunk in chunks:
            self._count_moves(chunk, +1)
        for piece in file.read.pieces:
            self._count(piece.buffer, -1)
        yield from ((file, chunk) for chunk in chunks)

    def _count_moves(self, chunk: Chunk, change: int) -> None:
        for move in chunk.direct:
            self._count(move.buffer, change)
        for move in chunk.strided:
            self._count(move.buffer, change)

    def _count(self, target: int, change: int) -> None:
        self._waiting[target] += change
        if self._waiting[target] == 0:
            self._complete.append(target)

    def _take_complete(self) -> list[int]:
        complete, self._complete = self._complete, []
        return complete

    def _execute(self, file: _File, chunk: Chunk) -> None:
        with file.opened():
            if chunk.strided or _overlap(chunk.direct):
                self._read_and_copy(file, chunk)
            elif chunk.direct:
                self._read_in_place(file, chunk)

    def _read_in_place(self, file: _File, chunk: Chunk) -> None:
        """Everything wanted lies in its buffer as in the file: read it there."""
        runs = self._memory.runs(chunk)
        unwanted = chunk.stop - chunk.start - sum(stop - start for start, stop, _ in runs)
        scratch = self._scratch_of(unwanted)
        pieces: list[Array] = []
        position = chunk.start
        for start, stop, memory in [*runs, (chunk.stop, chunk.stop, None)]:
            if start > position:
                pieces.append(scratch[: start - position])
                scratch = scratch[start - position :]
            if memory is not None:
                pieces.append(memory)
            position = stop
        for piece in pieces:
            _map_pages(piece)
        file.read_into(chunk.start, chunk.stop, pieces)
        file.check(chunk, pieces)

    def _read_and_copy(self, file: _File, chunk: Chunk) -> None:
        """Some of it is wanted row by row, or by several targets: read it all, then copy."""
        scratch = self._scratch_of(chunk.stop - chunk.start)
        file.read_into(chunk.start, chunk.stop, [scratch])
        file.check(chunk, [scratch])
        for move in chunk.direct:
            size = move.stop - move.start
            memory = self._memory.flat(move.buffer)[move.buffer_start : move.buffer_start + size]
            _map_pages(memory)
            memory[:] = scratch[move.start - chunk.start : move.stop - chunk.start]
        boxes: dict[tuple[int, int], Array] = {}
        for move in chunk.strided:
            rows = boxes.get((move.start, move.stop))
            if rows is None:
                data = scratch[move.start - chunk.start : move.stop - chunk.start]
                rows = boxes[move.start, move.stop] = self._elements(move, data)
            within = _box.slices(move.shared, self._targets[move.buffer].box)
            memory = self.arrays[move.buffer][(*within, ...)]  # a view, also of no dimensions
            if memory.flags.c_contiguous:
                _map_pages(memory)
            memory[...] = rows[_box.slices(move.shared, move.box)]

    def _elements(self, move: Strided, data: Array) -> Array:
        name = self._source.metadata.leaves[self._targets[move.buffer].leaf].spec.dtype
        if DTYPES[name].packed:
            elements = _pack.unpack(data, name, _box.count(move.box))
        else:
            elements = data.view(numpy_dtype(name))
        return elements.reshape(_box.shape_of(move.box))

    def _scratch_of(self, nbytes: int) -> Array:
        """Memory for this thread only, good until the thread asks again."""
        held: Array | None = getattr(self._scratch, "held", None)
        if held is None or held.size < nbytes:
            held = self._scratch.held = _aligned(nbytes)
        return held[:nbytes]


class _File:
    """A shard file that is being read: opened once, its size and header checked."""

    def __init__(self, source: Source, read: FileRead):
        self.read = read
        self.digests: FileDigests = source.digests_of(read.file)
        self._source = source
        self._name = source.name_of(read.file)
        self._reader: FileReader | None = None
        self._lock = threading.Lock()
        self.chunks_left = 0

    @contextmanager
    def opened(self) -> Generator[None]:
        """The file is opened and checked for its first chunk, and closed after its last."""
        with self._lock:
            if self._reader is None:
                self._open()
        yield
        with self._lock:
            self.chunks_left -= 1
            if self.chunks_left == 0:
                self.close()

    def _open(self) -> None:
        entry = self.read.file
        try:
            self._reader = self._source.store.open(self._name)
        except FileNotFoundError as error:
            raise self._damaged("it is missing", 0, entry.size) from error
        if self._reader.size != entry.size:
            found = f"it has {self._reader.size:,} bytes where {entry.size:,} were written"
            raise self._damaged(found, min(self._reader.size, entry.size - 1), entry.size)
        header = np.empty(entry.header_bytes, np.uint8)
        self.read_into(0, entry.header_bytes, [header])
        if _format.block_digest([header]) != self.digests.digests[0]:
            raise self._damaged("its header is not as it was written", 0, 0)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def read_into(self, start: int, stop: int, pieces: Sequence[Array]) -> None:
        assert self._reader is not None
        try:
            count = self._reader.read_into(start, pieces)
        except StoreError as error:
            if error.loss is None:
                raise
            raise self._damaged(error.loss, start, stop) from error
        if count != stop - start:
            raise self._damaged(f"it ends at byte {start + count:,}", start + count, stop)

    def check(self, chunk: Chunk, pieces: Sequence[Array]) -> None:
        """Compare the digest of every block of a chunk that was read into `pieces`."""
        start = chunk.start
        blocks = _format.regroup(
            iter(pieces), self.digests.lengths[chunk.first_block : chunk.last_block]
        )
        for number, block in enumerate(blocks, chunk.first_block):
            stop = start + self.digests.lengths[number]
            if _format.block_digest(block) != self.digests.digests[number]:
                found = f"bytes {start:,} to {stop:,} are not as they were written"
                raise self._damaged(found, start, stop)
            start = stop

    def _damaged(self, found: str, start: int, stop: int) -> Exception:
        """Name the leaves that have bytes in `[start, stop)` of the file."""
        header = self.read.file.header_bytes
        leaves = _format.paths_between(
            self._source.metadata.leaves, self.read.entries, start - header, stop - header
        )
        return self._source.damaged(self._name, found, leaves)


_Task = tuple[_File, Chunk]


def _overlap(moves: Sequence[Direct]) -> bool:
    """Whether several of the moves, which are in order, want the same bytes."""
    return any(one.stop > other.start for one, other in pairwise(moves))


class _Memory:
    """The buffers of a read plan."""

    def __init__(self, source: Source, plan: ReadPlan, *, shared: bool):
        self._source = source
        self._plan = plan
        self._arena = np.empty(0, np.uint8)
        self._arena_used = 0
        self._shapes: dict[_box.Box, tuple[tuple[int, ...], int]] = {}
        self._places: dict[int, tuple[Array, int]] = {}
        """Small buffers: the arena that each was cut from, and where."""
        count = len(plan.targets)
        self._shared = shared
        self.arrays: list[Array] = [_EMPTY] * count

    def allocate(self, targets: Iterable[int]) -> None:
        """Make memory for targets that have none yet, in the order in which they will be filled."""
        for number in targets:
            if self.arrays[number] is _EMPTY:
                self._allocate(number)

    def _allocate(self, number: int) -> None:
        leaf, box = self._plan.targets[number]
        dtype = numpy_dtype(self._source.metadata.leaves[leaf].spec.dtype)
        shape, elements = self._shapes.get(box) or self._shapes.setdefault(
            box, (_box.shape_of(box), _box.count(box))
        )
        nbytes = elements * dtype.itemsize
        if self._shared and 0 < nbytes < _ARENA_LIMIT_BYTES:
            memory, start = self._places[number] = self._cut(nbytes)
        else:
            memory, start = _aligned(nbytes), 0
        self.arrays[number] = np.ndarray(shape, dtype, memory, start)

    def forget(self, number: int) -> None:
        self.arrays[number] = _EMPTY
        self._places.pop(number, None)

    def _cut(self, nbytes: int) -> tuple[Array, int]:
        start = -(-self._arena_used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self._arena.size:
            self._arena = _aligned(_ARENA_BYTES)
            start = 0
        self._arena_used = start + nbytes
        return self._arena, start

    def flat(self, number: int) -> Array:
        """The bytes of a buffer."""
        return self.arrays[number].reshape(-1).view(np.uint8)

    def runs(self, chunk: Chunk) -> list[tuple[int, int, Array]]:
        """The chunk's moves as `(start, stop, memory)`, neighbours in file and memory joined."""
        runs: list[tuple[int, int, Array]] = []
        joined: tuple[Array, int] | None = None
        for move in chunk.direct:
            size = move.stop - move.start
            place = self._places.get(move.buffer)
            if place is None:
                flat = self.flat(move.buffer)
                memory = flat[move.buffer_start : move.buffer_start + size]
                runs.append((move.start, move.stop, memory))
                joined = None
                continue
            arena, base = place
            begin = base + move.buffer_start
            if joined and joined[0] is arena and joined[1] == begin and runs[-1][1] == move.start:
                start, _, memory = runs[-1]
                runs[-1] = (start, move.stop, arena[begin - memory.size : begin + size])
            else:
                runs.append((move.start, move.stop, arena[begin : begin + size]))
            joined = (arena, begin + size)
        return runs


_EMPTY = np.empty(0, np.uint8)
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def detached(array: Array) -> Array:
    """An array that shares its memory with no other; for those that users may write to."""
    return array if array.nbytes >= _ARENA_LIMIT_BYTES else array.copy()


def _find_madvise() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError):  # pragma: no cover
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _find_madvise() if sys.platform == "linux" else None
_MADV_POPULATE_WRITE = 23


def _map_pages(memory: Array) -> None:
    """Have the kernel map fresh memory in one go, and not page by page as it is filled.

    Only faster: where the kernel does not know how (before Linux 5.14), the pages come one by one.
    """
    if _madvise is not None and memory.nbytes >= _MAPPED_BYTES:
        address = memory.__array_interface__["data"][0]
        start = address - address % mmap.PAGESIZE
        _madvise(start, address + memory.nbytes - start, _MADV_POPULATE_WRITE)


def _aligned(nbytes: int) -> Array:
    """Fresh memory at an address that JAX can take as it is."""
    if nbytes >= _ADVISED_BYTES and _PRIVATE:
        # Whether huge pages are good for memory that is written once is for the system to say:
        # where they must be made first, by compaction or by a hypervisor, asking for them makes a
        # restore several times slower.
        # Private, because the default would be memory that a forked process shares, and slower.
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=_PRIVATE), np.uint8)
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]
