"""Notice that this run is about to be ended, and agree on the step at which to save."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from ostraka._record import logger as log

_questions = itertools.count(1)
_told: list[bool] = []
"""Not empty once JAX has said that the run is being ended; it says so only once."""


class Preemption:
    """Tells, once for each step, whether the run is being ended and this is the step to save.

    Where `jax.distributed` runs, JAX hears the notice (SIGTERM on any process) and has all
    processes agree: it picks the next question that none has asked yet. So all must ask equally
    often. Elsewhere SIGTERM is caught here, for as long as this object is in use.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._answer = False
        # A plain flag: a lock could be held by the very line that a second signal interrupts.
        self._caught = False
        self._before: Any = None
        self._catches = False
        self._by_jax = jax.distributed.is_initialized() and _ask_jax() is not None
        if not self._by_jax and jax.process_count() == 1:
            self._catch()

    def reached(self, step: int) -> bool:
        """Asked again about the same step it says the same; once it was true, it stays so."""
        if step != self._step and not self._answer:
            self._step = step
            self._answer = self._ask()
        return self._answer

    def stop(self) -> None:
        """Leave SIGTERM to whoever had it before."""
        if not self._catches:
            return
        self._catches = False
        # Only the main thread may do so; if this is another, the next signal comes to that.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._heir())

    def _heir(self) -> Any:
        """Who gets the signal besides this; managers may have been closed in any order."""
        before = self._before
        owner = getattr(before, "__self__", None)
        if isinstance(owner, Preemption) and not owner._catches:
            return owner._heir()
        return before

    def _ask(self) -> bool:
        return bool(_ask_jax()) if self._by_jax else self._caught

    def _catch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning("SIGTERM is not watched: a Manager can do so only in the main thread")
            return
        before = signal.signal(signal.SIGTERM, self._on_signal)
        self._before = signal.SIG_DFL if before is None else before  # None: not Python's
        self._catches = True
        _catching.add(self)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._caught = True
        heir = self._heir()
        if callable(heir):
            heir(number, frame)
        elif not self._catches:
            signal.signal(number, heir)
            signal.raise_signal(number)


_catching: weakref.WeakSet[Preemption] = weakref.WeakSet()
_forking = threading.local()
"""The signals that a thread which is about to fork had blocked before."""


def _block_before_fork() -> None:
    """A signal that comes to a child before its handler is gone must wait: Python would drop it."""
    if _catching:
        _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_after_fork() -> None:
    blocked = getattr(_forking, "blocked", None)
    if blocked is not None:
        _forking.blocked = None
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _stop_after_fork() -> None:
    """A child saves nothing: SIGTERM must end it, or whoever ends a data worker waits for ever."""
    for preemption in list(_catching):
        preemption.stop()
    _unblock_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_before_fork,
        after_in_parent=_unblock_after_fork,
        after_in_child=_stop_after_fork,
    )


def _ask_jax() -> bool | None:
    """Whether this is the point that JAX had all processes agree on; None if it does not listen."""
    try:
        if not _told and multihost_utils.reached_preemption_sync_point(next(_questions)):
            _told.append(True)
    except RuntimeError:
        if jax.process_count() > 1:
            log.warning(
                "preemption is not watched: JAX's preemption service is off "
                "(jax_enable_preemption_service)"
            )
        return None
    return bool(_told)
