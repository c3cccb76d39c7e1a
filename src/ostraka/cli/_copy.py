"""`ostraka copy`: copy a checkpoint, or all steps of a directory."""

from __future__ import annotations

import click

from ostraka import transfer
from ostraka.cli._arguments import json_option, path_argument
from ostraka.cli._output import echo_report, progress


@click.command()
@path_argument("source", metavar="SRC")
@path_argument("target", metavar="DST")
@json_option("Print the result as JSON.")
def copy(source: str, target: str, as_json: bool) -> None:
    """Copy the checkpoint at SRC to DST.

    SRC and DST are directories or buckets. If SRC is a directory of steps, all steps are copied
    under their names. runs/7 is step 7 of runs. Every byte is compared with its checksum on the
    way. The copy is the same byte for byte, and appears at DST once it is complete.

    If a copy was interrupted, run it again to resume. Run it again later to copy only new steps.
    Checkpoints that DST already has are not read again (ostraka verify does that), and a different
    checkpoint at DST is never replaced. If a step of SRC is damaged, the others are copied, and the
    exit code is 1.

    \b
    Examples:
      ostraka copy runs s3://bucket/runs
      ostraka copy runs/7 /backup/step_7
      ostraka copy gs://bucket/runs/7 checkpoint --json | jq .bytes_copied
    """
    with progress(f"copying {source}") as bar:
        report = transfer.copy(source, target, on_bytes=bar)
    echo_report(report, as_json=as_json)
