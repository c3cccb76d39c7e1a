"""Leaves: conversion before a save and after a restore."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ostraka.common.dtypes import is_floating, numpy_dtype
from ostraka.compat.orbax import _files as files_lib
from ostraka.compat.orbax import type_handlers
from ostraka.compat.orbax.tree import Keys, empty_as_saved, is_empty
from ostraka.layout.spec import LeafSpec
from ostraka.live.parse import is_key
from ostraka.restoring.in_place import Outline
from ostraka.tree.nodes import ArrayNumber, SavedStates

_SCALARS = (bool, int, float, str, bytes)
_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))
_config: Any = jax.config
"""JAX's flags, which its type declarations leave out."""
_ABSTRACT = (
    *(np.generic, np.number, np.integer, np.signedinteger, np.unsignedinteger),
    *(np.inexact, np.floating, np.complexfloating),
)
STANDARD_TYPES = (int, float, np.ndarray, jax.Array, np.number)


PLACEHOLDER: Any = ...
"""A leaf of a template that is not to be restored."""


def prepare_leaf(keys: Keys, leaf: Any, save_args: Any = None) -> Any:
    """Return a leaf as the engine takes it. Raises ValueError for types without a handler."""
    if is_empty(leaf):
        return empty_as_saved(leaf)
    handler = type_handlers.custom_handler(leaf)
    if handler is not None:
        return _serialize(keys, leaf, handler, save_args)
    dtype = getattr(save_args, "dtype", None)
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf if dtype is None or is_key(leaf) else _cast_array(leaf, dtype)
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if type(leaf) in _SCALARS:
        return leaf if dtype is None or isinstance(leaf, str | bytes) else _cast(leaf, dtype)
    raise ValueError(
        f"TypeHandler lookup failed for: type={type(leaf)}, leaf {'/'.join(keys)!r}: only arrays, "
        "numbers, text and types with a handler of yours (type_handlers.register_type_handler) "
        "can be saved"
    )


