"""How commands print steps: their metrics, and those that are removed."""

from __future__ import annotations

import click

from ostraka.cli._output import Table, human_number, human_size
from ostraka.errors import printable
from ostraka.manager.steps import Step


def show_metrics(step: Step) -> str:
    """The metrics of a step for people: `loss=2.5 accuracy=0.7`."""
    return " ".join(f"{printable(name)}={human_number(v)}" for name, v in step.metrics.items())


def removal_lines(
    location: str, table: Table, what: str, nbytes: int, *, removed: bool
) -> list[str]:
    """The lines about a removal from a directory, done or planned."""
    total = f"{what}, {human_size(nbytes)}"
    verb = "removed from" if removed else "would go from"
    return [
        f"{verb} {click.style(printable(location), bold=True)}",
        "",
        *table.lines(),
        "",
        total,
    ]
