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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ostraka.common.record import logger
from ostraka.errors import (
    Busy,
    Damaged,
    PathInTheWay,
    SourceChanged,
    UnsupportedFormat,
    name_few,
    store_error,
)
from ostraka.layout.shard_file import METADATA_NAME
from ostraka.storage import Claim, FileReader, FileWriter, LocalStore, Store, is_claim

_SUFFIX = ".converting"
_WORK, _FILES = "work.json", "files"


def require_directory(store: Store, to: str) -> LocalStore:
    """The store, if it is a directory. Raises UnsupportedFormat for others."""
    if not isinstance(store, LocalStore):
        raise UnsupportedFormat(
            f"can't write {store.location}: to={to!r} writes directories of a file system alone; "
            "convert to one, and copy it from there"
        )
    return store


class Workplace:
    """The directory of one conversion, locked from `take` to `release`.

    The target is a directory, or the only file of the result, if that has a name.
    """

    def __init__(self, target: str, work_id: str, name: str = ""):
        self._target = target
        self._name = name
        self._work = json.dumps({"id": work_id}).encode()
        self._place = LocalStore(target + _SUFFIX)
        self._claim = Claim(self._place)
        self.files = LocalStore(os.path.join(self._place.location, _FILES))

    @contextmanager
    def held(self, last: Mapping[str, bytes]) -> Generator[LocalStore]:
        """Have the directory while its files are written and checked, then commit them.

        `last` has small files that complete the result.
        """
        self.take()
        try:
            yield self.files
            for name, data in last.items():
                self.files.put(name, data)
            self.commit()
        except (Damaged, SourceChanged):
            self._discard()  # It can't become a result, so nobody has to clean it up.
            raise
        finally:
            self.release()

    def take(self) -> None:
        """Lock the directory, and remove the files of another conversion.

        Raises PathInTheWay if the target exists, Busy if another process converts to it.
        """
        self._refuse_existing()
        self._place.prepare()
        self._claim.take(wait=True)
        try:
            self._refuse_existing()  # Another may have finished it meanwhile.
            found = b""
            with suppress(OSError):
                found = self._place.get(_WORK)
            if found != self._work:
                if self.files.exists():
                    log_start_over(self._target)
                self._claim.delete(_FILES)
                self._place.put(_WORK, self._work, check=self._claim.check)
            self.files.prepare()
        except BaseException:
            self.release()
            raise

    def commit(self) -> None:
        """Rename the result to the target."""
        # By way of a directory that whoever takes this place over deletes first (see `_claim`): a
        # process that stood still must not give its name to what another is writing.
        fence = f"{self._place.location}/{METADATA_NAME}.{os.urandom(16).hex()}.tmp"
        made = os.path.join(fence, _FILES)
        try:
            os.mkdir(fence)
            self._claim.check()
            os.rename(self.files.location, made)
            try:
                self._give_name(os.path.join(made, self._name) if self._name else made)
            except OSError:
                os.rename(made, self.files.location)
                raise
        except Busy:
            raise
        except OSError as error:
            self._claim.check()
            self._refuse_existing()
            raise store_error("give its name to the result", self._target, error) from error
        finally:
            shutil.rmtree(fence, ignore_errors=True)
        LocalStore(os.path.dirname(self._target)).sync("")
        self._discard()

    def release(self) -> None:
        """Release the lock, and remove the directory if it is empty."""
        self._claim.release()
        with suppress(OSError):
            os.rmdir(self._place.location)

    def _give_name(self, made: str) -> None:
        if self._name:
            try:
                os.link(made, self._target)
                return
            except PermissionError:  # no links on this file system
                self._refuse_existing()
        os.rename(made, self._target)

    def _discard(self) -> None:
        """Remove all files of the conversion, but not a committed result."""
        for name in (_FILES, _WORK):
            with suppress(OSError):
                self._claim.delete(name)

    def _refuse_existing(self) -> None:
        """Raise PathInTheWay if the target exists. A directory may replace an empty one."""
        target = self._target
        try:
            if self._name or os.path.islink(target) or not os.path.isdir(target):
                is_there = os.path.lexists(target)
            else:
                is_there = bool(os.listdir(target))
        except OSError as error:
            raise store_error("look at", target, error) from error
        if is_there:
            raise PathInTheWay(
                f"{target} is there already, and nothing is overwritten; remove it, or give "
                "another path"
            )


