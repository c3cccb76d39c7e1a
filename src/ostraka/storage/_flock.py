"""A lock on a directory, which the kernel ends with its process."""

from __future__ import annotations

import os
import platform
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import xxhash

from ostraka._lifetime import after_fork
from ostraka.errors import Busy

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock
    fcntl = None


class DirectoryLock:
    """A lock on the directory itself: no lock file is left behind."""

    def __init__(self, directory: str):
        self._directory = directory
        self._file = os.open(directory, os.O_RDONLY)
        self.scope = _scope(os.fstat(self._file).st_dev)
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
            return os.path.samestat(os.fstat(self._file), os.stat(self._directory))
        except OSError:
            return False

    def release(self) -> None:
        if self._file >= 0 and fcntl is not None:
            with suppress(OSError):
                # By name: a process that was forked meanwhile may still have a copy.
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self.close()

    def close(self, close_file: Callable[[int], None] = os.close) -> None:
        """Let go of it, unless another process has a copy: in a child, its parent's lock stays."""
        file, self._file = self._file, -1
        if file >= 0:
            close_file(file)

    def __del__(self) -> None:
        # At the very end of a program modules have been emptied, `os` among them: hence the default
        # argument.
        self.close()


def lock_directory(directory: str) -> DirectoryLock | None:
    """Lock a directory; None where the system or the file system has no locks.

    Raises Busy if another process, or another thread, has it; FileNotFoundError if it has gone.
    """
    lock = DirectoryLock(directory)
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
