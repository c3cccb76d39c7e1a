"""Drawings of an array's parts and their devices. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice, product
from math import prod
from typing import TYPE_CHECKING, Any

from ostraka.errors import InvalidSharding
from ostraka.layout.spec import (
    HOST_LOCAL,
    MeshSpec,
    Partition,
    check_partition,
    holders,
    partition_grid,
    show_partition,
)

if TYPE_CHECKING:
    import numpy as np

_MOST_CELLS = 16
"""If a dimension has more parts, only the first and the last ones are drawn."""


def draw(
    shape: tuple[int, ...],
    mesh: MeshSpec,
    partition: Partition,
    *,
    dimensions: tuple[int, int] | None = None,
    most: int | None = None,
) -> str:
    """Draw the parts of an array, with the numbers of the devices that hold each.

    Two dimensions are drawn, one down and one across: those of `dimensions`, or the first two that
    are sharded. If more are sharded, there is a drawing for each of their parts, `most` in all.
    """
    check_partition("array", shape, mesh, partition)
    rank = len(shape)
    grid = partition_grid(mesh, partition, rank)
    drawn = _drawn_dimensions(grid, dimensions)
    table = holders(mesh, partition, rank).reshape(*grid, -1)
    others = [d for d in range(rank) if d not in drawn]
    spans = [
        [f"{part * size // parts}:{(part + 1) * size // parts}" for part in range(parts)]
        for size, parts in zip(shape, grid, strict=True)
    ]
    spec = show_partition(partition if any(partition) else ())
    lines = [f"{shape} {spec} on {mesh}"]
    for index in islice(product(*(range(grid[d]) for d in others)), most):
        place = dict(zip(others, index, strict=True))
        cut = [f"dimension {d}: {spans[d][i]}" for d, i in place.items() if grid[d] > 1]
        if cut:
            lines += ["", ", ".join(cut)]
        selection = tuple(place.get(d, slice(None)) for d in range(rank))
        cells = table[selection].reshape(*(grid[d] for d in drawn), -1)
        lines += _grid(cells, [spans[d] for d in drawn])
    drawings = prod(grid[d] for d in others)
    if most is not None and drawings > most:
        lines += ["", f"… and {drawings - most:,} more like these"]
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


def _grid(cells: np.ndarray[Any, Any], spans: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of one drawing. One dimension is drawn across, two down and across."""
    down, across = [[""], [""], *spans][-2:]
    rows, columns = _some(len(down)), _some(len(across))
    holding = cells.reshape(len(down), len(across), -1)
    heads = ["…" if column is None else across[column] for column in columns]
    labels = ["…" if row is None else down[row] for row in rows]
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
    """Return the parts to draw, with None for those that are left out."""
    if parts <= _MOST_CELLS:
        return list(range(parts))
    half = _MOST_CELLS // 2
    return [*range(half), None, *range(parts - half, parts)]


def _numbers(devices: np.ndarray[Any, Any]) -> str:
    """Return device numbers, with runs of them as 0–3."""
    if HOST_LOCAL in devices:
        return "host"
    # In a run, each number is as far from its position as the others.
    pairs = enumerate(sorted(map(int, devices)))
    groups = groupby(pairs, lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    shown = [f"{run[0]}–{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs[:4]]
    return " ".join(shown) + (" …" if len(runs) > 4 else "")
