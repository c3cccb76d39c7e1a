"""Where bytes live: a directory, a bucket or memory; `open_store` picks by path."""

from ostraka.storage._base import (
    ANYTHING,
    USUAL_WRITERS,
    FileInfo,
    FileReader,
    FileWriter,
    Parts,
    PlaceLock,
    Store,
    is_temporary,
)
from ostraka.storage._claim import Claim, claimed, is_claim, refuse_claimed
from ostraka.storage._local import LocalStore
from ostraka.storage._memory import MemoryStore
from ostraka.storage._open import PathLike, open_store

__all__ = [
    "ANYTHING",
    "USUAL_WRITERS",
    "Claim",
    "FileInfo",
    "FileReader",
    "FileWriter",
    "LocalStore",
    "MemoryStore",
    "Parts",
    "PathLike",
    "PlaceLock",
    "Store",
    "claimed",
    "is_claim",
    "is_temporary",
    "open_store",
    "refuse_claimed",
]
