"""Events: the bytes and seconds of a save, a restore, a mirror copy or an audit, by phase."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger("ostraka")


@dataclass(frozen=True, slots=True)
class Extremes:
    """The least and the most of something over all processes."""

    least: float
    most: float


Operation = Literal["save", "restore", "mirror", "audit"]


@dataclass(frozen=True, slots=True)
class RunStats:
    """The time that checkpoints have cost a run so far, as its Manager saw it on this process.

    The parts are sums over calls that have returned, and do not overlap. Steps that a save slows
    down are compared with the median of the steps without a save, as in `manager.advice`.
    """

    elapsed_s: float
    """Since the manager was made."""
    saving_s: float
    """In calls of `save`: blocked, waiting for the save before, and audits."""
    slower_s: float
    """How much longer the steps took while a save ran."""
    waiting_s: float
    """In calls of `wait` and `close`."""
    restoring_s: float
    """In calls of `restore` and `resume`."""
    repeated_s: float | None
    """In steps that an interrupted run had already done, and that were lost: those up to the last
    one that the audit's journal has. 0 without a restore. None if there is no audit to tell."""

    def by_reason(self) -> dict[str, float]:
        """The seconds of each reason that is known."""
        found = {
            "saving": self.saving_s,
            "slower": self.slower_s,
            "waiting": self.waiting_s,
            "restoring": self.restoring_s,
        }
        return found if self.repeated_s is None else {**found, "repeated": self.repeated_s}

    @property
    def lost_s(self) -> float:
        """The sum of all parts that are known."""
        return sum(self.by_reason().values())

    @property
    def lost_share(self) -> float:
        """The part of the elapsed time that is lost."""
        return min(self.lost_s / self.elapsed_s, 1.0) if self.elapsed_s else 0.0

    @property
    def goodput(self) -> float:
        """The part of the elapsed time that is not lost to checkpoints."""
        return 1.0 - self.lost_share


@dataclass(frozen=True, slots=True)
class Record:
    """One save, restore, copy of a step to a mirror, or audit of a step, as one process saw it.

    `phases` are its parts in order, in seconds. The caller waited for `blocked_s`. `process_bytes`
    and `process_s` compare the processes: bytes written or read, and the seconds for them.
    """

    operation: Operation
    path: str
    bytes: int
    """The bytes of all processes together. For an audit, of the fingerprinted arrays."""
    phases: Mapping[str, float]
    blocked_s: float
    total_s: float
    process_bytes: Extremes
    process_s: Extremes
    step: int | None = None
    """The step, if a Manager made the record."""
    differs: bool | None = None
    """For an audit: True if the step differs from that of the interrupted run. None if there is
    nothing to compare it with."""
    run: RunStats | None = None
    """What checkpoints have cost the run so far, if a Manager made the record."""

    @property
    def bytes_per_s(self) -> float:
        """The throughput of the whole, from the call to the end."""
        return self.bytes / self.total_s if self.total_s else 0.0

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.phases.items())
        return (
            f"{self.operation} {self.path}: {self.bytes:,} bytes in {self.total_s:.3f} s "
            f"({self.bytes_per_s / 2**20:,.0f} MiB/s), blocked for {self.blocked_s:.3f} s; {phases}"
        )


OnRecord = Callable[[Record], None]


