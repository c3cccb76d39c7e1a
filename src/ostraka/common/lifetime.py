"""Keeps a save consistent when its process is interrupted, forks or ends.

Threats and defences:

- **Ctrl-C while the collection of cycles is paused.** `paused_gc` is a generator. Python closes it
  even if the interrupt comes before its block begins, and closing it resumes the collection.
- **A signal handler that saves**, as one for SIGTERM may. It runs in the main thread, perhaps while
  this thread holds one of our locks. They are all `RLock`s.
- **A fork**, as data loaders do it. The child has none of the parent's threads, so their locks
  would stay closed and their pauses would never end. `after_fork` and `RenewedLock` prevent this.
- **The end of the program** while a save is running, or after one failed and `wait` was not called.
  `at_exit` waits for the save, raises its error, and sets the exit status.

`saving.background` handles Ctrl-C while `save_async` passes the work to its thread. Its token is a
lock without release: either the thread or the interrupted caller acquires it.

Not defended against, since only a few instructions of a whole save are open to it:

- Ctrl-C, or a signal handler that waits for the same save, while `threading.Event` holds its own
  lock. Every `wait` for this save then waits forever. No data is lost or half-written.
- Ctrl-C while `paused_gc` ends: the collection stays off until the program turns it on.
- Ctrl-C while Python starts the thread of `save_async`: Python may make a RuntimeError of it. The
  save is ended and raises that.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock
from typing import Any, TextIO, cast

# Forks


def after_fork(action: Callable[[], None]) -> None:
    """Run `action` first in every forked child, on systems that fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=action)


class RenewedLock:
    """Has a lock that is open again in a forked child, without the thread of its holder.

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


_pauses: list[object] = []


@contextmanager
def paused_gc() -> Generator[None]:
    """Hold off the collection of cycles, for bursts of many small objects that have none.

    Each collection looks at all objects, which costs more than all other work for a small leaf.
    Threads may pause at the same time, and the last one that leaves resumes. If the program itself
    has turned the collection off, it stays off.
    """
    if not gc.isenabled() and not _pauses:
        yield
        return
    pause = object()
    try:
        _pauses.append(pause)
        gc.disable()
        yield
    finally:
        if pause in _pauses:  # not in a child that was forked inside
            _pauses.remove(pause)
        if not _pauses:
            gc.enable()


def _forget_pauses() -> None:
    if _pauses:
        _pauses.clear()
        gc.enable()


after_fork(_forget_pauses)


# The end of the program


class Ending:
    has_begun = False
    """True once the program ends and would not wait for a new thread."""


def at_exit(wait: Callable[[], None], take_error: Callable[[], BaseException | None]) -> None:
    """Before the program ends, call `wait` and raise the error from `take_error`, if any.

    `wait` must not raise. It runs twice: before functions of `atexit` close anything that a save
    needs, and again for saves that began since.
    """

    def tell() -> None:
        wait()
        Ending.has_begun = True
        error = take_error()
        if error is not None:
            _make_exit_status_nonzero()
            raise error

    atexit.register(tell)
    try:
        # What is registered with `threading` runs before all that is registered with `atexit`.
        getattr(threading, "_register_atexit", atexit.register)(wait)
    except RuntimeError:  # The program has already begun to end, and calls nobody that comes now.
        Ending.has_begun = True


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
    """A stream whose last flush, at the end of Python, fails."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("a save failed and nobody asked for its error")
