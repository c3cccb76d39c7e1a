"""The time that checkpoints cost a run: calls of its manager, slower steps and repeated ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

from ostraka.common.record import OnRecord, Record
from ostraka.common.record import RunStats as RunStats
from ostraka.layout.file_names import step_of
from ostraka.manager._advice import CostMeter


class Losses:
    """Measures what a run loses. `meter` measures calls of `save` and the steps between them."""

    def __init__(self, meter: CostMeter, clock_s: Callable[[], float] = time.perf_counter):
        self._meter = meter
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._spent_s = {"waiting": 0.0, "restoring": 0.0}
        self._at: tuple[int, float] | None = None
        """The last step since the last restore, and when the loop went on from there."""
        self._steps: list[tuple[int, float]] = []
        """The steps since the last restore that may be repeated ones, with their seconds."""
        self._repeated_s: float | None = 0.0
        self.reached: int | None = None
        """The last step before the resume, if known. Steps up to it are repeated ones."""

    def enter(self, step: int) -> None:
        """As `CostMeter.enter`."""
        slower_s = self._meter.slower_s
        self._meter.enter(step)
        if self._at is not None and step > self._at[0]:
            took_s = self._clock_s() - self._at[1]
            # What a save slows them down is counted as such.
            self._steps.append((step, took_s - max(self._meter.slower_s - slower_s, 0.0)))

    def leave(self, step: int, *, began: bool, saving: bool) -> None:
        """As `CostMeter.leave`."""
        self._meter.leave(step, began=began, saving=saving)
        if self._at is None:
            return
        self._at = (step, self._clock_s())
        if self.reached is not None and self._repeated_s is not None:
            self._repeated_s += sum(took_s for at, took_s in self._steps if at <= self.reached)
            self._steps.clear()
            if step >= self.reached:
                self._at = None

    def note_restore(self, step: int, *, is_audited: bool) -> None:
        """Note that the loop goes on from here. Only audits tell how far it had come before."""
        self.reached = None
        self._steps.clear()
        if is_audited:
            self._at = (step, self._clock_s())
        else:
            self._repeated_s = None

    @contextmanager
    def timing(self, what: Literal["waiting", "restoring"]) -> Generator[None]:
        """Count the time of a block."""
        began_s = self._clock_s()
        try:
            yield
        finally:
            self._spent_s[what] += self._clock_s() - began_s

    def stats(self) -> RunStats:
        """Return the sums over all calls that have returned. Any thread may ask."""
        return RunStats(
            self._clock_s() - self._began_s,
            self._meter.saving_s,
            self._meter.slower_s,
            self._spent_s["waiting"],
            self._spent_s["restoring"],
            self._repeated_s,
        )

    def complete(self, on_record: OnRecord | None) -> OnRecord | None:
        """Return a callback that adds the step and the stats of the run to each record."""
        return None if on_record is None else partial(self._tell, on_record)

    def _tell(self, on_record: OnRecord, record: Record) -> None:
        step = step_of(os.path.basename(record.path)) if record.step is None else record.step
        on_record(replace(record, step=step, run=self.stats()))
