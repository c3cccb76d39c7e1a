"""What a Manager audits: fingerprints at every N-th step, compared after a resume."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import numpy as np
import xxhash
from jax.sharding import NamedSharding

from ostraka._version import __version__
from ostraka.audit.explain import find_divergence
from ostraka.audit.journal import History, JournalWriter, Line, make_line, read_journal
from ostraka.audit.marks import Mark, mark_from_json
from ostraka.common.dtypes import dtype_name, to_bytes
from ostraka.common.record import Extremes, OnRecord, Record, call_safely
from ostraka.common.record import logger as log
from ostraka.errors import ResumeDiverged, warn_caller
from ostraka.live.fingerprint import (
    Pending,
    Sums,
    add_parts,
    begin_fingerprints,
    numbers_of,
    value_of,
)
from ostraka.live.parse import is_array, is_key, parse
from ostraka.processes.decide import agree, decide_together
from ostraka.storage import Store
from ostraka.tree.json_tree import encode_state
from ostraka.tree.nodes import Kept, Stateful, leaves_of

OnDivergence = Literal["raise", "warn"] | Callable[[ResumeDiverged], None]


def check_audit(on_divergence: Any, rtol: Any) -> None:
    """Raise ValueError or TypeError for bad arguments."""
    if on_divergence not in ("raise", "warn") and not callable(on_divergence):
        raise ValueError(
            f'on_divergence is {on_divergence!r:.60}; it must be "raise", "warn" or a function'
        )
    is_number = isinstance(rtol, int | float) and not isinstance(rtol, bool)
    if rtol is not None and not (is_number and 0 < rtol < 1):
        raise ValueError(f"audit_rtol must be between 0 and 1, such as 1e-3, not {rtol!r:.60}")


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step whose fingerprints are being computed."""

    step: int
    names: list[tuple[str, str]]
    """("leaves" or "user", path) of each value."""
    marks: list[Mark | None]
    """None for a value on devices."""
    arrays: list[tuple[str, tuple[int, ...], bool]]
    """Dtype, shape, and True if other processes hold parts of it."""
    pending: Pending
    bytes: int
    take_s: float


