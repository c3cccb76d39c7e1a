"""Run work in threads, so that the first error ends it and nothing outlives the call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2
"""How many items a thread may have, being worked on and waiting."""


class Stopped(Exception):
    """Other work of the same call failed, so this has no purpose any more."""


class StopSignal:
    """Asked between steps of long work."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def check(self) -> None:
        if self._is_set:
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


class TooDeep(RecursionError):
    """Work that recurses deeper than Python's limit, even on a stack of its own."""


def with_full_stack(work: Callable[[], Result]) -> Result:
    """What `work` returns, which recurses and has no effects, however deep its caller is.

    Raises TooDeep if it needs more than the whole of Python's limit; any other RecursionError means
    that the caller has left nothing of it at all.
    """
    try:
        return work()
    except RecursionError as error:
        too_deep = error
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except RecursionError as error:
            errors.append(TooDeep(*error.args))
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run, name="ostraka_deep", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # The system has none left, or the caller no room to start it.
        raise too_deep from None
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


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
    crew = _Crew(work, threads, stop)
    waiting = 0
    try:
        for number, item in enumerate(items):
            crew.give(number, item)
            waiting += 1
            while waiting == threads * _AHEAD or crew.has_done():
                waiting -= 1
                yield crew.take()
        for _ in range(waiting):
            yield crew.take()
    except Stopped:
        if not crew.errors:
            raise
    finally:
        stop.set()
        crew.dismiss()
    if crew.errors:
        raise crew.errors[0]


class _Crew(Generic[Item, Result]):
    """Threads that work off a queue.

    Not an executor: those take no work any more once the interpreter has begun to end, when a save
    must still come to its own end.
    """

    def __init__(self, work: Callable[[Item], Result], threads: int, stop: StopSignal):
        self.errors: list[BaseException] = []
        self._work = work
        self._stop = stop
        self._most = threads
        self._threads: list[Thread] = []
        self._given: SimpleQueue[tuple[int, Item] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, Result] | None] = SimpleQueue()

    def give(self, number: int, item: Item) -> None:
        self._given.put((number, item))
        if len(self._threads) < self._most:
            self._hire()
        if not self._threads:
            self._do_next()

    def has_done(self) -> bool:
        return not self._done.empty()

    def take(self) -> tuple[int, Result]:
        """Wait for a result. Raises Stopped if there is none to come, because work failed."""
        done = self._done.get()
        if done is None:
            raise Stopped
        return done

    def dismiss(self) -> None:
        """Wait for all to end. One whose start was interrupted ends too, a moment later."""
        self._given.put(None)
        for thread in self._threads:
            thread.join()

    def _hire(self) -> None:
        thread = Thread(target=self._do_all, name=f"ostraka_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RecursionError:
            raise
        except RuntimeError:  # The system has none left.
            self._most = len(self._threads)
        else:
            self._threads.append(thread)

    def _do_all(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        # What was given is let go of before the next wait, so that nothing is held for long.
        given = self._given.get()
        if given is None:
            self._given.put(None)  # for the next thread
            return False
        number, item = given
        try:
            self._stop.check()
            self._done.put((number, self._work(item)))
        except Stopped:
            self._done.put(None)
        except BaseException as error:
            self.errors.append(error)
            self._stop.set()  # at once: the others may have much left to do
            self._done.put(None)
        return True
