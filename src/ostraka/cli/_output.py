"""How commands print: numbers and tables for people, JSON for scripts, progress bars.

Everything goes through `echo`, `echo_lines` or `echo_json`. Names in an untrusted checkpoint may
hold control characters, which must not reach a terminal. Output that is longer than the screen goes
through a pager.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import click

from ostraka.common.progress import OnBytes
from ostraka.common.text import shorten
from ostraka.common.threads import TooDeep, with_full_stack
from ostraka.common.units import human_bytes
from ostraka.errors import printable

_STYLE = re.compile("(\x1b\\[[0-9;]*m)")
"""Our own colours. `printable` escapes those in other text."""
_SCHEMA = 1
"""The version of the JSON of all commands. It grows if a key changes its meaning or goes away."""
_PIPE_LINES = 40
_LEAST_WIDTH = 10
"""No column of a table gets narrower than this, to fit the screen."""

PAGER_OFF = "ostraka.pager_off"
"""Set in the context of click by --no-pager."""


# The screen


def screen_width() -> int | None:
    """The columns of the screen, or None if the output is not for one."""
    return _screen("COLUMNS", 0, 80)


def screen_lines() -> int:
    """The lines of the screen, or a usual number of them."""
    return _screen("LINES", 1, 24) or _PIPE_LINES


def _screen(name: str, place: int, usual: int) -> int | None:
    """A size of the screen, by the environment or by the terminal. None if there is neither."""
    given = os.environ.get(name, "")
    if given.isdecimal() and int(given):
        return int(given)
    if not _is_terminal():
        return None
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stdout.fileno())[place] or usual
    return usual


def _is_terminal() -> bool:
    return sys.stdout.isatty()


# Numbers


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
    """A number of bytes, or `unknown`. The command prints every size with this function."""
    return "unknown" if nbytes is None else human_bytes(nbytes)


def human_number(number: float | int | None, digits: int = 6) -> str:
    """A number with six digits at most, but integers in full."""
    if number is None:
        return "–"
    return f"{number:,}" if isinstance(number, int) else f"{number:.{digits}g}"


def human_share(part: int, whole: int) -> str:
    """A percentage that is 0 % or 100 % only if it is exactly that."""
    if part in (0, whole):
        return "100 %" if part else "0 %"
    share = 100 * part / whole
    if share >= 99.95:
        return "<100 %"
    return f"{share:.3g} %" if share >= 0.001 else "<0.001 %"


def wrap(text: str, indent: str = "") -> list[str]:
    """A text in lines that fit the screen, broken between words. One line if there is none."""
    width = screen_width()
    if width is None or len(indent) + len(text) <= width:
        return [f"{indent}{text}"]
    return textwrap.wrap(
        text,
        max(width, _LEAST_WIDTH),
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,  # Paths can be copied.
    )


def shorten_middle(text: str, width: int) -> str:
    """Both ends of a text that is longer than `width`."""
    if len(text) <= width:
        return text
    end = (width - 1) * 2 // 3
    return f"{text[: width - 1 - end]}…{text[-end:]}"


class Table:
    """A text table. Columns named in `right` are right-aligned.

    To fit the screen, columns named in `shrink` are shortened, one after the other.
    """

    def __init__(
        self, head: Sequence[str], *, right: Sequence[str] = (), shrink: Sequence[str] = ()
    ):
        self._head = tuple(head)
        self._right = [name in right for name in head]
        self._shrink = [self._head.index(name) for name in shrink if name in self._head]
        self._rows: list[tuple[tuple[str, ...], str | None]] = []

    def add(self, *cells: str, colour: str | None = None) -> None:
        """Add a row. The last cell of a short one may extend over the remaining columns."""
        self._rows.append((tuple(map(printable, cells)), colour))

    def width(self) -> int:
        """The columns of the screen that its full rows need if nothing is shortened."""
        widths = self._widths()
        return sum(widths) + 2 * (len(widths) - 1)

    def lines(self) -> list[str]:
        """The head, and one line for each row."""
        widths, most = self._widths(), screen_width()
        if most is not None:
            self._fit(widths, most)
        lines = [click.style(self._line(self._head, widths, most), dim=True)]
        above = ""
        for cells, colour in self._rows:
            line = self._line(cells, widths, most)
            # Names that a row shares with the row above are dim.
            same = [one == other for one, other in zip(line, above, strict=False)]
            shared = line.rfind("/", 0, [*same, False].index(False)) + 1
            repeated = click.style(line[:shared], dim=True) if shared else ""
            lines.append(click.style(line, fg=colour) if colour else repeated + line[shared:])
            above = cells[0]
        return lines

    def _widths(self) -> list[int]:
        widths = [len(name) for name in self._head]
        for cells, _ in self._rows:
            # The last cell of a short row extends over the columns behind it.
            for column, cell in enumerate(cells if len(cells) == len(widths) else cells[:-1]):
                widths[column] = max(widths[column], len(cell))
        return widths

    def _fit(self, widths: list[int], most: int) -> None:
        """Make columns narrower until all fit, first those that `shrink` names first."""
        for column in self._shrink:
            excess = sum(widths) + 2 * (len(widths) - 1) - most
            least = max(_LEAST_WIDTH, len(self._head[column]))
            widths[column] = max(widths[column] - max(excess, 0), min(widths[column], least))

    def _line(self, cells: Sequence[str], widths: Sequence[int], most: int | None) -> str:
        full = len(cells) == len(widths)
        padded: list[str] = []
        for column, (cell, width, right) in enumerate(
            zip(cells, widths, self._right, strict=False)
        ):
            if full or column < len(cells) - 1:
                if column in self._shrink:
                    cell = shorten(cell, width) if column else shorten_middle(cell, width)
            elif most is not None and self._shrink:
                cell = shorten(cell, max(most - sum(map(len, padded)) - 2 * column, _LEAST_WIDTH))
            padded.append(cell.rjust(width) if full and right else cell.ljust(width))
        return "  ".join(padded).rstrip()


def echo(line: str, *, err: bool = False) -> None:
    """Print one line."""
    click.echo(_escaped(line), err=err)


def echo_lines(lines: Sequence[str], *, err: bool = False) -> None:
    """Print all lines with one write, through a pager if they are more than the screen has."""
    text = "\n".join(map(_escaped, lines))
    if err:
        click.echo(text, err=True)
    else:
        echo_text(text)


def echo_text(text: str) -> None:
    """Print text that holds no control characters but colours, through a pager if it is long.

    OSTRAKA_PAGER or PAGER names the pager. `cat`, an empty name and --no-pager turn it off.
    """
    wanted = os.environ.get("OSTRAKA_PAGER", os.environ.get("PAGER", "less"))
    context = click.get_current_context(silent=True)
    is_off = wanted.split()[:1] in ([], ["cat"]) or (context and context.meta.get(PAGER_OFF))
    if is_off or not _is_terminal() or text.count("\n") + 1 < screen_lines():
        click.echo(text)
        return
    before = {name: os.environ.get(name) for name in ("PAGER", "LESS")}
    os.environ["PAGER"] = wanted
    os.environ.setdefault("LESS", "FRX")  # as git does: colours, and the text stays on the screen
    try:
        click.echo_via_pager(text, color=context is None or context.color is not False)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _escaped(line: str) -> str:
    """Escape everything in a line but text and colours."""
    if line.isprintable():
        return line
    parts = _STYLE.split(line)  # every second one is a colour
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))


def with_schema(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document that begins with the version of its keys."""
    return {"schema": _SCHEMA, **document}


def echo_json(document: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Print a document as JSON in ASCII, which escapes control characters."""
    echo_text(json_text(with_schema(document), indent=indent))


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


@contextmanager
def progress(what: str, total_bytes: int | None = None) -> Generator[OnBytes]:
    """A bar on stderr if that is a terminal. It disappears at the end."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    class Sizes(rich_progress.ProgressColumn):
        def render(self, task: rich_progress.Task) -> str:
            total = None if task.total is None else int(task.total)
            rate = "" if task.speed is None else f", {human_size(int(task.speed))}/s"
            return f"{human_size(int(task.completed))} of {human_size(total)}{rate}"

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        Sizes(),
        rich_progress.TimeRemainingColumn(),
    )
    shown = rich_progress.Progress(*columns, console=Console(stderr=True), transient=True)
    with shown:
        task = shown.add_task(printable(what), total=total_bytes)
        yield lambda done, total: shown.update(task, completed=done, total=total)
