"""One writer at a time in a place, told by a marker file that its owner renews.

A claim is a file, `_CLAIM-` and 32 hex digits (the scope of its owner's lock, and a random
number), whose owner sets its time anew every `RENEW_EVERY_S`. Its age is the difference to the
marker that whoever asks has just written itself: both times are the store's, and no clock of a
machine matters. A marker that has not been renewed for `DEAD_AFTER_S` is that of a dead owner. So
is one that whoever asks has seen unchanged for so long by its own monotonic clock, since a store's
clock may be set back. The file says who its owner is, for messages alone.

Whoever takes a claim writes its marker first and looks for others then, so that of two at least one
sees the other. If both do, both remove their markers, wait for a random moment and try again.

Where the store has locks, they answer at once. If the place is locked, `take` raises Busy. If not,
other claims of the same scope are dead: those of this machine and this mount. The markers decide
about other machines, since network file systems may lock locally.

An owner that stood still for longer than `DEAD_AFTER_S` may wake up after another took its place.
It checks its claim before each commit and each deletion, but may stop again between the check and
the event. A fence closes that gap. In a directory each of these events is a rename. A commit
renames a file with a temporary name, a deletion moves things into a directory with such a name. An
owner makes it first, then checks. The next owner removes the marker first, then everything with
such a name, and only then looks at the place. So an event happens before that look, or it fails.

A bucket has no renames. A commit there is a conditional request. A deletion is a request that the
bucket itself refuses after some time (`_object.sign_deletions`). An owner reads the time of its
marker, renews the marker, and then signs deletions that end before anyone may take a marker of that
time for dead.
Whoever takes over first replaces the dead marker by an empty one, by a conditional request that
fails if the owner has renewed it meanwhile. So all deletions of an owner happen before a takeover.
This holds as long as the bucket's clock is not set back by more than a third of `DEAD_AFTER_S`.
"""

from __future__ import annotations

import _thread
import os
import random
import re
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from ostraka.common.record import logger as log
from ostraka.common.threads import after_fork
from ostraka.errors import Busy
from ostraka.storage._base import ANYTHING, FileInfo, PlaceLock, Store, is_fence

RENEW_EVERY_S = 5.0
DEAD_AFTER_S = 30.0
LOG_AFTER_S = 5.0
"""Who waits for longer says for whom."""
_PAUSES_S = (0.1, 0.3, 1.0, 2.0)
"""The longest pauses of one that gives way to another."""
_PREFIX = "_CLAIM-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{32}")
NO_SCOPE = "0" * 16
"""In the name of a claim whose owner has no lock."""
_OWNER = re.compile(rb"owner ([^\s]{1,255}) ([0-9]{1,20})\n")
"""How the file of a marker begins: host and process id."""
_OWNER_BYTES = 4096
"""More than any marker has."""


def _owner_note() -> bytes:
    host = re.sub(r"[^\x21-\x7e]", "_", socket.gethostname())[:255] or "_"
    return f"owner {host} {os.getpid()}\n".encode()


_note = [_owner_note()]
"""The start of the markers of this process."""


class Expiry:
    """Which markers have expired, by the store's clock or by what this process saw of them.

    It remembers when it saw each of them change, so it is to be kept for as long as markers are
    looked at.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, float]] = {}

    def has_expired(self, marker: FileInfo, *, now_s: float, asked_s: float) -> bool:
        """Return True if a marker's owner is dead.

        `now_s` is the time of the store's own clock, and `asked_s` that of the monotonic clock,
        both from before the marker was looked at: this process may have stood still since then.
        """
        seen = self._seen.get(marker.name)
        if seen is None or seen[0] != marker.version:
            seen = self._seen[marker.name] = (marker.version, time.monotonic())
        return is_overdue(marker, now_s) or asked_s - seen[1] > DEAD_AFTER_S

    def look(self, store: Store, name: str, now_s: float, *, wait: bool) -> FileInfo | None:
        """A marker, if it is there and has not expired.

        One whose time is yet to come tells nothing of its age. With `wait` it is watched until it
        is renewed or has expired.
        """
        first = None
        while True:
            asked_s = time.monotonic()
            marker = store.look(name)
            if marker is None or self.has_expired(marker, now_s=now_s, asked_s=asked_s):
                return None
            first = first or marker
            if not wait or marker.version != first.version or not is_from_future(marker, now_s):
                return marker
            time.sleep(store.traits.look_every_s)


def is_from_future(marker: FileInfo, now_s: float) -> bool:
    """Return True if a wrong clock has set a marker's time, which tells no age then."""
    return marker.changed_s - now_s > RENEW_EVERY_S


