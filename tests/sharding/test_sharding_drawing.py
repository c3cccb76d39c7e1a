"""Drawings of arrays over devices: every device is drawn where JAX has its part."""

import re
from math import prod

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ostraka.errors import InvalidSharding
from ostraka.layout.spec import HOST_LOCAL, MeshSpec
from ostraka.sharding.drawing import draw

SIZES = {"a": 2, "b": 4}
MESH = MeshSpec(tuple(SIZES), tuple(SIZES.values()), tuple(range(8)))


@pytest.mark.parametrize(
    "partition", [(("a",), ("b",)), (("b",), ("a",)), (("b", "a"), ())], ids=str
)
def test_devices_are_drawn_where_jax_puts_them(partition: tuple[tuple[str, ...], ...]):
    shape = (8, 16)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), tuple(SIZES))
    spec = P(*[axes or None for axes in partition])
    expected = {
        (rows.start or 0, columns.start or 0): device.id
        for device, (rows, columns) in NamedSharding(mesh, spec).devices_indices_map(shape).items()
    }
    head, *lines = draw(shape, MESH, partition).splitlines()
    assert head == f"{shape} {spec} on a=2, b=4".replace("PartitionSpec", "P")
    columns = [int(start) for start in re.findall(r"(\d+):\d+", lines[0])]
    found = {
        (int(line.split(":")[0]), column): int(cell)
        for line in lines
        if re.match(r" *\d+:\d+ │", line)
        for column, cell in zip(columns, line.split("│")[1:-1], strict=True)
    }
    assert found == expected


def test_replicas_are_runs_of_numbers():
    assert "│ 0–3 │" in draw((4,), MeshSpec(("a",), (4,), (0, 1, 2, 3)), ())
    assert "0 1" in draw((4,), MeshSpec(("a",), (2,), (0, 1)), ())
    scattered = draw((4,), MeshSpec(("a",), (6,), (0, 2, 4, 6, 8, 10)), ())
    assert "0 2 4 6 …" in scattered
    assert "host" in draw((4,), MeshSpec((), (), (HOST_LOCAL,)), ())


def test_of_many_parts_the_first_and_last_are_drawn():
    mesh = MeshSpec(("a",), (64,), tuple(range(64)))
    drawing = draw((128,), mesh, (("a",),))
    for span in ("0:2", "14:16", "112:114", "126:128", "…"):
        assert span in drawing
    assert "16:18" not in drawing


def test_a_third_dimension_gives_several_drawings():
    mesh = MeshSpec(("a", "b", "c"), (2, 2, 2), tuple(range(8)))
    partition = (("a",), ("b",), ("c",))
    assert draw((4, 4, 4), mesh, partition).count("dimension 2:") == 2
    short = draw((4, 4, 4), mesh, partition, most=1)
    assert short.count("dimension 2:") == 1
    assert short.endswith("… and 1 more like these")
    chosen = draw((4, 4, 4), mesh, partition, dimensions=(2, 0))
    assert chosen.count("dimension 1:") == 2
    assert all(str(device) in chosen for device in range(prod(mesh.axis_sizes)))


@pytest.mark.parametrize("dimensions", [(0, 0), (0, 2), (-1, 0)], ids=str)
def test_dimensions_that_can_not_be_drawn(dimensions: tuple[int, int]):
    with pytest.raises(InvalidSharding, match="it must be two of the array's 2 dimensions"):
        draw((4, 4), MESH, (), dimensions=dimensions)
