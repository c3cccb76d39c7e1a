"""Saves in the background: one at a time, and some call raises each error.

`common.threads` lists what may happen to them: interrupts, signal handlers, forks, the program's
end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from logging import ERROR, INFO
from traceback import clear_frames
from typing import Literal

from ostraka.common.progress import Count
from ostraka.common.record import Record, logger
from ostraka.common.threads import Ending, after_fork, at_exit
from ostraka.errors import Busy, SaveCancelled, describe
from ostraka.processes.operation import Operation, ProcessFailed

# pyright: reportPrivateUsage=false

CANCELLED = "it was cancelled"
"""The reason of a save that the program itself gave up."""


class SaveHandle:
    """A save that is under way, as `ostraka.save_async` returns it.

    Attributes:
        path: The path of the checkpoint.
        record: A `Record` of the bytes and the time of each phase, or None before the end.

    Example:
        >>> handle = ostraka.save_async("runs/8", tree)
        >>> print(f"{handle.bytes_written:,} of {handle.bytes_total:,} bytes")
        >>> handle.wait()
    """

    def __init__(self, path: str, progress: Count, give_up: Callable[[str], None]):
        self.path = path
        self.record: Record | None = None
        self._progress = progress
        self._give_up = give_up
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._is_error_seen = False
        self._token = threading.Lock()
        """Acquired once: by the thread to run the save, or by the caller to cancel it."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the checkpoint is committed.

        Args:
            timeout_s: The longest time to wait, in seconds. None waits without limit.

        Raises:
            SaveFailed: If the save failed. Any other error of the save is raised unchanged.
            TimeoutError: If the save has not ended in time.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error

    def done(self) -> bool:
        """Return True if the save has ended, with or without an error."""
        return self._ended.is_set()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the end and return the error of the save.

        Args:
            timeout_s: The longest time to wait, in seconds. None waits without limit.

        Returns:
            The error, or None if the checkpoint is committed.

        Raises:
            TimeoutError: If the save has not ended in time.
        """
        self._wait_for_end(timeout_s)
        self._is_error_seen = True
        slot.let_go(self)
        return self._error

    def cancel(self) -> bool:
        """Give the save up, unless it is committed, and wait for its end.

        With several processes, one call cancels the save on all of them. The files at the path stay
        unchanged, and the new files are removed.

        Returns:
            True if the save was cancelled. False if it is committed, or has failed before.
        """
        self._refuse_own_thread()
        if not self.done():
            self._give_up(CANCELLED)
        return isinstance(self.exception(), SaveCancelled)

    @property
    def bytes_written(self) -> int:
        """The bytes that this process has written so far."""
        return self._progress.done

    @property
    def bytes_total(self) -> int:
        """The bytes that this process writes, before compression. 0 before the plan exists."""
        return self._progress.total

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else "under way"
        return f"<SaveHandle {self.path}: {state}, {self.bytes_written:,}/{self.bytes_total:,} B>"

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
            # The error may be kept for long. Neither it nor this frame is to keep the values.
            del work
            _clear_frames(error)
            self._error = error
            said = describe(error)
            if self.path not in said:
                said = f"saving {self.path} failed: {said}"
            is_wanted = isinstance(error, SaveCancelled)
            logger.log(INFO if is_wanted else ERROR, "in the background, %s", said)
        finally:
            self._thread = None
            self._ended.set()

    def _wait_for_end(self, timeout_s: float | None = None) -> None:
        self._refuse_own_thread()
        if not self.done() and not self._ended.wait(timeout_s):
            raise TimeoutError(f"the save to {self.path} has not ended after {timeout_s:g} s")

    def _refuse_own_thread(self) -> None:
        """Raise RuntimeError in a callback of this save, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"the save to {self.path} can't wait for itself: on_commit and on_record are a "
                "part of it, and can't save or wait for it"
            )

    def _lose(self) -> None:
        """After a fork, end the handle in the child: only the parent has the thread."""
        self._error = RuntimeError(
            f"the save to {self.path} goes on in process {os.getppid()}, which began it; wait for "
            "it there"
        )
        self._is_error_seen = True
        # A new one: a thread that is not here may have held the old one's lock.
        self._ended = threading.Event()
        self._ended.set()

    def _take_unseen(self) -> BaseException | None:
        """The error of an ended save, or None if there is none or a caller has seen it."""
        if not self.done() or self._is_error_seen:
            return None
        self._is_error_seen = True
        return self._error


