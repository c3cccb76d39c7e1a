"""The save that runs in the background, and its error, which no process may miss."""

from __future__ import annotations

from ostraka._handle import SaveHandle
from ostraka.manager._log import log
from ostraka.manager._together import agree


class PendingSave:
    """At most one save under way.

    A failed save has failed on every process, but they learn of it at different times. A call that
    takes no part in anything common raises as soon as it knows (`raise_if_failed`). At the next
    call that all processes take part in (`settle`), all raise unless all have done so already: so
    either every process goes on from there, or none.
    """

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None
        self._heard = False

    def hold(self, handle: SaveHandle) -> None:
        self._handle = handle
        self._heard = False

    def is_running(self) -> bool:
        return self._handle is not None and not self._handle.done()

    def raise_if_failed(self) -> None:
        """Raise the save's error if it has failed already and nobody was told here."""
        if self._handle is None or self._heard or not self._handle.done():
            return
        error = self._handle.exception()
        if error is not None:
            self._heard = True
            raise error

    def settle(self) -> None:
        """Wait for the save; raise its error, on all processes alike."""
        if self._handle is None:
            return
        error = self._handle.exception()
        heard = self._heard
        self._handle = None
        if error is not None and not agree("look at the last save", heard, all):
            raise error

    def finish_alone(self) -> None:
        """Wait for the save; its error goes to the log."""
        handle, self._handle = self._handle, None
        if handle is not None and not self._heard:
            error = handle.exception()
            if error is not None:
                log.error("%s", error)
