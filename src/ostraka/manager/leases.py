"""Who uses a run directory: one writer, by its lock, and readers, by their leases. No JAX.

A reader that watches a run has a lease. This is an empty file in the run directory, which the
reader renews like the marker of a claim. It expires when it is overdue by the store's own clock.
The name says who the reader is and which steps the lease covers:

    _LEASE-HOST.PID.RANDOM-backlog-64-step-7    step 7, now being read, and 64 after it
    _LEASE-HOST.PID.RANDOM-backlog-64-from-8    64 steps from 8 on, still to come

So a lease is a cursor. A reader that keeps up holds one step. A reader that is behind holds as many
more as its backlog allows, the oldest first. Without `-backlog-64` the backlog is 0, and the lease
covers the one step that is read, or waited for. A reader that moves on writes its next lease before
it removes the last one. If a reader has several leases, only the highest counts.

A step that is waited for may be deleted because the backlog is full, or because a user deletes it.
The process that deletes it logs the reader that will miss it.

A step is never deleted while it is read. A process that deletes a step claims its directory first,
then looks for leases, then deletes `_METADATA`. A reader writes its lease first, then looks at the
directory, and reads only if it finds `_METADATA` and no claim. So there are two cases. The lease
existed when the other process looked: then the step stays. Or it came later: then the reader finds
the claim, or finds the step gone. If it finds the claim, it looks again later. Only a process that
is suspended in the midst of this, for longer than a marker lives, can break the rule.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ostraka.common.record import logger as log
from ostraka.errors import Busy, PathInTheWay
from ostraka.layout.file_names import list_steps
from ostraka.storage import Claim, Expiry, Marker, Store

_PREFIX = "_LEASE-"
_NAME = re.compile(
    _PREFIX + r"(.+?)(?:-backlog-([0-9]{1,200}))?-(from|step)-([0-9]{1,200})", re.DOTALL
)
_NO_STEP = 1 << 63
"""Higher than any step of a Manager."""
_MAX_HOST = 60

_LOCK_EVERY_S = 0.1
_RETRY_S = 0.5
"""How long to try a lock at least. The parent of a forked child may die just after the fork. Then
the child has a copy of the lock until it first runs, and releases it (or closes it by exec)."""


class RootLock:
    """The lock that one Manager holds to write to a run directory."""

    def __init__(self, store: Store):
        self._store = store
        # With a store of its own: while a store is locked its names stay those of one directory,
        # and those of the root must stay those of its path.
        self._claim = Claim(store.at(""))
        self._process = 0
        """The process that has the lock. A forked child does not have it."""
        # For a manager that is garbage-collected unclosed. Not at exit, where saves may still run.
        weakref.finalize(self, self._claim.release).atexit = False

    def acquire(self, *, wait: bool) -> None:
        """Take the lock. If another manager has it, wait for it, or without `wait` raise Busy."""
        warned = False
        give_up = time.monotonic() + _RETRY_S
        while True:
            try:
                # A run directory is locked for long, and a listing of it should show steps only: no
                # marker file where the lock alone will do. Every save in it writes its own marker.
                self._claim.take(wait=True, rely_on_lock=True)
                self._process = os.getpid()
                _locks.add(self)
                return
            except Busy:
                pass
            if self._is_held_here():
                raise self._refusal("it is in this process: close it, or open this one with")
            if not wait and time.monotonic() >= give_up:
                raise self._refusal("end it, or open this one with if_busy='wait' or")
            if wait and not warned:
                log.warning("waiting for another Manager to end its work in %s", self._store)
                warned = True
            time.sleep(_LOCK_EVERY_S)

    def release(self) -> None:
        _locks.discard(self)
        self._claim.release()

    def _is_held_here(self) -> bool:
        """Return True if a manager of this process has the lock. To wait for it is a deadlock."""
        here = self._store.location
        return any(o._store.location == here and o._process == os.getpid() for o in list(_locks))

    def _refusal(self, remedy: str) -> Busy:
        return Busy(
            f"another Manager is writing to {self._store}, and only one may at a time; {remedy} "
            "read_only=True"
        )

    def check_place(self) -> None:
        """Raise if the locked directory is no longer the one at its path.

        Raises FileNotFoundError if there is none, and PathInTheWay if there is another one, or a
        link to one, which this lock does not cover.
        """
        if self._claim.is_held():
            return
        if not self._store.exists():
            missing = self._store.location
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), missing)
        raise PathInTheWay(
            f"{self._store} is no longer the directory that this Manager was opened for: "
            "somebody has put another, or a link, in its place; move it back, or open a new Manager"
        )


_locks: weakref.WeakSet[RootLock] = weakref.WeakSet()
"""The locks that this process has taken."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of one reader that counts, by its name."""

    name: str
    reader: str
    number: int
    is_read: bool
    """True if the step `number` is being read, False if the reader waits for it."""
    backlog: int

    def has_yet_to_see(self, step: int) -> bool:
        return step > self.number if self.is_read else step >= self.number

    def covered(self, there: Sequence[int]) -> set[int]:
        """Return the steps that it keeps, out of the ascending steps `there`."""
        first = (bisect_right if self.is_read else bisect_left)(there, self.number)
        most = self.backlog if self.is_read else max(self.backlog, 1)
        return {*there[first : first + most], *([self.number] if self.is_read else ())}


