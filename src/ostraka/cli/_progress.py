"""A progress bar for long work, on stderr, if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol


class Bar(Protocol):
    def advance(self, nbytes: int) -> None:
        """Count further bytes as done."""
        ...

    def move_to(self, done_bytes: int, total_bytes: int) -> None:
        """Set how many bytes are done, of how many."""
        ...


@contextmanager
def progress(what: str, total_bytes: int | None = None) -> Generator[Bar]:
    """A bar for a piece of work; nothing is drawn unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield _NoBar()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )

    class RichBar:
        def advance(self, nbytes: int) -> None:
            shown.advance(task, nbytes)

        def move_to(self, done_bytes: int, total_bytes: int) -> None:
            shown.update(task, completed=done_bytes, total=total_bytes)

    # Removed at the end: only the result stays.
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total_bytes)
        yield RichBar()


class _NoBar:
    def advance(self, nbytes: int) -> None:
        pass

    def move_to(self, done_bytes: int, total_bytes: int) -> None:
        pass
