"""The files of a parity group: read them by ranges or in order, and sum them up. No JAX."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Damaged
from ostraka.formats.ostraka.damage import (
    BytesLost,
    Comparison,
    damage_on_loss,
    damaged,
    ends_at,
    matches,
    not_as_written,
    other_size,
)
from ostraka.layout import shard_file as _format
from ostraka.layout.shard_file import Block, FileEntry
from ostraka.storage import FileReader

if TYPE_CHECKING:
    from ostraka.formats.ostraka.shards import Shards
    from ostraka.layout.parity_code import Array
    from ostraka.layout.parity_file import ParityFile


class Column:
    """An open file of a group: a member, or the parity in `[start, stop)` of a parity file."""

    def __init__(
        self, shards: Shards, file: FileEntry | ParityFile, start: int = 0, stop: int | None = None
    ):
        self.name = shards.name_of(file)
        self._shards = shards
        self._file = file
        self._start, self._stop = start, file.size if stop is None else stop
        self._blocks: list[Block] = []
        self._reader: FileReader | None = None
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> Array:
        """The bytes of a range, up to the end of the file. Raises BytesLost."""
        return self._read(self._start + start, min(self._start + stop, self._stop))

    def read_part(self, start: int, stop: int, memory: Array) -> Array:
        """Like `read`, but into `memory`."""
        part = memory[: max(min(stop, self._stop - self._start) - start, 0)]
        if len(part):
            self.read_into(self._start + start, part)
        return part

    def read_checked(self, start: int, stop: int) -> Array:
        """Like `read`, but compare all blocks in the range with their digests."""
        start, stop = self._start + start, min(self._start + stop, self._stop)
        try:
            self._blocks = self._blocks or self._shards.stored_digests(self._file).blocks()
        except Damaged as error:
            raise BytesLost(f"its digests are lost ({error.problems[0]})") from error
        blocks = overlapping(self._blocks, start, stop)
        if not blocks:
            return self._read(start, stop)
        first = blocks[0].file_start
        data = self._read(first, blocks[-1].file_stop)
        unmatched = first_unmatched(blocks, data, first)
        if unmatched is not None:
            raise BytesLost(not_as_written(unmatched))
        return data[start - first : stop - first]

    def _read(self, start: int, stop: int) -> Array:
        import numpy as np

        data = np.empty(max(stop - start, 0), np.uint8)
        if len(data):
            self.read_into(start, data)
        return data

    def read_into(self, start: int, data: Array) -> None:
        """Fill `data` from byte `start` of the file on. Raises BytesLost."""
        with damage_on_loss(BytesLost):
            count = self._open().read_into(start, [data])
        if count < len(data):
            raise BytesLost(ends_at(start + count))

    def _open(self) -> FileReader:
        with self._lock:
            if self._reader is None:
                reader = self._shards.store.open(self.name)
                if reader.size != self._file.size:
                    reader.close()
                    raise BytesLost(other_size(reader.size, self._file.size))
                self._reader = reader
            return self._reader

    def close(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def sum_up(
    shards: Shards,
    members: Sequence[FileEntry],
    count: int,
    check: Callable[[], None],
    *,
    may_be_kept: bool,
) -> Iterator[list[Array]]:
    """Yield the sums of a group of files, block after block.

    Compares every byte of the files with its digest on the way, and calls `check` between blocks.
    Unless `may_be_kept`, the next block reuses the memory. Raises Damaged.
    """
    import numpy as np

    from ostraka.layout import parity_code as _parity

    streams = [_Stream(shards, member) for member in members]
    longest = max(member.size for member in members)
    block = _format.BLOCK_BYTES
    sums = [np.empty(min(block, longest), np.uint8) for _ in range(count)]
    threads = max(2, shards.store.traits.reads_at_once)
    try:
        for start in range(0, longest, block):
            check()
            stop = min(start + block, longest)
            pieces = run_all(
                lambda stream, at=stop: stream.take(at), streams, threads=threads, stop=StopSignal()
            )
            if may_be_kept:
                sums = [np.empty(stop - start, np.uint8) for _ in range(count)]
            here = [memory[: stop - start] for memory in sums]
            _parity.encode([[piece] for piece in pieces], here)
            yield here
    finally:
        for stream in streams:
            stream.close()


class _Stream:
    """Reads a shard file from its first byte to its last, and compares each block."""

    def __init__(self, shards: Shards, file: FileEntry):
        import numpy as np

        self._shards = shards
        self._file = file
        self._column = Column(shards, file)
        self._comparison: Comparison | None = None
        self._at = 0
        self._memory = np.empty(min(_format.BLOCK_BYTES, file.size), np.uint8)

    def take(self, stop: int) -> Array:
        """The bytes up to `stop`, in memory that the next call reuses. Raises Damaged."""
        if self._comparison is None:
            self._comparison = Comparison(self._shards.stored_digests(self._file).blocks())
        piece = self._memory[: max(min(stop, self._file.size) - self._at, 0)]
        if len(piece):
            try:
                self._column.read_into(self._at, piece)
                self._comparison.add(self._at, piece)
            except BytesLost as error:
                raise damaged(self._shards.store, self._column.name, str(error)) from error
            self._at += len(piece)
        return piece

    def close(self) -> None:
        self._column.close()


def overlapping(blocks: Sequence[Block], start: int, stop: int) -> Sequence[Block]:
    """The blocks with bytes in a range of the file. Empty for an empty range."""
    if stop <= start:
        return ()
    first = bisect_right(blocks, start, key=attrgetter("file_start")) - 1
    return blocks[first : bisect_left(blocks, stop, key=attrgetter("file_start"))]


def first_unmatched(blocks: Sequence[Block], data: Array, start: int) -> Block | None:
    """The first of `blocks` whose bytes in `data`, which begins at `start`, have another digest."""
    parts = ((b, data[b.file_start - start : b.file_stop - start]) for b in blocks)
    return next((block for block, part in parts if not matches(block, [part])), None)
