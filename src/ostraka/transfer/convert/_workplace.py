"""The working directory of a conversion, its commit, and how it is resumed.

For a target `out` in a file system, the directory is `out.converting` beside it:

    work.json    the id of the conversion: its options and the versions of the source's files
    files/       the result, which is renamed to `out`

A killed conversion leaves the directory, and the same call resumes it. Another conversion starts
over. No journal tells which files are finished. Each block to write is compared with the bytes in
the file, and kept if it is equal.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ostraka.common.record import logger
from ostraka.errors import Busy, Damaged, PathInTheWay, SourceChanged, store_error
from ostraka.layout.shard_file import METADATA_NAME
from ostraka.storage import Claim, FileReader, FileWriter, LocalStore, Store

_SUFFIX = ".converting"
_WORK, _FILES = "work.json", "files"


class Workplace:
    """The directory of one conversion, locked from `take` to `release`."""

    def __init__(self, target: str, work_id: str, *, is_file: bool = False):
        self.target = target
        self._is_file = is_file
        self._id = work_id
        self._directory = target + _SUFFIX
        self._claim = Claim(LocalStore(self._directory))
        self.files = LocalStore(os.path.join(self._directory, _FILES))

    @contextmanager
    def held(self, name: str = "") -> Generator[LocalStore]:
        """Have the directory while its files are written and checked, then commit them."""
        self.take()
        try:
            yield self.files
            self.commit(name)
        except (Damaged, SourceChanged):
            self.discard()  # It can't become a result, so nobody has to clean it up.
            raise
        finally:
            self.release()

    def take(self) -> None:
        """Lock the directory, and remove the files of another conversion.

        Raises PathInTheWay if the target exists, Busy if another process converts to it.
        """
        refuse_existing(self.target, is_file=self._is_file)
        LocalStore(self._directory).prepare()
        self._claim.take(wait=True)
        try:
            refuse_existing(
                self.target, is_file=self._is_file
            )  # Another may have finished it meanwhile.
            if not self._is_same():
                if self.files.exists():
                    log_start_over(self.target)
                self._claim.delete(_FILES)
                work = json.dumps({"id": self._id}).encode()
                LocalStore(self._directory).put(_WORK, work, check=self._claim.check)
            self.files.prepare()
        except BaseException:
            self.release()
            raise

    def _is_same(self) -> bool:
        try:
            found = json.loads(LocalStore(self._directory).get(_WORK))
        except (OSError, ValueError):
            return False
        return found == {"id": self._id}

    def commit(self, name: str = "") -> None:
        """Rename the result to the target: all files, or the one of this name."""
        # By way of a directory that whoever takes this place over deletes first (see `_claim`): a
        # process that stood still must not give its name to what another is writing.
        fence = os.path.join(self._directory, f"{METADATA_NAME}.{os.urandom(16).hex()}.tmp")
        made = os.path.join(fence, _FILES)
        try:
            os.mkdir(fence)
            self._claim.check()
            os.rename(self.files.location, made)
            try:
                if name:
                    _name_file(os.path.join(made, name), self.target)
                else:
                    os.rename(made, self.target)
            except OSError:
                os.rename(made, self.files.location)
                raise
        except Busy:
            raise
        except OSError as error:
            self._claim.check()
            refuse_existing(self.target, is_file=self._is_file)
            raise store_error("give its name to the result", self.target, error) from error
        finally:
            shutil.rmtree(fence, ignore_errors=True)
        LocalStore(os.path.dirname(self.target)).sync("")
        self.discard()

    def discard(self) -> None:
        """Remove all files of the conversion, but not a committed result."""
        for name in (_FILES, _WORK):
            with suppress(OSError):
                self._claim.delete(name)

    def release(self) -> None:
        """Release the lock, and remove the directory if it is empty."""
        self._claim.release()
        with suppress(OSError):
            os.rmdir(self._directory)


def log_start_over(target: str) -> None:
    logger.warning(
        "the unfinished conversion to %s was one of another source or with other options, or files "
        "of its source have changed since: it starts over",
        target,
    )


def _name_file(made: str, target: str) -> None:
    """Link or rename a file to a free name."""
    try:
        os.link(made, target)
    except PermissionError:  # no links on this file system
        refuse_existing(target, is_file=True)
        os.rename(made, target)


def refuse_existing(target: str, *, is_file: bool) -> None:
    """Raise PathInTheWay if something is at a path. A directory may replace an empty one."""
    try:
        if is_file or os.path.islink(target) or not os.path.isdir(target):
            is_there = os.path.lexists(target)
        else:
            is_there = bool(os.listdir(target))
    except OSError as error:
        raise store_error("look at", target, error) from error
    if is_there:
        raise PathInTheWay(
            f"{target} is there already, and nothing is overwritten; remove it, or give another "
            "path"
        )


# Files of an interrupted conversion that hold the right bytes.

_PIECE_BYTES = 2 << 20

OnKept = Callable[[int], None]
"""Receives a number of kept bytes."""


def is_written(reader: FileReader, offset: int, data: Any) -> bool:
    """Return True if a file has these bytes at `offset`."""
    wanted = np.frombuffer(data, np.uint8)
    memory = np.empty(min(_PIECE_BYTES, len(wanted)), np.uint8)
    for at in range(0, len(wanted), _PIECE_BYTES):
        part = wanted[at : at + _PIECE_BYTES]
        found = memory[: len(part)]
        if reader.read_into(offset + at, [found]) != len(part) or not np.array_equal(found, part):
            return False
    return True


def create_or_keep(
    store: Store, name: str, size: int, *, beside: int, on_kept: OnKept
) -> FileWriter:
    """Begin a file as `Store.create` does. An existing file is kept while its bytes are right."""
    try:
        reader = store.open(name)
    except FileNotFoundError:
        return store.create(name, size, beside=beside)
    return _KeptFile(store, name, size, beside, reader, on_kept)


class _KeptFile:
    """An existing file, which is replaced as soon as one of its bytes differs."""

    def __init__(
        self,
        store: Store,
        name: str,
        size: int,
        beside: int,
        reader: FileReader,
        on_kept: OnKept,
    ):
        self._store = store
        self._name = name
        self._size = size
        self._beside = beside
        self._reader = reader
        self._on_kept = on_kept
        self._kept: list[tuple[int, int]] = []
        """Ranges with the right bytes, in the order of the writes."""
        self._writer: FileWriter | None = None
        self._lock = threading.Lock()

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        with self._lock:
            if self._writer is None and self._has(offset, buffers):
                self._kept.append((offset, offset + sum(memoryview(b).nbytes for b in buffers)))
                return
            writer = self._replace()
        writer.write(offset, buffers)

    def finish(self) -> str | None:
        if self._writer is None and self._reader.size != max(
            (stop for _, stop in self._kept), default=0
        ):
            self._replace()
        self._reader.close()
        if self._writer is not None:
            return self._writer.finish()
        self._store.sync(self._name)  # Its writer may have been killed before that.
        self._on_kept(self._reader.size)
        found = self._store.look(self._name)
        return None if found is None else found.identity

    def abandon(self) -> None:
        self._reader.close()
        if self._writer is not None:
            self._writer.abandon()

    def _has(self, offset: int, buffers: Sequence[Any]) -> bool:
        for buffer in buffers:
            data = memoryview(buffer).cast("B")
            if not is_written(self._reader, offset, data):
                return False
            offset += len(data)
        return True

    def _replace(self) -> FileWriter:
        """Begin a new file, with the ranges that are right."""
        if self._writer is None:
            self._writer = self._store.create(
                self._name, self._size, beside=self._beside, replace=True
            )
            for start, data in self._read_kept():
                self._writer.write(start, [data])
        return self._writer

    def _read_kept(self) -> Iterator[tuple[int, Any]]:
        for start, stop in self._kept:
            for at in range(start, stop, _PIECE_BYTES):
                data = np.empty(min(_PIECE_BYTES, stop - at), np.uint8)
                self._reader.read_into(at, [data])
                yield at, data
