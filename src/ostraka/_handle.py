"""Saves that go on in the background: one at a time, and no error of theirs is lost."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from ostraka._coordinate import Operation
from ostraka._record import Record, logger
from ostraka._shards import Progress
from ostraka.errors import Busy


class SaveHandle:
    """A save that is under way, as `ostraka.save_async` returns it."""

    def __init__(self, path: str, progress: Progress):
        self.path = path
        self.record: Record | None = None
        """What was done and how long it took, once it is done."""
        self._progress = progress
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._is_error_seen = False

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
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save to {self.path} has not ended after {timeout:g} s")
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

    def _run(self, work: Callable[[], Record]) -> None:
        try:
            self.record = work()
        except BaseException as error:
            self._error = error
            logger.error("the save to %s failed: %s", self.path, error)
        finally:
            self._ended.set()

    def _give_up(self) -> None:
        self._progress.is_given_up = True

    def _raise_unseen(self) -> None:
        if self._ended.is_set() and self._error is not None and not self._is_error_seen:
            self._is_error_seen = True
            raise self._error


class _Background:
    """The one save that may be under way in this process."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.current: SaveHandle | None = None


_background = _Background()


def settle(if_busy: Literal["wait", "refuse"] = "wait") -> None:
    """See the save that was begun in the background to its end.

    Raises Busy if there is one and it is not to be waited for, on all processes if on any; raises
    the error of one that ended if nobody has seen it.
    """
    if if_busy not in ("wait", "refuse"):
        raise ValueError(f'if_busy is {if_busy!r}; it must be "wait" or "refuse"')
    with _background.turn:
        current = _background.current
        if if_busy == "refuse" and _is_any_running(current):
            name = current.path if current is not None and not current.done() else "another path"
            raise Busy(f"a save to {name} is still under way; wait for it first")
        if current is not None:
            current._ended.wait()  # pyright: ignore[reportPrivateUsage]
            _background.current = None
            current._raise_unseen()  # pyright: ignore[reportPrivateUsage]


@contextmanager
def settled(if_busy: Literal["wait", "refuse"]) -> Generator[None]:
    """Have no other save in the background while the caller begins one."""
    with _background.turn:
        settle(if_busy)
        yield


def _is_any_running(current: SaveHandle | None) -> bool:
    is_running = current is not None and not current.done()
    with Operation("check for a save under way") as operation:
        return operation.exchange("busy", is_running, any)


def start_in_background(path: str, progress: Progress, work: Callable[[], Record]) -> SaveHandle:
    """Do `work` in a thread; to be called inside `settled`."""
    handle = _background.current = SaveHandle(path, progress)
    run: Any = handle._run  # pyright: ignore[reportPrivateUsage]
    threading.Thread(target=run, args=(work,), name="ostraka-save", daemon=True).start()
    return handle


def _wait_at_exit() -> None:
    """The program does not end before its save has; Ctrl-C while it waits gives the save up."""
    current = _background.current
    if current is None or current.done():
        return
    logger.info("waiting for the save to %s", current.path)
    try:
        current._ended.wait()  # pyright: ignore[reportPrivateUsage]
    except KeyboardInterrupt:
        current._give_up()  # pyright: ignore[reportPrivateUsage]
        with suppress(KeyboardInterrupt):
            current._ended.wait()  # pyright: ignore[reportPrivateUsage]


def _raise_at_exit() -> None:
    """The program does not end without a word about a failure that nobody has seen."""
    if _background.current is not None:
        _background.current._raise_unseen()  # pyright: ignore[reportPrivateUsage]


# Threads can't be started, nor given work, once the interpreter has begun to end them; what is
# registered with `threading` runs before that, and must not raise, or others would not be told.
# Where that is not to be had, a save that has only begun when the program ends fails, aloud.
_before_threads_end: Callable[[Callable[[], None]], Any] = getattr(
    threading, "_register_atexit", atexit.register
)
atexit.register(_raise_at_exit)
_before_threads_end(_wait_at_exit)
