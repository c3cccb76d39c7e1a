"""`ostraka watch`: the steps of a run as they are committed."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any

import click

from ostraka.cli._arguments import path_argument
from ostraka.cli._roots import file_bytes, open_root
from ostraka.cli._text import echo, echo_json, human_bytes, human_number, json_number, printable
from ostraka.manager._steps import Root, Step
from ostraka.manager._watch import BACKLOG, Watch
from ostraka.storage import open_store

_TERMINATED = 128 + signal.SIGTERM


def _split(ctx: click.Context, param: click.Parameter, given: str | None) -> list[str] | None:
    if given is None:
        return None
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise click.BadParameter(f"{given!r}: {error}", ctx, param) from error
    if not words:
        raise click.BadParameter("it is empty; give a command", ctx, param)
    return words


@click.command()
@path_argument("root")
@click.option("--after", type=click.IntRange(0), metavar="STEP", help="Begin after this step.")
@click.option("--newest-only", is_flag=True, help="Of several new steps, only the newest.")
@click.option(
    "--backlog",
    type=click.IntRange(0),
    default=BACKLOG,
    show_default=True,
    metavar="STEPS",
    help="How many new steps the run keeps for it while it is behind.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="End after so long without a new step; 0 waits for none.",
)
@click.option(
    "--exec",
    "command",
    metavar="COMMAND",
    callback=_split,
    help="Run this for each step, with {step} and {path} replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each step.")
def watch(
    root: str,
    after: int | None,
    newest_only: bool,
    backlog: int,
    timeout_s: float | None,
    command: list[str] | None,
    as_json: bool,
) -> None:
    """Print each step of the directory ROOT as it is committed.

    First those that are there, then new ones, in ascending order. ROOT need not be there yet.

    With --exec a command is run for each step, one at a time, without a shell. Until it ends, the
    run that saves deletes neither the step nor those that come meanwhile, up to --backlog of them.
    Steps that are missed because it is further behind are named. A command that fails ends the
    watch. Without --exec a step may be deleted as soon as it is printed.

    \b
    Examples:
      ostraka watch runs
      ostraka watch s3://bucket/runs --exec 'python evaluate.py {path}' --timeout 3600
      ostraka watch runs --after 4000 --json | jq .metrics.loss
    """
    if open_store(root).exists():
        place = open_root(root)
    else:
        place = Root(root)
        _warn(f"waiting for {place.location}, where nothing is yet")
    steps = Watch(
        place,
        after=after,
        newest_only=newest_only,
        backlog=backlog,
        timeout_s=timeout_s,
        warn=_warn,
    )
    with _ending_on_sigterm(), closing(steps):
        while (step := steps.wait()) is not None:
            described = _describe(place, step)
            if as_json:
                echo_json(described, indent=None)
            else:
                echo(_line(described))
            if command is not None:
                _run(command, step.step, described["path"])


def _warn(text: str) -> None:
    echo(f"ostraka: {printable(text)}", err=True)


def _describe(root: Root, step: Step) -> dict[str, Any]:
    return {
        "step": step.step,
        "path": root.path(step.names[0]),
        "saved_s": step.saved_s,
        "bytes": file_bytes(root, step),
        "metrics": {name: json_number(value) for name, value in step.metrics.items()},
    }


def _line(step: dict[str, Any]) -> str:
    saved = "at an unknown time"
    if step["saved_s"] is not None:
        saved = f"{datetime.fromtimestamp(step['saved_s']):%Y-%m-%d %H:%M:%S}"
    size = "unknown" if step["bytes"] is None else human_bytes(step["bytes"])
    metrics = [
        f"{printable(name)}={value if isinstance(value, str) else human_number(value)}"
        for name, value in step["metrics"].items()
    ]
    return f"{step['step']:>8}  {saved}  {size:>9}  {' '.join(metrics)}".rstrip()


def _run(command: list[str], step: int, path: str) -> None:
    """Run the command for a step; raises click's error if it fails."""
    words = [word.replace("{step}", str(step)).replace("{path}", path) for word in command]
    try:
        status = _status_of(words)
    except OSError as error:
        raise click.ClickException(f"can't run {words[0]}: {error.strerror}") from error
    if status:
        how = f"status {status}" if status > 0 else f"signal {-status}"
        raise click.ClickException(
            f"the command for step {step} ended with {how}; --after {step} goes on after it"
        )


def _status_of(words: list[str]) -> int:
    """Run a command to its end, which SIGTERM hastens."""
    process: subprocess.Popen[bytes] | None = None
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        process = subprocess.Popen(words)
        if is_stopped:  # while it began
            process.terminate()
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # Ctrl-C at a terminal is for both: it may have something to clean up.
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_stopped:
        sys.exit(_TERMINATED)
    return status


@contextmanager
def _ending_on_sigterm() -> Generator[None]:
    """So that the lease ends with this program."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
