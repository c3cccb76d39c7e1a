"""One writer at a time in a place, told by a marker file that its owner renews.

A claim is a file, `_CLAIM-` and 32 hex digits (the scope of its owner's lock, and a random
number), whose owner sets its time anew every `RENEW_EVERY_S`. Its age is the difference to the
marker that whoever asks has just written itself: both times are the store's, and no clock of a
machine matters. A marker that has not been renewed for `DEAD_AFTER_S` is that of a dead owner.
Whoever takes a claim writes its marker first and looks for others then, so that of two at least one
sees the other. If both do, both remove their markers, wait for a random moment and try again.

Where the store has locks, they answer at once: who finds the place locked raises Busy, and who
gets the lock knows that other claims of the same scope are dead: those of this machine and this
mount. Of others the lock may know nothing, as on network file systems that lock locally: there the
markers decide.

An owner that stood still for longer than `DEAD_AFTER_S` may wake up after another took its place.
It must find out before it commits (`check`); and since that can't be one event with the commit
itself, whoever takes over deletes the temporary files of those before it, before it looks at what
is committed: a commit that was about to happen then fails. A bucket has no temporary files;
`_leftovers` says what protects a commit there.
"""

from __future__ import annotations

import _thread
import os
import random
import re
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from ostraka._lifetime import after_fork
from ostraka.errors import Busy
from ostraka.storage._base import FileInfo, PlaceLock, Store

RENEW_EVERY_S = 5.0
DEAD_AFTER_S = 30.0
_PAUSES_S = (0.1, 0.3, 1.0, 2.0)
"""The longest pauses of one that gives way to another."""
_PREFIX = "_CLAIM-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")
NO_SCOPE = "0" * 16
"""In the name of a claim whose owner has no lock."""


class Marker:
    """An empty file that this process renews, from `put` until `remove`."""

    def __init__(self, store: Store, name: str):
        self._store = store
        self.name = name
        self._renewing: _thread.LockType | None = None

    def put(self) -> None:
        self._store.touch(self.name, create=True)
        self._renewing = _thread.allocate_lock()
        self._renewing.acquire()
        _young[self.name] = (self._store, self._renewing)
        _start_timer()

    def remove(self) -> None:
        try:
            self._store.delete(self.name)
        finally:
            _young.pop(self.name, None)
            renewing, self._renewing = self._renewing, None
            if renewing is not None:
                renewing.release()


class Claim:
    """The right to write to a place, which one at a time can have.

    Only the process and the thread that took it may release it.
    """

    def __init__(self, store: Store):
        self._store = store
        self._lock: PlaceLock | None = None
        self._marker = Marker(store, "")
        self._process = 0
        self.names: list[str] = []
        """The names in the place when it was taken, without those of claims."""
        self.found_dead = False
        """Whether a writer before this one has died there."""

    def take(self, *, wait: bool, rely_on_lock: bool = False) -> None:
        """Take it.

        Raises Busy if another has it. Whether the owner of a marker is alive may not be known at
        once: then it waits until the marker is renewed or too old, or without `wait` raises Busy.
        With `rely_on_lock` a marker is written only where the lock does not decide alone.
        """
        self._process = os.getpid()
        try:
            self._lock = self._store.lock()
            if self._lock is not None and not self._lock.is_in_place():
                raise _removed(self._store)
            if self._lock is None or not rely_on_lock or any(map(is_claim, self._store.list())):
                self._mark(wait=wait)
        except FileNotFoundError as error:
            self.release()
            raise _removed(self._store) from error
        except BaseException:
            self.release()
            raise

    def _mark(self, *, wait: bool) -> None:
        scope = NO_SCOPE if self._lock is None else self._lock.scope
        self._marker.name = f"{_PREFIX}{scope}{os.urandom(8).hex()}"
        self._marker.put()
        names = self._store.list()
        if names == [self._marker.name]:
            return
        for pause_s in _PAUSES_S:
            # Two that begin at the same moment see each other. Both give way, and come back at
            # different times; an owner that was there before is still there then.
            if not self._has_others(names) or not self._has_rival():
                break
            self._marker.remove()
            time.sleep(random.uniform(0, pause_s))
            self._marker.put()
            names = self._store.list()
        if self._has_others(names):
            self._remove_dead(wait=wait)
            names = self._store.list()
        self.names = [name for name in names if not is_claim(name)]

    def _has_rival(self) -> bool:
        """Whether another may have begun just now."""
        times_s = {file.name: file.changed_s for file in self._store.files(_PREFIX)}
        mine_s = times_s.pop(self._marker.name, 0.0)
        return any(
            mine_s - other_s < RENEW_EVERY_S and not self._is_unlocked(name)
            for name, other_s in times_s.items()
        )

    def _has_others(self, names: Sequence[str]) -> bool:
        return any(is_claim(name) for name in names if name != self._marker.name)

    def check(self) -> None:
        """Raise Busy if another has taken it, for this one stood still too long."""
        if not self._is_marked():
            raise Busy(
                f"another save to {self._store.location} took this one for dead, since it had "
                f"stood still for more than {DEAD_AFTER_S:g} s; save again"
            )

    def is_held(self) -> bool:
        """Whether the place still has this claim, and is still the one that was claimed."""
        if self._lock is not None and not self._lock.is_in_place():
            return False
        return not self._marker.name or self._is_marked()

    def now_s(self) -> float:
        """The time of the store's own clock, as the marker has it, a few seconds ago at most."""
        marker = self._store.look(self._marker.name) if self._marker.name else None
        if marker is None:
            raise Busy(f"another save to {self._store.location} has begun")
        return marker.changed_s

    def release(self) -> None:
        """Let others have the place; again is as good as once."""
        if os.getpid() != self._process:
            return  # A forked child: it is its parent's.
        try:
            if self._marker.name:
                self._marker.remove()
        except OSError:
            pass  # The next save removes it.
        finally:
            self._marker.name = ""
            lock, self._lock = self._lock, None
            if lock is not None:
                lock.release()

    def _is_marked(self) -> bool:
        # To look is not enough: a network file system may answer from what it remembers.
        try:
            self._store.touch(self._marker.name, create=False)
        except FileNotFoundError:
            return False
        return True

    def _remove_dead(self, *, wait: bool) -> None:
        """Delete the markers of dead owners; raise Busy if one is alive."""
        first_seen: dict[str, FileInfo] = {}
        while True:
            files = {file.name: file for file in self._store.files(_PREFIX)}
            mine = files.pop(self._marker.name, None)
            if mine is None:
                self.check()
                continue  # A list of a moment ago.
            if not files:
                return
            for other in files.values():
                before = first_seen.setdefault(other.name, other)
                age_s = mine.changed_s - other.changed_s
                if self._is_unlocked(other.name) or is_overdue(other, mine.changed_s):
                    self._store.delete(other.name)
                    self.found_dead = True
                elif not wait or before.version != other.version:
                    raise Busy(_explain_busy(self._store, age_s, before, other))
            if wait:
                time.sleep(self._store.parts.look_every_s)
            self._store.touch(self._marker.name, create=False)

    def _is_unlocked(self, marker: str) -> bool:
        """Whether its owner would hold the lock that this one has, if it were alive."""
        return self._lock is not None and marker.startswith(f"{_PREFIX}{self._lock.scope}")


