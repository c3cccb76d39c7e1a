"""Shared reads: each process reads a part of what several need, and gets the rest from the others.

`_plan_share` decides who reads what. Before the processes gather a stage they agree that all have
read their parts of it, so that none waits in a collective for one that has failed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka import _box
from ostraka._capture import Devices, describe_sharding
from ostraka._coordinate import Operation
from ostraka._format import digest
from ostraka._memory import Array, aligned, map_pages
from ostraka._place import Destination
from ostraka._plan_share import (
    STAGE_BYTES,
    WHOLE,
    Gather,
    Need,
    StoredCells,
    Unit,
    plan_stages,
    processes_by_cell,
    times_read,
)
from ostraka._source import OnBytes, Source
from ostraka._spec import LeafSpec, Target, numpy_dtype, partition_grid

ShareReads = Literal["auto"] | bool

_ALIGNMENT = 64
"""Of units in a part, so that they are quick to copy."""
_LOOK_EVERY_S = 0.2
"""How often to look whether others have failed, while waiting for them."""
_LEAST_STEP_BITS = 16
"""Parts have few lengths, since the collective is compiled for each: 8 in an octave."""
_OFTEN = 2
"""If bytes would be read so many times, all of a leaf is shared, and each takes its own of it."""
_MANY_HOSTS = 4
"""So many that need the same bytes are served better by one another than by a file server."""


def least_hosts(share_reads: ShareReads, source: Source) -> int | None:
    """On how many hosts the same bytes must be needed for this process to share them.

    None if it shares nothing. Processes of one host share what the system has read for one of them
    anyway, and a directory that many hosts see is one of a file server.
    """
    if share_reads == "auto":
        if not _has_collectives():
            return None
        return 1 if source.store.parts.is_remote else _MANY_HOSTS
    return 1 if share_reads else None


def agree_on_sharing(least: Sequence[int | None], hosts: Sequence[str]) -> int | None:
    """What `least_hosts` is for all, None where that shares nothing."""
    known = [number for number in least if number is not None]
    if len(known) < len(least) or len(least) == 1 or len(set(hosts)) < max(known):
        return None
    return max(known)


def _has_collectives() -> bool:
    """On CPU, collectives between processes can be switched off."""
    implementation: Any = getattr(jax.config, "jax_cpu_collectives_implementation", "none")
    return jax.default_backend() != "cpu" or implementation not in (None, "none")


class Replaced(Exception):
    """On some process, the checkpoint that is being read has been replaced."""


@dataclass(slots=True)
class Agreement:
    """What the processes of a restore agree on while they share reads."""

    operation: Operation
    name: str
    """Of this attempt at restoring."""
    least_hosts: int | None
    """None if nothing is shared."""
    hosts: Sequence[str]
    """By process."""
    stages: int = 0
    passed: int = 0
    """How many of the stages all processes have read their parts of."""

    def pass_stage(self) -> None:
        """Wait until all have read their parts of a stage. Raises Replaced if one can't."""
        if not self._post(True):
            raise Replaced

    def refuse_stage(self) -> None:
        """Tell those who wait for this process's part of a stage that it won't come."""
        if self.passed < self.stages:
            self._post(False)

    def _post(self, has_read: bool) -> bool:
        stage = f"stage-{self.name}-{self.passed}"
        self.passed += 1
        return self.operation.exchange(stage, has_read, all)


def find_needs(
    source: Source, destinations: Sequence[Destination], agreement: Agreement
) -> list[Need]:
    """What this process needs of each leaf, shared as far as all processes see the same needs."""
    if agreement.least_hosts is None:
        return [Need(found.number, found.boxes) for found in destinations]
    operation = agreement.operation
    finder = _Finder(source, agreement, agreement.least_hosts)
    seen = [finder.find(destination) for destination in destinations]
    by_all = digest("\n".join(need.text for need in seen if need.by_all).encode())
    everything = digest("\n".join(need.text for need in seen).encode())

    def decide(posts: list[Any]) -> list[bool]:
        return [len(set(digests)) == 1 for digests in zip(*posts, strict=True)]

    stage = f"needs-{agreement.name}"
    share_by_all, share_others = operation.exchange(stage, [by_all, everything], decide)
    return [
        need.shared if (share_by_all if need.by_all else share_others) else need.alone
        for need in seen
    ]


