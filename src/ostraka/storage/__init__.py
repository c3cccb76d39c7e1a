"""Where bytes live: a directory, a bucket or memory; `open_store` picks by path."""

from ostraka.storage._base import (
    ANYTHING,
    MOST_BYTES,
    USUAL_READERS,
    USUAL_WRITERS,
    FileInfo,
    FileReader,
    FileWriter,
    Parts,
    PlaceLock,
    Store,
    is_temporary,
)
from ostraka.storage._claim import Claim, Marker, claimed, is_claim, is_overdue, refuse_claimed
from ostraka.storage._directory import A_LINK
from ostraka.storage._local import LocalStore
from ostraka.storage._memory import MemoryStore
from ostraka.storage._open import PathLike, is_text, may_be_path, open_above, open_store
from ostraka.storage._requests import opening_bytes

__all__ = [
    "ANYTHING",
    "A_LINK",
    "MOST_BYTES",
    "USUAL_READERS",
    "USUAL_WRITERS",
    "Claim",
    "FileInfo",
    "FileReader",
    "FileWriter",
    "LocalStore",
    "Marker",
    "MemoryStore",
    "Parts",
    "PathLike",
    "PlaceLock",
    "Store",
    "claimed",
    "is_claim",
    "is_overdue",
    "is_temporary",
    "is_text",
    "may_be_path",
    "open_above",
    "open_store",
    "opening_bytes",
    "refuse_claimed",
]
