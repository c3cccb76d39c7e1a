"""What the storage at a path can do, tried with a few small files."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ostraka.cli._output import human_seconds, human_size
from ostraka.errors import Busy, OstrakaError, describe, without_secrets
from ostraka.storage import LocalStore, Store, open_store

_GROUP = "storage"
_FULL_BYTES = 1 << 30
"""With less free space than this, a note says so."""
_MOST_SKEW_S = 30.0
"""After this time without renewal, a lock counts as expired."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    group: str
    name: str
    state: str
    """`ok`, `note` or `fault`."""
    found: str
    advice: str | None = None


def check_storage(path: str, timeout_s: float) -> list[Check]:
    """All checks of the storage at a path. Storage that does not answer is a fault."""
    found: list[Check] = []
    ended = threading.Event()

    def work() -> None:
        try:
            store = open_store(path)
            checks = _check_local if isinstance(store, LocalStore) else _check_remote
            for check in checks(store):
                found.append(check)
        except (OstrakaError, OSError, ValueError) as error:
            text = without_secrets(str(error) or describe(error))
            found.append(Check(_GROUP, "access", "fault", text))
        finally:
            ended.set()

    # A file system that hangs can't be interrupted. The thread ends with the program.
    threading.Thread(target=work, daemon=True).start()
    if not ended.wait(timeout_s):
        advice = "look at the mount or the network; --timeout waits longer"
        return [*found, Check(_GROUP, "access", "fault", f"no answer in {timeout_s:g} s", advice)]
    return found


# A directory


def _check_local(store: Store) -> Iterator[Check]:
    place = Path(store.location)
    there = next(above for above in (place, *place.parents) if above.exists())
    if not there.is_dir():
        yield Check(_GROUP, "directory", "fault", f"{there} is a file", "give a directory")
        return
    note = "" if there == place else f", the first that exists above {place}"
    try:
        probe = Path(tempfile.mkdtemp(prefix=".ostraka-doctor-", dir=there))
    except OSError as error:
        advice = "a save needs to create files here: look at its permissions and its mount"
        yield Check(_GROUP, "write", "fault", f"{there}: {error.strerror}", advice)
        return
    try:
        yield Check(_GROUP, "write", "ok", f"{there}{note}")
        for name, advice, is_needed, check in _LOCAL:
            try:
                check(probe)
            except (OSError, _Failed) as error:
                text = str(error) if isinstance(error, _Failed) else error.strerror
                yield Check(_GROUP, name, "fault" if is_needed else "note", text or "", advice)
            else:
                yield Check(_GROUP, name, "ok", "works")
        yield _free_space(probe)
        (probe / "clock").write_bytes(b"x")
        yield _clock(time.time() - (probe / "clock").stat().st_mtime)
    finally:
        shutil.rmtree(probe, ignore_errors=True)


class _Failed(Exception):
    """A check whose calls succeeded, with the wrong result."""


def _exclusive_create(probe: Path) -> None:
    os.close(os.open(probe / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.close(os.open(probe / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    raise _Failed("two writers could create the same file")


def _atomic_rename(probe: Path) -> None:
    (probe / "old").write_bytes(b"old")
    (probe / "temporary").write_bytes(b"new")
    os.replace(probe / "temporary", probe / "old")
    if (probe / "old").read_bytes() != b"new" or (probe / "temporary").exists():
        raise _Failed("a renamed file did not take the place of the old one")


def _fsync(probe: Path) -> None:
    with open(probe / "synced", "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(probe, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _hard_links(probe: Path) -> None:
    (probe / "linked").write_bytes(b"x")
    os.link(probe / "linked", probe / "link")
    if not (probe / "link").samefile(probe / "linked"):
        raise _Failed("a hard link became another file")
    try:
        os.link(probe / "linked", probe / "link")
    except FileExistsError:
        return
    raise _Failed("a hard link replaced a file")


def _flock(probe: Path) -> None:
    import fcntl

    one, other = (os.open(probe, os.O_RDONLY) for _ in range(2))
    try:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return
        raise _Failed("two locks on one directory were granted at the same time")
    finally:
        os.close(one)
        os.close(other)


_LOCAL: tuple[tuple[str, str, bool, Callable[[Path], None]], ...] = (
    ("exclusive create", "two writers can't exclude each other here", True, _exclusive_create),
    (
        "atomic rename",
        "a save can't be committed here: use another file system",
        True,
        _atomic_rename,
    ),
    ("fsync", "checkpoints may not survive a power failure here", True, _fsync),
    ("hard links", "files that must be new are created without them", False, _hard_links),
    ("flock", "an interrupted save is noticed after 30 s instead of at once", False, _flock),
)
"""The name of each check, its advice, True if a save can't do without it, and the check."""


def _free_space(place: Path) -> Check:
    usage = shutil.disk_usage(place)
    state = "ok" if usage.free >= _FULL_BYTES else "note"
    advice = None if state == "ok" else "ostraka du and ostraka gc help to make room"
    found = f"{human_size(usage.free)} of {human_size(usage.total)}"
    return Check(_GROUP, "free space", state, found, advice)


def _clock(ahead_s: float) -> Check:
    """`ahead_s` is how far the clock of this machine is ahead of the clock of the storage."""
    away = "ahead of" if ahead_s > 0 else "behind"
    found = f"this machine is {human_seconds(abs(ahead_s))} {away} the storage"
    if abs(ahead_s) <= _MOST_SKEW_S:
        return Check(_GROUP, "clock", "ok", found)
    return Check(_GROUP, "clock", "fault", found, "set both clocks by NTP")


# A bucket


def _check_remote(store: Store) -> Iterator[Check]:
    names = store.list()
    yield Check(_GROUP, "list", "ok", f"{store.location}, {len(names):,} names")
    name = f".ostraka-doctor-{uuid.uuid4().hex}"
    before = time.time()
    store.put(name, b"x", replaces=None)
    try:
        yield Check(_GROUP, "write", "ok", "works")
        try:
            store.put(name, b"y", replaces=None)
        except Busy:
            yield Check(_GROUP, "exclusive create", "ok", "works")
        else:
            advice = "two writers can't exclude each other here: use another store"
            yield Check(_GROUP, "exclusive create", "fault", "it is ignored", advice)
        there = store.look(name)
        if there is None or store.get(name) != b"x":
            yield Check(_GROUP, "read", "fault", "a new object can't be read back")
        else:
            yield Check(_GROUP, "read", "ok", "works")
        if there is not None and store.traits.is_remote:
            # The object was written at a time between the request and its answer.
            now = time.time()
            late, early = before - there.changed_s, there.changed_s - now
            yield _clock(late if late > 0 else -early if early > 0 else 0.0)
    finally:
        with suppress(OSError):
            store.delete(name)
