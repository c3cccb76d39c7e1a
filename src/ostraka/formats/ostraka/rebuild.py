"""Rebuild shard files and parity files from the other files of their groups. No JAX.

A range of a lost file is the sum of the same range of the other files, so only that range is read.
The result is compared with the digests of the lost file. If it differs, another file of the group
is damaged too. Then every file is compared with its own digests, and corrupt bytes count as lost.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ostraka.common.threads import RenewedLock, StopSignal, run_all
from ostraka.errors import Damaged, DegradedRead, Problem, headed_list, warn_caller
from ostraka.formats.ostraka.damage import (
    MISSING,
    BytesLost,
    Comparison,
    damage_on_loss,
    damaged,
    ends_at,
    index_problem,
    matches,
    not_as_written,
    other_size,
)
from ostraka.layout import shard_file as _format
from ostraka.layout.parity_file import (
    Parity,
    ParityFile,
    ParityLayout,
    encode_parity_header,
    layouts_of,
)
from ostraka.layout.shard_file import Block, FileDigests, FileEntry
from ostraka.storage import FileReader

if TYPE_CHECKING:
    from ostraka.formats.ostraka.shards import Shards
    from ostraka.layout.parity_code import Array

_PIECE_BYTES = 512 << 10


class Rebuild:
    """Rebuilds ranges of one shard file from the others of its group. Any thread may ask."""

    def __init__(self, parities: Parities, file: FileEntry | ParityFile):
        shards = parities.shards
        group, place = parities.places[file.name]
        self._parities = parities
        self._path = shards.name_of(file)
        self._place = place
        members = enumerate(parities.members_of(group))
        self._members = {n: Column(shards, member) for n, member in members if n != place}
        self._sums = [parities.column(parity) for parity in parities.parity.files_of(group)]
        self._blocks: list[Block] | None = None
        """None if its index was lost, with all copies of it."""
        with suppress(Damaged):
            self._blocks = shards.stored_digests(file).blocks()

    def substitute(self, start: int, stop: int, lost: Damaged) -> Array:
        """Bytes `[start, stop)`, which are `lost`, with a warning.

        Raises Damaged, naming all lost files.
        """
        try:
            found = self.read(start, stop)
        except Damaged as more:
            raise Damaged(lost.path, [*lost.problems, *more.problems]) from more
        self._parities.warn_of(lost)
        return found

    def read(self, start: int, stop: int) -> Array:
        """Bytes `[start, stop)` of the file as it was written.

        They are compared with the file's digests. If its index is lost, with every copy, the bytes
        that they are made from are compared instead. Raises Damaged, naming all lost files.
        """
        if self._blocks is None:
            return self._solve(start, stop, Column.read_checked)
        blocks = overlapping(self._blocks, start, stop)
        first, last = (blocks[0].file_start, blocks[-1].file_stop) if blocks else (start, start)
        found = self._read_fast(first, last)
        if first_unmatched(blocks, found, first) is not None:
            found = self._solve(first, last, Column.read_checked)
            if first_unmatched(blocks, found, first) is not None:
                raise self._damaged({}, "what parity makes of it is not as it was written")
        return found[start - first : stop - first]

    def _read_fast(self, start: int, stop: int) -> Array:
        """A rebuilt range, not yet compared with digests: a sum, if only this file is lost."""
        import numpy as np

        found = np.empty(stop - start, np.uint8)
        # Pieces that stay in the cache between being read and being added, where a read more costs
        # next to nothing; and memory that is used again: fresh memory takes longer than all else.
        is_remote = self._parities.shards.store.traits.is_remote
        piece_bytes = max(stop - start, 1) if is_remote else _PIECE_BYTES
        scratch = np.empty(min(piece_bytes, stop - start), np.uint8)
        for at in range(start, stop, piece_bytes):
            piece = found[at - start : at - start + piece_bytes]
            end = at + len(piece)
            try:
                self._sums[0].read_part(at, end, piece)
                for column in self._members.values():
                    part = column.read_part(at, end, scratch)
                    np.bitwise_xor(piece[: len(part)], part, out=piece[: len(part)])
            except BytesLost:
                piece[:] = self._solve(at, end, Column.read)
        return found

    def close(self) -> None:
        for column in (*self._members.values(), *self._sums):
            column.close()

    def _solve(self, start: int, stop: int, read: Callable[[Column, int, int], Array]) -> Array:
        from ostraka.layout import parity_code as _parity

        members: dict[int, list[Array]] = {}
        sums: dict[int, Array] = {}
        lost = {self._place: ""}
        useless: dict[str, str] = {}
        for place, column in self._members.items():
            try:
                members[place] = [read(column, start, stop)]
            except BytesLost as error:
                lost[place] = useless[column.name] = str(error)
        for number, column in enumerate(self._sums):
            if len(sums) < len(lost):
                try:
                    sums[number] = read(column, start, stop)
                except BytesLost as error:
                    useless[column.name] = str(error)
        if len(sums) < len(lost):
            raise self._damaged(useless, "parity can't bring it back, because more is lost")
        return _parity.solve(members, sums, list(lost))[0]

    def _damaged(self, others: Mapping[str, str], found: str) -> Damaged:
        problems = [Problem(*problem) for problem in {self._path: found, **others}.items()]
        return Damaged(self._parities.shards.store.location, problems)


class Parities:
    """The parity files of a checkpoint that has them."""

    def __init__(self, shards: Shards, parity: Parity):
        self.shards = shards
        self.parity = parity
        metadata = shards.metadata
        sizes = {process: index.size for process, index in metadata.indexes.items()}
        self._layouts = layouts_of(parity.groups, metadata.files, metadata.process_of, sizes)
        self.places = {
            metadata.files[row].name: (group, place)
            for group, members in enumerate(parity.groups)
            for place, row in enumerate(members)
        }
        """The group of each shard file, by name, and its number among the members."""
        self._digests: dict[str, FileDigests] = {}
        self._warning = RenewedLock()
        self.has_warned = False
        """True after the one warning that this checkpoint is read with the help of its parity."""

    def members_of(self, group: int) -> list[FileEntry]:
        return [self.shards.metadata.files[row] for row in self.parity.groups[group]]

    def layout_of(self, file: ParityFile) -> ParityLayout:
        return replace(self._layouts[file.group], header_bytes=file.header_bytes)

    def digests_of(self, file: ParityFile) -> FileDigests:
        """The blocks of a parity file, with the digests at its end. Raises Damaged."""
        found = self._digests.get(file.name)
        if found is None:
            layout = self.layout_of(file)
            try:
                with closing(Column(self.shards, file)) as column:
                    table = column.read(file.size - layout.table_bytes, file.size)
                if _format.block_digest([table]) != file.digest:
                    raise BytesLost("the digests at its end are not as they were written")
            except BytesLost as error:
                raise damaged(self.shards.store, self.shards.name_of(file), str(error)) from error
            found = self._digests[file.name] = layout.digests(table.tobytes(), file.digest)
        return found

    def index_copy(self, process: int) -> bytes | None:
        """The verified copy of a process index in a parity file, or None."""
        for file in self.parity.files:
            layout = self.layout_of(file)
            if all(process != number for number, _ in layout.indexes):
                continue
            with suppress(BytesLost), closing(Column(self.shards, file)) as column:
                copy = column.read(*layout.index_range(process)).tobytes()
                if index_problem(copy, self.shards.metadata.indexes[process]) is None:
                    return copy
        return None

    def warn_of(self, found: Damaged) -> None:
        """Warn once that this checkpoint is read with the help of its parity, and why."""
        store, metadata = self.shards.store, self.shards.metadata
        with self._warning.lock:
            if self.has_warned or not self._is_there():
                return
            self.has_warned = True
        problems = dict.fromkeys(found.problems)
        there = {file.name: file.size for file in store.files(self.shards.path_of(""))}
        named = {problem.file for problem in problems}
        for file in metadata.files:
            name = self.shards.path_of(file.name)
            size = there.get(name)
            if name not in named and size != file.size:
                what = MISSING if size is None else other_size(size, file.size)
                problems[Problem(name, what)] = None
        head = f"checkpoint {store.location} is read with the help of its parity"
        head += f" (repair it with `ostraka repair {store.location}`)"
        warn_caller(DegradedRead(headed_list(head, list(map(str, problems)))))

    def _is_there(self) -> bool:
        """True if no other save has replaced this checkpoint and deleted its files."""
        try:
            head = self.shards.store.get(_format.METADATA_NAME)[:200]
        except OSError:
            return False
        return self.shards.metadata.id.encode() in head

    def column(self, file: ParityFile) -> Column:
        layout = self.layout_of(file)
        stop = layout.header_bytes + layout.parity_bytes
        return Column(self.shards, file, layout.header_bytes, stop)

    def rebuild_parity(self, file: ParityFile) -> Iterator[Any]:
        """The bytes of a parity file as it was written, from its first to its last, in pieces.

        All shard files of its group must be undamaged, and the indexes that it copies. Raises
        Damaged, before the last piece if the result differs from the written file.
        """
        shards, metadata = self.shards, self.shards.metadata
        layout, members = self.layout_of(file), self.members_of(file.group)
        header = encode_parity_header(
            (file.group, file.number), members, layout, metadata.id, version=metadata.version
        )
        digests = [_format.block_digest([header])]
        yield header
        for sums in sum_up(shards, members, file.number + 1, may_be_kept=True):
            digests.append(_format.block_digest([sums[file.number]]))
            yield sums[file.number]
        for process, _ in layout.indexes:
            copy = shards.store.get(shards.name_of_index(process))
            digests.append(_format.block_digest([copy]))
            yield copy
        table = "".join(digests).encode()
        if _format.block_digest([table]) != file.digest:
            found = "what its group makes of it is not as it was written"
            raise damaged(shards.store, shards.name_of(file), found)
        yield table


# The files of a group


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
        import numpy as np

        return self.read_part(start, stop, np.empty(max(stop - start, 0), np.uint8))

    def read_part(self, start: int, stop: int, memory: Array) -> Array:
        """Like `read`, but into `memory`."""
        part = memory[: max(min(stop, self._stop - self._start) - start, 0)]
        if len(part):
            self.read_into(self._start + start, part)
        return part

    def read_checked(self, start: int, stop: int) -> Array:
        """Like `read`, but compare all blocks in the range with their digests."""
        import numpy as np

        start, stop = self._start + start, min(self._start + stop, self._stop)
        try:
            self._blocks = self._blocks or self._shards.stored_digests(self._file).blocks()
        except Damaged as error:
            raise BytesLost(f"its digests are lost ({error.problems[0]})") from error
        blocks = overlapping(self._blocks, start, stop)
        if not blocks:
            return np.empty(0, np.uint8)
        first = blocks[0].file_start
        data = np.empty(blocks[-1].file_stop - first, np.uint8)
        self.read_into(first, data)
        unmatched = first_unmatched(blocks, data, first)
        if unmatched is not None:
            raise BytesLost(not_as_written(unmatched))
        return data[start - first : stop - first]

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
    check: Callable[[], None] = lambda: None,
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
            take = partial(_Stream.take, start=start, stop=stop)
            pieces = run_all(take, streams, threads=threads, stop=StopSignal())
            if may_be_kept:
                sums = [np.empty(stop - start, np.uint8) for _ in range(count)]
            here = [memory[: stop - start] for memory in sums]
            _parity.encode([[piece] for piece in pieces], here)
            yield here
    finally:
        for stream in streams:
            stream.column.close()


class _Stream:
    """Reads a shard file from its first byte to its last, and compares each block."""

    def __init__(self, shards: Shards, file: FileEntry):
        import numpy as np

        self._shards = shards
        self._file = file
        self._comparison: Comparison | None = None
        self._memory = np.empty(min(_format.BLOCK_BYTES, file.size), np.uint8)
        self.column = Column(shards, file)

    def take(self, start: int, stop: int) -> Array:
        """The next bytes, in memory that the next call reuses. Raises Damaged."""
        if self._comparison is None:
            self._comparison = Comparison(self._shards.stored_digests(self._file).blocks())
        try:
            piece = self.column.read_part(start, stop, self._memory)
            self._comparison.add(start, piece)
        except BytesLost as error:
            raise damaged(self._shards.store, self.column.name, str(error)) from error
        return piece


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
