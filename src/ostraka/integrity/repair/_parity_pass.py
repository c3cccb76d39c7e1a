"""Make missing files again in one pass over the others of their parity group. No JAX.

A repair reads every byte of the others anyway. A pass compares and adds up each piece while it is
in the cache of a core, and compares and writes the result at once. So it reads every byte once, and
the disk writes while the next piece is read. The pass ends as soon as a byte is damaged. Then files
are repaired block by block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Damaged
from ostraka.formats.ostraka.damage import BytesLost, Comparison
from ostraka.formats.ostraka.rebuild import Column, Parities
from ostraka.integrity._report import RepairedFile
from ostraka.integrity.repair._files import (
    PARITY,
    RepairJob,
    SavedFiles,
    SavedShard,
    open_or_say,
)
from ostraka.layout import parity_code
from ostraka.layout.parity_file import ParityFile
from ostraka.layout.shard_file import Block
from ostraka.storage import FileWriter

Array = np.ndarray[Any, Any]

_PIECE_BYTES = 1 << 20
"""Bytes of a piece, which fits into the cache of a core with its sums."""
_WRITE_BYTES = 4 << 20
_LEAST_RANGE_BYTES = 8 << 20
_MOST_RANGE_BYTES = 256 << 20
"""Bytes of the range of one thread. Two threads read a block that crosses their border."""


@dataclass(slots=True)
class PassResult:
    """The outcome of all passes."""

    repaired: list[RepairedFile] = field(default_factory=list[RepairedFile])
    whole: set[str] = field(default_factory=set[str])
    """Names of complete shard files, the repaired ones included."""
    sums: set[str] = field(default_factory=set[str])
    """Names of parity files whose parity is right. Their other blocks were not read."""


def repair_groups(job: RepairJob, saved: SavedFiles, unknown: Collection[int]) -> PassResult:
    """Repair all missing files of groups that have enough parity. Others are left unchanged.

    The indexes of `unknown` processes are lost.
    """
    result, parities = PassResult(), saved.shards.parities
    traits = job.store.traits
    if parities is None or traits.is_remote or not traits.in_any_order:
        return result
    for number in range(len(parities.parity.groups)):
        job.operation.check()
        writers = {saved.metadata.process_of[f.device] for f in parities.members_of(number)}
        with suppress(BytesLost, Damaged):  # The next stages report it.
            if writers.isdisjoint(unknown) and (group := _look_at(job, saved, parities, number)):
                _repair_group(job, group, result)
    return result


@dataclass(slots=True)
class _GroupFile:
    """A file of a group that is read."""

    name: str
    column: Column
    blocks: Sequence[Block]
    """The blocks that count, by their offsets in the column."""


@dataclass(slots=True)
class _LostMember:
    """A shard file that is made again."""

    shard: SavedShard
    found: str
    writer: FileWriter | None = None


@dataclass(slots=True)
class _Group:
    """A group with lost files, and enough parity to make them again."""

    members: dict[int, _GroupFile]
    """By their places in the group."""
    sums: dict[int, _GroupFile]
    """Parity files by their numbers, as many as files are lost."""
    lost: dict[int, _LostMember]
    """By their places in the group."""
    longest: int


def _look_at(job: RepairJob, saved: SavedFiles, parities: Parities, number: int) -> _Group | None:
    """Open a group for a pass. Returns None if nothing is lost, or more than parity covers."""
    members: dict[int, _GroupFile] = {}
    lost: dict[int, _LostMember] = {}
    files = parities.members_of(number)
    for place, file in enumerate(files):
        shard = saved.shard(file.device, file.part)
        opened = open_or_say(job.store, shard.name)
        if isinstance(opened, str):
            lost[place] = _LostMember(shard, opened)
        else:
            opened.close()
            members[place] = _GroupFile(shard.name, Column(parities.shards, file), shard.blocks)
    if not lost:
        return None
    sums: dict[int, _GroupFile] = {}
    for file in parities.parity.files_of(number):
        if len(sums) < len(lost):
            with suppress(Damaged):
                sums[file.number] = _read_sums(parities, file)
    longest = max(file.size for file in files)
    return _Group(members, sums, lost, longest) if len(sums) == len(lost) else None


def _read_sums(parities: Parities, file: ParityFile) -> _GroupFile:
    column = parities.column(file)
    blocks = parities.digests_of(file).blocks()
    start = blocks[0].file_stop
    moved = [
        block._replace(file_start=block.file_start - start, file_stop=block.file_stop - start)
        for block in blocks[1 : 1 + parities.layout_of(file).blocks]
    ]
    return _GroupFile(column.name, column, moved)


def _repair_group(job: RepairJob, group: _Group, result: PassResult) -> None:
    """Make the lost files of a group again. Raises BytesLost if one pass is not enough."""
    with ExitStack() as stack:
        for file in (*group.members.values(), *group.sums.values()):
            stack.callback(file.column.close)
        for file in group.lost.values():
            writing = job.replacing(file.shard.name, file.shard.entry.size)
            file.writer = stack.enter_context(writing)
        threads = job.store.traits.reads_at_once
        run_all(
            lambda part: _Pass(job, group, *part).run(),
            _ranges(group, threads),
            threads=threads,
            stop=StopSignal(),
        )
    for file in group.lost.values():
        shard, size = file.shard, file.shard.entry.size
        leaves = shard.leaves(range(len(shard.blocks)))
        repaired = RepairedFile(shard.name, file.found, leaves, (PARITY,), size, job.process)
        result.repaired.append(repaired)
        result.whole.add(shard.name)
    result.whole.update(file.name for file in group.members.values())
    result.sums.update(file.name for file in group.sums.values())


def _ranges(group: _Group, threads: int) -> Iterator[tuple[int, int]]:
    """The ranges of the threads. They end at the ends of blocks, if possible."""
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
    """One range of a group. It compares the blocks that begin in it, and writes its bytes."""

    def __init__(self, job: RepairJob, group: _Group, start: int, stop: int):
        self._job = job
        self._group = group
        self._start, self._stop = start, stop
        self._members = {p: _Reading(job, r, start, stop) for p, r in group.members.items()}
        self._sums = {n: _Reading(job, r, start, stop) for n, r in group.sums.items()}
        self._lost = {p: _Comparing(w.shard.blocks, start, stop) for p, w in group.lost.items()}
        self._reach = max(stop, *(comparing.reach for comparing in self._lost.values()))
        self._q, self._scratch = (np.empty(_PIECE_BYTES, np.uint8) for _ in range(2))
        most = min(_WRITE_BYTES, self._reach - start)
        self._made = {place: np.empty(most, np.uint8) for place in group.lost}
        """Memory for the bytes to write next, by place."""

    def run(self) -> None:
        """Read, compare and write the range. Raises BytesLost for any damage."""
        for start in range(self._start, self._reach, _WRITE_BYTES):
            stop = min(start + _WRITE_BYTES, self._reach)
            for at in range(start, stop, _PIECE_BYTES):
                self._job.operation.check()
                here = slice(at - start, min(at + _PIECE_BYTES, stop) - start)
                self._solve(at, [made[here] for made in self._made.values()])
            for place, made in self._made.items():
                file = self._group.lost[place]
                mine = made[: max(min(stop, self._stop, file.shard.entry.size) - start, 0)]
                if file.writer is not None and len(mine):
                    file.writer.write(start, [mine])
        for reading in (*self._members.values(), *self._sums.values()):
            # The rest of the last block that begins in this range.
            for at in range(self._reach, reading.reach, _PIECE_BYTES):
                self._job.operation.check()
                reading.read(at, min(at + _PIECE_BYTES, reading.reach), self._scratch)

    def _solve(self, at: int, made: Sequence[Array]) -> None:
        """Fill `made` with a piece of each lost file, and compare it."""
        p, q = made[0], self._q[: len(made[0])]
        stop = at + len(p)
        if list(self._sums) == [0]:
            self._sums[0].read(at, stop, p)
            for reading in self._members.values():
                parity_code.add(p, reading.read(at, stop, self._scratch))
        else:
            self._solve_two(at, p, q)
            found = parity_code.resolve(p, q, list(self._group.lost))
            # The last first: it lies where the first belongs.
            for target, data in reversed(list(zip(made, found, strict=True))):
                target[:] = data
        for (place, file), data in zip(self._group.lost.items(), made, strict=True):
            self._lost[place].add(at, data[: max(file.shard.entry.size - at, 0)])

    def _solve_two(self, at: int, p: Array, q: Array) -> None:
        """Fill both with the sums minus the members that exist."""
        stop = at + len(p)
        p[:], q[:] = 0, 0
        last = max(self._members, default=0)
        for place in range(last, -1, -1):  # Horner's rule: the last is doubled most often.
            if place < last:
                parity_code.double(q, self._scratch[: len(q)])
            if place in self._members:
                part = self._members[place].read(at, stop, self._scratch)
                parity_code.add(p, part)
                parity_code.add(q, part)
        for number, reading in self._sums.items():
            parity_code.add((p, q)[number], reading.read(at, stop, self._scratch))


class _Comparing(Comparison):
    """Compares the blocks of a file that begin in a range."""

    def __init__(self, blocks: Sequence[Block], start: int, stop: int):
        begin = attrgetter("file_start")
        first, last = (bisect_left(blocks, at, key=begin) for at in (start, stop))
        super().__init__(blocks[first:last])
        self.reach = blocks[last - 1].file_stop if first < last else start
        """Where the last of them ends."""


class _Reading(_Comparing):
    """Reads a file of a group, and compares its blocks that begin in a range."""

    def __init__(self, job: RepairJob, file: _GroupFile, start: int, stop: int):
        super().__init__(file.blocks, start, stop)
        self._column = file.column
        self._count = job.bytes_read

    def read(self, at: int, stop: int, memory: Array) -> Array:
        part = self._column.read_part(at, stop, memory)
        self._count.add(len(part))
        self.add(at, part)
        return part
