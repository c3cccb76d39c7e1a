"""A run as HTML for notebooks: its steps, newest first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from ostraka.common.html import facts, frame, table
from ostraka.common.units import human_bytes
from ostraka.errors import count_of
from ostraka.manager.steps import Step

_MOST_METRICS = 6
_MOST_OPEN = 12
"""Longer tables are folded."""


def draw_run(root: str, state: str, steps: Sequence[Step]) -> str:
    """The steps of a directory as a table. Damaged steps are named with the first problem."""
    names = list(dict.fromkeys(name for step in reversed(steps) for name in step.metrics))
    names = names[:_MOST_METRICS]
    head = ["step", "saved", "size", *names, "remarks"]
    sizes = [step.nbytes for step in steps if step.nbytes is not None]
    return frame(
        "Manager",
        root,
        facts({"state": state, "size": human_bytes(sum(sizes)) if sizes else None}),
        table(
            count_of(len(steps), "step"),
            head,
            [_row(step, names) for step in reversed(steps)],
            is_open=len(steps) <= _MOST_OPEN,
        ),
    )


def _row(step: Step, names: Sequence[str]) -> list[str]:
    metrics = [f"{step.metrics[name]:.6g}" if name in step.metrics else "–" for name in names]
    remarks = ["pinned"] if step.pinned else []
    remarks += [str(problem) for problem in step.problems[:1]]
    size = "" if step.nbytes is None else human_bytes(step.nbytes)
    return [f"{step.step:,}", _time(step.saved_at), size, *metrics, ", ".join(remarks)]


def _time(at: float | None) -> str:
    if at is None:
        return "at an unknown time"
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "at an unknown time"