class _Slot:
    """The one save that may be under way in this process."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        """Held by the thread that begins a save."""
        self.current: SaveHandle | None = None

    def forget_after_fork(self) -> None:
        """In a forked process, forget the save: only the parent has its thread."""
        current = self.current
        self.__init__()
        if current is not None and not current.done():
            current._lose()

    def let_go(self, handle: SaveHandle) -> None:
        """Forget a save that has ended and whose error, if any, somebody has.

        The error gets the frames that it passes in the program, and with them what these hold.
        """
        if self.current is handle and self.turn.acquire(blocking=False):
            try:
                if self.current is handle:
                    self.current = None
            finally:
                self.turn.release()

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
                # The other processes may begin the next save, and would wait for this one in vain.
                operation = Operation("save after one that failed", own_errors=True)
                with suppress(ProcessFailed), operation:
                    raise error
                raise error


slot = _Slot()
after_fork(slot.forget_after_fork)


def _clear_frames(error: BaseException) -> None:
    """Let go of the values in the frames that an error, and those behind it, have passed."""
    known: list[BaseException] = []
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is not None and one not in known:
            known.append(one)
            clear_frames(one.__traceback__)
            found += [one.__cause__, one.__context__]


def wait_for_background() -> None:
    """Wait for the background save, and raise its error if nobody has seen it."""
    slot.refuse_own_thread()
    with slot.turn:  # Another thread may be beginning one.
        slot.wait_for_current()


@contextmanager
def one_at_a_time(if_busy: Literal["wait", "raise"]) -> Generator[None]:
    """Have no other save in the background while the caller begins one.

    Waits for a save under way. With "raise" it raises Busy, on all processes if on any. If a save
    has ended with an unseen error, this raises the error.
    """
    if if_busy not in ("wait", "raise"):
        raise ValueError(f'if_busy is {if_busy!r}; it must be "wait" or "raise"')
    slot.refuse_own_thread()
    with slot.turn if if_busy == "wait" else _turn_or_refusal():
        slot.wait_for_current()
        yield


@contextmanager
def _turn_or_refusal() -> Generator[None]:
    is_mine = False
    try:
        is_mine = slot.turn.acquire(blocking=False)
        mine = None if is_mine else "a save that another thread has begun"
        current = slot.current
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
            slot.turn.release()


def give_back(handle: SaveHandle) -> bool:
    """Take the work back after an interrupt. True if no thread has begun it, nor will.

    The caller must end the save then. Otherwise a thread has begun it, and finishes it.
    """
    is_mine = handle._token.acquire(blocking=False)
    if is_mine:
        handle._ended.set()  # Or whoever waits for this handle would wait for ever.
    return is_mine


def give_up(handle: SaveHandle) -> None:
    """After an interrupt, give up a save whose values are not safe. Its caller has no handle."""
    handle._is_error_seen = True
    handle._give_up("it was interrupted before its values were safe, and gave the save up")


def run_in_background(handle: SaveHandle, work: Callable[[], Record]) -> None:
    """Do `work` in a thread. Call this inside `one_at_a_time`.

    After an interrupt the thread may be at work all the same: `give_back` tells.
    """
    slot.wait_for_current()  # one that a signal handler has begun since
    slot.current = handle
    if Ending.has_begun:
        # The program would not wait for a thread any more, nor ask how it went.
        handle._run(work)
        handle.wait()
    else:
        handle._start(work)


def _wait_at_exit() -> None:
    """Wait for the save before the program ends. Ctrl-C or SIGTERM meanwhile gives it up."""
    current = slot.current
    if current is None or current.done():
        return
    try:
        logger.info("waiting for the save to %s", current.path)
        current._wait_for_end()
    except (KeyboardInterrupt, SystemExit):
        with suppress(KeyboardInterrupt, SystemExit):
            current._give_up("it was interrupted, and gave the save up")
            current._wait_for_end()


at_exit(_wait_at_exit, lambda: slot.current and slot.current._take_unseen())
