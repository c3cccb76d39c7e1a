"""A store with faults, over a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostraka.storage import (
    ANYTHING,
    MOST_BYTES,
    FileInfo,
    FileReader,
    FileWriter,
    Parts,
    PathLike,
    PlaceLock,
    Store,
    open_store,
)


class FaultyStore:
    """A store over another that fails, lags, cuts reads short, or loses what was not synced.

    - `fail` has an exception for each verb that is to raise it, by the verb's name: those of
      `Store`; `write`, `finish` and `read_into` of files; and `publish`, the moment of a `put`
      when all is ready and the file is about to appear.
    - `before` is called before each verb, with its name and that of the file, and may raise, sleep,
      wait for something, or have something else happen.
    - `lag_s` is slept before each verb.
    - `cut_reads_bytes` is the most that one `read_into` gives: the rest of the buffers stays as it
      was, as if the file ended there.
    - `has_locks=False` makes it a place without locks, as some network file systems are.
    - `parts` is how it wants files to be written; the default is what the store below says.
    - `lose_unsynced()` does what a power failure does: files that were not finished, and names that
      were not synced, are gone; what was deleted without a sync is back.

    `calls` has all verbs so far, each with its file. Places below it (`at`) share all of this.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        fail: Mapping[str, BaseException] | None = None,
        before: Callable[[str, str], None] | None = None,
        lag_s: float = 0.0,
        cut_reads_bytes: int | None = None,
        has_locks: bool = True,
        parts: Parts | None = None,
    ):
        self._below = open_store(path)
        self._fail = dict(fail or {})
        self._before = before
        self._lag_s = lag_s
        self._cut_reads_bytes = cut_reads_bytes
        self._has_locks = has_locks
        self._unsynced = _Unsynced()
        self._within = ""
        self.calls: list[tuple[str, str]] = []
        self.parts = self._below.parts if parts is None else parts
        self.location = self._below.location

    def __str__(self) -> str:
        return self.location

    def lose_unsynced(self) -> None:
        """Undo what a power failure now would undo."""
        self._unsynced.lose()

    def call(self, verb: str, name: str) -> None:
        """What happens before each verb."""
        name = self._whole(name)
        self.calls.append((verb, name))
        if self._lag_s:
            time.sleep(self._lag_s)
        if self._before is not None:
            self._before(verb, name)
        if verb in self._fail:
            raise self._fail[verb]

    # The verbs

    def at(self, name: str) -> FaultyStore:
        place = object.__new__(FaultyStore)
        place.__dict__.update(self.__dict__)
        place._below = self._below.at(name)
        place._within = self._whole(name)
        place.location = place._below.location
        return place

    def prepare(self) -> bool:
        self.call("prepare", "")
        return self._below.prepare()

    def exists(self) -> bool:
        self.call("exists", "")
        return self._below.exists()

    def remove_if_empty(self) -> None:
        self.call("remove_if_empty", "")
        self._below.remove_if_empty()

    def lock(self) -> PlaceLock | None:
        self.call("lock", "")
        return self._below.lock() if self._has_locks else None

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        self.call("get", name)
        return self._below.get(name, most_bytes)

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], None] | None = None,
        durable: bool = True,
    ) -> None:
        self.call("put", name)
        self._unsynced.directory(self._below, name, self._whole(name))

        def check_and_publish() -> None:
            if check is not None:
                check()
            self.call("publish", name)

        self._below.put(name, data, replaces=replaces, check=check_and_publish, durable=durable)
        if durable:
            self._unsynced.synced(self._whole(name))
        else:
            self._unsynced.made(self._below, name, self._whole(name))

    def touch(self, name: str, *, create: bool) -> None:
        self.call("touch", name)
        self._below.touch(name, create=create)
        if create:
            self._unsynced.made(self._below, name, self._whole(name))

    def create(self, name: str, size: int, *, beside: int = 1, replace: bool = False) -> FileWriter:
        self.call("create", name)
        self._unsynced.directory(self._below, name, self._whole(name))
        writer = self._below.create(name, size, beside=beside, replace=replace)
        if not replace:  # else its name is synced when it is finished
            self._unsynced.made(self._below, name, self._whole(name))
        return _Writer(self, name, writer)

    def open(self, name: str, first_bytes: int = 0) -> FileReader:
        self.call("open", name)
        reader = self._below.open(name, first_bytes)
        return _Reader(self, name, reader, self._cut_reads_bytes)

    def look(self, name: str) -> FileInfo | None:
        self.call("look", name)
        return self._below.look(name)

    def list(self) -> list[str]:
        self.call("list", "")
        return self._below.list()

    def files(self, prefix: str) -> list[FileInfo]:
        self.call("files", prefix)
        return self._below.files(prefix)

    def is_link(self, name: str) -> bool:
        self.call("is_link", name)
        return self._below.is_link(name)

    def sync(self, directory: str) -> None:
        self.call("sync", directory)
        self._below.sync(directory)
        self._unsynced.synced_directory(self._whole(directory))

    def discard_uploads(self) -> None:
        self.call("discard_uploads", "")
        self._below.discard_uploads()

    def delete(self, name: str) -> None:
        self.call("delete", name)
        self._unsynced.deleted(self._below, name, self._whole(name))
        self._below.delete(name)

    def _whole(self, name: str) -> str:
        return "/".join(part for part in (self._within, name) if part)


