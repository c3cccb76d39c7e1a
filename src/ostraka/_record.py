"""What a save, a restore or a copy to a mirror did, and how long each phase of it took."""

from __future__ import annotations

import logging
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


@dataclass(frozen=True, slots=True)
class Record:
    """One save or restore, or one step's copy to a mirror, as one process saw it.

    `phases` are its parts in order, with their seconds; `blocked_s` is how long the caller waited.
    `process_bytes` and `process_s` compare the processes: bytes written or read, and seconds spent
    on that.
    """

    operation: Literal["save", "restore", "mirror"]
    path: str
    bytes: int
    """Of all processes together."""
    phases: Mapping[str, float]
    blocked_s: float
    total_s: float
    process_bytes: Extremes
    process_s: Extremes

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
    """How long the caller waited, where it did not wait for the end."""
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, phase: str) -> float:
        """What has passed since the last lap was `phase`; returns its seconds."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        return seconds

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self.start


def summarize(reports: Sequence[tuple[int, float]]) -> list[float]:
    """The processes' bytes and seconds as a few numbers, whatever the number of processes."""
    sizes, seconds = zip(*reports, strict=True)
    return [sum(sizes), min(sizes), max(sizes), min(seconds), max(seconds)]


def report(
    operation: Literal["save", "restore", "mirror"],
    path: str,
    watch: Stopwatch,
    summary: Sequence[float],
    on_record: OnRecord | None,
) -> Record:
    """Log what was done and tell whoever asked for it."""
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
        call_safely(on_record, record)
    return record


def call_safely(callback: Callable[..., None], *args: Any) -> None:
    """Call what the user gave to be told of something that is done, and can't fail any more."""
    try:
        callback(*args)
    except Exception:
        logger.exception("%r raised; what it was told of is done all the same", callback)


def timeline(watch: Stopwatch, summary: Sequence[float]) -> dict[str, Any]:
    """What a checkpoint's metadata keeps of how it was written."""
    phases = {f"{name}_s": round(seconds, 4) for name, seconds in watch.phases.items()}
    return {
        **phases,
        "bytes": int(summary[0]),
        "process_bytes": [int(summary[1]), int(summary[2])],
        "process_write_s": [round(summary[3], 4), round(summary[4], 4)],
    }
