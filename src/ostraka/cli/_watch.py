"""`ostraka watch`: print the steps of a run as they are committed."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any

import click

from ostraka.cli._arguments import flag, json_option, option, parsed, path_argument
from ostraka.cli._output import echo, echo_json, human_size
from ostraka.cli._steps import show_metrics
from ostraka.errors import printable
from ostraka.manager.watch import BACKLOG, Watch
from ostraka.report.steps import await_root, describe_step


def _split(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    if not words:
        raise ValueError("it is empty; give a command")
    return words


@click.command()
@path_argument("root")
@option("--after", click.IntRange(0), "Begin after this step.", metavar="STEP")
@flag("--newest-only", "Skip all new steps but the newest.")
@option(
    "--backlog",
    click.IntRange(0),
    "How many new steps the run keeps while the watch is behind.",
    default=BACKLOG,
    show_default=True,
    metavar="STEPS",
)
@option(
    "--timeout timeout_s",
    click.FloatRange(0),
    "End after this time without a new step; 0 does not wait.",
    metavar="SECONDS",
)
@option(
    "--exec command",
    parsed("COMMAND", _split),
    "Run this for each step, with {step} and {path} replaced.",
)
@json_option("Print a line of JSON for each step.")
def watch(root: str, command: list[str] | None, as_json: bool, **options: Any) -> None:
    """Print each step of the directory ROOT as it is committed.

    Steps that are already committed come first, then new ones, in ascending order. ROOT need not
    exist yet.

    With --exec a command runs for each step, one at a time, without a shell. While it runs, the
    training run keeps this step and up to --backlog newer ones, and logs steps that the watch
    misses because it is further behind. A command that fails ends the watch. Without --exec a step
    may be deleted as soon as it is printed.

    \b
    Examples:
      ostraka watch runs
      ostraka watch s3://bucket/runs --exec 'python evaluate.py {path}' --timeout 3600
      ostraka watch runs --after 4000 --json | jq .metrics.loss
    """
    place = await_root(root)
    if not place.store.exists():
        _warn(f"waiting for {place.location}, where nothing is yet")
    # SIGTERM ends the program, so that the lease ends with it.
    with _on_sigterm(_terminate), closing(Watch(place, warn=_warn, **options)) as steps:
        while (step := steps.wait()) is not None:
            described = describe_step(place, step)
            if as_json:
                echo_json(described, indent=None)
            else:
                saved = "at an unknown time"
                if step.saved_at is not None:
                    saved = f"{datetime.fromtimestamp(step.saved_at):%Y-%m-%d %H:%M:%S}"
                size = human_size(described["bytes"])
                echo(f"{step.step:>8}  {saved}  {size:>9}  {show_metrics(step)}".rstrip())
            if command is not None:
                _run(command, step.step, described["path"])


def _warn(text: str) -> None:
    echo(f"ostraka: {printable(text)}", err=True)


def _run(command: list[str], step: int, path: str) -> None:
    """Run the command for a step. Raises click's error if it fails."""
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

    with _on_sigterm(stop):
        process = subprocess.Popen(words)
        if is_stopped:  # while it began
            process.terminate()
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # Ctrl-C at a terminal is for both: it may have something to clean up.
            raise
    if is_stopped:
        _terminate()
    return status


def _terminate(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


@contextmanager
def _on_sigterm(action: Callable[..., None]) -> Generator[None]:
    before = signal.signal(signal.SIGTERM, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
