"""Files that are lost as a whole, made again in one pass over the others of their group. No JAX.

A repair looks at every byte of the others anyway. Here each piece of them is compared and added up
while it lies in the cache of a core, and what comes out is compared and written at once: nothing is
read twice, and the disk writes while the next piece is read. As soon as anything is not as it was
written, the pass is given up, and files are mended block by block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from ostraka import _format, _parity
from ostraka._columns import Column, Lost, not_as_written
from ostraka._format import Block, FileEntry
from ostraka._parallel import StopSignal, run_all
from ostraka._parity_format import ParityFile
from ostraka._rebuild import Parities
from ostraka._shards import Shards
from ostraka.errors import Damaged
from ostraka.integrity._lost import open_or_say
from ostraka.integrity._mend import MendJob, leaves_of
from ostraka.integrity._origins import Shard
from ostraka.integrity._repair_parity import ORIGIN
from ostraka.integrity._repair_report import MendedFile
from ostraka.storage import FileWriter

Array = np.ndarray[Any, Any]

_PIECE_BYTES = 1 << 20
"""What is worked on at a time: it and its sums stay in the cache of a core."""
_WRITE_BYTES = 4 << 20
_LEAST_RANGE_BYTES = 8 << 20
_MOST_RANGE_BYTES = 256 << 20
"""What a thread does by itself. Blocks that reach into the next range are read by both."""


@dataclass(slots=True)
class Proved:
    """What came of the passes: files that were mended, and others that are as they were written."""

    mended: list[MendedFile] = field(default_factory=list[MendedFile])
    whole: set[str] = field(default_factory=set[str])
    """Names of shard files, the mended ones included."""
    sums: set[str] = field(default_factory=set[str])
    """Names of parity files whose parity is right; of their other blocks nothing is known."""


ShardOf = Callable[[FileEntry], Shard | None]
"""A shard file as it was written; None if its index does not tell."""


def mend_groups(job: MendJob, shards: Shards, shard_of: ShardOf) -> Proved:
    """Mend all files that are missing, where that leaves the group enough; the rest is for others.

    What can't be mended in this way is left as it was found.
    """
    proved, parities = Proved(), shards.parities
    parts = job.store.parts
    if parities is None or parts.is_remote or not parts.in_any_order:
        return proved
    for group in range(parities.group_count):
        job.check()
        work = _look_at(job, parities, group, shard_of)
        if work is not None:
            with suppress(Lost):
                _mend_group(job, work, proved)
    return proved


@dataclass(slots=True)
class _Read:
    """A file that is read."""

    name: str
    column: Column
    blocks: Sequence[Block]
    """Of what counts in it, by where they lie in that."""


@dataclass(slots=True)
class _Written:
    """A file that is made again."""

    shard: Shard
    found: str
    writer: FileWriter | None = None


@dataclass(slots=True)
class _Group:
    """A group of which something is lost, and enough is there."""

    members: dict[int, _Read]
    """By their places."""
    sums: dict[int, _Read]
    """By their numbers; as many as are lost."""
    lost: dict[int, _Written]
    """By their places."""
    longest: int


def _look_at(job: MendJob, parities: Parities, group: int, shard_of: ShardOf) -> _Group | None:
    members: dict[int, _Read] = {}
    lost: dict[int, _Written] = {}
    longest = 0
    for place, file in enumerate(parities.members_of(group)):
        shard = shard_of(file)
        if shard is None:
            return None
        longest = max(longest, file.size)
        found = _why_missing(job, shard)
        if found:
            lost[place] = _Written(shard, found)
        else:
            members[place] = _Read(shard.name, parities.member_column(file), shard.blocks)
    if not lost:
        return None
    sums: dict[int, _Read] = {}
    for file in parities.files_of(group):
        if len(sums) < len(lost):
            with suppress(Damaged):
                sums[file.number] = _read_sums(parities, file)
    return _Group(members, sums, lost, longest) if len(sums) == len(lost) else None


def _why_missing(job: MendJob, shard: Shard) -> str:
    """Why nothing of a file is there; empty if something is."""
    opened = open_or_say(job.store, shard.name)
    if isinstance(opened, str):
        return opened
    opened.close()
    return ""


def _read_sums(parities: Parities, file: ParityFile) -> _Read:
    column = parities.column(file)
    blocks = parities.digests_of(file).blocks()
    start = blocks[0].file_stop
    moved = [
        block._replace(file_start=block.file_start - start, file_stop=block.file_stop - start)
        for block in blocks[1 : 1 + parities.layout_of(file).blocks]
    ]
    return _Read(column.name, column, moved)


def _mend_group(job: MendJob, group: _Group, proved: Proved) -> None:
    """Make the lost files of a group again. Raises Lost if it can't be done in one pass."""
    try:
        for file in group.lost.values():
            if not job.dry_run:
                name, size = file.shard.name, file.shard.entry.size
                file.writer = job.store.create(name, size, replace=True)
        run_all(
            lambda part: _Pass(job, group, *part).run(),
            _ranges(group, job.store.parts.reads_at_once),
            threads=job.store.parts.reads_at_once,
            stop=StopSignal(),
        )
        for file in group.lost.values():
            job.check()
            if file.writer is not None:
                file.writer.finish()
                file.writer = None
                job.tally.add(written=file.shard.entry.size)
            proved.mended.append(_mended(job, file))
            proved.whole.add(file.shard.name)
    finally:
        for file in group.lost.values():
            if file.writer is not None:
                file.writer.abandon()
        for read in (*group.members.values(), *group.sums.values()):
            read.column.close()
    proved.whole.update(read.name for read in group.members.values())
    proved.sums.update(read.name for read in group.sums.values())


