"""`ostraka ls`: the steps in a directory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from ostraka.cli._arguments import flag, json_option, path_argument
from ostraka.cli._errors import DAMAGED, FAILED
from ostraka.cli._output import Table, echo_json, echo_lines, human_age, human_size
from ostraka.cli._steps import show_metrics
from ostraka.cli._verify import check
from ostraka.common.text import shorten
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Problem, count_of, printable
from ostraka.formats.ostraka.damage import MISSING
from ostraka.formats.unknown import likely_steps
from ostraka.manager.steps import Root, Step, ascending
from ostraka.report.steps import describe_step, is_forbidden, lost_files, open_root

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
    complete     it was committed, and all of its files are there
    intact       it has just been read and verified (--verify)
    damaged      it can't be used, or files of it are missing
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
    documents: list[dict[str, Any]] = []
    unusable: list[str] = []
    head = ("step", "size", "saved", "metrics", "pinned", "state")
    table = Table(head, right=("step", "size"), shrink=("metrics", "state"))
    steps = ascending(root.scan())
    for step, lost in zip(steps, _lost_files(root, steps), strict=True):
        document = describe_step(root, step)
        is_checked = verified and not step.is_foreign and not step.problems
        report = check(document["path"]) if is_checked else None
        problems = step.problems or (lost if report is None else report.problems)
        state = "intact" if report else "complete"
        if problems:
            state, why = _explain(root, step, problems)
            unusable.append(state)
            state += f": {shorten(printable(why), _PROBLEM_WIDTH)}"
        elif step.is_foreign:
            state = "complete, foreign (Orbax)"
        table.add(
            f"{step.step}",
            human_size(document["bytes"]),
            human_age(step.saved_at),
            show_metrics(step),
            "pinned" if step.pinned else "",
            state,
            colour="red" if problems else None,
        )
        document |= {
            "format": step.format,
            "foreign": step.is_foreign,
            "pinned": step.pinned,
            "verified": report is not None,
            "problems": [str(problem) for problem in problems],
        }
        documents.append(document)
    location = click.style(printable(root.location), bold=True)
    if as_json:
        echo_json({"root": root.location, "steps": documents})
    elif documents:
        total = human_size(sum(document["bytes"] or 0 for document in documents))
        summary = f"{count_of(len(documents), 'step')}, {total}"
        echo_lines([location, "", *table.lines(), "", summary])
    else:
        found = likely_steps(root.store)
        hint = "" if found is None else f"; but {printable(found)}"
        echo_lines([location, f"no steps{hint}"])
    if unusable:
        click.get_current_context().exit(DAMAGED if "damaged" in unusable else FAILED)


def _lost_files(root: Root, steps: Sequence[Step]) -> list[tuple[Problem, ...]]:
    """The lost files of each step, with a listing for each."""
    threads = root.store.traits.reads_at_once if root.store.traits.is_remote else 1
    return run_all(partial(lost_files, root), steps, threads=threads, stop=StopSignal())


def _explain(root: Root, step: Step, problems: Sequence[Problem]) -> tuple[str, str]:
    """The state of a step that can't be used, and why."""
    if step.unsupported is not None:
        return "unsupported", step.unsupported
    may_be_intact = bool(step.problems) and is_forbidden(root, step)
    missing = sum(problem.found == MISSING for problem in problems)
    if missing and not step.problems:
        return "damaged", f"{count_of(missing, 'file')} missing"
    return "forbidden" if may_be_intact else "damaged", str(problems[0])
