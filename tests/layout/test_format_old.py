"""A checkpoint that an older version wrote is read as ever.

`tests/data/format1` was written before arrays could occur at several places and before commitment,
weak types and keys of other kinds were kept.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import ostraka

SAVED = Path(__file__).parents[1] / "data" / "format1"


def make() -> tuple[nnx.Linear, Any]:
    model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def test_it_is_intact():
    assert ostraka.verify(SAVED).ok
    assert ostraka.open(SAVED).metadata == {"written_by": "0.1.0"}


def test_all_of_it_comes_back():
    restored = ostraka.restore(SAVED)
    sharded = restored["sharded"]
    assert np.array_equal(sharded, np.arange(16, dtype=np.float32).reshape(8, 2))
    assert sharded.sharding.spec == jax.sharding.PartitionSpec("x")
    assert jnp.array_equal(
        jax.random.key_data(restored["key"]), jax.random.key_data(jax.random.key(7))
    )
    assert jnp.array_equal(restored["bf16"], jnp.arange(5).astype(jnp.bfloat16))
    assert jnp.array_equal(restored["int4"], jnp.arange(5).astype(jnp.int4))
    assert np.array_equal(restored["host"], np.arange(6, dtype=np.float64).reshape(2, 3))
    assert restored["scalar"] == np.int16(-3)
    assert restored["values"] == [1, 2.5, "é", None, True, b"x", 1j, 10**30]
    assert type(restored["ordered"]) is OrderedDict
    assert restored["ordered"]["a"][1][3].tolist() == [1, 1]
    assert type(restored["adam"][0]) is optax.ScaleByAdamState


def test_a_module_goes_on_training():
    model, optimizer = make()
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    other, its_optimizer = make()
    other.kernel[...] *= 0
    ostraka.restore(SAVED, into={"model": other, "optimizer": its_optimizer})
    assert jnp.array_equal(other.kernel[...], model.kernel[...])
    for one, its in ((model, optimizer), (other, its_optimizer)):
        its.update(one, grads)
    assert jnp.array_equal(other.kernel[...], model.kernel[...])
