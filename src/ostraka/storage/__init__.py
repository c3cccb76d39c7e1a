"""Where bytes live: a directory, a bucket or memory. `open_store` picks by path."""

from ostraka.storage._base import (
    ANYTHING,
    MOST_BYTES,
    USUAL_READERS,
    USUAL_WRITERS,
    FileInfo,
    FileReader,
    FileWriter,
    PlaceLock,
    Store,
    Traits,
    is_fence,
    is_temporary,
)
from ostraka.storage._claim import (
    Claim,
    Expiry,
    Marker,
    claimed,
    is_claim,
    refuse_claimed,
)
from ostraka.storage._local import LocalStore
from ostraka.storage._memory import MemoryStore
from ostraka.storage._open import (
    PathLike,
    is_inside,
    is_text,
    may_be_path,
    open_above,
    open_store,
    refuse_overlap,
    refuse_swapped,
)
from ostraka.storage.file import A_LINK
from ostraka.storage.requests import opening_bytes

__all__ = [
    "ANYTHING",
    "A_LINK",
    "MOST_BYTES",
    "USUAL_READERS",
    "USUAL_WRITERS",
    "Claim",
    "Expiry",
    "FileInfo",
    "FileReader",
    "FileWriter",
    "LocalStore",
    "Marker",
    "MemoryStore",
    "PathLike",
    "PlaceLock",
    "Store",
    "Traits",
    "claimed",
    "is_claim",
    "is_fence",
    "is_inside",
    "is_temporary",
    "is_text",
    "may_be_path",
    "open_above",
    "open_store",
    "opening_bytes",
    "refuse_claimed",
    "refuse_overlap",
    "refuse_swapped",
]
