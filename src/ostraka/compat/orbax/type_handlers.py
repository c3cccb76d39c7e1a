"""How a leaf is saved and restored: `SaveArgs`, `RestoreArgs`, and type handlers of one's own."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._refuse import refuse, refuse_options

__getattr__ = refuse(__name__)


@dataclass
class SaveArgs:
    """How to save a leaf: `dtype` casts it; the rest is about Orbax's files, without effect."""

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclass
class RestoreArgs:
    """How to restore a leaf: `restore_type` (`np.ndarray`, `jax.Array`, `int`, …), `dtype`."""

    restore_type: Any = None
    dtype: Any = None


@dataclass
class ArrayRestoreArgs(RestoreArgs):
    """How to restore a `jax.Array`: `sharding`, or `mesh` and `mesh_axes`; as saved without them.

    `global_shape` must be that of the array; with `strict=False` it is cut or padded with zeros.
    """

    restore_type: Any = jax.Array
    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True


@dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """As `ArrayRestoreArgs`: each process reads what its devices need, shared where that pays."""

    single_replica_sharding: Any = None


@dataclass
class ParamInfo:
    """Where a type handler writes a leaf."""

    name: str
    parent_dir: Any
    path: Any = None
    keypath: tuple[Any, ...] | None = None
    skip_deserialize: bool = False
    is_ocdbt_checkpoint: bool = False
    value_typestr: str | None = None


class TypeHandler(abc.ABC):
    """Saves and restores leaves of a type of one's own, in files below `info.parent_dir`."""

    @abc.abstractmethod
    def typestr(self) -> str: ...

    @abc.abstractmethod
    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Any: ...

    @abc.abstractmethod
    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any: ...

    async def metadata(self, infos: Sequence[Any]) -> Any:
        return [None for _ in infos]

    def finalize(self, directory: Any) -> None:  # noqa: B027 - may be left as it is
        pass


class _BuiltIn:
    """A handler of a type that the engine itself saves."""

    def __init__(self, **options: Any):
        refuse_options(type(self).__name__, options, _HARMLESS)


_HARMLESS = (
    "replica_axis_index",
    "primary_replica_id",
    "replica_id",
    "broadcast_memory_limit_bytes",
    "broadcast_memory_scaling_factor",
    "use_replica_parallel",
    "enable_write_sharding_file",
    "metadata_key",
    "array_metadata_store",
    "min_slice_bytes_for_replica_parallel",
    "max_replicas_for_replica_parallel",
    "use_zarr3",
)


class ArrayHandler(_BuiltIn):
    def typestr(self) -> str:
        return "jax.Array"


class SingleReplicaArrayHandler(ArrayHandler):
    """For Orbax: read on one replica and broadcast. Here `share_reads` of the engine does that."""


class NumpyHandler(_BuiltIn):
    def typestr(self) -> str:
        return "np.ndarray"


class ScalarHandler(_BuiltIn):
    def typestr(self) -> str:
        return "scalar"


class StringHandler(_BuiltIn):
    def typestr(self) -> str:
        return "string"


_BUILT_IN: list[tuple[Any, Any]] = [
    (jax.Array, ArrayHandler()),
    (np.ndarray, NumpyHandler()),
    (str, StringHandler()),
    (int, ScalarHandler()),
    (float, ScalarHandler()),
    (bytes, ScalarHandler()),
    (np.number, ScalarHandler()),
]
_REGISTERED: list[tuple[Any, Any]] = []


def register_type_handler(ty: Any, handler: Any, func: Any = None, override: bool = False) -> None:
    """Have leaves of a type saved and restored by a handler."""
    if func is not None:
        raise NotImplementedError("register_type_handler(func=) is not supported; give the type")
    there = [pair for pair in _REGISTERED if pair[0] is ty]
    if (there or any(known is ty for known, _ in _BUILT_IN)) and not override:
        raise ValueError(f'A TypeHandler for "{ty}" is already registered.')
    for pair in there:
        _REGISTERED.remove(pair)
    _REGISTERED.insert(0, (ty, handler))


def get_type_handler(ty: Any) -> Any:
    for known, handler in [*_REGISTERED, *_BUILT_IN]:
        if isinstance(ty, type) and issubclass(ty, known):
            return handler
    raise ValueError(f"Unknown type: {ty}. Must register a TypeHandler.")


def has_type_handler(ty: Any) -> bool:
    try:
        get_type_handler(ty)
    except ValueError:
        return False
    return True


def supported_types() -> list[Any]:
    return [known for known, _ in [*_REGISTERED, *_BUILT_IN]]


def is_supported_type(value: Any, *unused: Any) -> bool:
    return has_type_handler(type(value))


def has_own_handlers() -> bool:
    return bool(_REGISTERED)


def own_handler(value: Any) -> Any:
    """The handler of one's own for a leaf; None for what the engine saves itself."""
    for known, handler in _REGISTERED:
        if isinstance(value, known):
            return None if isinstance(handler, _BUILT_IN_CLASSES) else handler
    return None


def handler_for_typestr(typestr: str) -> Any:
    for _, handler in _REGISTERED:
        if not isinstance(handler, _BUILT_IN_CLASSES) and handler.typestr() == typestr:
            return handler
    raise ValueError(
        f"a leaf was saved by the type handler {typestr!r}, and none of that name is registered; "
        "call type_handlers.register_type_handler first"
    )


_BUILT_IN_CLASSES = (_BuiltIn,)
