"""Write plans: plain data, made by pure functions, the same on every process.

A write plan says which device writes which box of which leaf, and so every file's name and size.
A box that several devices hold is written by one of them, or split among them, so that all
processes write about the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter, mod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ostraka import _format
from ostraka._format import FileEntry
from ostraka._spec import (
    DTYPES,
    HOST_LOCAL,
    Layout,
    LeafSpec,
    MeshSpec,
    StoredLeaf,
    holders,
    partition_grid,
    turns_of,
)

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_FILE_BYTES = 4 << 30
STAGING_BYTES = 1 << 30
"""How much of what is on accelerators a save holds in host memory at one time."""
LANES_PER_PROCESS = 4
"""A process with fewer devices splits its shards into parts, to have this many files to write."""
MIN_LANE_BYTES = 64 << 20

_BALANCE_SHARE = 128
"""Boxes below 1/128 of what a process writes are taken whole, in turn: that keeps the load even."""
_ALWAYS_SPLIT_WAYS = 64
_MIN_SPLIT_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Who writes which box where."""

    meshes: tuple[MeshSpec, ...]
    layouts: tuple[Layout, ...]
    leaves: tuple[StoredLeaf, ...]
    files: tuple[FileEntry, ...]
    process_of: tuple[int, ...]

    def files_of(self, process: int) -> list[FileEntry]:
        return [file for file in self.files if self.process_of[file.device] == process]

    def bytes_by_process(self) -> list[int]:
        """The data bytes that each process writes, headers not counted."""
        totals = [0] * (max(self.process_of) + 1)
        for file in self.files:
            totals[self.process_of[file.device]] += file.size - file.header_bytes
        return totals


