"""Read boxes out of shard files: a read plan, run in threads, each block checked. No JAX."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ostraka import _box, _pack, _recycle
from ostraka._blocks import ShardFile
from ostraka._damage import damage_on_contradiction
from ostraka._memory import Array, Buffers, Scratch, map_pages
from ostraka._parallel import StopSignal, in_turn, run_as_completed
from ostraka._plan_read import Chunk, FileRead, Move, Piece, plan_chunks, plan_read
from ostraka._shards import Shards
from ostraka._source import OnBytes
from ostraka._spec import DTYPES, Target, numpy_dtype
from ostraka.storage import opening_bytes

_OPEN_FILES = 64


class _Task(NamedTuple):
    """A chunk that is to be read."""

    file: ShardFile
    read: FileRead
    chunk: Chunk
    is_first: bool
    """Of those of its file."""


def read_boxes(
    shards: Shards, targets: Sequence[Target], on_bytes: OnBytes | None
) -> Iterator[tuple[int, Array]]:
    """The number and the elements of each target, as soon as all of it is there.

    Targets may want the same elements. Raises Damaged, naming the file and the leaves, for bytes
    that are missing or not as written.
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
        """What the caller has chosen for casts; other threads don't see it."""
        self._waiting = [0] * len(targets)
        """Of each target: the files not yet looked at, and the moves that are yet to be made."""
        for read in reads:
            for piece in read.pieces:
                self._waiting[piece.buffer] += 1
        self._complete = [n for n, count in enumerate(self._waiting) if count == 0]
        self._buffers.allocate(self._complete)
        self._allocated: set[str] = set()
        """The files for whose pieces there are buffers."""
        self._allocating = threading.Lock()
        self._scratch = Scratch(_recycle.current())
        self._stored = Scratch(_recycle.current())
        """For what is stored of compressed blocks."""
        self._threads = shards.store.parts.reads_at_once

    def run(self) -> Iterator[tuple[int, Array]]:
        # Of each file in turn: the parts of a leaf, which lie in all of them, come together, and
        # arrays are made of them while later ones are still being read.
        tasks = in_turn([self._chunks_of(*file) for file in self._files], at_a_time=_OPEN_FILES)
        try:
            for _, (chunk, nbytes) in run_as_completed(
                self._execute,
                tasks,
                threads=self._threads,
                stop=StopSignal(),
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
        """What to read of a file. Found out when its turn comes, while others are being read."""
        # A file that gives nothing but empty boxes still must be there.
        chunks = plan_chunks(read.pieces, file.blocks) or [Chunk(0, 0, 0, 0, [])]
        file.reads_left = len(chunks)
        header_bytes = read.file.header_bytes
        file.first_bytes = header_bytes
        if chunks[0].moves:
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

    def _done_with(self, parts: Sequence[Piece | Move]) -> None:
        waiting = self._waiting
        for part in parts:
            waiting[part.buffer] -= 1
            if waiting[part.buffer] == 0:
                self._complete.append(part.buffer)

    def _allocate(self, file: ShardFile, read: FileRead) -> None:
        """Have buffers for what a file gives, now that it is known to be there and as long."""
        with self._allocating:
            if file.name not in self._allocated:
                self._buffers.allocate(piece.buffer for piece in read.pieces)
                self._allocated.add(file.name)

    def _execute(self, task: _Task) -> tuple[Chunk, int]:
        """Read a chunk; returns it, and how many bytes of the file that took.

        Whoever reads the first one checks the header. The others need not wait for it: it tells
        them nothing, and bytes of a bucket's file that has just been opened are still on their way.
        """
        file, read, chunk, is_first = task
        with file.opened():
            self._allocate(file, read)
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
        """Copy what is wanted out of the bytes of a chunk."""
        boxes: dict[tuple[int, int], Array] = {}
        for start, stop, buffer, _, box, shared in chunk.moves:
            leaf, target, cast = self._targets[buffer]
            rows = boxes.get((start, stop))
            if rows is None:
                stored = data[start - chunk.start : stop - chunk.start]
                rows = boxes[start, stop] = _elements(stored, self._leaves[leaf].dtype, box)
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
        """Whether all moves, which are in order, can be read to their places, each byte to one."""
        return (
            all(move.buffer_start is not None for move in moves)
            and all(one.stop <= other.start for one, other in pairwise(moves))
            and not (self._cast and any(move.buffer in self._cast for move in moves))
        )


def _elements(data: Array, dtype: str, box: _box.Box) -> Array:
    if DTYPES[dtype].packed:
        elements = _pack.unpack(data, dtype, _box.count(box))
    else:
        elements = data.view(numpy_dtype(dtype))
    return elements.reshape(_box.shape_of(box))
