"""Options of v1, and `Context`. Those about Orbax's own files and threads have no effect."""

from __future__ import annotations

import copy
import enum
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, Self

import jax

from ostraka.compat.orbax import options as options_lib
from ostraka.compat.orbax._names import Unsupported, refuse, refuse_options
from ostraka.compat.orbax.type_handlers import SaveArgs
from ostraka.compat.orbax.v1.handlers import CheckpointableHandlerRegistry, local_registry

__getattr__ = refuse(__name__, options_lib)


class CheckpointLayout(enum.Enum):
    """The layout of a checkpoint. Ostraka and Orbax checkpoints are recognised by their files."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"


@dataclass
class PyTreeOptions:
    """`PyTreeOptions(loading=PyTreeOptions.Loading(partial_load=True))`."""

    @dataclass
    class Saving:
        pytree_metadata_options: Any = None

    @dataclass
    class Loading:
        partial_load: bool = False

    saving: Saving = field(default_factory=Saving)
    loading: Loading = field(default_factory=Loading)


@dataclass
class ArrayOptions:
    @dataclass
    class Saving(options_lib.ArrayFileOptions):
        """`scoped_storage_options_creator(path, leaf)` returns the options of a leaf, or None."""

        StorageOptions = SaveArgs
        storage_options: Any = field(default_factory=SaveArgs)
        scoped_storage_options_creator: Any = None

    @dataclass
    class Loading:
        """`enable_padding_and_truncation` cuts arrays, or pads them with zeros, to a shape."""

        LoadAndBroadcastOptions = options_lib.BroadcastOptions
        enable_padding_and_truncation: bool = False
        raise_array_data_missing_error: bool = True
        use_load_and_broadcast: bool = False
        load_and_broadcast_options: Any = field(default_factory=options_lib.BroadcastOptions)

    saving: Saving = field(default_factory=Saving)
    loading: Loading = field(default_factory=Loading)


@dataclass
class MemoryOptions:
    write_concurrent_bytes: int | None = None
    read_concurrent_bytes: int | None = None
    transfer_concurrent_bytes: int | None = None
    regulator_options: Any = None
    expected_surge_bytes: int | None = None
    is_prioritized_key_fn: Any = None
    serialization_status_callback: Any = None
    deepcopy_host_arrays: bool = True


@dataclass
class PathwaysOptions:
    checkpointing_impl: Any = None


@dataclass
class CheckpointablesOptions:
    """`registry` has the handler of each checkpointable."""

    registry: CheckpointableHandlerRegistry = field(default_factory=local_registry)

    @classmethod
    def create_with_handlers(cls, *handlers: Any, **named: Any) -> CheckpointablesOptions:
        """Register handlers for any checkpointable, and handlers for those of a name."""
        made = cls()
        for handler in handlers:
            made.registry.add(handler)
        for name, handler in named.items():
            made.registry.add(handler, name)
        return made


@dataclass
class DeletionOptions:
    """A Checkpointer refuses `todelete_full_path`. It deletes steps at once."""

    @dataclass
    class GcsDeletionOptions:
        todelete_full_path: str | None = None

    gcs_deletion_options: GcsDeletionOptions = field(default_factory=GcsDeletionOptions)


@dataclass
class SafetensorsOptions:
    max_over_read_ratio: float | None = None
    read_chunk_bytes: int | None = None


_ACTIVE: ContextVar[Context | None] = ContextVar("ostraka.orbax.v1", default=None)
_DEFAULTS: dict[str, Any] = {
    "pytree_options": PyTreeOptions,
    "array_options": ArrayOptions,
    "async_options": options_lib.AsyncOptions,
    "multiprocessing_options": options_lib.MultiprocessingOptions,
    "file_options": options_lib.FileOptions,
    "pathways_options": PathwaysOptions,
    "memory_options": MemoryOptions,
    "atomicity_options": options_lib.AtomicityOptions,
    "checkpointables_options": CheckpointablesOptions,
    "deletion_options": DeletionOptions,
    "safetensors_options": SafetensorsOptions,
    "checkpoint_layout": lambda: CheckpointLayout.ORBAX,
}


class Context:
    """Options for the calls inside `with Context(…):`. Those of another context are copied.

    Each has a shorter name too: `pytree` for `pytree_options`, `asynchronous` for `async_options`.
    """

    def __init__(self, context: Context | None = None, **given: Any):
        refuse_options("Context", [k for k, v in given.items() if v is not None], _DEFAULTS)
        for name, make in _DEFAULTS.items():
            value = given.get(name)
            if value is None and context is not None:
                value = getattr(context, name)
            setattr(self, name, make() if value is None else copy.deepcopy(value))
        self.checkpoint_layout = self.layout
        self._tokens: list[Token[Context | None]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by copy, of one that is not made yet
            raise AttributeError(name)
        full = "async_options" if name == "asynchronous" else f"{name}_options"
        if full in _DEFAULTS:
            return getattr(self, full)
        raise Unsupported(
            f"Context has no {name!r}: if it is one of Orbax's, Ostraka's drop-in does not support "
            "it; docs/from/orbax.md lists what is missing"
        )

    @property
    def layout(self) -> CheckpointLayout:
        """The layout in force. It may have been set as Orbax's own."""
        given = self.checkpoint_layout
        return CheckpointLayout(getattr(given, "value", given))

    def save_args(self, tree: Any) -> Any:
        """Return the SaveArgs of the leaves of a tree, or None if nothing is asked for."""
        saving = self.array_options.saving
        general, scoped = saving.storage_options, saving.scoped_storage_options_creator
        if scoped is None:
            return None if general.dtype is None else SaveArgs(dtype=general.dtype)

        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: SaveArgs(dtype=(scoped(path, leaf) or general).dtype), tree
        )

    def __enter__(self) -> Self:
        self._tokens.append(_ACTIVE.set(self))
        return self

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.reset(self._tokens.pop())


def active_context(default: Context | None = None) -> Context:
    """Return the context of the caller, or else `default`, or one without any options."""
    return _ACTIVE.get() or default or Context()
