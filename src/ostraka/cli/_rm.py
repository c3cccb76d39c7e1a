"""`ostraka rm`: remove steps, after showing which."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import click

from ostraka.cli._arguments import complete_steps, flag, json_option, parsed, path_argument
from ostraka.cli._confirm import Consent, consent_options
from ostraka.cli._output import Table, echo, echo_json, echo_lines, human_age, human_size
from ostraka.cli._steps import removal_lines
from ostraka.errors import count_of
from ostraka.layout.file_names import step_of
from ostraka.manager.retain import remove_step
from ostraka.manager.steps import Root, Step, no_such_step
from ostraka.report.steps import file_bytes, open_root


def _parse_step(text: str) -> int:
    """A step by its number or by the name of its directory."""
    number = step_of(text.rstrip("/").rsplit("/", 1)[-1])
    if number is None:
        raise ValueError(f"{text!r} is no step; give its number, as ostraka ls shows it")
    return number


@click.command()
@path_argument("root")
@click.argument(
    "step",
    nargs=-1,
    required=True,
    type=parsed("STEP", _parse_step),
    shell_complete=complete_steps,
)
@consent_options
@flag("--force", "Even the newest good step, pinned ones, and those being read.")
@json_option()
def rm(
    root: str, step: tuple[int, ...], dry_run: bool, yes: bool, force: bool, as_json: bool
) -> None:
    """Remove each STEP from the directory ROOT.

    Give a step by its number, or by the name of its directory: 100 and step_00000100 are the same.

    The command asks before it removes anything. --yes answers for you, --dry-run only shows what
    would be removed. Where nobody can be asked, it removes nothing without --yes. Without --force
    it keeps the newest step that can be read, pinned steps, and a step that a watch is reading. It
    never touches a step that is being written.

    \b
    Examples:
      ostraka rm runs 100 200
      ostraka rm runs 100 200 --dry-run
      ostraka rm runs 100 200 --yes
    """
    consent = Consent(dry_run, yes)
    place = open_root(root)
    steps = {one.step: one for one in place.scan()}
    for number in step:
        if number not in steps:
            raise no_such_step(place.location, number, list(steps))
    chosen = [steps[number] for number in dict.fromkeys(step)]
    if not force:
        _protect(place, steps.values(), chosen)
    sizes = {one.step: file_bytes(place, one) for one in chosen}
    table = Table(("step", "size", "saved", "directory"), right=("step", "size"))
    for one in chosen:
        size, saved = human_size(sizes[one.step]), human_age(one.saved_at)
        table.add(f"{one.step}", size, saved, ", ".join(one.names))
    what, total = count_of(len(chosen), "step"), sum(size or 0 for size in sizes.values())
    lines = partial(removal_lines, place.location, table, what, total)
    removed = consent.ask(f"remove {what} from {place.location}", lines(removed=False))
    if removed:
        for one in chosen:
            remove_step(place, one.step, seen=one, even_if_read=force)
    if as_json:
        entries = [
            {"step": one.step, "paths": list(map(place.path, one.names)), "bytes": sizes[one.step]}
            for one in chosen
        ]
        echo_json({"root": place.location, "removed": removed, "steps": entries})
        return
    if removed or dry_run:  # Else the lines stand above the question.
        echo_lines(lines(removed=removed))
    if not removed:
        echo("nothing was removed")


def _protect(root: Root, steps: Iterable[Step], chosen: Iterable[Step]) -> None:
    """Raise UsageError if a step is pinned, or the newest good one."""
    newest = max((step.step for step in steps if step.is_good), default=None)
    for step in chosen:
        reason = "the newest good one" if step.step == newest else "pinned" if step.pinned else None
        if reason:
            raise click.UsageError(
                f"step {step.step} in {root.location} is {reason}; nothing was removed, and "
                "--force removes it, too"
            )
