"""What a leaf of a template is, and which Python numbers an array's dtype can hold."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka.layout.spec import LeafSpec
from ostraka.restoring._differences import exactly, kind_of, type_problems
from ostraka.restoring.in_place import Outline

KINDS = [
    (jnp.ones(2), "jax"),
    (jax.ShapeDtypeStruct((2,), jnp.float32), "jax"),
    (Outline((2,), np.dtype("float32"), None, True), "jax"),
    (jax.random.key(0), "key"),
    (np.ones(2), "numpy"),
    (np.float32(1), "scalar"),
    (3, "python"),
    (True, "python"),
    ("text", "other"),
    (None, "other"),
    (LeafSpec("a", "key", "uint32", (2,), prng="threefry2x32"), "key"),
]


def problems(spec: LeafSpec, wanted: object) -> list[str]:
    return list(type_problems(spec, wanted, kind_of(wanted), None))


@pytest.mark.parametrize(("value", "kind"), KINDS, ids=lambda v: type(v).__name__)
def test_the_kind_of_a_leaf(value: object, kind: str):
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


NUMBERS = [("bool", True), ("uint8", 1), ("bfloat16", 1.0), ("complex64", 1j)]


@pytest.mark.parametrize(("dtype", "number"), NUMBERS)
def test_the_python_number_that_an_array_is(dtype: str, number: complex):
    spec = LeafSpec("n", "jax", dtype, ())
    assert problems(spec, number) == []
    for other in {value for _, value in NUMBERS if type(value) is not type(number)}:
        (problem,) = problems(spec, other)
        assert problem.startswith(f"saved as {dtype}[], `like` has the {type(other).__name__}")


def test_keys_of_each_process():
    keys = jax.random.split(jax.random.key(0), 3)
    each = LeafSpec("k", "key", "uint32", (4, 3, 2), prng="threefry2x32", per_process=True)
    assert problems(each, keys) == []
    assert problems(each, keys[:2]) == ["saved as keys of shape (3,), `like` has (2,)"]
