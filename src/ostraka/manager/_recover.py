"""The choice of the step to resume from, and its restore: the same on every process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ostraka.common.record import logger as log
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    Problem,
    RestoreFailed,
    StoreError,
    UnsupportedFormat,
    problems_from_json,
    problems_to_json,
    warn_caller,
)
from ostraka.formats import open_source
from ostraka.formats.unknown import is_committed, likely_steps
from ostraka.integrity import verify
from ostraka.layout.file_names import steps_among
from ostraka.manager.steps import Root, Step, ascending, no_such_step
from ostraka.processes.decide import agree, decide_together
from ostraka.reading.locate import refuse_several_series
from ostraka.storage import Store

_ATTEMPTS = 10


class _Choice(NamedTuple):
    """A step to restore, and the one before it, if any."""

    step: int
    name: str
    in_mirror: bool
    problems: Sequence[Any]
    """Its damage, as JSON."""
    before: int | None


_Outcome = tuple[str, tuple[Problem, ...], Any, Exception | None]
"""The status of one restore, the damage, the value and the error.

The status is `ok`, `failed`, or one of `_STATUSES`. `follows`: another process failed.
"""
_STATUSES = ((Damaged, "damaged"), (CheckpointNotFound, "gone"), (RestoreFailed, "follows"))


@dataclass(frozen=True, slots=True)
class Places:
    """Where the steps of a run are: in its directory, and in its mirror if it has one."""

    root: Root
    mirror: Root | None

    def __str__(self) -> str:
        where = self.root.location
        return where if self.mirror is None else f"{where} or its mirror {self.mirror.location}"

    def newest(self, ignore: Collection[int] = ()) -> tuple[int | None, bool]:
        """Return the highest step that a run would resume from, and True if it is foreign.

        It is the mirror's if the root has no steps at all. None if there is none.
        """

        def is_it(found: Sequence[Step]) -> bool:
            return found[-1].is_good and found[-1].step not in ignore

        found = self.root.scan(is_it) or ([] if self.mirror is None else self.mirror.scan(is_it))
        good = [step for step in found if is_it([step])]
        return (good[-1].step, good[-1].is_foreign) if good else (None, False)

    def latest(self) -> int | None:
        """Return the highest readable step, the same on all processes, or None if there is no step.

        The mirror counts for unreadable steps of the root, and if the root has none. Raises Damaged
        if there are steps but none can be read: a run that took this for an empty directory would
        silently start from scratch.
        """
        found = decide_together(f"look at {self.root.location}", self._look_for_latest)
        return self._answer(found)

    def latest_here(self) -> int | None:
        """As `latest`, but as this process alone sees it."""
        return self._answer(self._look_for_latest())

    def _answer(self, found: dict[str, Any]) -> int | None:
        if "problems" not in found:
            return found["step"]
        damaged = Damaged(found["path"], problems_from_json(found["problems"]))
        hint = f"no step in {self} can be read: repair one, or delete them all to begin anew"
        damaged.args = (f"{damaged}; {hint}",)
        raise damaged

    def _look_for_latest(self) -> dict[str, Any]:
        def is_readable(found: Sequence[Step]) -> bool:
            return not found[-1].problems

        root, mirror = self.root, self.mirror
        own = root.scan(is_readable)
        where, every = (root, own) if own or mirror is None else (mirror, mirror.scan(is_readable))
        good = [step.step for step in every if not step.problems]
        if own and own[-1].problems:
            lost = {step.step for step in own if step.problems}
            good += lost & {copy.step for copy in self.copies() if not copy.problems}
        newest = max(good, default=None)
        for step in reversed(every):
            # It is intact: a run that resumed from an older one would repeat its work, and replace
            # it.
            if step.unsupported is not None and (newest is None or step.step > newest):
                raise UnsupportedFormat(step.unsupported)
        if every and every[-1].is_aside:
            refuse_several_series(where.store)
        if not every:
            root.warn_if_begun_elsewhere()
        if good or not every:
            return {"step": newest}
        last = every[-1]
        return {"path": where.path(last.names[0]), "problems": problems_to_json(last.problems)}

    def find(self, number: int) -> tuple[Root, Step]:
        """Return a step and where it is, as this process sees it: in the root, if it has it.

        Raises CheckpointNotFound.
        """
        try:
            return self.root, self.root.find(number)
        except CheckpointNotFound:
            if self.mirror is not None:
                with suppress(CheckpointNotFound):
                    return self.mirror, self.mirror.find(number)
            raise

    def copies(self) -> list[Step]:
        """Return the steps of the mirror. Empty if the mirror does not answer."""
        if self.mirror is None:
            return []
        try:
            return self.mirror.scan()
        except StoreError:
            log.exception("the mirror %s can't be read now", self.mirror.location)
            return []

    def warn_if_ahead(self, newest: int | None) -> None:
        """Log a step of the mirror that is later than the newest one of the root."""
        if self.mirror is None or newest is None or not self.root.scan(lambda _: True):
            return
        for step, names in reversed(steps_among(self.mirror.store.list()).items()):
            if step <= newest:
                return
            if any(is_committed(self.mirror.at(name)) for name in names):
                log.warning(
                    "the mirror %s has step %d, later than step %d, the newest in its root: a run "
                    "that finds its root empty would go on from it; delete it with `ostraka rm` if "
                    "it is of no use",
                    self.mirror.location,
                    step,
                    newest,
                )
                return


class Recovery:
    """One restore of a step, or of the newest, from a run's directory or its mirror.

    With `fallback` an earlier step is restored if this one is damaged. With `verify_first` a step
    is verified before any of its values are restored.
    """

    def __init__(self, places: Places, step: int | None, *, fallback: bool, verify_first: bool):
        self._places = places
        self._root = places.root
        self._mirror = places.mirror
        self._step = step
        self._fallback = fallback
        self._verify_first = verify_first
        self.damaged: set[int] = set()
        """Steps that turned out to be damaged in the root."""
        self._copies: set[int] = set()
        """Damaged steps that the mirror has, too."""
        self._given_up: set[int] = set()

    def run(self, restore: Callable[[Store], Any]) -> tuple[int, Any]:
        """Return the restored step, and the value that `restore` returned for its store."""
        times_gone = 0
        while times_gone <= _ATTEMPTS:
            choice = _Choice(
                *decide_together(f"choice of a step in {self._root.location}", self._decide)
            )
            status, problems, value, error = self._try(choice, restore)
            match status:
                case "damaged" if self._has_copy(choice, problems):
                    pass
                case "damaged":
                    self._report_damage(choice, problems, error)
                case "gone" if self._step is None:
                    times_gone += 1  # The retention of another run deleted it.
                case _ if error is not None:
                    raise error
                case _:
                    # If it failed, then on another process only; here everything was restored.
                    return choice.step, value
        raise CheckpointNotFound(
            f"steps of {self._root.location} were deleted while they were being restored"
        )

    # Which step

    def _decide(self) -> _Choice:
        def is_enough(found: Sequence[Step]) -> bool:
            left = [step for step in found if step.step not in self._given_up]
            return any(step.is_good for step in left[1:])

        own = {step.step: step for step in self._root.scan(is_enough, up_to=self._step)}
        copies = self._look_at_mirror(own)
        every = {**copies, **own} | {step: copies[step] for step in self._copies & copies.keys()}
        if self._step is not None and self._step not in every:
            there = {*every, *(step.step for step in self._root.scan())}
            raise no_such_step(str(self._places), self._step, sorted(there))
        left = ascending(step for step in every.values() if step.step not in self._given_up)
        if self._step is None:
            left.sort(key=lambda step: not step.is_aside)
        else:
            left = [step for step in left if step.step <= self._step]
        if not left:
            found = likely_steps(self._root.store) if not every else None
            hint = "" if found is None else f"; but {found}"
            raise CheckpointNotFound(f"there is no step in {self._places} to restore{hint}")
        chosen = left[-1]
        if chosen.is_aside and self._step is None:
            refuse_several_series(self._root.store)
        if chosen.unsupported is not None:
            raise UnsupportedFormat(chosen.unsupported)
        in_mirror = copies.get(chosen.step) is chosen
        name, problems = chosen.names[0], chosen.problems
        if self._verify_first and not problems:
            problems = verify(self._store_of(name, in_mirror), raises=False).problems
        before = next((step.step for step in reversed(left[:-1]) if step.is_good), None)
        return _Choice(chosen.step, name, in_mirror, problems_to_json(problems), before)

    def _look_at_mirror(self, own: Mapping[int, Step]) -> dict[int, Step]:
        """Return the mirror's steps, if the root does not have the wanted one.

        If the root has steps, later ones in the mirror do not count: they were deleted there.
        """
        is_enough = own if self._step is None else self._step in own
        if self._mirror is None or (is_enough and not self.damaged):
            return {}
        highest = max(own) if own and self._step is None else None
        found = self._places.copies() if is_enough else self._mirror.scan()
        return {step.step: step for step in found if highest is None or step.step <= highest}

    def _store_of(self, name: str, in_mirror: bool) -> Store:
        root = self._mirror if in_mirror else self._root
        assert root is not None
        return root.at(name)

    # How it went

    def _try(self, choice: _Choice, restore: Callable[[Store], Any]) -> _Outcome:
        if choice.problems:
            return "damaged", problems_from_json(choice.problems), None, None
        store = self._store_of(choice.name, choice.in_mirror)
        if choice.in_mirror:
            log.info("step %d is restored from the mirror, %s", choice.step, store.location)
        status, value, failure = "ok", None, None
        try:
            value = restore(store)
        except Exception as error:
            failure = error
            status = next((said for kind, said in _STATUSES if isinstance(error, kind)), "failed")
        problems = failure.problems if isinstance(failure, Damaged) else ()
        status, sent = agree(
            f"restore of step {choice.step}", [status, problems_to_json(problems)], _worst
        )
        return status, problems_from_json(sent), value, failure

    def _has_copy(self, choice: _Choice, problems: Sequence[Problem]) -> bool:
        """Return True if the mirror has the damaged step. The next attempt uses it then."""
        mirror = self._mirror
        if choice.in_mirror:
            return False
        self.damaged.add(choice.step)
        if mirror is None:
            return False

        def look() -> bool:
            return any(
                copy.step == choice.step and _is_same(self._root, choice.name, mirror, copy)
                for copy in self._places.copies()
                if not copy.problems
            )

        if not decide_together(f"look at the mirror {mirror.location}", look):
            return False
        self._copies.add(choice.step)
        damaged = Damaged(self._root.path(choice.name), problems)
        what = f"step {choice.step} is restored from the mirror {mirror.location}: {damaged}"
        log.error("%s", what)
        warn_caller(UserWarning(what))
        return True

    def _report_damage(
        self, choice: _Choice, problems: Sequence[Problem], error: Exception | None
    ) -> None:
        """Log the damage. Raise unless `fallback` is set and there is a step before it."""
        self._given_up.add(choice.step)
        store = self._store_of(choice.name, choice.in_mirror)
        damaged = Damaged(store.location, problems)
        log.error("step %d can't be restored: %s", choice.step, damaged)
        if choice.before is None:
            hint = f"{self._places} has no intact step before it"
        elif self._fallback:
            what = f"step {choice.step} can't be restored, so step {choice.before} is: {damaged}"
            warn_caller(UserWarning(what))
            return
        else:
            hint = f"the step before it is {choice.before}: pass step={choice.before}, or "
            hint += "fallback=True"
        damaged.args = (f"{damaged}; {hint}",)
        for note in getattr(error, "__notes__", []):
            damaged.add_note(note)
        raise damaged from error


def _is_same(root: Root, name: str, mirror: Root, copy: Step) -> bool:
    """Return True if root and mirror have the same save, or if the root can't say."""
    try:
        mine = open_source(root.at(name)).saved.id
    except (Damaged, OSError):
        return True
    return mine == open_source(mirror.at(copy.names[0])).saved.id


def _worst(outcomes: list[Any]) -> list[Any]:
    """Return the worst status of all processes, and the problems of all."""
    order = ["failed", "damaged", "gone", "follows", "ok"]
    status = min((status for status, _ in outcomes), key=order.index)
    return [status, [problem for _, found in outcomes for problem in found]]