class Marker:
    """A file that this process renews, from `put` until `remove`."""

    def __init__(self, store: Store, name: str):
        self._store = store
        self.name = name
        self._renewing: _thread.LockType | None = None

    def put(self) -> None:
        self._store.touch(self.name, create=True, note=_note[0])
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
        self._touched_s = float("-inf")
        """When this last changed its marker, by the monotonic clock."""
        self._process = 0
        self.names: list[str] = []
        """The names in the place when it was taken, without those of claims and fences."""
        self.found_dead = False
        """True if a writer before this one has died there."""

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
        except BaseException as error:
            self.release()
            if isinstance(error, FileNotFoundError):
                raise _removed(self._store) from error
            raise

    def _mark(self, *, wait: bool) -> None:
        scope = NO_SCOPE if self._lock is None else self._lock.scope
        self._marker.name = f"{_PREFIX}{scope}{os.urandom(8).hex()}"
        self._touched_s = time.monotonic()
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
            self._touched_s = time.monotonic()
            self._marker.put()
            names = self._store.list()
        if self._has_others(names):
            self._remove_dead(wait=wait)
            names = self._store.list()
        self.names = [name for name in names if not is_claim(name)]
        fences = list(filter(is_fence, self.names))
        for name in fences:
            # After the markers are gone, and before anybody looks at what is committed: from now on
            # an earlier owner can neither commit nor delete.
            self._store.delete(name)
        self.names = [name for name in self.names if name not in fences]

    def _has_rival(self) -> bool:
        """Return True if another may have begun just now."""
        times_s = {file.name: file.changed_s for file in self._store.files(_PREFIX)}
        mine_s = times_s.pop(self._marker.name, 0.0)
        return any(
            abs(mine_s - other_s) < RENEW_EVERY_S and not self._is_unlocked(name)
            for name, other_s in times_s.items()
        )

    def _has_others(self, names: Sequence[str]) -> bool:
        return any(is_claim(name) for name in names if name != self._marker.name)

    def check(self) -> float | None:
        """Raise Busy if another has taken it, for this one stood still too long.

        Returns until when nobody can take it, by the clock of a bucket. None elsewhere.
        """
        now_s = time.monotonic()
        try:
            if now_s - self._touched_s < self._store.traits.touch_every_s:
                renewed_s = self._look_at_marker()
            else:
                # To look is not enough: a network file system may answer from what it remembers.
                renewed_s = self._store.touch(self._marker.name, create=False, note=_note[0])
                self._touched_s = now_s
        except FileNotFoundError as error:
            raise Busy(
                f"another save to {self._store.location} took this one for dead, since it had "
                f"stood still for more than {DEAD_AFTER_S:g} s; save again"
            ) from error
        return None if renewed_s is None else renewed_s + DEAD_AFTER_S * 2 / 3

    def _look_at_marker(self) -> float:
        """Return the time of the marker. Raises FileNotFoundError as `Store.touch` does."""
        there = self._store.look(self._marker.name)
        if there is None or not there.size:
            raise FileNotFoundError(self._marker.name)
        return there.changed_s

    def delete(self, name: str, *, version: Any = ANYTHING) -> None:
        """Delete a file or a directory that was seen under this claim, unless another has it now.

        With a `version` only the file that has it. Raises Busy, and deletes nothing then.
        """
        self._store.delete(name, version=version, check=self.check)

    def is_held(self) -> bool:
        """Return True if the place still has this claim, and is still the one that was claimed."""
        if self._lock is not None and not self._lock.is_in_place():
            return False
        try:
            if self._marker.name:
                self.check()
        except Busy:
            return False
        return True

    def now_s(self) -> float:
        """The time of the store's own clock, as the marker has it, a few seconds ago at most."""
        marker = self._store.look(self._marker.name) if self._marker.name else None
        if marker is None:
            raise Busy(f"another save to {self._store.location} has begun")
        return marker.changed_s

    def release(self) -> None:
        """Let others have the place. A second call does nothing."""
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

    def _remove_dead(self, *, wait: bool) -> None:
        """Delete the markers of dead owners; raise Busy if one is alive."""
        first_seen: dict[str, FileInfo] = {}
        expiry = Expiry()
        log_at = time.monotonic() + LOG_AFTER_S
        while True:
            asked_s = time.monotonic()
            files = {file.name: file for file in self._store.files(_PREFIX)}
            mine = files.pop(self._marker.name, None)
            if mine is None:
                self.check()
                continue  # A list of a moment ago.
            left: list[FileInfo] = []
            for other in files.values():
                before = first_seen.setdefault(other.name, other)
                expired = expiry.has_expired(other, now_s=mine.changed_s, asked_s=asked_s)
                if expired or self._is_unlocked(other.name):
                    self._remove(other)
                    self.found_dead = True
                    continue
                # Without `wait`, too, it is watched if its time tells nothing: to try again later
                # would not help.
                is_watched = wait or is_from_future(other, mine.changed_s)
                if not is_watched or before.version != other.version:
                    text = f"another save to {self._store.location} is under way"
                    if before.version != other.version:
                        raise Busy(f"{text}; wait for it, or save elsewhere")
                    left_s = max(DEAD_AFTER_S - mine.changed_s + other.changed_s, 0) + 1
                    raise Busy(
                        f"{text}, or died a moment ago; wait for it, or try again in {left_s:.0f} s"
                    )
                left.append(other)
            if not files:
                return
            if left and time.monotonic() >= log_at:
                log_at = float("inf")
                log.warning(
                    "waiting for %s, which holds the lock on %s (%s): if it has ended without a "
                    "word, it is taken over %g s after it was last active",
                    owner_of(self._store, left[0].name),
                    self._store.location,
                    left[0].name,
                    DEAD_AFTER_S,
                )
            if left:
                time.sleep(self._store.traits.look_every_s)
            self.check()

    def _remove(self, dead: FileInfo) -> None:
        """Remove a marker, unless its owner has renewed it meanwhile."""
        if not self._store.traits.deletes_fence:
            try:
                self._store.put(dead.name, b"", replaces=dead.version)
            except Busy:
                return  # It is looked at again.
        self._store.delete(dead.name)

    def _is_unlocked(self, marker: str) -> bool:
        """Return True if its owner would hold the lock that this one has, if it were alive."""
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
    """Return True if a marker's owner is dead for sure, at a time of the store's own clock."""
    return now_s - marker.changed_s > DEAD_AFTER_S


