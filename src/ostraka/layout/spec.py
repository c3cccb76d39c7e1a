"""Leaves, dtypes, meshes and specs as plain data, and which box each device holds. No JAX.

A sharding is a grid: each dimension is cut into as many parts as its mesh axes have devices, and
each device holds one cell of that grid. The cells do not depend on the leaf's shape, so a few
grids serve all leaves of a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from ostraka.common.dtypes import DTYPES
from ostraka.errors import InvalidSharding
from ostraka.layout import box as _box

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Partition = tuple[tuple[str, ...], ...]
"""For each dimension, the mesh axes it is cut along. No axes means whole."""

LeafKind = Literal["jax", "key", "numpy", "scalar"]
"""The type of a saved value: jax.Array, typed PRNG key, numpy array, numpy scalar."""

HOST_LOCAL = -1
"""Instead of a mesh: the value lives in the memory of every process alike."""


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """A mesh as data: axis names, sizes, and the device numbers in row-major order.

    A device number is the device's place in the run's device list, not JAX's id for it. One device
    without axes is how a single-device sharding is written.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    devices: tuple[int, ...]
    axis_types: tuple[str, ...] = ()
    """How JAX treats each axis ("auto", "explicit", "manual"). None given means all auto."""

    def size_of(self, axes: Sequence[str]) -> int:
        sizes = dict(zip(self.axis_names, self.axis_sizes, strict=True))
        return prod(sizes[axis] for axis in axes)

    def __str__(self) -> str:
        axes = zip(self.axis_names, self.axis_sizes, strict=True)
        return ", ".join(f"{name}={size}" for name, size in axes) or "one device"


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array of the tree: what it is and how it lay over the devices."""

    path: str
    kind: LeafKind
    dtype: str
    shape: tuple[int, ...]
    """The global shape of what is stored: key data for keys, with the process dimension first
    where `per_process`."""
    mesh: int = HOST_LOCAL
    """Index into the checkpoint's meshes."""
    partition: Partition = ()
    prng: str | None = None
    cast_from: str | None = None
    """The dtype that it had before the save, if it was saved as another."""
    per_process: bool = False
    """True if every process had a value of its own: dimension 0 is then the process."""
    uncommitted: bool = False
    """True if JAX was free to move it to another device."""
    weak: bool = False
    """True if its dtype was weak, as that of an array made of a Python number is."""
    memory: str | None = None
    """The kind of memory that it was in, if not the default one of its device."""

    @property
    def nbytes(self) -> int:
        return (prod(self.shape) * DTYPES[self.dtype].bits + 7) // 8

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of what one process has: `shape` without the process dimension."""
        return self.shape[1:] if self.per_process else self.shape

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape that users and specs know: `own_shape`, of PRNG keys without their words."""
        return self.own_shape[:-1] if self.kind == "key" else self.own_shape