NOTES = "_converting-"
"""The beginning of the name of a directory in a bucket, with notes on finished files."""


@contextmanager
def held_bucket(
    target: Store, notes: str, files: Sequence[str], last: Mapping[str, bytes]
) -> Generator[Store]:
    """Have a bucket while files of a conversion are written to it and checked.

    `notes` has the size and the identity of each finished file. `last` has small files that
    complete the result.
    """
    target.prepare()
    claim = Claim(target)
    claim.take(wait=True)
    try:
        _remove_unfinished(target, claim, notes)
        names = target.list()
        others = [name for name in names if name != notes and not is_claim(name)]
        # An earlier call of the same conversion wrote the others, unless they complete a result.
        if others and (notes not in names or not last.keys().isdisjoint(others)):
            raise PathInTheWay(
                f"{target.location} has something in it already ({name_few(others)}), and nothing "
                "is overwritten; remove it, or give another path"
            )
        try:
            yield target
        except (Damaged, SourceChanged):
            for name in (*files, notes):
                claim.delete(name)
            raise
        claim.check()
        for name, data in last.items():
            target.put(name, data, replaces=None)
        with suppress(OSError):
            claim.delete(notes)
            if claim.found_dead:
                claim.check()
                target.discard_uploads()
    finally:
        claim.release()


def _remove_unfinished(target: Store, claim: Claim, notes: str) -> None:
    """Remove the finished files of a conversion of another source, or with other options."""
    there = {file.name: file for file in target.files("")}
    others = [name for name in there if name.startswith(NOTES) and name.split("/")[0] != notes]
    if others:
        log_start_over(target.location)
    for name in others:
        file = there.get(name.partition("/")[2].removesuffix(".json"))
        with suppress(ValueError, FileNotFoundError):
            if file is not None and json.loads(target.get(name)) == [file.size, file.identity]:
                claim.delete(file.name)
        claim.delete(name)


def log_start_over(target: str) -> None:
    logger.warning(
        "the unfinished conversion to %s was one of another source or with other options, or files "
        "of its source have changed since: it starts over",
        target,
    )


# Files of an interrupted conversion that hold the right bytes.

_PIECE_BYTES = 2 << 20


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
    store: Store, name: str, size: int, *, beside: int, on_kept: Callable[[int], None]
) -> FileWriter:
    """Begin a file as `Store.create` does. An existing file is kept while its bytes are right.

    `on_kept` receives the number of kept bytes.
    """
    try:
        reader = store.open(name)
    except FileNotFoundError:
        return store.create(name, size, beside=beside)
    begin = partial(store.create, name, size, beside=beside, replace=True)
    return _KeptFile(store, name, reader, begin, on_kept)


@dataclass(slots=True)
class _KeptFile:
    """An existing file, which is replaced as soon as one of its bytes differs."""

    store: Store
    name: str
    reader: FileReader
    begin: Callable[[], FileWriter]
    """Begins the file that replaces it."""
    on_kept: Callable[[int], None]
    kept: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Ranges with the right bytes, in the order of the writes."""
    writer: FileWriter | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        with self.lock:
            if self.writer is None:
                views = [memoryview(buffer).cast("B") for buffer in buffers]
                starts = list(accumulate(map(len, views), initial=offset))
                if all(map(partial(is_written, self.reader), starts, views)):
                    self.kept.append((offset, starts[-1]))
                    return
            writer = self._replace()
        writer.write(offset, buffers)

    def finish(self) -> str | None:
        end = max((stop for _, stop in self.kept), default=0)
        if self.writer is None and self.reader.size != end:
            self._replace()
        self.reader.close()
        if self.writer is not None:
            return self.writer.finish()
        self.store.sync(self.name)  # Its writer may have been killed before that.
        self.on_kept(self.reader.size)
        found = self.store.look(self.name)
        return None if found is None else found.identity

    def abandon(self) -> None:
        self.reader.close()
        if self.writer is not None:
            self.writer.abandon()

    def _replace(self) -> FileWriter:
        """Begin a new file, with the ranges that are right."""
        if self.writer is None:
            self.writer = self.begin()
            for start, stop in self.kept:
                for at in range(start, stop, _PIECE_BYTES):
                    data = np.empty(min(_PIECE_BYTES, stop - at), np.uint8)
                    self.reader.read_into(at, [data])
                    self.writer.write(at, [data])
        return self.writer
