"""Names of Orbax without an implementation here.

They can be imported and asked about with `isinstance`. Using one raises NotImplementedError.
"""

from __future__ import annotations

import enum
from typing import Any

from ostraka.compat.orbax._refuse import absent
from ostraka.compat.orbax.checkpoint_manager import AbstractCheckpointManager

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

_SMALL_LEAVES = "Ostraka puts small leaves together by itself"
AggregateHandler = absent("aggregate_handlers.AggregateHandler", _SMALL_LEAVES)
MsgpackHandler = absent("aggregate_handlers.MsgpackHandler", _SMALL_LEAVES)
msgpack_restore = absent("msgpack_utils.msgpack_restore", "use flax.serialization.msgpack_restore")
msgpack_serialize = absent(
    "msgpack_utils.msgpack_serialize", "use flax.serialization.msgpack_serialize"
)


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
