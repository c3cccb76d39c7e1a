"""One leaf: as it is saved, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ostraka._inplace import Outline
from ostraka._nodes import ArrayNumber, SavedStates
from ostraka._spec import LeafSpec, is_floating, numpy_dtype
from ostraka._tree import is_key
from ostraka.compat.orbax import type_handlers
from ostraka.compat.orbax._files import Files, empty_directory, pack, resolve, unpack, wait_for
from ostraka.compat.orbax._place import as_path
from ostraka.compat.orbax._tree import Keys, empty_as_saved, is_empty

_SCALARS = (bool, int, float, str, bytes)
_WIDE = frozenset(("int64", "uint64", "float64", "complex128"))
_config: Any = jax.config
"""JAX's flags, which its type declarations leave out."""
STANDARD_TYPES = (int, float, np.ndarray, jax.Array, np.number)


PLACEHOLDER: Any = ...
"""A leaf of a template that is not to be restored."""


def prepare_leaf(keys: Keys, leaf: Any, save_args: Any = None) -> Any:
    """A leaf as the engine takes it. Raises ValueError for types that nobody handles."""
    if is_empty(leaf):
        return empty_as_saved(leaf)
    handler = type_handlers.own_handler(leaf)
    if handler is not None:
        return _serialize(keys, leaf, handler, save_args)
    dtype = getattr(save_args, "dtype", None)
    if dtype is None and type(leaf) in _SCALARS:
        return leaf
    if isinstance(leaf, jax.Array | np.ndarray):
        if dtype is None or is_key(leaf):
            return leaf
        return leaf.astype(dtype)
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if type(leaf) in _SCALARS:
        return leaf if dtype is None or isinstance(leaf, str | bytes) else _cast(leaf, dtype)
    raise ValueError(
        f"TypeHandler lookup failed for: type={type(leaf)}, leaf {'/'.join(keys)!r}: only arrays, "
        "numbers, text and types with a handler of yours (type_handlers.register_type_handler) "
        "can be saved"
    )


def _cast(number: Any, dtype: Any) -> Any:
    return np.asarray(number).astype(dtype).item()


def _infos(keys: Keys, directory: Any, typestr: str) -> Any:
    name = ".".join(keys)
    return type_handlers.ParamInfo(
        name=name, parent_dir=directory, path=as_path(directory) / name, value_typestr=typestr
    )


def _serialize(keys: Keys, leaf: Any, handler: Any, save_args: Any) -> Files:
    with empty_directory() as directory:
        info = _infos(keys, directory, handler.typestr())
        args = [save_args if save_args is not None else type_handlers.SaveArgs()]
        wait_for(resolve(handler.serialize([leaf], [info], args)))
        return pack(directory, handler.typestr())


def _deserialize(keys: Keys, saved: SavedStates, args: Any) -> Any:
    typestr = saved.states[0]["by"]
    handler = type_handlers.handler_for_typestr(typestr)
    with empty_directory() as directory:
        unpack(saved.states, directory)
        args = args if args is not None else type_handlers.RestoreArgs()
        found = resolve(handler.deserialize([_infos(keys, directory, typestr)], [args]))
    return found[0]


Template = Outline | ArrayNumber
"""Of an array that comes back as it was saved: what it is and where it goes, or its number."""


