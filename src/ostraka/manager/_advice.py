"""The cost of saving for the loop, and how often to save. No JAX.

`every="auto"` follows this advice. Without `mtbf_s` it keeps the cost of all saves below a share of
the time, `overhead`. With `mtbf_s` it takes Daly's optimum.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ostraka.common.record import best_interval_s
from ostraka.common.record import logger as log

_REMEMBERED = 100
"""Medians are over the latest steps and saves, this many."""
_RECENT = 5
"""The interval follows the latest saves, this many, so that it changes when their cost does."""
_FIRST_STEPS = 3
"""Steps to time before the first save, so that slower ones can be told from usual ones."""
_SHORTEST_S = 1.0
"""Saves that cost nearly nothing are at least this far apart."""


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
    """How often to save. None without `mtbf_s` and without `every="auto"`."""
    interval_steps: int | None
    """The same in steps."""
    overhead: float | None = None
    """The share of the time that saves may cost, if that decides the interval."""

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
        if self.overhead is None:
            reason = f"with a failure every {self.mtbf_s:,.0f} s"
        else:
            reason = f"with at most {self.overhead:.3g} of the time for saves"
        every_s = f"{self.interval_s:,.0f}" if self.interval_s >= 10 else f"{self.interval_s:.2g}"
        return f"{text}; {reason}, save every {every_s} s{steps}"


class CostMeter:
    """Measures the loop by the times of its calls of `save`: `enter` and `leave` around each.

    With `overhead`, the advice keeps the cost of saves below this share of the time, unless
    `mtbf_s` is known.
    """

    def __init__(
        self,
        mtbf_s: float | None,
        clock_s: Callable[[], float] = time.perf_counter,
        overhead: float | None = None,
    ):
        self._mtbf_s = mtbf_s
        self._overhead = None if mtbf_s is not None else overhead
        self._began_s: float | None = None
        self._saved_s = 0.0
        """When the last save had blocked the loop."""
        self._spent_s = 0.0
        """The cost of all saves but the last."""
        self._recent_s: deque[float] = deque(maxlen=_RECENT - 1)
        """The costs of the latest saves but the last."""
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
        self._past_slower_s = 0.0
        self.saving_s = 0.0
        """The time in all calls that have returned."""

    @property
    def slower_s(self) -> float:
        """How much longer the steps took during all saves."""
        return self._past_slower_s + max(self._slower_s, 0.0)

    def enter(self, step: int) -> None:
        now = self._clock_s()
        self._entered_s = now
        if self._began_s is None:
            self._began_s = now
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
                self._recent_s.append(self._last_cost_s)
                self._spent_s += self._last_cost_s
            self._past_slower_s = self.slower_s
            self._slower_s = 0.0
            self._saves += 1
            self._blocked_s.append(now - self._entered_s)
            self._saved_s = now
        self._left = (step, now, saving)
        self.saving_s += now - self._entered_s

    @property
    def _last_cost_s(self) -> float:
        """The cost of the last save so far."""
        return self._blocked_s[-1] + max(self._slower_s, 0.0)

    def interval_s(self) -> float | None:
        """Return the time to work between two saves. None if nothing says how long."""
        if not self._saves:
            return None
        cost_s = median([*self._recent_s, self._last_cost_s])
        if self._mtbf_s is not None:
            return best_interval_s(cost_s, self._mtbf_s)
        return None if self._overhead is None else max(cost_s / self._overhead, _SHORTEST_S)

    def left_s(self) -> float:
        """Return how long `every="auto"` waits before it saves again. 0 or less: not at all.

        The first save comes after a few steps: it shows what a save costs. Without `mtbf_s` all
        saves together stay below `overhead`, counted from the first call.
        """
        interval_s = self.interval_s()
        if interval_s is None:
            return 0.0 if len(self._quiet_step_s) >= _FIRST_STEPS else math.inf
        now = self._clock_s()
        left_s = self._saved_s + interval_s - now
        if self._overhead is None or self._began_s is None:
            return left_s
        next_s = (self._spent_s + 2 * self._last_cost_s) / self._overhead
        return max(left_s, self._began_s + next_s - now)

    def advise(self) -> Advice | None:
        """Return the advice so far. None before the first save."""
        if not self._saves:
            return None
        blocked_s = median(self._blocked_s)
        slowdown_s = median(self._slowdown_s or [max(self._slower_s, 0.0)])
        # If a save is always running, only slowed-down steps have been measured.
        known_s = self._quiet_step_s or self._any_step_s
        step_s = median(known_s) if known_s else None
        interval_s = self.interval_s()
        steps = max(1, round(interval_s / step_s)) if step_s and interval_s is not None else None
        return Advice(
            self._saves,
            blocked_s,
            slowdown_s,
            step_s,
            self._mtbf_s,
            interval_s,
            steps,
            self._overhead,
        )

    def log_changes(self) -> None:
        """Log the first advice, and later ones that differ by more than a fifth."""
        advice = self.advise()
        if advice is None or advice.interval_s is None:
            return
        last_s = self._advised_s
        if last_s is None or not 0.8 * last_s <= advice.interval_s <= 1.25 * last_s:
            self._advised_s = advice.interval_s
            log.info("%s", advice)
