"""Read boxes out of shard files: run a read plan in threads, and check each block. No JAX."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

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
from ostraka.layout.plan_read import Chunk, FileRead, Move, ReadPiece, plan_chunks, plan_read
from ostraka.layout.spec import Target
from ostraka.storage import opening_bytes

_OPEN_FILES = 64


class _Task(NamedTuple):
    """A chunk to read."""

    file: ShardFile
    read: FileRead
    chunk: Chunk
    is_first: bool
    """True for the first chunk of its file."""


def read_boxes(
    shards: Shards, targets: Sequence[Target], on_bytes: OnBytes | None
) -> Iterator[tuple[int, Array]]:
    """Yield the number and the elements of each target, as soon as it is complete.

    Targets may share elements. Raises Damaged, naming the file and the leaves, for missing or
    corrupt bytes.
    """
    return _Fetch(shards, targets, on_bytes or (lambda nbytes: None)).run()


class _Fetch:
    def __init__(self, shards: Shards, targets: Sequence[Target], on_bytes: OnBytes):
        self._leaves = [leaf.spec for leaf in shards.metadata.leaves]
        self._targets = targets
        self._on_bytes = on_bytes
        with damage_on_contradiction(shards.store):
            reads = plan_read(shards.metadata, targets, shards.allowance())
        self._files = [(ShardFile(shards, read.file, read.entries), read) for read in reads]
        self._buffers = Buffers(targets, self._leaves)
        self._cast = {number for number, target in enumerate(targets) if target.dtype is not None}
        self._on_overflow: dict[str, Any] = {**np.geterr(), "call": np.geterrcall()}
        """The caller's numpy error settings for casts. Other threads don't see them."""
        self._waiting = [0] * len(targets)
        """For each target, the number of files not yet planned and of moves not yet made."""
        for read in reads:
            for piece in read.pieces:
                self._waiting[piece.buffer] += 1
        self._complete = [n for n, count in enumerate(self._waiting) if count == 0]
        self._buffers.allocate(self._complete)
        self._allocated: set[str] = set()
        """Files with buffers for all of their pieces."""
        self._allocating = threading.Lock()
        self._scratch = Scratch(_recycle.current())
        self._stored = Scratch(_recycle.current())
        """Memory for the stored bytes of compressed blocks."""
        self._threads = shards.store.traits.reads_at_once
        self._is_remote = shards.store.traits.is_remote

    def run(self) -> Iterator[tuple[int, Array]]:
        # Of each file in turn: the parts of a leaf, which lie in all of them, come together, and
        # arrays are made of them while later ones are still being read.
        tasks = in_turn([self._chunks_of(*file) for file in self._files], at_a_time=_OPEN_FILES)
        try:
            for _, (chunk, nbytes) in run_as_completed(
                self._execute, tasks, threads=self._threads, stop=StopSignal()
            ):
                self._on_bytes(nbytes)
                self._done_with(chunk.moves)
                complete, self._complete = self._complete, []
                for number in complete:
                    yield number, self._buffers.take(number)
        finally:
            for file, _ in self._files:
                file.close()

    def _chunks_of(self, file: ShardFile, read: FileRead) -> Iterator[_Task]:
        """The chunks of a file. They are planned while other files are being read."""
        # A file that gives nothing but empty boxes still must be there.
        chunks = plan_chunks(read.pieces, file.blocks) or [Chunk(0, 0, 0, 0, [])]
        file.reads_left = len(chunks)
        header_bytes = read.file.header_bytes
        if chunks[0].moves and self._is_remote:
            blocks = file.blocks[chunks[0].first_block : chunks[0].last_block]
            span = (blocks[0].file_start, blocks[-1].file_stop)
            file.first_bytes = opening_bytes(header_bytes, *span)
        self._on_bytes(header_bytes)
        for chunk in chunks:
            for move in chunk.moves:
                self._waiting[move.buffer] += 1
        self._done_with(read.pieces)
        for number, chunk in enumerate(chunks):
            yield _Task(file, read, chunk, number == 0)

    def _done_with(self, parts: Sequence[ReadPiece | Move]) -> None:
        waiting = self._waiting
        for part in parts:
            waiting[part.buffer] -= 1
            if waiting[part.buffer] == 0:
                self._complete.append(part.buffer)

    def _execute(self, task: _Task) -> tuple[Chunk, int]:
        """Read a chunk. Returns it, and the number of bytes read from the file.

        The reader of the first chunk checks the header. Other readers don't wait for that: they
        don't need the header, and in a bucket its bytes may still be on their way.
        """
        file, read, chunk, is_first = task
        with file.opened():
            with self._allocating:  # Once the file is open, and has its size.
                if file.name not in self._allocated:
                    self._buffers.allocate(piece.buffer for piece in read.pieces)
                    self._allocated.add(file.name)
            is_in_place = self._fits_in_place(chunk.moves)
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
        for start, stop, buffer, _, box, shared in chunk.moves:
            leaf, target, cast = self._targets[buffer]
            rows = boxes.get((start, stop))
            if rows is None:
                stored = data[start - chunk.start : stop - chunk.start]
                rows = boxes[start, stop] = from_bytes(
                    stored, self._leaves[leaf].dtype, _box.shape_of(box)
                )
            within = _box.slices(shared, target)
            memory = self._buffers.array(buffer)[(*within, ...)]  # a view, also if 0-d
            if memory.flags.c_contiguous:
                map_pages(memory)
            found = rows[_box.slices(shared, box)]
            if cast is None:
                memory[...] = found
            else:
                with np.errstate(**self._on_overflow):
                    memory[...] = found

    def _fits_in_place(self, moves: Sequence[Move]) -> bool:
        """True if all moves, which are in order, can be read straight into their buffers."""
        return (
            all(move.buffer_start is not None for move in moves)
            and all(one.stop <= other.start for one, other in pairwise(moves))
            and not (self._cast and any(move.buffer in self._cast for move in moves))
        )
