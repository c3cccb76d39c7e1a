"""Write plans: plain data, made by pure functions, the same on every process.

A write plan says which device writes which box of which leaf, and so every file's name and size.
A box that several devices hold is written by one of them, or split among them, so that all
processes write about the same number of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter, mod
from typing import Any, NamedTuple

import numpy as np

from ostraka import _format, _header
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

Numbers = np.ndarray[Any, np.dtype[np.int64]]
_Held = tuple[tuple[int, ...], Numbers]

MAX_FILE_BYTES = 4 << 30
STAGING_BYTES = 256 << 20
"""How much of what is on accelerators a save holds in host memory at one time."""
BAND_BYTES = 64 << 20
"""A larger shard comes from an accelerator in bands of about this size."""
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
    compressed: frozenset[int] = frozenset()
    """The leaves that are to be compressed. Sizes of files are those without."""
    version: int = _format.VERSION

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
    compressed: Iterable[int] = (),
    grids: Mapping[int, tuple[int, ...]] | None = None,
) -> WritePlan:
    """Share the boxes of all leaves out over the devices; `process_of` maps device to process.

    `compressed` are the numbers of leaves whose boxes may be compressed. `grids` has, by number,
    how leaves on no mesh are cut in any case; the first device writes them.
    """
    numbers = frozenset(compressed)
    sharing = _Sharing(leaves, meshes, process_of, max_file_bytes, numbers, grids or {})
    stored, files = _assign_parts(sharing, max_file_bytes)
    return WritePlan(
        meshes=tuple(meshes),
        layouts=sharing.layouts,
        leaves=stored,
        files=files,
        process_of=tuple(process_of),
        compressed=numbers,
        version=_format.COMPRESSED_VERSION if numbers else _format.VERSION,
    )


class _Sharing:
    """Works out the layout of every leaf, keeping the load of devices and processes even."""

    def __init__(
        self,
        leaves: Sequence[LeafSpec],
        meshes: Sequence[MeshSpec],
        process_of: Sequence[int],
        max_file_bytes: int,
        compressed: frozenset[int],
        grids: Mapping[int, tuple[int, ...]],
    ):
        self.leaves = leaves
        self.device_count = len(process_of)
        self._meshes = meshes
        self._process_of = np.asarray(process_of, dtype=np.int64)
        self._process_count = int(self._process_of.max()) + 1
        self._everyone = np.arange(self.device_count).reshape(1, -1)
        self._device_load = np.zeros(self.device_count, dtype=np.int64)
        self._process_load = np.zeros(self._process_count, dtype=np.int64)
        self._max_file_bytes = max_file_bytes
        self._grids = grids
        self._numbers: dict[Layout, int] = {}
        self._tables: dict[object, _Held] = {}
        nbytes = [leaf.nbytes for leaf in leaves]
        self.bytes_per_process = -(-sum(nbytes) // self._process_count)
        self._whole_limit = max(self.bytes_per_process // _BALANCE_SHARE, 1)
        self.capacities = [
            _header.header_capacity(leaf, compressed=number in compressed)
            for number, leaf in enumerate(leaves)
        ]
        """By leaf, what one box of it adds to a header."""
        self.layout_of = self._share_evenly()
        uneven = [number for number, layout in enumerate(self.layout_of) if layout < 0]
        for number in sorted(uneven, key=lambda n: (-nbytes[n], n)):
            self.layout_of[number] = self._share_to_idlest(leaves[number], self.capacities[number])
        self.layouts = tuple(self._numbers)

    def _share_evenly(self) -> list[int]:
        """By leaf, the layout where every holder writes the same amount, or -1 if there is none."""
        layout_of: list[int] = []
        by_kind: dict[object, int] = {}
        counts: Counter[tuple[int, int]] = Counter()
        for at, (leaf, capacity) in enumerate(zip(self.leaves, self.capacities, strict=True)):
            header = _header.header_bytes_for(capacity)
            bits = DTYPES[leaf.dtype].bits
            grid = self._grids.get(at)
            kind = (leaf.mesh, leaf.partition, leaf.shape, leaf.per_process, bits, header, grid)
            number = by_kind.get(kind)
            if number is None and grid is not None:
                owners = np.zeros(prod(grid), dtype=np.int64)
                number = by_kind[kind] = self._number(leaf, capacity, grid, owners)
            elif number is None:
                number = by_kind[kind] = self._even_layout(leaf, capacity)
            layout_of.append(number)
            if number >= 0:
                counts[number, leaf.nbytes] += 1
        layouts = list(self._numbers)
        for (number, nbytes), count in counts.items():
            owners = np.asarray(layouts[number].owners, dtype=np.int64)
            self._add_load(owners, nbytes // len(owners) * count)
        return layout_of

    def _even_layout(self, leaf: LeafSpec, capacity: int) -> int:
        if leaf.per_process:
            grid = (self._process_count, *[1] * (len(leaf.shape) - 1))
            first = np.unique(self._process_of, return_index=True)[1]  # each one's first device
            return self._number(leaf, capacity, grid, first)
        grid, table = self._held(leaf)
        cells, copies = table.shape
        cell_bytes = leaf.nbytes // cells
        if cell_bytes == 0:
            return -1
        if copies > 1:
            tiny = cell_bytes // copies < _MIN_SPLIT_BYTES and copies > _ALWAYS_SPLIT_WAYS
            # The first dimension along which every cell can be cut into equal parts.
            cuttable = (d for d, n in enumerate(leaf.shape) if n % (grid[d] * copies) == 0)
            dimension = next(cuttable, None)
            if cell_bytes <= self._whole_limit or tiny or dimension is None:
                return -1
            grid, table = _refine(grid, table, dimension, copies)
        return self._number(leaf, capacity, grid, table[:, 0])

    def _share_to_idlest(self, leaf: LeafSpec, capacity: int) -> int:
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
        return self._number(leaf, capacity, grid, owners)

    def _held(self, leaf: LeafSpec) -> _Held:
        """The grid that a leaf lies in, and for each of its cells the devices that hold it."""
        rank = len(leaf.shape)
        if leaf.mesh == HOST_LOCAL:
            return (1,) * rank, self._everyone
        # By the number of the mesh: to look thousands of devices up costs more than the rest.
        key = (leaf.mesh, leaf.partition, rank)
        if key not in self._tables:
            mesh = self._meshes[leaf.mesh]
            grid = partition_grid(mesh, leaf.partition, rank)
            self._tables[key] = (grid, holders(mesh, leaf.partition, rank))
        return self._tables[key]

    def _number(self, leaf: LeafSpec, capacity: int, grid: tuple[int, ...], owners: Numbers) -> int:
        """The number of a layout; cells that exceed the file size cap are cut.

        Their pieces go to further parts.
        """
        limit = max(self._max_file_bytes - _header.header_bytes_for(capacity), 1)
        while (largest := int(_cell_bytes(leaf, grid, len(owners)).max(initial=0))) > limit:
            cell_shape = [-(-n // g) for n, g in zip(leaf.shape, grid, strict=True)]
            dimension = next((d for d, n in enumerate(cell_shape) if n > 1), None)
            if dimension is None:
                break
            pieces = min(-(-largest // limit), cell_shape[dimension])
            table = np.repeat(owners.reshape(-1, 1), pieces, axis=1)
            grid, table = _refine(grid, table, dimension, pieces)
            owners = table[:, 0]
        return self._numbers.setdefault(Layout(grid, tuple(owners.tolist())), len(self._numbers))

    def _add_load(self, owners: Numbers, nbytes: Numbers | int) -> None:
        np.add.at(self._device_load, owners, nbytes)
        np.add.at(self._process_load, self._process_of[owners], nbytes)


def _refine(
    grid: tuple[int, ...], table: Numbers, dimension: int, pieces: int
) -> tuple[tuple[int, ...], Numbers]:
    """Cut each cell into `pieces` along a dimension; column `i` of the table takes piece `i`."""
    spread = np.moveaxis(table.reshape(*grid, pieces), -1, dimension + 1)
    finer = tuple(g * pieces if d == dimension else g for d, g in enumerate(grid))
    return finer, spread.reshape(-1, 1)


def _cell_bytes(leaf: LeafSpec, grid: tuple[int, ...], cells: int) -> Numbers:
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
    stored = tuple(
        StoredLeaf(leaf, number, filling.add(leaf, number, capacity))
        for leaf, number, capacity in zip(
            sharing.leaves, sharing.layout_of, sharing.capacities, strict=True
        )
    )
    filling.close_part()
    return stored, tuple(sorted(filling.files, key=attrgetter("device", "part")))


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
            owners, grid = self._layouts[layout].owners, self._layouts[layout].grid
            cell_bytes = _cell_bytes(leaf, grid, len(owners))
            kind = self._kinds[key] = _LeafKind(
                np.asarray(owners, dtype=np.int64), cell_bytes, int(cell_bytes.max(initial=0))
            )
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
            self._add_in_turns(kind, turns, capacity)
        return part

    def close_part(self) -> None:
        """Go on with the next part, unless this one is empty."""
        self._add_noted()
        devices = self._headers.nonzero()[0]
        if not len(devices):
            return
        headers = _header.header_bytes_for(self._headers[devices])
        sizes = headers + self._data[devices]
        rows = zip(devices.tolist(), headers.tolist(), sizes.tolist(), strict=True)
        self.files += [FileEntry(device, self._part, header, size) for device, header, size in rows]
        self._data[:] = 0
        self._headers[:] = 0
        self._part += 1
        self._bound = 0

    def _is_full(self, kind: _LeafKind, capacity: int) -> bool:
        if self._bound + _header.header_bytes_for(0) <= self._target:
            return False
        self._add_noted()
        headers = _header.header_bytes_for(self._headers[kind.owners] + capacity)
        sizes = self._data[kind.owners] + kind.cell_bytes + headers
        return int(sizes.max(initial=0)) > self._target

    def _add_in_turns(self, kind: _LeafKind, turns: Numbers, capacity: int) -> None:
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

    owners: Numbers
    cell_bytes: Numbers
    largest: int
