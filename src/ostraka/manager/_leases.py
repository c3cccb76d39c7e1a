"""What keeps a step from being deleted while it is read. No JAX.

A reader that watches a run has a lease: an empty file in the root, which it renews as a claim's
marker is renewed, and which is that of a dead reader once it is overdue by the store's own clock.
The name says whose it is and what it covers:

    _LEASE-HOST.PID.RANDOM-step-7    step 7, which is being read
    _LEASE-HOST.PID.RANDOM-from-8    the first step from 8 on, which its reader waits for

A reader that moves on puts its next lease before it removes the last one, and of several leases of
one reader only the highest counts: at any time each reader keeps one step.

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
_NAME = re.compile(_PREFIX + r"(.+)-(from|step)-([0-9]{1,200})")
_NO_STEP = 1 << 63
"""Higher than any step of a Manager."""
_MAX_HOST = 60


@dataclass(frozen=True, slots=True)
class _Lease:
    name: str
    reader: str
    number: int
    is_read: bool
    """Whether it covers the step `number`, and not the first from there on."""

    def covers(self, step: int, there: Collection[int]) -> bool:
        if self.is_read:
            return step == self.number
        return step == min((s for s in there if s >= self.number), default=None)


def is_lease(name: str) -> bool:
    """Whether a name in a root is that of a lease."""
    return _NAME.fullmatch(name) is not None


def reader_of(
    store: Store, step: int, *, there: Collection[int], now_s: Callable[[], float]
) -> str | None:
    """A living reader whose lease covers a step of this root; None if there is none.

    `there` are the steps for those that wait for one. `now_s` tells the time by the store's clock.
    Leases of dead readers that cover the step are removed.
    """
    for lease in _latest_of_each(store.list()):
        if not lease.covers(step, there):
            continue
        file = store.look(lease.name)
        if file is None:  # Its reader has moved on meanwhile, perhaps to this very step.
            return reader_of(store, step, there=there, now_s=now_s)
        if not is_overdue(file, now_s()):
            return lease.reader
        store.delete(lease.name)
    return None


def remove_dead_leases(store: Store) -> list[str]:
    """Remove the leases of dead readers from a root; returns their names."""
    names = list(filter(is_lease, store.list()))
    if not names:
        return []
    # A lease that covers nothing, for its time alone.
    clock = Marker(store, _name_of(_new_reader(), "from", _NO_STEP))
    clock.put()
    try:
        now = store.look(clock.name)
        files = filter(None, map(store.look, names))
        dead = [file.name for file in files if now and is_overdue(file, now.changed_s)]
    finally:
        clock.remove()
    for name in dead:
        store.delete(name)
    return dead


class ReaderLease:
    """The lease of one reader, which ends with `release`, with this object or with the program.

    Its methods raise FileNotFoundError if the root is not there, StoreError if it may not be
    written to.
    """

    def __init__(self, store: Store):
        self._store = store
        self._reader = _new_reader()
        self._held: list[Marker] = []
        """Ascending: the last one counts."""
        self._end = weakref.finalize(self, _remove_all, self._held, os.getpid())

    @property
    def is_held(self) -> bool:
        return bool(self._held)

    def wait_from(self, number: int) -> None:
        """Cover the first step from `number` on, and nothing else."""
        self._put("from", number)
        self.keep_latest()

    def begin(self, number: int) -> None:
        """Cover this step; `keep_latest` or `take_back` must follow."""
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

    def release(self) -> None:
        """Cover nothing any more, for good; again is as good as once."""
        self._end()

    def _put(self, kind: str, number: int) -> None:
        marker = Marker(self._store, _name_of(self._reader, kind, number))
        marker.put()
        self._held.append(marker)


def _remove_all(held: list[Marker], process: int) -> None:
    if os.getpid() != process:
        return  # A forked child: they are its parent's.
    while held:
        with suppress(OSError):  # Then it ends when it is overdue.
            held.pop().remove()


def _latest_of_each(names: Iterable[str]) -> Iterable[_Lease]:
    """The lease that counts of each reader."""
    latest: dict[str, _Lease] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        lease = _Lease(name, match[1], int(match[3]), match[2] == "step")
        other = latest.get(lease.reader, lease)
        latest[lease.reader] = max(lease, other, key=lambda one: (one.number, one.is_read))
    return latest.values()


def _new_reader() -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:_MAX_HOST]
    return f"{host}.{os.getpid()}.{os.urandom(4).hex()}"


def _name_of(reader: str, kind: str, number: int) -> str:
    return f"{_PREFIX}{reader}-{kind}-{number}"
