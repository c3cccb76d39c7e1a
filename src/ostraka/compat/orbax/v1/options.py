"""Options of v1. Those about Orbax's own files and threads have no effect."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from ostraka.compat.orbax.options import AtomicityMode as AtomicityMode
from ostraka.compat.orbax.options import AtomicityOptions as AtomicityOptions
from ostraka.compat.orbax.options import FileOptions as FileOptions
from ostraka.compat.orbax.options import MultiprocessingOptions as MultiprocessingOptions
from ostraka.compat.orbax.v1.handlers import CheckpointableHandlerRegistry, local_registry


class CheckpointLayout(enum.Enum):
    """The layout of a checkpoint. Ostraka and Orbax checkpoints are recognised by their files."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"


@dataclass
class AsyncOptions:
    timeout_secs: int = 1200
    post_finalization_callback: Any = None
    create_directories_asynchronously: bool = True


@dataclass
class _TreeSaving:
    pytree_metadata_options: Any = None


@dataclass
class _TreeLoading:
    partial_load: bool = False


@dataclass
class PyTreeOptions:
    """`PyTreeOptions(loading=PyTreeOptions.Loading(partial_load=True))`."""

    Saving = _TreeSaving
    Loading = _TreeLoading
    saving: _TreeSaving = field(default_factory=_TreeSaving)
    loading: _TreeLoading = field(default_factory=_TreeLoading)


@dataclass
class _Storage:
    """How arrays are stored. `dtype` casts floats and integers."""

    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] | None = None


@dataclass
class _ArraySaving:
    """`scoped_storage_options_creator(path, leaf)` returns the options of a leaf, or None."""

    StorageOptions = _Storage
    storage_options: _Storage = field(default_factory=_Storage)
    use_ocdbt: bool = True
    use_zarr3: bool = True
    use_compression: bool = True
    ocdbt_target_data_file_size: int | None = None
    enable_pinned_host_transfer: bool | None = None
    enable_post_merge_validation: bool = True
    use_replica_parallel: bool | None = None
    min_slice_bytes_for_replica_parallel: int | None = None
    max_replicas_for_replica_parallel: int | None = None
    enable_replica_parallel_separate_folder: bool = False
    enable_write_sharding_file: bool = True
    array_metadata_store: Any = None
    scoped_storage_options_creator: Any = None


@dataclass
class _Broadcast:
    replica_axis_index: int | None = 0
    primary_replica_id: int | None = 0
    broadcast_memory_limit_bytes: int | None = None
    broadcast_memory_scaling_factor: float | None = 0.75


@dataclass
class _ArrayLoading:
    """`enable_padding_and_truncation` cuts arrays, or pads them with zeros, to another shape."""

    LoadAndBroadcastOptions = _Broadcast
    enable_padding_and_truncation: bool = False
    raise_array_data_missing_error: bool = True
    use_load_and_broadcast: bool = False
    load_and_broadcast_options: _Broadcast = field(default_factory=_Broadcast)


@dataclass
class ArrayOptions:
    Saving = _ArraySaving
    Loading = _ArrayLoading
    saving: _ArraySaving = field(default_factory=_ArraySaving)
    loading: _ArrayLoading = field(default_factory=_ArrayLoading)


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
class _GcsDeletion:
    todelete_full_path: str | None = None


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

    GcsDeletionOptions = _GcsDeletion
    gcs_deletion_options: _GcsDeletion = field(default_factory=_GcsDeletion)


@dataclass
class SafetensorsOptions:
    max_over_read_ratio: float | None = None
    read_chunk_bytes: int | None = None