@contextmanager
def claimed(store: Store, *, wait: bool = False) -> Generator[Claim]:
    """Hold a place; raises `errors.Busy` while another does."""
    claim = Claim(store)
    claim.take(wait=wait)
    try:
        yield claim
    finally:
        claim.release()


def refuse_claimed(store: Store) -> None:
    """Raise Busy if a writer may be alive in a place, without writing anything."""
    lock = store.lock()
    try:
        for name in filter(is_claim, store.list()):
            if lock is None or not name.startswith(f"{_PREFIX}{lock.scope}"):
                raise Busy(f"another save to {store.location} may be under way")
    finally:
        if lock is not None:
            lock.release()


def is_overdue(marker: FileInfo, now_s: float) -> bool:
    """Whether a marker's owner is dead, at a time of the store's own clock."""
    return now_s - marker.changed_s > DEAD_AFTER_S


def is_claim(name: str) -> bool:
    """Whether a name is that of a claim's marker."""
    return _NAME.fullmatch(name) is not None


# Renewing. A small save must not pay for a thread of its own: a timer, which touches no store,
# looks every `RENEW_EVERY_S` for claims that are new since then, and starts a thread for each.
# These don't wait for each other, as a store may hang.

_young: dict[str, tuple[Store, _thread.LockType]] = {}
"""Claims that no thread renews yet, by marker: the store, and a lock whose release ends it."""
_timer = _thread.allocate_lock()
"""Held by the timer while there is one."""


def _start_timer() -> None:
    if _timer.acquire(blocking=False):
        try:
            _thread.start_new_thread(_start_renewing, ())
        except BaseException:
            _timer.release()
            raise


def _start_renewing() -> None:
    while True:
        time.sleep(RENEW_EVERY_S)
        for marker in list(_young):
            claim = _young.pop(marker, None)
            if claim is not None:
                _thread.start_new_thread(_renew, (marker, *claim))
        if not _young:
            _timer.release()
            if _young:  # It came in between, and may have found the timer still held.
                _start_timer()
            return


def _renew(marker: str, store: Store, end: _thread.LockType) -> None:
    """Until `end` is released or the marker is gone."""
    while True:
        try:
            store.touch(marker, create=False)
        except FileNotFoundError:
            return
        except OSError:
            pass  # The store may be back at the next time.
        if end.acquire(timeout=RENEW_EVERY_S):
            return


def _forget_after_fork() -> None:
    _young.clear()
    if _timer.locked():
        _timer.release()


after_fork(_forget_after_fork)


def _explain_busy(store: Store, age_s: float, before: FileInfo, now: FileInfo) -> str:
    text = f"another save to {store.location} is under way"
    if before.version != now.version:
        return f"{text}; wait for it, or save elsewhere"
    left_s = max(DEAD_AFTER_S - age_s, 0) + 1
    return f"{text}, or died a moment ago; wait for it, or try again in {left_s:.0f} s"


def _removed(store: Store) -> Busy:
    return Busy(f"another save has just removed {store.location}; try again")
