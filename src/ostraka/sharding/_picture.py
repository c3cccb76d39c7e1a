"""Which device holds what, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ostraka._capture import Devices, describe_sharding
from ostraka._document import Leaf, leaves_of
from ostraka._spec import (
    HOST_LOCAL,
    MeshSpec,
    Partition,
    check_partition,
    holders,
    partition_grid,
    show_partition,
)
from ostraka._tree import parse
from ostraka.errors import InvalidSharding
from ostraka.sharding._data import (
    AnyMesh,
    array_leaves,
    has_shape,
    mesh_spec,
    partition_of,
    to_spec,
)

_MOST_CELLS = 16
"""Of a dimension that is cut into more parts, the first and the last ones are drawn."""


def picture(
    shape: Sequence[int],
    spec: Any,
    mesh: AnyMesh,
    *,
    dimensions: tuple[int, int] | None = None,
) -> str:
    """A drawing of an array's parts and the numbers of the devices that hold each.

    Two dimensions are drawn, one down and one across: those of `dimensions`, or the first two that
    are cut. Others that are cut give a drawing for each of their parts.

        >>> print(picture((8, 4), P("data", "model"), {"data": 2, "model": 2}))
        (8, 4) P('data', 'model') on data=2, model=2
              0:2   2:4
            ┌─────┬─────┐
        0:4 │  0  │  1  │
            ├─────┼─────┤
        4:8 │  2  │  3  │
            └─────┴─────┘
    """
    sizes = mesh_spec(mesh)
    partition = partition_of("array", to_spec("array", spec), len(shape))
    return _draw(tuple(shape), partition, sizes, dimensions)


def show(value: Any, *, dimensions: tuple[int, int] | None = None) -> str:
    """How an array, a variable or a whole tree lies over devices, as text to print.

    An array is drawn by `picture`; a tree is a table with a line for each array: path, shape, spec,
    and bytes on each device.
    """
    parsed = parse(value)
    leaves = list(leaves_of(parsed))
    if len(leaves) == 1 and has_shape(leaves[0].value):
        mesh, partition = _lies(leaves[0])
        shape = tuple(leaves[0].value.shape)
        return _draw(shape, partition + ((),) * (len(shape) - len(partition)), mesh, dimensions)
    rows = [("leaf", "shape", "spec", "bytes a device", "mesh")]
    for leaf in array_leaves(parsed):
        mesh, partition = _lies(Leaf(leaf.path, leaf.value))
        parts = prod(partition_grid(mesh, partition, len(leaf.shape)))
        rows.append(
            (
                leaf.path,
                str(leaf.shape),
                show_partition(partition) if mesh.devices != (HOST_LOCAL,) else "host",
                f"{leaf.nbytes // parts:,}",
                str(mesh) if mesh.devices != (HOST_LOCAL,) else "",
            )
        )
    return _table(rows)


def _lies(leaf: Leaf) -> tuple[MeshSpec, Partition]:
    """A leaf's mesh and partition; host memory is a mesh of its own."""
    sharding = getattr(leaf.value, "sharding", None)
    if sharding is None:
        return MeshSpec((), (), (HOST_LOCAL,)), ()
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, jax.sharding.Mesh):
        partition = partition_of(leaf.path, sharding.spec, len(leaf.value.shape))
        return mesh_spec(sharding.mesh), partition
    return describe_sharding(leaf.path, sharding, Devices())


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column == 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _draw(
    shape: tuple[int, ...],
    partition: Partition,
    mesh: MeshSpec,
    dimensions: tuple[int, int] | None,
) -> str:
    check_partition("array", shape, partition, mesh)
    rank = len(shape)
    grid = partition_grid(mesh, partition, rank)
    drawn = _drawn_dimensions(grid, dimensions)
    table = holders(mesh, partition, rank).reshape(*grid, -1)
    others = [d for d in range(rank) if d not in drawn]
    spec = show_partition(partition if any(partition) else ())
    lines = [f"{shape} {spec} on {mesh}"]
    for index in product(*(range(grid[d]) for d in others)):
        place = dict(zip(others, index, strict=True))
        fixed = [f"dimension {d}: {_span(shape, grid, d, i)}" for d, i in place.items()]
        cut = [text for text, d in zip(fixed, place, strict=True) if grid[d] > 1]
        if cut:
            lines += ["", ", ".join(cut)]
        selection = tuple(place.get(d, slice(None)) for d in range(rank))
        cells = table[selection].reshape(*(grid[d] for d in drawn), -1)
        lines += _grid(cells, shape, grid, drawn)
    return "\n".join(lines)


