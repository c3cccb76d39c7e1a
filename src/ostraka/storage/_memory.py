"""A checkpoint in this process's memory: `memory://name`. For tests and notebooks."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ostraka.errors import Busy, StoreError, TooLarge
from ostraka.storage._base import ANYTHING, MOST_BYTES, FileInfo, Traits, byte_views

_guard = threading.RLock()
_files: dict[str, tuple[bytearray, int, float]] = {}
"""All files of all places, by place and name: bytes, version, and the time of the last change."""
_places: set[str] = set()
"""Places that were prepared: they may be empty."""
_locks: dict[str, threading.Lock] = {}
_versions = itertools.count(1)


class MemoryStore:
    """Names are keys of a dictionary that lives as long as the process."""

    traits = Traits()
    is_named = True
    """True, since equal locations are the same place."""

    def __init__(self, name: str):
        self._name = name.strip("/")
        self.location = f"memory://{self._name}"

    def __str__(self) -> str:
        return self.location

    def at(self, name: str) -> MemoryStore:
        return MemoryStore(f"{self._name}/{name}")

    def prepare(self) -> bool:
        with _guard:
            is_new = not self.exists()
            _places.add(self._name)
            return is_new

    def exists(self) -> bool:
        with _guard:
            below = self._key("")
            known = itertools.chain(_files, _places)
            return self._name in _places or any(key.startswith(below) for key in known)

    def remove_if_empty(self) -> None:
        with _guard:
            if not self.list():
                _places.discard(self._name)

    def lock(self) -> _MemoryLock:
        return _MemoryLock(self)

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        data = self._find(name)
        if len(data) > most_bytes:
            raise TooLarge(f"{self.location}/{name}", len(data), most_bytes)
        return bytes(data)

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], Any] | None = None,
        durable: bool = True,
    ) -> None:
        with _guard:
            there = self.look(name)
            if replaces is not ANYTHING and replaces != (there and there.version):
                raise Busy(f"another save has replaced {self.location}/{name} meanwhile")
            if check is not None:
                check()
            self._add(name, bytearray(data))

    def touch(self, name: str, *, create: bool, note: bytes = b"") -> None:
        with _guard:
            if not create:
                self._add(name, self._find(name))
            elif self.look(name) is not None:
                raise StoreError(f"{self.location}/{name} is there", errno=errno.EEXIST)
            else:
                self._add(name, bytearray(note))

    def create(
        self, name: str, size: int, *, beside: int = 1, replace: bool = False
    ) -> MemoryWriter:
        data = bytearray(size)
        if not replace:
            self._add(name, data)
        return MemoryWriter(data, (lambda: self._add(name, data)) if replace else None)

    def open(self, name: str, first_bytes: int = 0) -> _MemoryReader:
        return _MemoryReader(self._find(name))

    def look(self, name: str) -> FileInfo | None:
        file = _files.get(self._key(name))
        return None if file is None else _info(name, *file)

    def list(self) -> list[str]:
        below = self._key("")
        with _guard:
            keys = [key for key in itertools.chain(_files, _places) if key.startswith(below)]
        return sorted({key[len(below) :].split("/")[0] for key in keys})

    def files(self, prefix: str) -> list[FileInfo]:
        start, above = self._key(prefix), len(self._key(""))
        with _guard:
            found = [(key[above:], file) for key, file in _files.items() if key.startswith(start)]
        return [_info(name, *file) for name, file in sorted(found, key=lambda pair: pair[0])]

    def is_link(self, name: str) -> bool:
        return False

    def sync(self, directory: str) -> None:
        pass

    def discard_uploads(self) -> None:
        pass

    def delete(
        self, name: str, *, version: Any = ANYTHING, check: Callable[[], Any] | None = None
    ) -> None:
        key = self._key(name).rstrip("/")
        with _guard:
            if check is not None:
                check()
            there = self.look(name)
            if version is not ANYTHING and there is not None and there.version != version:
                raise Busy(f"another save has replaced {self.location}/{name} meanwhile")
            for found in [k for k in _files if k == key or k.startswith(f"{key}/")]:
                del _files[found]
            if name:
                _places.difference_update(
                    [place for place in _places if place == key or place.startswith(f"{key}/")]
                )

    def delete_link(self, name: str) -> None:
        raise StoreError(f"{self.location}/{name} is no link")

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def _add(self, name: str, data: bytearray) -> None:
        with _guard:
            _files[self._key(name)] = (data, next(_versions), time.monotonic())

    def _find(self, name: str) -> bytearray:
        file = _files.get(self._key(name))
        if file is None:
            missing = f"{self.location}/{name}"
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
        return file[0]


def _info(name: str, data: bytearray, version: int, changed_s: float) -> FileInfo:
    return FileInfo(name, len(data), changed_s, version)


class _MemoryLock:
    scope = b"memory".hex().ljust(16, "0")

    def __init__(self, store: MemoryStore):
        with _guard:
            self._lock = _locks.setdefault(store.location, threading.Lock())
        self._is_held = self._lock.acquire(blocking=False)
        self._store = store
        if not self._is_held:
            raise Busy(
                f"another save to {store.location} is under way; wait for it, or save elsewhere"
            )

    def is_in_place(self) -> bool:
        return self._store.exists()

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._lock.release()


class MemoryWriter:
    """A file in memory. `publish` is called when it is finished, and returns its identity."""

    def __init__(self, data: bytearray, publish: Callable[[], str | None] | None):
        self._data = data
        self._end = 0
        self._publish = publish

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        for view in byte_views(buffers):
            self._data[offset : offset + view.nbytes] = view
            offset += view.nbytes
        with _guard:
            self._end = max(self._end, offset)

    def finish(self) -> str | None:
        del self._data[self._end :]
        return None if self._publish is None else self._publish()

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
