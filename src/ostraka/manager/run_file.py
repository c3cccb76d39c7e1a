"""The file `_RUN` in a run directory: what its Manager saves, keeps and mirrors. No JAX.

It is for people who look at the run: `ostraka report`, `board` and `top`. No restore or deletion
depends on it. With `every="auto"` the next run expects that a save costs what it says. Process 0
writes it in the background when a Manager is opened or closed, when the advice changes notably, and
when the mirror gets a step. Readers take it for untrusted input: a value that a Manager would not
write makes the whole file unusable.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

from ostraka.common.record import logger as log
from ostraka.common.threads import at_exit
from ostraka.errors import describe
from ostraka.layout.file_names import RUN_NAME
from ostraka.manager._advice import Advice
from ostraka.manager._arguments import check_count, check_seconds, check_steps
from ostraka.manager._keep import Best, Keep, check_best, find_superfluous
from ostraka.manager.steps import Step, ascending
from ostraka.storage import Store

_FORMAT = 1
_MOST_BYTES = 1 << 20
_MOST_TEXT = 4000
_MOST_STEPS = 10_000
_NOTABLE = 1.25
"""Advice is written again if its interval has changed by this factor."""
_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class RunRules:
    """When a Manager saves, what it keeps and what it mirrors, as plain values."""

    every: int | Literal["auto"] | None = None
    every_s: float | None = None
    at: tuple[int, ...] = ()
    when: bool = False
    """True if a function decides, which this file can't tell."""
    keep: int | None = None
    keep_every: int | None = None
    keep_every_s: float | None = None
    keep_best: Best | None = None
    keep_if: bool = False
    """True if a function decides."""
    mirror: str | None = None
    mirror_every: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MirrorStatus:
    """How far a mirror has come, as the Manager that copies to it knows."""

    at: float
    waiting: tuple[int, ...]
    """The steps that had no copy yet."""
    problem: str | None = None
    """Why the last copy failed, if it did."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """The contents of `_RUN`."""

    rules: RunRules
    host: str
    pid: int
    since: float
    ended: float | None = None
    advice: Advice | None = None
    mirror: MirrorStatus | None = None

    @property
    def is_running(self) -> bool | None:
        """True if the Manager still runs. None if only another host could tell."""
        if self.ended is not None:
            return False
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            return True  # It runs as another user.
        return True


# Reading


def read_run_file(store: Store) -> tuple[RunFile | None, str | None]:
    """The contents of `_RUN`, and why they can't be used. Both are None if there is none."""
    try:
        return decode_run_file(store.get(RUN_NAME, _MOST_BYTES)), None
    except FileNotFoundError:
        return None, None
    except (OSError, TypeError, ValueError, RecursionError) as error:
        return None, f"{RUN_NAME} is left out, since no Manager wrote it so: {describe(error)}"


