"""Run work in threads, so that the first error ends it and nothing outlives the call."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Condition, Event, Lock
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2
"""How many items a thread may have, being worked on and waiting."""


class Stopped(Exception):
    """Other work of the same call failed, so this has no purpose any more."""


class StopSignal:
    """Asked between steps of long work."""

    def __init__(self) -> None:
        self._event = Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        if self._event.is_set():
            raise Stopped


class ByteBudget:
    """Bounds the memory that threads hold at one time; one that needs more than all goes alone."""

    def __init__(self, limit_bytes: int):
        self._limit = limit_bytes
        self._held = 0
        self._changed = Condition()

    @contextmanager
    def hold(self, nbytes: int, check: Callable[[], None]) -> Generator[None]:
        """Wait for room, then have it; `check` is asked while waiting and may raise."""
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


_gc_pauses = 0
_gc_lock = Lock()


@contextmanager
def paused_gc() -> Generator[None]:
    """Hold off the collection of cycles, for bursts of many small objects that have none.

    Beside a program's own objects each collection looks at all of ours, which costs more than
    everything else that is done for a small leaf.
    """
    global _gc_pauses  # noqa: PLW0603
    with _gc_lock:
        was_enabled = gc.isenabled()
        pausing = was_enabled or _gc_pauses > 0
        if pausing:
            _gc_pauses += 1
            gc.disable()
    try:
        yield
    finally:
        if pausing:
            with _gc_lock:
                _gc_pauses -= 1
                if _gc_pauses == 0:
                    gc.enable()


def in_turn(sources: Sequence[Iterator[Item]], *, at_a_time: int) -> Iterator[Item]:
    """An item of each source in turn, until all have ended; so many sources at a time."""
    for start in range(0, len(sources), at_a_time):
        waiting = deque(sources[start : start + at_a_time])
        while waiting:
            source = waiting.popleft()
            for item in source:
                waiting.append(source)
                yield item
                break


def run_all(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, stop: StopSignal
) -> list[Result]:
    """The results of `work` for all items, in their order; raises the first error there was."""
    results = dict(run_as_completed(work, items, threads=threads, stop=stop))
    return [results[number] for number in range(len(results))]


def run_as_completed(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, stop: StopSignal
) -> Iterator[tuple[int, Result]]:
    """Each item's number and result, as soon as it is there; raises the first error there was.

    Items are taken from their iterator only a little ahead of the work, and not while the caller is
    busy with results: what an item holds, or its result, is never there for all at once. Leaving
    the iteration early, by an error or an interrupt, waits for the threads to stop.
    """

    pool = ThreadPoolExecutor(threads, thread_name_prefix="ostraka")
    done: SimpleQueue[tuple[int, Future[Result]]] = SimpleQueue()
    errors: list[BaseException] = []

    def guarded(item: Item) -> Result:
        stop.check()
        try:
            return work(item)
        except BaseException as error:
            errors.append(error)
            stop.set()  # at once: the others may have much left to do
            raise

    def next_done() -> tuple[int, Result]:
        number, future = done.get()
        return number, future.result()

    running = 0
    try:
        for number, item in enumerate(items):
            future = pool.submit(guarded, item)
            future.add_done_callback(lambda f, n=number: done.put((n, f)))
            running += 1
            while running == threads * _AHEAD or not done.empty():
                running -= 1
                yield next_done()
        for _ in range(running):
            yield next_done()
    except Stopped:
        if not errors:
            raise
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    if errors:
        raise errors[0]
