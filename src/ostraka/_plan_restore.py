"""What a process needs for a restore, and in which order its arrays are made. Pure.

A restore runs this plan on its own process, and `ostraka plan` works it out for any other. The
order is the same on all processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from ostraka import _box, _spec
from ostraka._box import Box
from ostraka._format import alignment_of
from ostraka._spec import Layout, LeafSpec, MeshSpec, StoredLeaf


def needed_boxes(
    leaf: LeafSpec, mesh: MeshSpec | None, devices: Collection[int], process: int
) -> tuple[Box, ...]:
    """The boxes of a leaf that a process needs, each once.

    The leaf is cut over `mesh` as its partition says, and `devices` are those of the process; None
    stands for host memory, which needs all of it. Of a leaf with a value for each process it is the
    process's own.
    """
    if leaf.per_process:
        value = replace(leaf, shape=leaf.own_shape, per_process=False)
        own = (process, process + 1)
        return tuple((own, *box) for box in needed_boxes(value, mesh, devices, process))
    if mesh is None:
        return (_box.full(leaf.shape),)
    import numpy as np

    rank = len(leaf.shape)
    table = _spec.holders(mesh, leaf.partition, rank)
    cells = np.flatnonzero(np.isin(table, list(devices)).any(axis=1))
    grid = _spec.partition_grid(mesh, leaf.partition, rank)
    return tuple(_box.cell(leaf.shape, grid, int(cell)) for cell in cells)


def reading_order(leaves: Sequence[StoredLeaf], layouts: Sequence[Layout]) -> list[int]:
    """The numbers of all leaves, in the order in which a reader comes to them.

    Files are read side by side from their beginnings, so a leaf's turn is where it lies in its
    file. In a file, boxes of a larger alignment come first.
    """
    sizes: dict[object, int] = {}
    in_file: list[tuple[int, int, int]] = []
    for number, leaf in enumerate(leaves):
        key = (leaf.layout, leaf.spec.shape, leaf.spec.dtype)
        nbytes = sizes.get(key)
        if nbytes is None:
            nbytes = sizes[key] = _spec.largest_cell_bytes(leaf.spec, layouts[leaf.layout].grid)
        in_file.append((-alignment_of(nbytes), number, nbytes))
    offsets = [0] * len(leaves)
    ends: Counter[int] = Counter()
    """By part, where it ends so far."""
    for _, number, nbytes in sorted(in_file):
        offsets[number] = ends[leaves[number].part]
        ends[leaves[number].part] += nbytes
    return sorted(range(len(leaves)), key=lambda number: (offsets[number], number))
