"""Read boxes out of shard files: a read plan, run in threads, each block checked. No JAX."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ostraka import _box, _format, _pack
from ostraka._blocks import ShardFile, Shards
from ostraka._memory import Array, Buffers, aligned, map_pages
from ostraka._parallel import StopSignal, in_turn, run_as_completed
from ostraka._plan_read import (
    CHUNK_BYTES,
    Chunk,
    Direct,
    FileRead,
    Piece,
    Strided,
    plan_chunks,
    plan_read,
)
from ostraka._source import OnBytes
from ostraka._spec import DTYPES, Target, numpy_dtype

_READERS = max(2, min(os.cpu_count() or 1, 16))
_OPEN_FILES = 64


def read_boxes(
    shards: Shards, targets: Sequence[Target], on_bytes: OnBytes | None
) -> Iterator[tuple[int, Array]]:
    """The number and the elements of each target, as soon as all of it is there.

    Targets may want the same elements. Raises Damaged, naming the file and the leaves, for bytes
    that are missing or not as written.
    """
    return _Fetch(shards, targets, on_bytes).run()


class _Fetch:
    def __init__(self, shards: Shards, targets: Sequence[Target], on_bytes: OnBytes | None):
        self._shards = shards
        self._leaves = [leaf.spec for leaf in shards.metadata.leaves]
        self._targets = targets
        self._on_bytes = on_bytes
        try:
            reads = plan_read(shards.metadata, targets).files
        except ValueError as error:
            raise shards.damaged(
                _format.METADATA_NAME, f"it contradicts itself: {error}"
            ) from error
        self._files = [(ShardFile(shards, read.file, read.entries), read) for read in reads]
        self._buffers = Buffers(targets, self._leaves)
        self._waiting = [0] * len(targets)
        """Of each target: the files not yet looked at, and the moves that are yet to be made."""
        for read in reads:
            for piece in read.pieces:
                self._waiting[piece.buffer] += 1
        self._complete = [n for n, count in enumerate(self._waiting) if count == 0]
        self._buffers.allocate(self._complete)
        self._scratch = threading.local()

    def run(self) -> Iterator[tuple[int, Array]]:
        started: list[Chunk] = []

        def tasks() -> Iterator[_Task]:
            # Of each file in turn: the parts of a leaf, which lie in all of them, come together,
            # and arrays are made of them while later ones are still being read.
            files = [self._chunks_of(*file) for file in self._files]
            for task in in_turn(files, at_a_time=_OPEN_FILES):
                started.append(task[1])
                yield task

        try:
            done = run_as_completed(
                lambda task: self._execute(*task), tasks(), threads=_READERS, stop=StopSignal()
            )
            for number, nbytes in done:
                yield from self._take_complete()
                self._count_bytes(nbytes)
                self._done_with((*started[number].direct, *started[number].strided))
                yield from self._take_complete()
            yield from self._take_complete()
        finally:
            for file, _ in self._files:
                file.close()

    def _chunks_of(self, file: ShardFile, read: FileRead) -> Iterator[_Task]:
        """What to read of a file. Found out when its turn comes, while others are being read."""
        self._buffers.allocate(piece.buffer for piece in read.pieces)
        chunks = plan_chunks(
            read, file.blocks, self._shards.metadata, self._targets, chunk_bytes=CHUNK_BYTES
        )
        # A file that gives nothing but empty boxes still must be there.
        chunks = chunks or [Chunk(0, 0, 0, 0, (), ())]
        file.reads_left = len(chunks)
        self._count_bytes(read.file.header_bytes)
        for chunk in chunks:
            for move in (*chunk.direct, *chunk.strided):
                self._waiting[move.buffer] += 1
        self._done_with(read.pieces)
        yield from ((file, chunk) for chunk in chunks)

    def _count_bytes(self, nbytes: int) -> None:
        if self._on_bytes is not None:
            self._on_bytes(nbytes)

    def _done_with(self, parts: Sequence[Piece | Direct | Strided]) -> None:
        waiting = self._waiting
        for part in parts:
            waiting[part.buffer] -= 1
            if waiting[part.buffer] == 0:
                self._complete.append(part.buffer)

    def _take_complete(self) -> list[tuple[int, Array]]:
        complete, self._complete = self._complete, []
        return [(number, self._buffers.take(number)) for number in complete]

    def _execute(self, file: ShardFile, chunk: Chunk) -> int:
        """Returns how many bytes of the file were read."""
        with file.opened():
            file.check_header()
            if chunk.strided or _overlap(chunk.direct):
                return self._read_and_copy(file, chunk)
            return self._read_in_place(file, chunk) if chunk.direct else 0

    def _read_in_place(self, file: ShardFile, chunk: Chunk) -> int:
        """Everything wanted lies in its buffer as in the file: read it there."""
        runs = self._buffers.runs(chunk)
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
            map_pages(piece)
        return file.read(chunk.first_block, chunk.last_block, pieces)

    def _read_and_copy(self, file: ShardFile, chunk: Chunk) -> int:
        """Some of it is wanted row by row, or by several targets: read it all, then copy."""
        scratch = self._scratch_of(chunk.stop - chunk.start)
        nbytes = file.read(chunk.first_block, chunk.last_block, [scratch])
        for move in chunk.direct:
            size = move.stop - move.start
            memory = self._buffers.flat(move.buffer)[move.buffer_start : move.buffer_start + size]
            map_pages(memory)
            memory[:] = scratch[move.start - chunk.start : move.stop - chunk.start]
        boxes: dict[tuple[int, int], Array] = {}
        for move in chunk.strided:
            rows = boxes.get((move.start, move.stop))
            if rows is None:
                data = scratch[move.start - chunk.start : move.stop - chunk.start]
                rows = boxes[move.start, move.stop] = self._elements(move, data)
            within = _box.slices(move.shared, self._targets[move.buffer].box)
            memory = self._buffers.arrays[move.buffer][(*within, ...)]  # a view, also if 0-d
            if memory.flags.c_contiguous:
                map_pages(memory)
            memory[...] = rows[_box.slices(move.shared, move.box)]
        return nbytes

    def _elements(self, move: Strided, data: Array) -> Array:
        name = self._leaves[self._targets[move.buffer].leaf].dtype
        if DTYPES[name].packed:
            elements = _pack.unpack(data, name, _box.count(move.box))
        else:
            elements = data.view(numpy_dtype(name))
        return elements.reshape(_box.shape_of(move.box))

    def _scratch_of(self, nbytes: int) -> Array:
        """Memory for this thread only, good until the thread asks again."""
        held: Array | None = getattr(self._scratch, "held", None)
        if held is None or held.size < nbytes:
            held = self._scratch.held = aligned(nbytes)
        return held[:nbytes]


_Task = tuple[ShardFile, Chunk]


def _overlap(moves: Sequence[Direct]) -> bool:
    """Whether several of the moves, which are in order, want the same bytes."""
    return any(one.stop > other.start for one, other in pairwise(moves))
