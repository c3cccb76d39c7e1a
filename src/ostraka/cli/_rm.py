"""`ostraka rm`: remove steps, after showing which."""

from __future__ import annotations

import click

from ostraka._step_names import step_of
from ostraka.cli._arguments import complete_steps, path_argument
from ostraka.cli._roots import file_bytes, newest_good, open_root
from ostraka.cli._text import (
    Table,
    count_of,
    echo_json,
    echo_lines,
    human_age,
    human_bytes,
    printable,
)
from ostraka.manager._retain import remove_unless_read
from ostraka.manager._steps import Root, Step, no_such_step


def _parse_steps(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> tuple[int, ...]:
    """Steps by their numbers or by the names of their directories."""
    numbers = [step_of(text.rstrip("/").rsplit("/", 1)[-1]) for text in given]
    for text, number in zip(given, numbers, strict=True):
        if number is None:
            raise click.BadParameter(
                f"{text!r} is no step; give its number, as ostraka ls shows it", ctx, param
            )
    return tuple(number for number in numbers if number is not None)


@click.command()
@path_argument("root")
@click.argument(
    "step", nargs=-1, required=True, callback=_parse_steps, shell_complete=complete_steps
)
@click.option("--yes", is_flag=True, help="Remove them. Without it they are only shown.")
@click.option(
    "--force", is_flag=True, help="Even the newest good step, pinned ones, and those being read."
)
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, sizes in bytes.")
def rm(root: str, step: tuple[int, ...], yes: bool, force: bool, as_json: bool) -> None:
    """Remove each STEP from the directory ROOT.

    A step is given by its number, or by the name of its directory: 100 and step_00000100 are the
    same.

    Without --yes nothing is removed: what would be removed is shown. The newest step that can be
    read is never removed, nor are pinned ones, or one that a watch is reading, unless --force is
    given. A step that is being written is not touched.

    \b
    Examples:
      ostraka rm runs 100 200
      ostraka rm runs 100 200 --yes
    """
    place = open_root(root)
    steps = place.scan()
    chosen = [_find(place, steps, number) for number in dict.fromkeys(step)]
    if not force:
        _protect(place, steps, chosen)
    sizes = [file_bytes(place, one) for one in chosen]
    if yes:
        for one in chosen:
            if force:
                place.remove(one.step)
            else:
                remove_unless_read(place, one.step)
    if as_json:
        entries = [
            {"step": one.step, "paths": [place.path(name) for name in one.names], "bytes": nbytes}
            for one, nbytes in zip(chosen, sizes, strict=True)
        ]
        echo_json({"root": place.location, "removed": yes, "steps": entries})
    else:
        echo_lines(_lines(place, chosen, sizes, removed=yes))


def _lines(root: Root, steps: list[Step], sizes: list[int | None], *, removed: bool) -> list[str]:
    table = Table(("step", "size", "saved", "directory"), right=("step", "size"))
    for step, nbytes in zip(steps, sizes, strict=True):
        size = "unknown" if nbytes is None else human_bytes(nbytes)
        table.add(f"{step.step}", size, human_age(step.saved_s), ", ".join(step.names))
    total = f"{count_of(len(steps), 'step')}, {human_bytes(sum(n or 0 for n in sizes))}"
    verb = "removed from" if removed else "would go from"
    return [
        f"{verb} {click.style(printable(root.location), bold=True)}",
        "",
        *table.lines(),
        "",
        total if removed else f"{total}; nothing is removed without --yes",
    ]


def _find(root: Root, steps: list[Step], number: int) -> Step:
    for step in steps:
        if step.step == number:
            return step
    raise no_such_step(root.location, number, [step.step for step in steps])


def _protect(root: Root, steps: list[Step], chosen: list[Step]) -> None:
    newest = newest_good(steps)
    for step in chosen:
        reason = "the newest good one" if step.step == newest else "pinned" if step.pinned else None
        if reason:
            raise click.UsageError(
                f"step {step.step} in {root.location} is {reason}; nothing was removed, and "
                "--force removes it, too",
                click.get_current_context(),
            )
