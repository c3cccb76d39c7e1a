"""How arrays lie over devices, as text to print."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding

from ostraka.layout.spec import (
    HOST_LOCAL,
    MeshSpec,
    Partition,
    partition_grid,
    show_partition,
)
from ostraka.live.parse import parse
from ostraka.live.shardings import Devices, describe_sharding
from ostraka.sharding.drawing import draw
from ostraka.sharding.leaves import every_dimension
from ostraka.sharding.mesh import AnyMesh, mesh_spec, refuse_swapped
from ostraka.sharding.specs import array_leaves, has_shape, partition_of, to_spec
from ostraka.tree.nodes import leaves_of


def picture(
    shape: Sequence[int],
    mesh: AnyMesh,
    spec: Any,
    *,
    dimensions: tuple[int, int] | None = None,
) -> str:
    """Draw the parts of an array, with the numbers of the devices that hold each.

    Two dimensions are drawn, one down and one across. If more are sharded, there is a drawing for
    each of their parts.

    Args:
        shape: The shape of the array.
        mesh: The mesh, or axis sizes such as `{"data": 2, "model": 2}`.
        spec: The PartitionSpec of the array.
        dimensions: The two dimensions to draw. Default: the first two that are sharded.

    Returns:
        The drawing as text.

    Raises:
        InvalidSharding: The spec does not fit the shape or the mesh.

    Example:
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
    """Describe how an array, a variable or a whole tree lies over devices.

    Args:
        value: An array, a variable or a tree.
        dimensions: For an array: the two dimensions to draw, as in `picture`.

    Returns:
        Text to print: for an array the drawing of `picture`, for a tree a table with the path, the
        shape, the spec and the bytes on each device of every array.

    Example:
        >>> print(show(model))
    """
    parsed = parse(value)
    leaves = list(leaves_of(parsed))
    if len(leaves) == 1 and has_shape(leaves[0].value):
        mesh, partition = _lies(leaves[0].path, leaves[0].value)
        shape = tuple(leaves[0].value.shape)
        return draw(shape, mesh, every_dimension(partition, len(shape)), dimensions=dimensions)
    rows = [("leaf", "shape", "spec", "bytes a device", "mesh")]
    for leaf in array_leaves(parsed):
        mesh, partition = _lies(leaf.path, leaf.value)
        nbytes = leaf.nbytes // prod(partition_grid(mesh, partition, len(leaf.shape)))
        spec, where = show_partition(partition), str(mesh)
        if mesh.devices == (HOST_LOCAL,):
            spec, where = "host", ""
        rows.append((leaf.path, str(leaf.shape), spec, f"{nbytes:,}", where))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column == 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _lies(path: str, value: Any) -> tuple[MeshSpec, Partition]:
    """Return a leaf's mesh and partition. Host memory is a mesh of its own."""
    sharding = getattr(value, "sharding", None)
    if sharding is None:
        return MeshSpec((), (), (HOST_LOCAL,)), ()
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, jax.sharding.Mesh):
        return mesh_spec(sharding.mesh), partition_of(path, sharding.spec, len(value.shape))
    return describe_sharding(path, sharding, Devices())
