"""Wait for new steps of a run, and keep each until its reader is done. No JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ostraka.common.record import logger as log
from ostraka.errors import StoreError, UnsupportedFormat
from ostraka.layout import shard_file
from ostraka.manager.leases import ReaderLease
from ostraka.manager.steps import Root, Step
from ostraka.storage import Expiry, is_claim

BACKLOG = 64
"""How many steps are kept for a reader that is behind, by default."""

_PART = 0.1
"""The pause before the next look, as a part of the time waited so far. So the delay is small beside
the time between steps, and a run that has ended costs few looks."""
_SHORTEST = 0.05
_LONGEST = 10
"""Bounds of that pause, times the store's own `look_every_s`."""


class Watch:
    """Waits for one step after the other, in ascending order, and holds a lease on the last one.

    It begins with the first step after `after`. With `newest_only` it leaves out all but the
    newest. Otherwise up to `backlog` steps that come meanwhile are kept, too. `warn` is called
    once, if no lease can be written.
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
        self._lease = ReaderLease(root.store, backlog=0 if newest_only else backlog)
        self._skipped: set[int] = set()
        self._expiry = Expiry()

    def wait(self) -> Step | None:
        """Return the next step, kept until the next call, or None after `timeout_s` without one.

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
                    self.close()
                    return None
                pause_s = min(pause_s, left_s)
            time.sleep(pause_s)
            if not self._lease.is_held:
                self._protect(lambda: self._lease.wait_from(self._last + 1))

    def close(self) -> None:
        """Release the lease on the step. A second call does nothing."""
        self._lease.release()

    def _look(self, waited_s: float) -> tuple[Step | None, float]:
        """Return the next step, or None and after how long to look again."""
        every_s = self._root.store.traits.look_every_s
        step = self._find(self._root.store.list())
        if step is None:
            return None, min(max(waited_s * _PART, every_s * _SHORTEST), every_s * _LONGEST)
        is_leased = self._protect(lambda: self._lease.begin(step.step))
        if self._is_free(step, is_leased):
            if is_leased:
                self._lease.keep_latest()
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

    def _is_free(self, step: Step, is_leased: bool) -> bool:
        """Return True if a step exists and nobody can be about to delete it: see `leases`."""
        if step.is_foreign:
            return True  # No Manager deletes it.
        place = self._root.at(step.names[0])
        names = place.list()
        if shard_file.METADATA_NAME not in names:
            return False
        claims = list(filter(is_claim, names)) if is_leased else []
        if not claims:
            return True
        now_s = self._lease.now_s()
        if now_s is None:
            return False
        expired = [self._expiry.look(place, one, now_s, wait=False) is None for one in claims]
        # A claim that is gone by now may have taken the step with it.
        return all(expired) and all(map(place.look, claims))

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
