"""`ostraka copy`: a checkpoint, or all steps of a directory, to another place or store."""

from __future__ import annotations

import dataclasses

import click

from ostraka import transfer
from ostraka.cli._arguments import path_argument
from ostraka.cli._progress import progress
from ostraka.cli._text import echo_json, echo_lines, printable


@click.command()
@path_argument("source", metavar="SRC")
@path_argument("target", metavar="DST")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def copy(source: str, target: str, as_json: bool) -> None:
    """Copy the checkpoint at SRC to DST.

    SRC and DST are directories or buckets. Of a directory of steps all steps are copied, with their
    names; runs/7 is step 7 of runs. Every byte is compared with its digest on the way. The copy
    appears when all of it is there, the same byte for byte.

    Run it again after it was interrupted, and it goes on where it ended; run it again later, and
    only new steps are copied. What is there already is not read again (ostraka verify does that),
    and a different checkpoint at DST is never replaced. If a step of SRC is damaged, the others are
    copied, and the exit code is 1.

    \b
    Examples:
      ostraka copy runs s3://bucket/runs
      ostraka copy runs/7 /backup/step_7
      ostraka copy gs://bucket/runs/7 checkpoint --json | jq .bytes_copied
    """
    with progress(f"copying {printable(source)}") as bar:
        report = transfer.copy(source, target, on_bytes=bar.move_to)
    if as_json:
        echo_json(dataclasses.asdict(report))
    else:
        echo_lines(str(report).splitlines())
