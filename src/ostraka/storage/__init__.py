"""Where bytes live: a directory or memory; `open_store` picks by path."""

from ostraka.storage._base import FileReader, FileWriter, Store
from ostraka.storage._hold import DirectoryHold
from ostraka.storage._local import LocalStore
from ostraka.storage._memory import MemoryStore
from ostraka.storage._open import PathLike, open_store

__all__ = [
    "DirectoryHold",
    "FileReader",
    "FileWriter",
    "LocalStore",
    "MemoryStore",
    "PathLike",
    "Store",
    "open_store",
]
