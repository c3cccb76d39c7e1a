"""What keeps a save whole when its process is interrupted, forks or ends.

What it defends against, and with what:

- **Ctrl-C while a thread waits.** It may come at any bytecode. `threading.Event` would then leave
  its lock held, and everybody else would wait for ever: `Latch` has no such moment.
- **Ctrl-C while `save_async` hands the work to its thread.** Either the thread does the work or the
  interrupted caller ends the save on all processes, never both and never neither: `Token`.
- **Ctrl-C while the collection of cycles is paused.** It is resumed by the next `paused_gc` at the
  latest, because a pause that is gone no longer counts.
- **A signal handler that saves**, as one for SIGTERM may. It runs in the main thread, perhaps while
  that thread holds one of our locks: they are all `RLock`s.
- **A fork**, as data loaders do it. The child has none of the parent's threads, so a lock that one
  of them held would never be released, nor a pause ended: `after_fork`, `RenewedLock`.
- **The end of the program** while a save is under way, or after one failed and nobody asked how it
  went: `at_exit` waits for the save, raises its error, and sets the exit status.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from threading import Lock, RLock
from typing import Any, TextIO, cast

_LOOK_EVERY_S = 1.0


# Interrupts


class Latch:
    """An event that comes once, and can be waited for in spite of interrupts.

    An interrupt may cost another waiter up to a second, no more.
    """

    __slots__ = ("_gate", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._gate = Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """To be called by one thread; again is as good as once."""
        if not self._is_set:
            self._is_set = True
            self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has come, at the latest after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._is_set:
            left = _LOOK_EVERY_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            if self._gate.acquire(timeout=min(left, _LOOK_EVERY_S)):
                self._gate.release()  # for the next
        return True


class Token:
    """Something that exactly one of several threads gets, whatever interrupts them."""

    def __init__(self) -> None:
        self._left = [True]

    def take(self) -> bool:
        """Whether the caller has got it: True once, for whoever comes first."""
        try:
            return self._left.pop()  # one step, which no signal can divide
        except IndexError:
            return False


# Forks


def after_fork(action: Callable[[], None]) -> None:
    """Have every forked child do this first, on systems that fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


class RenewedLock:
    """Has a lock that a forked child finds open: the thread that held it is not there.

    A signal handler that comes while it is held may take it again, in the same thread.
    """

    def __init__(self) -> None:
        self.renew()
        _renewed.add(self)

    def renew(self) -> None:
        self.lock = RLock()


_renewed: weakref.WeakSet[RenewedLock] = weakref.WeakSet()


def _renew_locks() -> None:
    for renewed in list(_renewed):
        renewed.renew()


after_fork(_renew_locks)


# The collection of cycles


class paused_gc:  # noqa: N801 - used as a statement: `with paused_gc():`
    """Hold off the collection of cycles, for bursts of many small objects that have none.

    Beside a program's own objects each collection looks at all of ours, which costs more than
    everything else that is done for a small leaf.
    """

    __slots__ = ("__weakref__",)

    def __enter__(self) -> None:
        with _paused.lock:
            if gc.isenabled() or _paused.by:
                _paused.by.append(weakref.ref(self))
                gc.disable()

    def __exit__(self, *_: object) -> None:
        with _paused.lock:
            if _paused.by:
                left = [ref for ref in _paused.by if ref() not in (None, self)]
                if not left:
                    gc.enable()  # Before it is forgotten that the pause was ours.
                _paused.by = left


class _Paused:
    """Who has paused the collection: nobody, or nobody but the program itself, if empty."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.by: list[weakref.ref[paused_gc]] = []


_paused = _Paused()


def _forget_pauses() -> None:
    global _paused
    were, _paused = _paused, _Paused()
    if were.by:
        gc.enable()


after_fork(_forget_pauses)


# The end of the program


class _Ending:
    has_begun = False
    """Whether the program ends, and is so far that it would wait for no thread."""


def is_ending() -> bool:
    """Whether it is too late to leave work to a thread in the background."""
    return _Ending.has_begun


def at_exit(wait: Callable[[], None], take_error: Callable[[], BaseException | None]) -> None:
    """Before the program ends, call `wait`; then raise the error that `take_error` returns, if any.

    `wait` must not raise, and is called twice: before functions of `atexit` close what a save still
    needs, and again for what was begun since.
    """

    def tell() -> None:
        wait()
        _Ending.has_begun = True
        error = take_error()
        if error is not None:
            _make_exit_status_nonzero()
            raise error

    atexit.register(tell)
    # What is registered with `threading` runs before all that is registered with `atexit`.
    before_threads_end = getattr(threading, "_register_atexit", atexit.register)
    try:
        before_threads_end(wait)
    except RuntimeError:  # The program has already begun to end, and calls nobody that comes now.
        _Ending.has_begun = True


def _make_exit_status_nonzero() -> None:
    """Have Python end with status 120, its own for an error while it ends.

    It prints what a function registered with `atexit` raises, but would still end with 0, and a
    scheduler would take the run for a success. What it does look at is the last flush.
    """
    stream = cast(TextIO | None, sys.stderr)
    if stream is None or stream.closed:
        stream = open(os.devnull, "w")  # noqa: SIM115 - until the end of the program
    sys.stderr = cast(TextIO, _FailsLastFlush(stream))


class _FailsLastFlush:
    """A stream as it was, but that Python's flush of it after all else fails."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a save failed and nobody asked for its error")
