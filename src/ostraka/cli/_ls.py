"""`ostraka ls`: the steps in a directory."""

from __future__ import annotations

import click

from ostraka.cli._arguments import flag, json_option, path_argument
from ostraka.cli._errors import DAMAGED, FAILED
from ostraka.cli._output import Table, echo_json, echo_lines, human_age, human_size, shorten
from ostraka.cli._roots import describe_step, is_forbidden, open_root, show_metrics
from ostraka.cli._verify import check
from ostraka.common.units import human_bytes
from ostraka.errors import count_of, printable
from ostraka.formats.unknown import likely_steps
from ostraka.manager.steps import Root, Step, ascending

_PROBLEM_WIDTH = 60


@click.command()
@path_argument("root")
@flag("--verify verified", "Read every step, and say if it is intact.")
@json_option()
def ls(root: str, verified: bool, as_json: bool) -> None:
    """List the steps in the directory ROOT.

    A step is a checkpoint in a directory named by its number, such as step_00000100, as a Manager
    names it, or 100.

    Each is shown with its size, its age, its metrics, whether it is pinned, and its state:

    \b
    complete     it was committed
    intact       it has just been read and verified (--verify)
    damaged      it can't be used
    forbidden    you may not read it
    unsupported  only a newer version of Ostraka can read it
    foreign      Orbax wrote it: a Manager reads it, but never deletes it

    Orbax checkpoints have no checksums, so --verify leaves them out. The exit code is 1 if any step
    is damaged, else 2 if any is forbidden or unsupported.

    \b
    Examples:
      ostraka ls runs
      ostraka ls runs --verify
      ostraka ls runs --json | jq '.steps[] | select(.metrics.loss < 2) | .step'
    """
    list_steps(root, as_json=as_json, verified=verified)


def list_steps(path: str, *, as_json: bool, verified: bool) -> None:
    """Print the steps of a directory. The exit code says if any is unusable."""
    root = open_root(path)
    entries = [
        _Entry(root, step, verified and not step.is_foreign) for step in ascending(root.scan())
    ]
    if as_json:
        echo_json({"root": root.location, "steps": [entry.document for entry in entries]})
    else:
        _print(root, entries)
    bad = [entry for entry in entries if entry.problems]
    if bad:
        forbidden = all(entry.forbidden for entry in bad)
        click.get_current_context().exit(FAILED if forbidden else DAMAGED)


class _Entry:
    """A step, its size and its state."""

    def __init__(self, root: Root, step: Step, verified: bool):
        self.step = step
        described = describe_step(root, step)
        self.nbytes: int | None = described["bytes"]
        self.report = check(described["path"]) if verified and not step.problems else None
        self.problems = self.report.problems if self.report else step.problems
        self.forbidden = bool(step.problems) and is_forbidden(root, step)
        self.document = described | {
            "format": step.format,
            "foreign": step.is_foreign,
            "pinned": step.pinned,
            "verified": self.report is not None,
            "problems": [str(problem) for problem in self.problems],
        }

    @property
    def state(self) -> str:
        if self.problems:
            if self.step.unsupported is not None:
                word, why = "unsupported", self.step.unsupported
            else:
                word, why = "forbidden" if self.forbidden else "damaged", str(self.problems[0])
            return f"{word}: {shorten(printable(why), _PROBLEM_WIDTH)}"
        if self.step.is_foreign:
            return "complete, foreign (Orbax)"
        return "intact" if self.report else "complete"


def _print(root: Root, entries: list[_Entry]) -> None:
    lines = [click.style(printable(root.location), bold=True), ""]
    if not entries:
        found = likely_steps(root.store)
        hint = "" if found is None else f"; but {printable(found)}"
        echo_lines([lines[0], f"no steps{hint}"])
        return
    table = Table(("step", "size", "saved", "metrics", "pinned", "state"), right=("step", "size"))
    for entry in entries:
        table.add(
            f"{entry.step.step}",
            human_size(entry.nbytes),
            human_age(entry.step.saved_s),
            show_metrics(entry.step),
            "pinned" if entry.step.pinned else "",
            entry.state,
            colour="red" if entry.problems else None,
        )
    total = human_bytes(sum(entry.nbytes or 0 for entry in entries))
    echo_lines([*lines, *table.lines(), "", f"{count_of(len(entries), 'step')}, {total}"])
