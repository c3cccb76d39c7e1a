"""How leaves are saved and restored: `SaveArgs`, `RestoreArgs`, and custom type handlers."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._names import absent, refuse_options
from ostraka.compat.orbax.options import ArrayFileOptions, BroadcastOptions, names_of
from ostraka.compat.orbax.tree import is_empty
from ostraka.formats.source import names_in
from ostraka.storage import open_store

_BY_HAND = "it is for reading and writing Orbax's files by hand; ostraka.open reads them"


@dataclass
class SaveArgs:
    """How to save a leaf. `dtype` casts it. The other options have no effect."""

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

    `global_shape` must match the array. With `strict=False` the array is cut or padded with zeros.
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
    """An `ArrayRestoreArgs`. The engine shares reads between replicas where that pays."""

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
    # About Orbax's own files, without effect.
    use_compression: bool = True
    use_zarr3: bool = False
    byte_limiter: Any = None
    device_host_byte_limiter: Any = None
    ocdbt_target_data_file_size: int | None = None
    ts_context: Any = None
    enable_pinned_host_transfer: bool = False
    raise_array_data_missing_error: bool = True
    write_shape: tuple[int, ...] | None = None
    is_prioritized_key_fn: Any = None

    def replace(self, **changes: Any) -> ParamInfo:
        return replace(self, **changes)

    async def await_path_creation(self) -> Any:
        return self.parent_dir


class TypeHandler(abc.ABC):
    """Saves and restores leaves of a custom type, in files below `info.parent_dir`."""

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

    def finalize(self, directory: Any) -> None:  # noqa: B027 - a subclass may leave it out
        """Part of Orbax's interface, and not called here."""


class _BuiltIn(TypeHandler):
    """A handler of a type that the engine itself saves.

    A subclass that overrides `serialize` and `deserialize` is a custom handler.
    """

    kind = ""

    def __init__(self, *positional: Any, **options: Any):
        refuse_options(type(self).__name__, options, _IGNORED)

    def typestr(self) -> str:
        return self.kind

    async def serialize(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__}.serialize and .deserialize are not supported: Ostraka saves "
            "and restores such leaves itself; give them to a checkpointer"
        )

    deserialize = serialize


_IGNORED = (
    *names_of(ArrayFileOptions, BroadcastOptions),
    "primary_host",
    "dispatcher",
    "callback",
    "ocdbt_process_id",
    "deepcopy_host_arrays",
    "filename",
    "replica_id",
    "metadata_key",
)


def _is_custom(handler: Any) -> bool:
    return not isinstance(handler, _BuiltIn) or type(handler).serialize is not _BuiltIn.serialize


class ArrayHandler(_BuiltIn):
    kind = "jax.Array"


class SingleReplicaArrayHandler(ArrayHandler):
    """An `ArrayHandler`. The engine shares reads between replicas where that pays."""


class NumpyHandler(_BuiltIn):
    kind = "np.ndarray"


class ScalarHandler(_BuiltIn):
    kind = "scalar"


class StringHandler(_BuiltIn):
    kind = "string"


class TypeHandlerRegistry:
    """Handlers by type, for `PyTreeCheckpointHandler(type_handler_registry=)`.

    Ostraka saves arrays, numbers and strings itself, whatever a registry has for them.
    """

    def __init__(self, *handlers: tuple[Any, Any]):
        self.replace(handlers)

    def replace(self, handlers: Sequence[tuple[Any, Any]]) -> None:
        self.handlers = list(handlers)
        self.has_custom = any(_is_custom(handler) for _, handler in handlers)

    def add(self, ty: Any, handler: Any, func: Any = None, override: bool = False) -> None:
        if any(known is ty for known, _ in self.handlers) and not override:
            raise ValueError(f'A TypeHandler for "{ty}" is already registered.')
        self.replace([(ty, handler), *[pair for pair in self.handlers if pair[0] is not ty]])

    def get(self, ty: Any) -> Any:
        for known, handler in self.handlers:
            if isinstance(ty, type) and issubclass(ty, known):
                return handler
        raise ValueError(f"Unknown type: {ty}. Must register a TypeHandler.")

    def has(self, ty: Any) -> bool:
        return any(isinstance(ty, type) and issubclass(ty, known) for known, _ in self.handlers)


