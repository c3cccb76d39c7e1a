"""Write plans: plain data, made by pure functions, the same on every process.

A write plan assigns every box of every leaf to a device, and so knows each file's name and size.
If several devices hold a box, one of them writes it, or they split it among them. So all processes
write about the same number of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import attrgetter, mod
from typing import Any

import numpy as np

from ostraka.common.dtypes import DTYPES
from ostraka.layout import shard_file as _format
from ostraka.layout.codec import Codec, CompressRule, codecs_of
from ostraka.layout.runs import decode_runs
from ostraka.layout.shard_file import FileEntry
from ostraka.layout.spec import (
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
"""The most host memory for values from accelerators at one time."""
BAND_BYTES = 64 << 20
"""A larger shard comes from an accelerator in bands of about this size."""
LANES_PER_PROCESS = 4
"""A process with fewer devices splits its shards into parts, to have this many files to write."""
MIN_LANE_BYTES = 64 << 20

_BALANCE_SHARE = 128
"""Boxes below 1/128 of a process's bytes stay whole: to take them in turn keeps the load even."""
_ALWAYS_SPLIT_WAYS = 64
_MIN_SPLIT_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The layout and the part of every leaf, and all files of a save."""

    meshes: tuple[MeshSpec, ...]
    layouts: tuple[Layout, ...]
    leaves: tuple[StoredLeaf, ...]
    files: tuple[FileEntry, ...]
    process_of: tuple[int, ...]
    codecs: Mapping[int, Codec] = field(default_factory=dict[int, Codec])
    """The codecs of compressed leaves, by number. Planned sizes are uncompressed."""
    version: int = _format.VERSION

    def files_of(self, process: int) -> list[FileEntry]:
        return [file for file in self.files if self.process_of[file.device] == process]

    def stored_files(self, sizes: Iterable[Any]) -> tuple[FileEntry, ...]:
        """The files with the sizes that each process wrote, encoded as runs, if any differ."""
        if not self.codecs:
            return self.files
        rest = [iter(decode_runs(of_process)) for of_process in sizes]
        return tuple(
            replace(file, size=next(rest[self.process_of[file.device]])) for file in self.files
        )


_LEAST_FILE_BYTES = 2 * _format.PAGE_BYTES


def check_file_bytes(limit: int) -> None:
    """Raise ValueError for a largest file size that leaves no room for data."""
    if limit < _LEAST_FILE_BYTES:
        raise ValueError(f"max_file_bytes is {limit:,}; it must be at least {_LEAST_FILE_BYTES:,}")


def plan_write(
    leaves: Sequence[LeafSpec],
    meshes: Sequence[MeshSpec],
    process_of: Sequence[int],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    compress: CompressRule = None,
    grids: Mapping[int, tuple[int, ...]] | None = None,
) -> WritePlan:
    """Assign the boxes of all leaves to devices. `process_of` maps device to process.

    `compress` is the rule of `save`. `grids` has, by number, the grids of leaves on no mesh. The
    first device writes those.
    """
    codecs = {} if compress is None else codecs_of(compress, leaves)
    capacities = [
        _format.header_capacity(leaf, codecs[number].name if number in codecs else "")
        for number, leaf in enumerate(leaves)
    ]
    headers = _format.header_bytes_for(np.asarray(capacities, dtype=np.int64)).tolist()
    limits = [max(max_file_bytes - header, 1) for header in headers]
    nbytes = [leaf.nbytes for leaf in leaves]
    bytes_per_process = -(-sum(nbytes) // (max(process_of) + 1))
    whole_limit = max(bytes_per_process // _BALANCE_SHARE, 1)
    processes = np.asarray(process_of, dtype=np.int64)
    layouts, layout_of = _share(leaves, meshes, processes, nbytes, whole_limit, limits, grids or {})
    lane = max(bytes_per_process // LANES_PER_PROCESS, MIN_LANE_BYTES)
    target = min(lane, max_file_bytes)
    parts, files = _fill(leaves, layouts, layout_of, capacities, len(process_of), target)
    return WritePlan(
        meshes=tuple(meshes),
        layouts=layouts,
        leaves=tuple(map(StoredLeaf, leaves, layout_of, parts)),
        files=tuple(sorted(files, key=attrgetter("device", "part"))),
        process_of=tuple(process_of),
        codecs=codecs,
        version=_format.COMPRESSED_VERSION if codecs else _format.VERSION,
    )


def _share(
    leaves: Sequence[LeafSpec],
    meshes: Sequence[MeshSpec],
    process_of: Numbers,
    nbytes: Sequence[int],
    whole_limit: int,
    limits: Sequence[int],
    grids: Mapping[int, tuple[int, ...]],
) -> tuple[tuple[Layout, ...], list[int]]:
    """All layouts, and for each leaf the number of its layout. Keeps the load even.

    First come the leaves that all their holders share evenly, then the others, the largest first.
    `limits` has the size of the largest cell by leaf.
    """
    tables: dict[object, _Held] = {}
    everyone = np.arange(len(process_of)).reshape(1, -1)

    def held(leaf: LeafSpec) -> _Held:
        """The grid of a leaf, and for each of its cells the devices that hold it."""
        rank = len(leaf.shape)
        if leaf.mesh == HOST_LOCAL:
            return (1,) * rank, everyone
        # By the number of the mesh: to look thousands of devices up costs more than the rest.
        key = (leaf.mesh, leaf.partition, rank)
        if key not in tables:
            mesh = meshes[leaf.mesh]
            grid = partition_grid(mesh, leaf.partition, rank)
            tables[key] = (grid, holders(mesh, leaf.partition, rank))
        return tables[key]

    numbers: dict[Layout, int] = {}
    layout_of: list[int] = []
    by_kind: dict[object, int] = {}
    counts: Counter[tuple[int, int]] = Counter()
    for at, leaf in enumerate(leaves):
        bits, grid = DTYPES[leaf.dtype].bits, grids.get(at)
        kind = (leaf.mesh, leaf.partition, leaf.shape, leaf.per_process, bits, limits[at], grid)
        number = by_kind.get(kind)
        if number is None:
            if grid is not None:
                cut = (grid, np.zeros(prod(grid), dtype=np.int64))
            elif leaf.per_process:
                firsts = np.unique(process_of, return_index=True)[1]  # each one's first device
                cut = (len(firsts), *[1] * (len(leaf.shape) - 1)), firsts
            else:
                cut = _cut_evenly(leaf, *held(leaf), whole_limit)
            number = -1
            if cut is not None:
                number = numbers.setdefault(_capped(leaf, *cut, limits[at]), len(numbers))
            by_kind[kind] = number
        layout_of.append(number)
        counts[number, nbytes[at]] += 1
    layouts = list(numbers)
    device_load = np.zeros(len(process_of), dtype=np.int64)
    process_load = np.zeros(process_of.max() + 1, dtype=np.int64)
    for (number, leaf_bytes), count in counts.items():
        if number >= 0:
            owners = np.asarray(layouts[number].owners, dtype=np.int64)
            np.add.at(device_load, owners, leaf_bytes // len(owners) * count)
            np.add.at(process_load, process_of[owners], leaf_bytes // len(owners) * count)
    uneven = [at for at, number in enumerate(layout_of) if number < 0]
    for at in sorted(uneven, key=lambda at: -nbytes[at]):
        leaf, (grid, table) = leaves[at], held(leaves[at])
        load = (device_load[table], process_load[process_of[table]])
        grid, owners = _cut_for_idlest(leaf, grid, table, load, whole_limit)
        cell_bytes = _cell_bytes(leaf, grid, len(owners))
        np.add.at(device_load, owners, cell_bytes)
        np.add.at(process_load, process_of[owners], cell_bytes)
        layout = _capped(leaf, grid, owners, limits[at])
        layout_of[at] = numbers.setdefault(layout, len(numbers))
    return tuple(numbers), layout_of


def _cut_evenly(
    leaf: LeafSpec, grid: tuple[int, ...], table: Numbers, whole_limit: int
) -> _Held | None:
    """The grid and owners with which every holder writes the same amount, or None."""
    cells, copies = table.shape
    cell_bytes = leaf.nbytes // cells
    if cell_bytes == 0:
        return None
    if copies > 1:
        tiny = cell_bytes // copies < _MIN_SPLIT_BYTES and copies > _ALWAYS_SPLIT_WAYS
        # The first dimension along which every cell can be cut into equal parts.
        cuttable = (d for d, n in enumerate(leaf.shape) if n % (grid[d] * copies) == 0)
        dimension = next(cuttable, None)
        if cell_bytes <= whole_limit or tiny or dimension is None:
            return None
        return _refine(grid, table, dimension, copies)
    return grid, table[:, 0]


def _cut_for_idlest(
    leaf: LeafSpec,
    grid: tuple[int, ...],
    table: Numbers,
    load: tuple[Numbers, Numbers],
    whole_limit: int,
) -> _Held:
    """Split each cell only as far as balance needs. The idlest holders take the pieces.

    `load` has the bytes of each device in the table, and those of its process.
    """
    if leaf.nbytes == 0:
        grid, table = (1,) * len(leaf.shape), table[:1]
    cells, copies = table.shape
    cell_shape = [n // g for n, g in zip(leaf.shape, grid, strict=True)]
    dimension = max(range(len(grid)), key=lambda d: (cell_shape[d], -d), default=0)
    wanted = -(-(leaf.nbytes // cells) // whole_limit)
    pieces = max(1, min(copies, wanted, max(cell_shape, default=1)))
    idlest = np.lexsort(load, axis=-1)[:cells, :pieces]
    chosen = np.take_along_axis(table, idlest, axis=1)
    return _refine(grid, chosen, dimension, pieces) if pieces > 1 else (grid, chosen[:, 0])


def _capped(leaf: LeafSpec, grid: tuple[int, ...], owners: Numbers, limit: int) -> Layout:
    """The layout, with cells above the limit split. Their pieces go to further parts."""
    while (largest := int(_cell_bytes(leaf, grid, len(owners)).max(initial=0))) > limit:
        cell_shape = [-(-n // g) for n, g in zip(leaf.shape, grid, strict=True)]
        dimension = next((d for d, n in enumerate(cell_shape) if n > 1), None)
        if dimension is None:
            break
        pieces = min(-(-largest // limit), cell_shape[dimension])
        grid, owners = _refine(grid, np.repeat(owners, pieces), dimension, pieces)
    return Layout(grid, tuple(owners.tolist()))


def _refine(grid: tuple[int, ...], table: Numbers, dimension: int, pieces: int) -> _Held:
    """Split each cell into `pieces` along a dimension. Column `i` of the table takes piece `i`."""
    spread = np.moveaxis(table.reshape(*grid, pieces), -1, dimension + 1)
    finer = tuple(g * pieces if d == dimension else g for d, g in enumerate(grid))
    return finer, spread.reshape(-1)


def _cell_bytes(leaf: LeafSpec, grid: tuple[int, ...], cells: int) -> Numbers:
    bits = DTYPES[leaf.dtype].bits
    if not any(map(mod, leaf.shape, grid)):
        return np.full(cells, (prod(leaf.shape) // cells * bits + 7) // 8, dtype=np.int64)
    counts = np.ones((), dtype=np.int64)
    for extent, parts in zip(leaf.shape, grid, strict=True):
        cuts = np.arange(parts + 1, dtype=np.int64) * extent // parts
        counts = np.multiply.outer(counts, np.diff(cuts))
    return (counts.reshape(-1) * bits + 7) // 8


def _fill(
    leaves: Sequence[LeafSpec],
    layouts: Sequence[Layout],
    layout_of: Sequence[int],
    capacities: Sequence[int],
    devices: int,
    target: int,
) -> tuple[list[int], list[FileEntry]]:
    """The part of each leaf's first cell, the same on all devices, and all files.

    Leaves of one kind are counted first, and added to the files together: going over all devices
    for each leaf would cost most of the time of a plan.
    """
    parts: list[int] = []
    files: list[FileEntry] = []
    data = np.zeros(devices, dtype=np.int64)
    headers = np.zeros(devices, dtype=np.int64)
    turns_by_layout = [turns_of(layout) for layout in layouts]
    # By layout, shape and element size: owners, bytes of each cell, and the most of these.
    kinds: dict[object, tuple[Numbers, Numbers, int]] = {}
    # By kind: the leaves of this part, and their bytes in a header.
    counted: dict[object, tuple[int, int]] = {}
    frame_bytes = _format.header_bytes_for(0)
    part = bound = 0  # No file of this part has more than `bound` bytes and a header's frame.

    def add_counted() -> None:
        for key, (count, capacity) in counted.items():
            owners, cell_bytes, _ = kinds[key]
            data[owners] += cell_bytes * count
            headers[owners] += capacity
        counted.clear()

    def close_part() -> None:
        """Begin the next part, unless this one is empty."""
        nonlocal part
        add_counted()
        used = headers.nonzero()[0]
        header_bytes = _format.header_bytes_for(headers[used])
        sizes = header_bytes + data[used]
        rows = zip(used.tolist(), header_bytes.tolist(), sizes.tolist(), strict=True)
        files.extend([FileEntry(device, part, header, size) for device, header, size in rows])
        data[:] = headers[:] = 0
        part += len(used) > 0

    for leaf, number, capacity in zip(leaves, layout_of, capacities, strict=True):
        key = (number, leaf.shape, DTYPES[leaf.dtype].bits)
        if key not in kinds:
            owners = np.asarray(layouts[number].owners, dtype=np.int64)
            cell_bytes = _cell_bytes(leaf, layouts[number].grid, len(owners))
            kinds[key] = (owners, cell_bytes, int(cell_bytes.max(initial=0)))
        owners, cell_bytes, largest = kinds[key]
        turns = turns_by_layout[number]
        bound += largest + capacity
        is_full = turns is not None
        if not is_full and bound + frame_bytes > target:
            add_counted()
            header_bytes = _format.header_bytes_for(headers[owners] + capacity)
            is_full = int((data[owners] + cell_bytes + header_bytes).max(initial=0)) > target
        if is_full:
            close_part()
            bound = largest + capacity
        parts.append(part)
        if turns is None:
            count, so_far = counted.get(key, (0, 0))
            counted[key] = (count + 1, so_far + capacity)
            continue
        # Cells that one device has several of go into a part each.
        for turn in range(int(turns.max()) + 1):
            mine = turns == turn
            data[owners[mine]] += cell_bytes[mine]
            headers[owners[mine]] += capacity
            close_part()
        bound = 0
    close_part()
    return parts, files