def is_lease(name: str) -> bool:
    """Return True if a name in a run directory is that of a lease."""
    return _NAME.fullmatch(name) is not None


class Leases:
    """The leases in a run directory, for processes that delete steps."""

    def __init__(self, store: Store):
        self._store = store
        self._known: set[str] = set()
        """The readers that had a lease at the last look."""
        self._expiry = Expiry()
        self._active: set[str] = set()
        """The leases that had not expired when all were last looked at."""

    def forget_active(self) -> None:
        """Look at every lease again before it counts as active."""
        self._active = set()

    def active(self, now_s: float | None) -> list[Lease]:
        """Return the active lease of each reader. `now_s` is None if nobody knows the time."""
        active = [lease for lease in self._list() if self._is_active(lease, now_s)]
        self._active = {lease.name for lease in active}
        return active

    def release_steps(
        self,
        steps: Sequence[int],
        *,
        there: Sequence[int],
        now_s: Callable[[], float],
        wait: bool = False,
    ) -> dict[int, str]:
        """Return the steps that must stay, each with a reader of it. You may delete the others now.

        Call this while you hold claims on all of them. The backlog of a reader counts among the
        ascending steps `there`. If `there` is empty, only the steps of active reads must stay.
        `now_s` returns the time by the store's clock. A warning names the readers that will miss a
        step. This removes expired leases that covered a step. A lease that `active` returned last
        counts as active.

        A lease may have a time in the future, since a clock was set back. It has expired if it is
        seen unchanged for long enough: over several calls, or with `wait` in this one.
        """
        leases = self._list()
        wanted = set(steps)
        kept: dict[int, str] = {}
        expired: set[str] = set()
        for lease in leases:
            covered = lease.covered(there) & wanted
            if not covered:
                continue
            is_active = lease.name in self._active
            if not is_active and not self._expiry.look(self._store, lease.name, now_s(), wait=wait):
                if self._store.look(lease.name) is None:
                    # Its reader has moved on meanwhile, perhaps to one of these.
                    return self.release_steps(steps, there=there, now_s=now_s, wait=wait)
                self._store.delete(lease.name)
                expired.add(lease.name)
                continue
            kept.update(dict.fromkeys(covered, lease.reader))
        for lease in leases:
            missed = [step for step in steps if step not in kept and lease.has_yet_to_see(step)]
            if not missed or not lease.backlog or lease.name in expired:
                continue
            if lease.name in self._active or self._is_active(lease, now_s()):
                log.warning(
                    "steps of %s are deleted before %s (host, process id, random number), which "
                    "watches it, came to them: %s; its backlog is %d",
                    self._store.location,
                    lease.reader,
                    list_steps(sorted(missed)),
                    lease.backlog,
                )
        return kept

    def _list(self) -> list[Lease]:
        """Return the lease of each reader that counts."""
        names = _listed(self._store)
        leases = latest_of_each(names)
        if not self._known <= leases.keys():
            # A reader has left. Or it moved on while the names were listed, which is no single
            # moment: the old name was gone before its turn, and the new name came after it.
            leases = latest_of_each([*names, *_listed(self._store)])
        self._known = set(leases)
        return list(leases.values())

    def _is_active(self, lease: Lease, now_s: float | None) -> bool:
        asked_s = time.monotonic()
        file = self._store.look(lease.name)
        if file is None or now_s is None:
            return True
        return not self._expiry.has_expired(file, now_s=now_s, asked_s=asked_s)