class _Seen(NamedTuple):
    """A need as this process sees it."""

    shared: Need
    alone: Need
    """The same, with nothing of it shared."""
    by_all: bool
    """Whether it follows from a sharding over several processes, and all see it alike."""
    text: str
    """The same on all processes that see the same need."""


class _Cells(NamedTuple):
    """The processes that need the cells of an array, as its sharding says."""

    grid: tuple[int, ...]
    processes: tuple[int, ...]
    """All that need any."""
    by_cell: list[tuple[int, ...]]
    """Of each cell, those that need it."""
    members: tuple[tuple[int, ...], ...]
    """Of each cell that this process needs, all that need it."""
    most_shared: int
    """Of the cells that several need, how many one process needs at most."""
    most_members: int
    text: str
    """The same for the same cells, on all processes."""


class _Finder:
    """Finds what this process needs of each leaf, and who else needs it."""

    def __init__(self, source: Source, agreement: Agreement, least_hosts: int):
        self._source = source
        self._leaves = source.saved.leaves
        self._process = agreement.operation.process
        self._everybody = tuple(range(agreement.operation.count))
        self._hosts = agreement.hosts
        self._least_hosts = least_hosts
        self._devices = Devices()
        self._cells: dict[Any, _Cells] = {}
        self._times: dict[Any, float] = {}

    def find(self, destination: Destination) -> _Seen:
        number, boxes = destination.number, destination.boxes
        spec = self._leaves[number]
        alone = Need(number, boxes)
        if spec.per_process or 0 in spec.shape:
            return _Seen(alone, alone, False, f"{number} alone")
        if destination.sharding is None:
            return self._find_local(alone, spec)
        cells = self._cells_of(destination, len(spec.shape))
        if cells.processes == (self._process,):
            return self._find_local(alone, spec)
        if self._is_read_often(destination, cells):
            return self._find_whole(alone, spec, cells)
        cell_bytes = prod(spec.shape) // prod(cells.grid) * numpy_dtype(spec.dtype).itemsize
        shared_bytes = cells.most_shared * cell_bytes
        need = Need(number, boxes, cells.members, shared_bytes, cells.most_members)
        return _Seen(need, alone, len(cells.processes) > 1, f"{number} {cells.text}")

    def _is_read_often(self, destination: Destination, cells: _Cells) -> bool:
        """Whether processes would read the same blocks for different parts of them."""
        if not self._source.reads_whole_rows or not self._is_shared(cells.processes):
            return False
        number = destination.number
        spec = self._leaves[number]
        key = (destination.sharding, spec.shape, spec.dtype, self._source.grid_of(number))
        if key not in self._times:
            stored = _stored(self._source, number)
            self._times[key] = times_read(stored, cells.grid, cells.by_cell, self._is_shared)
        return self._times[key] >= _OFTEN

    def _find_whole(self, alone: Need, spec: LeafSpec, cells: _Cells) -> _Seen:
        members = (cells.processes,) if self._process in cells.processes else ()
        nbytes = prod(spec.shape) * numpy_dtype(spec.dtype).itemsize
        count = len(cells.processes)
        need = Need(alone.leaf, alone.boxes, members, nbytes, count, is_whole=True)
        return _Seen(need, alone, True, f"{alone.leaf} whole {cells.text}")

    def _find_local(self, alone: Need, spec: LeafSpec) -> _Seen:
        """Of what is in the memory, or on devices, of this process: others may have the same."""
        elements = sum(map(_box.count, alone.boxes))
        nbytes = elements * numpy_dtype(spec.dtype).itemsize
        members = (self._everybody,) * len(alone.boxes)
        need = Need(alone.leaf, alone.boxes, members, nbytes, len(self._everybody))
        return _Seen(need, alone, False, f"{alone.leaf} {alone.boxes}")

    def _cells_of(self, destination: Destination, rank: int) -> _Cells:
        key = (destination.sharding, rank)
        found = self._cells.get(key)
        if found is None:
            mesh, partition = describe_sharding(destination.path, key[0], self._devices)
            cells = processes_by_cell(mesh, partition, rank, self._devices.process_of)
            shared = [members for members in cells if self._is_shared(members)]
            counts = Counter(process for members in shared for process in members)
            grid = partition_grid(mesh, partition, rank)
            found = self._cells[key] = _Cells(
                grid,
                tuple(sorted({process for members in cells for process in members})),
                cells,
                tuple(
                    members if self._is_shared(members) else (self._process,)
                    for members in cells
                    if self._process in members
                ),
                max(counts.values(), default=0),
                max(map(len, shared), default=1),
                digest(repr((grid, cells)).encode()),
            )
        return found

    def _is_shared(self, members: tuple[int, ...]) -> bool:
        hosts = {self._hosts[process] for process in members}
        return len(members) > 1 and len(hosts) >= self._least_hosts


