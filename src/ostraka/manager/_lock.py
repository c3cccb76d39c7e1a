"""One writer at a time below a root. No JAX."""

from __future__ import annotations

import errno
import os
import time

from ostraka._record import logger as log
from ostraka.errors import Busy, PathInTheWay
from ostraka.storage import DirectoryHold

_LOOK_EVERY_S = 0.1
# A child that its dead parent had just forked has a copy of the lock until it first runs: it lets
# go then (or starts another program, which closes it). A moment's patience tells it from a writer.
_PATIENCE_S = 0.5


class RootLock:
    """The right to write below a directory, for a Manager."""

    def __init__(self, location: str):
        self._location = location
        self._hold = DirectoryHold(location)

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

    def release(self) -> None:
        self._hold.let_go()

    def check_place(self) -> None:
        """Raise if the directory that is held is no longer the one of its name.

        FileNotFoundError if there is none; PathInTheWay if somebody has put another there, or a
        link to one, which this lock does not cover.
        """
        if self._hold.is_in_place():
            return
        if not os.path.lexists(self._location):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._location)
        raise PathInTheWay(
            f"{self._location} is no longer the directory that this Manager was opened for: "
            "somebody has put another, or a link, in its place; move it back, or open a new Manager"
        )

    def _try(self) -> bool:
        if not self._hold.take():
            return False
        if not self._hold.is_in_place():  # Somebody has put another directory in its place.
            self._hold.let_go()
            return False
        return True
