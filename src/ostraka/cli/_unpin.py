"""`ostraka unpin`: leave steps to the rules of their run again."""

from __future__ import annotations

import click

from ostraka.cli._arguments import json_option, path_argument
from ostraka.cli._pin import set_pins


@click.command()
@path_argument("step_path", nargs=-1, required=True, metavar="STEP_PATH...")
@json_option("Print the unpinned steps as JSON.")
def unpin(step_path: tuple[str, ...], as_json: bool) -> None:
    """Unpin the step at each STEP_PATH, so that a run may delete it.

    runs/7 is step 7 of runs. The rules of the run decide when it deletes the step.

    \b
    Examples:
      ostraka unpin runs/7
      ostraka unpin runs/7 runs/8
    """
    set_pins(step_path, pinned=False, as_json=as_json)
