"""Names that programs import from Orbax's private and experimental modules, and hardly use.

Most belong to Orbax's own files, which Ostraka does not write. They can be imported and asked
about with `isinstance`. Using one without an implementation raises NotImplementedError.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._names import absent
from ostraka.compat.orbax.checkpoint_manager import AbstractCheckpointManager

# arrays.sharding

_tree: Any = jax.tree


def construct_maximal_shardings(abstract_state: Any, devices: Sequence[Any] | None = None) -> Any:
    """Return a tree of shardings with as many parts as shapes and devices allow."""
    where = list(jax.devices() if devices is None else devices)
    return _tree.map(lambda leaf: _maximal(tuple(leaf.shape), where), abstract_state)


def _maximal(shape: tuple[int, ...], devices: Sequence[Any]) -> jax.sharding.NamedSharding:
    left = len(devices)
    parts = [1] * len(shape)
    for dimension in sorted(range(len(shape)), key=lambda d: -shape[d]):
        if shape[dimension]:
            parts[dimension] = math.gcd(shape[dimension], left)
            left //= parts[dimension]
    axes = [f"axis_{dimension}" for dimension in range(len(shape))]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(*parts, left), (*axes, "replica"))
    spec = (axis if count > 1 else None for axis, count in zip(axes, parts, strict=True))
    return jax.sharding.NamedSharding(mesh, jax.P(*spec))


# metadata.array_metadata_store


@dataclass
class Store:
    """Accepted by `ArrayHandler(array_metadata_store=)`, without effect."""

    path_resolver: Any = None
    serializer: Any = None
    primary_host: int | None = 0
    write_timeout_secs: int = 600


class Validator:
    """Accepted by `PyTreeCheckpointHandler(array_metadata_validator=)`, without effect."""


class PathResolver:
    """Accepted by `Store`, without effect."""


class Serializer:
    """Accepted by `Store`, without effect."""


validate_all_array_metadatas = absent(
    "array_metadata_store.validate_all_array_metadatas", "call ostraka.verify(path)"
)


# serialization.replica_slices: Ostraka's saves do not call these, so replacing them changes nothing

_BY_HAND = "it is for writing Orbax's files by hand; jax.device_get copies arrays"
ReplicaSlice = absent("replica_slices.ReplicaSlice", _BY_HAND)
ReplicaSlices = absent("replica_slices.ReplicaSlices", _BY_HAND)
transfer_arrays_to_host = absent("replica_slices.transfer_arrays_to_host", _BY_HAND)


# experimental.emergency

_NO_EMERGENCY = (
    "there are no emergency checkpoints: use CheckpointManager, or ostraka.Manager with a mirror"
)
CheckpointManager = absent("CheckpointManager", _NO_EMERGENCY, AbstractCheckpointManager)
CheckpointManagerOptions = absent("CheckpointManagerOptions", _NO_EMERGENCY)
LocalCheckpointOptions = absent("LocalCheckpointOptions", _NO_EMERGENCY)
PersistentCheckpointOptions = absent("PersistentCheckpointOptions", _NO_EMERGENCY)
ReplicatorCheckpointManager = absent(
    "ReplicatorCheckpointManager", _NO_EMERGENCY, AbstractCheckpointManager
)
ReplicatorCheckpointManagerOptions = absent("ReplicatorCheckpointManagerOptions", _NO_EMERGENCY)
initialize_multi_tier_checkpointing = absent("initialize_multi_tier_checkpointing", _NO_EMERGENCY)

# aggregate_handlers, msgpack_utils

_SMALL_LEAVES = "Ostraka puts small leaves together by itself"
AggregateHandler = absent("aggregate_handlers.AggregateHandler", _SMALL_LEAVES)
MsgpackHandler = absent("aggregate_handlers.MsgpackHandler", _SMALL_LEAVES)
msgpack_restore = absent("msgpack_utils.msgpack_restore", "use flax.serialization.msgpack_restore")
msgpack_serialize = absent(
    "msgpack_utils.msgpack_serialize", "use flax.serialization.msgpack_serialize"
)


# pathways


class CheckpointingImpl(enum.Enum):
    """How Orbax uses Pathways. The drop-in does without."""

    COLOCATED_PYTHON = enum.auto()
    PERSISTENCE = enum.auto()
    NO_DISPATCHER = enum.auto()

    @classmethod
    def from_options(
        cls, *, use_colocated_python: bool = False, use_persistence_array_handler: bool = False
    ) -> CheckpointingImpl:
        if use_colocated_python or use_persistence_array_handler:
            raise NotImplementedError("checkpoints by Pathways are not supported")
        return cls.NO_DISPATCHER


def register_type_handlers(*, checkpointing_impl: Any = None, **options: Any) -> None:
    """Raise NotImplementedError if a kind of Pathways is asked for."""
    if checkpointing_impl not in (None, CheckpointingImpl.NO_DISPATCHER):
        raise NotImplementedError("checkpoints by Pathways are not supported")
