"""`ostraka verify`: read all of a checkpoint, and compare every byte with its digest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from ostraka import integrity
from ostraka.cli._arguments import path_argument
from ostraka.cli._errors import DAMAGED
from ostraka.cli._progress import progress
from ostraka.cli._roots import checkpoints_at
from ostraka.cli._text import Table, count_of, echo, echo_json, echo_lines, printable, shorten
from ostraka.errors import Damaged, Problem

_MOST_LINES = 20
"""Of one checkpoint; --json has all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one checkpoint."""

    path: str
    summary: str
    problems: tuple[Problem, ...]
    report: integrity.Report | None
    """None if `_METADATA` itself is damaged, without which nothing else can be checked."""

    def describe(self) -> dict[str, Any]:
        if self.report is None:
            document: dict[str, Any] = {"path": self.path}
        else:
            document = dataclasses.asdict(self.report)
            del document["steps"]
            document["damaged_leaves"] = self.report.damaged_leaves
        problems = [_describe(problem) for problem in self.problems]
        return document | {"ok": not self.problems, "problems": problems}

    def lines(self) -> list[str]:
        lines = [click.style(self.summary, fg="red" if self.problems else "green")]
        lines += _indent([problem.explain() for problem in self.problems])
        if self.report is not None:
            lines += _indent([f"note: {note}" for note in self.report.notes])
        return lines


@click.command()
@path_argument("path", nargs=-1, required=True)
@click.option(
    "--no-read",
    is_flag=True,
    help="Read no shard: compare sizes, and in a bucket the identities of objects.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, with all of it.")
@click.pass_context
def verify(context: click.Context, path: tuple[str, ...], no_read: bool, as_json: bool) -> None:
    """Verify the checkpoints at each PATH.

    All of it is read, every byte compared with its digest, the tree decoded as a restore does, and
    every element of every leaf accounted for. One line gives the result. If bytes are lost or
    changed, each place is listed on a line of its own, with its file, the process that wrote it,
    and its leaves with the boxes that are hurt, and the exit code is 1. Files that are not part of
    the checkpoint are noted. Of a directory of steps, all steps are verified; runs/7 is step 7 of
    runs.

    With --no-read only sizes are compared, and in a bucket whether each object is the one that the
    save uploaded: that finds what was lost, cut or replaced, and not what rotted in place.

    With --json, one checkpoint is an object, several are a list of them.

    \b
    Examples:
      ostraka verify runs/7
      ostraka verify runs
      ostraka verify s3://bucket/runs --no-read
      ostraka verify runs/7 --json | jq .problems
    """
    places = [place for given in path for place in checkpoints_at(given)]
    verdicts: list[Verdict] = []
    for place in places:
        verdict = check(place, read=not no_read)
        verdicts.append(verdict)
        if not as_json:
            echo_lines(verdict.lines())
    damaged = sum(bool(verdict.problems) for verdict in verdicts)
    if as_json:
        documents = [verdict.describe() for verdict in verdicts]
        single = len(path) == len(documents) == 1 and places[0] == path[0]
        echo_json(documents[0] if single else documents)
    elif len(verdicts) > 1:
        if damaged:
            echo_lines(["", *_table(verdicts), ""])
        echo(f"{count_of(len(verdicts), 'checkpoint')}, {damaged or 'none'} of them damaged")
    if damaged:
        context.exit(DAMAGED)


def check(path: str, *, read: bool = True) -> Verdict:
    """Verify one checkpoint, with a bar on a terminal."""
    with progress(f"verifying {printable(path)}") as bar:
        try:
            report = integrity.verify(path, raises=False, read=read, on_bytes=bar.move_to)
        except Damaged as error:
            summary = f"{printable(error.path)}: damaged"
            return Verdict(error.path, summary, error.problems, None)
    return Verdict(report.path, printable(str(report)), report.problems, report)


def _indent(texts: Sequence[str]) -> list[str]:
    lines = [f"  {printable(text)}" for text in texts[:_MOST_LINES]]
    if len(texts) > _MOST_LINES:
        lines.append(f"  … and {len(texts) - _MOST_LINES} more; --json has them all")
    return lines


def _table(verdicts: Sequence[Verdict]) -> list[str]:
    """All checkpoints, one in a row: what is damaged of each."""
    head = ("checkpoint", "state", "problems", "files", "leaves", "processes")
    table = Table(head, right=("problems", "files", "leaves"))
    for verdict in verdicts:
        report, name = verdict.report, printable(verdict.path)
        if report is None:
            table.add(name, "damaged", f"{len(verdict.problems)}", "_METADATA", colour="red")
        elif report.ok:
            table.add(name, "intact", "0", "0", "0", "")
        else:
            table.add(
                name,
                "damaged",
                f"{len(report.problems)}",
                f"{len(report.damaged_files)} of {report.files}",
                f"{len(report.damaged_leaves)} of {report.leaves}",
                shorten(", ".join(map(str, report.damaged_processes)), 30),
                colour="red",
            )
    return table.lines()


def _describe(problem: Problem) -> dict[str, Any]:
    return {
        "file": problem.file,
        "found": problem.found,
        "process": problem.process,
        "host": problem.host,
        "bytes": problem.span,
        "leaves": problem.leaves,
        "boxes": [
            {"leaf": lost.leaf, "box": lost.box, "shape": lost.shape} for lost in problem.boxes
        ],
    }
