"""Leaves as rules see them: sizes, partitions, the kernel of a bias, the parameter of a moment."""

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ostraka.sharding.leaves import (
    ShapedLeaf,
    cut_as,
    every_dimension,
    follow,
    kept_dimensions,
    kernel_of,
    without_trailing,
)
from ostraka.sharding.specs import ArrayLeaf, array_leaf, follow_specs


def test_sizes():
    leaf = ShapedLeaf("a", (3, 4), 2, False)
    assert (leaf.elements, leaf.nbytes) == (12, 24)
    assert ShapedLeaf("key", (3,), 4, True).nbytes == 0


def test_partitions_of_every_dimension_and_back():
    assert every_dimension((("a",),), 3) == (("a",), (), ())
    assert without_trailing((("a",), (), ())) == (("a",),)
    assert without_trailing(((), ("a",), ())) == ((), ("a",))
    assert without_trailing(((), ())) == ()


SHAPES = {
    "dense/kernel": (4, 8),
    "heads/kernel": (4, 2, 8),
    "stacked/kernel": (6, 4, 8),
    "torch/weight": (4, 8),
    "boxed/kernel/value": (4, 8),
}


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("dense/bias", (8,), ("dense/kernel", (1,))),
        ("heads/bias", (2, 8), ("heads/kernel", (1, 2))),
        ("stacked/bias", (6, 8), ("stacked/kernel", (0, 2))),
        ("torch/bias", (8,), ("torch/weight", (1,))),
        ("boxed/bias/value", (8,), ("boxed/kernel/value", (1,))),
        ("torch/bias", (4,), ("torch/weight", (0,))),  # outputs first
        ("dense/bias", (5,), None),
        ("dense/scale", (8,), None),
        ("dense/bias", (), None),
        ("alone/bias", (8,), None),
    ],
)
def test_the_kernel_of_a_bias(path: str, shape: tuple[int, ...], expected: object):
    assert kernel_of(path, shape, SHAPES) == expected


# Arrays of optimizers


def leaf(path: str, *shape: int) -> ShapedLeaf:
    return ShapedLeaf(path, shape, 4, False)


@pytest.mark.parametrize(
    ("path", "shape", "of", "dimensions"),
    [
        ("mu", (4, 8), (4, 8), (0, 1)),
        ("v_row", (4,), (4, 8), (0,)),
        ("v_col", (8,), (4, 8), (1,)),
        ("sum", (4, 1), (4, 8), (0, None)),
        ("count", (), (4, 8), ()),
        ("other", (5,), (4, 8), None),
        ("other", (8, 4), (4, 8), None),
        ("v_row", (4, 6), (4, 6, 8), (0, 1)),
        ("v_col", (6, 8), (4, 6, 8), (1, 2)),
        ("x", (1, 6, 1), (4, 6, 8), (None, 1, None)),
        ("x", (4, 6, 8, 1), (4, 6, 8), None),
    ],
)
def test_the_dimensions_that_are_kept(
    path: str, shape: tuple[int, ...], of: tuple[int, ...], dimensions: object
):
    assert kept_dimensions(path, shape, of) == dimensions


def test_what_follows_a_parameter():
    def leaf(path: str, *shape: int) -> ArrayLeaf:
        return array_leaf(path, shape, jax.ShapeDtypeStruct(shape, np.float32), None)

    arrays = [leaf("mu/k", 4, 6, 8), leaf("x/k/2", 8), leaf("x/k", 4, 1, 8), leaf("count")]
    found = follow_specs(arrays, [leaf("k", 4, 6, 8)], {"k": P("a", None, "b")})
    assert found == {"mu/k": P("a", None, "b"), "x/k/2": P("b"), "x/k": P("a", None, "b")}


def test_square_kernels_are_factored_as_optax_does():
    """The mean over the later dimension is `v_row`; each value tells which one is left."""
    kernel = np.broadcast_to(np.arange(1, 9, dtype=np.float32)[:, None], (8, 8))
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    state = optimizer.init({"w": kernel})
    _, state = jax.jit(optimizer.update)({"w": kernel}, state, {"w": kernel})
    factored = next(
        part
        for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "v_row"))
        if hasattr(part, "v_row")
    )
    varies = {name: np.ptp(getattr(factored, name)["w"]) > 0 for name in ("v_row", "v_col")}
    assert varies == {"v_row": True, "v_col": False}  # rows differ: dimension 0 is in v_row
    assert kept_dimensions("v_row/w", (8,), (8, 8)) == (0,)
    assert kept_dimensions("v_col/w", (8,), (8, 8)) == (1,)


def test_the_longest_name_at_the_end_counts():
    parameters = [leaf("w", 4, 8), leaf("layer/w", 4, 8), leaf("layer/b", 8)]
    arrays = [leaf("mu/layer/w", 4, 8), leaf("nu/w/value", 4), leaf("count"), leaf("mu/layer/c", 8)]
    assert follow(arrays, parameters) == {
        "mu/layer/w": (parameters[1], (0, 1)),
        "nu/w/value": (parameters[0], (0,)),
    }


@given(st.permutations(range(3)), st.integers(0, 3))
def test_a_leaf_is_cut_as_its_dimensions_are(dimensions: list[int], length: int):
    partition = tuple((f"axis{number}",) for number in range(length))
    cut = cut_as(partition, (*dimensions, None))
    assert cut[-1] == ()
    for axes, dimension in zip(cut, dimensions, strict=False):
        assert axes == (partition[dimension] if dimension < length else ())
