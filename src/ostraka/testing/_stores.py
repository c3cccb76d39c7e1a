"""A store with faults, over a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

from ostraka.storage import (
    ANYTHING,
    MOST_BYTES,
    FileInfo,
    FileReader,
    FileWriter,
    PathLike,
    PlaceLock,
    Store,
    Traits,
    open_store,
)


class FaultyStore:
    """A store over another that fails, lags, cuts reads short, or loses unsynced files.

    `calls` lists all verbs so far, each with its file. Stores below it (`at`) share all of this.

    Args:
        path: The path, URL or store below.
        fail: The exception to raise for a verb, by the verb's name. Verbs are those of `Store`, and
            `write`, `finish` and `read_into` of files. `publish` is the moment of a `put` when all
            is ready and the file is about to appear. `remove` is that of a `delete` after its
            check.
        before: Called before each verb, with its name and that of the file. It may raise, sleep,
            wait for something, or change files.
        lag_s: Sleep so long before each verb.
        cut_reads_bytes: The most bytes that one `read_into` reads. The rest of the buffers stays
            unchanged, as if the file ended there.
        has_locks: False makes it a store without locks, as some network file systems are.
        traits: How it wants files to be written; default: as the store below.

    Example:
        >>> store = FaultyStore("runs/7", fail={"create": OSError(errno.ENOSPC, "no space")})
        >>> with pytest.raises(SaveFailed, match="no space"):
        ...     ostraka.save(store, tree)
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
        traits: Traits | None = None,
    ):
        self._below = open_store(path)
        self._fail = dict(fail or {})
        self._before = before
        self._lag_s = lag_s
        self._cut_reads_bytes = cut_reads_bytes
        self._has_locks = has_locks
        self._unsynced = _Unsynced(self._below)
        self._within = ""
        self.calls: list[tuple[str, str]] = []
        self.traits = self._below.traits if traits is None else traits
        self.location = self._below.location

    def __str__(self) -> str:
        return self.location

    def lose_unsynced(self) -> None:
        """Undo what a power failure would undo now.

        Unfinished files and unsynced names are gone. Files that were deleted without a sync are
        back.
        """
        self._unsynced.lose()

    def call(self, verb: str, name: str = "") -> Store:
        """Note a verb, and lag, call `before` or raise as the options say.

        Return the store below, which does the work.
        """
        name = self._whole(name)
        self.calls.append((verb, name))
        if self._lag_s:
            time.sleep(self._lag_s)
        if self._before is not None:
            self._before(verb, name)
        if verb in self._fail:
            raise self._fail[verb]
        return self._below

    # The verbs

    def at(self, name: str) -> FaultyStore:
        place = copy(self)
        place._below = self._below.at(name)
        place._within = self._whole(name)
        place.location = place._below.location
        return place

    def prepare(self) -> bool:
        return self.call("prepare").prepare()

    def exists(self) -> bool:
        return self.call("exists").exists()

    def remove_if_empty(self) -> None:
        self.call("remove_if_empty").remove_if_empty()

    def lock(self) -> PlaceLock | None:
        below = self.call("lock")
        return below.lock() if self._has_locks else None

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        return self.call("get", name).get(name, most_bytes)

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], Any] | None = None,
        durable: bool = True,
    ) -> None:
        self.call("put", name)
        self._note_directory(name)

        def check_and_publish() -> None:
            if check is not None:
                check()
            self.call("publish", name)

        self._below.put(name, data, replaces=replaces, check=check_and_publish, durable=durable)
        if durable:
            self._unsynced.synced_directory(self._whole(name).rpartition("/")[0])
        else:
            self._unsynced.made(self._whole(name))

    def touch(self, name: str, *, create: bool, note: bytes = b"") -> float | None:
        before_s = self.call("touch", name).touch(name, create=create, note=note)
        if create:
            self._unsynced.made(self._whole(name))
        return before_s

    def create(self, name: str, size: int, *, beside: int = 1, replace: bool = False) -> FileWriter:
        self.call("create", name)
        self._note_directory(name)
        writer = self._below.create(name, size, beside=beside, replace=replace)
        if not replace:  # else its name is synced when it is finished
            self._unsynced.made(self._whole(name))
        return _FaultyWriter(self, name, writer)

    def open(self, name: str, first_bytes: int = 0) -> FileReader:
        reader = self.call("open", name).open(name, first_bytes)
        return _FaultyReader(self, name, reader, self._cut_reads_bytes)

    def look(self, name: str) -> FileInfo | None:
        return self.call("look", name).look(name)

    def list(self) -> list[str]:
        return self.call("list").list()

    def files(self, prefix: str) -> list[FileInfo]:
        return self.call("files", prefix).files(prefix)

    def is_link(self, name: str) -> bool:
        return self.call("is_link", name).is_link(name)

    def sync(self, directory: str) -> None:
        self.call("sync", directory).sync(directory)
        self._unsynced.synced_directory(self._whole(directory))

    def discard_uploads(self) -> None:
        self.call("discard_uploads").discard_uploads()

    def delete(
        self, name: str, *, version: Any = ANYTHING, check: Callable[[], Any] | None = None
    ) -> None:
        self.call("delete", name)
        before = self._unsynced.read(self._whole(name))

        def check_and_remove() -> Any:
            until_s = None if check is None else check()
            self.call("remove", name)
            return until_s

        # Without a check the store below needs no fence.
        self._below.delete(name, version=version, check=check and check_and_remove)
        self._unsynced.deleted(before)

    def delete_link(self, name: str) -> None:
        self.call("delete_link", name).delete_link(name)

    def _note_directory(self, name: str) -> None:
        """Note the directory of a file that is about to be made, if it is new."""
        directory = name.rpartition("/")[0]
        if directory and not self._below.files(f"{directory}/"):
            self._unsynced.made(self._whole(directory))

    def _whole(self, name: str) -> str:
        return "/".join(part for part in (self._within, name) if part)


class _FaultyWriter:
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


class _FaultyReader:
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
    """The changes that a power failure would undo: new names, and deleted files."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._made: set[str] = set()
        """New files and directories. Everything in a directory is lost with it."""
        self._deleted: dict[str, bytes] = {}

    def made(self, name: str) -> None:
        with self._lock:
            self._made.add(name)

    def read(self, name: str) -> dict[str, bytes]:
        """Return the files that would be back if this is deleted."""
        before: dict[str, bytes] = {}
        for file in self._store.files(name):
            if file.name == name or file.name.startswith(f"{name}/"):
                with suppress(FileNotFoundError):  # Another process deletes it, too.
                    before[file.name] = self._store.get(file.name)
        return before

    def deleted(self, before: Mapping[str, bytes]) -> None:
        with self._lock:
            self._deleted |= {name: before[name] for name in before.keys() - self._made}
            self._made -= before.keys()

    def synced_directory(self, directory: str) -> None:
        """Keep the names in a directory, and the deletions from it.

        A directory that was deleted with its contents is one of its names.
        """
        below = f"{directory}/" if directory else ""
        with self._lock:
            self._made = {n for n in self._made if n.rpartition("/")[0] != directory}
            self._deleted = {
                name: data for name, data in self._deleted.items() if not name.startswith(below)
            }

    def lose(self) -> None:
        with self._lock:
            for name in self._made:
                self._store.delete(name)
            for name, data in self._deleted.items():
                writer = self._store.create(name, len(data))
                writer.write(0, [data])
                writer.finish()
            self._made.clear()
            self._deleted.clear()
