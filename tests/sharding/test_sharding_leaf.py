"""Leaves as rules see them: sizes, partitions of every dimension, the kernel of a bias."""

import pytest

from ostraka.sharding.leaves import ShapedLeaf, every_dimension, kernel_of, without_trailing


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