class _Writer:
    def __init__(self, store: FaultyStore, name: str, writer: FileWriter):
        self._store = store
        self._name = name
        self._writer = writer

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        self._store.call("write", self._name)
        self._writer.write(offset, buffers)

    def finish(self) -> str | None:
        self._store.call("finish", self._name)
        return self._writer.finish()

    def abandon(self) -> None:
        self._writer.abandon()


class _Reader:
    def __init__(self, store: FaultyStore, name: str, reader: FileReader, most_bytes: int | None):
        self._store = store
        self._name = name
        self._reader = reader
        self._most_bytes = most_bytes
        self.size = reader.size

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        self._store.call("read_into", self._name)
        if self._most_bytes is None:
            return self._reader.read_into(offset, buffers)
        left = self._most_bytes
        taken: list[memoryview] = []
        for buffer in buffers:
            view = memoryview(buffer).cast("B") if memoryview(buffer).nbytes else None
            if view is not None and left:
                taken.append(view[:left])
                left -= taken[-1].nbytes
        return self._reader.read_into(offset, taken)

    def close(self) -> None:
        self._reader.close()


class _Unsynced:
    """What a power failure would undo: names that are new, and files that were deleted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[str, tuple[Store, str]] = {}
        self._directories: dict[str, tuple[Store, str]] = {}
        """Directories that are new, whose names are not synced: with them all that is in them."""
        self._deleted: dict[str, tuple[Store, str, bytes]] = {}

    def directory(self, store: Store, name: str, whole: str) -> None:
        """To be called before a file is made: its directory may come with it."""
        directory = name.rpartition("/")[0]
        if directory and not store.files(f"{directory}/"):
            with self._lock:
                self._directories[whole.rpartition("/")[0]] = (store, directory)

    def made(self, store: Store, name: str, whole: str) -> None:
        with self._lock:
            self._made[whole] = (store, name)

    def deleted(self, store: Store, name: str, whole: str) -> None:
        found = [file.name for file in store.files(name)]
        inside = [one for one in found if one == name or one.startswith(f"{name}/")]
        with self._lock:
            for one in inside:
                of_one = whole + one[len(name) :]
                if self._made.pop(of_one, None) is None:
                    self._deleted[of_one] = (store, one, store.get(one))

    def synced(self, whole: str) -> None:
        self.synced_directory(whole.rpartition("/")[0])

    def synced_directory(self, directory: str) -> None:
        """The names directly in a directory stay, and what was deleted from it stays deleted.

        A directory that was deleted with its contents is one of its names.
        """
        with self._lock:
            for new in (self._made, self._directories):
                for whole in [w for w in new if w.rpartition("/")[0] == directory]:
                    del new[whole]
            below = f"{directory}/" if directory else ""
            for whole in [w for w in self._deleted if w.startswith(below)]:
                del self._deleted[whole]

    def lose(self) -> None:
        with self._lock:
            for store, name in [*self._made.values(), *self._directories.values()]:
                store.delete(name)
            for store, name, data in self._deleted.values():
                writer = store.create(name, len(data))
                writer.write(0, [data])
                writer.finish()
            self._made.clear()
            self._directories.clear()
            self._deleted.clear()