@dataclass(frozen=True, slots=True)
class Want:
    """How one leaf is to come back."""

    keys: Keys
    saved: Any
    """A LeafSpec, or the value itself."""
    kind: Any = None
    """The type that was asked for; None for that which was saved."""
    dtype: Any = None
    sharding: Any = None
    shape: tuple[int, ...] | None = None
    strict: bool = True
    args: Any = None

    def template(self, number: Any) -> Any:
        """What the engine is to restore, for arrays only; the number if that is as it was saved."""
        spec = self.saved
        shape, dtype = spec.logical_shape, numpy_dtype(spec.dtype)
        is_cut = self.is_jax and is_cut_by_jax(spec.dtype)
        if number is not None and self.is_as_saved and not is_cut:
            return number
        if spec.kind == "key":
            key = jax.eval_shape(lambda: jax.random.key(0, impl=spec.prng))
            return jax.ShapeDtypeStruct(shape, key.dtype, sharding=self.sharding)
        if not self.is_jax or self.is_reshaped or is_cut:
            view = np.broadcast_to(np.zeros((), dtype), shape)
            return view[()] if spec.kind == "scalar" else view
        if self.is_cast_by_engine:
            dtype = np.dtype(self.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    @property
    def is_as_saved(self) -> bool:
        """Whether nothing is asked for but the leaf."""
        asked = (self.kind, self.dtype, self.sharding, self.shape)
        return all(said is None for said in asked)

    @property
    def is_jax(self) -> bool:
        return self.kind is jax.Array if self.kind is not None else self.saved.kind == "jax"

    @property
    def is_cast_by_engine(self) -> bool:
        if self.dtype is None:
            return False
        return is_floating(np.dtype(self.dtype).name) and is_floating(self.saved.dtype)

    @property
    def is_reshaped(self) -> bool:
        return self.shape is not None and tuple(self.shape) != tuple(self.saved.logical_shape)

    def finish_with(self, arrays: Iterator[Any]) -> Any:
        """The value: of an array, the next that was read."""
        return self.finish(next(arrays) if isinstance(self.saved, LeafSpec) else self.saved)

    def finish(self, value: Any) -> Any:
        """The value that was read, as it was asked for."""
        if isinstance(self.saved, LeafSpec):
            if self.saved.kind == "key":
                return value if self.kind is not np.ndarray else _key_data(value, self.dtype)
            if self.is_reshaped:
                value = self._reshaped(np.asarray(value))
        elif isinstance(value, SavedStates):
            return _deserialize(self.keys, value, self.args)
        return _converted(value, self.kind, self.dtype, self.sharding)

    def _reshaped(self, value: Any) -> Any:
        shape = self.shape
        if self.strict or shape is None or len(shape) != value.ndim:
            raise ValueError(
                f"leaf {'/'.join(self.keys)!r}: Requested shape: {shape} is not compatible with "
                f"the stored shape: {value.shape}. Set strict=False to cut or pad it."
            )
        cut = value[tuple(slice(0, n) for n in shape)]
        pads = [(0, n - have) for n, have in zip(shape, cut.shape, strict=True)]
        return np.pad(cut, pads)


def _key_data(keys: Any, dtype: Any) -> Any:
    return np.asarray(jax.random.key_data(keys), dtype)


def want_array(want: Want) -> Want:
    """`want`, unless another shape, or a PRNG key, is asked for than what was saved."""
    where = "/".join(want.keys)
    if jnp.issubdtype(want.dtype or np.float32, jax.dtypes.prng_key):
        raise ValueError(f"leaf {where!r}: a PRNG key is asked for, and none was saved")
    saved = want.saved
    is_array = isinstance(saved, LeafSpec)
    if not is_array and not isinstance(saved, bool | int | float):
        return want
    there = tuple(saved.logical_shape) if isinstance(saved, LeafSpec) else ()
    if want.shape is not None and want.shape != there and (want.strict or not is_array):
        raise ValueError(
            f"leaf {where!r}: Requested shape: {want.shape} is not compatible with the stored "
            f"shape: {there}. Truncating/padding is disabled; strict=False enables it."
        )
    return want


def want_key(keys: Keys, saved: LeafSpec, kind: Any, dtype: Any, sharding: Any, shape: Any) -> Want:
    """PRNG keys come back as keys, or as their numbers if numpy arrays are asked for.

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
    return Want(keys, saved, kind, numbers, None if kind is np.ndarray else sharding)


def dtype_of_jax(dtype: Any) -> Any:
    """A dtype that is asked for, as JAX has it: 32 bits, unless it was told to have 64."""
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def is_cut_by_jax(dtype: str) -> bool:
    """Whether JAX would refuse 64 bits: then they are read into host memory, and cast there."""
    return dtype in _WIDE and not _config.jax_enable_x64


def template_of(saved: Any, dtype: Any, shape: Any, sharding: Any) -> Template | None:
    """A JAX array that was saved as it is wanted; None if anything of it has to change."""
    if type(saved) is not LeafSpec or saved.kind != "jax" or is_cut_by_jax(saved.dtype):
        return None
    own = numpy_dtype(saved.dtype)
    if (dtype is not None and dtype != own) or (shape is not None and shape != saved.own_shape):
        return None
    return Outline(saved.own_shape, own, sharding, committed=True)


def _converted(value: Any, kind: Any, dtype: Any, sharding: Any) -> Any:
    is_number = isinstance(value, bool | int | float)
    if kind is jax.Array or (kind is None and isinstance(value, jax.Array)):
        if not isinstance(value, jax.Array):
            if isinstance(value, str):
                raise ValueError(f"text was saved, {value[:40]!r}, and a jax.Array is asked for")
            dtype = dtype if dtype is not None else (None if is_number else value.dtype)
            array = np.asarray(value, dtype)
            return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)
        return value if dtype is None or value.dtype == dtype else value.astype(dtype)
    if kind is np.ndarray or (kind is None and isinstance(value, np.ndarray)):
        return np.asarray(value, dtype)
    if kind in (int, float, bool, np.number) and not isinstance(value, str):
        if np.ndim(value):
            raise ValueError(
                f"an array of shape {np.shape(value)} was saved, and {kind.__name__} is asked for"
            )
        item = np.asarray(value, dtype).item()
        return kind(item) if kind in (int, float, bool) else item
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} was saved, and text is asked for")
    if dtype is not None and is_number:
        return _cast(value, dtype)
    return value
