"""The cost of saving for the loop, and how often to save. No JAX.

`every="auto"` follows this advice. With `mtbf_s` it takes Daly's optimum. Without it the share of
the time that saves may cost, `overhead`, is a budget. All saves since the first step, and the next
one, must stay within it. A save that cost more than the ones before delays the next one until that
is made up for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, median_low

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
_LONGEST_S = 1800.0
"""What a save cost beyond the usual delays the next one no longer than this, or two intervals."""
_NOTABLE = 1.25
"""A wait that differs from the interval by this factor is worth a word."""


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
    spent: float | None = None
    """The share of the time that saves have cost so far, with `overhead`."""
    wait_s: float | None = None
    """The time from the last save to the next one of `every="auto"`, if it is not `interval_s`."""

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
        text = f"{text}; {reason}, save every {_seconds(self.interval_s)} s{steps}"
        if self.wait_s is None:
            return text
        if self.spent is not None and self.wait_s > self.interval_s:
            text += f"; saves have cost {self.spent:.2g} of the time so far"
        return f"{text}; the next one comes {_seconds(self.wait_s)} s after the last"


def _seconds(given_s: float) -> str:
    return f"{given_s:,.0f}" if given_s >= 10 else f"{given_s:.2g}"


class CostMeter:
    """Measures the loop by the times of its calls of `save`: `enter` and `leave` around each.

    With `overhead`, `left_s` answers for `every="auto"`. It keeps the cost of saves within this
    share of the time, unless `mtbf_s` is known.
    """

    def __init__(
        self,
        mtbf_s: float | None,
        clock_s: Callable[[], float] = time.perf_counter,
        overhead: float | None = None,
    ):
        self._mtbf_s = mtbf_s
        self._overhead = None if mtbf_s is not None else overhead
        self._is_auto = overhead is not None
        self._expected_s: float | None = None
        self._decided: tuple[float | None, float] | None = None
        """What `_wait_s` and `_longest_s` have returned, until what they depend on changes."""
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
        self._advised: tuple[float, bool] | None = None
        """The interval that was last logged, and True if another wait was."""
        self.has_news = False
        """True if the last call began a save, or was the first one after it."""
        self._past_slower_s = 0.0
        self.saving_s = 0.0
        """The time in all calls that have returned."""

    @property
    def slower_s(self) -> float:
        """How much longer the steps took during all saves."""
        return self._past_slower_s + max(self._slower_s, 0.0)

    def expect(self, cost_s: float) -> None:
        """Expect that a save costs so much, until one is measured: the run before has done so."""
        self._expected_s = cost_s
        self._decided = None

    def enter(self, step: int) -> None:
        now = self._clock_s()
        self._entered_s = now
        if self._began_s is None:
            self._began_s = now
            self._decided = None
        if self._left is None or step <= self._left[0]:
            return
        last, left_s, was_saving = self._left
        steps = step - last
        self._any_step_s.append((now - left_s) / steps)
        if not was_saving:
            self._quiet_step_s.append((now - left_s) / steps)
        elif self._quiet_step_s:
            self._decided = None
            self._slower_s += (now - left_s) - steps * median(self._quiet_step_s)

    def leave(self, step: int, *, began: bool, saving: bool) -> None:
        """Note the end of a call. `began`: it began a save. `saving`: a save is running now."""
        now = self._clock_s()
        self.has_news = began or (self._left is not None and self._left[2] and not saving)
        if began:
            self._decided = None
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

    @property
    def _usual_cost_s(self) -> float:
        """The cost of the latest saves. Of two, the lower: first ones open files, compile, wait."""
        return median_low([*self._recent_s, self._last_cost_s])

    def interval_s(self) -> float | None:
        """Return the time to work between two saves. None if nothing says how long."""
        if self._saves:
            cost_s = self._usual_cost_s
        elif self._expected_s is not None:
            cost_s = self._expected_s
        else:
            return None
        if self._mtbf_s is not None:
            return best_interval_s(cost_s, self._mtbf_s)
        return None if self._overhead is None else max(cost_s / self._overhead, _SHORTEST_S)

    def left_s(self, *, saving: bool = False) -> float:
        """Return how long `every="auto"` waits before it saves again. 0 or less: not at all.

        The first save comes after a few steps: it shows what a save costs. While a save is running
        (`saving`), the next one would only block the loop.
        """
        if not self._saves and len(self._quiet_step_s) < _FIRST_STEPS:
            return math.inf
        if self._decided is None:  # Most calls come at steps that change nothing.
            self._decided = self._wait_s(), self._longest_s()
        wait_s, longest_s = self._decided
        if wait_s is None:
            return 0.0
        now = self._clock_s()
        left_s = self._since_s + wait_s - now
        if saving and now < self._since_s + longest_s:
            left_s = max(left_s, _SHORTEST_S)
        return left_s

    @property
    def _since_s(self) -> float:
        """The last save, or before it the first call."""
        return self._saved_s if self._saves else self._began_s or 0.0

    def _wait_s(self) -> float | None:
        """The time from the last save, or from the first call, to the next save."""
        wait_s = self.interval_s()
        if wait_s is None:
            return None
        if self._overhead is not None and self._began_s is not None:
            wait_s = max(
                wait_s, self._began_s + self._spent_until_next_s() / self._overhead - self._since_s
            )
        return min(wait_s, self._longest_s())

    def _spent_until_next_s(self) -> float:
        """The cost of all saves and the next one, which costs as much as the last, or the usual."""
        if not self._saves:
            return self._expected_s or 0.0
        return self._spent_s + self._last_cost_s + max(self._usual_cost_s, self._last_cost_s)

    def _longest_s(self) -> float:
        """The longest time without a save.

        One cost alone says little of the next one.
        """
        return max(_LONGEST_S, 2 * (self.interval_s() or 0.0) if self._saves > 1 else 0.0)

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
        wait_s = self._wait_s() if self._is_auto else None
        if wait_s and interval_s and 1 / _NOTABLE <= wait_s / interval_s <= _NOTABLE:
            wait_s = None
        spent = None
        if self._overhead is not None and self._began_s is not None:
            elapsed_s = max(self._clock_s() - self._began_s, 1e-9)
            spent = (self._spent_s + self._last_cost_s) / elapsed_s
        return Advice(
            self._saves,
            blocked_s,
            slowdown_s,
            step_s,
            self._mtbf_s,
            interval_s,
            steps,
            self._overhead,
            spent,
            wait_s,
        )

    def log_changes(self) -> None:
        """Log the first advice, and later ones that differ by more than a fifth.

        A wait that differs from the interval is logged as well, once for each time that it does.
        """
        advice = self.advise()
        if advice is None or advice.interval_s is None:
            return
        last_s, waited = self._advised or (0.0, False)
        waits = advice.wait_s is not None
        if 0.8 * last_s <= advice.interval_s <= 1.25 * last_s and (waited or not waits):
            self._advised = last_s, waits
            return
        self._advised = advice.interval_s, waits
        log.info("%s", advice)
