"""Which directory names mean a step, and which step: names alone, no disk, no JAX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_MOST_LISTED = 10

_STEP_NAME = re.compile(r"(?:step_)?([0-9]{1,200})")
"""No file system takes longer names, and Python reads no number of any length."""
_PREFIXED = re.compile(r".+_([0-9]{1,200})")


def name_of(step: int) -> str:
    """The name that a Manager gives to a new step: `step_00000007`."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a directory of this name holds: `step_00000100`, `step_100`, `0100`, `100`."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def steps_among(names: Iterable[str]) -> dict[int, list[str]]:
    """The steps that these names of one directory mean, ascending, each with its names.

    Of several names for one step the manager's own comes first, the others follow in order.
    """
    found: dict[int, list[str]] = {}
    for name in sorted(names):
        step = step_of(name)
        if step is not None:
            found.setdefault(step, []).append(name)
    return {step: _own_first(step, found[step]) for step in sorted(found)}


def prefixed_steps(names: Iterable[str]) -> dict[int, list[str]]:
    """The steps, ascending, that names with any prefix mean, as Orbax may have: `ckpt_100`."""
    found: dict[int, list[str]] = {}
    for name in sorted(names):
        match = _PREFIXED.fullmatch(name)
        if match and step_of(name) is None:
            found.setdefault(int(match[1]), []).append(name)
    return dict(sorted(found.items()))


def names_of_step(wanted: str | int, names: Iterable[str]) -> list[str]:
    """Which of the names in one directory mean the step that is `wanted`, the preferred first.

    `7`, `"7"`, `"007"` and `"step_7"` all mean `step_00000007`, if that is there. None of them for
    text that is no step.
    """
    number = step_of(wanted) if isinstance(wanted, str) else wanted
    return [] if number is None else steps_among(names).get(number, [])


def list_steps(steps: Sequence[int]) -> str:
    """For a message: all of a few steps, of many how many and the first and last."""
    if len(steps) > _MOST_LISTED:
        return f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
    return ", ".join(str(step) for step in steps) or "none"


def _own_first(step: int, names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: name != name_of(step))
