"""Shared reads: processes read parts of common data, and get the rest from one another.

`layout.plan_restore` decides who reads which part. Before the processes gather a stage, they agree
that all have read their parts of it. So none waits in a collective for a failed process.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka.common.dtypes import numpy_dtype
from ostraka.formats.buffers import Array, aligned, map_pages
from ostraka.formats.source import OnBytes, Source
from ostraka.layout import box as _box
from ostraka.layout.plan_restore import (
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
from ostraka.layout.shard_file import digest
from ostraka.layout.spec import Target, partition_grid
from ostraka.live.shardings import Devices, describe_sharding
from ostraka.processes.operation import (
    Operation,
    ProcessFailed,
    name_processes,
    refuse_different_paths,
)
from ostraka.reading.locate import ATTEMPTS
from ostraka.restoring.destinations import Destination
from ostraka.storage import PathLike, open_store
from ostraka.tree.nodes import ArrayNumber, Leaf

ShareReads = Literal["auto"] | bool

_ALIGNMENT = 64
"""Alignment of units in a part, so that they are quick to copy."""
_LOOK_EVERY_S = 0.2
"""How often to look whether others have failed, while waiting for them."""
_LEAST_STEP_BITS = 16
"""Parts have few lengths, since the collective is compiled for each: 8 in an octave."""
_OFTEN = 2
"""From this many reads per byte on, processes gather the whole leaf and slice it."""
_MANY_HOSTS = 4
"""From this many hosts on, they serve one another faster than a file server does."""


def _least_hosts(share_reads: ShareReads, source: Source) -> int | None:
    """The number of hosts that must need the same bytes for this process to share them.

    None if it shares nothing. Processes of one host share the page cache anyway. A directory that
    many hosts see belongs to a file server.
    """
    if share_reads != "auto":
        return 1 if share_reads else None
    # On CPU, collectives between processes can be switched off.
    implementation: Any = getattr(jax.config, "jax_cpu_collectives_implementation", "none")
    if jax.default_backend() == "cpu" and implementation in (None, "none"):
        return None
    return 1 if source.store.traits.is_remote else _MANY_HOSTS


class Replaced(Exception):
    """Another process found the checkpoint replaced."""


@dataclass(slots=True)
class Agreement:
    """The agreement of the processes of a restore on shared reads."""

    operation: Operation
    name: str
    """Name of this attempt at restoring."""
    least_hosts: int | None
    """Hosts that must need the same bytes to share them, or None to share nothing."""
    hosts: Sequence[str]
    """Host names, by process."""
    stages: int = 0
    passed: int = 0
    """Number of stages that all processes have read."""

    def end_stage(self, has_read: bool) -> bool:
        """True, on all processes, if all have read their parts of a stage."""
        stage = f"stage-{self.name}-{self.passed}"
        self.passed += 1
        return self.operation.exchange(stage, has_read, all)


def _name_difference(posts: list[Any]) -> None:
    """Raise ProcessFailed for processes that have found another checkpoint than process 0."""
    odd = [process for process, post in enumerate(posts) if post[1:] != posts[0][1:]]
    (location, _, samples), (_, _, others) = posts[0], posts[odd[0]]
    first, other = dict(samples), dict(others)
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    what = f"{names[0]} of {location} is another file" if names else f"{location} is another save"
    who = f"on {name_processes(odd)} than on process 0"
    raise ProcessFailed(odd[0], f"{what} {who}; give all hosts the same files")


@dataclass(slots=True)
class SourceComparison:
    """Compares the checkpoints that the processes of a restore have opened."""

    path: PathLike
    share_reads: ShareReads
    opened: list[str] = field(default_factory=list[str])
    """The id of the checkpoint and a digest of samples of its files, as last found."""
    times_found: int = 0
    """How many times in a row this process has found the same."""

    def agree(self, operation: Operation, source: Source, attempt: int) -> Agreement | None:
        """Agree on the checkpoint and on shared reads. None, on all processes, to open it again.

        They open it again while a save may be replacing it. Raises ProcessFailed if processes still
        find different checkpoints, or received different paths.
        """
        samples = list(source.samples())
        opened = [source.saved.id, digest(repr(samples).encode()) if samples else ""]
        self.times_found = self.times_found + 1 if opened == self.opened else 0
        self.opened = opened
        posted = [open_store(self.path).location, *opened, self.times_found]
        posted += [_least_hosts(self.share_reads, source), socket.gethostname()]
        verdict, least, hosts = operation.exchange(f"open-{attempt}", posted, _compare)
        if verdict == "differ":
            post = [source.location, source.saved.id, samples]
            operation.exchange(f"files-{attempt}", post, _name_difference)
        return Agreement(operation, str(attempt), least, hosts) if verdict == "same" else None


def _compare(posts: list[Any]) -> tuple[str, int | None, list[str]]:
    """ "same" if all have opened one checkpoint, with the least number of hosts to share reads.

    Otherwise "again" while a save may be replacing it, then "differ".
    """
    paths, ids, samples, times_found, least, hosts = zip(*posts, strict=True)
    if len(set(zip(ids, samples, strict=True))) > 1:
        refuse_different_paths("restores", paths)
        return "differ" if min(times_found) >= ATTEMPTS - 2 else "again", None, list(hosts)
    known = [number for number in least if number is not None]
    is_shared = len(known) == len(least) and len(set(hosts)) >= max(known)
    return "same", max(known) if is_shared else None, list(hosts)


class _SeenNeed(NamedTuple):
    """A need as this process sees it."""

    need: Need
    by_all: bool
    """True if it follows from a sharding over several processes, which all see alike."""
    text: str
    """Text to compare needs by, between processes."""


class _Cells(NamedTuple):
    """The processes that need the cells of an array, by its sharding."""

    grid: tuple[int, ...]
    processes: tuple[int, ...]
    """The processes that need any cell."""
    by_cell: list[tuple[int, ...]]
    """For each cell, the processes that need it."""
    members: tuple[tuple[int, ...], ...]
    """For each cell of this process, all processes that need it."""
    most_shared: int
    """Most cells that one process shares with others."""
    most_members: int
    text: str
    """Digest to compare cells by, between processes."""


class _Finder:
    """Finds the boxes that this process needs, and the other processes that need them."""

    def __init__(self, source: Source, agreement: Agreement):
        self._source = source
        self._leaves = source.saved.leaves
        self._process = agreement.operation.process
        self._everybody = tuple(range(agreement.operation.count))
        self._hosts = agreement.hosts
        self._least_hosts = agreement.least_hosts or 1
        self._devices = Devices()
        self._cells: dict[Any, _Cells] = {}
        self._times: dict[Any, float] = {}

    def find(self, destination: Destination) -> _SeenNeed:
        number, boxes = destination.number, destination.boxes
        spec = self._leaves[number]
        itemsize = numpy_dtype(spec.dtype).itemsize
        if spec.per_process or 0 in spec.shape:
            return _SeenNeed(Need(number, boxes), False, f"{number} alone")
        is_local = destination.sharding is None
        cells = None if is_local else self._cells_of(destination, len(spec.shape))
        if cells is None or cells.processes == (self._process,):
            # It needs host memory or local devices. Other processes may need the same.
            nbytes = sum(map(_box.count, boxes)) * itemsize
            members = (self._everybody,) * len(boxes)
            need = Need(number, boxes, members, nbytes, len(self._everybody))
            return _SeenNeed(need, False, f"{number} {boxes}")
        if self._is_read_often(destination, cells):
            members = (cells.processes,) if self._process in cells.processes else ()
            nbytes = prod(spec.shape) * itemsize
            need = Need(number, boxes, members, nbytes, len(cells.processes), is_whole=True)
            return _SeenNeed(need, True, f"{number} whole {cells.text}")
        nbytes = cells.most_shared * (prod(spec.shape) // prod(cells.grid)) * itemsize
        need = Need(number, boxes, cells.members, nbytes, cells.most_members)
        return _SeenNeed(need, len(cells.processes) > 1, f"{number} {cells.text}")

    def _is_read_often(self, destination: Destination, cells: _Cells) -> bool:
        """True if processes would read the same blocks, each for another part."""
        if not self._source.reads_whole_rows or not self._is_shared(cells.processes):
            return False
        number = destination.number
        spec = self._leaves[number]
        key = (destination.sharding, spec.shape, spec.dtype, self._source.grid_of(number))
        if key not in self._times:
            stored = _stored(self._source, number)
            self._times[key] = times_read(stored, cells.grid, cells.by_cell, self._is_shared)
        return self._times[key] >= _OFTEN

    def _cells_of(self, destination: Destination, rank: int) -> _Cells:
        key = (destination.sharding, rank)
        found = self._cells.get(key)
        if found is None:
            mesh, partition = describe_sharding(destination.path, key[0], self._devices)
            cells = processes_by_cell(mesh, partition, rank, self._devices.process_of)
            grid = partition_grid(mesh, partition, rank)
            shared = [members for members in cells if self._is_shared(members)]
            counts = Counter(process for members in shared for process in members)
            own = [members for members in cells if self._process in members]
            found = self._cells[key] = _Cells(
                grid,
                processes=tuple(sorted({process for members in cells for process in members})),
                by_cell=cells,
                members=tuple(m if self._is_shared(m) else (self._process,) for m in own),
                most_shared=max(counts.values(), default=0),
                most_members=max(map(len, shared), default=1),
                text=digest(repr((grid, cells)).encode()),
            )
        return found

    def _is_shared(self, members: tuple[int, ...]) -> bool:
        hosts = {self._hosts[process] for process in members}
        return len(members) > 1 and len(hosts) >= self._least_hosts


def _find_needs(
    source: Source, destinations: Sequence[Destination], agreement: Agreement
) -> list[Need]:
    """The needs of this process, shared as far as all processes see the same needs."""
    finder = _Finder(source, agreement)
    seen = [finder.find(destination) for destination in destinations]
    by_all = digest("\n".join(need.text for need in seen if need.by_all).encode())
    everything = digest("\n".join(need.text for need in seen).encode())

    def decide(posts: list[Any]) -> list[bool]:
        return [len(set(digests)) == 1 for digests in zip(*posts, strict=True)]

    stage = f"needs-{agreement.name}"
    share_by_all, share_others = agreement.operation.exchange(stage, [by_all, everything], decide)
    return [
        need if (share_by_all if is_by_all else share_others) else Need(need.leaf, need.boxes)
        for need, is_by_all, _ in seen
    ]


class SharedReader:
    """Reads the needs of this process, by itself or together with others."""

    def __init__(
        self,
        source: Source,
        destinations: Sequence[Destination],
        agreement: Agreement,
        on_bytes: OnBytes,
    ):
        self._leaves = source.saved.leaves
        self._needs = _find_needs(source, destinations, agreement)
        self._casts = [found.cast for found in destinations]
        """The dtype that each need is cast to. None to leave it unchanged."""
        self._agreement = agreement
        self._process = agreement.operation.process
        stored = [_stored(source, need.leaf) for need in self._needs]
        self._stages = plan_stages(self._needs, stored, self._process)
        agreement.stages = len(self._stages)
        self._gathered: dict[tuple[int, int], Array | None] = {}
        """Shared arrays by need and box, as far as they have arrived."""
        self._last_stage: dict[int, int] = {}
        """By need, the last stage that has parts of it."""
        self._numbers: dict[tuple[int, int] | Unit, int] = {}
        """Target number of each box or unit that this process reads."""
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
        """For each need in turn, the arrays of its boxes, as soon as they have arrived."""
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
        """The array of a box or unit, as soon as it has been read."""
        target = self._numbers.pop(key)
        while target not in self._there:
            self._agreement.operation.check()
            number, self._there[number] = next(self._reads)
        return self._there.pop(target)

    def _run_stage(self) -> None:
        gathers = self._stages[self._agreement.passed]
        parts = [self._pack(gather) for gather in gathers]
        if not self._agreement.end_stage(True):
            raise Replaced
        for gather in gathers:
            collect = partial(_all_gather, gather.members, parts.pop(0))
            self._unpack(gather, _wait_for(collect, self._agreement.operation.check))

    def _pack(self, gather: Gather) -> Array:
        """The part of this process, padded to the length of the longest."""
        longest = max(_offsets(units)[-1] for units in gather.parts)
        step = 1 << max(longest.bit_length() - 4, _LEAST_STEP_BITS)
        part = aligned(-(-longest // step) * step)
        units = gather.part_of(self._process)
        for unit, offset in zip(units, _offsets(units), strict=False):
            read = self._take(unit).reshape(-1).view(np.uint8)
            part[offset : offset + unit.nbytes] = read
        return part

    def _unpack(self, gather: Gather, parts: Array) -> None:
        """Copy units to their arrays: JAX may keep its input, and with it all of `parts`."""
        for part, units in zip(parts, gather.parts, strict=True):
            for unit, offset in zip(units, _offsets(units), strict=False):
                dtype = numpy_dtype(self._leaves[self._needs[unit.need].leaf].dtype)
                elements = part[offset : offset + unit.nbytes].view(dtype)
                elements = elements.reshape(_box.shape_of(unit.part))
                for box in self._boxes_of(unit):
                    self._put(unit, box, elements)

    def _boxes_of(self, unit: Unit) -> Sequence[int]:
        """Numbers of the boxes that a unit may have parts of."""
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
    """Offset of each unit in a part, and the end of the last one."""
    return list(accumulate((-(-u.nbytes // _ALIGNMENT) * _ALIGNMENT for u in units), initial=0))


def _wait_for(collect: Callable[[], Array], check: Callable[[], None]) -> Array:
    """The result of a collective. `check` is called while waiting and may raise.

    It runs in a thread. If a process is killed in a collective, others may wait in it until JAX
    ends them, but `check` reports the error.
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
    """The parts of all members. Each calls this with its own part, all of one length."""
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
    """A sharding with a part on each device, and the collective that replicates all parts."""
    mesh = Mesh(np.array(devices, dtype=object), ("process",))
    gather = jax.jit(_identity, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return NamedSharding(mesh, PartitionSpec("process")), gather


def _identity(array: jax.Array) -> jax.Array:
    return array


# Does a restore concern other processes?


def spans_processes(trees: Any, mesh: Any) -> bool:
    """True if trees of templates and specs, or a mesh, have devices of several processes."""
    arrays = (jax.Array, jax.ShapeDtypeStruct)
    shardings = [
        leaf.sharding if isinstance(leaf, arrays) else leaf for leaf in jax.tree.leaves(trees)
    ]
    meshes = [mesh, *(found.mesh for found in shardings if isinstance(found, NamedSharding))]
    return any(
        len({device.process_index for device in found.devices.flat}) > 1
        for found in meshes
        if isinstance(found, Mesh)
    )


def numbers_span_processes(source: Source, asked: Sequence[tuple[Leaf, int]]) -> bool:
    """The same for arrays of a checkpoint by their numbers, as `restore_leaves` takes them."""
    saved = source.saved
    as_saved = [saved.leaves[n] for leaf, n in asked if isinstance(leaf.value, ArrayNumber)]
    meshes = {leaf.mesh for leaf in as_saved if leaf.kind in ("jax", "key") and leaf.mesh >= 0}
    devices = [saved.meshes[mesh].devices for mesh in meshes]
    if any(len({saved.process_of[number] for number in found}) > 1 for found in devices):
        return True
    return spans_processes([leaf.value for leaf, _ in asked], None)
