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
# A child that its dead parent had just forked has a copy of the lock until it first runs: it lets
# go then (or starts another program, which closes it). A moment's patience tells it from a writer.
_PATIENCE_S = 0.5


class RootLock:
    """The right to write below a root, for a Manager."""

    def __init__(self, store: Store):
        self._store = store
        self._claim = Claim(store)
        # A manager that was not closed: not at the end of the program, where saves may go on.
        weakref.finalize(self, self._claim.release).atexit = False

    def acquire(self, *, wait: bool) -> None:
        """Take the lock; raises Busy if another manager has it, or waits until it lets go."""
        said = False
        give_up = time.monotonic() + _PATIENCE_S
        while not self._try():
            if not wait and time.monotonic() >= give_up:
                raise Busy(
                    f"another Manager is writing to {self._store}, and only one may at a time; "
                    "end it, or open this one with read_only=True or if_locked='wait'"
                )
            if wait and not said:
                log.warning("waiting for another Manager to end its work in %s", self._store)
                said = True
            time.sleep(_LOOK_EVERY_S)

    def release(self) -> None:
        self._claim.release()

    def check_place(self) -> None:
        """Raise if the place that is held is no longer the one of its name.

        FileNotFoundError if there is none; PathInTheWay if somebody has put another there, or a
        link to one, which this lock does not cover.
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
            # A root is held for long, and who looks into it should see steps alone. What saves
            # write below it is claimed by markers in any case.
            self._claim.take(wait=True, rely_on_lock=True)
        except Busy:
            return False
        return True
