"""The exercises: their outputs as they are set, and the exact answers."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraka.exercises import (
    SaveCount,
    distributed_save_count,
    distributed_save_count_exact,
    orbax_save_count,
    orbax_save_count_exact,
    state_to_sharded_layout,
    state_to_sharded_layout_exact,
)

CASES = [
    (16, 8, 4, [136.0, 34.0]),
    (10, 5, 3, [55.0, 18.333334]),
    (768, 3072, 8, [2362368.0, 295296.0]),
]


def rows(in_dim: int) -> jax.Array:
    return jnp.ones((2, in_dim))


def test_signatures():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(orbax_save_count) == ["seed", "x", "features", "num_shards"]
    assert names(distributed_save_count) == ["seed", "x", "num_shards", "features"]
    assert names(state_to_sharded_layout) == ["seed", "x", "features"]
    assert names(orbax_save_count) == names(orbax_save_count_exact)
    assert names(distributed_save_count) == names(distributed_save_count_exact)
    assert names(state_to_sharded_layout) == names(state_to_sharded_layout_exact)


@pytest.mark.parametrize(("in_dim", "features", "shards", "expected"), CASES)
def test_save_counts(in_dim, features, shards, expected):
    nnx = orbax_save_count(0.0, rows(in_dim), float(features), float(shards))
    linen = distributed_save_count(0.0, rows(in_dim), float(shards), float(features))
    for found in (nnx, linen):
        assert isinstance(found, jax.Array)
        assert (found.shape, found.dtype) == ((2,), jnp.float32)
        assert np.array_equal(found, np.array(expected, np.float32))


@given(in_dim=st.integers(1, 40), features=st.integers(1, 40), shards=st.integers(1, 9))
@settings(max_examples=10)
def test_exact_twins_agree_with_the_formula(in_dim, features, shards):
    total = (in_dim + 1) * features
    expected = SaveCount(total, total // shards, total % shards)
    assert orbax_save_count_exact(1.0, rows(in_dim), features, shards) == expected
    assert distributed_save_count_exact(1.0, rows(in_dim), shards, features) == expected


def test_exact_beyond_what_float32_holds():
    """A model of four billion parameters is counted without being made."""
    x = jax.ShapeDtypeStruct((1, 65536), jnp.float32)
    expected = SaveCount(65537 * 65535, *divmod(65537 * 65535, 7))
    assert orbax_save_count_exact(0.0, x, 65535.0, 7.0) == expected
    assert float(jnp.float32(expected.total)) != expected.total


def test_the_layout_of_a_linear():
    found = state_to_sharded_layout(3.0, rows(16), 8.0)
    assert (found.shape, found.dtype, found.tolist()) == ((1,), jnp.float32, [2.0])
    assert state_to_sharded_layout_exact(3.0, rows(16), 8.0) == 2


@pytest.mark.parametrize("shards", [0.0, 0.5, -2.0])
def test_no_shards(shards):
    with pytest.raises(ValueError, match="num_shards is .*; it must be at least 1"):
        orbax_save_count(0.0, rows(4), 2.0, shards)
    with pytest.raises(ValueError, match="num_shards is .*; it must be at least 1"):
        distributed_save_count_exact(0.0, rows(4), shards, 2.0)
