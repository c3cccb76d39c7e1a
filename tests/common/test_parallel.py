"""Work in threads: taken lazily, ended by the first error, and never outliving the call."""

import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

from ostraka.common.threads import (
    ByteBudget,
    Stopped,
    StopSignal,
    TooDeep,
    batches,
    in_turn,
    run_all,
    run_as_completed,
    with_full_stack,
)

THREADS = 3
AHEAD = 4 * THREADS
"""How many items may be taken and not be done."""


def workers() -> int:
    """How many threads of such a call there are."""
    return sum(thread.name.startswith("ostraka_") for thread in threading.enumerate())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def alone() -> None:
    """What another test of this process may have left under way ends first."""
    wait_until(lambda: not any(t.name.startswith("ostraka") for t in threading.enumerate()))


def counted(items: Iterator[int], taken: list[int]) -> Iterator[int]:
    for item in items:
        taken.append(item)
        yield item


# Results


def test_results_are_in_the_order_of_the_items():
    names: set[str] = set()

    def items() -> Iterator[int]:
        for number in range(50):
            names.add(threading.current_thread().name)
            yield number

    def work(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number * number

    squares = run_all(work, items(), threads=THREADS, stop=StopSignal())
    assert squares == [number * number for number in range(50)]
    assert names == {threading.current_thread().name}  # The caller alone takes items.
    assert workers() == 0
    assert run_all(work, [], threads=THREADS, stop=StopSignal()) == []


def test_results_come_as_soon_as_they_are_there():
    gate = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert gate.wait(60)
        return number

    done = run_as_completed(work, range(6), threads=2, stop=StopSignal())
    others = [next(done) for _ in range(5)]
    gate.set()
    assert sorted(others) == [(number, number) for number in range(1, 6)]
    assert list(done) == [(0, 0)]


# Items are taken as they are needed


def test_items_are_taken_only_a_little_ahead():
    taken: list[int] = []
    most_ahead = 0
    finished = 0
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal finished, most_ahead
        with lock:
            most_ahead = max(most_ahead, len(taken) - finished)
            finished += 1

    run_all(work, counted(iter(range(500)), taken), threads=THREADS, stop=StopSignal())
    assert len(taken) == 500
    assert most_ahead <= AHEAD + 1


def test_items_are_not_taken_while_the_caller_is_busy():
    taken: list[int] = []
    done = run_as_completed(
        lambda number: number, counted(iter(range(500)), taken), threads=THREADS, stop=StopSignal()
    )
    next(done)
    before = len(taken)
    time.sleep(0.05)
    assert len(taken) == before <= AHEAD + 1
    assert len(list(done)) == 499


def test_items_are_let_go_of_when_they_are_done():
    class Item:
        pass

    alive: list[weakref.ref[Item]] = []

    def items() -> Iterator[Item]:
        for _ in range(50):
            item = Item()
            alive.append(weakref.ref(item))
            yield item
            del item

    for _ in run_as_completed(id, items(), threads=THREADS, stop=StopSignal()):
        assert sum(item() is not None for item in alive) <= AHEAD + 1
    assert not any(item() is not None for item in alive)


# No threads to be had


@pytest.mark.parametrize("most", [0, 1, 2])
def test_system_that_gives_no_more_threads(most: int):
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    with patch.object(threading.Thread, "start", start):
        assert run_all(str, range(100), threads=THREADS, stop=StopSignal()) == [
            str(number) for number in range(100)
        ]
        with pytest.raises(ZeroDivisionError, match="by zero"):
            run_all(lambda x: 1 // (x - 5), range(100), threads=THREADS, stop=StopSignal())
    assert workers() == 0


# Errors


def test_first_error_is_raised_and_ends_the_rest():
    stop = StopSignal()
    started: list[int] = []

    def work(number: int) -> None:
        started.append(number)
        if number == 5:
            raise KeyError("the real one")
        while True:
            stop.check()
            time.sleep(0.001)

    # Item 5 is not among those that begin first: others must go on for it to come.
    def short_work(number: int) -> None:
        if number >= 4:
            work(number)

    with pytest.raises(KeyError, match="the real one"):
        run_all(short_work, range(1000), threads=THREADS, stop=stop)
    assert max(started) < 5 + AHEAD
    assert workers() == 0
    with pytest.raises(Stopped, match="^$"):
        stop.check()


def raised(error: BaseException) -> Any:
    raise error


def endless(stop: StopSignal) -> Iterator[int]:
    while True:
        stop.check()
        yield 0


def and_then(items: Iterable[int], error: BaseException) -> Iterator[int]:
    yield from items
    raise error


@pytest.mark.parametrize(
    ("work", "items", "expected"),
    [
        (str, lambda stop: and_then(range(10), LookupError("no more")), LookupError("no more")),
        # Rather than that it causes in the items.
        (lambda _: raised(ValueError("the cause")), endless, ValueError("the cause")),
        (lambda _: raised(SystemExit("of it")), lambda stop: range(4), SystemExit("of it")),
        (str, lambda stop: stop.set() or range(10), Stopped()),
    ],
    ids=["of the items", "of the work", "no exception", "from outside"],
)
def test_an_error_is_raised(work: Any, items: Any, expected: BaseException):
    stop = StopSignal()
    with pytest.raises(type(expected), match=f"^{expected}$"):
        run_all(work, items(stop), threads=THREADS, stop=stop)
    assert workers() == 0


# Leaving early


def test_leaving_early_waits_for_the_threads():
    stop = StopSignal()
    begun: list[int] = []
    finished: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 0:
            wait_until(lambda: len(begun) == THREADS)
        else:
            wait_until(lambda: stop._is_set)
            time.sleep(0.05)
        finished.append(number)
        return number

    done = run_as_completed(work, range(100), threads=THREADS, stop=stop)
    assert next(done) == (0, 0)
    done.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert workers() == 0
    assert sorted(finished) == sorted(begun)
    assert len(finished) <= 1 + THREADS
    with pytest.raises(Stopped, match="^$"):
        stop.check()


def test_interrupt_waits_for_the_threads():
    stop = StopSignal()
    taken: list[int] = []
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        while True:
            stop.check()
            time.sleep(0.001)

    def interrupt() -> None:
        # All threads have been started: one whose start is interrupted ends a moment later.
        wait_until(lambda: len(taken) == 2 * THREADS and len(begun) == THREADS)
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.get_ident()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt, match="^$"):
            run_all(work, counted(iter(range(100)), taken), threads=THREADS, stop=stop)
    finally:
        signal.signal(signal.SIGINT, before)
    assert workers() == 0


# Sources in turn


def test_sources_come_in_turn_until_all_have_ended():
    sources = [iter("abc"), iter(""), iter("x"), iter("12")]
    assert "".join(in_turn(sources, at_a_time=10)) == "ax1b2c"


def test_so_many_sources_are_begun_at_a_time():
    begun: list[int] = []

    def source(number: int) -> Iterator[int]:
        begun.append(number)
        yield from (number, number)

    items = in_turn([source(number) for number in range(4)], at_a_time=2)
    assert [next(items) for _ in range(4)] == [0, 1, 0, 1]
    assert begun == [0, 1]
    assert list(items) == [2, 3, 2, 3]


def test_error_of_a_source_is_raised_in_its_turn():
    def bad() -> Iterator[str]:
        yield "b"
        raise ValueError("bad source")

    items = in_turn([iter("aa"), bad()], at_a_time=2)
    assert [next(items) for _ in range(3)] == ["a", "b", "a"]
    with pytest.raises(ValueError, match="bad source"):
        next(items)


# A budget of bytes


def nothing() -> None:
    """A check that never raises."""


def test_budget_is_never_exceeded_and_all_get_their_turn():
    budget = ByteBudget(100)
    lock = threading.Lock()
    held = 0
    most = 0

    def work(number: int) -> None:
        nonlocal held, most
        size = 10 + number % 40
        with budget.hold(size, nothing):
            with lock:
                held += size
                most = max(most, held)
            wait_until(lambda: most > 50)  # so that some hold it at one time
            time.sleep(0.0005)
            with lock:
                held -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(100)))
    assert most <= 100


