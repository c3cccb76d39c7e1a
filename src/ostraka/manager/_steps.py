"""Which steps are on disk: names, what counts as a step, how one is removed. No JAX.

The disk is the truth. A step is a directory that is named as one and holds a `_METADATA` that can
be read. Everything else in the root belongs to others and is not touched, except for leftovers of
dead saves and deletions in directories that are named as steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ostraka import _format
from ostraka._foreign import has_orbax_names, names_in
from ostraka._leftovers import (
    collect_garbage,
    find_leftovers,
    is_of_a_save,
    may_have_lost_metadata,
)
from ostraka._lifetime import RenewedLock
from ostraka._record import logger as log
from ostraka._source import Saved
from ostraka._step_names import list_steps, step_of, steps_among
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    PathInTheWay,
    Problem,
    StoreError,
    UnsupportedFormat,
    describe,
)
from ostraka.formats import open_source
from ostraka.formats._ostraka import open_ostraka
from ostraka.formats._safetensors_files import has_safetensors
from ostraka.manager._leases import remove_dead_leases
from ostraka.manager._metrics import NO_METRICS, metrics_in
from ostraka.storage import (
    Claim,
    PathLike,
    Store,
    claimed,
    is_claim,
    open_store,
    refuse_claimed,
)

PIN_NAME = "_PINNED"
"""An empty file of this name in a step's directory: retention leaves the step alone."""

_RETRIES = 10
"""How often a scan is repeated at most, if the listing changes meanwhile."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step on disk: its number, when it was saved, its metrics, whether it is pinned."""

    step: int
    saved_s: float | None
    """Seconds since 1970 by the clock of the machine that saved it; None if unknown."""
    metrics: Mapping[str, float]
    pinned: bool
    names: tuple[str, ...] = ()
    """The directories that hold this step; the first is read."""
    problems: tuple[Problem, ...] = field(default=(), repr=False)
    """Why it can't be read; empty if it can."""
    unsupported: str | None = field(default=None, repr=False)
    """The error message if it is intact, but needs a newer version of Ostraka."""

    @property
    def is_good(self) -> bool:
        """Whether a run can continue from it, with this version of Ostraka or a newer one."""
        return not self.problems or self.unsupported is not None


@dataclass(frozen=True, slots=True)
class _Found:
    """What one directory's `_METADATA` says."""

    saved_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: NO_METRICS)
    problems: tuple[Problem, ...] = ()
    unsupported: str | None = None


