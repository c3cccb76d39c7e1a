"""Names in a run directory: steps by number, and back. Names alone, no disk, no JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

PIN_NAME = "_PINNED"
"""The empty file in a step's directory that exempts the step from retention."""
ADDED_NAME = "_METRICS"
"""The file in a step's directory with metrics that were added after its commit."""
RUN_NAME = "_RUN"
"""The file in a run directory in which its Manager says what it keeps. Nothing depends on it."""

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

    If a step has several names, the manager's own comes first, and the others follow in order.
    """
    return {
        step: sorted(found, key=lambda name: name != name_of(step))
        for step, found in _by_step(names, step_of).items()
    }


def prefixed_steps(names: Iterable[str]) -> dict[int, list[str]]:
    """The steps, ascending, that names with any prefix mean, as Orbax may have: `ckpt_100`."""

    def prefixed_step(name: str) -> int | None:
        match = _PREFIXED.fullmatch(name)
        return int(match[1]) if match and step_of(name) is None else None

    return _by_step(names, prefixed_step)


def _by_step(names: Iterable[str], find: Callable[[str], int | None]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name in sorted(names):
        step = find(name)
        if step is not None:
            found.setdefault(step, []).append(name)
    return dict(sorted(found.items()))


def possible_steps(names: Iterable[str]) -> dict[int, list[str]]:
    """All steps that these names may mean, the least likely first and the newest last.

    Steps that only names with a prefix mean come first, then the others, each ascending. Only Orbax
    gives steps a prefix, such as `ckpt_100`, and `export_2030` may be anything. So a prefixed name
    counts only below the newest step without a prefix.
    """
    names = list(names)
    usual = steps_among(names)
    # Of thousands of names, those few that are left are all that may have a prefix.
    known = {name for found in usual.values() for name in found}
    prefixed = prefixed_steps(name for name in names if name not in known)
    newest = max(usual, default=None)
    aside = {
        step: found
        for step, found in prefixed.items()
        if step not in usual and (newest is None or step < newest)
    }
    beside = {step: [*found, *prefixed.get(step, ())] for step, found in usual.items()}
    return {**aside, **beside}


def names_of_step(wanted: str | int, names: Iterable[str]) -> list[str]:
    """The names in one directory that mean the `wanted` step, the preferred first.

    `7`, `"7"`, `"007"` and `"step_7"` all mean `step_00000007`, if that exists. Empty for text that
    is no step.
    """
    number = step_of(wanted) if isinstance(wanted, str) else wanted
    return [] if number is None else possible_steps(names).get(number, [])


def list_steps(steps: Sequence[int]) -> str:
    """For a message: all steps if they are few, else their number, the first and the last."""
    if len(steps) > _MOST_LISTED:
        return f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"
    return ", ".join(str(step) for step in steps) or "none"