def is_claim(name: str) -> bool:
    """Return True if a name is that of a claim's marker."""
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
            if claim is None:
                continue
            try:
                _thread.start_new_thread(_renew, (marker, *claim))
            except RuntimeError:  # Too many threads for now. Try again at the next time.
                _young.setdefault(marker, claim)
        if not _young:
            _timer.release()
            if _young:  # It came in between, and may have found the timer still held.
                _start_timer()
            return


def _renew(marker: str, store: Store, end: _thread.LockType) -> None:
    """Until `end` is released or the marker is gone."""
    while True:
        try:
            store.touch(marker, create=False, note=_note[0])
        except FileNotFoundError:
            return
        except OSError:
            pass  # The store may be back at the next time.
        if end.acquire(timeout=RENEW_EVERY_S):
            return


def _forget_after_fork() -> None:
    _note[:] = [_owner_note()]
    _young.clear()
    if _timer.locked():
        _timer.release()


after_fork(_forget_after_fork)


def owner_of(store: Store, marker: str) -> str:
    """The owner of a marker, in words."""
    try:
        match = _OWNER.match(store.get(marker, _OWNER_BYTES))
    except OSError:
        match = None
    if match is None:
        return "a process of an unknown host"
    return f"process {match[2].decode()} of the host {match[1].decode()}"


def _removed(store: Store) -> Busy:
    return Busy(f"another save has just removed {store.location}; try again")
