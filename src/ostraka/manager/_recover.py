"""Restore the newest step that is intact, the same one on every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ostraka._record import logger as log
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    Problem,
    RestoreFailed,
    UnsupportedFormat,
    warn_caller,
)
from ostraka.integrity import verify
from ostraka.manager._steps import Root, Step, no_such_step
from ostraka.manager._together import agree, decide_together
from ostraka.storage import Store

_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class _Choice:
    """A step to restore, and the one before it, if any."""

    step: int
    name: str
    problems: tuple[Problem, ...]
    before: int | None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a restore went.

    `status` is `ok`, `damaged`, `gone`, `follows` (it failed because another process failed), or
    `failed` for any other reason.
    """

    status: str
    problems: tuple[Problem, ...]
    value: Any
    error: Exception | None


def latest_step(root: Root) -> int | None:
    """The highest step that can be read, the same on all processes; None if there is no step.

    Raises Damaged if there are steps and none of them can be read: a run that took this for an
    empty directory would silently start from scratch.
    """

    def look() -> dict[str, Any]:
        every = root.scan()
        good = [step.step for step in every if not step.problems]
        refuse_newer(every, max(good, default=-1))
        if good or not every:
            return {"step": max(good, default=None)}
        return {"path": root.path(every[-1].names[0]), "problems": _encode(every[-1].problems)}

    found = decide_together(f"look at {root.location}", look)
    if "problems" not in found:
        return found["step"]
    damaged = Damaged(found["path"], _decode(found["problems"]))
    hint = f"no step in {root.location} can be read: mend one, or delete them all to begin anew"
    damaged.args = (f"{damaged}; {hint}",)
    raise damaged


def refuse_newer(steps: Sequence[Step], since: int) -> None:
    """Raise UnsupportedFormat if a step after `since` needs a newer version of Ostraka.

    Such a step is intact: a run that continued from an older one would repeat its work, and replace
    it.
    """
    for step in reversed(steps):
        if step.unsupported is not None and step.step > since:
            raise UnsupportedFormat(step.unsupported)


class Recovery:
    """One restore from a root, of a step and those before it."""

    def __init__(self, root: Root, step: int | None, *, fallback: bool, verify_first: bool):
        self._root = root
        self._step = step
        self._fallback = fallback
        self._verify_first = verify_first
        self.damaged: set[int] = set()
        """Steps that turned out to be damaged."""

    def run(self, restore: Callable[[Store], Any]) -> tuple[int, Any]:
        """The step that was restored, and what `restore` made of its place."""
        times_gone = 0
        while times_gone <= _ATTEMPTS:
            choice = self._choose()
            outcome = self._try(choice, restore)
            match outcome.status:
                case "ok":
                    return choice.step, outcome.value
                case "damaged":
                    self._report_damage(choice, outcome)
                case "gone" if self._step is None:
                    times_gone += 1  # The retention of another run deleted it.
                case _ if outcome.error is not None:
                    raise outcome.error
                case _:
                    # It failed on another process only; here everything was restored.
                    return choice.step, outcome.value
        raise CheckpointNotFound(
            f"steps of {self._root.location} were deleted while they were being restored"
        )

    # Which step

    def _choose(self) -> _Choice:
        found = decide_together(f"choice of a step in {self._root.location}", self._decide)
        problems = _decode(found["problems"])
        return _Choice(found["step"], found["name"], problems, found["before"])

    def _decide(self) -> dict[str, Any]:
        every = self._root.scan()
        steps = [s for s in every if self._step is None or s.step <= self._step]
        left = [s for s in steps if s.step not in self.damaged]
        if self._step is not None and self._step not in [s.step for s in steps]:
            raise no_such_step(self._root.location, self._step, [s.step for s in every])
        if not left:
            raise CheckpointNotFound(f"there is no step in {self._root.location} to restore")
        chosen = left[-1]
        if chosen.unsupported is not None:
            raise UnsupportedFormat(chosen.unsupported)
        before = [s.step for s in left[:-1] if s.is_good]
        name = chosen.names[0]
        problems = chosen.problems
        if self._verify_first and not problems:
            problems = verify(self._root.at(name), raises=False).problems
        return {
            "step": chosen.step,
            "name": name,
            "problems": _encode(problems),
            "before": before[-1] if before else None,
        }

    # How it went

    def _try(self, choice: _Choice, restore: Callable[[Store], Any]) -> _Outcome:
        if choice.problems:
            return _Outcome("damaged", choice.problems, None, None)
        mine = _attempt(self._root.at(choice.name), restore)
        status, problems = agree(
            f"restore of step {choice.step}", [mine.status, _encode(mine.problems)], _sum_up
        )
        return _Outcome(status, _decode(problems), mine.value, mine.error)

    def _report_damage(self, choice: _Choice, outcome: _Outcome) -> None:
        """Log and warn; raise unless `fallback` is set and there is a step before it."""
        self.damaged.add(choice.step)
        damaged = Damaged(self._root.path(choice.name), outcome.problems)
        log.error("step %d can't be restored: %s", choice.step, damaged)
        if self._fallback and choice.before is not None:
            what = f"step {choice.step} can't be restored, so step {choice.before} is: {damaged}"
            warn_caller(UserWarning(what))
            return
        if choice.before is None:
            hint = f"{self._root.location} has no intact step before it"
        else:
            hint = (
                f"the step before it is {choice.before}: pass step={choice.before}, or "
                "fallback=True"
            )
        damaged.args = (f"{damaged}; {hint}",)
        for note in getattr(outcome.error, "__notes__", []):
            damaged.add_note(note)
        raise damaged from outcome.error


def _attempt(place: Store, restore: Callable[[Store], Any]) -> _Outcome:
    try:
        return _Outcome("ok", (), restore(place), None)
    except Damaged as error:
        return _Outcome("damaged", error.problems, None, error)
    except CheckpointNotFound as error:
        return _Outcome("gone", (), None, error)
    except RestoreFailed as error:
        return _Outcome("follows", (), None, error)
    except Exception as error:
        return _Outcome("failed", (), None, error)


def _sum_up(outcomes: list[Any]) -> list[Any]:
    """One outcome for all processes: the worst of theirs."""
    said = [status for status, _ in outcomes]
    problems = [problem for _, found in outcomes for problem in found]
    for status in ("failed", "damaged", "gone", "follows"):
        if status in said:
            return [status, problems]
    return ["ok", []]


def _encode(problems: Sequence[Problem]) -> list[Any]:
    return [[problem.file, problem.found, problem.leaves] for problem in problems]


def _decode(problems: list[Any]) -> tuple[Problem, ...]:
    unique = dict.fromkeys(Problem(file, found, tuple(leaves)) for file, found, leaves in problems)
    return tuple(unique)
