"""Notice that this run is being preempted, and agree on the step at which to save."""

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
_preempted: list[bool] = []
"""Not empty once JAX has reported a preemption, which it does only once."""


class Preemption:
    """Answers, for each step, whether the run is being preempted and this is the step to save.

    Where `jax.distributed` runs, JAX gets the notice (SIGTERM on any process) and picks a sync
    point that no process has reached yet. Each question is a sync point, so all processes must ask
    equally often. Elsewhere SIGTERM is caught here, until `stop`.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._answer = False
        # A plain flag: with a lock, a second signal could interrupt its holder and deadlock.
        self._caught = False
        self._before: Any = None
        self._catches = False
        self._by_jax = jax.distributed.is_initialized() and _ask_jax() is not None
        if not self._by_jax and jax.process_count() == 1:
            self._catch()

    def reached(self, step: int) -> bool:
        """The answer for a step does not change, and once it is True it stays True."""
        if step != self._step and not self._answer:
            self._step = step
            self._answer = self._ask()
        return self._answer

    def stop(self) -> None:
        """Restore the handler that SIGTERM had before."""
        if not self._catches:
            return
        self._catches = False
        # Only the main thread may set handlers. From another, ours stays and passes signals on.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._next_handler())

    def _next_handler(self) -> Any:
        """The handler to call after this one; managers may have been closed in any order."""
        before = self._before
        owner = getattr(before, "__self__", None)
        if isinstance(owner, Preemption) and not owner._catches:
            return owner._next_handler()
        return before

    def _ask(self) -> bool:
        return bool(_ask_jax()) if self._by_jax else self._caught

    def _catch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning("SIGTERM is not watched: a Manager can do so only in the main thread")
            return
        before = signal.signal(signal.SIGTERM, self._on_signal)
        self._before = signal.SIG_DFL if before is None else before  # None: not set by Python
        self._catches = True
        _catching.add(self)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._caught = True
        handler = self._next_handler()
        if callable(handler):
            handler(number, frame)
        elif not self._catches:
            signal.signal(number, handler)
            signal.raise_signal(number)


_catching: weakref.WeakSet[Preemption] = weakref.WeakSet()
_forking = threading.local()
"""The signal mask that a forking thread had before the fork."""


def _block_before_fork() -> None:
    """Block SIGTERM while forking: Python drops one that a child gets before `stop`."""
    if _catching:
        _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_after_fork() -> None:
    blocked = getattr(_forking, "blocked", None)
    if blocked is not None:
        _forking.blocked = None
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _stop_after_fork() -> None:
    """A child saves nothing, so SIGTERM must end it, or ending a data worker would hang."""
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
    """Whether JAX's sync point is reached; None if JAX does not watch for preemption."""
    try:
        if not _preempted and multihost_utils.reached_preemption_sync_point(next(_questions)):
            _preempted.append(True)
    except RuntimeError:
        if jax.process_count() > 1:
            log.warning(
                "preemption is not watched: JAX's preemption service is off "
                "(jax_enable_preemption_service)"
            )
        return None
    return bool(_preempted)
