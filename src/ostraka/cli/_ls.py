"""`ostraka ls`: the steps in a directory."""

from __future__ import annotations

from typing import Any

import click

from ostraka.cli._arguments import path_argument
from ostraka.cli._errors import DAMAGED, FAILED
from ostraka.cli._roots import file_bytes, is_forbidden, open_root, steps_of_orbax
from ostraka.cli._text import (
    Table,
    count_of,
    echo_json,
    echo_lines,
    human_age,
    human_bytes,
    human_number,
    json_number,
    printable,
    shorten,
)
from ostraka.cli._verify import Verdict, check
from ostraka.manager._steps import Root, Step

_PROBLEM_WIDTH = 60


@click.command()
@path_argument("root")
@click.option(
    "--verify", "verified", is_flag=True, help="Read every step, and say if it is intact."
)
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, sizes in bytes.")
def ls(root: str, verified: bool, as_json: bool) -> None:
    """List the steps in the directory ROOT.

    A step is a checkpoint in a directory named by its number, such as step_00000100, as a Manager
    names it, or 100.

    Each is shown with its size, its age, its metrics, whether it is pinned, and its state:
    "complete" means that it was committed, "intact" that all of it has just been read and verified
    (--verify), "damaged" that it can't be used, "forbidden" that you may not read it, "unsupported"
    that only a newer version of Ostraka can. Steps that Orbax wrote are listed, too; they have no
    digests, so --verify leaves them out. The exit code is 1 if any is damaged, else 2 if any is
    forbidden or unsupported.

    \b
    Examples:
      ostraka ls runs
      ostraka ls runs --verify
      ostraka ls runs --json | jq '.steps[] | select(.metrics.loss < 2) | .step'
    """
    list_steps(root, as_json=as_json, verified=verified)


def list_steps(path: str, *, as_json: bool, verified: bool) -> None:
    """Print the steps of a directory; the exit code says if any can't be used."""
    root = open_root(path)
    entries = [_Entry(root, step, verified, "ostraka") for step in root.scan()]
    entries += [_Entry(root, step, False, "orbax") for step in steps_of_orbax(root)]
    entries.sort(key=lambda entry: entry.step.step)
    if as_json:
        document = {"root": root.location, "steps": [entry.describe() for entry in entries]}
        echo_json(document)
    else:
        _print(root, entries)
    bad = [entry for entry in entries if entry.problems]
    if bad:
        forbidden = all(entry.forbidden for entry in bad)
        click.get_current_context().exit(FAILED if forbidden else DAMAGED)


class _Entry:
    """A step, its size and its state."""

    def __init__(self, root: Root, step: Step, verified: bool, written_by: str):
        self.step = step
        self.format = written_by
        self.path = root.path(step.names[0])
        self.nbytes = file_bytes(root, step)
        self.verdict: Verdict | None = check(self.path) if verified and not step.problems else None
        self.problems = self.verdict.problems if self.verdict else step.problems
        self.forbidden = bool(step.problems) and is_forbidden(root, step)

    @property
    def state(self) -> str:
        if self.problems:
            if self.step.unsupported is not None:
                word, why = "unsupported", self.step.unsupported
            else:
                word, why = "forbidden" if self.forbidden else "damaged", str(self.problems[0])
            return f"{word}: {shorten(printable(why), _PROBLEM_WIDTH)}"
        if self.format == "orbax":
            return "complete, Orbax's"
        return "intact" if self.verdict else "complete"

    def describe(self) -> dict[str, Any]:
        return {
            "step": self.step.step,
            "path": self.path,
            "format": self.format,
            "saved_s": self.step.saved_s,
            "bytes": self.nbytes,
            "metrics": {name: json_number(value) for name, value in self.step.metrics.items()},
            "pinned": self.step.pinned,
            "verified": self.verdict is not None,
            "problems": [str(problem) for problem in self.problems],
        }


def _print(root: Root, entries: list[_Entry]) -> None:
    lines = [click.style(printable(root.location), bold=True), ""]
    if not entries:
        echo_lines([lines[0], "no steps"])
        return
    table = Table(("step", "size", "saved", "metrics", "pinned", "state"), right=("step", "size"))
    for entry in entries:
        step = entry.step
        metrics = [f"{printable(name)}={human_number(v)}" for name, v in step.metrics.items()]
        table.add(
            f"{step.step}",
            "unknown" if entry.nbytes is None else human_bytes(entry.nbytes),
            human_age(step.saved_s),
            " ".join(metrics),
            "pinned" if step.pinned else "",
            entry.state,
            colour="red" if entry.problems else None,
        )
    total = human_bytes(sum(entry.nbytes or 0 for entry in entries))
    echo_lines([*lines, *table.lines(), "", f"{count_of(len(entries), 'step')}, {total}"])
