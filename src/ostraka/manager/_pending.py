"""The save that runs in the background, and its error, which no process may miss."""

from __future__ import annotations

from collections.abc import Callable

from ostraka._handle import SaveHandle
from ostraka._record import logger as log
from ostraka.errors import OstrakaError
from ostraka.manager._together import agree

_PATIENCE_S = 5.0
"""How long to wait for a process that may have ended because of the error."""


class PendingSave:
    """At most one save under way.

    A save that fails does so on every process, but they learn of it at different times. A call that
    takes no part in anything common raises as soon as it knows (`raise_if_failed`). At the next
    call that all processes take part in (`wait`), all raise unless all have done so already: so
    either every process goes on from there, or none.
    """

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None
        self._refusal: Exception | None = None
        """Why the save could not even begin on this process; the others may have begun."""
        self._heard = False

    def begin(self, start: Callable[[], SaveHandle], *, background: bool) -> None:
        """Begin a save, and see it through unless it is to run in the background."""
        self._heard = False
        try:
            self._handle = start()
        except Exception as error:
            self._refusal = error
            if background:
                self._heard = True
                raise
        if not background:
            self.wait()

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

    def wait(self) -> None:
        """Wait for the save; raise its error, on all processes alike."""
        error = self._refusal if self._handle is None else self._handle.exception()
        heard = self._heard
        self._handle = self._refusal = None
        if error is not None and not _have_all(heard):
            raise error

    def finish_alone(self) -> None:
        """Wait for the save; its error goes to the log."""
        handle, self._handle = self._handle, None
        if handle is not None and not self._heard:
            error = handle.exception()
            if error is not None:
                log.error("%s", error)


def _have_all(heard: bool) -> bool:
    """Whether every process has raised the error before; not if one of them is no longer there."""
    try:
        return agree("look at the last save", heard, all, timeout_s=_PATIENCE_S)
    except OstrakaError:
        return False
