"""Which steps are on disk: names, what counts as a step, how one is removed. No JAX.

The disk is the truth. A step is a directory that is named as one and holds a `_METADATA` that can
be read. Everything else in the root is somebody else's and is not touched, except for what dead
saves and deletions left behind in directories that are named as steps.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ostraka import _format
from ostraka._leftovers import committed_directory, find_leftovers, is_of_a_save
from ostraka._parallel import RenewedLock
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
    UnsupportedFormat,
    describe,
)
from ostraka.formats import open_source
from ostraka.manager._metrics import NO_METRICS, metrics_in
from ostraka.storage import LocalStore, PathLike, open_store

PIN_NAME = "_PINNED"
"""An empty file of this name in a step's directory: retention leaves the step alone."""

_LOOK_AGAIN = 10
"""So many times at most, if what is there changes while it is being looked at."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step on disk: its number, when it was saved, its metrics, whether it is pinned."""

    step: int
    saved_s: float | None
    """Seconds since 1970 by the clock of the machine that saved it; None if that can't be told."""
    metrics: Mapping[str, float]
    pinned: bool
    names: tuple[str, ...] = ()
    """The directories that hold this step; the first counts."""
    problems: tuple[Problem, ...] = field(default=(), repr=False)
    """Why it can't be read. Empty for every step that counts."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What one directory's `_METADATA` says."""

    saved_s: float | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: NO_METRICS)
    problems: tuple[Problem, ...] = ()