class Root:
    """A directory with steps in it."""

    def __init__(self, path: PathLike):
        self.store = open_store(path)
        self.location = self.store.location
        self._cache: dict[str, tuple[Any, _Found | None]] = {}
        self._spared: set[str] = set()
        """Directories of which it has been said that they may have lost their `_METADATA`."""
        # Retention runs in the background while the training loop may scan, too.
        self._lock = RenewedLock()

    def prepare(self) -> None:
        self.refuse_checkpoint(PathInTheWay)
        self.store.prepare()

    def refuse_checkpoint(self, kind: type[PathInTheWay | CheckpointNotFound]) -> None:
        """Raise if this directory is a checkpoint itself."""
        if _format.METADATA_NAME in self.store.list():
            raise kind(
                f"{self.location} is itself a checkpoint, not a directory of steps; give a Manager "
                "the directory above it, or read this one with ostraka.restore or ostraka.open"
            )

    def at(self, name: str) -> Store:
        """The place of a step."""
        return self.store.at(name)

    def path(self, name: str) -> str:
        return self.at(name).location

    def is_link(self, name: str) -> bool:
        """Whether this is a link, whose target is not the manager's to change."""
        return self.store.is_link(name)

    def refuse_link(self, name: str) -> None:
        """Raise PathInTheWay if saving would replace the target of a link."""
        if self.is_link(name):
            is_step = self._look(name) is not None
            remedy = f"delete step {step_of(name)} first, which removes the link alone"
            raise PathInTheWay(
                f"{self.path(name)} is a link, and saving would replace what it leads to; "
                f"{remedy if is_step else 'remove the link first'}"
            )

    def scan(self) -> list[Step]:
        """All steps in ascending order, those that can't be read included."""
        with self._lock.lock:
            there = self._names()
            named = self._look_at(there)
            for _ in range(_RETRIES):
                # A run that keeps one step may have saved the next and deleted this one.
                before, there = there, self._names()
                if before == there:
                    break
                named = self._look_at(there)
            self._forget_all_but(there)
            return [self._step(step, named[step]) for step in sorted(named)]

    def steps(self) -> list[Step]:
        """The steps that can be read, in ascending order."""
        return [step for step in self.scan() if not step.problems]

    def steps_after(self, number: int, names: Sequence[str], *, descending: bool) -> Iterator[Step]:
        """The steps above a number, those that can't be read included.

        `names` are those in the root. Each is looked at when its turn comes, so the first one costs
        no look at all the others.
        """
        named = steps_among(names)
        for step in sorted((step for step in named if step > number), reverse=descending):
            with self._lock.lock:
                found = self._look_at(named[step])
                looked_at = [self._step(step, names) for names in found.values()]
            yield from looked_at
        with self._lock.lock:
            self._forget_all_but(names)

    def find(self, number: int) -> Step:
        """A step that is there, readable or not. Raises CheckpointNotFound."""
        steps = self.scan()
        for step in steps:
            if step.step == number:
                return step
        raise no_such_step(self.location, number, [step.step for step in steps])

    def remove(self, number: int, *, spare: Callable[[Claim], bool] | None = None) -> bool:
        """Delete a step, under all its names; returns whether it is gone.

        A crash never leaves half a step. `spare` says whether to leave it alone, while each of its
        directories is claimed and before anything in it is deleted.
        """
        with self._lock.lock:
            return all(self._remove(name, spare) for name in self.find(number).names)

    def pin(self, number: int) -> None:
        with self._lock.lock:
            step = self.find(number)
            if not step.pinned:
                self.at(step.names[0]).put(PIN_NAME, b"")

    def unpin(self, number: int) -> None:
        with self._lock.lock:
            for name in self.find(number).names:
                if self.is_link(name):
                    continue  # Another run may have pinned its target.
                store = self.at(name)
                store.delete(PIN_NAME)
                store.sync("")

    def clean(self) -> None:
        """Remove leftovers of dead saves and unfinished deletions, nothing of a live save."""
        with self._lock.lock:
            for name in self._names():
                if self.is_link(name):
                    continue
                try:
                    self._clean(name)
                except OSError:
                    # Leftovers do no harm: no reason to stop the training.
                    log.exception("leftovers in %s can't be removed now", self.path(name))
            try:
                remove_dead_leases(self.store)
            except OSError:
                log.exception("leases in %s can't be removed now", self.location)

    # One directory

    def _names(self) -> list[str]:
        """The names in the root that are those of steps."""
        return [name for name in self.store.list() if step_of(name) is not None]

    def _forget_all_but(self, names: Sequence[str]) -> None:
        self._cache = {name: self._cache[name] for name in names if name in self._cache}

    def _step(self, number: int, names: list[str]) -> Step:
        # A damaged directory does not hide a good one of the same step.
        names.sort(key=lambda name: bool(self._known(name).problems))
        found = self._known(names[0])
        pinned = any(self._is_pinned(name) for name in names)
        return Step(
            number,
            found.saved_s,
            found.metrics,
            pinned,
            tuple(names),
            found.problems,
            found.unsupported,
        )

    def _is_pinned(self, name: str) -> bool:
        # The target of a link is not the manager's to delete.
        if self.is_link(name):
            return True
        with suppress(StoreError):  # Then it has problems, and is not deleted anyway.
            return self.at(name).look(PIN_NAME) is not None
        return False

    def _known(self, name: str) -> _Found:
        found = self._cache[name][1]
        assert found is not None
        return found

    def _look_at(self, there: Sequence[str]) -> dict[int, list[str]]:
        """The names of each step, the manager's own first."""
        named: dict[int, list[str]] = {}
        for step, names in steps_among(there).items():
            found = [name for name in names if self._look(name) is not None]
            if found:
                named[step] = found
        return named

    def _look(self, name: str) -> _Found | None:
        """What a directory holds, None if it is no checkpoint; read again only if replaced."""
        place = self.at(name)
        try:
            there = place.look(_format.METADATA_NAME)
        except StoreError as error:
            # It may be the newest step: a directory that can't be read must not count as none.
            problem = Problem(_format.METADATA_NAME, describe(error.__cause__ or error))
            self._cache[name] = (None, _Found(problems=(problem,)))
            return self._cache[name][1]
        if there is None:
            return None
        if name not in self._cache or self._cache[name][0] != there.version:
            self._cache[name] = (there.version, _read(place))
        return self._cache[name][1]

    def _remove(self, name: str, spare: Callable[[Claim], bool] | None) -> bool:
        if self.is_link(name):
            self.store.delete(name)
            return True
        return remove_checkpoint(self.at(name), spare=spare)

    def _clean(self, name: str) -> None:
        place = self.at(name)
        with suppress(Busy, PathInTheWay):
            leftovers = find_leftovers(place)
            if not leftovers:
                return
            is_step = place.look(_format.METADATA_NAME) is not None
            if is_step or not may_have_lost_metadata(place, leftovers):
                collect_garbage(place)
            elif name not in self._spared:
                refuse_claimed(place)  # A save that is about to commit is no loss.
                self._spared.add(name)
                log.warning(
                    "%s has all files of a checkpoint but %s: that was lost, or a save died just "
                    "before its commit; `ostraka repair %s` makes it a checkpoint, `ostraka gc` "
                    "deletes it",
                    place.location,
                    _format.METADATA_NAME,
                    place.location,
                )