def test_one_that_needs_more_than_all_goes_alone():
    budget = ByteBudget(100)
    order: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        with budget.hold(10, nothing):
            large = pool.submit(hold_and_note, budget, 1000, order, nothing)
            time.sleep(0.05)
            order.append("small")
        large.result(60)
    assert order == ["small", "large"]


def hold_and_note(
    budget: ByteBudget, size: int, order: list[str], check: Callable[[], None]
) -> None:
    with budget.hold(size, check):
        order.append("large")


def test_who_waits_for_room_can_be_stopped():
    budget = ByteBudget(100)
    stop = StopSignal()
    order: list[str] = []
    with ThreadPoolExecutor(1) as pool, budget.hold(100, nothing):
        waiting = pool.submit(hold_and_note, budget, 1, order, stop.check)
        time.sleep(0.02)
        stop.set()
        with pytest.raises(Stopped, match="^$"):
            waiting.result(60)
    with budget.hold(100, nothing):
        assert order == []


def test_room_is_given_back_after_an_error():
    budget = ByteBudget(100)
    with pytest.raises(ValueError, match="inside"), budget.hold(100, nothing):
        raise ValueError("inside")
    with budget.hold(100, stop_at_once):
        pass


def stop_at_once() -> None:
    raise AssertionError("there is room")


# A stack of its own


def from_deep(depth: int, call: Callable[[], object]) -> object:
    return call() if not depth else from_deep(depth - 1, call)


def count_down(levels: int) -> int:
    return 0 if levels == 0 else 1 + count_down(levels - 1)


def test_how_deep_the_caller_is_does_not_count():
    limit = sys.getrecursionlimit()
    half = limit // 2
    with pytest.raises(RecursionError, match="recursion"):
        from_deep(half, lambda: count_down(half))
    assert from_deep(half, lambda: with_full_stack(lambda: count_down(half))) == half
    assert workers() == 0


def test_what_never_ends_still_ends():
    with pytest.raises(TooDeep, match="recursion"):
        with_full_stack(lambda: count_down(10**9))


def test_errors_of_what_needs_room_are_raised():
    def fail() -> None:
        count_down(sys.getrecursionlimit() // 2)
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        from_deep(sys.getrecursionlimit() // 2, lambda: with_full_stack(fail))


def test_batches_have_consecutive_items_of_at_most_a_size():
    sizes = [3, 2, 9, 1, 4, 5, 0]
    assert list(batches(sizes, lambda size: size, 5)) == [[3, 2], [9], [1, 4], [5, 0]]
    assert list(batches([], len, 5)) == []
