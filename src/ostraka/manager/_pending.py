"""The save in the background, and its error, which every process raises."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy

from ostraka.common.record import logger as log
from ostraka.errors import OstrakaError
from ostraka.processes.decide import agree
from ostraka.saving.background import SaveHandle

_TIMEOUT_S = 5.0
"""How long to wait for a process that may have ended because of the error."""


class PendingSave:
    """At most one running save.

    A save fails on every process, but they learn of it at different times. A call that involves no
    other process raises as soon as it knows (`raise_if_failed`). At the next call that involves all
    processes (`wait`), all raise, unless all have raised already. So either every process goes on
    from there, or none does.
    """

    def __init__(self) -> None:
        self._handle: SaveHandle | None = None
        self._error: BaseException | None = None
        """The reason why the save did not start here, though it may have started on other
        processes. Or the error that was raised here."""
        self._is_raised = False

    def begin(self, start: Callable[[], SaveHandle], *, background: bool) -> None:
        """Start a save, and wait for it unless it is to run in the background."""
        self._is_raised = False
        try:
            self._handle = start()
        except Exception as error:
            self._error = error
            if background:
                self._error, self._is_raised = _without_frames(error), True
                raise
        if not background:
            self.wait()

    def is_running(self) -> bool:
        return self._handle is not None and not self._handle.done()

    def is_running_anywhere(self) -> bool:
        """Return True on all processes if the save still runs on any of them."""
        return agree("look at the running save", self.is_running(), any)

    def cancel(self) -> None:
        """Give the running save up, on all processes. An error of its own is raised later."""
        if self._handle is not None and self._handle.cancel():
            self._handle = None

    def raise_if_failed(self) -> None:
        """Raise the save's error if it has failed by now and was not raised here yet."""
        if self._handle is None or self._is_raised or not self._handle.done():
            return
        error = self._handle.exception()
        if error is not None:
            self._handle = None
            self._error, self._is_raised = _without_frames(error), True
            raise error

    def wait(self) -> None:
        """Wait for the save and raise its error, on all processes alike."""
        error = self._error if self._handle is None else self._handle.exception()
        is_raised = self._is_raised
        self._handle = self._error = None
        if error is None:
            return
        have_all_raised = False
        with suppress(OstrakaError):  # One has ended.
            have_all_raised = agree("look at the last save", is_raised, all, timeout_s=_TIMEOUT_S)
        if not have_all_raised:
            raise error

    def finish_alone(self) -> None:
        """Wait for the save and log its error."""
        handle, self._handle = self._handle, None
        if handle is not None and not self._is_raised:
            error = handle.exception()
            if error is not None:
                log.error("%s", error)


def _without_frames(error: BaseException) -> BaseException:
    """A copy to raise again. The error itself keeps the frames that it passes, and their values."""
    with suppress(Exception):
        twin = copy(error)
        if type(twin) is type(error) and str(twin) == str(error):
            return twin
    return error
