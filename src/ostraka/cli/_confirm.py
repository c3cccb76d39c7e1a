"""The convention of commands that remove or rewrite files: `--dry-run`, a question, `--yes`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ostraka.cli._arguments import flag
from ostraka.cli._output import echo_lines


@dataclass(frozen=True, slots=True)
class Consent:
    """The answer that the options of a command give."""

    dry_run: bool
    yes: bool

    def __post_init__(self) -> None:
        if self.dry_run and self.yes:
            raise click.UsageError("--dry-run and --yes contradict each other; give one")

    def ask(self, what: str, lines: Sequence[str]) -> bool:
        """True if the command shall go on with `what`, such as `remove 2 steps`.

        On a terminal it shows the lines and asks. Elsewhere it raises UsageError without --yes.
        """
        if self.dry_run or self.yes:
            return self.yes
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise click.UsageError(
                f"would {what}, but nobody can be asked here; --yes does it, --dry-run shows it"
            )
        echo_lines(lines, err=True)
        return click.confirm(f"{what[0].upper()}{what[1:]}?", err=True)


def consent_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options `--dry-run` and `--yes`, parameters of the same names."""
    yes = flag("--yes", "Do it without asking.")
    return flag("--dry-run", "Show what would be done, and change nothing.")(yes(command))