def _cast_array(array: Any, dtype: Any) -> Any:
    """Cast an array on its devices."""
    try:
        return array.astype(dtype)
    except ValueError:
        if not isinstance(array, jax.Array):
            raise
    # `jax.set_mesh` has set another mesh than the array's, and JAX computes on that alone.
    shards = [
        jax.device_put(np.asarray(shard.data).astype(dtype), shard.device)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _cast(number: Any, dtype: Any) -> Any:
    return np.asarray(number).astype(dtype).item()


# Custom type handlers


def _serialize(keys: Keys, leaf: Any, handler: Any, save_args: Any) -> files_lib.Files:
    with files_lib.empty_directory() as directory:
        info = _param_info(keys, directory, handler.typestr())
        args = [save_args if save_args is not None else type_handlers.SaveArgs()]
        files_lib.wait_for(files_lib.await_result(handler.serialize([leaf], [info], args)))
        return files_lib.pack(directory, handler.typestr())


def _deserialize(keys: Keys, saved: SavedStates, args: Any) -> Any:
    typestr = saved.states[0]["by"]
    handler = type_handlers.handler_for_typestr(typestr)
    with files_lib.empty_directory() as directory:
        files_lib.unpack(saved.states, directory)
        args = args if args is not None else type_handlers.RestoreArgs()
        info = _param_info(keys, directory, typestr)
        return files_lib.await_result(handler.deserialize([info], [args]))[0]


def _param_info(keys: Keys, directory: Any, typestr: str) -> type_handlers.ParamInfo:
    name = ".".join(keys)
    path = files_lib.as_path(directory) / name
    return type_handlers.ParamInfo(name, directory, path, value_typestr=typestr)


# Restoring

Template = Outline | ArrayNumber
"""An array that the engine restores as it is wanted: its outline, or its number if as saved."""


@dataclass(frozen=True, slots=True)
class WantedLeaf:
    """A leaf that the engine reads, and that is converted afterwards."""

    keys: Keys
    saved: Any
    """A LeafSpec, or the value itself."""
    kind: Any = None
    """The type that was asked for. None stands for the saved one."""
    dtype: Any = None
    sharding: Any = None
    shape: tuple[int, ...] | None = None
    args: Any = None

    def template(self, number: ArrayNumber) -> Any:
        """Return the template of an array for the engine, or `number` to read it as saved."""
        spec = self.saved
        shape, dtype = spec.logical_shape, numpy_dtype(spec.dtype)
        is_jax = self.kind is jax.Array if self.kind is not None else spec.kind == "jax"
        is_cut = is_jax and is_cut_by_jax(spec.dtype)
        asked = (self.kind, self.dtype, self.sharding, self.shape)
        if all(said is None for said in asked) and not is_cut:
            return number
        if spec.kind == "key":
            key = jax.eval_shape(lambda: jax.random.key(0, impl=spec.prng))
            return jax.ShapeDtypeStruct(shape, key.dtype, sharding=self.sharding)
        if not is_jax or self._is_reshaped or is_cut:
            view = np.broadcast_to(np.zeros((), dtype), shape)
            return view[()] if spec.kind == "scalar" else view
        if self.is_cast_by_engine:
            dtype = np.dtype(self.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    @property
    def is_cast_by_engine(self) -> bool:
        if self.dtype is None or not isinstance(self.saved, LeafSpec):
            return False
        return is_floating(np.dtype(self.dtype).name) and is_floating(self.saved.dtype)

    @property
    def _is_reshaped(self) -> bool:
        return self.shape is not None and self.shape != tuple(self.saved.logical_shape)

    def finish(self, arrays: Iterator[Any]) -> Any:
        """Return the value as it is wanted. Arrays take the next one that was read."""
        if isinstance(self.saved, SavedStates):
            return _deserialize(self.keys, self.saved, self.args)
        if not isinstance(self.saved, LeafSpec):
            return _converted(self.keys, self.saved, self.kind, self.dtype, self.sharding)
        value = next(arrays)
        if self.saved.kind == "key":
            if self.kind is not np.ndarray:
                return value
            return np.asarray(jax.random.key_data(value), self.dtype)
        if self.shape is not None and self._is_reshaped:
            cut = np.asarray(value)[tuple(slice(0, n) for n in self.shape)]
            pads = [(0, n - have) for n, have in zip(self.shape, cut.shape, strict=True)]
            value = np.pad(cut, pads)
        return _converted(self.keys, value, self.kind, self.dtype, self.sharding)


def want_of(keys: Keys, saved: Any, args: Any, like: Any = None) -> WantedLeaf | Template:
    """Return how to restore a leaf by its RestoreArgs, which may be Orbax's own.

    `like` is the leaf of a template. It has the dtype and shape that ArrayRestoreArgs leave open,
    unless they say `strict=False`.
    """
    if not hasattr(args, "restore_type"):
        return WantedLeaf(keys, saved)
    kind, dtype, sharding = args.restore_type, args.dtype, _sharding_of(args)
    for known in (jax.Array, np.ndarray):
        if isinstance(kind, type) and issubclass(kind, known):
            kind = known
    shape = getattr(args, "global_shape", None)
    if shape is None:
        shape = getattr(args, "shape", None)
    strict = getattr(args, "strict", True)
    if strict and hasattr(args, "global_shape") and hasattr(like, "dtype"):
        shape = like.shape if shape is None else shape
        dtype = like.dtype if dtype is None else dtype
    shape = None if shape is None else tuple(shape)
    is_key_dtype = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if kind is None or kind is jax.Array:
        found = template_of(saved, dtype, shape, sharding)
        if found is None and dtype is not None and not is_key_dtype:
            # JAX has 32 bits, unless it was told to have 64.
            dtype = jax.dtypes.canonicalize_dtype(dtype)
            found = template_of(saved, dtype, shape, sharding)
        if found is not None:
            return found
    if isinstance(saved, LeafSpec) and saved.kind == "key":
        return _want_key(keys, saved, kind, dtype, sharding, shape)
    if is_key_dtype:
        where = "/".join(keys)
        raise ValueError(f"leaf {where!r}: a PRNG key is asked for, and none was saved")
    _check_shape(keys, saved, shape, strict)
    return WantedLeaf(keys, saved, kind, dtype, sharding, shape, args)


def _sharding_of(args: Any) -> Any:
    sharding: Any = getattr(args, "sharding", None)
    if sharding is None:
        mesh = getattr(args, "mesh", None)
        axes = getattr(args, "mesh_axes", None)
        return None if mesh is None else jax.sharding.NamedSharding(mesh, axes or jax.P())
    return sharding.to_jax_sharding() if hasattr(sharding, "to_jax_sharding") else sharding


def _check_shape(keys: Keys, saved: Any, shape: Any, strict: bool) -> None:
    """Raise ValueError if a leaf has another shape and can't be cut or padded to the wanted one."""
    is_array = isinstance(saved, LeafSpec)
    there = tuple(saved.logical_shape) if isinstance(saved, LeafSpec) else ()
    if shape is None or shape == there or not (is_array or _is_number(saved)):
        return
    if strict or not is_array or len(shape) != len(there):
        raise ValueError(
            f"leaf {'/'.join(keys)!r}: Requested shape: {shape} is not compatible with the stored "
            f"shape: {there}. Truncating/padding is disabled; strict=False enables it for arrays "
            "of as many dimensions."
        )


def _want_key(
    keys: Keys, saved: LeafSpec, kind: Any, dtype: Any, sharding: Any, shape: Any
) -> WantedLeaf:
    """Return how to restore PRNG keys: as keys, or as numbers if numpy arrays are asked for.

    A template may have the shape and dtype of the keys or of their numbers. Raises ValueError for
    anything else.
    """
    where = "/".join(keys)
    if kind not in (None, jax.Array, np.ndarray):
        raise ValueError(f"leaf {where!r}: a PRNG key was saved, and {kind.__name__} is asked for")
    is_key_dtype = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    fitting = [] if dtype is not None and not is_key_dtype else [saved.logical_shape]
    fitting += [] if is_key_dtype else [saved.own_shape]
    if shape is not None and shape not in fitting:
        raise ValueError(
            f"leaf {where!r}: Requested shape: {shape} is not compatible with the stored shape: "
            f"{tuple(saved.logical_shape)} of PRNG keys."
        )
    numbers = None if is_key_dtype or kind is not np.ndarray else dtype
    return WantedLeaf(keys, saved, kind, numbers, None if kind is np.ndarray else sharding)


def is_cut_by_jax(dtype: str) -> bool:
    """True if JAX would refuse 64 bits. Such arrays are read into host memory, and cast there."""
    return dtype in _WIDE and not _config.jax_enable_x64


def template_of(saved: Any, dtype: Any, shape: Any, sharding: Any) -> Template | None:
    """Return the template of a JAX array that needs no conversion, or None for other leaves."""
    if type(saved) is not LeafSpec or saved.kind != "jax" or is_cut_by_jax(saved.dtype):
        return None
    own = numpy_dtype(saved.dtype)
    if (dtype is not None and dtype != own) or (shape is not None and shape != saved.own_shape):
        return None
    return Outline(saved.own_shape, own, sharding, committed=True)


def _converted(keys: Keys, value: Any, kind: Any, dtype: Any, sharding: Any) -> Any:
    """Return a value with the type, dtype and sharding that are asked for. Raises ValueError."""
    if kind is None or is_empty(value):
        kind = next((t for t in (jax.Array, np.ndarray) if isinstance(value, t)), None)
    if kind is None:
        return _cast(value, dtype) if dtype is not None and _is_number(value) else value
    is_text = kind in (str, bytes)
    is_scalar = kind in (int, float, bool) or (
        isinstance(kind, type) and issubclass(kind, np.generic)
    )
    is_known = is_text or is_scalar or kind in (jax.Array, np.ndarray)
    if isinstance(value, str | bytes) != is_text or not is_known:
        asked = getattr(kind, "__name__", str(kind))
        raise ValueError(
            f"leaf {'/'.join(keys)!r}: {type(value).__name__} was saved, and {asked} is asked for; "
            "restore_type takes jax.Array, np.ndarray, int, float, bool, str and numpy's scalars"
        )
    if is_text:
        return value
    if kind is jax.Array:
        return _as_jax(keys, value, dtype, sharding)
    if kind is np.ndarray:
        return np.asarray(value, dtype)
    if np.ndim(value):
        raise ValueError(
            f"leaf {'/'.join(keys)!r}: an array of shape {np.shape(value)} was saved, and "
            f"{kind.__name__} is asked for"
        )
    item = np.asarray(value, dtype).item()
    return item if kind in _ABSTRACT else kind(item)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _as_jax(keys: Keys, value: Any, dtype: Any, sharding: Any) -> jax.Array:
    """Return a value as a JAX array. Raises ValueError for integers that JAX would cut off."""
    if isinstance(value, jax.Array):
        return value if dtype is None or value.dtype == dtype else _cast_array(value, dtype)
    array, saved = np.asarray(value, dtype), np.asarray(value)
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if saved.size and saved.dtype.name in _WIDE and saved.dtype.kind in "iu" and kept.kind in "iu":
        limits = np.iinfo(kept)
        if saved.min() < limits.min or saved.max() > limits.max:
            raise ValueError(
                f"leaf {'/'.join(keys)!r} holds integers that {kept.name} can't hold, from "
                f"{saved.min()} to {saved.max()}: restore it as np.ndarray, or set jax_enable_x64"
            )
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
