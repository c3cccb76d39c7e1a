"""Objects that take new values in place, and let their old arrays go."""

import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ostraka.restoring.in_place import InPlace, Outline
from ostraka.tree.nodes import leaves_of


def linear() -> nnx.Linear:
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def test_variables_change_as_values_arrive_and_the_rest_at_the_end():
    model = linear()
    tree: Any = {"model": model, "step": 1, "table": np.zeros(2)}
    target = InPlace(tree)
    target.put("model/kernel", jnp.ones((2, 3)))
    assert float(model.kernel[...].sum()) == 6
    target.put("step", 7)
    assert tree["step"] == 1
    finished = target.finish()
    assert finished["model"] is model
    assert finished["step"] == 7
    assert finished["table"] is tree["table"]  # what gets no value stays


def test_the_template_keeps_no_array_alive():
    model = linear()
    old = weakref.ref(model.kernel[...])
    target = InPlace({"model": model})
    outlines = {leaf.path: leaf.value for leaf in leaves_of(target.template)}
    kernel = outlines["model/kernel"]
    assert isinstance(kernel, Outline)
    assert (kernel.shape, kernel.dtype) == ((2, 3), jnp.float32)
    assert old() is not None
    target.put("model/kernel", jnp.ones((2, 3)))
    assert old() is None