@dataclass(frozen=True, slots=True)
class Layout:
    """Which device number writes each cell (row-major) of a grid."""

    grid: tuple[int, ...]
    owners: tuple[int, ...]

    def cells_by_owner(self, wanted: Collection[int] | None = None) -> dict[int, list[int]]:
        """The cells of each owner, or of those that are wanted."""
        cells: dict[int, list[int]] = {}
        for number, owner in enumerate(self.owners):
            if wanted is None or owner in wanted:
                cells.setdefault(owner, []).append(number)
        return cells


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf with its layout. The j-th cell of one device (row-major) lies in part `part + j`."""

    spec: LeafSpec
    layout: int
    part: int


class Target(NamedTuple):
    """A box of a leaf that is wanted in memory."""

    leaf: int
    box: _box.Box
    dtype: str | None = None
    """The dtype to cast it to, or None for the saved one."""


def largest_cell_bytes(leaf: LeafSpec, grid: Sequence[int]) -> int:
    """The bytes of the largest cell of a leaf that is cut into `grid`."""
    cell = (-(-extent // parts) for extent, parts in zip(leaf.shape, grid, strict=True))
    return DTYPES[leaf.dtype].nbytes(prod(cell))


def turns_of(layout: Layout) -> npt.NDArray[np.int64] | None:
    """For each cell, how many cells of the same device come before it, or None if none do."""
    import numpy as np

    if len(set(layout.owners)) == len(layout.owners):
        return None
    turns = np.zeros(len(layout.owners), dtype=np.int64)
    for mine in layout.cells_by_owner().values():
        turns[mine] = np.arange(len(mine))
    return turns


def partition_grid(mesh: MeshSpec, partition: Partition, rank: int) -> tuple[int, ...]:
    """Into how many parts each dimension is cut."""
    cuts = list(map(mesh.size_of, partition))
    return tuple(cuts + [1] * (rank - len(cuts)))


@lru_cache(maxsize=512)
def holders(mesh: MeshSpec, partition: Partition, rank: int) -> npt.NDArray[np.int64]:
    """For each cell of the grid (row-major), the device numbers that hold it, in mesh order."""
    import numpy as np

    grid = partition_grid(mesh, partition, rank)
    coordinates = np.indices(mesh.axis_sizes).reshape(len(mesh.axis_sizes), len(mesh.devices))
    axis_of = {name: i for i, name in enumerate(mesh.axis_names)}
    cells = np.zeros(len(mesh.devices), dtype=np.int64)
    for dimension, parts in enumerate(grid):
        index = np.zeros_like(cells)
        for axis in partition[dimension] if dimension < len(partition) else ():
            index = index * mesh.axis_sizes[axis_of[axis]] + coordinates[axis_of[axis]]
        cells = cells * parts + index
    order = np.argsort(cells, kind="stable")
    return np.asarray(mesh.devices, dtype=np.int64)[order].reshape(prod(grid), -1)


def needed_boxes(
    leaf: LeafSpec, mesh: MeshSpec | None, devices: Collection[int], process: int
) -> tuple[_box.Box, ...]:
    """The boxes of a leaf that a process needs, each once.

    The leaf is sharded over `mesh` by its partition. `devices` are the devices of the process. A
    `mesh` of None stands for host memory, which needs the whole leaf. If each process has a value
    of its own, the process needs that value.
    """
    if leaf.per_process:
        value = replace(leaf, shape=leaf.own_shape, per_process=False)
        own = (process, process + 1)
        return tuple((own, *box) for box in needed_boxes(value, mesh, devices, process))
    if mesh is None:
        return (_box.full(leaf.shape),)
    import numpy as np

    rank = len(leaf.shape)
    table = holders(mesh, leaf.partition, rank)
    cells = np.flatnonzero(np.isin(table, list(devices)).any(axis=1))
    grid = partition_grid(mesh, leaf.partition, rank)
    return tuple(_box.cell(leaf.shape, grid, int(cell)) for cell in cells)


def check_partition(path: str, shape: Sequence[int], mesh: MeshSpec, partition: Partition) -> None:
    """Raise InvalidSharding, naming leaf, dimension, axis and sizes, where a spec does not fit."""
    for misfit in iter_misfits(path, shape, mesh, partition):
        raise InvalidSharding(misfit.message)


class Misfit(NamedTuple):
    """One way in which a spec does not fit its leaf or its mesh."""

    message: str
    nearest_size: int | None = None
    """The nearest size that divides, for a dimension that does not."""
    missing_axis: str | None = None
    """The axis of the spec that the mesh does not have."""


def iter_misfits(
    path: str, shape: Sequence[int], mesh: MeshSpec, partition: Partition
) -> Iterator[Misfit]:
    """Every way in which a spec does not fit its leaf or its mesh.

    They come one by one: each message has all of the spec in it, and may be long.
    """
    if len(partition) > len(shape):
        yield Misfit(
            f"leaf {path!r} has {len(shape)} dimensions {tuple(shape)}, but its spec "
            f"{show_partition(partition)} has {len(partition)} entries"
        )
    seen: set[str] = set()
    for dimension, axes in enumerate(partition):
        where = f"leaf {path!r}, dimension {dimension}"
        for axis in axes:
            if axis not in mesh.axis_names:
                message = f"{where}: the mesh ({mesh}) has no axis {axis!r}"
                yield Misfit(message, missing_axis=axis)
            if axis in seen:
                yield Misfit(f"{where}: axis {axis!r} is used twice in {show_partition(partition)}")
            seen.add(axis)
        if dimension < len(shape) and {*axes} <= {*mesh.axis_names}:
            size, parts = shape[dimension], mesh.size_of(axes)
            if size % parts:
                message = (
                    f"{where}: {size} elements do not divide into {parts} parts along "
                    f"{' × '.join(axes)} of the mesh ({mesh})"
                )
                # The nearest size above 0 that divides, the larger one if two are equally near.
                below = size // parts * parts
                is_nearest = below and size - below < below + parts - size
                yield Misfit(message, below if is_nearest else below + parts)


def show_partition(partition: Partition) -> str:
    """A spec the way JAX prints it."""
    entries = [axes if len(axes) > 1 else axes[0] if axes else None for axes in partition]
    return f"P({', '.join(map(repr, entries))})"


def device_boxes(shape: Sequence[int], mesh: MeshSpec, partition: Partition) -> dict[int, _box.Box]:
    """The box that each device of the mesh holds."""
    grid = partition_grid(mesh, partition, len(shape))
    found: dict[int, _box.Box] = {}
    for number, row in enumerate(holders(mesh, partition, len(shape)).tolist()):
        found |= dict.fromkeys(row, _box.cell(shape, grid, number))
    return found
