"""One writer at a time below a root. No JAX."""

from __future__ import annotations

import errno
import os
import time
import weakref

from ostraka._record import logger as log
from ostraka.errors import Busy, PathInTheWay
from ostraka.storage import Claim, Store

_LOOK_EVERY_S = 0.1
# A child that was forked just before its parent died holds a copy of the lock until it first runs,
# and then releases it (or calls exec, which closes it). So retry for a moment.
_RETRY_S = 0.5


class RootLock:
    """The lock that one Manager holds to write below a root."""

    def __init__(self, store: Store):
        self._store = store
        # By a store of its own: while a store is locked its names stay those of one directory, and
        # the root's shall be those of its path.
        self._claim = Claim(store.at(""))
        # For a manager that is garbage-collected unclosed. Not at exit, where saves may still run.
        weakref.finalize(self, self._claim.release).atexit = False

    def acquire(self, *, wait: bool) -> None:
        """Take the lock. If another manager has it, wait until it is released, or raise Busy."""
        warned = False
        give_up = time.monotonic() + _RETRY_S
        while not self._try():
            if not wait and time.monotonic() >= give_up:
                raise Busy(
                    f"another Manager is writing to {self._store}, and only one may at a time; "
                    "end it, or open this one with read_only=True or if_busy='wait'"
                )
            if wait and not warned:
                log.warning("waiting for another Manager to end its work in %s", self._store)
                warned = True
            time.sleep(_LOOK_EVERY_S)

    def release(self) -> None:
        self._claim.release()

    def check_place(self) -> None:
        """Raise if the directory that is locked is no longer the one at its path.

        FileNotFoundError if there is none; PathInTheWay if it is another one, or a link to one,
        which this lock does not cover.
        """
        if self._claim.is_held():
            return
        if not self._store.exists():
            missing = self._store.location
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
        raise PathInTheWay(
            f"{self._store} is no longer the directory that this Manager was opened for: "
            "somebody has put another, or a link, in its place; move it back, or open a new Manager"
        )

    def _try(self) -> bool:
        try:
            # A root is locked for long, and a listing of it should show steps only: no marker file
            # where the lock alone will do. Every save below it writes its own marker.
            self._claim.take(wait=True, rely_on_lock=True)
        except Busy:
            return False
        return True
