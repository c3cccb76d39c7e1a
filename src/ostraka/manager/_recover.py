"""Restore the newest step that is intact, the same one on every process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostraka._record import logger as log
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    Problem,
    RestoreFailed,
    StoreError,
    UnsupportedFormat,
    warn_caller,
)
from ostraka.formats import open_source
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
    in_mirror: bool
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


def latest_step(root: Root, mirror: Root | None) -> int | None:
    """The highest step that can be read, the same on all processes; None if there is no step.

    The mirror counts for steps that the root has and can't read, and if the root has none at all.
    Raises Damaged if there are steps and none of them can be read: a run that took this for an
    empty directory would silently start from scratch.
    """

    def look() -> dict[str, Any]:
        own = root.scan()
        where, every = (root, own) if own or mirror is None else (mirror, mirror.scan())
        good = [step.step for step in every if not step.problems]
        if own and mirror is not None and own[-1].problems:
            lost = {step.step for step in own if step.problems}
            good += lost & {copy.step for copy in _read_if_possible(mirror) if not copy.problems}
        refuse_newer(every, max(good, default=-1))
        if good or not every:
            return {"step": max(good, default=None)}
        return {"path": where.path(every[-1].names[0]), "problems": _encode(every[-1].problems)}

    found = decide_together(f"look at {root.location}", look)
    if "problems" not in found:
        return found["step"]
    damaged = Damaged(found["path"], _decode(found["problems"]))
    where = name_both(root, mirror)
    hint = f"no step in {where} can be read: mend one, or delete them all to begin anew"
    damaged.args = (f"{damaged}; {hint}",)
    raise damaged


def find_step(root: Root, mirror: Root | None, number: int) -> tuple[Root, Step]:
    """Where a step is, and what is known of it; in the root, if it has it. As this process sees it.

    Raises CheckpointNotFound.
    """
    try:
        return root, root.find(number)
    except CheckpointNotFound:
        if mirror is None:
            raise
        for step in mirror.scan():
            if step.step == number:
                return mirror, step
        raise


def _read_if_possible(mirror: Root) -> list[Step]:
    """The steps of a mirror that would be good to have; none if it can't be reached."""
    try:
        return mirror.scan()
    except StoreError:
        log.exception("the mirror %s can't be read now", mirror.location)
        return []


def name_both(root: Root, mirror: Root | None) -> str:
    """Where steps were looked for, in a message."""
    return root.location if mirror is None else f"{root.location} or its mirror {mirror.location}"


def refuse_newer(steps: Sequence[Step], since: int) -> None:
    """Raise UnsupportedFormat if a step after `since` needs a newer version of Ostraka.

    Such a step is intact: a run that continued from an older one would repeat its work, and replace
    it.
    """
    for step in reversed(steps):
        if step.unsupported is not None and step.step > since:
            raise UnsupportedFormat(step.unsupported)


