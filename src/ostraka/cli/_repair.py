"""`ostraka repair`: rewrite the lost and damaged files of a checkpoint."""

from __future__ import annotations

import click

from ostraka import integrity
from ostraka.cli._arguments import json_option, path_argument, repeated
from ostraka.cli._confirm import Consent, consent_options
from ostraka.cli._errors import DAMAGED
from ostraka.cli._output import echo, echo_json, echo_lines, progress, wrap
from ostraka.errors import count_of, printable
from ostraka.report.steps import checkpoints_at


@click.command()
@path_argument("path")
@repeated("--from sources", "OTHER", "Take lost bytes from this checkpoint or directory of steps.")
@consent_options
@json_option("Print the result as JSON, sizes in bytes.")
@click.pass_context
def repair(
    context: click.Context,
    path: str,
    sources: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Repair the checkpoint at PATH, or all in a directory of steps.

    Everything is read and compared with its checksums, as ostraka verify does. Only lost or damaged
    files are rewritten. Shards come from parity, from other copies of the same save, such as a
    mirror, or from any checkpoint with some of the same bytes, such as the step before. An index
    comes from the shards, _METADATA from its copy among them. Only data whose checksum matches the
    one recorded by the save is written. A file is replaced atomically. (In a program that has the
    model, ostraka.repair(path, tree) needs no other copy.)

    If _METADATA is lost, the save may have died just before its commit. Then PATH becomes a
    checkpoint if no byte is missing, and a line says so.

    The command first reads everything, and asks before it rewrites a file. --yes answers for you
    and reads everything only once. --dry-run only shows what would be done. Where nobody can be
    asked, it writes nothing without --yes.

    One line reports each repaired file and each problem that is left. If any is left, the exit
    code is 1. With --json, several checkpoints are a list under the key checkpoints.

    \b
    Examples:
      ostraka repair runs/7 --dry-run
      ostraka repair runs/7 --from s3://bucket/runs
      ostraka repair runs --yes
      ostraka repair runs/7 --from /backup/step_7 --from runs/6 --yes --json | jq .problems
    """
    consent = Consent(dry_run, yes)
    places = checkpoints_at(path)
    reports = [_repair(place, sources, dry_run=not yes) for place in places]
    if not dry_run and not yes and (files := sum(len(report.repaired) for report in reports)):
        lines = [line for report in reports for line in _lines(report)]
        if consent.ask(f"rewrite {count_of(files, 'file')} in {path}", lines):
            reports = [_repair(place, sources, dry_run=False) for place in places]
        elif not as_json:
            echo("nothing was written")
            context.exit(DAMAGED)
    if as_json:
        documents = [report.describe() for report in reports]
        is_ok = all(report.ok for report in reports)
        echo_json(documents[0] if places == [path] else {"ok": is_ok, "checkpoints": documents})
    else:
        echo_lines([line for report in reports for line in _lines(report)])
    if not all(report.ok for report in reports):
        context.exit(DAMAGED)


def _repair(path: str, sources: tuple[str, ...], *, dry_run: bool) -> integrity.RepairReport:
    with progress(f"{'verifying' if dry_run else 'repairing'} {path}") as bar:
        return integrity.repair(
            path, sources=list(sources), dry_run=dry_run, raises=False, on_bytes=bar
        )


def _lines(report: integrity.RepairReport) -> list[str]:
    text = str(report).replace(integrity.ANOTHER_COPY, "pass --from OTHER_COPY")
    head, *lines = [printable(line.strip()) for line in text.splitlines()]
    colour = "green" if report.ok else "red"
    return [
        *(click.style(line, fg=colour) for line in wrap(head)),
        *(part for line in lines for part in wrap(line, "  ")),
    ]
