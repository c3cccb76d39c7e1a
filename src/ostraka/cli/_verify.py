"""`ostraka verify`: read a checkpoint, and compare every byte with its checksum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from ostraka import integrity
from ostraka.cli._arguments import flag, json_option, path_argument
from ostraka.cli._errors import DAMAGED
from ostraka.cli._output import (
    Table,
    echo,
    echo_json,
    echo_lines,
    human_size,
    progress,
    wrap,
)
from ostraka.common.text import shorten
from ostraka.errors import count_of, printable
from ostraka.report.steps import checkpoints_at

_MOST_LINES = 20
"""Problems listed for one checkpoint. With --json you get all."""


@click.command()
@path_argument("path", nargs=-1, required=True)
@flag("--no-read", "Read no shard: compare sizes, and in a bucket the identities of objects.")
@json_option("Print the result as JSON, with all of it.")
@click.pass_context
def verify(context: click.Context, path: tuple[str, ...], no_read: bool, as_json: bool) -> None:
    """Verify the checkpoints at each PATH.

    Everything is read and compared with its checksums. The tree is decoded as a restore does it,
    and every element of every leaf must be stored exactly once. One line gives the result. If bytes
    are lost or changed, the exit code is 1, and a line for each problem names the file, the process
    that wrote it, the leaves and their affected slices. Files that are not part of the checkpoint
    are noted. If PATH is a directory of steps, all steps are verified. runs/7 is step 7 of runs.

    With --no-read only sizes are compared, and in a bucket whether each object is the one that the
    save uploaded. That detects lost, truncated and replaced files, but no bit rot.

    With --json, several checkpoints are a list under the key checkpoints.

    \b
    Examples:
      ostraka verify runs/7
      ostraka verify runs
      ostraka verify s3://bucket/runs --no-read
      ostraka verify runs/7 --json | jq .problems
    """
    places = [place for given in path for place in checkpoints_at(given)]
    reports: list[integrity.VerifyReport] = []
    for place in places:
        report = check(place, read=not no_read)
        reports.append(report)
        if not as_json:
            colour = "red" if report.problems else "green"
            lines = wrap(printable(_in_a_line(report)))
            echo_lines([click.style(line, fg=colour) for line in lines])
            _echo_indented([problem.explain() for problem in report.problems])
            _echo_indented([f"note: {note}" for note in report.notes])
    damaged = sum(bool(report.problems) for report in reports)
    if as_json:
        documents = [_describe(report) for report in reports]
        single = len(path) == len(documents) == 1 and places[0] == path[0]
        echo_json(documents[0] if single else {"ok": not damaged, "checkpoints": documents})
    elif len(reports) > 1:
        if damaged:
            echo_lines(["", *_table(reports), ""])
        echo(f"{count_of(len(reports), 'checkpoint')}, {damaged or 'none'} of them damaged")
    if damaged:
        context.exit(DAMAGED)


def check(path: str, *, read: bool = True) -> integrity.VerifyReport:
    """Verify one checkpoint, with a bar on a terminal."""
    with progress(f"verifying {path}") as bar:
        return integrity.verify(path, raises=False, read=read, on_bytes=bar)


def _in_a_line(report: integrity.VerifyReport) -> str:
    """The result, with the size as the command prints all sizes."""
    return str(report).replace(f"{report.bytes_read:,} bytes", human_size(report.bytes_read))


def _echo_indented(texts: Sequence[str]) -> None:
    for text in texts[:_MOST_LINES]:
        echo_lines(wrap(printable(text), "  "))
    if len(texts) > _MOST_LINES:
        echo(f"  … and {len(texts) - _MOST_LINES} more; --json has them all")


def _table(reports: Sequence[integrity.VerifyReport]) -> list[str]:
    """A row for each checkpoint: how much of it is damaged."""
    head = ("checkpoint", "state", "problems", "files", "leaves", "processes")
    table = Table(head, right=("problems", "files", "leaves"), shrink=("checkpoint",))
    for report in reports:
        if report.ok:
            table.add(report.path, "intact", "0", "0", "0", "")
            continue
        affected = ["_METADATA"]
        if report.files:
            affected = [
                f"{len(report.damaged_files)} of {report.files}",
                f"{len(report.damaged_leaves)} of {report.leaves}",
                shorten(", ".join(map(str, report.damaged_processes)), 30),
            ]
        table.add(report.path, "damaged", f"{len(report.problems)}", *affected, colour="red")
    return table.lines()


def _describe(report: integrity.VerifyReport) -> dict[str, Any]:
    document = asdict(report)
    del document["steps"]
    problems = [
        {
            "file": problem.file,
            "found": problem.found,
            "process": problem.process,
            "host": problem.host,
            "bytes": problem.span,
            "leaves": problem.leaves,
            "boxes": [asdict(lost) for lost in problem.boxes],
        }
        for problem in report.problems
    ]
    document["damaged_leaves"] = report.damaged_leaves
    return document | {"ok": not report.problems, "problems": problems}
