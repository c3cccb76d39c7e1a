"""`ostraka audit`: the history of a run, and where two runs first differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ostraka.audit.explain import Divergence, find_divergence
from ostraka.audit.journal import FOLDER, History, Line, Run, read_journal
from ostraka.cli._arguments import json_option, option, path_argument
from ostraka.cli._errors import DAMAGED
from ostraka.cli._output import echo_json, echo_lines, human_age
from ostraka.errors import CheckpointNotFound, count_of, printable
from ostraka.storage import open_store


@click.command()
@path_argument("directory")
@path_argument("other", required=False)
@option("--rtol", "NUMBER", "Compare floats with this relative tolerance.", type=float)
@json_option()
def audit(directory: str, other: str | None, rtol: float | None, as_json: bool) -> None:
    """Tell the history of a run, or where it first differs from OTHER.

    A Manager with audit_every= keeps a journal in the run directory. For each resume you see
    whether it was the same run as before, else the first step that differs and the likely cause.
    With OTHER, the steps that both runs audited are compared.

    The exit code is 1 if there is a difference.

    \b
    Examples:
      ostraka audit runs/a
      ostraka audit runs/a runs/b --rtol 1e-3
      ostraka audit runs/a --json | jq '.runs[] | select(.same == false) | .message'
    """
    history = _read(directory)
    if other is None:
        _tell(directory, history, rtol, as_json=as_json)
    else:
        _compare(directory, other, history, _read(other), rtol, as_json=as_json)


def _read(directory: str) -> History:
    store = open_store(directory)
    history = read_journal(store)
    if not history.runs:
        raise CheckpointNotFound(
            f"there is no audit journal in {store.location} ({FOLDER}); give the directory of a "
            "run whose Manager has audit_every="
        )
    return history


def _tell(directory: str, history: History, rtol: float | None, *, as_json: bool) -> None:
    documents = [_describe(run, history, rtol) for run in history.runs]
    if as_json:
        echo_json({"directory": open_store(directory).location, "runs": documents})
    else:
        lines = [click.style(printable(directory), bold=True), ""]
        for document in documents:
            lines += _show(document)
        echo_lines(lines)
    if any(document["same"] is False for document in documents):
        click.get_current_context().exit(DAMAGED)


def _describe(run: Run, history: History, rtol: float | None) -> dict[str, Any]:
    steps = sorted(run.lines)
    found, compared = None, list[int]()
    if run.resumed_from is not None:
        expected = history.expected(run.resumed_from, before=run.id)
        compared = [step for step in steps if step in expected]
        pairs = [(expected[step], run.lines[step]) for step in compared]
        found = _first_difference(pairs, history, rtol)
    if found is None and rtol is None:
        found = next((one for one in run.verdicts if not one.get("same")), None)
        same_by_tolerance = any(one.get("same") for one in run.verdicts)
    else:
        same_by_tolerance = False
    message = found.message if isinstance(found, Divergence) else (found or {}).get("message")
    # A manager with audit_rtol= has found exact differences to be none.
    if isinstance(found, Divergence) and rtol is None:
        verdicts = {one["step"]: one.get("same") for one in run.verdicts}
        if verdicts.get(found.step):
            message, same_by_tolerance = None, True
    same = None if not compared and not same_by_tolerance and message is None else message is None
    at = found.step if isinstance(found, Divergence) else (found or {}).get("step")
    return {
        "run": run.id,
        "time": run.about.get("time"),
        "resumed_from": run.resumed_from,
        "steps": [steps[0], steps[-1]] if steps else [],
        "audited": len(steps),
        "compared": len(compared),
        "same": same,
        "step": None if message is None else at,
        "message": message,
        "leaves": list(found.leaves) if isinstance(found, Divergence) and message else [],
        "devices": run.about.get("devices"),
        "processes": run.about.get("processes"),
        "versions": run.about.get("versions"),
    }


def _show(document: dict[str, Any]) -> list[str]:
    resumed = document["resumed_from"]
    begun = "began" if resumed is None else f"resumed from step {resumed}"
    steps = document["steps"]
    span = f"steps {steps[0]} to {steps[-1]}" if steps else "no audited step"
    head = f"{document['run'][:8]}  {begun}, {span}, {human_age(document['time'])}"
    if document["same"] is None:
        return [head if resumed is None else f"{head}: no step to compare"]
    if document["same"]:
        return [f"{head}: the same run ({count_of(document['compared'], 'step')} compared)"]
    message = printable(document["message"])
    return [click.style(f"{head}: it differs", fg="red"), f"          {message}"]


def _compare(
    directory: str,
    other: str,
    history: History,
    others: History,
    rtol: float | None,
    *,
    as_json: bool,
) -> None:
    mine = {line.step: line for line in history.lines()}
    theirs = {line.step: line for line in others.lines()}
    common = sorted(mine.keys() & theirs.keys())
    found = _first_difference([(mine[s], theirs[s]) for s in common], history, rtol)
    if as_json:
        echo_json(
            {
                "runs": [open_store(one).location for one in (directory, other)],
                "compared": len(common),
                "same": found is None if common else None,
                "step": found.step if found else None,
                "cause": found.cause if found else None,
                "leaves": list(found.leaves) if found else [],
            }
        )
    elif found is None:
        said = "the same run" if common else "nothing can be said"
        echo_lines([f"{count_of(len(common), 'step')} compared: {said}"])
    else:
        agreed = [step for step in common if step < found.step]
        until = f"the same up to step {agreed[-1]}; " if agreed else ""
        echo_lines([f"{until}{printable(found.message)}"])
    if found is not None:
        click.get_current_context().exit(DAMAGED)


def _first_difference(
    pairs: Sequence[tuple[Line, Line]], history: History, rtol: float | None
) -> Divergence | None:
    for then, now in pairs:
        found = find_divergence(then, now, history=history, rtol=rtol)
        if found is not None:
            return found
    return None
