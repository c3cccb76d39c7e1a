"""A run directory as a document: steps, metrics, sizes, save times, what goes next. No JAX.

Only listings and metadata are read, never arrays, unless all bytes are verified. In a bucket, the
first look takes one listing of all files and one request for each step. Later looks take the
listing, and one request for each new step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ostraka.common.record import read_timeline
from ostraka.common.text import json_number
from ostraka.errors import count_of
from ostraka.formats import open_source
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.formats.source import Source
from ostraka.formats.unknown import likely_steps
from ostraka.integrity import verify
from ostraka.layout.file_names import list_steps
from ostraka.layout.shard_file import METADATA_NAME, is_shards_directory
from ostraka.layout.spec import LeafSpec
from ostraka.manager.leases import latest_of_each
from ostraka.manager.run_file import (
    RunFile,
    RunRules,
    best_by,
    find_going_next,
    read_run_file,
)
from ostraka.manager.steps import FilesBelow, Root, Step
from ostraka.reading.groups import groups_of, totals_by_group
from ostraka.report.schema import SCHEMA, RunDocument, RunStep, StepState
from ostraka.report.steps import is_forbidden, lost_files, open_root
from ostraka.storage import Expiry, LocalStore, PathLike

Value = TypeVar("Value")


def describe_run(path: PathLike, *, verified: bool = False) -> RunDocument:
    """The document of a run directory. With `verified`, every byte of every step is read.

    Raises CheckpointNotFound if there is no such directory, or it is a checkpoint.
    """
    open_root(path)
    return RunReader(path).look(verified=verified)


@dataclass(frozen=True, slots=True)
class _Details:
    """What the metadata of a step tells beyond its size and its metrics."""

    nbytes: int | None = None
    groups: Mapping[str, int] | None = None
    blocked_s: float | None = None
    background_s: float | None = None


class RunReader:
    """Looks at a run directory again and again, and reads each step's metadata once."""

    def __init__(self, path: PathLike):
        self._root = Root(path, self._note_source)
        self._details: dict[str, _Details] = {}
        """By the id of the save."""
        self._last: tuple[tuple[LeafSpec, ...], Mapping[str, int] | None] | None = None
        """The leaves of the step that was read last, and their groups: mostly those of the next."""
        self._answers: dict[tuple[str, str], tuple[Any, Any]] = {}
        """By question and directory: its files then, and the answer."""
        self._checks: dict[str, tuple[Any, list[str]]] = {}
        """By directory: its files when all bytes were read, and the damage."""
        self._versions: dict[str, Any] = {}
        """By directory: its files at the last look."""
        self._expiry = Expiry()

    @property
    def root(self) -> Root:
        return self._root

    def look(self, *, verified: bool = False) -> RunDocument:
        """The document of the directory as it is now. A directory that is not there has no steps.

        Raises StoreError if the directory can't be listed.
        """
        asked_s = time.monotonic()
        steps, files = self._root.scan_files()
        now_s = time.time()
        run_file, problem = read_run_file(self._root.store)
        rules = None if run_file is None else run_file.rules
        readable = [step for step in steps if not step.problems]
        held = self._held(readable, files, now_s=now_s, asked_s=asked_s)
        mirror, mirrored = _mirror(readable, run_file, now_s)
        going = [] if rules is None else find_going_next(readable, rules, now_s=now_s)
        kept = {step for step, count in held.items() if count} | _kept_for_mirror(mirror, run_file)
        metrics, best = _metrics(readable, rules)
        rows: list[RunStep] = []
        self._versions = {step.names[0]: _version(step, files) for step in steps}
        for step in steps:
            state, problems = self._state(step, files, verified=verified)
            details = self._details_of(step, files)
            rows.append(
                {
                    "step": step.step,
                    "path": self._root.path(step.names[0]),
                    "saved_at": step.saved_at,
                    "bytes": details.nbytes if step.nbytes is None else step.nbytes,
                    "state": state,
                    "format": "orbax" if step.is_foreign else "ostraka",
                    "pinned": step.pinned,
                    "best": [name for name, one in best.items() if one == step.step],
                    "mirrored": mirrored.get(step.step),
                    "held": held[step.step],
                    "goes_next": step.step in (going or ()) and step.step not in kept,
                    "metrics": {name: json_number(n) for name, n in step.metrics.items()},
                    "groups": None if details.groups is None else dict(details.groups),
                    "blocked_s": details.blocked_s,
                    "background_s": details.background_s,
                    "problems": problems,
                }
            )
        self._forget_others(steps, files)
        return {
            "schema": SCHEMA,
            "kind": "run",
            "path": self._root.location,
            "at": now_s,
            "steps": rows,
            "bytes": sum(row["bytes"] or 0 for row in rows),
            "metrics": metrics,
            "rules": None if rules is None else {**rules.as_json(), **_say(rules)},
            "writer": _writer(run_file),
            "advice": _advice(run_file),
            "mirror": mirror,
            "space": self._space(rows),
            "notes": [*_notes(rows, rules, run_file, problem), *self._hint(rows)],
        }

    def version_of(self, name: str) -> Any:
        """What tells if the files of a step are those of the last look."""
        return self._versions.get(name)

    def note_check(self, name: str, version: Any, problems: list[str]) -> None:
        """Note what reading every byte of a step found, for looks while its files stay."""
        self._checks[name] = (version, problems)

    # One step

    def _note_source(self, source: OstrakaSource) -> None:
        self._details[source.saved.id] = self._read_details(source)

    def _read_details(self, source: Source) -> _Details:
        leaves = source.saved.leaves
        if self._last is None or self._last[0] != leaves:
            groups = None
            with suppress(OSError, ValueError):  # The tree may contradict itself.
                found = totals_by_group(source, groups_of(source))
                groups = {group: total.nbytes for group, total in found.items()}
            self._last = (leaves, groups)
        times = read_timeline(source.saved.writer)
        return _Details(
            sum(file.nbytes for file in source.files()),
            self._last[1],
            None if times is None else times.blocked_s,
            None if times is None else times.background_s,
        )

    def _details_of(self, step: Step, files: FilesBelow) -> _Details:
        if step.save_id is not None:
            return self._details.get(step.save_id, _Details())

        def read() -> _Details:
            with suppress(OSError, ValueError):
                return self._read_details(open_source(self._root.at(step.names[0])))
            return _Details()

        return self._remember("details", step, files, read)

    def _state(
        self, step: Step, files: FilesBelow, *, verified: bool
    ) -> tuple[StepState, list[str]]:
        root = self._root
        if step.problems:
            state: StepState = "damaged"
            if step.unsupported is not None:
                state = "unsupported"
            elif self._remember("forbidden", step, files, lambda: is_forbidden(root, step)):
                state = "forbidden"
            return state, [str(problem) for problem in step.problems]
        listed = files[step.names[0]]
        checked, problems = self._checks.get(step.names[0], (None, []))
        if checked is not None and checked == self._versions[step.names[0]]:
            return "damaged" if problems else "verified", problems
        lost = self._remember("lost", step, files, lambda: lost_files(root, step, listed))
        if verified and not step.is_foreign:
            report = verify(root.path(step.names[0]), raises=False)
            problems = report.problems
            return "damaged" if problems else "verified", [str(one) for one in problems]
        return "damaged" if lost else "committed", [str(one) for one in lost]

    def _remember(
        self, question: str, step: Step, files: FilesBelow, ask: Callable[[], Value]
    ) -> Value:
        """The answer about a step. It is asked again if a file in its directory has changed."""
        name = step.names[0]
        key = self._versions[name]
        known = self._answers.get((question, name))
        if known is None or known[0] != key or not key[1]:
            known = self._answers[question, name] = (key, ask())
        return known[1]

    def _forget_others(self, steps: Sequence[Step], files: FilesBelow) -> None:
        ids = {step.save_id for step in steps}
        self._details = {one: found for one, found in self._details.items() if one in ids}
        self._answers = {key: found for key, found in self._answers.items() if key[1] in files}
        self._checks = {name: found for name, found in self._checks.items() if name in files}

    # The directory

    def _held(
        self, steps: Sequence[Step], files: FilesBelow, *, now_s: float, asked_s: float
    ) -> Counter[int]:
        """How many readers hold each step."""
        there = [step.step for step in steps]
        held: Counter[int] = Counter()
        for lease in latest_of_each(list(files)).values():
            file = files[lease.name].get("")
            if file is not None:
                expired = self._expiry.has_expired(file, now_s=now_s, asked_s=asked_s)
                held.update(() if expired else lease.covered(there))
        return held

    def _space(self, rows: Sequence[RunStep]) -> dict[str, Any] | None:
        store = self._root.store
        if not isinstance(store, LocalStore):
            return None
        try:
            free, total = store.space()
        except OSError:
            return None
        size = next((row["bytes"] for row in reversed(rows) if row["bytes"]), None)
        saves = None if size is None else free // size
        return {"free_bytes": free, "total_bytes": total, "saves_left": saves}

    def _hint(self, rows: Sequence[RunStep]) -> list[str]:
        if rows:
            return []
        found = None
        with suppress(OSError):
            found = likely_steps(self._root.store)
        return [f"No step is here, but {found}." if found else "No step is here yet."]


