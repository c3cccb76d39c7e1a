"""The type of a template's leaf, and how it differs from the saved one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import jax
import numpy as np

from ostraka.common.dtypes import dtype_name, is_floating, numpy_dtype
from ostraka.layout.spec import LeafKind, LeafSpec
from ostraka.live.parse import is_array, is_key
from ostraka.restoring.destinations import is_committed
from ostraka.restoring.in_place import Outline
from ostraka.tree.nodes import Kept

_config: Any = jax.config
"""JAX's flags, which its type declarations leave out."""

_NUMBERS = (bool, int, float, complex)


class Unfit(Exception):
    """A leaf can't be restored as `like` has it. `args` are the reasons."""


def kind_of(wanted: Any) -> LeafKind | Literal["python", "other"]:
    """The kind of value to make of an array for a leaf of the template."""
    if isinstance(wanted, LeafSpec):
        return wanted.kind
    if isinstance(wanted, jax.Array | jax.ShapeDtypeStruct | Outline):
        return "key" if is_key(wanted) else "jax"
    if isinstance(wanted, np.ndarray):
        return "numpy"
    if isinstance(wanted, np.generic):
        return "scalar"
    return "python" if type(wanted) in _NUMBERS else "other"


# Keys


def generator_of(spec: LeafSpec, wanted: Any) -> Any:
    """The generator of a template's keys if the saved keys have the same one, or None."""
    if kind_of(wanted) != "key" or isinstance(wanted, LeafSpec):
        return None
    own = wanted.dtype._impl
    return own if own.name == spec.prng else None


def key_problem(spec: LeafSpec, wanted: Any) -> str | None:
    """Why the data of saved keys can't become keys again, or None if they can."""
    own = generator_of(spec, wanted)
    words = _words_of(spec.prng or "") if own is None else own.key_shape
    if words is None:
        return (
            f"its keys are of the generator {spec.prng!r}, which JAX does not have: define it, and "
            "pass like= with keys of it"
        )
    if spec.shape[len(spec.logical_shape) - len(spec.own_shape) :] != words:
        return f"its keys of the generator {spec.prng!r} have the shape {spec.shape[-1:]}"
    return None


@cache
def _words_of(generator: str) -> tuple[int, ...] | None:
    """The shape of the data of one key, or None if JAX does not know the generator."""
    try:
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=generator)))
    except (TypeError, ValueError):
        return None
    return tuple(key.shape)


# A number that was saved, where the template may have an array


def saved_as_wanted(saved: Any, wanted: Any) -> Any:
    """A saved value, converted to the template's type. Raises Unfit."""
    if isinstance(wanted, Kept) and isinstance(saved, Kept):
        return wanted.value
    if type(wanted) is type(saved):
        return saved
    if type(saved) in _NUMBERS and _is_arraylike(wanted):
        return _as_array(saved, wanted)
    raise Unfit(f"the checkpoint has {show_value(saved)}, `like` has {show_value(wanted)}")


def _as_array(saved: complex, wanted: Any) -> Any:
    """A Python number as the array of the template. Raises Unfit if that would change it."""
    made = None if is_key(wanted) or wanted.shape != () else exactly(saved, wanted.dtype)
    if made is None:
        raise Unfit(
            f"the checkpoint has {show_value(saved)}, which `like`'s {show_value(wanted)} can't "
            "hold exactly"
        )
    if isinstance(wanted, np.ndarray | np.generic):
        return made if isinstance(wanted, np.ndarray) else made[()]
    return jax.device_put(made, wanted.sharding if is_committed(wanted) else None)


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


# An array that was saved


def type_problems(spec: LeafSpec, wanted: Any, kind: str, dtype: str | None) -> Iterator[str]:
    """The differences between a leaf of the template and the saved array.

    Without a template, `wanted` is the saved spec and `kind` its kind. `dtype` is the dtype to cast
    to.
    """
    if wanted is spec:
        if kind == "jax":
            yield from _x64_problems(dtype or spec.dtype)
    elif kind == "other":
        yield f"the checkpoint has an array {_show_spec(spec)}, `like` has {show_value(wanted)}"
    elif (kind == "key") != (spec.kind == "key"):
        yield f"saved as {_show_spec(spec)}, `like` has {show_value(wanted)}"
    elif kind == "python":
        if spec.own_shape or type(numpy_dtype(spec.dtype).type(0).item()) is not type(wanted):
            yield f"saved as {_show_spec(spec)}, `like` has {show_value(wanted)}"
    else:
        yield from _array_problems(spec, wanted, kind, dtype)


def _array_problems(spec: LeafSpec, wanted: Any, kind: str, dtype: str | None) -> Iterator[str]:
    if tuple(wanted.shape) != spec.logical_shape:
        what = "as keys of" if kind == "key" else "with"
        yield f"saved {what} shape {spec.logical_shape}, `like` has {tuple(wanted.shape)}"
    if kind == "key":
        if generator_of(spec, wanted) is None:
            yield f"saved as a {spec.prng} key, `like` has a {wanted.dtype._impl.name} key"
    elif dtype is None and dtype_name(wanted.dtype) != spec.dtype:
        was = f" (cast from {spec.cast_from} by the save)" if spec.cast_from else ""
        is_float = is_floating(wanted.dtype.name) and is_floating(spec.dtype)
        hint = ": pass dtype='like' to cast" if is_float else ""
        yield f"saved as {spec.dtype}{was}, `like` has {wanted.dtype.name}{hint}"
    elif kind == "jax":
        yield from _x64_problems(dtype or spec.dtype)


def _x64_problems(dtype: str) -> Iterator[str]:
    if dtype in ("int64", "uint64", "float64", "complex128") and not _config.jax_enable_x64:
        yield (
            f"saved as {dtype}, which JAX would cut to 32 bits: set jax_enable_x64, or give a "
            "numpy array in `like`"
        )


# In words


def _show_spec(spec: LeafSpec) -> str:
    if spec.kind == "key":
        return f"a {spec.prng} key"
    return f"{spec.dtype}[{','.join(str(n) for n in spec.shape)}]"


def _is_arraylike(value: Any) -> bool:
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct | Outline)


def show_value(value: Any) -> str:
    if _is_arraylike(value):
        if is_key(value):
            return "a PRNG key"
        return f"{value.dtype.name}[{','.join(str(n) for n in value.shape)}]"
    if isinstance(value, Kept):
        return f"the {'structure' if value.is_structure else 'function'} {value.name}"
    return "None" if value is None else f"the {type(value).__name__} {str(value)[:40]!r}"