class Recovery:
    """One restore from a root or its mirror, of a step and those before it."""

    def __init__(
        self,
        root: Root,
        mirror: Root | None,
        step: int | None,
        *,
        fallback: bool,
        verify_first: bool,
    ):
        self._root = root
        self._mirror = mirror
        self._step = step
        self._fallback = fallback
        self._verify_first = verify_first
        self.damaged: set[int] = set()
        """Steps that turned out to be damaged in the root."""
        self._copies: set[int] = set()
        """Those of them that the mirror has, too."""
        self._given_up: set[int] = set()

    def run(self, restore: Callable[[Store], Any]) -> tuple[int, Any]:
        """The step that was restored, and what `restore` made of its place."""
        times_gone = 0
        while times_gone <= _ATTEMPTS:
            choice = self._choose()
            outcome = self._try(choice, restore)
            match outcome.status:
                case "ok":
                    return choice.step, outcome.value
                case "damaged" if self._has_copy(choice, outcome):
                    pass
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
        found["problems"] = _decode(found["problems"])
        return _Choice(**found)

    def _decide(self) -> dict[str, Any]:
        own = {step.step: step for step in self._root.scan()}
        copies = self._look_at_mirror(own)
        every = {**copies, **own} | {step: copies[step] for step in self._copies & copies.keys()}
        if self._step is not None and self._step not in every:
            raise no_such_step(name_both(self._root, self._mirror), self._step, sorted(every))
        highest = max(every, default=-1) if self._step is None else self._step
        numbers = [n for n in sorted(every) if n <= highest and n not in self._given_up]
        left = [every[number] for number in numbers]
        if not left:
            where = name_both(self._root, self._mirror)
            raise CheckpointNotFound(f"there is no step in {where} to restore")
        chosen = left[-1]
        in_mirror = copies.get(chosen.step) is chosen
        if chosen.unsupported is not None:
            raise UnsupportedFormat(chosen.unsupported)
        before = [s.step for s in left[:-1] if s.is_good]
        name = chosen.names[0]
        problems = chosen.problems
        if self._verify_first and not problems:
            problems = verify(self._place(name, in_mirror), raises=False).problems
        return {
            "step": chosen.step,
            "name": name,
            "in_mirror": in_mirror,
            "problems": _encode(problems),
            "before": before[-1] if before else None,
        }

    def _look_at_mirror(self, own: Mapping[int, Step]) -> dict[int, Step]:
        """The mirror's steps, if the root does not have what is wanted.

        Of a root that has steps, later ones in the mirror do not count: they were deleted there.
        """
        is_enough = own if self._step is None else self._step in own
        if self._mirror is None or (is_enough and not self.damaged):
            return {}
        highest = max(own) if own and self._step is None else None
        found = _read_if_possible(self._mirror) if is_enough else self._mirror.scan()
        return {step.step: step for step in found if highest is None or step.step <= highest}

    def _place(self, name: str, in_mirror: bool) -> Store:
        root = self._mirror if in_mirror else self._root
        assert root is not None
        return root.at(name)

    # How it went

    def _try(self, choice: _Choice, restore: Callable[[Store], Any]) -> _Outcome:
        if choice.problems:
            return _Outcome("damaged", choice.problems, None, None)
        place = self._place(choice.name, choice.in_mirror)
        if choice.in_mirror:
            log.info("step %d is restored from the mirror, %s", choice.step, place.location)
        mine = _attempt(place, restore)
        status, problems = agree(
            f"restore of step {choice.step}", [mine.status, _encode(mine.problems)], _sum_up
        )
        return _Outcome(status, _decode(problems), mine.value, mine.error)

    def _has_copy(self, choice: _Choice, outcome: _Outcome) -> bool:
        """Whether the mirror has what is damaged in the root, which is to be restored then."""
        mirror = self._mirror
        if choice.in_mirror:
            return False
        self.damaged.add(choice.step)
        if mirror is None:
            return False

        def look() -> bool:
            return any(
                copy.step == choice.step and _is_same(self._root, choice.name, mirror, copy)
                for copy in _read_if_possible(mirror)
                if not copy.problems
            )

        if not decide_together(f"look at the mirror {mirror.location}", look):
            return False
        self._copies.add(choice.step)
        damaged = Damaged(self._root.path(choice.name), outcome.problems)
        what = f"step {choice.step} is restored from the mirror {mirror.location}: {damaged}"
        log.error("%s", what)
        warn_caller(UserWarning(what))
        return True

    def _report_damage(self, choice: _Choice, outcome: _Outcome) -> None:
        """Log and warn; raise unless `fallback` is set and there is a step before it."""
        self._given_up.add(choice.step)
        place = self._place(choice.name, choice.in_mirror)
        damaged = Damaged(place.location, outcome.problems)
        log.error("step %d can't be restored: %s", choice.step, damaged)
        if self._fallback and choice.before is not None:
            what = f"step {choice.step} can't be restored, so step {choice.before} is: {damaged}"
            warn_caller(UserWarning(what))
            return
        if choice.before is None:
            hint = f"{name_both(self._root, self._mirror)} has no intact step before it"
        else:
            hint = (
                f"the step before it is {choice.before}: pass step={choice.before}, or "
                "fallback=True"
            )
        damaged.args = (f"{damaged}; {hint}",)
        for note in getattr(outcome.error, "__notes__", []):
            damaged.add_note(note)
        raise damaged from outcome.error


def _is_same(root: Root, name: str, mirror: Root, copy: Step) -> bool:
    """Whether a step in the mirror is that of the root, or it can't be told any more."""
    try:
        mine = open_source(root.at(name)).saved.id
    except (Damaged, OSError):
        return True
    return mine == open_source(mirror.at(copy.names[0])).saved.id


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