class Root:
    """A directory with steps in it."""

    def __init__(self, path: PathLike):
        store = open_store(path)
        if not isinstance(store, LocalStore):
            raise UnsupportedFormat(
                f"a Manager needs a directory, and {store.location} is none; use a local path or "
                "one on a mounted file system"
            )
        self.location = store.location
        self._store = store
        self._cache: dict[str, tuple[Any, _Found | None]] = {}
        # Retention runs in the background while the training loop asks what is there.
        self._looking = RenewedLock()

    def prepare(self) -> None:
        self.refuse_checkpoint(PathInTheWay)
        self._store.prepare()

    def refuse_checkpoint(self, kind: type[PathInTheWay | CheckpointNotFound]) -> None:
        """Raise if this is no place for steps, being a checkpoint itself."""
        if _format.METADATA_NAME in (self._store.list() or []):
            raise kind(
                f"{self.location} is itself a checkpoint, not a directory of steps; give a Manager "
                "the directory above it, or read this one with ostraka.restore or ostraka.open"
            )

    def path(self, name: str) -> str:
        return os.path.join(self.location, name)

    def is_link(self, name: str) -> bool:
        """Whether what lies under this name is elsewhere, and not the manager's to change."""
        return os.path.islink(self.path(name))

    def refuse_link(self, name: str) -> None:
        """Raise PathInTheWay where saving would replace what a link leads to."""
        if self.is_link(name):
            is_step = self._look(name) is not None
            remedy = f"delete step {step_of(name)} first, which removes the link alone"
            raise PathInTheWay(
                f"{self.path(name)} is a link, and saving would replace what it leads to; "
                f"{remedy if is_step else 'remove the link first'}"
            )

    def scan(self) -> list[Step]:
        """All steps in ascending order, those that can't be read included."""
        with self._looking.lock:
            there = self._store.list() or []
            named = self._look_at(there)
            for _ in range(_LOOK_AGAIN):
                # A run that keeps one step may have saved the next and deleted this meanwhile.
                before, there = there, self._store.list() or []
                if before == there:
                    break
                named = self._look_at(there)
            self._cache = {name: self._cache[name] for name in there if name in self._cache}
            return [self._step(step, named[step]) for step in sorted(named)]

    def steps(self) -> list[Step]:
        """The steps that count, in ascending order."""
        return [step for step in self.scan() if not step.problems]

    def find(self, number: int) -> Step:
        """A step that is there, readable or not. Raises CheckpointNotFound."""
        steps = self.scan()
        for step in steps:
            if step.step == number:
                return step
        raise no_such_step(self.location, number, [step.step for step in steps])

    def remove(self, number: int) -> None:
        """Delete a step, under all its names. A crash on the way never leaves half a step."""
        with self._looking.lock:
            for name in self.find(number).names:
                self._remove(name)

    def pin(self, number: int) -> None:
        with self._looking.lock:
            step = self.find(number)
            if not step.pinned:
                store = self._open(step.names[0])
                store.create(PIN_NAME, 0).finish()
                store.settle("")

    def unpin(self, number: int) -> None:
        with self._looking.lock:
            for name in self.find(number).names:
                if self.is_link(name):
                    continue  # Another run may have pinned what it leads to.
                store = self._open(name)
                store.delete(PIN_NAME)
                store.settle("")

    def clean(self) -> None:
        """Remove what dead saves and half-done deletions left behind, nothing of a live save."""
        with self._looking.lock:
            for name in self._store.list() or []:
                if step_of(name) is None or self.is_link(name):
                    continue
                try:
                    self._clean(name)
                except OSError:
                    # Rubbish that stays is no reason not to train.
                    log.exception("what is left over in %s can't be removed now", self.path(name))

    # One directory

    def _open(self, name: str) -> LocalStore:
        return LocalStore(self.path(name))

    def _step(self, number: int, names: list[str]) -> Step:
        # A damaged directory does not hide a good one of the same step.
        names.sort(key=lambda name: bool(self._known(name).problems))
        found = self._known(names[0])
        pinned = any(self._is_pinned(name) for name in names)
        return Step(number, found.saved_s, found.metrics, pinned, tuple(names), found.problems)

    def _is_pinned(self, name: str) -> bool:
        # What a link leads to is not the manager's to delete.
        return self.is_link(name) or os.path.lexists(os.path.join(self.path(name), PIN_NAME))

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
        metadata = os.path.join(self.path(name), _format.METADATA_NAME)
        try:
            status = os.stat(metadata)
        except OSError as error:
            gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
            if gone and not os.path.islink(metadata):
                return None
            # It may be a step, and the newest: what can't be seen must not pass for nothing.
            found = _Found(problems=(Problem(_format.METADATA_NAME, describe(error)),))
            self._cache[name] = (None, found)
            return found
        # A commit is a rename: the file is another one each time.
        mark = (status.st_ino, status.st_mtime_ns, status.st_size)
        if name not in self._cache or self._cache[name][0] != mark:
            self._cache[name] = (mark, _read(self._open(name)))
        return self._cache[name][1]

    def _remove(self, name: str) -> None:
        if self.is_link(name):
            os.unlink(self.path(name))
            return
        store = self._open(name)
        with store.exclusive():
            # The pin first: alone in the directory it would be in the way of the next save.
            store.delete(PIN_NAME)
            # Then what makes it a step, for good, so that not even a power failure brings back a
            # `_METADATA` whose shards are gone.
            store.delete(_format.METADATA_NAME)
            store.settle("")
            for other in store.list() or []:
                if is_of_a_save(other):
                    store.delete(other)
            store.remove_if_empty()  # other people's files stay

    def _clean(self, name: str) -> None:
        store = self._open(name)
        if not any(is_of_a_save(other) for other in store.list() or []):
            return
        with suppress(Busy, PathInTheWay, FileNotFoundError), store.exclusive():
            for other in find_leftovers(store):
                store.delete(other)
            if committed_directory(store) is None:
                store.remove_if_empty()


def no_such_step(root: str, number: int, there: list[int]) -> CheckpointNotFound:
    return CheckpointNotFound(f"there is no step {number} in {root}; it has {list_steps(there)}")


def _read(store: LocalStore) -> _Found | None:
    try:
        saved = open_source(store).saved
    except (CheckpointNotFound, NotACheckpoint):
        return None
    except Damaged as error:
        return _Found(problems=error.problems)
    except (UnsupportedFormat, OSError) as error:
        return _Found(problems=(Problem(_format.METADATA_NAME, str(error)),))
    return _Found(_saved_s(saved), metrics_in(saved.user))


def _saved_s(saved: Saved) -> float | None:
    try:
        return datetime.fromisoformat(saved.writer["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