def _mended(job: MendJob, file: _Written) -> MendedFile:
    shard = file.shard
    leaves = leaves_of(job.metadata, shard, range(len(shard.blocks)))
    return MendedFile(shard.name, file.found, leaves, (ORIGIN,), shard.entry.size, job.process)


def _ranges(group: _Group, threads: int) -> Iterator[tuple[int, int]]:
    """What the threads do, one after the other: ranges that end where blocks do, if they can."""
    each = min(max(-(-group.longest // threads), _LEAST_RANGE_BYTES), _MOST_RANGE_BYTES)
    # Files of a group are mostly cut alike, so that few blocks of the others reach any further.
    ends = [block.file_stop for block in next(iter(group.lost.values())).shard.blocks]
    start = 0
    while start < group.longest:
        end = bisect_left(ends, start + each)
        stop = ends[end] if end < len(ends) else group.longest
        yield start, stop
        start = stop


class _Pass:
    """One range of a group: blocks that begin in it are compared, bytes in it are written."""

    def __init__(self, job: MendJob, group: _Group, start: int, stop: int):
        self._job = job
        self._group = group
        self._start, self._stop = start, stop
        self._members = {p: _Comparing(r.blocks, start, stop) for p, r in group.members.items()}
        self._sums = {n: _Comparing(r.blocks, start, stop) for n, r in group.sums.items()}
        self._lost = {p: _Comparing(w.shard.blocks, start, stop) for p, w in group.lost.items()}
        self._reach = max(stop, *(comparing.reach for comparing in self._lost.values()))
        self._q, self._scratch = (np.empty(_PIECE_BYTES, np.uint8) for _ in range(2))
        most = min(_WRITE_BYTES, self._reach - start)
        self._made = {place: np.empty(most, np.uint8) for place in group.lost}
        """What is written next of each."""

    def run(self) -> None:
        """Raises Lost if anything is not as it was written."""
        for start in range(self._start, self._reach, _WRITE_BYTES):
            stop = min(start + _WRITE_BYTES, self._reach)
            for at in range(start, stop, _PIECE_BYTES):
                self._job.check()
                here = slice(at - start, min(at + _PIECE_BYTES, stop) - start)
                self._solve(at, [made[here] for made in self._made.values()])
            for place, made in self._made.items():
                self._write(self._group.lost[place], start, made[: stop - start])
        group = self._group
        for place, read in group.members.items():
            self._read_on(read, self._members[place])
        for number, read in group.sums.items():
            self._read_on(read, self._sums[number])

    def _read_on(self, read: _Read, comparing: _Comparing) -> None:
        """Read and compare the rest of the last block that begins in this range."""
        for at in range(self._reach, comparing.reach, _PIECE_BYTES):
            self._job.check()
            stop = min(at + _PIECE_BYTES, comparing.reach)
            self._read(read, comparing, at, stop, self._scratch)

    def _solve(self, at: int, made: Sequence[Array]) -> None:
        """Fill `made` with a piece of each file that is lost, and compare it."""
        p, q = made[0], self._q[: len(made[0])]
        stop = at + len(p)
        sums, members = self._group.sums, self._group.members
        if list(sums) == [0]:
            self._read(sums[0], self._sums[0], at, stop, p)
            for place, read in members.items():
                part = self._read(read, self._members[place], at, stop, self._scratch)
                _parity.add(p, part)
        else:
            self._solve_two(at, p, q)
            found = _parity.resolve(p, q, list(self._group.lost))
            # The last first: it lies where the first belongs.
            for target, data in reversed(list(zip(made, found, strict=True))):
                target[:] = data
        for (place, file), data in zip(self._group.lost.items(), made, strict=True):
            self._lost[place].add(at, data[: max(file.shard.entry.size - at, 0)])

    def _solve_two(self, at: int, p: Array, q: Array) -> None:
        """Fill both with what the members that are there leave of the sums."""
        stop = at + len(p)
        sums, members = self._group.sums, self._group.members
        p[:], q[:] = 0, 0
        last = max(members, default=0)
        for place in range(last, -1, -1):  # Horner's rule: the last is doubled most often.
            if place < last:
                _parity.double(q, self._scratch[: len(q)])
            if place in members:
                part = self._read(members[place], self._members[place], at, stop, self._scratch)
                _parity.add(p, part)
                _parity.add(q, part)
        for number, read in sums.items():
            part = self._read(read, self._sums[number], at, stop, self._scratch)
            _parity.add((p, q)[number], part)

    def _read(self, read: _Read, comparing: _Comparing, at: int, stop: int, memory: Array) -> Array:
        part = read.column.read_part(at, stop, memory)
        self._job.tally.add(read=len(part))
        comparing.add(at, part)
        return part

    def _write(self, file: _Written, start: int, data: Array) -> None:
        mine = data[: max(min(self._stop, file.shard.entry.size) - start, 0)]
        if file.writer is not None and len(mine):
            file.writer.write(start, [mine])


class _Comparing:
    """The blocks of a file that begin in a range, compared while its bytes come by in order."""

    def __init__(self, blocks: Sequence[Block], start: int, stop: int):
        begin = attrgetter("file_start")
        first, last = (bisect_left(blocks, at, key=begin) for at in (start, stop))
        self._blocks = iter(blocks[first:last])
        self._block = next(self._blocks, None)
        self._state = _format.new_block_digest()
        self.reach = blocks[last - 1].file_stop if first < last else start
        """Where the last of them ends."""

    def add(self, at: int, piece: Array) -> None:
        """Take the bytes from `at` on. Raises Lost if a block that ends here is not right."""
        stop = at + len(piece)
        while (block := self._block) is not None and block.file_start < stop:
            self._state.update(piece[max(block.file_start - at, 0) : block.file_stop - at].data)
            if block.file_stop > stop:
                return
            if self._state.hexdigest() != block.digest:
                raise Lost(not_as_written(block))
            self._state = _format.new_block_digest()
            self._block = next(self._blocks, None)
