"""`ostraka pin`: keep steps, whatever the rules of a run say."""

from __future__ import annotations

import click

from ostraka.cli._arguments import json_option, path_argument
from ostraka.cli._output import echo_json, echo_lines
from ostraka.errors import printable
from ostraka.manager.annotate import annotate
from ostraka.report.steps import step_at


@click.command()
@path_argument("step_path", nargs=-1, required=True, metavar="STEP_PATH...")
@json_option("Print the pinned steps as JSON.")
def pin(step_path: tuple[str, ...], as_json: bool) -> None:
    """Pin the step at each STEP_PATH, so that no run deletes it.

    runs/7 is step 7 of runs. The pin is a file in the directory of the step, so a run that is under
    way respects it, and so do later ones. A pinned step stays pinned. ostraka rm removes it with
    --force only.

    \b
    Examples:
      ostraka pin runs/7
      ostraka pin "$(ostraka which runs)"
    """
    set_pins(step_path, pinned=True, as_json=as_json)


def set_pins(paths: tuple[str, ...], *, pinned: bool, as_json: bool) -> None:
    """Pin or unpin steps as a Manager does. All paths must be steps, or nothing is done."""
    found = [step_at(path) for path in paths]
    for root, number in found:
        for name in root.own_names(root.find(number), "pins" if pinned else "unpins"):
            annotate(root.at(name), pinned=pinned)
    steps = [(root.path(root.find(number).names[0]), number) for root, number in found]
    if as_json:
        documents = [{"step": number, "path": path, "pinned": pinned} for path, number in steps]
        echo_json({"steps": documents})
    else:
        verb = "pinned" if pinned else "unpinned"
        echo_lines([f"{printable(path)}: {verb}" for path, _ in steps])
