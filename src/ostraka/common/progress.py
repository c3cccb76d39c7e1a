"""Counts bytes from many threads, and shows a caller how far the work has come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ostraka.common.record import logger
from ostraka.common.units import human_bytes

OnBytes = Callable[[int, int], None]
"""Receives the bytes that are done so far, and the bytes in all."""


@dataclass(slots=True)
class Count:
    """The bytes that are done, of `total`. Any thread may add to them.

    One thread at a time calls `on_bytes`.
    """

    total: int = 0
    on_bytes: OnBytes | None = None
    done: int = field(init=False, default=0)
    kept: int = field(init=False, default=0)
    """Bytes among those done that an earlier run had written already."""
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def add(self, nbytes: int, *, kept: bool = False) -> None:
        """Count more bytes as done."""
        with self._lock:
            self.done += nbytes
            if kept:
                self.kept += nbytes
            if self.on_bytes is not None:
                self.on_bytes(min(self.done, self.total), self.total)


_LOG_EVERY_S = 30.0


@contextmanager
def shown(what: str, progress: Any, on_bytes: OnBytes | None = None) -> Generator[OnBytes | None]:
    """Show how far some work has come, if `progress` asks for it. Yields the function to call.

    On a terminal and in a notebook there is a bar. Elsewhere a line goes to the log every 30 s, so
    that the log of a batch job stays short.
    """
    if not isinstance(progress, bool):
        raise TypeError(f"progress must be True or False, not {progress!r:.80}")
    if not progress:
        yield on_bytes
        return
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield _both(_LogLines(what), on_bytes)
        return
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield _both(update, on_bytes)


class _LogLines:
    """Logs how far some work has come, every 30 s."""

    def __init__(self, what: str):
        self._what = what
        self._began_s = self._logged_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s < _LOG_EVERY_S:
            return
        self._logged_s = now_s
        speed = human_bytes(int(done / (now_s - self._began_s)))
        share = 100 * done // total if total else 0
        logger.info(
            "%s: %s of %s (%d %%), %s/s",
            self._what,
            human_bytes(done),
            human_bytes(total),
            share,
            speed,
        )


def _both(first: OnBytes, second: OnBytes | None) -> OnBytes:
    if second is None:
        return first

    def call(done: int, total: int) -> None:
        first(done, total)
        second(done, total)

    return call
