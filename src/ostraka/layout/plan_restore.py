"""Shared reads: which process reads which part of what several need. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from ostraka.common.dtypes import DTYPES, numpy_dtype
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.shard_file import BLOCK_BYTES, GATHER_BYTES, Entry, block_bytes
from ostraka.layout.spec import LeafSpec, MeshSpec, Partition, holders

STAGE_BYTES = 128 << 20
"""Bytes that a process gets in one stage, and holds until copied. Large enough that agreeing
on it is cheap, small enough that the next stage is read meanwhile."""
WORTH_BYTES = BLOCK_BYTES
"""Less is read by each process for itself: a block can't be split without reading it twice."""


@dataclass(frozen=True, slots=True)
class Need:
    """The boxes of a leaf that this process needs, and who else needs them."""

    leaf: int
    boxes: tuple[Box, ...]
    members: tuple[tuple[int, ...], ...] = ()
    """For each box that is to be shared, or for none, the processes that need it."""
    shared_bytes: int = 0
    """The most that a process needs of it together with others. The same on all processes."""
    most_members: int = 1
    """How many processes share a box of it, at most. The same on all processes."""
    is_whole: bool = False
    """True if all members gather the whole leaf. `members` then has one entry."""


WHOLE = -1
"""Stands for all boxes of a need, where all of the leaf is shared."""


class Unit(NamedTuple):
    """A part of a leaf that one process reads for all members."""

    need: int
    box: int
    """Which box of the need it belongs to, or `WHOLE`."""
    part: Box
    nbytes: int
    """In memory."""
    file: Any
    is_small: bool
    """True if it shares a block with its neighbours in the file."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Units that all members get, in one collective."""

    members: tuple[int, ...]
    parts: tuple[tuple[Unit, ...], ...]
    """For each member, what it reads."""

    def part_of(self, process: int) -> tuple[Unit, ...]:
        return self.parts[self.members.index(process)]


class StoredCells(NamedTuple):
    """How a leaf is cut, and for each part the file that it lies in."""

    spec: LeafSpec
    grid: tuple[int, ...]
    files: Sequence[Any]


def processes_by_cell(
    mesh: MeshSpec, partition: Partition, rank: int, process_of: Sequence[int]
) -> list[tuple[int, ...]]:
    """For each cell of the grid (row-major), the processes that need it."""
    import numpy as np

    table = np.asarray(process_of)[holders(mesh, partition, rank)]
    return [tuple(sorted(set(row))) for row in table.tolist()]


def times_read(
    stored: StoredCells,
    grid: Sequence[int],
    processes: Sequence[tuple[int, ...]],
    is_shared: Callable[[tuple[int, ...]], bool],
) -> float:
    """How often each byte of a leaf is read, if whoever needs a part of a block reads all of it.

    `grid` is how the leaf is cut for those who need it, `processes` who needs each of these cells,
    and `is_shared` says whether so many share what they all need. What too few need of a block is
    not counted.
    """
    shape = stored.spec.shape
    total = times = 0
    for unit in _units(0, WHOLE, _box.full(shape), stored):
        needed_by = {processes[cell] for cell in _box.overlapping_cells(shape, grid, unit.part)}
        readers = 1
        if is_shared(tuple(sorted({process for members in needed_by for process in members}))):
            readers = sum(1 if is_shared(members) else len(members) for members in needed_by)
        total += unit.nbytes
        times += unit.nbytes * readers
    return times / max(total, 1)


