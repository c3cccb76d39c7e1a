"""Saves that go on in the background: one at a time, and no error of theirs is lost."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TextIO, cast

from ostraka._coordinate import Operation, ProcessFailed
from ostraka._parallel import Latch, after_fork
from ostraka._record import Record, logger
from ostraka._shards import Progress
from ostraka.errors import Busy, describe


class SaveHandle:
    """A save that is under way, as `ostraka.save_async` returns it."""

    def __init__(self, path: str, progress: Progress, give_up: Callable[[], None]):
        self.path = path
        self.record: Record | None = None
        """What was done and how long it took, once it is done."""
        self._progress = progress
        self._give_up = give_up
        self._thread: threading.Thread | None = None
        self._ended = Latch()
        self._error: BaseException | None = None
        self._is_error_seen = False
        self._unbegun = [True]
        """Token: who pops it does the work, or ends the handle because nobody will."""
        self._earlier: SaveHandle | None = None
        """One that a signal handler began while this one was being begun."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is there. Raises the save's error, or TimeoutError."""
        error = self.exception(timeout)
        if error is not None:
            raise error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error that there was, if any."""
        self._wait_for_end(timeout)
        self._is_error_seen = True
        return self._error

    @property
    def bytes_written(self) -> int:
        """How much of this process's share has been written."""
        return self._progress.written

    @property
    def bytes_total(self) -> int:
        """This process's share; 0 before that is known."""
        return self._progress.total

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "under way"
        return f"<SaveHandle {self.path}: {state}, {self.bytes_written:,}/{self.bytes_total:,} B>"

    def _start(self, work: Callable[[], Record | None]) -> None:
        is_called = Latch()

        def run() -> None:
            # The caller would wait for its turn at the interpreter: let it return first.
            is_called.wait(1.0)
            self._run(work)

        thread = threading.Thread(target=run, name="ostraka-save", daemon=True)
        try:
            thread.start()
        except RecursionError:
            raise
        except RuntimeError:
            self._run(work)  # The system has no thread left: the caller waits, and nothing is lost.
        finally:
            is_called.set()

    def _run(self, work: Callable[[], Record | None]) -> None:
        if not self._take():
            return
        self._thread = threading.current_thread()
        try:
            if self._earlier is not None:
                self._earlier._wait_for_end()
            self.record = work()
        except BaseException as error:
            self._error = error
            logger.error("in the background, %s", _with_path(error, self.path))
        finally:
            self._thread = None
            self._ended.set()

    def _take(self) -> bool:
        """Whether nobody has begun the work, nor ended it; from now on somebody has."""
        try:
            return self._unbegun.pop()
        except IndexError:
            return False

    def _end_unless_begun(self) -> None:
        """After an interrupt, which may have come before the thread was there, or after.

        Who would wait for a handle that nobody works for would wait for ever.
        """
        if self._take():
            self._ended.set()

    def _wait_for_end(self, timeout: float | None = None) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"the save to {self.path} can't wait for itself: on_commit and on_record are a "
                "part of it, and can't save or wait for it"
            )
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save to {self.path} has not ended after {timeout:g} s")

    def _lose(self) -> None:
        """After a fork, in the child: the thread that sees it through is in the parent alone."""
        self._error = RuntimeError(
            f"the save to {self.path} goes on in process {os.getppid()}, which began it; wait for "
            "it there"
        )
        self._is_error_seen = True
        # A new one: a thread that is not here may have held the old one's lock.
        self._ended = Latch()
        self._ended.set()

    def _take_unseen(self) -> BaseException | None:
        """The error, if it has ended with one that nobody has been told of yet."""
        if not self.done():
            return None
        earlier, self._earlier = self._earlier, None
        error = None if earlier is None else earlier._take_unseen()
        if error is None and not self._is_error_seen:
            self._is_error_seen = True
            error = self._error
        return error


def _with_path(error: BaseException, path: str) -> str:
    """What went wrong and where, said once."""
    said = describe(error)
    return said if path in said else f"saving {path} failed: {said}"


class _Background:
    """The one save that may be under way in this process."""

    def __init__(self) -> None:
        self.is_ending = False
        """Whether the program is, so far that nothing in the background would be waited for."""
        self.forget()

    def forget(self) -> None:
        self.turn = threading.RLock()
        self.current: SaveHandle | None = None

    def forget_after_fork(self) -> None:
        current = self.current
        self.forget()
        if current is not None and not current.done():
            current._lose()  # pyright: ignore[reportPrivateUsage]


_background = _Background()
# In a forked process no thread is there that would ever end the save.
after_fork(_background.forget_after_fork)