GLOBAL_REGISTRY = TypeHandlerRegistry(
    (jax.Array, ArrayHandler()),
    (np.ndarray, NumpyHandler()),
    (str, StringHandler()),
    *[(kind, ScalarHandler()) for kind in (int, float, bytes, np.number)],
)
get_type_handler, has_type_handler = GLOBAL_REGISTRY.get, GLOBAL_REGISTRY.has
create_type_handler_registry = TypeHandlerRegistry


def register_type_handler(ty: Any, handler: Any, func: Any = None, override: bool = False) -> None:
    """Have leaves of a type saved and restored by a handler."""
    if func is not None:
        raise NotImplementedError("register_type_handler(func=) is not supported; give the type")
    GLOBAL_REGISTRY.add(ty, handler, override=override)


def supported_types() -> list[Any]:
    return [known for known, _ in GLOBAL_REGISTRY.handlers]


def is_supported_type(value: Any, pytree_metadata_options: Any = None) -> bool:
    return has_type_handler(type(value))


def is_supported_empty_value(value: Any, pytree_metadata_options: Any = None) -> bool:
    """True for None and for empty containers that need no handler."""
    is_named = isinstance(value, tuple) and hasattr(type(value), "_fields")
    return is_empty(value) and not is_named


def is_ocdbt_checkpoint(path: Any) -> bool:
    """True if Orbax wrote the arrays at a path into its OCDBT database."""
    return not {"manifest.ocdbt", "ocdbt.process_0"}.isdisjoint(names_in(open_store(path)))


def get_ts_context(*, use_ocdbt: bool = True, **limits: Any) -> Any:
    """Return a TensorStore context. Ostraka does not use it."""
    import tensorstore

    given = {k: v for k, v in limits.items() if v is not None}
    known = ("file_io_concurrency_limit", "data_copy_concurrency_limit")
    refuse_options("get_ts_context", given, known)
    spec = {name.removesuffix("_limit"): {"limit": limit} for name, limit in given.items()}
    made: Any = tensorstore.Context(spec)
    return made


def register_standard_handlers_with_options(**options: Any) -> None:
    """Do nothing: the options are about Orbax's own files."""


get_json_tspec_read = absent("type_handlers.get_json_tspec_read", _BY_HAND)
get_json_tspec_write = absent("type_handlers.get_json_tspec_write", _BY_HAND)
get_cast_tspec_serialize = absent("type_handlers.get_cast_tspec_serialize", _BY_HAND)
get_cast_tspec_deserialize = absent("type_handlers.get_cast_tspec_deserialize", _BY_HAND)
async_serialize = absent("serialization.async_serialize", "use ostraka.save")
async_deserialize = absent("serialization.async_deserialize", "use ostraka.restore")
merge_ocdbt_per_process_files = absent("type_handlers.merge_ocdbt_per_process_files", _BY_HAND)
check_input_arguments = absent("type_handlers.check_input_arguments", "use zip(strict=True)")


def custom_handler(value: Any) -> Any:
    """Return the custom handler for a leaf, or None if the engine saves it."""
    for known, handler in GLOBAL_REGISTRY.handlers if GLOBAL_REGISTRY.has_custom else ():
        if isinstance(value, known):
            return handler if _is_custom(handler) else None
    return None


def handler_for_typestr(typestr: str) -> Any:
    for _, handler in GLOBAL_REGISTRY.handlers:
        if _is_custom(handler) and handler.typestr() == typestr:
            return handler
    raise ValueError(
        f"a leaf was saved by the type handler {typestr!r}, and none of that name is registered; "
        "call type_handlers.register_type_handler first"
    )
