"""A lock on a directory, which the kernel ends with its process."""

from __future__ import annotations

import os
import platform
import uuid
import weakref
from contextlib import suppress
from functools import cache

import xxhash

from ostraka._lifetime import after_fork
from ostraka.errors import Busy, PathInTheWay, store_error
from ostraka.storage._directory import BELOW, BY_PATH, DIRECTORY, Directory

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock
    fcntl = None


class DirectoryLock:
    """A lock on the directory itself: no lock file is left behind."""

    def __init__(self, directory: str, flags: int):
        self._path = directory
        file = os.open(directory, flags)
        self.directory = Directory(file)
        """No handle any more once it is released."""
        self._file = file
        self.scope = _scope(os.fstat(file).st_dev)
        _locks.add(self)

    def take(self) -> bool:
        """Whether there are locks. Raises BlockingIOError if another has it."""
        if fcntl is None:  # pragma: no cover
            return False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return False  # Some network file systems can't lock.
        return True

    def is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Unlock it, and let go of the directory as soon as no other thread uses it."""
        file, self._file = self._file, -1
        if file >= 0 and fcntl is not None:
            with suppress(OSError):
                # By name: a process that was forked meanwhile may still have a copy.
                fcntl.flock(file, fcntl.LOCK_UN)
        self.directory = BY_PATH

    def close(self) -> None:
        """Let go of it at once, without unlocking: in a child, its parent's lock stays."""
        file, self._file = self._file, -1
        directory, self.directory = self.directory, BY_PATH
        if file >= 0:
            directory.file = -1
            os.close(file)


def lock_directory(directory: str, *, follow: bool) -> DirectoryLock | None:
    """Lock a directory; None where the system or the file system has no locks.

    Raises Busy if another process, or another thread, has it; FileNotFoundError if it has gone;
    without `follow` PathInTheWay if it is a link.
    """
    try:
        lock = DirectoryLock(directory, DIRECTORY if follow else BELOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        if not follow and os.path.islink(directory):
            raise link_in_the_way(directory) from error
        raise store_error("lock", directory, error) from error
    try:
        if lock.take():
            return lock
    except BlockingIOError as error:
        lock.close()
        raise Busy(
            f"another save to {directory} is under way; wait for it, or save elsewhere"
        ) from error
    lock.close()
    return None


def link_in_the_way(directory: str) -> PathInTheWay:
    return PathInTheWay(
        f"{directory} is a link, and what it leads to is not written to under this name; give the "
        "path that it leads to, or remove the link"
    )


@cache
def _scope(device: int) -> str:
    """What tells this running kernel and this mount from others.

    All containers of a kernel are alike. Two mounts of one network file system are not: each may
    have locks of its own.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            kernel = file.read()
    except OSError:  # pragma: no cover - only Linux has it
        kernel = f"{platform.node()}-{uuid.getnode()}".encode()
    return xxhash.xxh3_64_hexdigest(kernel + str(device).encode())


_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_after_fork() -> None:
    """A child that outlives its parent, such as a data worker, must not hold what that one held."""
    for lock in list(_locks):
        lock.close()


after_fork(_close_after_fork)