def settle(if_busy: Literal["wait", "refuse"] = "wait") -> None:
    """See the save that was begun in the background to its end.

    Raises Busy if there is one and it is not to be waited for, on all processes if on any; raises
    the error of one that ended if nobody has seen it.
    """
    with settled(if_busy):
        pass


@contextmanager
def settled(if_busy: Literal["wait", "refuse"]) -> Generator[None]:
    """Have no other save in the background while the caller begins one."""
    if if_busy not in ("wait", "refuse"):
        raise ValueError(f'if_busy is {if_busy!r}; it must be "wait" or "refuse"')
    current = _background.current
    if current is not None and threading.current_thread() is current._thread:  # pyright: ignore[reportPrivateUsage]
        current._wait_for_end()  # pyright: ignore[reportPrivateUsage]
    with _turn(if_busy):
        # While it waits for one, a signal handler may begin another.
        while (current := _background.current) is not None:
            current._wait_for_end()  # pyright: ignore[reportPrivateUsage]
            if _background.current is current:
                _background.current = None
            error = current._take_unseen()  # pyright: ignore[reportPrivateUsage]
            if error is not None:
                _raise_together(error)
        yield


@contextmanager
def _turn(if_busy: Literal["wait", "refuse"]) -> Generator[None]:
    """Be the one thread that begins a save."""
    turn = _background.turn
    if if_busy == "wait":
        with turn:  # An interrupt does not come between the lock and its block.
            yield
        return
    is_mine = False
    try:
        is_mine = turn.acquire(blocking=False)
        _refuse_if_busy(is_mine)
        yield
    finally:
        if is_mine:
            turn.release()


def _refuse_if_busy(is_mine: bool) -> None:
    current = _background.current
    mine = None
    if current is not None and not current.done():
        mine = f"a save to {current.path}"
    elif not is_mine:
        mine = "a save that another thread has begun"
    with Operation("check for a save under way") as operation:
        found = operation.exchange(
            "busy", mine, lambda all_found: next(filter(None, all_found), None), is_last=True
        )
    if found is not None:
        raise Busy(f"{found} is still under way; wait for it first")


def _raise_together(error: BaseException) -> None:
    """Raise the error of an earlier save.

    A process that has seen it, or has none, is about to begin the next save and would wait for this
    one in vain: it is told.
    """
    with suppress(ProcessFailed), Operation("save after one that failed", own_errors=True):
        raise error
    raise error


def start_in_background(
    path: str, progress: Progress, work: Callable[[], Record | None], give_up: Callable[[], None]
) -> SaveHandle:
    """Do `work` in a thread; to be called inside `settled`.

    If it raises, the thread may be at work all the same, or begin to be: `work` is called at most
    once, and must find out whether there is still something to do.
    """
    handle = SaveHandle(path, progress, give_up)
    try:
        handle._earlier, _background.current = _background.current, handle  # pyright: ignore[reportPrivateUsage]
        if _background.is_ending:
            # The program would not wait for a thread any more, nor ask how it went.
            handle._run(work)  # pyright: ignore[reportPrivateUsage]
            handle.wait()
        else:
            handle._start(work)  # pyright: ignore[reportPrivateUsage]
    except BaseException:
        handle._end_unless_begun()  # pyright: ignore[reportPrivateUsage]
        raise
    return handle


def _wait_at_exit() -> None:
    """The program does not end before its save has; Ctrl-C while it waits gives the save up."""
    current = _background.current
    if current is None or current.done():
        return
    try:
        logger.info("waiting for the save to %s", current.path)
        current._wait_for_end()  # pyright: ignore[reportPrivateUsage]
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            current._give_up()  # pyright: ignore[reportPrivateUsage]
            current._wait_for_end()  # pyright: ignore[reportPrivateUsage]


def _raise_at_exit() -> None:
    """The program does not end without a word about a failure that nobody has seen."""
    _wait_at_exit()  # for one that was begun since the main thread ended
    _background.is_ending = True
    error = _background.current and _background.current._take_unseen()  # pyright: ignore[reportPrivateUsage]
    if error is not None:
        _have_exit_status_tell()
        raise error


def _have_exit_status_tell() -> None:
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


# What is registered with `threading` runs before all that is registered with `atexit`, by which
# others may close what a save still needs. It must not raise, or those after it would not be told.
_before_threads_end: Callable[[Callable[[], None]], Any] = getattr(
    threading, "_register_atexit", atexit.register
)
atexit.register(_raise_at_exit)
try:
    _before_threads_end(_wait_at_exit)
except RuntimeError:  # The program has already begun to end, and calls nobody that comes now.
    _background.is_ending = True
