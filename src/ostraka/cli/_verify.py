"""`ostraka verify`: read all of a checkpoint, and compare every byte with its digest."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from ostraka import integrity
from ostraka.cli._arguments import path_argument
from ostraka.cli._errors import DAMAGED
from ostraka.cli._progress import progress
from ostraka.cli._roots import checkpoints_at
from ostraka.cli._text import count_of, echo, echo_json, printable
from ostraka.errors import Damaged, Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one checkpoint."""

    path: str
    summary: str
    problems: tuple[Problem, ...]
    report: integrity.Report | None
    """None if `_METADATA` itself is damaged, without which nothing else can be checked."""

    def describe(self) -> dict[str, Any]:
        document = {"path": self.path} if self.report is None else dataclasses.asdict(self.report)
        problems = [
            {"file": problem.file, "leaves": problem.leaves, "found": problem.found}
            for problem in self.problems
        ]
        return document | {"ok": not self.problems, "problems": problems}


@click.command()
@path_argument("path", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def verify(context: click.Context, path: tuple[str, ...], as_json: bool) -> None:
    """Verify the checkpoints at each PATH.

    All of it is read, every byte compared with its digest, and the tree decoded as a restore does.
    One line gives the result. If bytes are lost or changed, each place is listed on a line of its
    own, with its file and its leaves, and the exit code is 1. Of a directory of steps, all steps
    are verified; runs/7 is step 7 of runs.

    With --json, one checkpoint is an object, several are a list of them.

    \b
    Examples:
      ostraka verify runs/7
      ostraka verify runs
      ostraka verify runs/7 --json | jq .problems
    """
    places = [place for given in path for place in checkpoints_at(given)]
    verdicts: list[Verdict] = []
    for place in places:
        verdict = check(place)
        verdicts.append(verdict)
        if not as_json:
            echo(click.style(verdict.summary, fg="red" if verdict.problems else "green"))
            for problem in verdict.problems:
                echo(f"  {printable(str(problem))}")
    damaged = sum(bool(verdict.problems) for verdict in verdicts)
    if as_json:
        documents = [verdict.describe() for verdict in verdicts]
        single = len(path) == len(documents) == 1 and places[0] == path[0]
        echo_json(documents[0] if single else documents)
    elif len(verdicts) > 1:
        echo(f"{count_of(len(verdicts), 'checkpoint')}, {damaged or 'none'} of them damaged")
    if damaged:
        context.exit(DAMAGED)


def check(path: str) -> Verdict:
    """Verify one checkpoint, with a bar on a terminal."""
    with progress(f"verifying {printable(path)}") as bar:
        try:
            report = integrity.verify(path, raises=False, on_bytes=bar.move_to)
        except Damaged as error:
            summary = f"{printable(error.path)}: damaged"
            return Verdict(error.path, summary, error.problems, None)
    return Verdict(report.path, printable(str(report)), report.problems, report)
