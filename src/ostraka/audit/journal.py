"""The journal of a run: what each audited step looked like. No JAX.

It is the folder `_AUDIT` of the run directory. Each flush writes one new file of JSON lines, so
that it works in buckets. A line is one of three kinds:

    {"kind": "run", "run": "6f…", "resumed_from": 100, …}      a Manager has begun, or resumed
    {"kind": "step", "run": "6f…", "step": 101, "leaves": {…}} the fingerprints of a step
    {"kind": "verdict", "run": "6f…", "step": 101, "same": …}  a comparison with an earlier run

Many files are joined into one. The fingerprints of old steps are then dropped, but for the first
step and the newest ones: later resumes compare with these. Their digests and user values stay.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

import xxhash

from ostraka.audit.marks import Mark, Table, mark_from_json
from ostraka.common.record import logger as log
from ostraka.errors import OstrakaError
from ostraka.storage import Store

FOLDER = "_AUDIT"
_SUFFIX = ".jsonl"
_FLUSH_S = 1.0
_FLUSH_REMOTE_S = 10.0
_MOST_FILES = 64
_MOST_BYTES = 16 << 20
"""The bytes of fingerprints that are kept when files are joined."""
_MOST_STEPS = 20_000
"""The steps whose digests are kept."""


@dataclass(frozen=True, slots=True)
class Line:
    """One audited step."""

    step: int
    run: str
    digest: str
    """The digest of all leaves together."""
    leaves: Table | None
    """None if they were dropped."""
    user: Table = field(default_factory=dict[str, Mark])

    def to_json(self) -> dict[str, Any]:
        leaves = None if self.leaves is None else _marks_to_json(self.leaves)
        user = _marks_to_json(self.user)
        mine = {"kind": "step", "run": self.run, "step": self.step, "digest": self.digest}
        return {**mine, "user": user, "leaves": leaves}


def make_line(step: int, run: str, leaves: Table, user: Table) -> Line:
    bits = json.dumps([[path, mark.dtype, mark.bits] for path, mark in leaves.items()])
    return Line(step, run, xxhash.xxh3_128_hexdigest(bits.encode()), leaves, user)


def _marks_to_json(table: Table) -> dict[str, Any]:
    return {path: mark.to_json() for path, mark in table.items()}


def _marks(found: Any) -> dict[str, Mark]:
    return {str(path): mark_from_json(one) for path, one in found.items()}


@dataclass(slots=True)
class Run:
    """The steps from one start or resume to the next."""

    id: str
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lines: dict[int, Line] = field(default_factory=dict[int, Line])
    verdicts: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])

    @property
    def resumed_from(self) -> int | None:
        found = self.about.get("resumed_from")
        return found if isinstance(found, int) else None

    @property
    def diverged_at(self) -> int | None:
        """The step at which it first differed from the run that it resumed."""
        steps = [one["step"] for one in self.verdicts if not one.get("same")]
        return min(steps) if steps else None


@dataclass(frozen=True, slots=True)
class History:
    """All runs in the journal of a directory, in their order."""

    runs: Sequence[Run]
    unreadable: int = 0

    def expected(self, resumed_from: int, before: str | None = None) -> dict[int, Line]:
        """The steps that a run resumed from a step should repeat, as earlier runs had them.

        A run that has diverged counts only if the resume is from a step after that. Then the runs
        before it do not count. `before` is the id of the resumed run itself.
        """
        found: dict[int, Line] = {}
        ids = [run.id for run in self.runs]
        end = ids.index(before) if before in ids else len(ids)
        for run in reversed(self.runs[:end]):
            diverged = run.diverged_at
            if diverged is not None and resumed_from < diverged:
                continue
            for step, line in run.lines.items():
                if step > resumed_from:
                    found.setdefault(step, line)
            if diverged is not None:
                break
        return found

    def lines(self) -> Iterator[Line]:
        for run in self.runs:
            yield from run.lines.values()

    def before(self, step: int, run: str) -> Line | None:
        """A step as a run had it, or as the last run before that had it."""
        ids = [one.id for one in self.runs]
        end = ids.index(run) + 1 if run in ids else len(ids)
        lines = (one.lines.get(step) for one in reversed(self.runs[:end]))
        return next((line for line in lines if line is not None), None)

    def first(self) -> Line | None:
        """The first step whose leaves are known."""
        return next((line for line in self.lines() if line.leaves), None)


def read_journal(store: Store) -> History:
    """Read the journal in a run directory. Unreadable lines are skipped with a warning."""
    place = store.at(FOLDER)
    names = [name for name in place.list() if name.endswith(_SUFFIX)]
    texts: list[str] = []
    unreadable = 0
    for name in names:
        try:
            texts.append(place.get(name).decode("utf-8", "replace"))
        except (OstrakaError, OSError) as error:
            unreadable += 1
            log.warning("the audit journal %s/%s can't be read: %s", place.location, name, error)
    history = _parse([line for text in texts for line in text.splitlines() if line], unreadable)
    if history.unreadable:
        log.warning(
            "%d lines of the audit journal %s can't be read, and are skipped",
            history.unreadable,
            place.location,
        )
    return history


def _parse(lines: Sequence[str], unreadable: int) -> History:
    runs: dict[str, Run] = {}
    for text in lines:
        try:
            found = json.loads(text)
            run = runs.setdefault(str(found["run"]), Run(str(found["run"])))
            if found["kind"] == "run":
                run.about = found
            elif found["kind"] == "step":
                line = _parse_step(found)
                known = run.lines.get(line.step)
                if known is None or known.leaves is None or line.leaves is not None:
                    run.lines[line.step] = line
            elif found not in run.verdicts:
                run.verdicts.append({**found, "step": int(found["step"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            unreadable += 1
    return History(list(runs.values()), unreadable)


def _parse_step(found: Any) -> Line:
    leaves = None if found["leaves"] is None else _marks(found["leaves"])
    step, run = int(found["step"]), str(found["run"])
    return Line(step, run, str(found["digest"]), leaves, _marks(found["user"]))


def compact(history: History) -> list[str]:
    """The lines of a journal without the fingerprints that no resume needs any more."""
    first = history.first()
    newest = sorted(history.lines(), key=lambda line: -line.step)[:_MOST_STEPS]
    kept, room = set[int](), _MOST_BYTES
    for line in newest:
        room -= len(json.dumps(line.to_json()))
        if room < 0:
            break
        kept.add(id(line))
    there = {id(line) for line in newest}
    texts: list[str] = []
    for run in history.runs:
        texts += [json.dumps(run.about)] if run.about else []
        for line in run.lines.values():
            is_full = id(line) in kept or line is first
            if id(line) in there or line is first:
                texts.append(
                    json.dumps({**line.to_json(), **({} if is_full else {"leaves": None})})
                )
        texts += [json.dumps(verdict) for verdict in run.verdicts]
    return texts


class JournalWriter:
    """Writes lines in the background. A failure is logged, and never stops the training."""

    def __init__(self, store: Store):
        self._root = store
        self._place = store.at(FOLDER)
        self._every_s = _FLUSH_REMOTE_S if store.traits.is_remote else _FLUSH_S
        self._lines: list[str] = []
        self._changed = Condition()
        self._is_closed = False
        self._files = 0
        self._writing = False
        self._last = 0
        self._thread: Thread | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        with self._changed:
            self._lines.append(json.dumps(line))
            if self._thread is None:
                self._thread = Thread(target=self._run, name="ostraka_audit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Write all lines now."""
        with self._changed:
            while self._writing:
                self._changed.wait(1.0)
            lines, self._lines = self._lines, []
            self._writing = True
        try:
            if lines:
                self._put(lines)
        except (OstrakaError, OSError) as error:
            log.warning("the audit journal in %s can't be written: %s", self._root.location, error)
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.flush()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._lines and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                self._changed.wait(self._every_s)
            self.flush()

    def _put(self, lines: Sequence[str]) -> None:
        if not self._files:
            self._place.prepare()
        self._last = max(self._last + 1, time.time_ns())  # Names ascend, so that lines do.
        name = f"{self._last:020d}{_SUFFIX}"
        self._place.put(name, ("\n".join(lines) + "\n").encode(), durable=False)
        self._files += 1
        if self._files % _MOST_FILES == 1:
            self._join()

    def _join(self) -> None:
        """Write one file in place of many."""
        names = [name for name in self._place.list() if name.endswith(_SUFFIX)]
        if len(names) < _MOST_FILES:
            return
        text = "\n".join(compact(read_journal(self._root))) + "\n"
        self._place.put(f"{names[-1].removesuffix(_SUFFIX)}-joined{_SUFFIX}", text.encode())
        for name in names:
            with suppress(FileNotFoundError):
                self._place.delete(name)
