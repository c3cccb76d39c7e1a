"""When to save: at steps, after seconds, or by a function. All processes agree."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax

from ostraka.manager._arguments import check_count, check_function, check_seconds, check_steps
from ostraka.processes.decide import decide_together

_LOOK_MARGIN = 0.02
"""How late a save by the clock may be, as a part of its interval, so that few messages do."""


class Schedule:
    """Decides if a step is to be saved. The conditions are ORed. Without any, every step is saved.

    `every` and `at` depend on the step alone, so every process answers by itself. Process 0 decides
    about the (monotonic) clock and about `when`. Its answer about the clock names the step to ask
    again at. So an interval costs a few messages, and not one for each step.

    With `every="auto"`, `left_s` returns on process 0 how many seconds are left until a save is
    due.
    """

    def __init__(
        self,
        every: Any,
        every_s: Any,
        at: Any,
        when: Any,
        left_s: Callable[[], float] | None = None,
    ):
        """Raises TypeError or ValueError, naming the argument."""
        if isinstance(every, str) and every != "auto":
            raise ValueError(f'every is {every!r}; it must be a number of steps, or "auto"')
        self.is_auto = every == "auto"
        self.every = check_count("every", None if every == "auto" else every)
        self._left_s = left_s if self.is_auto else None
        self.every_s = check_seconds("every_s", every_s)
        self.at = check_steps("at", at)
        self.when: Callable[[int], bool] | None = check_function("when", when)
        self._last: int | None = None
        self._begun: int | None = None
        self._answer = False
        self._ask_again = 0
        self._saved_at_s = time.monotonic()
        self._asked_step: int | None = None
        self._asked_at_s = 0.0

    def is_due(self, step: int) -> bool:
        """Return True if this step is to be saved. The answer for a step does not change."""
        if step != self._last:
            self._answer = self._is_due(step)
            self._last = step
        return self._answer

    def note_restore(self, step: int) -> None:
        """Note that a run resumes from here: steps between this one and its first count, too."""
        self._begun = step

    def note_save(self) -> None:
        """Note that a save begins, and with it the next interval."""
        self._saved_at_s = time.monotonic()
        self._ask_again = 0
        self._asked_step = None

    def _is_due(self, step: int) -> bool:
        if not (self.every or self.every_s or self.at or self.when or self.is_auto):
            return True
        # Steps between the last one and this one count: a loop may take several at once.
        last = self._begun if self._last is None else self._last
        before = step - 1 if last is None or last >= step else last
        if self.every is not None and step // self.every > before // self.every:
            return True
        if any(before < wanted <= step for wanted in self.at):
            return True
        rewound = self._last is not None and step < self._last
        has_clock = self.every_s is not None or self.is_auto
        if self.when is None and (not has_clock or (step < self._ask_again and not rewound)):
            return False
        if self.when is None and jax.process_count() == 1:
            # Most calls of a loop come here. With cold caches an operation takes 60 microseconds.
            due, self._ask_again = self._decide(step)
        else:
            due, self._ask_again = decide_together(
                f"decision whether to save step {step}", lambda: self._decide(step)
            )
        return due

    def _decide(self, step: int) -> tuple[bool, int]:
        """On process 0: decide about a step, and before which step not to ask about the clock."""
        due = self.when is not None and bool(self.when(step))
        if self.every_s is None and self._left_s is None:
            return due, 0
        now = time.monotonic()
        left_s = math.inf if self._left_s is None else self._left_s()
        interval_s = now - self._saved_at_s + max(left_s, 0.0)
        if self.every_s is not None:
            left_s = min(left_s, self.every_s - (now - self._saved_at_s))
            interval_s = self.every_s
        ahead = 1
        if jax.process_count() > 1 and self._asked_step is not None and step > self._asked_step:
            step_s = max((now - self._asked_at_s) / (step - self._asked_step), 1e-6)
            # Half of the remaining time, since steps may become slower.
            if left_s < math.inf:
                ahead = max(1, int(max(left_s / 2, interval_s * _LOOK_MARGIN) / step_s))
        self._asked_step, self._asked_at_s = step, now
        return due or left_s <= 0, step + ahead