def _version(step: Step, files: FilesBelow) -> tuple[str | None, dict[str, Any]]:
    """What a save, damage or repair of a step changes. Pins, metrics and claims do not."""

    def is_own(rest: str) -> bool:
        top = rest.partition("/")[0]
        return step.is_foreign or top == METADATA_NAME or is_shards_directory(top)

    there = files[step.names[0]].items()
    return step.save_id, {rest: file.version for rest, file in there if is_own(rest)}


# What the Manager says


def _mirror(
    steps: Sequence[Step], run_file: RunFile | None, now_s: float
) -> tuple[dict[str, Any] | None, dict[int, bool]]:
    """How far the mirror is behind, and for each step that belongs there, if it is there."""
    if run_file is None or run_file.rules.mirror is None:
        return None, {}
    status, every = run_file.mirror, run_file.rules.mirror_every
    mirrored: dict[int, bool] = {}
    for step in steps:
        if step.is_foreign or (every is not None and step.step % every):
            continue
        is_older = status is not None and step.saved_at is not None and step.saved_at <= status.at
        mirrored[step.step] = is_older and status is not None and step.step not in status.waiting
    there = [step for step, is_there in mirrored.items() if is_there]
    waiting = [step for step, is_there in mirrored.items() if not is_there]
    since = [one.saved_at for one in steps if one.step in waiting and one.saved_at is not None]
    return {
        "path": run_file.rules.mirror,
        "steps": len(there),
        "newest": max(there, default=None),
        "waiting": waiting,
        "lag_s": max(now_s - min(since), 0.0) if since else None if waiting else 0.0,
        "problem": None if status is None else status.problem,
    }, mirrored


