"""A store that counts what is read through it."""

import threading
from collections.abc import Sequence
from typing import Any

from ostraka.storage import MOST_BYTES, open_store


class CountingStore:
    """Counts the bytes and reads of files, and keeps the names of what is read."""

    def __init__(self, path: Any):
        self._store = open_store(path)
        self._lock = threading.Lock()
        self.bytes_read = self.reads = 0
        self.opened: list[str] = []
        self.gotten: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        data = self._store.get(name, most_bytes)
        with self._lock:
            self.gotten[name] = self.gotten.get(name, 0) + len(data)
        return data

    def open(self, name: str, first_bytes: int = 0) -> Any:
        with self._lock:
            self.opened.append(name)
        return _CountingReader(self._store.open(name, first_bytes), self)

    def count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size
            self.reads += 1


class _CountingReader:
    def __init__(self, reader: Any, store: CountingStore):
        self.size = reader.size
        self.close = reader.close
        self._reader = reader
        self._store = store

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        count = self._reader.read_into(offset, buffers)
        self._store.count(count)
        return count