def remove_expired_leases(store: Store, *, wait: bool = False) -> list[str]:
    """Remove the expired leases from a run directory and return their names.

    With `wait`, leases with a time in the future are watched until they are renewed or expire.
    """
    names = _listed(store)
    if not names:
        return []
    # A lease that covers nothing, for its time alone.
    clock = Marker(store, _name_of(_new_reader(), 0, "from", _NO_STEP))
    clock.put()
    try:
        now, expiry = store.look(clock.name), Expiry()
        if now is None:
            return []
        for name in names:  # All at once: each is watched from here on.
            expiry.look(store, name, now.changed_s, wait=False)
        expired = [n for n in names if expiry.look(store, n, now.changed_s, wait=wait) is None]
    finally:
        clock.remove()
    for name in expired:
        store.delete(name)
    return sorted(expired)


class ReaderLease:
    """The lease of one reader. It ends with `release`, with this object or with the program.

    Its methods raise FileNotFoundError if there is no run directory, and StoreError if that can't
    be written to.
    """

    def __init__(self, store: Store, *, backlog: int):
        self._store = store
        self._reader = _new_reader()
        self._backlog = backlog
        self._held: list[Marker] = []
        """Ascending: the last one counts."""
        self._end = weakref.finalize(self, _remove_all, self._held, os.getpid())

    @property
    def is_held(self) -> bool:
        return bool(self._held)

    def wait_from(self, number: int) -> None:
        """Cover the steps to come from `number` on, and nothing else."""
        self._put("from", number)
        self.keep_latest()

    def begin(self, number: int) -> None:
        """Cover this step and later ones. `keep_latest` or `take_back` must follow."""
        self._put("step", number)

    def keep_latest(self) -> None:
        """Remove all markers but the last."""
        while len(self._held) > 1:
            self._held[0].remove()
            del self._held[0]

    def take_back(self) -> None:
        """Undo the last `begin`."""
        self._held.pop().remove()

    def now_s(self) -> float | None:
        """Return the time of the store's own clock, a few seconds ago. None without a lease."""
        file = self._store.look(self._held[-1].name) if self._held else None
        return None if file is None else file.changed_s

    def release(self) -> None:
        """End the lease for good. A second call does nothing."""
        self._end()

    def _put(self, kind: str, number: int) -> None:
        marker = Marker(self._store, _name_of(self._reader, self._backlog, kind, number))
        # Listed before it is written: if a signal ends the program in between, it is removed, too.
        self._held.append(marker)
        try:
            marker.put()
        except Exception:
            self._held.pop()
            raise


def _remove_all(held: list[Marker], process: int) -> None:
    # In a forked child the lease is its parent's.
    while held and os.getpid() == process:
        with suppress(OSError):  # Then it expires.
            held.pop().remove()


def _listed(store: Store) -> list[str]:
    """Return the names of leases in a run directory: few, beside thousands of steps."""
    return [name for name in store.list() if name.startswith(_PREFIX) and is_lease(name)]


def latest_of_each(names: Sequence[str]) -> dict[str, Lease]:
    """Return the lease of each reader that counts, by reader."""
    latest: dict[str, Lease] = {}
    for match in filter(None, map(_NAME.fullmatch, names)):
        lease = Lease(match[0], match[1], int(match[4]), match[3] == "step", int(match[2] or 0))
        other = latest.get(lease.reader, lease)
        latest[lease.reader] = max(lease, other, key=lambda one: (one.number, one.is_read))
    return latest


def _new_reader() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:_MAX_HOST]
    return f"{host}.{os.getpid()}.{os.urandom(4).hex()}"


def _name_of(reader: str, backlog: int, kind: str, number: int) -> str:
    return f"{_PREFIX}{reader}{f'-backlog-{backlog}' if backlog else ''}-{kind}-{number}"
