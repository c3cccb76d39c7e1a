"""`ostraka top`: a run in the terminal, while it goes on."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ostraka.cli._arguments import flag, json_option, option, path_argument
from ostraka.cli._output import (
    Table,
    echo_json,
    echo_lines,
    human_age,
    human_number,
    human_seconds,
    human_size,
    screen_lines,
    screen_width,
    shorten_middle,
    wrap,
)
from ostraka.common.text import shorten
from ostraka.errors import count_of, describe, printable
from ostraka.report.steps import await_root, open_root

if TYPE_CHECKING:
    from ostraka.report.schema import RunDocument, RunStep

_BARS = "▁▂▃▄▅▆▇█"
_MOST_METRICS = 6
_LEAST_ROWS = 3
_RESIZE_S = 0.2
"""How often to look if the terminal has another size."""
_COLOURS = {"damaged": "red", "forbidden": "yellow", "unsupported": "yellow"}


@click.command()
@path_argument("directory")
@flag("--once", "Print the run as it is now, and end.")
@option(
    "--every every_s",
    click.FloatRange(0.1),
    "Look this often.",
    default=2.0,
    show_default=True,
    metavar="SECONDS",
)
@json_option("Print the document of the run as it is now, and end.")
def top(directory: str, once: bool, every_s: float, as_json: bool) -> None:
    """Show the run in DIRECTORY in the terminal while it goes on.

    It shows the metrics as sparklines, the last steps with their state, size, age and save time,
    the step that is deleted next, the mirror, the space left, and how often to save. Press q or
    Ctrl-C to leave. Without a terminal it prints the run once.

    Nothing is written, no array is read, and no step is kept for it. --json prints the document
    that ostraka report shows.

    \b
    Examples:
      ostraka top runs/a
      ostraka top s3://bucket/runs/a --once
      ostraka top runs/a --json | jq '.steps[-1].metrics'
    """
    from ostraka.report.run import RunReader

    if once or as_json:
        open_root(directory)
    else:
        await_root(directory)
    reader = RunReader(directory)
    if as_json:
        echo_json(dict(reader.look()))
    elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        echo_lines(run_lines(reader.look(), None))
    else:
        _show_live(reader, every_s)


def _show_live(reader: Any, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def look() -> RunDocument | str:
        try:
            return reader.look()
        except OSError as error:  # The store may answer again.
            return printable(describe(error))

    def draw(found: RunDocument | str) -> None:
        lines = [found] if isinstance(found, str) else run_lines(found, screen_lines() - 1)
        text = Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis")
        screen.update(text, refresh=True)

    screen = Live(Text(), console=Console(), screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), _keys() as pressed, screen:
        while True:
            found, drawn_at = look(), None
            ends_s = time.monotonic() + every_s
            while (left_s := ends_s - time.monotonic()) > 0:
                size = (screen_width(), screen_lines())
                if size != drawn_at:
                    draw(found)
                    drawn_at = size
                if pressed(min(left_s, _RESIZE_S)) in ("q", "Q", "\x1b"):
                    return


@contextmanager
def _keys() -> Generator[Any]:
    """A function that waits for one key, which is not shown. Ctrl-C still interrupts."""
    import termios
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([file], [], [], timeout_s)
        return os.read(file, 1).decode("ascii", "replace") if ready else ""

    tty.setcbreak(file)
    try:
        yield pressed
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


# One screen


def run_lines(run: RunDocument, most: int | None) -> list[str]:
    """A run as lines that fit the screen. `most` is the number of lines, or None for any."""
    steps, width = run["steps"], screen_width() or 80
    path = click.style(shorten_middle(printable(run["path"]), width), bold=True)
    total = f"{count_of(len(steps), 'step')}, {human_size(run['bytes'])}"
    head = [path, "  ".join([total, *_writer(run)]), ""]
    tail = ["", *_facts(run), *[line for note in run["notes"] for line in wrap(printable(note))]]
    metrics = _metrics(run, width)
    used = len(head) + len(metrics) + len(tail) + 1
    rows = 10 if most is None else max(most - used, _LEAST_ROWS)
    table = _table(run, steps[-rows:][::-1]) if steps else []
    lines = [*head, *metrics, *table, *tail]
    return lines if most is None else lines[:most]


def _writer(run: RunDocument) -> list[str]:
    writer = run["writer"]
    if writer is None:
        return ["no Manager writes"]
    verb = "written by" if writer["is_running"] else "last written by"
    return [f"{verb} {printable(writer['host'])}, process {writer['pid']}"]


def _metrics(run: RunDocument, width: int) -> list[str]:
    """For each metric a name, a sparkline, the latest value and the best step."""
    lines: list[str] = []
    names = list(run["metrics"])[:_MOST_METRICS]
    longest = min(max(map(len, names), default=0), 16)
    for name in names:
        about = run["metrics"][name]
        best = "" if about["best_step"] is None else f"best at {about['best_step']}"
        values = [row["metrics"].get(name) for row in run["steps"]]
        latest = about["latest"]
        shown = latest if isinstance(latest, str) else human_number(latest)
        after = f"{shown:>12}  {best}"
        room = max(width - longest - 4 - len(after), 8)
        lines.append(
            f"{shorten(printable(name), longest):{longest}}  {sparkline(values, room)}  {after}"
        )
    return [*lines, ""] if lines else []


def sparkline(values: Sequence[float | str | None], width: int) -> str:
    """The last values as bars of eight heights. `×` is NaN or infinity, a space is no value."""
    shown = list(values)[-width:]
    finite = [value for value in shown if isinstance(value, int | float)]
    low, high = min(finite, default=0), max(finite, default=0)
    span = high - low

    def bar(value: float | str | None) -> str:
        if value is None:
            return " "
        if isinstance(value, str):
            return "×"
        return _BARS[int((value - low) / span * 7.999) if span else 3]

    return "".join(map(bar, shown)).rjust(width)


def _table(run: RunDocument, rows: Sequence[RunStep]) -> list[str]:
    names = list(run["metrics"])[:2]
    shown = [shorten(printable(name), 16) for name in names]
    head = ("step", "state", "size", "saved", *shown, "blocked")
    table = Table(head, right=("step", "size", *shown, "blocked"), shrink=("state", *shown))
    for row in rows:
        values = [row["metrics"].get(name) for name in names]
        blocked_s = row["blocked_s"]
        table.add(
            str(row["step"]),
            ", ".join([row["state"], *_flags(row)]),
            human_size(row["bytes"]),
            human_age(row["saved_at"]),
            *(value if isinstance(value, str) else human_number(value) for value in values),
            "–" if blocked_s is None else human_seconds(blocked_s),
            colour=_COLOURS.get(row["state"]),
        )
    return table.lines()


def _flags(row: RunStep) -> list[str]:
    flags = {
        "goes next": row["goes_next"],
        "pinned": row["pinned"],
        "best": bool(row["best"]),
        "held": bool(row["held"]),
        "unmirrored": row["mirrored"] is False,
        "foreign": row["format"] == "orbax",
    }
    return [name for name, is_set in flags.items() if is_set]


def _facts(run: RunDocument) -> list[str]:
    rules, mirror, space = run["rules"], run["mirror"], run["space"]
    facts: dict[str, str] = {}
    going = [str(row["step"]) for row in run["steps"] if row["goes_next"]]
    if rules is not None:
        facts["saves"] = rules["saves"]
        facts["keeps"] = rules["keeps"]
    unknown = rules is None or rules["keep_if"]
    shown = ", ".join(going[:8]) + (f" and {len(going) - 8} more" if len(going) > 8 else "")
    facts["goes next"] = "unknown" if unknown else shown or "none"
    blocked = [row["blocked_s"] for row in run["steps"] if row["blocked_s"] is not None]
    if blocked:
        facts["blocked"] = f"{human_seconds(median(blocked))} for a save (median)"
    if mirror is not None:
        facts["mirror"] = f"{printable(mirror['path'])}: {_behind(mirror)}"
    if space is not None:
        saves = space["saves_left"]
        enough = "" if saves is None else f", enough for {count_of(saves, 'save')}"
        facts["free"] = f"{human_size(space['free_bytes'])}{enough}"
    if run["advice"] is not None:
        facts["advice"] = run["advice"]["text"]
    return [line for name, text in facts.items() for line in wrap(f"{name:9}  {printable(text)}")]


def _behind(mirror: dict[str, Any]) -> str:
    waiting, problem = len(mirror["waiting"]), mirror["problem"]
    if not waiting:
        return "up to date"
    lag_s = mirror["lag_s"]
    behind = "" if lag_s is None else f", {human_seconds(lag_s)} behind"
    why = "" if problem is None else f" ({printable(problem)})"
    return f"{count_of(waiting, 'step')} waiting{behind}{why}"
