"""Classes and functions that are there to be imported and asked about, and refuse to be used."""

from __future__ import annotations

from typing import Any


def refuse_use(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is not supported by Ostraka's drop-in: there are no emergency checkpoints; use "
        "CheckpointManager, or ostraka.Manager with a mirror"
    )


class Absent:
    """`isinstance` says no; making one raises NotImplementedError."""

    def __init__(self, *args: Any, **options: Any):
        raise refuse_use(type(self).__name__)
