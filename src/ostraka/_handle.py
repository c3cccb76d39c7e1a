"""Saves that go on in the background: one at a time, and no error of theirs is lost.

`_lifetime` says what may happen to them: interrupts, signal handlers, forks, the program's end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Literal

from ostraka._coordinate import Operation, ProcessFailed
from ostraka._lifetime import Ending, after_fork, at_exit
from ostraka._record import Record, logger
from ostraka._write_shards import Progress
from ostraka.errors import Busy, describe

# pyright: reportPrivateUsage=false


class SaveHandle:
    """A save that is under way, as `ostraka.save_async` returns it."""

    def __init__(self, path: str, progress: Progress, give_up: Callable[[], None]):
        self.path = path
        self.record: Record | None = None
        """What was done and how long it took, once it is done."""
        self._progress = progress
        self._give_up = give_up
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._is_error_seen = False
        self._token = threading.Lock()
        """Never released: who acquires it does the work, or ends the handle for nobody will."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is there. Raises the save's error, or TimeoutError."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error that there was, if any."""
        self._wait_for_end(timeout_s)
        self._is_error_seen = True
        return self._error

    @property
    def bytes_written(self) -> int:
        """How much of this process's share has been written."""
        return self._progress.written

    @property
    def bytes_total(self) -> int:
        """This process's share, before compression; 0 before that is known."""
        return self._progress.total

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "under way"
        return f"<SaveHandle {self.path}: {state}, {self.bytes_written:,}/{self.bytes_total:,} B>"

    def give_back(self) -> bool:
        """For the caller of `save_async`, if it is interrupted: whether nobody does the work.

        Then nobody will, and the caller must end the save. Otherwise the thread was there already,
        and sees it through.
        """
        is_mine = self._token.acquire(blocking=False)
        if is_mine:
            self._ended.set()  # Or who waits for this handle would wait for ever.
        return is_mine

    def _start(self, work: Callable[[], Record]) -> None:
        is_starting = threading.Lock()

        def run() -> None:
            # The caller would wait for its turn at the interpreter: let it return first.
            is_starting.acquire(timeout=1.0)
            self._run(work)

        with is_starting:
            threading.Thread(target=run, name="ostraka-save", daemon=True).start()

    def _run(self, work: Callable[[], Record]) -> None:
        if not self._token.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            self.record = work()
        except BaseException as error:
            self._error = error
            logger.error("in the background, %s", _with_path(error, self.path))
        finally:
            self._thread = None
            self._ended.set()

    def _wait_for_end(self, timeout_s: float | None = None) -> None:
        self._refuse_own_thread()
        if not self.done() and not self._ended.wait(timeout_s):
            raise TimeoutError(f"the save to {self.path} has not ended after {timeout_s:g} s")

    def _refuse_own_thread(self) -> None:
        """What a save calls, such as `on_commit`, can't wait for that very save."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"the save to {self.path} can't wait for itself: on_commit and on_record are a "
                "part of it, and can't save or wait for it"
            )

    def _lose(self) -> None:
        """After a fork, in the child: the thread that sees it through is in the parent alone."""
        self._error = RuntimeError(
            f"the save to {self.path} goes on in process {os.getppid()}, which began it; wait for "
            "it there"
        )
        self._is_error_seen = True
        # A new one: a thread that is not here may have held the old one's lock.
        self._ended = threading.Event()
        self._ended.set()

    def _take_unseen(self) -> BaseException | None:
        """The error, if it has ended with one that nobody has been told of yet."""
        if not self.done() or self._is_error_seen:
            return None
        self._is_error_seen = True
        return self._error


def _with_path(error: BaseException, path: str) -> str:
    """What went wrong and where, said once."""
    said = describe(error)
    return said if path in said else f"saving {path} failed: {said}"


class _Background:
    """The one save that may be under way in this process."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        """Held by the thread that begins a save."""
        self.current: SaveHandle | None = None

    def forget_after_fork(self) -> None:
        """In a forked process no thread is there that would ever end the save."""
        current = self.current
        self.__init__()
        if current is not None and not current.done():
            current._lose()

    def refuse_own_thread(self) -> None:
        if self.current is not None:
            self.current._refuse_own_thread()

    def wait_for_current(self) -> None:
        # While it waits for one, a signal handler may begin another.
        while (current := self.current) is not None:
            current._wait_for_end()
            if self.current is current:
                self.current = None
            error = current._take_unseen()
            if error is not None:
                _raise_together(error)


_background = _Background()
after_fork(_background.forget_after_fork)


def wait_for_background() -> None:
    """Wait for the save that was begun in the background; raise its error if nobody has seen it."""
    _background.refuse_own_thread()
    with _background.turn:  # Another thread may be beginning one.
        _background.wait_for_current()


@contextmanager
def one_at_a_time(if_busy: Literal["wait", "refuse"]) -> Generator[None]:
    """Have no other save in the background while the caller begins one.

    Waits for one that is under way, or with "refuse" raises Busy, on all processes if on any;
    raises the error of one that ended if nobody has seen it.
    """
    if if_busy not in ("wait", "refuse"):
        raise ValueError(f'if_busy is {if_busy!r}; it must be "wait" or "refuse"')
    _background.refuse_own_thread()
    with _background.turn if if_busy == "wait" else _turn_or_refusal():
        _background.wait_for_current()
        yield


@contextmanager
def _turn_or_refusal() -> Generator[None]:
    is_mine = False
    try:
        is_mine = _background.turn.acquire(blocking=False)
        mine = None if is_mine else "a save that another thread has begun"
        current = _background.current
        if current is not None and not current.done():
            mine = f"a save to {current.path}"
        with Operation("check for a save under way") as operation:
            found = operation.exchange(
                "busy", mine, lambda all_found: next(filter(None, all_found), None), is_last=True
            )
        if found is not None:
            raise Busy(f"{found} is still under way; wait for it first")
        yield
    finally:
        if is_mine:
            _background.turn.release()


def _raise_together(error: BaseException) -> None:
    """Raise the error of an earlier save.

    A process that has seen it, or has none, is about to begin the next save and would wait for this
    one in vain: it is told.
    """
    with suppress(ProcessFailed), Operation("save after one that failed", own_errors=True):
        raise error
    raise error


def run_in_background(handle: SaveHandle, work: Callable[[], Record]) -> None:
    """Do `work` in a thread; to be called inside `one_at_a_time`.

    If it is interrupted, the thread may be at work all the same: `handle.give_back` tells.
    """
    _background.wait_for_current()  # one that a signal handler has begun since
    _background.current = handle
    if Ending.has_begun:
        # The program would not wait for a thread any more, nor ask how it went.
        handle._run(work)
        handle.wait()
    else:
        handle._start(work)


def _wait_at_exit() -> None:
    """The program does not end before its save has; Ctrl-C while it waits gives the save up."""
    current = _background.current
    if current is None or current.done():
        return
    try:
        logger.info("waiting for the save to %s", current.path)
        current._wait_for_end()
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            current._give_up()
            current._wait_for_end()


at_exit(_wait_at_exit, lambda: _background.current and _background.current._take_unseen())
