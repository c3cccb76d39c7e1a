"""Run work in threads, and keep a save consistent if its process is interrupted, forks or ends.

The first error ends all work of a call, and nothing outlives the call.

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
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Condition, RLock, Thread
from typing import Any, TextIO, TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2
"""The items of a thread, in work and waiting."""


class Stopped(Exception):
    """Raised in threads after other work of the same call failed."""


class StopSignal:
    """Ends long work, which calls `check` between its steps."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def check(self) -> None:
        if self._is_set:
            raise Stopped


class ByteBudget:
    """Bounds the memory that threads hold. A thread that needs more than the limit runs alone."""

    def __init__(self, limit_bytes: int):
        self._limit = limit_bytes
        self._held = 0
        self._changed = Condition()

    @contextmanager
    def hold(self, nbytes: int, check: Callable[[], None]) -> Generator[None]:
        """Wait for room, then hold it. `check` is called while waiting, and may raise."""
        with self._changed:
            while self._held and self._held + nbytes > self._limit:
                check()
                self._changed.wait(0.2)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()


class TooDeep(RecursionError):
    """Raised if work recurses deeper than Python's limit, even on its own stack."""


def with_full_stack(work: Callable[[], Result]) -> Result:
    """The result of `work`, a recursive function without effects, however deep its caller is.

    Raises TooDeep if `work` needs more than Python's whole limit. Any other RecursionError means
    that the caller has used up the limit.
    """
    try:
        return work()
    except RecursionError:
        pass  # Perhaps for its caller: a thread has a stack of its own.

    def work_in_thread(_: None) -> Result:
        try:
            return work()
        except RecursionError as error:
            raise TooDeep(*error.args) from None

    return run_all(work_in_thread, [None], threads=1, stop=StopSignal())[0]


def in_turn(sources: Sequence[Iterator[Item]], *, at_a_time: int) -> Iterator[Item]:
    """An item of each source in turn, `at_a_time` sources together, until all have ended."""
    for start in range(0, len(sources), at_a_time):
        waiting = deque(sources[start : start + at_a_time])
        while waiting:
            source = waiting.popleft()
            for item in source:
                waiting.append(source)
                yield item
                break


def batches(
    items: Iterable[Item], size_of: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Consecutive items, as many together as have a size of at most `most`, at least one."""
    batch: list[Item] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if batch and filled + size > most:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch


def run_all(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, stop: StopSignal
) -> list[Result]:
    """The results of `work` for all items, in their order. Raises the first error."""
    results = dict(run_as_completed(work, items, threads=threads, stop=stop))
    return [results[number] for number in range(len(results))]


def run_as_completed(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, stop: StopSignal
) -> Iterator[tuple[int, Result]]:
    """The number and result of each item, as soon as it is done. Raises the first error.

    Items are taken from their iterator only a little ahead of the work, and not while the caller is
    busy with results. So only a few items and results are in memory at a time. Leaving the
    iteration early, by an error or an interrupt, waits for the threads to stop.
    """

    # Not an executor: those take no work any more once the interpreter has begun to end, when a
    # save must still come to its own end.
    given: SimpleQueue[tuple[int, Item] | None] = SimpleQueue()
    done: SimpleQueue[tuple[int, Result] | BaseException] = SimpleQueue()

    def do_next() -> bool:
        # A function of its own: what was given is let go of before the next wait.
        task = given.get()
        if task is None:
            given.put(None)  # for the next thread
            return False
        number, item = task
        try:
            stop.check()
            done.put((number, work(item)))
        except BaseException as error:
            done.put(error)  # before the others hear of it, and raise Stopped
            stop.set()
        return True

    def do_all() -> None:
        while do_next():
            pass

    crew: list[Thread] = []
    waiting = 0
    try:
        for number, item in enumerate(items):
            given.put((number, item))
            waiting += 1
            if len(crew) < threads and not _start(do_all, crew):
                threads = len(crew)
            if not crew:
                do_next()
            while waiting and (waiting >= threads * _AHEAD or not done.empty()):
                waiting -= 1
                yield _take(done)
        for _ in range(waiting):
            yield _take(done)
    except Stopped:
        while not done.empty():
            _take(done)  # raises the error because of which the items have stopped
        raise
    finally:
        stop.set()
        given.put(None)
        for thread in crew:  # One whose start was interrupted ends too, a moment later.
            thread.join()
        # The frames of a second error would keep its item, and the queue the error.
        while not done.empty():
            done.get()


def _take(done: SimpleQueue[tuple[int, Result] | BaseException]) -> tuple[int, Result]:
    found = done.get()
    if isinstance(found, BaseException):
        raise found
    return found


def _start(work: Callable[[], None], crew: list[Thread]) -> bool:
    """Start one more thread. Returns False if the system has none left."""
    thread = Thread(target=work, name=f"ostraka_{len(crew)}", daemon=True)
    try:
        thread.start()
    except RecursionError:
        raise
    except RuntimeError:
        return False
    crew.append(thread)
    return True


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
            # Have Python end with status 120, its own for an error while it ends. It prints what a
            # function registered with `atexit` raises, but would still end with 0, and a scheduler
            # would take the run for a success. What it does look at is the last flush.
            stream = cast(TextIO | None, sys.stderr)
            if stream is None or stream.closed:
                stream = open(os.devnull, "w")  # noqa: SIM115 - until the end of the program
            sys.stderr = cast(TextIO, _FailsLastFlush(stream))
            raise error

    atexit.register(tell)
    try:
        # What is registered with `threading` runs before all that is registered with `atexit`.
        getattr(threading, "_register_atexit", atexit.register)(wait)
    except RuntimeError:  # The program has already begun to end, and calls nobody that comes now.
        Ending.has_begun = True


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
