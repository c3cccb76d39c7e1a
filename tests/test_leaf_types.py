"""What a leaf of a template is, and which Python numbers an array's dtype can hold."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka._inplace import Outline
from ostraka._leaf_types import (
    exactly,
    key_problems,
    key_words,
    kind_of,
    python_type,
    show_shape,
    show_value,
    x64_problems,
)
from ostraka._spec import LeafSpec

KINDS = [
    (jnp.ones(2), "jax"),
    (jax.ShapeDtypeStruct((2,), jnp.float32), "jax"),
    (Outline((2,), np.dtype("float32"), None, True), "jax"),
    (jax.random.key(0), "key"),
    (np.ones(2), "numpy"),
    (np.float32(1), "scalar"),
    (3, "python"),
    (True, "python"),
    ("text", None),
    (None, None),
    (LeafSpec("a", "key", "uint32", (2,), prng="threefry2x32"), "key"),
]


@pytest.mark.parametrize(("value", "kind"), KINDS, ids=lambda v: type(v).__name__)
def test_the_kind_of_a_leaf(value: object, kind: str | None):
    assert kind_of(value) == kind


@given(st.integers(-(1 << 40), 1 << 40))
def test_integers_are_kept_exactly_or_refused(value: int):
    made = exactly(value, np.dtype("int32"))
    assert (made is not None) == (-(1 << 31) <= value < 1 << 31)
    assert made is None or int(made) == value


@given(st.floats())
def test_floats_are_kept_exactly_or_refused(value: float):
    made = exactly(value, np.dtype("float32"))
    with np.errstate(over="ignore"):
        fits = math.isnan(value) or float(np.float32(value)) == value
    assert (made is not None) == fits


@pytest.mark.parametrize(
    ("value", "dtype"), [(True, "int32"), (1, "bool"), (1.5, "int32"), (1 + 2j, "float32")]
)
def test_numbers_of_another_kind_are_refused(value: complex, dtype: str):
    assert exactly(value, np.dtype(dtype)) is None


def test_the_python_type_of_a_dtype():
    found = {name: python_type(name) for name in ("bool", "uint8", "bfloat16", "complex64", "key")}
    assert found == {
        "bool": bool,
        "uint8": int,
        "bfloat16": float,
        "complex64": complex,
        "key": None,
    }


def test_keys_that_differ_are_told():
    spec = LeafSpec("k", "key", "uint32", (3, 2), prng="threefry2x32")
    keys = jax.random.split(jax.random.key(0), 3)
    assert list(key_problems(spec, keys, "key")) == []
    (shape,) = key_problems(spec, keys[:2], "key")
    assert shape == "saved as keys of shape (3,), `like` has (2,)"
    (impl,) = key_problems(spec, jax.random.key(0, impl="rbg"), "key")
    assert impl == "saved as a threefry2x32 key, `like` has a rbg key"
    (kind,) = key_problems(spec, jnp.ones(3), "jax")
    assert kind == "saved as a threefry2x32 key, `like` has float32[3]"
    each = LeafSpec("k", "key", "uint32", (4, 3, 2), prng="threefry2x32", per_process=True)
    assert list(key_problems(each, keys, "key")) == []


def test_how_many_words_a_key_has():
    assert (key_words("threefry2x32"), key_words("rbg"), key_words("unheard of")) == (2, 4, None)


def test_what_jax_would_cut_to_32_bits_is_told():
    (problem,) = x64_problems("int64")
    assert "which JAX would cut to 32 bits: set jax_enable_x64" in problem
    assert list(x64_problems("int32")) == []


def test_shapes_and_values_as_text():
    assert [show_shape(shape) for shape in ((), (3,), (3, 4))] == ["()", "(3,)", "(3, 4)"]
    shown = [show_value(value) for value in (np.ones((2, 3)), jax.random.key(0), None, 7)]
    assert shown == ["float64[2,3]", "a PRNG key", "None", "the int '7'"]
