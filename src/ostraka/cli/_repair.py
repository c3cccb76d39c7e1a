"""`ostraka repair`: rewrite the lost and damaged files of a checkpoint."""

from __future__ import annotations

import click

from ostraka import integrity
from ostraka.cli._arguments import flag, json_option, path_argument, repeated
from ostraka.cli._errors import DAMAGED
from ostraka.cli._output import echo, echo_json, echo_lines, progress
from ostraka.cli._roots import checkpoints_at
from ostraka.errors import printable


@click.command()
@path_argument("path")
@repeated("--from sources", "OTHER", "Take lost bytes from this checkpoint or directory of steps.")
@flag("--dry-run", "Say what would be done, and write nothing.")
@json_option("Print the result as JSON, sizes in bytes.")
@click.pass_context
def repair(
    context: click.Context, path: str, sources: tuple[str, ...], dry_run: bool, as_json: bool
) -> None:
    """Repair the checkpoint at PATH, or all checkpoints in a directory of steps.

    Everything is read and compared with its checksums, as ostraka verify does. Only lost or damaged
    files are rewritten. Shards come from parity, from other copies of the same save, such as a
    mirror, or from any checkpoint with some of the same bytes, such as the step before. An index
    comes from the shards, _METADATA from its copy among them. Only data whose checksum matches the
    one recorded by the save is written. A file is replaced atomically. (In a program that has the
    model, ostraka.repair(path, tree) needs no other copy.)

    If _METADATA is lost, the save may have died just before its commit. Then PATH becomes a
    checkpoint if no byte is missing, and a line says so.

    One line reports each repaired file and each problem that is left. If any is left, the exit
    code is 1. With --json, a directory of steps is a list, one checkpoint an object.

    \b
    Examples:
      ostraka repair runs/7 --dry-run
      ostraka repair runs/7 --from s3://bucket/runs
      ostraka repair runs
      ostraka repair runs/7 --from /backup/step_7 --from runs/6 --json | jq .problems
    """
    places = checkpoints_at(path)
    reports: list[integrity.RepairReport] = []
    for place in places:
        with progress(f"repairing {place}") as bar:
            report = integrity.repair(
                place, sources=list(sources), dry_run=dry_run, raises=False, on_bytes=bar
            )
        reports.append(report)
        if not as_json:
            head, *lines = [printable(line.strip()) for line in str(report).splitlines()]
            echo(click.style(head, fg="green" if report.ok else "red"))
            echo_lines([f"  {line}" for line in lines])
    if as_json:
        documents = [report.describe() for report in reports]
        echo_json(documents[0] if places == [path] else documents)
    if not all(report.ok for report in reports):
        context.exit(DAMAGED)
