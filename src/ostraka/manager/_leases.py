"""What keeps steps from being deleted before they were read. No JAX.

A reader that watches a run has a lease: an empty file in the root, which it renews as a claim's
marker is renewed, and which is that of a dead reader once it is overdue by the store's own clock.
The name says whose it is and what it covers:

    _LEASE-HOST.PID.RANDOM-backlog-64-step-7    step 7, which is being read, and 64 after it
    _LEASE-HOST.PID.RANDOM-backlog-64-from-8    64 steps from 8 on, which are waited for

So it is a cursor: a reader that keeps up keeps one step, one that has fallen behind as many more as
its backlog allows, the oldest first. Without `-backlog-64` it is 0, and a lease covers the one step
that is read, or waited for. A reader that moves on puts its next lease before it removes the last
one, and of several leases of one reader only the highest counts.

Who deletes a step that a reader has yet to come to, since its backlog is full or because a user
wants it, leaves it a note, one for each reader, with the first and the last of these steps:

    _LEASE-HOST.PID.RANDOM-missed-72-79

The reader logs it when it comes to a later step, and removes it.

No step is deleted under a reader's hands. Who deletes a step claims its directory first, then looks
for leases, then deletes `_METADATA`. A reader puts its lease first, then looks at the directory,
and reads only if `_METADATA` is there and no claim. So either the lease was there when the other
looked, and the step stays; or it came later, and then the reader finds the claim, or finds the step
gone. If it finds the claim it looks again later: the step is gone then, or was spared. Only one who
stands still for longer than a marker lives, in the midst of this, can break it.
"""

from __future__ import annotations

import os
import re
import socket
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from ostraka.storage import Marker, Store, is_overdue

