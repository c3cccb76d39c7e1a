"""The files of a group of parity, read by ranges or in order, and summed up. No JAX."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from ostraka import _format
from ostraka._format import Block, FileDigests, FileEntry
from ostraka._metadata import Metadata
from ostraka._parallel import StopSignal, run_all
from ostraka.errors import Damaged, Problem, StoreError
from ostraka.storage import FileReader, Store

if TYPE_CHECKING:
    from ostraka._parity import Array


class Described(Protocol):
    """The files of a checkpoint, and what is known of them."""

    store: Store
    metadata: Metadata

    def path_of(self, name: str) -> str:
        """Where a file of this name lies in the store."""
        ...

    def stored_digests(self, file: FileEntry) -> FileDigests:
        """How a shard file is cut into blocks, and their digests. Raises Damaged."""
        ...


class Lost(Exception):
    """What is needed of a file is not there, or not as it was written."""


class Column:
    """A file of a group, open: a member, or a parity file, of which only its parity counts."""

    def __init__(
        self,
        described: Described,
        name: str,
        size: int,
        start: int,
        stop: int,
        digests: Callable[[], FileDigests],
    ):
        self.name = described.path_of(name)
        self._store = described.store
        self._size = size
        self._start, self._stop = start, stop
        """Where in the file what counts begins and ends."""
        self._digests = digests
        self._blocks: list[Block] = []
        self._reader: FileReader | None = None
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> Array:
        """A range of it; less where it ends before. Raises Lost."""
        return self._read(self._start + start, min(self._start + stop, self._stop))

    def read_part(self, start: int, stop: int, memory: Array) -> Array:
        """As `read`, into the memory that is given."""
        part = memory[: max(min(stop, self._stop - self._start) - start, 0)]
        if len(part):
            self.read_into(self._start + start, part)
        return part

    def read_checked(self, start: int, stop: int) -> Array:
        """As `read`; whole blocks are read, and compared with their digests."""
        start, stop = self._start + start, min(self._start + stop, self._stop)
        self._blocks = self._blocks or self._list_blocks()
        blocks = overlapping(self._blocks, start, stop)
        if not blocks:
            return self._read(start, stop)
        first = blocks[0].file_start
        data = self._read(first, blocks[-1].file_stop)
        for block in blocks:
            if not is_right(block, data[block.file_start - first : block.file_stop - first]):
                raise Lost(not_as_written(block))
        return data[start - first : stop - first]

    def _list_blocks(self) -> list[Block]:
        try:
            return self._digests().blocks()
        except Damaged as error:
            raise Lost(f"its digests are lost ({error.problems[0]})") from error

    def _read(self, start: int, stop: int) -> Array:
        import numpy as np

        if stop <= start:
            return np.empty(0, np.uint8)
        data = np.empty(stop - start, np.uint8)
        self.read_into(start, data)
        return data

    def read_into(self, start: int, data: Array) -> None:
        """Fill `data` from byte `start` of the file on. Raises Lost."""
        try:
            count = self._open().read_into(start, [data])
        except FileNotFoundError as error:
            raise Lost("it is missing") from error
        except StoreError as error:
            if error.loss is None:
                raise
            raise Lost(error.loss) from error
        if count < len(data):
            raise Lost(f"it ends at byte {start + count:,}")

    def _open(self) -> FileReader:
        with self._lock:
            if self._reader is None:
                reader = self._store.open(self.name)
                if reader.size != self._size:
                    reader.close()
                    found = f"it has {reader.size:,} bytes where {self._size:,} were written"
                    raise Lost(found)
                self._reader = reader
            return self._reader

    def close(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def sum_up(
    described: Described,
    members: Sequence[FileEntry],
    count: int,
    check: Callable[[], None],
    *,
    may_be_kept: bool,
) -> Iterator[list[Array]]:
    """The sums of a group of files, block after block.

    Every byte of the files is compared with its digest on the way; `check` is called between
    blocks. Unless `may_be_kept`, the memory of a block is used again for the next. Raises Damaged.
    """
    import numpy as np

    from ostraka import _parity

    streams = [_Stream(described, member) for member in members]
    longest = max(member.size for member in members)
    block = _format.BLOCK_BYTES
    sums = [np.empty(min(block, longest), np.uint8) for _ in range(count)]
    threads = max(2, described.store.parts.reads_at_once)
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
    """A shard file that is read from its first byte to its last, each block compared."""

    def __init__(self, described: Described, file: FileEntry):
        import numpy as np

        self._location = described.store.location
        self._digests = partial(described.stored_digests, file)
        self._column = Column(described, file.name, file.size, 0, file.size, self._digests)
        self._size = file.size
        self._blocks: Iterator[Block] | None = None
        self._block: Block | None = None
        self._state = _format.new_block_digest()
        self._at = 0
        self._memory = np.empty(min(_format.BLOCK_BYTES, file.size), np.uint8)

    def take(self, stop: int) -> Array:
        """All up to byte `stop`, in memory that is used again. Raises Damaged."""
        if self._blocks is None:
            self._blocks = iter(self._digests().blocks())
            self._block = next(self._blocks)
        piece = self._memory[: max(min(stop, self._size) - self._at, 0)]
        if len(piece):
            try:
                self._column.read_into(self._at, piece)
                self._compare(piece)
            except Lost as error:
                problem = Problem(self._column.name, str(error))
                raise Damaged(self._location, [problem]) from error
        return piece

    def _compare(self, piece: Array) -> None:
        assert self._blocks is not None
        while len(piece):
            block = self._block
            assert block is not None
            part = piece[: block.file_stop - self._at]
            self._state.update(part.data)
            self._at += len(part)
            piece = piece[len(part) :]
            if self._at == block.file_stop:
                if self._state.hexdigest() != block.digest:
                    raise Lost(not_as_written(block))
                self._state = _format.new_block_digest()
                self._block = next(self._blocks, None)

    def close(self) -> None:
        self._column.close()


def overlapping(blocks: Sequence[Block], start: int, stop: int) -> Sequence[Block]:
    """The blocks with bytes in a range of the file; none for an empty range."""
    if stop <= start:
        return ()
    first = bisect_right(blocks, start, key=attrgetter("file_start")) - 1
    return blocks[first : bisect_left(blocks, stop, key=attrgetter("file_start"))]


def are_right(blocks: Sequence[Block], data: Array, start: int) -> bool:
    return all(is_right(b, data[b.file_start - start : b.file_stop - start]) for b in blocks)


def is_right(block: Block, data: Array) -> bool:
    return _format.block_digest([data]) == block.digest


def not_as_written(block: Block) -> str:
    if block.file_start == 0:
        return "its header is not as it was written"
    return f"bytes {block.file_start:,} to {block.file_stop:,} are not as they were written"