def _kept_for_mirror(mirror: dict[str, Any] | None, run_file: RunFile | None) -> set[int]:
    """The step that a running Manager keeps until it is copied."""
    if mirror is None or run_file is None or run_file.is_running is False:
        return set()
    return {max(mirror["waiting"])} if mirror["waiting"] else set()


def _metrics(
    steps: Sequence[Step], rules: RunRules | None
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """For each metric what is good, the best step and the latest value; and the best steps."""
    names = dict.fromkeys(name for step in steps for name in step.metrics)
    metrics: dict[str, dict[str, Any]] = {}
    best: dict[str, int] = {}
    for name in names:
        by = best_by(name, rules)
        ranked = [] if by is None else by.ranked(steps)
        if ranked:
            best[name] = ranked[0].step
        latest = next(one.metrics[name] for one in reversed(steps) if name in one.metrics)
        metrics[name] = {
            "better": None if by is None else "low" if by.mode == "min" else "high",
            "best_step": best.get(name),
            "latest": json_number(latest),
        }
    return metrics, best


def _writer(run_file: RunFile | None) -> dict[str, Any] | None:
    if run_file is None or run_file.is_running is False:
        return None
    return {
        "host": run_file.host,
        "pid": run_file.pid,
        "since": run_file.since,
        "is_running": run_file.is_running,
    }


def _advice(run_file: RunFile | None) -> dict[str, Any] | None:
    advice = None if run_file is None else run_file.advice
    return None if advice is None else {**asdict(advice), "text": str(advice)}


def _say(rules: RunRules) -> dict[str, str]:
    """The rules in words: when it saves, and what it keeps."""
    saves, keeps, best = list[str](), list[str](), rules.keep_best
    if rules.every == "auto":
        saves.append("as often as the advice says")
    elif rules.every is not None:
        saves.append(_every(rules.every))
    if rules.every_s is not None:
        saves.append(f"every {rules.every_s:g} s")
    if rules.at:
        saves.append(f"at {list_steps(rules.at)}")
    if rules.when:
        saves.append("when a function says so")
    if rules.keep is not None:
        keeps.append(f"the last {rules.keep:,}")
    if rules.keep_every is not None:
        keeps.append(_every(rules.keep_every))
    if rules.keep_every_s is not None:
        keeps.append(f"one for each {rules.keep_every_s:g} s")
    if best is not None:
        count = f"{best.n:,} " if best.n > 1 else ""
        keeps.append(f"the {count}best by {best.metric} ({best.mode})")
    if rules.keep_if:
        keeps.append("those that keep_if keeps")
    return {
        "saves": ", ".join(saves) or "at every call of save",
        "keeps": ", ".join(keeps) or "all steps",
    }


def _every(number: int) -> str:
    return "every step" if number == 1 else f"every {number:,} steps"


def _notes(
    rows: Sequence[RunStep], rules: RunRules | None, run_file: RunFile | None, problem: str | None
) -> list[str]:
    notes: list[str] = []
    if problem is not None:
        notes.append(f"{problem}.")
    elif rules is None and rows:
        notes.append(
            "No Manager says what it keeps here, so nobody knows which step is deleted next."
        )
    if rules is not None and rules.keep_if:
        notes.append(
            "keep_if, a function of the program, decides which steps stay, so nobody else knows "
            "which step is deleted next."
        )
    if rules is not None and rules.keep_best is not None and any(r["goes_next"] for r in rows):
        notes.append(
            f"If the next step is among the best by {rules.keep_best.metric}, another one is "
            "deleted than the one shown."
        )
    if run_file is not None and run_file.ended is None and run_file.is_running is False:
        notes.append(
            f"The Manager in process {run_file.pid} of {run_file.host} ended without being closed."
        )
    damaged = [row["step"] for row in rows if row["state"] == "damaged"]
    if damaged:
        notes.append(
            f"{count_of(len(damaged), 'step')} can't be used ({list_steps(damaged)}): ostraka "
            "verify lists the damage, and ostraka repair repairs what it can."
        )
    return notes
