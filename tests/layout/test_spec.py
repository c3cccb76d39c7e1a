"""Specs as data against JAX's own answer to which device holds what."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ostraka.common import dtypes
from ostraka.common.dtypes import DTYPES
from ostraka.errors import InvalidSharding
from ostraka.layout import box
from ostraka.layout import spec as _spec
from ostraka.layout.spec import LeafSpec, MeshSpec

MESHES = [
    (("a",), (1,)),
    (("a",), (8,)),
    (("a",), (3,)),
    (("a", "b"), (4, 2)),
    (("a", "b"), (2, 4)),
    (("a", "b"), (1, 8)),
    (("a", "b", "c"), (2, 2, 2)),
    (("a", "b", "c"), (2, 1, 4)),
    (("a", "b", "c", "d"), (2, 2, 1, 2)),
]


def described(mesh):
    numbers = {device: number for number, device in enumerate(jax.devices())}
    return MeshSpec(
        tuple(mesh.axis_names),
        tuple(mesh.devices.shape),
        tuple(numbers[device] for device in mesh.devices.flat),
    )


@st.composite
def meshes(draw):
    names, sizes = draw(st.sampled_from(MESHES))
    order = draw(st.permutations(range(8)))[: int(np.prod(sizes))]
    devices = np.array(jax.devices())[list(order)].reshape(sizes)
    return Mesh(devices, draw(st.permutations(names)))


@st.composite
def partitions(draw, mesh):
    """Each axis goes to some dimension or to none, in any order."""
    rank = draw(st.integers(0, 4))
    dimensions = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        place = draw(st.integers(0, rank))
        if place < rank:
            dimensions[place].append(axis)
    return tuple(tuple(axes) for axes in dimensions)


def as_jax(partition):
    return P(*(None if not axes else axes if len(axes) > 1 else axes[0] for axes in partition))


def boxes_of_jax(sharding, shape):
    numbers = {device: number for number, device in enumerate(jax.devices())}
    return {
        numbers[device]: tuple(
            (s.start or 0, n if s.stop is None else s.stop)
            for s, n in zip(index, shape, strict=True)
        )
        for device, index in sharding.devices_indices_map(shape).items()
    }


@settings(max_examples=150)
@given(st.data())
def test_device_boxes_are_those_of_jax(data):
    mesh = data.draw(meshes())
    partition = data.draw(partitions(mesh))
    spec = described(mesh)
    grid = _spec.partition_grid(spec, partition, len(partition))
    shape = tuple(cuts * data.draw(st.integers(0, 3)) for cuts in grid)
    expected = boxes_of_jax(NamedSharding(mesh, as_jax(partition)), shape)
    assert _spec.device_boxes(shape, spec, partition) == expected


@settings(max_examples=60)
@given(st.data())
def test_holders_lists_every_device_once_at_its_cell(data):
    mesh = data.draw(meshes())
    partition = data.draw(partitions(mesh))
    spec = described(mesh)
    rank = len(partition)
    grid = _spec.partition_grid(spec, partition, rank)
    table = _spec.holders(spec, partition, rank)
    assert table.shape == (np.prod(grid), len(spec.devices) // np.prod(grid))
    assert sorted(table.reshape(-1).tolist()) == sorted(spec.devices)
    order = {device: place for place, device in enumerate(spec.devices)}
    expected = boxes_of_jax(NamedSharding(mesh, as_jax(partition)), grid)
    for number, row in enumerate(table.tolist()):
        assert [order[d] for d in row] == sorted(order[d] for d in row)
        assert {expected[d] for d in row} == {box.cell(grid, grid, number)}


def test_trailing_dimensions_without_an_entry_are_whole():
    mesh = MeshSpec(("a", "b"), (4, 2), tuple(range(8)))
    assert _spec.partition_grid(mesh, (("b",),), 3) == (2, 1, 1)
    short = _spec.device_boxes((4, 6, 5), mesh, (("b",),))
    assert short == _spec.device_boxes((4, 6, 5), mesh, (("b",), (), ()))
    assert short[0] == ((0, 2), (0, 6), (0, 5))


def test_one_device_without_axes_holds_everything():
    mesh = MeshSpec((), (), (5,))
    assert str(mesh) == "one device"
    assert _spec.device_boxes((3, 4), mesh, ()) == {5: ((0, 3), (0, 4))}
    assert _spec.device_boxes((), mesh, ()) == {5: ()}


def test_sixteen_thousand_devices_need_no_jax_device():
    mesh = MeshSpec(("data", "model"), (2048, 8), tuple(range(16384)))
    boxes = _spec.device_boxes((4096, 16), mesh, (("data",), ("model",)))
    assert len(boxes) == 16384
    assert boxes[16383] == ((4094, 4096), (14, 16))
    assert _spec.holders(mesh, ((), ("model",)), 2).shape == (8, 2048)


def test_a_fitting_spec_has_no_problems():
    mesh = MeshSpec(("a", "b"), (4, 2), tuple(range(8)))
    assert list(_spec.iter_misfits("w", (8, 3), mesh, (("a", "b"), ()))) == []
    assert list(_spec.iter_misfits("w", (0, 4), mesh, (("a",), ("b",)))) == []
    assert list(_spec.iter_misfits("w", (), mesh, ())) == []
    _spec.check_partition("w", (8, 3), mesh, (("b", "a"),))


MESH = MeshSpec(("a", "b"), (4, 2), tuple(range(8)))


@pytest.mark.parametrize(
    ("shape", "partition", "sentence"),
    [
        ((4,), (("a",), ("b",)), " has 1 dimensions (4,), but its spec P('a', 'b') has 2 entries"),
        ((4,), (("z",),), ", dimension 0: the mesh (a=4, b=2) has no axis 'z'"),
        ((4, 4), (("a",), ("a",)), ", dimension 1: axis 'a' is used twice in P('a', 'a')"),
        ((8,), (("b", "b"),), ", dimension 0: axis 'b' is used twice in P(('b', 'b'))"),
        (
            (3, 12),
            ((), ("a", "b")),
            (
                ", dimension 1: 12 elements do not divide into 8 parts along a × b of the mesh "
                "(a=4, b=2)"
            ),
        ),
    ],
)
def test_a_problem_is_a_sentence_with_leaf_dimension_axis_and_sizes(shape, partition, sentence):
    found = [m.message for m in _spec.iter_misfits("m/w", shape, MESH, partition)]
    assert f"leaf 'm/w'{sentence}" in found


@pytest.mark.parametrize(("size", "nearest"), [(1, 4), (5, 4), (6, 8), (7, 8), (9, 8), (10, 12)])
def test_the_nearest_size_that_divides(size, nearest):
    (misfit,) = _spec.iter_misfits("w", (size,), MESH, (("a",),))
    assert misfit.nearest_size == nearest


def test_every_problem_is_told_and_the_first_is_raised():
    problems = list(_spec.iter_misfits("w", (3, 5), MESH, (("a",), ("b",), ("z",))))
    assert len(problems) == 4
    with pytest.raises(InvalidSharding, match="leaf 'w' has 2 dimensions"):
        _spec.check_partition("w", (3, 5), MESH, (("a",), ("b",), ("z",)))
    with pytest.raises(ValueError, match="5 elements do not divide into 2 parts along b"):
        _spec.check_partition("w", (4, 5), MESH, (("a",), ("b",)))


@pytest.mark.parametrize("partition", [(), ((),), (("a",),), ((), ("a", "b")), (("a",), ("b",))])
def test_a_partition_is_shown_as_jax_shows_it(partition):
    shown = _spec.show_partition(partition)
    assert eval(shown, {"P": P}) == as_jax(partition)


@settings(max_examples=100)
@given(st.data())
def test_problems_are_found_where_jax_finds_them(data):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    axes = st.lists(st.sampled_from(["a", "b"]), max_size=2).map(tuple)
    partition = tuple(data.draw(st.lists(axes, max_size=3)))
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 12]), max_size=3)))
    try:
        jax.device_put(np.zeros(shape, np.int8), NamedSharding(mesh, as_jax(partition)))
        accepted = True
    except Exception:
        accepted = False
    assert (not list(_spec.iter_misfits("w", shape, MESH, partition))) == accepted


# Dtypes


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_has_the_width_that_its_numpy_type_has(name):
    dtype = DTYPES[name]
    numpy_dtype = dtypes.numpy_dtype(name)
    assert dtype.name == name == numpy_dtype.name
    assert numpy_dtype.itemsize == max(dtype.bits // 8, 1)
    assert dtype.packed == (dtype.bits < 8)


def test_packed_bytes_are_counted_up_to_a_whole_byte():
    assert [DTYPES["int4"].nbytes(n) for n in range(4)] == [0, 1, 1, 2]
    assert [DTYPES["uint2"].nbytes(n) for n in range(6)] == [0, 1, 1, 1, 1, 2]
    assert DTYPES["complex128"].nbytes(3) == 48
    assert LeafSpec("w", "jax", "int2", (3, 3)).nbytes == 3
    assert LeafSpec("w", "jax", "bfloat16", ()).nbytes == 2


def test_cells_of_a_layout_are_grouped_by_owner():
    layout = _spec.Layout((2, 2), (3, 1, 3, 0))
    assert layout.cells_by_owner() == {3: [0, 2], 1: [1], 0: [3]}