def _drawn_dimensions(grid: tuple[int, ...], chosen: tuple[int, int] | None) -> list[int]:
    rank = len(grid)
    if chosen is not None:
        if len({*chosen}) != 2 or not all(0 <= d < rank for d in chosen):
            raise InvalidSharding(
                f"dimensions is {chosen}; it must be two of the array's {rank} dimensions"
            )
        return sorted(chosen)
    cut = [d for d in range(rank) if grid[d] > 1][:2]
    whole = [d for d in range(rank) if d not in cut]
    return sorted(cut + whole[: 2 - len(cut)])


def _span(shape: tuple[int, ...], grid: tuple[int, ...], dimension: int, part: int) -> str:
    size = shape[dimension] // grid[dimension]
    return f"{part * size}:{(part + 1) * size}"


def _grid(
    cells: np.ndarray[Any, Any],
    shape: tuple[int, ...],
    grid: tuple[int, ...],
    drawn: list[int],
) -> list[str]:
    """One dimension is drawn across, two are drawn down and across."""
    down, across = [None, None, *drawn][-2:]
    rows = [0] if down is None else _some(grid[down])
    columns = [0] if across is None else _some(grid[across])
    holding = cells.reshape(
        1 if down is None else grid[down], 1 if across is None else grid[across], -1
    )
    heads = [_head(shape, grid, across, column) for column in columns]
    labels = [_head(shape, grid, down, row) for row in rows]
    texts = [
        ["…" if None in (row, column) else _numbers(holding[row, column]) for column in columns]
        for row in rows
    ]
    width = max(len(text) for line in [heads, *texts] for text in line) + 2
    margin = max(len(label) for label in labels)
    blank = " " * margin

    def rule(left: str, middle: str, right: str) -> str:
        return f"{blank} {left}{middle.join(['─' * width] * len(columns))}{right}"

    lines = [f"{blank}  {' '.join(head.center(width) for head in heads)}".rstrip()]
    lines.append(rule("┌", "┬", "┐"))
    for number, (label, line) in enumerate(zip(labels, texts, strict=True)):
        if number:
            lines.append(rule("├", "┼", "┤"))
        lines.append(f"{label.rjust(margin)} │{'│'.join(text.center(width) for text in line)}│")
    lines.append(rule("└", "┴", "┘"))
    return [line for line in lines if line.strip()]


def _some(parts: int) -> list[int | None]:
    """The parts to draw; None for those that are left out."""
    if parts <= _MOST_CELLS:
        return list(range(parts))
    half = _MOST_CELLS // 2
    return [*range(half), None, *range(parts - half, parts)]


def _head(
    shape: tuple[int, ...], grid: tuple[int, ...], dimension: int | None, part: int | None
) -> str:
    if dimension is None:
        return ""
    return "…" if part is None else _span(shape, grid, dimension, part)


def _numbers(devices: np.ndarray[Any, Any]) -> str:
    """Device numbers, runs of them as 0–3."""
    if HOST_LOCAL in devices:
        return "host"
    runs: list[list[int]] = []
    for number in sorted(int(device) for device in devices):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]}–{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs[:4]]
    return " ".join(shown) + (" …" if len(runs) > 4 else "")
