"""Work in a thread that stands still before a chosen call to its store."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ostraka.saving import place
from ostraka.storage import LocalStore, MemoryStore, _claim
from ostraka.storage._object import ObjectStore
from ostraka.testing import FaultyStore

LONG_S = 60.0


def hurry(
    patch: pytest.MonkeyPatch, renew_every_s: float, dead_after_s: float, look_every_s: float
) -> None:
    """Have owners that stand still soon taken for dead."""
    patch.setattr(_claim, "RENEW_EVERY_S", renew_every_s)
    patch.setattr(_claim, "DEAD_AFTER_S", dead_after_s)
    patch.setattr(_claim, "_PAUSES_S", (0.01, 0.02, 0.04))
    patch.setattr(place, "GONE_AFTER_S", 0.0)
    for kind in (LocalStore, MemoryStore, ObjectStore):
        patch.setattr(kind, "traits", replace(kind.traits, look_every_s=look_every_s))


class Suspended:
    """Work on a place without locks that stops at a step: its number, or what is true of it.

    Its claim is not renewed from then on, as if the whole process stood still, unless it `renews`.
    `outcome` is what the work returned or raised.
    """

    def __init__(
        self,
        path: Any,
        work: Callable[[FaultyStore], Any],
        at: int | Callable[[str, str], bool] | None = None,
        *,
        renews: bool = False,
    ):
        self.outcome: Any = None
        self.steps = 0
        self._work, self._at, self._renews = work, at, renews
        self._stopped, self._go_on = threading.Event(), threading.Event()
        self.store = FaultyStore(path, has_locks=False, before=self._before)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        if at is not None:
            self.run_until_stopped()

    def run_until_stopped(self) -> None:
        """Return once it stands still, or is done."""
        assert self._stopped.wait(LONG_S)

    def stop(self) -> None:
        """Stand still here, in a thread of the work."""
        self._stopped.set()
        assert self._go_on.wait(LONG_S)

    def finish(self) -> Any:
        """Let it run to its end."""
        self._go_on.set()
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        return self.outcome

    def _run(self) -> None:
        try:
            self.outcome = self._work(self.store)
        except BaseException as error:
            self.outcome = error
        finally:
            self._stopped.set()

    def _before(self, verb: str, name: str) -> None:
        renewal = verb == "touch" and threading.current_thread() is not self._thread
        if not renewal:
            self.steps += 1
            at = self._at
            if self.steps == at or (callable(at) and not self._stopped.is_set() and at(verb, name)):
                self._stopped.set()
        if self._stopped.is_set() and not (renewal and self._renews):
            assert self._go_on.wait(LONG_S)
