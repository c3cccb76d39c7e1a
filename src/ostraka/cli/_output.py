"""How commands print: numbers and tables for people, JSON for scripts, progress bars.

Everything goes through `echo`, `echo_lines` or `echo_json`. Names in an untrusted checkpoint may
hold control characters, which must not reach a terminal.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TypeGuard

import click

from ostraka.common.progress import OnBytes
from ostraka.common.threads import TooDeep, with_full_stack
from ostraka.common.units import human_bytes
from ostraka.errors import printable

_STYLE = re.compile("(\x1b\\[[0-9;]*m)")
"""Our own colours. `printable` escapes those in other text."""
_MOST_DIGITS = 4000
"""Python refuses to write more in decimal."""


def human_seconds(seconds: float) -> str:
    """A duration in at most two units: `3 h 20 min`, `4.2 s`, `12 ms`."""
    if seconds < 60:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    hours, minutes = divmod(int(seconds) // 60, 60)
    parts = [(hours // 24, "d"), (hours % 24, "h"), (minutes, "min")]
    first = next(at for at, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number)


def human_age(saved_at: float | None) -> str:
    """The time since then, by this machine's clock."""
    if saved_at is None:
        return "unknown"
    age = datetime.now(UTC).timestamp() - saved_at
    if age < -60:
        return "in the future"
    return f"{human_seconds(age)} ago" if age >= 1 else "just now"


def human_size(nbytes: int | None) -> str:
    """A number of bytes, or `unknown`."""
    return "unknown" if nbytes is None else human_bytes(nbytes)


def human_number(number: float | int | None) -> str:
    """A number with six digits at most, but integers in full."""
    if number is None:
        return "–"
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


def show_shape(shape: Sequence[int]) -> str:
    """A shape as `2 × 3`, or `()`."""
    return " × ".join(str(n) for n in shape) or "()"


def shorten(text: str, width: int) -> str:
    """The beginning of a text that is longer than `width`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


class Table:
    """A text table. Columns named in `right` are right-aligned."""

    def __init__(self, head: Sequence[str], *, right: Sequence[str] = ()):
        self._head = tuple(head)
        self._right = [name in right for name in head]
        self._rows: list[tuple[tuple[str, ...], str | None]] = []

    def add(self, *cells: str, colour: str | None = None) -> None:
        """Add a row. The last cell of a short one may extend over the remaining columns."""
        self._rows.append((tuple(map(printable, cells)), colour))

    def lines(self) -> list[str]:
        """The head, and one line for each row."""
        widths = [len(name) for name in self._head]
        for cells, _ in self._rows:
            # The last cell of a short row extends over the columns behind it.
            for column, cell in enumerate(cells if len(cells) == len(widths) else cells[:-1]):
                widths[column] = max(widths[column], len(cell))
        lines = [click.style(self._line(self._head, widths), dim=True)]
        above = ""
        for cells, colour in self._rows:
            line = self._line(cells, widths)
            # Names that a row shares with the row above are dim.
            same = [one == other for one, other in zip(line, above, strict=False)]
            shared = line.rfind("/", 0, [*same, False].index(False)) + 1
            repeated = click.style(line[:shared], dim=True) if shared else ""
            lines.append(click.style(line, fg=colour) if colour else repeated + line[shared:])
            above = cells[0]
        return lines

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        full = len(cells) == len(widths)
        padded = [
            cell.rjust(width) if full and right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, self._right, strict=False)
        ]
        return "  ".join(padded).rstrip()


def echo(line: str, *, err: bool = False) -> None:
    """Print one line."""
    click.echo(_escaped(line), err=err)


def echo_lines(lines: Sequence[str], *, err: bool = False) -> None:
    """Print all lines with one write."""
    click.echo("\n".join(map(_escaped, lines)), err=err)


def _escaped(line: str) -> str:
    """Escape everything in a line but text and colours."""
    if line.isprintable():
        return line
    parts = _STYLE.split(line)  # every second one is a colour
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))


def echo_json(document: Any, *, indent: int | None = 1) -> None:
    """Print a document as JSON in ASCII, which escapes control characters."""
    click.echo(json_text(document, indent=indent))


def echo_report(report: Any, *, as_json: bool) -> None:
    """Print what the library reports of its work."""
    if as_json:
        echo_json(asdict(report))
    else:
        echo_lines([printable(line) for line in str(report).splitlines()])


def json_text(document: Any, *, indent: int | None = None) -> str:
    """A document as JSON. Raises ClickException if it is nested too deep."""
    try:
        return with_full_stack(lambda: json.dumps(document, indent=indent))
    except TooDeep as error:
        raise click.ClickException(
            "the checkpoint's metadata is nested too deep to show"
        ) from error


def shown_value(value: Any) -> str:
    """The repr of a value of a tree, with integers too long for Python in hexadecimal."""
    return hex(value) if _is_long(value) else repr(value)


def json_number(value: Any) -> Any:
    """A number for JSON. NaN and infinity, which JSON lacks, and long integers become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return hex(value) if _is_long(value) else value


def _is_long(value: Any) -> TypeGuard[int]:
    return type(value) is int and value.bit_length() > 3 * _MOST_DIGITS


@contextmanager
def progress(what: str, total_bytes: int | None = None) -> Generator[OnBytes]:
    """A bar on stderr if that is a terminal. It disappears at the end."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(binary_units=True),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    shown = rich_progress.Progress(*columns, console=Console(stderr=True), transient=True)
    with shown:
        task = shown.add_task(printable(what), total=total_bytes)
        yield lambda done, total: shown.update(task, completed=done, total=total)
