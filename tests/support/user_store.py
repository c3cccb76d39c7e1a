"""A store as a user may write it, from `ostraka.storage` alone: files are rows of SQLite."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ostraka.errors import Busy, StoreError, TooLarge
from ostraka.storage import ANYTHING, MOST_BYTES, FileInfo, Traits, byte_views

_TABLE = "CREATE TABLE IF NOT EXISTS files (name PRIMARY KEY, data BLOB, changed_s, version)"


class SqliteStore:
    """The files below `prefix` in a database. A place exists with its first file."""

    traits = Traits(in_any_order=False, deletes_fence=False)

    def __init__(self, database: Path, prefix: str = ""):
        self.database = database
        self.prefix = prefix
        self.location = f"sqlite://{database}/{prefix}".rstrip("/")

    def __str__(self) -> str:
        return self.location

    def ask(self, request: str, *values: Any) -> tuple[list[Any], int]:
        """Return the rows of a request, and how many it changed. Each request is one event."""
        database = sqlite3.connect(self.database, timeout=60, isolation_level=None)
        with closing(database):
            database.execute(_TABLE)
            done = database.execute(request, values)
            return done.fetchall(), done.rowcount

    def write(self, name: str, data: bytes, replaces: Any = ANYTHING) -> bool:
        """Write a file. Returns False if another has the name than `replaces` says."""
        row = (data, time.time(), os.urandom(8), self.prefix + name)
        if replaces is None or replaces is ANYTHING:
            verb = "INSERT OR IGNORE" if replaces is None else "INSERT OR REPLACE"
            _, changed = self.ask(
                f"{verb} INTO files (data, changed_s, version, name) VALUES (?, ?, ?, ?)", *row
            )
        else:
            _, changed = self.ask(
                "UPDATE files SET data = ?, changed_s = ?, version = ? "
                "WHERE name = ? AND version = ?",
                *(*row, replaces),
            )
        return changed == 1

    # The verbs

    def at(self, name: str) -> SqliteStore:
        return type(self)(self.database, f"{self.prefix}{name}/")

    def prepare(self) -> bool:
        return not self.exists()

    def exists(self) -> bool:
        return bool(self.files(""))

    def remove_if_empty(self) -> None:
        pass

    def lock(self) -> None:
        return None

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        with closing(self.open(name)) as reader:
            if reader.size > most_bytes:
                raise TooLarge(f"{self.location}/{name}", reader.size, most_bytes)
            return reader.data

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], Any] | None = None,
        durable: bool = True,
    ) -> None:
        if check is not None:
            check()
        if not self.write(name, data, replaces):
            raise Busy(f"another save has replaced {self.location}/{name} meanwhile; try again")

    def touch(self, name: str, *, create: bool, note: bytes = b"") -> float | None:
        if create:
            if not self.write(name, note or b"-", None):
                raise StoreError(f"{self.location}/{name} exists")
            return None
        before = self.look(name)
        if before is None or not before.size:
            raise FileNotFoundError(f"{self.location}/{name}")
        self.write(name, note or b"-", before.version)
        return before.changed_s

    def create(self, name: str, size: int, *, beside: int = 1, replace: bool = False) -> Writer:
        return Writer(self, name)

    def open(self, name: str, first_bytes: int = 0) -> Reader:
        rows, _ = self.ask("SELECT data FROM files WHERE name = ?", self.prefix + name)
        if not rows:
            raise FileNotFoundError(f"{self.location}/{name}")
        return Reader(rows[0][0])

    def look(self, name: str) -> FileInfo | None:
        return next((file for file in self.files(name) if file.name == name), None)

    def list(self) -> list[str]:
        return sorted({file.name.split("/")[0] for file in self.files("")})

    def files(self, prefix: str) -> list[FileInfo]:
        start = self.prefix + prefix
        rows, _ = self.ask(
            "SELECT substr(name, ?), length(data), changed_s, version FROM files "
            "WHERE substr(name, 1, ?) = ? ORDER BY name",
            *(len(self.prefix) + 1, len(start), start),
        )
        return [FileInfo(*row) for row in rows]

    def is_link(self, name: str) -> bool:
        return False

    def sync(self, directory: str) -> None:
        pass

    def delete(
        self, name: str, *, version: Any = ANYTHING, check: Callable[[], Any] | None = None
    ) -> None:
        if check is not None:
            check()
        if version is not ANYTHING:
            self.ask(
                "DELETE FROM files WHERE name = ? AND version = ?", self.prefix + name, version
            )
            if self.look(name) is not None:
                raise Busy(f"another save has replaced {self.location}/{name} meanwhile; try again")
            return
        below = f"{self.prefix}{name}/" if name else self.prefix
        self.ask(
            "DELETE FROM files WHERE name = ? OR substr(name, 1, ?) = ?",
            *(self.prefix + name, len(below), below),
        )

    def delete_link(self, name: str) -> None:
        raise StoreError(f"{self.location}/{name} is no link")

    def discard_uploads(self) -> None:
        pass


class Writer:
    def __init__(self, store: SqliteStore, name: str):
        self.store = store
        self.name = name
        self.data = bytearray()

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        for view in byte_views(buffers):
            self.data += view

    def finish(self) -> str | None:
        self.store.write(self.name, bytes(self.data))

    def abandon(self) -> None:
        pass


class Reader:
    def __init__(self, data: bytes):
        self.data = data
        self.size = len(data)

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        start = offset
        for view in byte_views(buffers):
            found = self.data[offset : offset + view.nbytes]
            view[: len(found)] = found
            offset += len(found)
        return offset - start

    def close(self) -> None:
        pass
