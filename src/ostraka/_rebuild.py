"""Shard files and parity files, found again from the other files of their groups. No JAX.

A range of a lost file is the sum of the same range of the others, so that as much is read as there
are members, and nothing more. What comes out is compared with the digests of the lost file. If it
is not right, some other file of the group is damaged, too: then all that is read is compared with
its own digests, and what is not as written counts as lost.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from ostraka import _format
from ostraka._format import Block, FileDigests, FileEntry
from ostraka._metadata import Metadata
from ostraka._parallel import StopSignal, run_all
from ostraka._parity_format import (
    Parity,
    ParityFile,
    ParityLayout,
    encode_parity_header,
    layouts_of,
)
from ostraka.errors import Damaged, Problem, StoreError
from ostraka.storage import FileReader, Store

if TYPE_CHECKING:
    from ostraka._parity import Array


_PIECE_BYTES = 512 << 10


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


class _Lost(Exception):
    """What is needed of a file is not there, or not as it was written."""


class _Column:
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
        """A range of it; less where it ends before. Raises _Lost."""
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
        blocks = _overlapping(self._blocks, start, stop)
        if not blocks:
            return self._read(start, stop)
        first = blocks[0].file_start
        data = self._read(first, blocks[-1].file_stop)
        for block in blocks:
            if not _is_right(block, data[block.file_start - first : block.file_stop - first]):
                raise _Lost(_not_as_written(block))
        return data[start - first : stop - first]

    def _list_blocks(self) -> list[Block]:
        try:
            return self._digests().blocks()
        except Damaged as error:
            raise _Lost(f"its digests are lost ({error.problems[0]})") from error

    def _read(self, start: int, stop: int) -> Array:
        import numpy as np

        if stop <= start:
            return np.empty(0, np.uint8)
        data = np.empty(stop - start, np.uint8)
        self.read_into(start, data)
        return data

    def read_into(self, start: int, data: Array) -> None:
        """Fill `data` from byte `start` of the file on. Raises _Lost."""
        try:
            count = self._open().read_into(start, [data])
        except FileNotFoundError as error:
            raise _Lost("it is missing") from error
        except StoreError as error:
            if error.loss is None:
                raise
            raise _Lost(error.loss) from error
        if count < len(data):
            raise _Lost(f"it ends at byte {start + count:,}")

    def _open(self) -> FileReader:
        with self._lock:
            if self._reader is None:
                reader = self._store.open(self.name)
                if reader.size != self._size:
                    reader.close()
                    found = f"it has {reader.size:,} bytes where {self._size:,} were written"
                    raise _Lost(found)
                self._reader = reader
            return self._reader

    def close(self) -> None:
        with self._lock:
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


class Rebuild:
    """One shard file, range by range, from the others of its group. Any thread may ask."""

    def __init__(self, described: Described, parities: Parities, file: FileEntry):
        group, place = parities.place_of(file)
        self._file = file
        self._path = described.path_of(file.name)
        self._location = described.store.location
        self._is_remote = described.store.parts.is_remote
        self._place = place
        self._members = {
            number: parities.member_column(member)
            for number, member in enumerate(parities.members_of(group))
        }
        self._sums = [parities.column(parity) for parity in parities.files_of(group)]
        self._blocks = _blocks_or_none(described, file)

    def read(self, start: int, stop: int) -> Array:
        """Bytes `[start, stop)` of the file as it was written.

        They are compared with the file's digests, if those are known, or else all that they are
        made of with its own. Raises Damaged, naming what else is lost.
        """
        if self._blocks is None:
            return self._solve(start, stop, _Column.read_checked)
        blocks = _overlapping(self._blocks, start, stop)
        if blocks:
            first, last = blocks[0].file_start, blocks[-1].file_stop
        else:
            first, last = start, start
        found = self._read_fast(first, last)
        if not _are_right(blocks, found, first):
            found = self._solve(first, last, _Column.read_checked)
            if not _are_right(blocks, found, first):
                raise self._damaged({}, "what parity makes of it is not as it was written")
        return found[start - first : stop - first]

    def _read_fast(self, start: int, stop: int) -> Array:
        """A range that is yet to be compared with digests."""
        import numpy as np

        found = np.empty(stop - start, np.uint8)
        # Pieces that stay in the cache between being read and being added, where a read more costs
        # next to nothing; and memory that is used again: fresh memory takes longer than all else.
        piece_bytes = max(stop - start, 1) if self._is_remote else _PIECE_BYTES
        scratch = np.empty(min(piece_bytes, stop - start), np.uint8)
        for at in range(start, stop, piece_bytes):
            piece = found[at - start : at - start + piece_bytes]
            try:
                self._add_up(at, piece, scratch)
            except _Lost:
                piece[:] = self._solve(at, at + len(piece), _Column.read)
        return found

    def _add_up(self, start: int, found: Array, scratch: Array) -> None:
        """Fill `found` from the first parity file and all other members. Raises _Lost."""
        import numpy as np

        stop = start + len(found)
        self._sums[0].read_part(start, stop, found)
        for place, column in self._members.items():
            if place != self._place:
                part = column.read_part(start, stop, scratch)
                np.bitwise_xor(found[: len(part)], part, out=found[: len(part)])

    def close(self) -> None:
        for column in (*self._members.values(), *self._sums):
            column.close()

    def _solve(self, start: int, stop: int, read: Callable[[_Column, int, int], Array]) -> Array:
        from ostraka import _parity

        members: dict[int, list[Array]] = {}
        sums: dict[int, Array] = {}
        lost = {self._place: ""}
        useless: dict[str, str] = {}
        for place, column in self._members.items():
            if place != self._place:
                try:
                    members[place] = [read(column, start, stop)]
                except _Lost as error:
                    lost[place] = useless[column.name] = str(error)
        for number, column in enumerate(self._sums):
            if len(sums) < len(lost):
                try:
                    sums[number] = read(column, start, stop)
                except _Lost as error:
                    useless[column.name] = str(error)
        if len(sums) < len(lost):
            raise self._damaged(useless, "parity can't bring it back, because more is lost")
        return _parity.solve(members, sums, list(lost))[0]

    def _damaged(self, others: Mapping[str, str], found: str) -> Damaged:
        problems = [Problem(self._path, found)]
        problems += [Problem(name, reason) for name, reason in others.items()]
        return Damaged(self._location, problems)


class Parities:
    """The parity files of a checkpoint that has them."""

    def __init__(self, described: Described, parity: Parity):
        self._described = described
        self._parity = parity
        metadata = described.metadata
        sizes = {process: index.size for process, index in metadata.indexes.items()}
        self._layouts = layouts_of(parity.groups, metadata.files, metadata.process_of, sizes)
        self._places = {
            metadata.files[row].name: (group, place)
            for group, members in enumerate(parity.groups)
            for place, row in enumerate(members)
        }
        self._digests: dict[str, FileDigests] = {}

    @property
    def files(self) -> tuple[ParityFile, ...]:
        return self._parity.files

    def files_of(self, group: int) -> tuple[ParityFile, ...]:
        return self._parity.files_of(group)

    def covers(self, file: FileEntry) -> bool:
        return file.name in self._places

    def place_of(self, file: FileEntry) -> tuple[int, int]:
        """A shard file's group, and which one of its members it is."""
        return self._places[file.name]

    def members_of(self, group: int) -> list[FileEntry]:
        return [self._described.metadata.files[row] for row in self._parity.groups[group]]

    def layout_of(self, file: ParityFile) -> ParityLayout:
        return replace(self._layouts[file.group], header_bytes=file.header_bytes)

    def digests_of(self, file: ParityFile) -> FileDigests:
        """The blocks of a parity file, with the digests that stand at its end. Raises Damaged."""
        found = self._digests.get(file.name)
        if found is None:
            found = self._digests[file.name] = self._read_digests(file)
        return found

    def _read_digests(self, file: ParityFile) -> FileDigests:
        layout, name = self.layout_of(file), self._described.path_of(file.name)
        start = file.size - layout.table_bytes
        column = self._whole(file)
        try:
            table = column.read(start, file.size)
            if _format.block_digest([table]) != file.digest:
                raise _Lost("the digests at its end are not as they were written")
        except _Lost as error:
            raise Damaged(self._described.store.location, [Problem(name, str(error))]) from error
        finally:
            column.close()
        return layout.digests(table.tobytes(), file.digest)

    def index_copy(self, process: int) -> bytes | None:
        """The index of a process as a parity file has it, compared with its digest; or None."""
        for file in self._parity.files:
            layout = self.layout_of(file)
            if all(process != number for number, _ in layout.indexes):
                continue
            column = self._whole(file)
            try:
                copy = column.read(*layout.index_range(process)).tobytes()
            except _Lost:
                continue
            finally:
                column.close()
            if _format.digest(copy) == self._described.metadata.indexes[process].digest:
                return copy
        return None

    def _whole(self, file: ParityFile) -> _Column:
        return _Column(
            self._described, file.name, file.size, 0, file.size, partial(self.digests_of, file)
        )

    def member_column(self, file: FileEntry) -> _Column:
        digests = partial(self._described.stored_digests, file)
        return _Column(self._described, file.name, file.size, 0, file.size, digests)

    def column(self, file: ParityFile) -> _Column:
        layout = self.layout_of(file)
        start = layout.header_bytes
        stop = start + layout.parity_bytes
        digests = partial(self.digests_of, file)
        return _Column(self._described, file.name, file.size, start, stop, digests)

    def rebuild_parity(self, file: ParityFile) -> Iterator[Any]:
        """The bytes of a parity file as it was written, from its first to its last, in pieces.

        All shard files of its group must be whole, and the indexes that it has copies of. Raises
        Damaged, at the last piece if what came out is not what was written.
        """
        metadata, described = self._described.metadata, self._described
        layout, members = self.layout_of(file), self.members_of(file.group)
        header = encode_parity_header(
            (file.group, file.number), members, layout, metadata.id, version=metadata.version
        )
        digests = [_format.block_digest([header])]
        yield header
        check = StopSignal().check
        for sums in sum_up(described, members, file.number + 1, check, may_be_kept=True):
            digests.append(_format.block_digest([sums[file.number]]))
            yield sums[file.number]
        for process, _ in layout.indexes:
            copy = described.store.get(described.path_of(_format.index_name(process)))
            digests.append(_format.block_digest([copy]))
            yield copy
        table = "".join(digests).encode()
        if _format.block_digest([table]) != file.digest:
            found = "what its group makes of it is not as it was written"
            problem = Problem(described.path_of(file.name), found)
            raise Damaged(described.store.location, [problem])
        yield table


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
        self._column = _Column(described, file.name, file.size, 0, file.size, self._digests)
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
            except _Lost as error:
                problem = Problem(self._column.name, str(error))
                raise Damaged(self._location, [problem]) from error
        return piece

    def _compare(self, piece: Array) -> None:
        assert self._blocks is not None
        while len(piece):
            block = self._block
            assert block is not None
            part = piece[: block.file_stop - self._at]
            self._state.update(part)
            self._at += len(part)
            piece = piece[len(part) :]
            if self._at == block.file_stop:
                if self._state.hexdigest() != block.digest:
                    raise _Lost(_not_as_written(block))
                self._state = _format.new_block_digest()
                self._block = next(self._blocks, None)

    def close(self) -> None:
        self._column.close()


def _blocks_or_none(described: Described, file: FileEntry) -> list[Block] | None:
    try:
        return described.stored_digests(file).blocks()
    except Damaged:
        return None  # It was lost, with all copies of it.


def _overlapping(blocks: Sequence[Block], start: int, stop: int) -> Sequence[Block]:
    """The blocks with bytes in a range of the file; none for an empty range."""
    if stop <= start:
        return ()
    first = bisect_right(blocks, start, key=attrgetter("file_start")) - 1
    return blocks[first : bisect_left(blocks, stop, key=attrgetter("file_start"))]


def _are_right(blocks: Sequence[Block], data: Array, start: int) -> bool:
    return all(_is_right(b, data[b.file_start - start : b.file_stop - start]) for b in blocks)


def _is_right(block: Block, data: Array) -> bool:
    return _format.block_digest([data]) == block.digest


def _not_as_written(block: Block) -> str:
    if block.file_start == 0:
        return "its header is not as it was written"
    return f"bytes {block.file_start:,} to {block.file_stop:,} are not as they were written"
