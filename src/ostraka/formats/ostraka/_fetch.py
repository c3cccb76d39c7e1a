"""Read boxes out of shard files: run a read plan in threads, and check each block. No JAX."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ostraka.common import memory as _recycle
from ostraka.common.dtypes import from_bytes
from ostraka.common.threads import StopSignal, in_turn, run_as_completed
from ostraka.formats.buffers import Array, Buffers, Scratch, map_pages
from ostraka.formats.ostraka.damage import damage_on_contradiction
from ostraka.formats.ostraka.shard_reader import ShardFile
from ostraka.formats.ostraka.shards import Shards
from ostraka.formats.source import OnBytes
from ostraka.layout import box as _box
from ostraka.layout.plan_read import Chunk, Move, ReadPiece, plan_chunks, plan_read
from ostraka.layout.spec import Target
from ostraka.storage import opening_bytes

_OPEN_FILES = 64


class BoxReader:
    """Reads boxes. They may share elements.

    Raises Damaged, naming the file and the leaves, for missing or corrupt bytes.
    """

    def __init__(self, shards: Shards, targets: Sequence[Target], on_bytes: OnBytes):
        self._leaves = [leaf.spec for leaf in shards.metadata.leaves]
        self._targets = targets
        self._on_bytes = on_bytes
        self._traits = shards.store.traits
        with damage_on_contradiction(shards.store):
            reads = plan_read(shards.metadata, targets, shards.allowance())
        self._files = [(ShardFile(shards, read.file, read.entries), read.pieces) for read in reads]
        self._waiting = Counter(piece.buffer for read in reads for piece in read.pieces)
        """For each target, the number of files not yet planned and of moves not yet made."""
        self._complete = [number for number in range(len(targets)) if not self._waiting[number]]
        self._buffers = Buffers(targets, self._leaves)
        self._buffers.allocate(self._complete)
        self._unallocated = {file.name: pieces for file, pieces in self._files}
        """Files whose pieces have no buffers yet."""
        self._allocating = threading.Lock()
        self._scratch = Scratch(_recycle.current())
        self._stored = Scratch(_recycle.current())
        """Memory for stored bytes that are not yet the data."""

    def run(self) -> Iterator[tuple[int, Array]]:
        """Yield the number and the elements of each target, as soon as it is complete."""
        # Of each file in turn: the parts of a leaf, which lie in all of them, come together, and
        # arrays are made of them while later ones are still being read.
        tasks = in_turn([self._chunks_of(*file) for file in self._files], at_a_time=_OPEN_FILES)
        try:
            for _, (chunk, nbytes) in run_as_completed(
                self._execute, tasks, threads=self._traits.reads_at_once, stop=StopSignal()
            ):
                self._on_bytes(nbytes)
                self._done_with(chunk.moves)
                complete, self._complete = self._complete, []
                for number in complete:
                    yield number, self._buffers.take(number)
        finally:
            for file, _ in self._files:
                file.close()

    def _chunks_of(
        self, file: ShardFile, pieces: Sequence[ReadPiece]
    ) -> Iterator[tuple[ShardFile, Chunk, bool]]:
        """The chunks of a file, with True for the first. Planned while other files are read."""
        # A file that gives nothing but empty boxes still must be there.
        chunks = plan_chunks(pieces, file.blocks) or [Chunk(0, 0, 0, 0, [])]
        file.reads_left = len(chunks)
        if chunks[0].moves and self._traits.is_remote:
            first, last = chunks[0].first_block, chunks[0].last_block - 1
            span = (file.blocks[first].file_start, file.blocks[last].file_stop)
            file.first_bytes = opening_bytes(file.entry.header_bytes, *span)
        self._on_bytes(file.entry.header_bytes)
        self._waiting.update(move.buffer for chunk in chunks for move in chunk.moves)
        self._done_with(pieces)
        for number, chunk in enumerate(chunks):
            yield file, chunk, number == 0

    def _done_with(self, parts: Sequence[ReadPiece | Move]) -> None:
        waiting = self._waiting
        for part in parts:
            waiting[part.buffer] -= 1
            if waiting[part.buffer] == 0:
                self._complete.append(part.buffer)

    def _execute(self, task: tuple[ShardFile, Chunk, bool]) -> tuple[Chunk, int]:
        """Read a chunk. Returns it, and the number of bytes read from the file.

        The reader of the first chunk checks the header. Other readers don't wait for that: they
        don't need the header, and in a bucket its bytes may still be on their way.
        """
        file, chunk, is_first = task
        with file.opened():
            with self._allocating:  # Once the file is open, and has its size.
                pieces = self._unallocated.get(file.name, ())
                self._buffers.allocate(piece.buffer for piece in pieces)
                self._unallocated.pop(file.name, None)
            is_in_place = all(
                move.buffer_start is not None and self._targets[move.buffer].dtype is None
                for move in chunk.moves
            ) and all(one.stop <= other.start for one, other in pairwise(chunk.moves))
            if is_in_place:
                memory = self._buffers.memory_of(chunk, self._scratch.take)
                for piece in memory:
                    map_pages(piece)
            else:
                memory = [self._scratch.take(chunk.stop - chunk.start)]
            if is_first:
                file.check_header()
            if not chunk.moves:
                return chunk, 0
            nbytes = file.read(chunk.first_block, chunk.last_block, memory, self._stored.take)
            if not is_in_place:
                self._copy(chunk, memory[0])
            return chunk, nbytes

    def _copy(self, chunk: Chunk, data: Array) -> None:
        """Copy the moves of a chunk to their buffers."""
        boxes: dict[tuple[int, int], Array] = {}
        with np.errstate(**self._buffers.on_overflow):
            for start, stop, buffer, _, box, shared in chunk.moves:
                leaf, target, _ = self._targets[buffer]
                rows = boxes.get((start, stop))
                if rows is None:
                    stored = data[start - chunk.start : stop - chunk.start]
                    dtype = self._leaves[leaf].dtype
                    rows = boxes[start, stop] = from_bytes(stored, dtype, _box.shape_of(box))
                within = _box.slices(shared, target)
                memory = self._buffers.array(buffer)[(*within, ...)]  # a view, also if 0-d
                if memory.flags.c_contiguous:
                    map_pages(memory)
                memory[...] = rows[_box.slices(shared, box)]
