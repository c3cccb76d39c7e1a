"""Whether Pathways is used, which the drop-in does not support: code that asks is told no."""

from __future__ import annotations

import enum
from typing import Any

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


class CheckpointingImpl(enum.Enum):
    COLOCATED_PYTHON = enum.auto()
    PERSISTENCE = enum.auto()
    NO_DISPATCHER = enum.auto()

    @classmethod
    def from_options(
        cls, *, use_colocated_python: bool = False, use_persistence_array_handler: bool = False
    ) -> CheckpointingImpl:
        if use_colocated_python or use_persistence_array_handler:
            raise _unsupported()
        return cls.NO_DISPATCHER


def register_type_handlers(*, checkpointing_impl: Any = None, **options: Any) -> None:
    """Accepts what leaves Pathways out, and raises NotImplementedError for the rest."""
    if checkpointing_impl not in (None, CheckpointingImpl.NO_DISPATCHER):
        raise _unsupported()


def _unsupported() -> NotImplementedError:
    return NotImplementedError("checkpoints by Pathways are not supported")
