"""One writer at a time: a lock on the root directory that ends with its process. No JAX."""

from __future__ import annotations

import os
import time
import weakref

from ostraka._record import logger as log
from ostraka.errors import Busy

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock; managers there hold nothing
    fcntl = None

_LOOK_EVERY_S = 0.1
# A child that its dead parent had just forked has a copy of the lock until it first runs: it lets
# go then (or starts another program, which closes it). A moment's patience tells it from a writer.
_PATIENCE_S = 0.5


class RootLock:
    """The right to write below a directory.

    The lock is on the directory itself: no lock file is left behind, and the kernel lets go of it
    when its process dies.
    """

    def __init__(self, location: str):
        self._location = location
        self._file = -1

    def acquire(self, *, wait: bool) -> None:
        """Take the lock; raises Busy if another manager has it, or waits until it lets go."""
        said = False
        give_up = time.monotonic() + _PATIENCE_S
        while not self._try():
            if not wait and time.monotonic() >= give_up:
                raise Busy(
                    f"another Manager is writing to {self._location}, and only one may at a time; "
                    "end it, or open this one with read_only=True or if_locked='wait'"
                )
            if wait and not said:
                log.warning("waiting for another Manager to end its work in %s", self._location)
                said = True
            time.sleep(_LOOK_EVERY_S)
        _held.add(self)

    def release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            _held.discard(self)
            os.close(file)

    def _try(self) -> bool:
        if fcntl is None:  # pragma: no cover
            return True
        file = os.open(self._location, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError:
            pass  # Some network file systems can't lock: then two writers are on their own.
        if not os.path.samestat(os.fstat(file), os.stat(self._location)):
            os.close(file)  # Somebody has put another directory in its place.
            return False
        self._file = file
        return True

    def __del__(self) -> None:
        # At the very end of a program modules are emptied first; the kernel lets go by itself.
        if _held is not None:  # pyright: ignore[reportUnnecessaryComparison]
            self.release()


_held: weakref.WeakSet[RootLock] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    """A child that outlives its parent, such as a data worker, must not hold on to the lock.

    Closing the copy leaves the parent's lock as it is.
    """
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_after_fork)
