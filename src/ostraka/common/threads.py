"""Run work in threads, so that the first error ends it and nothing outlives the call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Condition, Thread
from typing import TypeVar

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