class Reader:
    """Reads what is needed, by itself or together with others."""

    def __init__(
        self,
        source: Source,
        needs: Sequence[Need],
        casts: Sequence[str | None],
        agreement: Agreement,
        on_bytes: OnBytes,
    ):
        self._leaves = source.saved.leaves
        self._needs = needs
        self._casts = casts
        """The dtype that each need is cast to; None to leave it as it is."""
        self._agreement = agreement
        self._process = agreement.operation.process
        self._stages: list[list[Gather]] = []
        if agreement.least_hosts is not None:
            stored = [_stored(source, need.leaf) for need in needs]
            self._stages = plan_stages(needs, stored, self._process)
        agreement.stages = len(self._stages)
        self._gathered: dict[tuple[int, int], Array | None] = {}
        """By need and box: what is shared of it, as far as it is there."""
        self._last_stage: dict[int, int] = {}
        """By need, the stage after which all that is shared of it is there."""
        self._numbers: dict[tuple[int, int] | Unit, int] = {}
        """Of each box, or unit of a shared one, that this process reads: which target it is."""
        self._reads = source.read(self._plan_targets(), on_bytes=on_bytes)
        self._there: dict[int, Array] = {}

    def _plan_targets(self) -> list[Target]:
        targets: list[Target] = []
        for stage, gathers in enumerate(self._stages):
            for gather in gathers:
                for unit in (unit for part in gather.parts for unit in part):
                    self._gathered |= {(unit.need, box): None for box in self._boxes_of(unit)}
                    self._last_stage[unit.need] = stage
                for unit in gather.part_of(self._process):
                    self._numbers[unit] = len(targets)
                    targets.append(Target(self._needs[unit.need].leaf, unit.part))
        for number, need in enumerate(self._needs):
            for box, wanted in enumerate(need.boxes):
                if (number, box) not in self._gathered:
                    self._numbers[number, box] = len(targets)
                    targets.append(Target(need.leaf, wanted, self._casts[number]))
        return targets

    def read(self) -> Iterator[list[Array]]:
        """For each need in turn, the arrays of its boxes, as soon as they are there."""
        for number, need in enumerate(self._needs):
            while self._agreement.passed <= self._last_stage.get(number, -1):
                self._run_stage()
            yield [self._array(number, box) for box in range(len(need.boxes))]
        while self._agreement.passed < len(self._stages):  # of others, whose part this one reads
            self._run_stage()
        for _ in self._reads:  # to its end, which closes files
            pass

    def _array(self, need: int, box: int) -> Array:
        array = self._gathered.pop((need, box), None)
        return self._take((need, box)) if array is None else array

    def _take(self, key: tuple[int, int] | Unit) -> Array:
        """What was read for a box or unit, as soon as it is there."""
        target = self._numbers.pop(key)
        while target not in self._there:
            self._agreement.operation.check()
            number, self._there[number] = next(self._reads)
        return self._there.pop(target)

    def _run_stage(self) -> None:
        gathers = self._stages[self._agreement.passed]
        parts = [self._pack(gather) for gather in gathers]
        self._agreement.pass_stage()
        for gather in gathers:
            collect = partial(_all_gather, gather.members, parts.pop(0))
            self._unpack(gather, _wait_for(collect, self._agreement.operation.check))

    def _pack(self, gather: Gather) -> Array:
        """The part that this process reads, filled up to the length of the longest."""
        longest = max(_offsets(units)[-1] for units in gather.parts)
        step = 1 << max(longest.bit_length() - 4, _LEAST_STEP_BITS)
        part = aligned(-(-longest // step) * step)
        units = gather.part_of(self._process)
        for unit, offset in zip(units, _offsets(units), strict=False):
            read = self._take(unit).reshape(-1).view(np.uint8)
            part[offset : offset + unit.nbytes] = read
        return part

    def _unpack(self, gather: Gather, parts: Array) -> None:
        """Copy units to their places: JAX may keep what it is given, and so all of `parts`."""
        for part, units in zip(parts, gather.parts, strict=True):
            for unit, offset in zip(units, _offsets(units), strict=False):
                dtype = numpy_dtype(self._leaves[self._needs[unit.need].leaf].dtype)
                elements = part[offset : offset + unit.nbytes].view(dtype)
                elements = elements.reshape(_box.shape_of(unit.part))
                for box in self._boxes_of(unit):
                    self._put(unit, box, elements)

    def _boxes_of(self, unit: Unit) -> Sequence[int]:
        """The boxes of its need that a unit may have parts of."""
        return range(len(self._needs[unit.need].boxes)) if unit.box == WHOLE else (unit.box,)

    def _put(self, unit: Unit, box: int, elements: Array) -> None:
        within = self._needs[unit.need].boxes[box]
        shared = _box.intersect(unit.part, within)
        if shared is None:
            return
        array = self._gathered[unit.need, box]
        if array is None:
            cast = self._casts[unit.need]
            made = elements.dtype if cast is None else numpy_dtype(cast)
            memory = aligned(_box.count(within) * made.itemsize)
            map_pages(memory)
            array = memory.view(made).reshape(_box.shape_of(within))
            self._gathered[unit.need, box] = array
        place = array[(*_box.slices(shared, within), ...)]  # a view, also if 0-d
        place[...] = elements[(*_box.slices(shared, unit.part), ...)]


def _stored(source: Source, leaf: int) -> StoredCells:
    return StoredCells(source.saved.leaves[leaf], source.grid_of(leaf), source.files_of(leaf))


def _offsets(units: Sequence[Unit]) -> list[int]:
    """Where each unit begins in a part, and where the last one ends."""
    return list(accumulate((-(-u.nbytes // _ALIGNMENT) * _ALIGNMENT for u in units), initial=0))


def _wait_for(collect: Callable[[], Array], check: Callable[[], None]) -> Array:
    """What a collective gives; `check` is called while waiting and may raise.

    In a thread: if a process is killed in the middle of it, some of the others may be left in it
    until JAX ends them, while one that has seen an error says so.
    """
    done: SimpleQueue[Array | Exception] = SimpleQueue()

    def run() -> None:
        try:
            done.put(collect())
        except Exception as error:
            done.put(error)

    threading.Thread(target=run, name="ostraka_gather", daemon=True).start()
    while True:
        check()
        try:
            found = done.get(timeout=_LOOK_EVERY_S)
        except Empty:
            continue
        if isinstance(found, Exception):
            text = "another process has ended, or the network between processes has failed"
            raise ConnectionError(f"{text}: {found}") from found
        return found


def _all_gather(members: tuple[int, ...], part: Array) -> Array:
    """The parts of all members, each of which calls this with its own, of the same length."""
    if len(members) == 1:
        return part[np.newaxis]
    step = max(2 * STAGE_BYTES // len(members), 1)  # bounds the memory that it takes on a device
    columns = [_gather_columns(members, part[at : at + step]) for at in range(0, part.size, step)]
    return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)


def _gather_columns(members: tuple[int, ...], part: Array) -> Array:
    first_devices = {device.process_index: device for device in reversed(jax.devices())}
    sharded, replicate = _replication(tuple(first_devices[member] for member in members))
    own = jax.device_put(part, first_devices[jax.process_index()])
    # Of one dimension: an accelerator would fill up the rows of a second one.
    shape = (len(members) * part.size,)
    with jax.disable_jit(False):
        everything = replicate(jax.make_array_from_single_device_arrays(shape, sharded, [own]))
    return np.asarray(everything.addressable_shards[0].data).reshape(len(members), part.size)


@lru_cache(maxsize=64)
def _replication(
    devices: tuple[Any, ...],
) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """A sharding with a part on each device, and the collective that gives all parts to each."""
    mesh = Mesh(np.array(devices, dtype=object), ("process",))
    gather = jax.jit(_identity, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return NamedSharding(mesh, PartitionSpec("process")), gather


def _identity(array: jax.Array) -> jax.Array:
    return array
