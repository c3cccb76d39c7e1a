"""When to save: steps, seconds, a callable; the same answer on every process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ostraka.manager._check import check_count, check_function, check_seconds, check_steps
from ostraka.manager._together import decide_together

_LOOK_MARGIN = 0.02
"""How late a save by the clock may be, as a part of its interval, to ask less often."""


@dataclass(frozen=True, slots=True)
class When:
    """The conditions to save, ORed. With none given, every step is saved."""

    every: int | None
    every_s: float | None
    at: frozenset[int]
    condition: Callable[[int], bool] | None

    @property
    def saves_all(self) -> bool:
        return not (self.every or self.every_s or self.at or self.condition)

    def described(self) -> dict[str, str]:
        """By argument, to compare with that of another process."""
        return {
            "every": str(self.every),
            "every_s": str(self.every_s),
            "at": str(sorted(self.at)),
            "when": "None" if self.condition is None else "a function",
        }

    def comes_between(self, last: int | None, step: int) -> bool:
        """Whether a step after `last`, up to and with `step`, is one to save.

        So a loop that takes several steps at once misses none.
        """
        before = step - 1 if last is None or last >= step else last
        if self.every is not None and step // self.every > before // self.every:
            return True
        return any(before < wanted <= step for wanted in self.at)


def check_when(every: Any, every_s: Any, at: Any, condition: Any) -> When:
    """A manager's conditions. Raises TypeError or ValueError, naming the argument."""
    return When(
        check_count("every", every),
        check_seconds("every_s", every_s),
        check_steps("at", at),
        check_function("when", condition),
    )


class Schedule:
    """Answers whether a step is to be saved.

    `every` and `at` depend on the step alone, so every process answers by itself. Process 0 decides
    about the (monotonic) clock and about `when`. Its answer about the clock names the step at which
    to ask again, so that an interval costs a few messages and not one for each step.
    """

    def __init__(self, when: When):
        self.when = when
        self._last: int | None = None
        self._begun: int | None = None
        self._answer = False
        self._ask_again = 0
        self._saved_at_s = time.monotonic()
        self._asked_step: int | None = None
        self._asked_at_s = 0.0

    def is_due(self, step: int) -> bool:
        """Whether to save this step; the answer for a step does not change."""
        if step != self._last:
            self._answer = self._is_due(step)
            self._last = step
        return self._answer

    def note_restore(self, step: int) -> None:
        """A run continues from here: steps between this one and its first are counted, too."""
        self._begun = step

    def note_save(self) -> None:
        """A save begins, and with it the next interval."""
        self._saved_at_s = time.monotonic()
        self._ask_again = 0
        self._asked_step = None

    def _is_due(self, step: int) -> bool:
        when = self.when
        last = self._begun if self._last is None else self._last
        if when.saves_all or when.comes_between(last, step):
            return True
        rewound = self._last is not None and step < self._last
        if when.condition is None and (
            when.every_s is None or (step < self._ask_again and not rewound)
        ):
            return False
        due, self._ask_again = decide_together(
            f"decision whether to save step {step}", lambda: self._decide(step)
        )
        return due

    def _decide(self, step: int) -> tuple[bool, int]:
        """On process 0: whether to save, and before which step not to ask about the clock."""
        when = self.when
        due = when.condition is not None and bool(when.condition(step))
        if when.every_s is None:
            return due, 0
        now = time.monotonic()
        left_s = when.every_s - (now - self._saved_at_s)
        ahead = 1
        if jax.process_count() > 1 and self._asked_step is not None and step > self._asked_step:
            step_s = max((now - self._asked_at_s) / (step - self._asked_step), 1e-6)
            # Half of the remaining time, since steps may become slower.
            ahead = max(1, int(max(left_s / 2, when.every_s * _LOOK_MARGIN) / step_s))
        self._asked_step, self._asked_at_s = step, now
        return due or left_s <= 0, step + ahead