class Audit:
    """The audit of one run directory. Every process calls the same methods in the same order."""

    def __init__(
        self,
        store: Store,
        every: int,
        on_divergence: OnDivergence,
        rtol: float | None,
        on_record: OnRecord | None = None,
    ) -> None:
        self._store = store
        self._every = every
        self._on_divergence = on_divergence
        self._rtol = rtol
        self._on_record = on_record
        self._writer = JournalWriter(store)
        weakref.finalize(self, self._writer.close)
        self._run = ""
        self._resumed_from: int | None = None
        self._is_begun = False
        self._known: set[int] = set()
        """The steps that earlier runs have, the same on all processes."""
        self._expected: dict[int, Line] = {}
        self._history: History | None = None
        self._about: Mapping[str, Any] = {}
        self._taken: _Taken | None = None
        self._is_compared = False
        self.reached: int | None = None
        """The last step that an interrupted run is known to have reached, once that is known."""

    def note_restore(self, step: int) -> None:
        """The run goes on from a step."""
        self._resumed_from, self._is_begun, self.reached = step, False, None

    def note(self, step: int, tree: Any, user: Mapping[str, Any] | None) -> None:
        """Look at a step. Raises ResumeDiverged if this or the last one differs."""
        if step % self._every:
            return
        self.finish()
        if not self._is_begun:
            self._begin(tree)
        self._taken = _take(step, tree, user or {})
        if step in self._known and not self._is_compared:
            self._is_compared = True
            self.finish()  # The first comparison is worth waiting for.

    def finish(self) -> None:
        """Collect the fingerprints of the last audited step, on all processes."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        began_s = time.perf_counter()
        mine = _collect(taken)

        def decide(all_mine: list[Any]) -> Any:
            line = _line(taken, self._run, all_mine)
            self._writer.append({**line.to_json(), "time": time.time()})
            return self._compare(line)

        found = agree(f"audit of step {taken.step}", mine, decide)
        if self._on_record is not None:
            is_known = taken.step in self._known
            differs = found is not None if is_known else None
            self._tell(self._on_record, taken, time.perf_counter() - began_s, differs)
        if found is not None:
            self._known.clear()
            self._report(found)

    def _tell(
        self, on_record: OnRecord, taken: _Taken, compare_s: float, differs: bool | None
    ) -> None:
        phases = {"take": taken.take_s, "compare": compare_s}
        total_s = taken.take_s + compare_s
        mine_s = Extremes(total_s, total_s)
        record = Record(
            "audit",
            self._store.location,
            taken.bytes,
            phases,
            total_s,
            total_s,
            Extremes(taken.bytes, taken.bytes),
            mine_s,
            step=taken.step,
            differs=differs,
        )
        call_safely(on_record, record, in_background=False)

    def stop(self, *, alone: bool) -> None:
        """Write all that is known. Process 0 may be alone after an error."""
        try:
            if alone and jax.process_count() == 1 and self._taken is not None:
                line = _line(self._taken, self._run, [_collect(self._taken)])
                self._writer.append({**line.to_json(), "time": time.time()})
        except Exception:
            log.exception("the last audited step is lost")
        finally:
            self._taken = None
            self._writer.close()

    def _begin(self, tree: Any) -> None:
        """Begin a run in the journal, and find the steps that it should repeat."""
        self._is_begun, self._is_compared = True, False
        arrays = [leaf.value for leaf in leaves_of(parse(tree))]
        meshes = {
            str(dict(array.sharding.mesh.shape))
            for array in arrays
            if isinstance(array, jax.Array) and isinstance(array.sharding, NamedSharding)
        }

        def begin() -> list[int]:
            self._run = os.urandom(8).hex()
            self._writer.flush()
            self._about = {
                "devices": jax.device_count(),
                "processes": jax.process_count(),
                "platform": jax.default_backend(),
                "meshes": sorted(meshes),
                "versions": {"ostraka": __version__, "jax": jax.__version__},
            }
            begun = {"kind": "run", "run": self._run, "resumed_from": self._resumed_from}
            self._expected = {}
            self._history = read_journal(self._store)
            if self._resumed_from is not None:
                self._expected = self._history.expected(self._resumed_from)
            self._writer.append({**begun, "time": time.time(), **self._about})
            return sorted(self._expected)

        self._known = set(decide_together("read the audit journal", begin))
        if self._resumed_from is not None:
            self.reached = max(self._known, default=self._resumed_from)

    def _compare(self, now: Line) -> Any:
        """On process 0: the first divergence as JSON, or None."""
        then = self._expected.get(now.step)
        if then is None:
            return None
        runs = self._history.runs if self._history is not None else ()
        about = next((run.about for run in runs if run.id == then.run), {})
        is_moved = any(about.get(name) != value for name, value in self._about.items())
        base = None
        if self._history is not None and self._resumed_from is not None:
            base = self._history.before(self._resumed_from, then.run)
        found = find_divergence(
            then, now, history=self._history, rtol=self._rtol, is_moved=is_moved, base=base
        )
        verdict = {"kind": "verdict", "run": self._run, "with": then.run, "step": now.step}
        if found is None:
            if now.step == min(self._expected):
                log.info("step %d is the same as in the run before the resume", now.step)
            self._writer.append({**verdict, "same": True})
            return None
        self._expected = {}
        leaves = [*found.leaves, *found.user]
        more = {"same": False, "message": found.message, "leaves": leaves[:100]}
        self._writer.append({**verdict, **more})
        self._writer.flush()
        return [found.step, found.cause, leaves, found.message]

    def _report(self, found: Any) -> None:
        step, cause, leaves, message = found
        where = f"{self._store.location}: {message}"
        error = ResumeDiverged(where, step=step, cause=cause, leaves=leaves)
        if callable(self._on_divergence):
            self._on_divergence(error)
        elif self._on_divergence == "raise":
            raise error
        elif jax.process_index() == 0:
            warn_caller(UserWarning(str(error)))


def _take(step: int, tree: Any, user: Mapping[str, Any]) -> _Taken:
    began_s = time.perf_counter()
    names: list[tuple[str, str]] = []
    marks: list[Mark | None] = []
    arrays: list[Any] = []
    for group, values in (("leaves", tree), ("user", dict(user))):
        for leaf in leaves_of(parse(values)):
            if isinstance(leaf.value, Kept) or leaf.value is None:
                continue
            names.append((group, leaf.path))
            if isinstance(leaf.value, jax.Array):
                marks.append(None)
                arrays.append(leaf.value)
            else:
                marks.append(_host_mark(leaf.path, leaf.value))
    described = [
        ("key" if is_key(one) else dtype_name(one.dtype), one.shape, not one.is_fully_addressable)
        for one in arrays
    ]
    pending = begin_fingerprints(arrays)
    nbytes = sum(one.nbytes for one in arrays)
    return _Taken(step, names, marks, described, pending, nbytes, time.perf_counter() - began_s)


def _host_mark(path: str, value: Any) -> Mark:
    if isinstance(value, Stateful):
        return _text_mark("state", repr(encode_state(path, value.owner.get_state())))
    if is_array(value):
        array = np.asarray(value)
        stored: Any = to_bytes(array)
        bits = xxhash.xxh3_128_hexdigest(stored)
        return Mark(dtype_name(array.dtype), array.shape, bits, numbers_of(array), value_of(array))
    mark = _text_mark(type(value).__name__, repr(value))
    if isinstance(value, int | float):
        number = float(value)
        return Mark(mark.dtype, (), mark.bits, (abs(number), number, number), value)
    return mark


def _text_mark(kind: str, text: str) -> Mark:
    return Mark(kind, (), xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")))


def _collect(taken: _Taken) -> list[Any]:
    """The fingerprints of this process as JSON: parts of arrays, and marks of host values."""
    parts = iter(taken.pending.collect())
    mine: list[Any] = []
    for mark in taken.marks:
        if mark is not None:
            mine.append(mark.to_json())
        else:
            sums = add_parts([part.sums for part in next(parts) if part.is_first])
            mine.append([sums.lanes, [repr(number) for number in sums.numbers]])
    return mine


def _line(taken: _Taken, run: str, all_mine: list[Any]) -> Line:
    """On process 0: the fingerprints of all processes together."""
    tables: dict[str, dict[str, Mark]] = {"leaves": {}, "user": {}}
    arrays = iter(taken.arrays)
    columns = zip(*all_mine, strict=True)
    for (group, path), mark, found in zip(taken.names, taken.marks, columns, strict=True):
        if mark is not None:
            marks = [mark_from_json(one) for one in found]
            if len({one.bits for one in marks}) > 1:  # each process has a value of its own
                marks = [_text_mark(mark.dtype, " ".join(one.bits for one in marks))]
            tables[group][path] = marks[0]
            continue
        dtype, shape, is_shared = next(arrays)
        sums = [Sums(tuple(lanes), tuple(map(float, numbers))) for lanes, numbers in found]
        if not is_shared and all(one.lanes == sums[0].lanes for one in sums):
            sums = sums[:1]
        whole = add_parts(sums)
        bits = "".join(f"{lane:08x}" for lane in whole.lanes)
        value = _value(dtype, shape, whole)
        tables[group][path] = Mark(dtype, tuple(shape), bits, whole.numbers, value)
    return make_line(taken.step, run, tables["leaves"], tables["user"])


def _value(dtype: str, shape: tuple[int, ...], sums: Sums) -> float | int | str | None:
    """The value of a single number: the sign of the first element is always positive."""
    if prod(shape) != 1 or dtype == "key" or dtype.startswith("complex"):
        return None
    number = sums.numbers[1]
    if not np.isfinite(number):
        return repr(number)
    return int(number) if "int" in dtype else number
