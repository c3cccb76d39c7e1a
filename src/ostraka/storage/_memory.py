"""A checkpoint in this process's memory: `memory://name`. For tests and notebooks."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from ostraka.errors import Busy
from ostraka.storage._base import byte_views

_places: dict[str, dict[str, bytearray]] = {}
_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


class MemoryStore:
    """Names are keys of a dictionary that lives as long as the process."""

    def __init__(self, name: str):
        self.location = f"memory://{name}"
        self._name = name

    def prepare(self) -> bool:
        with _guard:
            is_new = self._name not in _places
            _places.setdefault(self._name, {})
            return is_new

    def remove_if_empty(self) -> None:
        with _guard:
            if not _places.get(self._name, True):
                del _places[self._name]

    @contextmanager
    def exclusive(self) -> Generator[None]:
        with _guard:
            lock = _locks.setdefault(self._name, threading.Lock())
        if not lock.acquire(blocking=False):
            raise Busy(
                f"another save to {self.location} is under way; wait for it, or save elsewhere"
            )
        try:
            yield
        finally:
            lock.release()

    def get(self, name: str) -> bytes:
        return bytes(self._find(name))

    def put(self, name: str, data: bytes) -> None:
        _places.setdefault(self._name, {})[name] = bytearray(data)

    def create(self, name: str, size: int) -> _MemoryWriter:
        data = bytearray(size)
        _places.setdefault(self._name, {})[name] = data
        return _MemoryWriter(data)

    def open(self, name: str) -> _MemoryReader:
        return _MemoryReader(self._find(name))

    def list(self) -> list[str] | None:
        place = _places.get(self._name)
        return None if place is None else sorted({name.split("/")[0] for name in place})

    def settle(self, directory: str) -> None:
        pass

    def delete(self, name: str) -> None:
        place = _places.get(self._name, {})
        for key in [k for k in place if k == name or k.startswith(f"{name}/")]:
            del place[key]

    def _find(self, name: str) -> bytearray:
        data = _places.get(self._name, {}).get(name)
        if data is None:
            missing = f"{self.location}/{name}"
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
        return data


class _MemoryWriter:
    def __init__(self, data: bytearray):
        self._data = data

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        for view in byte_views(buffers):
            self._data[offset : offset + view.nbytes] = view
            offset += view.nbytes

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class _MemoryReader:
    def __init__(self, data: bytearray):
        self._data = data
        self.size = len(data)

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        total = 0
        for view in byte_views(buffers):
            found = self._data[offset : offset + view.nbytes]
            view[: len(found)] = found
            offset += len(found)
            total += len(found)
        return total

    def close(self) -> None:
        pass