def plan_stages(
    needs: Sequence[Need], stored: Sequence[StoredCells], process: int
) -> list[list[Gather]]:
    """The gathers of this process with others, stage by stage, in the order of the needs.

    All processes have the same number of stages, and the gathers that they have in common are in
    the same order. A gather whose only member is `process` is not worth sharing. `stored` belongs
    to `needs`.
    """
    if sum(need.shared_bytes for need in needs) < WORTH_BYTES:
        return []
    stages: list[dict[tuple[int, ...], list[Unit]]] = [{}]
    filled = 0.0
    for number, (need, cells) in enumerate(zip(needs, stored, strict=True)):
        portion = need.shared_bytes / max(STAGE_BYTES, need.most_members * BLOCK_BYTES)
        slabs = ceil(portion)
        runs = [
            (members, _cut_evenly(units, slabs))
            for members, units in _shared_boxes(number, need, cells)
        ]
        for slab in range(slabs):
            if filled and filled + portion / slabs > 1:
                stages.append({})
                filled = 0.0
            filled += portion / slabs
            for members, of_slabs in runs:
                stages[-1].setdefault(members, []).extend(of_slabs[slab])
    return [
        [_gather(members, units, process) for members, units in sorted(stage.items())]
        for stage in stages
    ]


def _shared_boxes(
    number: int, need: Need, cells: StoredCells
) -> Iterator[tuple[tuple[int, ...], list[Unit]]]:
    """The units of each box that several processes need."""
    for box, members in enumerate(need.members):
        if len(members) < 2:
            continue
        whole = (WHOLE, _box.full(cells.spec.shape))
        units = list(_units(number, *(whole if need.is_whole else (box, need.boxes[box])), cells))
        # In a gather all parts are as long as the longest: a unit must not exceed a usual part.
        if max(unit.nbytes for unit in units) <= max(BLOCK_BYTES, STAGE_BYTES // len(members)):
            yield members, units


def _units(number: int, box: int, wanted: Box, cells: StoredCells) -> Iterator[Unit]:
    """A box, cut where files and blocks end: the first units of all files, then the second ones."""
    spec, grid, files = cells
    dtype, itemsize = DTYPES[spec.dtype], numpy_dtype(spec.dtype).itemsize
    parts: list[tuple[int, int, Box, bool]] = []
    for cell in _box.overlapping_cells(spec.shape, grid, wanted):
        stored = _box.cell(spec.shape, grid, cell)
        shared = _box.intersect(stored, wanted)
        nbytes = dtype.nbytes(_box.count(stored))
        if shared is None:
            continue
        if dtype.packed:  # What packs several elements into a byte is read as a whole.
            bands = [shared]
        else:
            block = block_bytes(Entry(0, stored, 0, nbytes)) // itemsize
            bands = _box.bands(shared, stored, BLOCK_BYTES // itemsize, block)
        is_small = nbytes < GATHER_BYTES
        parts += [(turn, cell, band, is_small) for turn, band in enumerate(bands)]
    for _, cell, part, is_small in sorted(parts):
        yield Unit(number, box, part, _box.count(part) * itemsize, files[cell], is_small)


def _gather(members: tuple[int, ...], units: Sequence[Unit], process: int) -> Gather:
    """Have each member read about as much, and what lies in one file together."""
    if sum(unit.nbytes for unit in units) < WORTH_BYTES:
        return Gather((process,), (tuple(units),))
    parts = _cut_evenly(sorted(units, key=lambda unit: unit.file), len(members))
    return Gather(members, tuple(map(tuple, parts)))


def _cut_evenly(units: Sequence[Unit], count: int) -> list[list[Unit]]:
    """Runs of about the same number of bytes. Units that share a block stay together."""
    runs: list[list[Unit]] = [[] for _ in range(count)]
    total = sum(unit.nbytes for unit in units)
    start = 0
    for clump in _clumps(units):
        nbytes = sum(unit.nbytes for unit in clump)
        middle = start + nbytes / 2
        runs[min(int(middle * count / total), count - 1) if total else 0] += clump
        start += nbytes
    return runs


def _clumps(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units that were probably written as one block, as `shard_file.block_lengths` cuts them."""
    clump: list[Unit] = []
    nbytes = 0
    for unit in units:
        joins = clump and unit.is_small and clump[-1].is_small and unit.file == clump[-1].file
        if not joins or nbytes + unit.nbytes > BLOCK_BYTES:
            if clump:
                yield clump
            clump, nbytes = [], 0
        clump.append(unit)
        nbytes += unit.nbytes
    if clump:
        yield clump
