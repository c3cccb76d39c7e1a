"""Which device holds what, as text."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding

from ostraka._capture import Devices, describe_sharding
from ostraka._nodes import Leaf, leaves_of
from ostraka._spec import (
    HOST_LOCAL,
    MeshSpec,
    Partition,
    partition_grid,
    show_partition,
)
from ostraka._tree import parse
from ostraka.sharding._data import array_leaves, has_shape, partition_of, to_spec
from ostraka.sharding._drawing import draw
from ostraka.sharding._mesh import AnyMesh, mesh_spec, refuse_swapped


def picture(
    shape: Sequence[int],
    mesh: AnyMesh,
    spec: Any,
    *,
    dimensions: tuple[int, int] | None = None,
) -> str:
    """A drawing of an array's parts and the numbers of the devices that hold each.

    Two dimensions are drawn, one down and one across: those of `dimensions`, or the first two that
    are cut. Others that are cut give a drawing for each of their parts.

        >>> print(picture((8, 4), {"data": 2, "model": 2}, P("data", "model")))
        (8, 4) P('data', 'model') on data=2, model=2
              0:2   2:4
            ┌─────┬─────┐
        0:4 │  0  │  1  │
            ├─────┼─────┤
        4:8 │  2  │  3  │
            └─────┴─────┘
    """
    refuse_swapped("picture(shape, mesh, spec)", spec)
    sizes = mesh_spec(mesh)
    partition = partition_of("array", to_spec("array", spec), len(shape))
    return draw(tuple(shape), sizes, partition, dimensions=dimensions)


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
        whole = ((),) * (len(shape) - len(partition))
        return draw(shape, mesh, partition + whole, dimensions=dimensions)
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
