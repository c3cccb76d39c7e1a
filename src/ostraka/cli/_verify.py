"""`ostraka verify`: read all of a checkpoint, and compare every byte with its digest."""

from __future__ import annotations

import dataclasses
import json

import click

from ostraka import integrity
from ostraka.cli._errors import DAMAGED
from ostraka.errors import Damaged, Problem


@click.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def verify(context: click.Context, path: str, as_json: bool) -> None:
    """Prove that the checkpoint at PATH is intact.

    All of it is read, and every byte compared with its digest. One line tells the result. If bytes
    are lost or changed, each place follows on a line of its own, with its file and its leaves, and
    the exit code is 1.

    \b
    Examples:
      ostraka verify runs/7
      ostraka verify runs/7 --json | jq .problems
    """
    try:
        report = integrity.verify(path, raises=False)
    except Damaged as error:
        # `_METADATA` itself, without which nothing else can be looked at.
        summary, problems = f"{error.path}: damaged", error.problems
        document: dict[str, object] = {"path": error.path}
    else:
        summary, problems = str(report), report.problems
        document = dataclasses.asdict(report)
    if as_json:
        document |= {"ok": not problems, "problems": [_describe(p) for p in problems]}
        click.echo(json.dumps(document, indent=1))
    else:
        click.echo(click.style(summary, fg="red" if problems else "green"))
        for problem in problems:
            click.echo(f"  {problem}")
    if problems:
        context.exit(DAMAGED)


def _describe(problem: Problem) -> dict[str, object]:
    return {"file": problem.file, "leaves": problem.leaves, "found": problem.found}
