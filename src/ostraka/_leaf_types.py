"""What a template's leaf is, and how it differs from what was saved in its place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from ostraka._inplace import Outline
from ostraka._nodes import Kept
from ostraka._spec import LeafSpec
from ostraka._tree import is_array, is_key

_config: Any = jax.config
"""JAX's flags, which its type declarations leave out."""


def exactly(value: complex, dtype: Any) -> np.ndarray[Any, Any] | None:
    """A Python number as a 0-d array of a dtype, or None if that would change it."""
    if isinstance(value, bool) != (dtype == np.bool_):
        return None
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of imaginary parts that it drops
            made = np.asarray(value).astype(dtype)
    except (OverflowError, TypeError, ValueError):
        return None
    same = made.item() == value or (made.item() != made.item() and value != value)
    return made if same else None


def is_arraylike(value: Any) -> bool:
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct | Outline)


def kind_of(wanted: Any) -> str | None:
    if isinstance(wanted, LeafSpec):
        return wanted.kind
    if is_key(wanted):
        return "key"
    if isinstance(wanted, jax.Array | jax.ShapeDtypeStruct | Outline):
        return "jax"
    if isinstance(wanted, np.ndarray):
        return "numpy"
    if isinstance(wanted, np.generic):
        return "scalar"
    return "python" if type(wanted) in (bool, int, float, complex) else None


def python_type(dtype: str) -> type | None:
    """The Python number that a 0-d array of this dtype is, exactly."""
    if dtype == "bool":
        return bool
    if dtype.startswith(("int", "uint")):
        return int
    if dtype.startswith(("float", "bfloat")):
        return float
    return complex if dtype.startswith("complex") else None


def x64_problems(dtype: str) -> Iterator[str]:
    if dtype in ("int64", "uint64", "float64", "complex128") and not _config.jax_enable_x64:
        yield (
            f"saved as {dtype}, which JAX would cut to 32 bits: set jax_enable_x64, or give a "
            "numpy array in `like`"
        )


@cache
def key_words(impl: str) -> int | None:
    """How many words a key of this implementation has; None if there is no such one."""
    try:
        return jax.random.key_data(jax.random.key(0, impl=impl)).shape[-1]
    except (ValueError, TypeError):
        return None


def key_problems(spec: LeafSpec, wanted: Any, kind: str) -> Iterator[str]:
    if spec.kind != "key" or kind != "key":
        yield f"saved as {show_spec(spec)}, `like` has {show_value(wanted)}"
        return
    impl = str(wanted.dtype._impl.name)
    if impl != spec.prng:
        yield f"saved as a {spec.prng} key, `like` has a {impl} key"
    elif tuple(wanted.shape) != spec.logical_shape:
        yield (
            f"saved as keys of shape {show_shape(spec.logical_shape)}, `like` has "
            f"{show_shape(wanted.shape)}"
        )


def show_shape(shape: Sequence[int]) -> str:
    return f"({', '.join(str(n) for n in shape)}{',' if len(shape) == 1 else ''})"


def show_spec(spec: LeafSpec) -> str:
    if spec.kind == "key":
        return f"a {spec.prng} key"
    return f"{spec.dtype}[{','.join(str(n) for n in spec.shape)}]"


def show_value(value: Any) -> str:
    if is_arraylike(value):
        if is_key(value):
            return "a PRNG key"
        return f"{value.dtype.name}[{','.join(str(n) for n in value.shape)}]"
    if isinstance(value, Kept):
        return f"the {'structure' if value.is_structure else 'function'} {value.name}"
    return "None" if value is None else f"the {type(value).__name__} {str(value)[:40]!r}"
