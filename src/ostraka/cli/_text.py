"""Numbers, names and tables, formatted for people, and the way to their terminal.

All that the commands print goes through `echo`, `echo_lines` or `echo_json`: text of a checkpoint
may come from a stranger, and must not reach a terminal as anything but text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from ostraka._parallel import TooDeep, with_full_stack
from ostraka._units import human_bytes as human_bytes
from ostraka.errors import count_of as count_of
from ostraka.errors import printable as printable

_STYLE = re.compile("(\x1b\\[[0-9;]*m)")
"""Colours, which are ours: `printable` has escaped those of others."""
_MOST_DIGITS = 4000
"""Python refuses to write more in decimal."""
_SECONDS = (("d", 86_400), ("h", 3_600), ("min", 60))


def human_seconds(seconds: float) -> str:
    """A duration in two steps at most: `3 h 20 min`, `4.2 s`, `12 ms`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for number, (unit, size) in enumerate(_SECONDS):
        if seconds >= size:
            whole, rest = divmod(int(seconds), size)
            if number + 1 == len(_SECONDS) or rest < _SECONDS[number + 1][1]:
                return f"{whole} {unit}"
            smaller, of_smaller = _SECONDS[number + 1]
            return f"{whole} {unit} {rest // of_smaller} {smaller}"
    raise AssertionError(seconds)


def human_age(saved_s: float | None) -> str:
    """How long ago something was, by this machine's clock."""
    if saved_s is None:
        return "unknown"
    age = datetime.now(UTC).timestamp() - saved_s
    if age < -60:
        return "in the future"
    return f"{human_seconds(age)} ago" if age >= 1 else "just now"


def human_number(number: float | int | None) -> str:
    """A number with six digits at most; integers in full."""
    if number is None:
        return "–"
    return f"{number:,}" if isinstance(number, int) else f"{number:.6g}"


def show_shape(shape: Sequence[int]) -> str:
    return " × ".join(str(n) for n in shape) or "()"


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


class Table:
    """A text table; columns named in `right` are right-aligned."""

    def __init__(self, head: Sequence[str], *, right: Sequence[str] = ()):
        self._head = tuple(head)
        self._right = [name in right for name in head]
        self._rows: list[tuple[tuple[str, ...], str | None]] = []

    def add(self, *cells: str, colour: str | None = None) -> None:
        """Add a row; the last cell of a short one may extend over the remaining columns."""
        self._rows.append((tuple(map(printable, cells)), colour))

    def lines(self) -> list[str]:
        widths = [len(name) for name in self._head]
        for cells, _ in self._rows:
            # The last cell of a short row takes all the room behind it, so it does not count.
            counted = cells if len(cells) == len(widths) else cells[:-1]
            for column, cell in enumerate(counted):
                widths[column] = max(widths[column], len(cell))
        lines = [click.style(self._line(self._head, widths), dim=True)]
        above = ""
        for cells, colour in self._rows:
            line = self._line(cells, widths)
            lines.append(click.style(line, fg=colour) if colour else _dim_repeated(line, above))
            above = cells[0]
        return lines

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        full = len(cells) == len(widths)
        padded = [
            cell.rjust(width) if full and right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, self._right, strict=False)
        ]
        return "  ".join(padded).rstrip()


def _dim_repeated(line: str, above: str) -> str:
    """Dim the leading names of a row that the row above has, too."""
    shared = 0
    for position, (one, other) in enumerate(zip(line, above, strict=False)):
        if one != other:
            break
        if one == "/":
            shared = position + 1
    return click.style(line[:shared], dim=True) + line[shared:] if shared else line


def echo(line: str, *, err: bool = False) -> None:
    click.echo(_escaped(line), err=err)


def echo_lines(lines: Sequence[str], *, err: bool = False) -> None:
    """Print all lines with one write: thousands of small ones are slow."""
    click.echo("\n".join(map(_escaped, lines)), err=err)


def _escaped(line: str) -> str:
    """A line with nothing but text and colours: what was not escaped before is escaped here."""
    if line.isprintable():
        return line
    parts = _STYLE.split(line)  # every second one is a colour
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))


def echo_json(document: Any, *, indent: int | None = 1) -> None:
    """Print a document as JSON, all in ASCII: control characters are escapes there."""
    click.echo(json_text(document, indent=indent))


def json_text(document: Any, *, indent: int | None = None) -> str:
    try:
        return with_full_stack(lambda: json.dumps(document, indent=indent))
    except TooDeep as error:
        raise click.ClickException(
            "the checkpoint's metadata is nested too deep to show"
        ) from error


def shown_value(value: Any) -> str:
    """A value of a tree as Python writes it; integers that are too long for that in hexadecimal."""
    is_long = type(value) is int and value.bit_length() > 3 * _MOST_DIGITS
    return hex(value) if is_long else repr(value)


def json_number(value: Any) -> Any:
    """A number for JSON; as text NaN and infinity, which JSON lacks, and long integers."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if type(value) is int and value.bit_length() > 3 * _MOST_DIGITS:
        return hex(value)
    return value
