"""The document of a run as it changes: one poller for all who look. No JAX.

It lists the directory as `manager.watch` does, but takes no lease: looking keeps no step alive. It
ends when nobody has looked for a while, and begins again with the next who does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ostraka.errors import describe
from ostraka.report.run import RunReader
from ostraka.report.schema import CheckpointDocument, RunDocument

_IDLE_S = 30.0
"""How long the poller goes on when nobody listens."""
_LEAST_PAUSE_S = 0.5
_LONGEST_LOCAL_PAUSE_S = 1.0
_LEAST_REMOTE_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 10.0
_PART = 10
"""The pause after a look, in looks, within these bounds: so that looking takes little time."""


@dataclass(frozen=True, slots=True)
class Update:
    """The run as it was at one look, or why it could not be looked at."""

    number: int
    """It grows with each change."""
    document: RunDocument | None
    problem: str | None
    changes: bytes | None
    """The difference from the update before as an event, if that had a document, too."""

    def event(self, seen: int) -> bytes:
        """A Server-Sent Event for somebody who has seen the update of a number, or 0."""
        if self.problem is not None or self.document is None:
            return _event("problem", {"problem": self.problem})
        if self.changes is not None and seen == self.number - 1:
            return self.changes
        return _event("run", self.document)


class Feed:
    """Looks at a run directory while somebody listens, and tells all of them about changes."""

    def __init__(self, reader: RunReader):
        self._reader = reader
        self._looking = threading.Lock()
        """Held while the directory is looked at: a reader belongs to one thread at a time."""
        self._changed = threading.Condition()
        """Guards all of the following."""
        self._update: Update | None = None
        self._listeners = 0
        self._left_s = 0.0
        """When the last listener left."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @contextmanager
    def listening(self) -> Generator[None]:
        """Have the directory looked at meanwhile."""
        with self._changed:
            self._listeners += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._poll, name="ostraka-board", daemon=True
                )
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._listeners -= 1
                self._left_s = time.monotonic()

    def wait(self, seen: int, timeout_s: float) -> Update | None:
        """The latest update, once there is a newer one than `seen`. None after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_newer(seen) or self._is_closed, timeout_s)
            return self._update if self._is_newer(seen) else None

    def latest(self) -> RunDocument | None:
        """The document of the last look, if there was one and it succeeded."""
        with self._changed:
            return None if self._update is None else self._update.document

    def look(self) -> RunDocument:
        """The document of the directory as it is now."""
        with self._looking:
            document = self._reader.look()
        self._note(document, None)
        return document

    def check(self, name: str, read: Callable[[], CheckpointDocument]) -> CheckpointDocument:
        """What `read`, which reads every byte of a step, has found. All who listen learn of it."""
        with self._looking:
            version = self._reader.version_of(name)
        document = read()
        found = document["integrity"]
        if found["read"]:
            with self._looking:
                self._reader.note_check(name, version, found["problems"])
            self.look()
        return document

    @property
    def is_polling(self) -> bool:
        return self._thread is not None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_newer(self, seen: int) -> bool:
        return self._update is not None and self._update.number > seen

    def _poll(self) -> None:
        changed_s = time.monotonic()
        while True:
            began_s = time.monotonic()
            try:
                with self._looking:
                    document = self._reader.look()
                is_news = self._note(document, None)
            except Exception as error:  # The store may answer again. The page says so meanwhile.
                is_news = self._note(None, describe(error))
            now_s = time.monotonic()
            changed_s = now_s if is_news else changed_s
            with self._changed:
                pause_s = self._pause_s(now_s - began_s, now_s - changed_s)
                self._changed.wait_for(lambda: self._is_closed, pause_s)
                is_idle = not self._listeners and time.monotonic() - self._left_s > _IDLE_S
                if self._is_closed or is_idle:
                    self._thread = None
                    return

    def _pause_s(self, took_s: float, quiet_s: float) -> float:
        if not self._reader.root.store.traits.is_remote:
            return min(max(_PART * took_s, _LEAST_PAUSE_S), _LONGEST_LOCAL_PAUSE_S)
        # A look takes a bucket a request for each 1,000 files, but hardly any work here.
        pause_s = max(2 * took_s, _LEAST_REMOTE_PAUSE_S, quiet_s / _PART)
        return min(pause_s, _LONGEST_PAUSE_S)

    def _note(self, document: RunDocument | None, problem: str | None) -> bool:
        """Note what a look found. Returns True if it is news."""
        with self._changed:
            last = self._update
            number = 1 if last is None else last.number + 1
            changes = None
            if last is not None and last.problem == problem:
                if document is None or last.document is None:
                    return False
                found = find_changes(last.document, document)
                if not found["steps"] and not found["gone"] and _is_same(last.document, document):
                    return False
                changes = _event("change", found)
            self._update = Update(number, document, problem, changes)
            self._changed.notify_all()
            return True


def find_changes(before: RunDocument, now: RunDocument) -> dict[str, Any]:
    """A document without the steps that are as before: `document`, `steps`, `gone`."""
    known = {row["step"]: row for row in before["steps"]}
    changed = [row for row in now["steps"] if known.pop(row["step"], None) != row]
    return {"document": {**now, "steps": []}, "steps": changed, "gone": sorted(known)}


def _is_same(before: RunDocument, now: RunDocument) -> bool:
    """True if two documents differ in nothing but their steps and what always changes."""

    def lasting(document: RunDocument) -> dict[str, Any]:
        mirror = document["mirror"]
        mirror = None if mirror is None else {**mirror, "lag_s": None}
        return {**document, "at": None, "steps": None, "space": None, "mirror": mirror}

    return lasting(before) == lasting(now)


def _event(name: str, document: Any) -> bytes:
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n".encode()
