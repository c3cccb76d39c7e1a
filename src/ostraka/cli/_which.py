"""`ostraka which`: the path of the newest step, for scripts."""

from __future__ import annotations

import click

from ostraka.cli._arguments import json_option, path_argument
from ostraka.cli._output import echo, echo_json
from ostraka.errors import CheckpointNotFound, printable
from ostraka.report.steps import open_root


@click.command()
@path_argument("directory")
@json_option("Print the step and its path as JSON.")
def which(directory: str, as_json: bool) -> None:
    """Print the path of the newest committed step in DIRECTORY.

    Nothing else is printed, so that a script can use it. A step that can't be read is skipped. If
    there is none, the exit code is 2.

    \b
    Examples:
      ostraka which runs
      ostraka verify "$(ostraka which runs)"
      ostraka which s3://bucket/runs --json | jq .step
    """
    root = open_root(directory)
    found = [step for step in root.scan(lambda steps: steps[-1].is_good) if step.is_good]
    if not found:
        raise CheckpointNotFound(f"{root.location} has no committed step; ostraka ls shows why")
    path = root.path(found[-1].names[0])
    if as_json:
        echo_json({"root": root.location, "step": found[-1].step, "path": path})
    else:
        echo(printable(path))