def remove_checkpoint(place: Store, *, spare: Callable[[Claim], bool] | None = None) -> bool:
    """Delete the checkpoint at a place, unless `spare`; returns whether it is gone."""
    with claimed(place) as claim:
        if spare is not None and spare(claim):
            return False
        # The pin first: left alone in the directory, it would block the next save. Then the copy of
        # `_METADATA`: what is left by a deletion that died is not to be taken for a loss.
        place.delete(PIN_NAME)
        for directory in filter(_format.is_shards_directory, claim.names):
            place.delete(f"{directory}/{_format.METADATA_COPY}")
        # Then `_METADATA`, synced before any shard is deleted: after a power failure there must
        # be none without its shards.
        place.delete(_format.METADATA_NAME)
        place.sync("")
        for other in place.list():
            if is_of_a_save(other) and not is_claim(other):
                place.delete(other)
    place.remove_if_empty()  # other people's files stay
    return True


def no_such_step(root: str, number: int, there: list[int]) -> CheckpointNotFound:
    return CheckpointNotFound(f"there is no step {number} in {root}; it has {list_steps(there)}")


def _read(place: Store) -> _Found | None:
    try:
        source = open_ostraka(place)
        if source is None:
            # A manager lists, and deletes, only what it could have saved.
            names = names_in(place)
            if not has_orbax_names(names) and not has_safetensors(names):
                open_source(place)  # Raises, unless it is another format's.
            return None
        saved = source.saved
    except NotACheckpoint:
        return None
    except CheckpointNotFound:
        if place.look(_format.METADATA_NAME) is None:
            return None
        lost = Problem(_format.METADATA_NAME, "it is a link that leads nowhere")
        return _Found(problems=(lost,))
    except Damaged as error:
        return _Found(problems=error.problems)
    except UnsupportedFormat as error:
        return _Found(problems=(_problem(error),), unsupported=str(error))
    except OSError as error:
        return _Found(problems=(_problem(error),))
    return _Found(saved_s(saved), metrics_in(saved.user))


def _problem(error: Exception) -> Problem:
    return Problem(_format.METADATA_NAME, str(error))


def saved_s(saved: Saved) -> float | None:
    """When a checkpoint was saved; None if unknown."""
    try:
        return datetime.fromisoformat(saved.writer["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