_PREFIX = "_LEASE-"
_NAME = re.compile(
    _PREFIX + r"(.+?)(?:-backlog-([0-9]{1,200}))?-(from|step)-([0-9]{1,200})", re.DOTALL
)
_NOTE = re.compile(_PREFIX + r"(.+)-missed-([0-9]{1,200})-([0-9]{1,200})", re.DOTALL)
_NO_STEP = 1 << 63
"""Higher than any step of a Manager."""
_MAX_HOST = 60


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of one reader that counts, by its name."""

    name: str
    reader: str
    number: int
    is_read: bool
    """Whether the step `number` is being read, and not yet to come."""
    backlog: int

    def has_yet_to_see(self, step: int) -> bool:
        return step > self.number if self.is_read else step >= self.number

    def covers(self, step: int, there: Collection[int]) -> bool:
        """Whether it keeps a step, if the steps `there` are there."""
        if self.is_read and step == self.number:
            return True
        unseen = sorted(filter(self.has_yet_to_see, there))
        return step in unseen[: self.backlog if self.is_read else max(self.backlog, 1)]


def is_lease(name: str) -> bool:
    """Whether a name in a root is that of a lease, or of a note to one who has a lease."""
    return _NAME.fullmatch(name) is not None or _NOTE.fullmatch(name) is not None


class Leases:
    """The leases in a root, for those who delete steps."""

    def __init__(self, store: Store):
        self._store = store
        self._known: set[str] = set()
        """The readers that were there at the last look."""

    def living(self, now_s: float | None) -> list[Lease]:
        """Of each living reader the one that counts; None for a time that is not known."""
        return [lease for lease in self._look()[0] if self._is_living(lease, now_s)]

    def release_step(
        self, step: int, *, there: Collection[int], now_s: Callable[[], float]
    ) -> str | None:
        """A living reader for which a step must stay; None if it may be deleted now.

        To be called while the step is claimed. `there` are the steps among which a reader's backlog
        is chosen; with none of them only a step that is being read must stay. `now_s` tells the
        time by the store's clock. If it may be deleted, then readers that have yet to see it have a
        note of that, and the leases of dead readers that covered it are removed.
        """
        leases, names = self._look()
        for lease in leases:
            if not lease.covers(step, there):
                continue
            file = self._store.look(lease.name)
            if file is None:  # Its reader has moved on meanwhile, perhaps to this very step.
                return self.release_step(step, there=there, now_s=now_s)
            if not is_overdue(file, now_s()):
                return lease.reader
            self._store.delete(lease.name)
        for lease in leases:
            if lease.backlog and lease.has_yet_to_see(step) and self._is_living(lease, now_s()):
                self._note_missed(lease.reader, step, names)
        return None

    def _look(self) -> tuple[list[Lease], list[str]]:
        names = self._store.list()
        leases = _latest_of_each(names)
        if not self._known <= leases.keys():
            # A reader has left; or it moved on while the names were listed, which is no single
            # moment, and the last name was gone before its turn and the next came after it.
            names = sorted({*names, *self._store.list()})
            leases = _latest_of_each(names)
        self._known = set(leases)
        return list(leases.values()), names

    def _is_living(self, lease: Lease, now_s: float | None) -> bool:
        file = self._store.look(lease.name)
        return file is None or now_s is None or not is_overdue(file, now_s)

    def _note_missed(self, reader: str, step: int, names: Iterable[str]) -> None:
        before = _notes_for(reader, names)
        first = min((step, *(note[1] for note in before)))
        last = max((step, *(note[2] for note in before)))
        name = f"{_PREFIX}{reader}-missed-{first}-{last}"
        if name in (note[0] for note in before):
            return
        self._store.touch(name, create=True)
        for note in before:
            self._store.delete(note[0])


def remove_dead_leases(store: Store) -> list[str]:
    """Remove the leases of dead readers, and notes to them, from a root; returns their names."""
    names = list(filter(is_lease, store.list()))
    if not names:
        return []
    # A lease that covers nothing, for its time alone.
    clock = Marker(store, _name_of(_new_reader(), 0, "from", _NO_STEP))
    clock.put()
    try:
        now = store.look(clock.name)
        files = filter(None, map(store.look, filter(_NAME.fullmatch, names)))
        dead = {file.name for file in files if now and is_overdue(file, now.changed_s)}
    finally:
        clock.remove()
    living = {match[1] for match in map(_NAME.fullmatch, names) if match and match[0] not in dead}
    dead.update(
        match[0] for match in map(_NOTE.fullmatch, names) if match and match[1] not in living
    )
    for name in dead:
        store.delete(name)
    return sorted(dead)


class ReaderLease:
    """The lease of one reader, which ends with `release`, with this object or with the program.

    Its methods raise FileNotFoundError if the root is not there, StoreError if it may not be
    written to.
    """

    def __init__(self, store: Store, *, backlog: int):
        self._store = store
        self._reader = _new_reader()
        self._backlog = backlog
        self._held: list[Marker] = []
        """Ascending: the last one counts."""
        self._end = weakref.finalize(
            self, _remove_all, store, self._reader, self._held, os.getpid()
        )

    @property
    def is_held(self) -> bool:
        return bool(self._held)

    def wait_from(self, number: int) -> None:
        """Cover what is to come from `number` on, and nothing else."""
        self._put("from", number)
        self.keep_latest()

    def begin(self, number: int) -> None:
        """Cover this step, and what is to come; `keep_latest` or `take_back` must follow."""
        self._put("step", number)

    def keep_latest(self) -> None:
        """Remove all but what was covered last."""
        while len(self._held) > 1:
            self._held[0].remove()
            del self._held[0]

    def take_back(self) -> None:
        """Cover what was covered before the last `begin`."""
        self._held.pop().remove()

    def now_s(self) -> float | None:
        """The time of the store's own clock, a few seconds ago at most; None without a lease."""
        file = self._store.look(self._held[-1].name) if self._held else None
        return None if file is None else file.changed_s

    def missed_before(self, number: int | None, names: Iterable[str]) -> tuple[int, int] | None:
        """The first and the last step that were deleted before this reader came to them.

        `names` are those in the root. None if there are none, or none before `number`. They are
        told once.
        """
        notes = _notes_for(self._reader, names)
        if not notes:
            return None
        first = min(note[1] for note in notes)
        if number is not None and first >= number:
            return None
        for note in notes:
            self._store.delete(note[0])
        return first, max(note[2] for note in notes)

    def release(self) -> None:
        """Cover nothing any more, for good; again is as good as once."""
        self._end()

    def _put(self, kind: str, number: int) -> None:
        marker = Marker(self._store, _name_of(self._reader, self._backlog, kind, number))
        # Known before it is there: if a signal ends the program in between, it is removed, too.
        self._held.append(marker)
        try:
            marker.put()
        except Exception:
            self._held.pop()
            raise


def _remove_all(store: Store, reader: str, held: list[Marker], process: int) -> None:
    if not held or os.getpid() != process:
        return  # A forked child: they are its parent's.
    while held:
        with suppress(OSError):  # Then it ends when it is overdue.
            held.pop().remove()
    with suppress(OSError):  # Then the next manager or `ostraka gc` removes them.
        for note in _notes_for(reader, store.list()):
            store.delete(note[0])


def _latest_of_each(names: Iterable[str]) -> dict[str, Lease]:
    """By reader, its lease that counts."""
    latest: dict[str, Lease] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        lease = Lease(name, match[1], int(match[4]), match[3] == "step", int(match[2] or 0))
        other = latest.get(lease.reader, lease)
        latest[lease.reader] = max(lease, other, key=lambda one: (one.number, one.is_read))
    return latest


def _notes_for(reader: str, names: Iterable[str]) -> list[tuple[str, int, int]]:
    """The notes to a reader: name, first and last step."""
    matches = filter(None, map(_NOTE.fullmatch, names))
    return [(match[0], int(match[2]), int(match[3])) for match in matches if match[1] == reader]


def _new_reader() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:_MAX_HOST]
    return f"{host}.{os.getpid()}.{os.urandom(4).hex()}"


def _name_of(reader: str, backlog: int, kind: str, number: int) -> str:
    return f"{_PREFIX}{reader}{f'-backlog-{backlog}' if backlog else ''}-{kind}-{number}"
