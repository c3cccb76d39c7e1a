"""The steps of a run as they are committed, each kept until it was read. No JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ostraka import _format
from ostraka._record import logger as log
from ostraka._step_names import steps_among
from ostraka.errors import StoreError, UnsupportedFormat
from ostraka.manager._leases import ReaderLease
from ostraka.manager._steps import Root, Step
from ostraka.storage import is_claim, is_overdue

BACKLOG = 64
"""How many steps are kept for a reader that has fallen behind, unless it wants another number."""

_PART = 0.1
"""The next look comes after this part of the time waited so far: so a step is seen with a delay
that is small beside the time between steps, and a run that has ended costs few looks."""
_SHORTEST = 0.05
_LONGEST = 10
"""Bounds of that pause, times the store's own `look_every_s`."""


class Watch:
    """Waits for one step after the other, in ascending order; has a lease on the last one.

    Begins with the first step after `after`; with `newest_only` leaves out all but the newest.
    Else up to `backlog` steps that come meanwhile are kept, too; of others that were deleted before
    they were seen the log has a line. `warn` is called once, if no lease can be written.
    """

    def __init__(
        self,
        root: Root,
        *,
        after: int | None,
        newest_only: bool,
        backlog: int,
        timeout_s: float | None,
        warn: Callable[[str], None],
    ):
        self._root = root
        self._last = -1 if after is None else after
        self._newest_only = newest_only
        self._timeout_s = timeout_s
        self._warn: Callable[[str], None] | None = warn
        self._backlog = 0 if newest_only else backlog
        self._lease = ReaderLease(root.store, backlog=self._backlog)
        self._skipped: set[int] = set()

    def wait(self) -> Step | None:
        """The next step, whole, and kept until the next call; None after `timeout_s` without one.

        Raises UnsupportedFormat if only a newer version of Ostraka can read it.
        """
        began_s = time.monotonic()
        is_leased = self._protect(lambda: self._lease.wait_from(self._last + 1))
        if not is_leased and not self._root.store.exists():
            log.info("waiting for %s, which is not there yet", self._root.location)
        while True:
            step, pause_s = self._look(time.monotonic() - began_s)
            if step is not None:
                self._last = step.step
                return step
            if self._timeout_s is not None:
                left_s = began_s + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    self._tell_missed(None, self._root.store.list())
                    self.close()
                    return None
                pause_s = min(pause_s, left_s)
            time.sleep(pause_s)
            if not self._lease.is_held:
                self._protect(lambda: self._lease.wait_from(self._last + 1))

    def close(self) -> None:
        """Let the step be deleted; again is as good as once."""
        self._lease.release()

    def _look(self, waited_s: float) -> tuple[Step | None, float]:
        """The next step, if it is there; else after how long to look again."""
        every_s = self._root.store.parts.look_every_s
        names = self._root.store.list()
        step = self._find(names)
        if step is None:
            return None, min(max(waited_s * _PART, every_s * _SHORTEST), every_s * _LONGEST)
        is_leased = self._protect(lambda: self._lease.begin(step.step))
        if self._is_free(step, is_leased):
            if is_leased:
                self._lease.keep_latest()
            self._tell_missed(step.step, names)
            return step, 0.0
        if is_leased:
            self._lease.take_back()
        return None, every_s

    def _find(self, names: Sequence[str]) -> Step | None:
        for step in self._root.steps_after(self._last, names, descending=self._newest_only):
            if step.unsupported is not None:
                raise UnsupportedFormat(step.unsupported)
            if not step.problems:
                return step
            if step.step not in self._skipped:
                self._skipped.add(step.step)
                log.error("step %d is left out: %s", step.step, step.problems[0])
        return None

    def _tell_missed(self, found: int | None, names: Sequence[str]) -> None:
        """Log which steps were deleted before they were seen, if the next one after was found."""
        if not self._backlog or not self._lease.is_held:
            return
        if found is not None and any(self._last < one < found for one in steps_among(names)):
            names = self._root.store.list()  # One was there when these were listed, and is gone.
        try:
            missed = self._lease.missed_before(found, names)
        except StoreError:
            return  # At the next step, then.
        if missed is not None:
            log.warning(
                "some steps of %s were deleted before this watch came to them, the first of them "
                "%d, the last %d: it is behind the run that saves by more than its backlog",
                self._root.location,
                *missed,
            )

    def _is_free(self, step: Step, is_leased: bool) -> bool:
        """Whether a step is there, and nobody can be about to delete it: see `_leases`."""
        place = self._root.at(step.names[0])
        names = place.list()
        if _format.METADATA_NAME not in names:
            return False
        claims = list(filter(is_claim, names)) if is_leased else []
        if not claims:
            return True
        now_s = self._lease.now_s()
        # A claim that is gone by now may have taken the step with it.
        files = map(place.look, claims)
        return now_s is not None and all(file and is_overdue(file, now_s) for file in files)

    def _protect(self, put: Callable[[], None]) -> bool:
        try:
            put()
        except FileNotFoundError:
            return False  # The root is not there yet.
        except StoreError as error:
            if self._warn is not None:
                self._warn(
                    f"the steps of {self._root.location} may be deleted while they are read, since "
                    f"no lease can be written: {error}"
                )
                self._warn = None
            return False
        return True
