"""`ostraka repair`: find what a checkpoint has lost, and rewrite just that."""

from __future__ import annotations

import json

import click

from ostraka import integrity
from ostraka.cli._arguments import path_argument
from ostraka.cli._errors import DAMAGED
from ostraka.cli._progress import progress
from ostraka.cli._roots import checkpoints_at
from ostraka.cli._text import printable


@click.command()
@path_argument("path")
@click.option(
    "--from",
    "sources",
    metavar="OTHER",
    multiple=True,
    help="Take lost bytes from this checkpoint, or this directory of steps; may be repeated.",
)
@click.option(
    "--rebuild-tree",
    is_flag=True,
    help="If no copy of _METADATA is left, make one from the headers of the shards.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, sizes in bytes.")
@click.pass_context
def repair(
    context: click.Context,
    path: str,
    sources: tuple[str, ...],
    rebuild_tree: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Repair the checkpoint at PATH, or of a directory of steps all of them.

    All of it is read and compared with its digests, as ostraka verify does. What is lost or damaged
    is rewritten, and nothing else: shards from parity, from other copies of the same save, such as
    a mirror, or from any checkpoint with some of the same bytes, such as the step before; an index
    from the shards; _METADATA from its copy among them. Nothing is written that has not the digest
    which the save has recorded. A file is replaced as a whole, in one event. (From the model that
    was saved, ostraka.repair(path, tree) in its program mends it without another copy.)

    If _METADATA is gone, PATH may be what a save left that died just before its commit: it becomes
    a checkpoint if every byte of it is there, and a line says so.

    With --rebuild-tree it is made from the headers of the shards if no copy is left: a tree of
    dicts with all arrays. All else that a tree may have is lost then.

    A line tells of each file that was mended and of each problem that is left; with these the exit
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
        with progress(f"repairing {printable(place)}") as bar:
            report = integrity.repair(
                place,
                from_=list(sources),
                dry_run=dry_run,
                rebuild_tree=rebuild_tree,
                raises=False,
                on_bytes=bar.move_to,
            )
        reports.append(report)
        if not as_json:
            _echo(report)
    if as_json:
        documents = [report.describe() for report in reports]
        click.echo(json.dumps(documents[0] if places == [path] else documents, indent=1))
    if not all(report.ok for report in reports):
        context.exit(DAMAGED)


def _echo(report: integrity.RepairReport) -> None:
    head, *lines = str(report).splitlines()
    click.echo(click.style(printable(head), fg="green" if report.ok else "red"))
    for line in lines:
        click.echo(f"  {printable(line.strip())}")
