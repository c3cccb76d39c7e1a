"""A plan refuses the trees and options that a save refuses, in the same words."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl

import ostraka
from ostraka.errors import InvalidTree
from ostraka.planner import plan


def unnamed_generator() -> Any:
    return define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 2), jnp.uint32),
        random_bits=lambda key, bits, shape: jnp.zeros(shape, jnp.uint32),
        fold_in=lambda key, data: key,
    )


def refusal_of(call: Any) -> Exception | None:
    try:
        call()
    except (InvalidTree, ValueError, TypeError) as error:
        return error
    return None


def matrix() -> jax.Array:
    return jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("make", "options", "word"),
    [
        (lambda: np.ma.masked_array(np.ones(2), [False, True]), {}, "MaskedArray"),
        (lambda: np.zeros((1,) * 64), {}, "has 64 dimensions"),
        (lambda: jax.random.key(0, impl=unnamed_generator()), {}, "keys of the generator"),
        (lambda: np.array(["text"]), {}, "has the dtype <U4"),
        (lambda: {1, 2}, {}, "is a builtins.set"),
        (matrix, {"dtype": {"nope/**": "bfloat16"}}, ""),
        (matrix, {"dtype": {"a": "int8"}}, ""),
        (matrix, {"dtype": "int8"}, ""),
        (matrix, {"dtype": {"a": 3}}, ""),
        (matrix, {"dtype": {"count": "bfloat16"}}, ""),
        (matrix, {"max_file_bytes": 1}, ""),
    ],
)
def test_leaves_and_options_that_can_not_be_saved(
    tmp_path: Path, make: Any, options: dict[str, Any], word: str
):
    tree = {"a": make(), "count": jnp.int32(1)}
    saved = refusal_of(lambda: ostraka.save(tmp_path / "c", tree, **options))
    planned = refusal_of(lambda: plan(tree, **options))
    assert saved is not None
    assert word in str(saved)
    assert (type(planned), str(planned)) == (type(saved), str(saved))


def test_a_dtype_for_the_parameters_alone():
    model = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    planned = plan(model, optimizer="sgd", optimizer_dtype="float32", dtype="bfloat16")
    assert planned.bytes_by_group["model"] == {"bfloat16": 2 * 256 * 256}
    with pytest.raises(ValueError, match=r"dtype=\{'nope': …\} matches no"):
        plan(model, optimizer="adamw", optimizer_dtype="float32", dtype={"nope": "bfloat16"})