@dataclass(slots=True)
class Stopwatch:
    """Times the phases of an operation, one after the other."""

    phases: dict[str, float] = field(default_factory=dict[str, float])
    start: float = field(default_factory=time.perf_counter)
    blocked_s: float = 0.0
    """The seconds that the caller waited, if it did not wait for the end."""
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> float:
        """Add the time since the last lap to `phase`. Returns it in seconds."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        return seconds

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self.start


def summarize(reports: Sequence[tuple[int, float]]) -> list[float]:
    """Total, least and most bytes and seconds of all processes."""
    sizes, seconds = zip(*reports, strict=True)
    return [sum(sizes), min(sizes), max(sizes), min(seconds), max(seconds)]


def report(
    operation: Operation,
    path: str,
    watch: Stopwatch,
    summary: Sequence[float],
    on_record: OnRecord | None,
    *,
    in_background: bool = False,
) -> Record:
    """Log the record, and pass it to `on_record`."""
    total, least_bytes, most_bytes, least_s, most_s = summary
    total_s = watch.total_s
    record = Record(
        operation,
        path,
        int(total),
        dict(watch.phases),
        0.0 if operation == "mirror" else watch.blocked_s or total_s,
        total_s,
        Extremes(least_bytes, most_bytes),
        Extremes(least_s, most_s),
    )
    logger.info("%s", record)
    if on_record is not None:
        call_safely(on_record, record, in_background=in_background)
    return record


def call_safely(callback: Callable[..., None], *args: Any, in_background: bool) -> None:
    """Call a callback of the user. Its error is logged, since the work is done.

    In a background thread, SystemExit is logged too: it would end only the thread, and look like a
    failure of the work. In the caller's thread it ends the program, as Ctrl-C does.
    """
    try:
        callback(*args)
    except BaseException as error:
        if not (in_background or isinstance(error, Exception)):
            raise
        logger.exception("%r raised; what it was told of is done all the same", callback)


MOST_PROCESSES = 1024
"""The timeline in `_METADATA` lists the processes if there are no more."""


def timeline(
    watch: Stopwatch, summary: Sequence[float], reports: Sequence[tuple[int, float]]
) -> dict[str, Any]:
    """The timeline of a save in `_METADATA`, from the bytes and seconds of each process."""
    phases = {f"{name}_s": round(seconds, 4) for name, seconds in watch.phases.items()}
    found: dict[str, Any] = {
        **phases,
        "blocked_s": round(watch.blocked_s or watch.total_s, 4),
        "bytes": int(summary[0]),
        "process_bytes": [int(summary[1]), int(summary[2])],
        "process_write_s": [round(summary[3], 4), round(summary[4], 4)],
    }
    if len(reports) <= MOST_PROCESSES:
        found["processes"] = [[nbytes, round(seconds, 4)] for nbytes, seconds in reports]
    return found


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timeline of a save, as `_METADATA` has it."""

    phases: Mapping[str, float]
    """The seconds of each phase on process 0, in order, up to the commit."""
    blocked_s: float | None
    """How long the caller waited. None if the save did not record it."""
    bytes: int | None
    processes: Sequence[tuple[int, float]]
    """The bytes that each process wrote, and the seconds that it took. Empty if unknown."""

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())

    @property
    def background_s(self) -> float | None:
        """How long the save went on after the caller had it back, or None if unknown."""
        return None if self.blocked_s is None else max(self.total_s - self.blocked_s, 0.0)


_MOST_PHASES = 32
_MOST_SECONDS = 1e9
"""No save takes longer."""


def read_timeline(writer: Mapping[str, Any]) -> Timeline | None:
    """The timeline in the writer of `_METADATA`, which anybody may have written. None without."""
    found: Any = writer.get("timeline")
    given: dict[Any, Any] = found if isinstance(found, dict) else {}
    phases = {
        name.removesuffix("_s"): float(seconds)
        for name, seconds in given.items()
        if isinstance(name, str) and name.endswith("_s") and _is_duration(seconds)
    }
    blocked_s = phases.pop("blocked", None)
    if not phases or len(phases) > _MOST_PHASES:
        return None
    nbytes, listed = given.get("bytes"), given.get("processes")
    reports: list[Any] = listed if isinstance(listed, list) else []
    is_sound = len(reports) <= MOST_PROCESSES and all(map(_is_report, reports))
    return Timeline(
        phases,
        blocked_s,
        nbytes if _is_size(nbytes) else None,
        tuple((size, float(seconds)) for size, seconds in reports) if is_sound else (),
    )


def _is_report(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    pair: list[Any] = value
    return len(pair) == 2 and _is_size(pair[0]) and _is_duration(pair[1])


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST_SECONDS


# How often to save, by Daly's formula. Pure.


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The time to work between two saves (Daly 2006, which refines Young 1974).

    It loses the least time to saving and to repeating lost work, for failures that come at random
    with the mean time `mtbf_s` between them. One save takes the loop `cost_s`.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s