def plan_write(
    leaves: Sequence[LeafSpec],
    meshes: Sequence[MeshSpec],
    process_of: Sequence[int],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> WritePlan:
    """Share the boxes of all leaves out over the devices; `process_of` maps device to process."""
    sharing = _Sharing(leaves, meshes, process_of, max_file_bytes)
    stored, files = _assign_parts(sharing, max_file_bytes)
    return WritePlan(
        meshes=tuple(meshes),
        layouts=tuple(sharing.layouts),
        leaves=stored,
        files=files,
        process_of=tuple(process_of),
    )


class _Sharing:
    """Works out the layout of every leaf, keeping the load of devices and processes even."""

    def __init__(
        self,
        leaves: Sequence[LeafSpec],
        meshes: Sequence[MeshSpec],
        process_of: Sequence[int],
        max_file_bytes: int,
    ):
        self.leaves = leaves
        self.device_count = len(process_of)
        self.layouts: list[Layout] = []
        self._numbers: dict[Layout, int] = {}
        self._process_of = np.asarray(process_of, dtype=np.int64)
        self._process_count = int(self._process_of.max()) + 1
        self._meshes = meshes
        self._everyone = np.arange(len(process_of)).reshape(1, -1)
        self._device_load = np.zeros(len(process_of), dtype=np.int64)
        self._process_load = np.zeros(self._process_count, dtype=np.int64)
        self._max_file_bytes = max_file_bytes
        self._even: dict[object, int] = {}
        self._tables: dict[object, tuple[tuple[int, ...], npt.NDArray[np.int64]]] = {}
        self._even_counts: dict[tuple[int, int], int] = {}
        self._nbytes = [leaf.nbytes for leaf in leaves]
        self.bytes_per_process = -(-sum(self._nbytes) // self._process_count)
        self._whole_limit = max(self.bytes_per_process // _BALANCE_SHARE, 1)
        self.capacities = [_format.header_capacity(leaf) for leaf in leaves]
        """By leaf, what one box of it adds to a header."""
        self.layout_of = self._share_all()

    def _share_all(self) -> list[int]:
        """First what lies evenly by nature; then the rest, largest first, to the idlest."""
        layout_of: list[int] = []
        uneven: list[int] = []
        for number, leaf in enumerate(self.leaves):
            layout = self._share_evenly(leaf, self._nbytes[number], self.capacities[number])
            layout_of.append(layout)
            if layout < 0:
                uneven.append(number)
        for (layout, nbytes), count in self._even_counts.items():
            owners = np.asarray(self.layouts[layout].owners, dtype=np.int64)
            self._add_load(owners, nbytes // len(owners) * count)
        for number in sorted(uneven, key=lambda n: (-self._nbytes[n], n)):
            layout_of[number] = self._share_to_idlest(self.leaves[number])
        return layout_of

    def _share_evenly(self, leaf: LeafSpec, nbytes: int, capacity: int) -> int:
        """The layout where every holder writes the same amount, or -1 if there is none."""
        header = _format.header_bytes_for(capacity)
        bits = DTYPES[leaf.dtype].bits
        key = (leaf.mesh, leaf.partition, leaf.shape, leaf.per_process, bits, header)
        number = self._even.get(key)
        if number is None:
            number = self._even[key] = self._even_layout(leaf, header)
        if number >= 0:
            counted = (number, nbytes)
            self._even_counts[counted] = self._even_counts.get(counted, 0) + 1
        return number

    def _even_layout(self, leaf: LeafSpec, header: int) -> int:
        if leaf.per_process:
            grid = (self._process_count, *[1] * (len(leaf.shape) - 1))
            first = _first_devices(self._process_of.tolist())
            return self._number_capped(leaf, header, grid, np.asarray(first))
        grid, table = self._held(leaf)
        cells, copies = table.shape
        cell_bytes = leaf.nbytes // cells
        if cell_bytes == 0:
            return -1
        if copies > 1:
            tiny = cell_bytes // copies < _MIN_SPLIT_BYTES and copies > _ALWAYS_SPLIT_WAYS
            if cell_bytes <= self._whole_limit or tiny:
                return -1
            dimension = _dividing_dimension(leaf.shape, grid, copies)
            if dimension is None:
                return -1
            grid, table = _refine(grid, table, dimension, copies)
        return self._number_capped(leaf, header, grid, table[:, 0])

    def _share_to_idlest(self, leaf: LeafSpec) -> int:
        """Split each cell only as far as balance needs; the idlest holders take the pieces."""
        grid, table = self._held(leaf)
        if leaf.nbytes == 0:
            grid, table = (1,) * len(leaf.shape), table[:1]
        cells, copies = table.shape
        cell_shape = [n // g for n, g in zip(leaf.shape, grid, strict=True)]
        dimension = max(range(len(grid)), key=lambda d: (cell_shape[d], -d), default=0)
        wanted = -(-(leaf.nbytes // cells) // self._whole_limit)
        pieces = max(1, min(copies, wanted, max(cell_shape, default=1)))
        process_load = self._process_load[self._process_of[table]]
        idlest = np.lexsort((self._device_load[table], process_load), axis=-1)[:, :pieces]
        chosen = np.take_along_axis(table, idlest, axis=1)
        if pieces > 1:
            grid, chosen = _refine(grid, chosen, dimension, pieces)
        owners = chosen[:, 0]
        self._add_load(owners, _cell_bytes(leaf, grid, len(owners)))
        header = _format.header_bytes_for(_format.header_capacity(leaf))
        return self._number_capped(leaf, header, grid, owners)

    def _held(self, leaf: LeafSpec) -> tuple[tuple[int, ...], npt.NDArray[np.int64]]:
        if leaf.mesh == HOST_LOCAL:
            return (1,) * len(leaf.shape), self._everyone
        # By the number of the mesh: to look thousands of devices up costs more than the rest.
        key = (leaf.mesh, leaf.partition, len(leaf.shape))
        found = self._tables.get(key)
        if found is None:
            mesh, rank = self._meshes[leaf.mesh], len(leaf.shape)
            grid = partition_grid(mesh, leaf.partition, rank)
            found = self._tables[key] = (grid, holders(mesh, leaf.partition, rank))
        return found

    def _number_capped(
        self, leaf: LeafSpec, header: int, grid: tuple[int, ...], owners: npt.NDArray[np.int64]
    ) -> int:
        """Cut cells that exceed the file size cap; their pieces go to further parts."""
        largest = int(_cell_bytes(leaf, grid, len(owners)).max(initial=0))
        limit = max(self._max_file_bytes - header, 1)
        while largest > limit:
            cell_shape = [-(-n // g) for n, g in zip(leaf.shape, grid, strict=True)]
            dimension = next((d for d, n in enumerate(cell_shape) if n > 1), None)
            if dimension is None:
                break
            pieces = min(-(-largest // limit), cell_shape[dimension])
            grid, table = _refine(
                grid, np.repeat(owners.reshape(-1, 1), pieces, axis=1), dimension, pieces
            )
            owners = table[:, 0]
            largest = int(_cell_bytes(leaf, grid, len(owners)).max())
        return self._number(grid, owners)

    def _number(self, grid: tuple[int, ...], owners: npt.NDArray[np.int64]) -> int:
        layout = Layout(grid, tuple(owners.tolist()))
        number = self._numbers.setdefault(layout, len(self.layouts))
        if number == len(self.layouts):
            self.layouts.append(layout)
        return number

    def _add_load(self, owners: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64] | int) -> None:
        np.add.at(self._device_load, owners, nbytes)
        np.add.at(self._process_load, self._process_of[owners], nbytes)


def _first_devices(process_of: Sequence[int]) -> list[int]:
    """The first device of each process, in one pass: there may be thousands of both."""
    first: dict[int, int] = {}
    for device, process in enumerate(process_of):
        first.setdefault(process, device)
    return [first[process] for process in range(max(first) + 1)]


def _dividing_dimension(shape: Sequence[int], grid: Sequence[int], pieces: int) -> int | None:
    """The first dimension along which every cell can be cut into `pieces` equal parts."""
    for dimension, (extent, parts) in enumerate(zip(shape, grid, strict=True)):
        if extent % (parts * pieces) == 0:
            return dimension
    return None


def _refine(
    grid: tuple[int, ...], table: npt.NDArray[np.int64], dimension: int, pieces: int
) -> tuple[tuple[int, ...], npt.NDArray[np.int64]]:
    """Cut each cell into `pieces` along a dimension; column `i` of the table takes piece `i`."""
    spread = np.moveaxis(table.reshape(*grid, pieces), -1, dimension + 1)
    finer = tuple(g * pieces if d == dimension else g for d, g in enumerate(grid))
    return finer, spread.reshape(-1, 1)


def _cell_bytes(leaf: LeafSpec, grid: tuple[int, ...], cells: int) -> npt.NDArray[np.int64]:
    dtype = DTYPES[leaf.dtype]
    if not any(map(mod, leaf.shape, grid)):
        return np.full(cells, dtype.nbytes(prod(leaf.shape) // cells), dtype=np.int64)
    counts = np.ones((), dtype=np.int64)
    for extent, parts in zip(leaf.shape, grid, strict=True):
        cuts = np.arange(parts + 1, dtype=np.int64) * extent // parts
        counts = np.multiply.outer(counts, np.diff(cuts))
    return (counts.reshape(-1) * dtype.bits + 7) // 8


def _assign_parts(
    sharing: _Sharing, max_file_bytes: int
) -> tuple[tuple[StoredLeaf, ...], tuple[FileEntry, ...]]:
    """Number the parts leaf by leaf, the same on all devices, and add up every file."""
    lane = max(sharing.bytes_per_process // LANES_PER_PROCESS, MIN_LANE_BYTES)
    filling = _Filling(sharing.device_count, sharing.layouts, min(lane, max_file_bytes))
    stored = [
        StoredLeaf(leaf, number, filling.add(leaf, number, capacity))
        for leaf, number, capacity in zip(
            sharing.leaves, sharing.layout_of, sharing.capacities, strict=True
        )
    ]
    filling.close_part()
    return tuple(stored), tuple(sorted(filling.files, key=attrgetter("device", "part")))


class _Filling:
    """Fills the files of all devices, leaf by leaf.

    What leaves of one kind add to the files is noted, and added up for all of them at once when
    somebody asks: going over all devices for each leaf would cost most of the time of a plan.
    """

    def __init__(self, devices: int, layouts: Sequence[Layout], target: int):
        self.files: list[FileEntry] = []
        self._layouts = layouts
        self._target = target
        self._data = np.zeros(devices, dtype=np.int64)
        self._headers = np.zeros(devices, dtype=np.int64)
        self._turns_of = [turns_of(layout) for layout in layouts]
        self._kinds: dict[object, _LeafKind] = {}
        self._noted: dict[object, tuple[int, int]] = {}
        """By kind of leaf: how many of this part, and what they need of a header."""
        self._part = 0
        self._bound = 0
        """No file of this part is larger than this."""

    def add(self, leaf: LeafSpec, layout: int, capacity: int) -> int:
        """Put a leaf into the files; returns the part of its first cell on each device."""
        key = (layout, leaf.shape, DTYPES[leaf.dtype].bits)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _leaf_kind(leaf, self._layouts[layout])
        turns = self._turns_of[layout]
        self._bound += kind.largest + capacity
        if turns is not None or self._is_full(kind, capacity):
            self.close_part()
            self._bound = kind.largest + capacity
        part = self._part
        if turns is None:
            count, capacities = self._noted.get(key, (0, 0))
            self._noted[key] = (count + 1, capacities + capacity)
        else:
            self._add_inturns_of(kind, turns, capacity)
        return part

    def close_part(self) -> None:
        """Go on with the next part, unless this one is empty."""
        self._add_noted()
        devices = self._headers.nonzero()[0]
        if not len(devices):
            return
        headers = _format.header_bytes_for(self._headers[devices])
        sizes = headers + self._data[devices]
        rows = zip(devices.tolist(), headers.tolist(), sizes.tolist(), strict=True)
        self.files += [FileEntry(device, self._part, header, size) for device, header, size in rows]
        self._data[:] = 0
        self._headers[:] = 0
        self._part += 1
        self._bound = 0

    def _is_full(self, kind: _LeafKind, capacity: int) -> bool:
        if self._bound + _format.header_bytes_for(0) <= self._target:
            return False
        self._add_noted()
        headers = _format.header_bytes_for(self._headers[kind.owners] + capacity)
        sizes = self._data[kind.owners] + kind.cell_bytes + headers
        return int(sizes.max(initial=0)) > self._target

    def _add_inturns_of(self, kind: _LeafKind, turns: npt.NDArray[np.int64], capacity: int) -> None:
        """Cells that one device has several of go into a part each."""
        for turn in range(int(turns.max()) + 1):
            mine = turns == turn
            self._data[kind.owners[mine]] += kind.cell_bytes[mine]
            self._headers[kind.owners[mine]] += capacity
            self.close_part()

    def _add_noted(self) -> None:
        for key, (count, capacities) in self._noted.items():
            kind = self._kinds[key]
            self._data[kind.owners] += kind.cell_bytes * count
            self._headers[kind.owners] += capacities
        self._noted.clear()


class _LeafKind(NamedTuple):
    """What all leaves of one layout, shape and element size add to the files."""

    owners: npt.NDArray[np.int64]
    cell_bytes: npt.NDArray[np.int64]
    largest: int


def _leaf_kind(leaf: LeafSpec, layout: Layout) -> _LeafKind:
    cell_bytes = _cell_bytes(leaf, layout.grid, len(layout.owners))
    owners = np.asarray(layout.owners, dtype=np.int64)
    return _LeafKind(owners, cell_bytes, int(cell_bytes.max(initial=0)))
