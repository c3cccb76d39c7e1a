"""Holding a directory: a lock on it that ends with its process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress

from ostraka._lifetime import after_fork

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock; nothing is held there
    fcntl = None


class DirectoryHold:
    """The right to write below a directory, which one in all processes can have.

    The lock is on the directory itself: no lock file is left behind, and the kernel lets go of it
    when its process dies.
    """

    def __init__(self, directory: str):
        self._directory = directory
        self._file = -1

    def take(self) -> bool:
        """Take it if nobody has it; raises FileNotFoundError if the directory has gone."""
        if fcntl is None:  # pragma: no cover
            return True
        self._file = os.open(self._directory, os.O_RDONLY)
        _held.add(self)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        except OSError:
            pass  # Some network file systems can't lock: then two writers are on their own.
        return True

    def is_in_place(self) -> bool:
        """Whether the directory that is held is still the one of that name."""
        if fcntl is None:  # pragma: no cover
            return True
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(self._directory))
        except FileNotFoundError:
            return False

    def let_go(self) -> None:
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


_held: weakref.WeakSet[DirectoryHold] = weakref.WeakSet()


def _close_after_fork() -> None:
    """A child that outlives its parent, such as a data worker, must not hold what that one held."""
    for hold in list(_held):
        hold.close()


after_fork(_close_after_fork)
