"""The numbers of a record, for tools that add them up: counters and gauges with labels."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ostraka.common.record import Record


class Kind(NamedTuple):
    """What a number means."""

    name: str
    unit: str
    """As OpenTelemetry writes it: `s`, `By`, `1`."""
    about: str
    labels: tuple[str, ...] = ("operation",)
    is_counter: bool = True
    """True if numbers add up. Otherwise the last one holds."""


class Number(NamedTuple):
    kind: Kind
    value: float
    labels: Mapping[str, str]


_OPERATIONS = Kind("operations", "1", "Saves, restores, mirror copies and audits that succeeded")
_BYTES = Kind("bytes", "By", "Bytes written, read or fingerprinted by all processes")
_DURATION = Kind("duration", "s", "From the call to the end")
_BLOCKED = Kind("blocked", "s", "How long the loop waited")
_PHASE = Kind("phase", "s", "The parts of an operation", ("operation", "phase"))
_DIFFERENCES = Kind("audit_differences", "1", "Audited steps that differ from the first run", ())
_LAST_DURATION = Kind("last_duration", "s", "The last one, from call to end", is_counter=False)
_LAST_BYTES = Kind("last_bytes", "By", "The bytes of the last one", is_counter=False)
_LAST_STEP = Kind("last_step", "1", "The step of the last one", is_counter=False)
_LAST_TIME = Kind("last_time", "s", "When the last one ended, in Unix time", is_counter=False)
_ELAPSED = Kind("run_elapsed", "s", "Since the manager was made", (), is_counter=False)
_LOST = Kind("run_lost", "s", "Time lost to checkpoints", ("reason",), is_counter=False)
_SHARE = Kind("run_lost_share", "1", "The same as a share of the run", (), is_counter=False)

KINDS = (
    *(_OPERATIONS, _BYTES, _DURATION, _BLOCKED, _PHASE, _DIFFERENCES),
    *(_LAST_DURATION, _LAST_BYTES, _LAST_STEP, _LAST_TIME, _ELAPSED, _LOST, _SHARE),
)


def numbers_of(record: Record) -> Iterator[Number]:
    """The numbers of one record."""
    here = {"operation": record.operation}
    yield Number(_OPERATIONS, 1, here)
    yield Number(_BYTES, record.bytes, here)
    yield Number(_DURATION, record.total_s, here)
    yield Number(_BLOCKED, record.blocked_s, here)
    for phase, seconds in record.phases.items():
        yield Number(_PHASE, seconds, {**here, "phase": phase})
    if record.operation == "audit":
        yield Number(_DIFFERENCES, int(record.differs is True), {})
    yield Number(_LAST_DURATION, record.total_s, here)
    yield Number(_LAST_BYTES, record.bytes, here)
    if record.step is not None:
        yield Number(_LAST_STEP, record.step, here)
    yield Number(_LAST_TIME, time.time(), here)
    if record.run is not None:
        yield Number(_ELAPSED, record.run.elapsed_s, {})
        for reason, seconds in record.run.by_reason().items():
            yield Number(_LOST, seconds, {"reason": reason})
        yield Number(_SHARE, record.run.lost_share, {})