def decode_run_file(data: bytes) -> RunFile:
    """The contents of `_RUN`. Raises TypeError or ValueError for what no Manager writes."""
    document = _mapping("the file", json.loads(data, parse_constant=_refuse_constant))
    if document.get("format") != _FORMAT:
        raise ValueError(f"its format is {document.get('format')!r:.40}, not {_FORMAT}")
    rules = _mapping("rules", document.get("rules"))
    advice, mirror = document.get("advice"), document.get("mirror")
    return RunFile(
        RunRules(
            "auto" if rules.get("every") == "auto" else check_count("every", rules.get("every")),
            check_seconds("every_s", rules.get("every_s")),
            tuple(sorted(check_steps("at", _list("at", rules.get("at", ()))))),
            bool(rules.get("when")),
            check_count("keep", rules.get("keep")),
            check_count("keep_every", rules.get("keep_every")),
            check_seconds("keep_every_s", rules.get("keep_every_s")),
            _best(rules.get("keep_best")),
            bool(rules.get("keep_if")),
            _text("mirror", rules.get("mirror")),
            check_count("mirror_every", rules.get("mirror_every")),
        ),
        _text("host", document.get("host")) or "",
        check_count("pid", document.get("pid")) or 0,
        _time("since", document.get("since")) or 0.0,
        _time("ended", document.get("ended")),
        None if advice is None else _advice(_mapping("advice", advice)),
        None if mirror is None else _mirror(_mapping("mirror", mirror)),
    )


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _mapping(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise TypeError(f"{name} must be an object, not {given!r:.40}")
    return cast(dict[str, Any], given)


def _list(name: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, list | tuple) or len(cast(list[Any], given)) > _MOST_STEPS:
        raise TypeError(f"{name} must be a list of at most {_MOST_STEPS:,} steps")
    return cast(list[Any], given)


def _text(name: str, given: Any) -> str | None:
    if given is not None and (not isinstance(given, str) or len(given) > _MOST_TEXT):
        raise TypeError(f"{name} must be a text, not {given!r:.40}")
    return given


def _time(name: str, given: Any) -> float | None:
    """A number of 0 or more, or None."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < 1e15:
        raise TypeError(f"{name} must be a number of seconds, not {given!r:.40}")
    return float(given)


def _best(given: Any) -> Best | None:
    if given is None:
        return None
    found = _mapping("keep_best", given)
    return Best(
        _text("metric", found.get("metric")) or "", found.get("mode", ""), found.get("n", 0)
    )


def _advice(given: Mapping[str, Any]) -> Advice:
    steps = given.get("interval_steps")
    found = Advice(
        check_count("saves", given.get("saves")) or 0,
        _time("blocked_s", given.get("blocked_s")) or 0.0,
        _time("slowdown_s", given.get("slowdown_s")) or 0.0,
        _time("step_s", given.get("step_s")),
        _time("mtbf_s", given.get("mtbf_s")),
        _time("interval_s", given.get("interval_s")),
        check_count("interval_steps", steps),
        _time("overhead", given.get("overhead")),
        _time("spent", given.get("spent")),
        _time("wait_s", given.get("wait_s")),
    )
    if found.interval_s is not None and found.mtbf_s is None and found.overhead is None:
        raise ValueError("advice has an interval without mtbf_s and without overhead")
    return found


def _mirror(given: Mapping[str, Any]) -> MirrorStatus:
    waiting = check_steps("waiting", _list("waiting", given.get("waiting")))
    problem = _text("problem", given.get("problem"))
    return MirrorStatus(_time("at", given.get("at")) or 0.0, tuple(sorted(waiting)), problem)


# What follows from it


def find_going_next(steps: Sequence[Step], rules: RunRules, *, now_s: float) -> list[int] | None:
    """The steps that retention deletes after the next save, if that is not among the best.

    Readers and the mirror may keep some of them for a while. None if a function decides.
    """
    if rules.keep_if:
        return None
    keep = Keep(rules.keep, rules.keep_every, rules.keep_every_s, rules.keep_best)
    known = ascending(steps)
    after = 1 + max((step.step for step in known), default=0)
    coming = Step(after, now_s, {}, False)
    return find_superfluous([*known, coming], keep, just_saved=after)


def best_by(metric: str, rules: RunRules | None) -> Best | None:
    """How to find the best step by a metric. None if nobody says whether low or high is good."""
    if rules is not None and rules.keep_best is not None and rules.keep_best.metric == metric:
        return Best(metric, rules.keep_best.mode)
    with suppress(ValueError):
        return check_best("metric", metric)
    return None


# Writing


class RunFileWriter:
    """Writes `_RUN` in the background, for the Manager that holds the lock of the directory.

    An error is no reason to disturb the run: it is logged, and the file stays as it was.
    """

    def __init__(self, store: Store, rules: RunRules, check: Callable[[], None]):
        """`check` raises if the directory is no longer the one that the Manager has locked."""
        self._store = store
        self._check = check
        self._document: dict[str, Any] = {
            "format": _FORMAT,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.time(),
            "ended": None,
            "rules": rules.as_json(),
            "advice": None,
            "mirror": None,
        }
        self._advised: Advice | None = None
        self._process = os.getpid()
        self._changed = threading.Condition()
        """Guards all of the following, and the document."""
        self._is_asked = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Write the file soon."""
        self._note({})

    def note_advice(self, advice: Advice | None) -> None:
        """Note the latest advice. It is written if it differs notably from the last one."""
        if advice is not None and _is_news(self._advised, advice):
            self._advised = advice
            self._note({"advice": asdict(advice)})

    def note_mirror(self, waiting: Collection[int], problem: str | None) -> None:
        """Note which steps the mirror lacks."""
        steps = sorted(waiting)[-_MOST_STEPS:]
        problem = None if problem is None else problem[:_MOST_TEXT]
        self._note({"mirror": {"at": time.time(), "waiting": steps, "problem": problem}})

    def end(self) -> None:
        """Note that the Manager is closed, and wait until the file says so."""
        self._note({"ended": time.time()})
        self.wait()

    def wait(self) -> None:
        """Wait until the file is written, but not for a store that hangs."""
        if os.getpid() != self._process:
            return  # In a forked child the thread is its parent's.
        ends_s = time.monotonic() + _WAIT_S
        with self._changed:
            while self._thread is not None and time.monotonic() < ends_s:
                self._changed.wait(1.0)

    def _note(self, news: Mapping[str, Any]) -> None:
        if os.getpid() != self._process:
            return
        with self._changed:
            self._document |= news
            self._is_asked = True
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="ostraka-run-file", daemon=True)
            _live.add(self)
            try:
                self._thread.start()
            except RuntimeError:  # The system has no thread left, or the program ends.
                self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._is_asked:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._is_asked = False
                data = json.dumps(self._document).encode()
            try:
                self._store.put(RUN_NAME, data, check=self._check)
            except Exception as error:
                log.info("%s in %s is not written: %s", RUN_NAME, self._store, describe(error))


def _is_news(before: Advice | None, now: Advice) -> bool:
    if before is None or now.saves >= 2 * before.saves:
        return True
    if (before.wait_s is None) != (now.wait_s is None):
        return True
    old_s, new_s = before.interval_s, now.interval_s
    return bool(old_s and new_s and not 1 / _NOTABLE <= new_s / old_s <= _NOTABLE)


_live: weakref.WeakSet[RunFileWriter] = weakref.WeakSet()


def _wait_at_exit() -> None:
    with suppress(KeyboardInterrupt):
        for writer in list(_live):
            writer.wait()


at_exit(_wait_at_exit, lambda: None)
