"""The cost of saving for the loop, and how often to save. No JAX."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ostraka.common.record import best_interval_s
from ostraka.common.record import logger as log

_REMEMBERED = 100
"""Medians are over the latest steps and saves, this many."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The cost of a save, as medians over the latest saves, and how often to save."""

    saves: int
    """The number of saves so far."""
    blocked_s: float
    """How long one save blocks the loop."""
    slowdown_s: float
    """How much longer the steps take while a save runs."""
    step_s: float | None
    """The time of one step without a save."""
    mtbf_s: float | None
    """The mean time between failures, as the manager received it."""
    interval_s: float | None
    """How often to save. None without `mtbf_s`."""
    interval_steps: int | None
    """The same in steps."""

    @property
    def cost_s(self) -> float:
        """The sum of `blocked_s` and `slowdown_s`."""
        return self.blocked_s + self.slowdown_s

    def __str__(self) -> str:
        text = (
            f"a save costs the loop {self.cost_s:.3g} s (blocked {self.blocked_s:.3g} s, slower "
            f"steps {self.slowdown_s:.3g} s)"
        )
        if self.interval_s is None:
            return text
        steps = f", which is {self.interval_steps:,} steps" if self.interval_steps else ""
        return (
            f"{text}; with a failure every {self.mtbf_s:,.0f} s, save every "
            f"{self.interval_s:,.0f} s{steps}"
        )


class CostMeter:
    """Measures the loop by the times of its calls of `save`: `enter` and `leave` around each."""

    def __init__(self, mtbf_s: float | None, clock_s: Callable[[], float] = time.perf_counter):
        self._mtbf_s = mtbf_s
        self._clock_s = clock_s
        self._saves = 0
        self._blocked_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._slowdown_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._quiet_step_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._any_step_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._slower_s = 0.0
        self._entered_s = 0.0
        self._left: tuple[int, float, bool] | None = None
        self._advised_s: float | None = None

    def enter(self, step: int) -> None:
        now = self._clock_s()
        self._entered_s = now
        if self._left is None or step <= self._left[0]:
            return
        last, left_s, was_saving = self._left
        steps = step - last
        self._any_step_s.append((now - left_s) / steps)
        if not was_saving:
            self._quiet_step_s.append((now - left_s) / steps)
        elif self._quiet_step_s:
            self._slower_s += (now - left_s) - steps * median(self._quiet_step_s)

    def leave(self, step: int, *, began: bool, saving: bool) -> None:
        """Note the end of a call. `began`: it began a save. `saving`: a save is running now."""
        now = self._clock_s()
        if began:
            if self._saves:
                self._slowdown_s.append(max(self._slower_s, 0.0))
            self._slower_s = 0.0
            self._saves += 1
            self._blocked_s.append(now - self._entered_s)
        self._left = (step, now, saving)

    def advise(self) -> Advice | None:
        """Return the advice so far. None before the first save."""
        if not self._saves:
            return None
        blocked_s = median(self._blocked_s)
        slowdown_s = median(self._slowdown_s or [max(self._slower_s, 0.0)])
        # If a save is always running, only slowed-down steps have been measured.
        known_s = self._quiet_step_s or self._any_step_s
        step_s = median(known_s) if known_s else None
        interval_s = steps = None
        if self._mtbf_s is not None:
            interval_s = best_interval_s(blocked_s + slowdown_s, self._mtbf_s)
            steps = max(1, round(interval_s / step_s)) if step_s else None
        return Advice(self._saves, blocked_s, slowdown_s, step_s, self._mtbf_s, interval_s, steps)

    def log_changes(self) -> None:
        """Log the first advice, and later ones that differ by more than a fifth."""
        advice = self.advise()
        if advice is None or advice.interval_s is None:
            return
        last_s = self._advised_s
        if last_s is None or not 0.8 * last_s <= advice.interval_s <= 1.25 * last_s:
            self._advised_s = advice.interval_s
            log.info("%s", advice)
