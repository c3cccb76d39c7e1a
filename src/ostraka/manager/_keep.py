"""What to keep: a pure function of the steps that are there. No JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ostraka.manager._check import check_count, check_function, check_seconds
from ostraka.manager._steps import Step


@dataclass(frozen=True, slots=True)
class Best:
    """The `n` steps with the lowest (`"min"`) or highest (`"max"`) value of a metric.

    Of equal ones the later is better. A step without the metric, or with NaN, is never among them.

    >>> ostraka.Manager("runs/a", keep_best=ostraka.Best("accuracy", "max", n=3))
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    n: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"the mode of Best must be 'min' or 'max', not {self.mode!r}")
        metric: Any = self.metric
        if not isinstance(metric, str):
            raise TypeError(f"the metric of Best must be a name, not {metric!r}")
        if check_count("n of Best", self.n) is None:
            raise TypeError("n of Best must be a whole number, not None")

    def ranked(self, steps: Sequence[Step]) -> list[Step]:
        """The steps that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        having = [s for s in steps if not math.isnan(s.metrics.get(self.metric, math.nan))]
        return sorted(having, key=lambda s: (sign * s.metrics[self.metric], -s.step))


@dataclass(frozen=True, slots=True)
class Keep:
    """The conditions to keep a step, ORed. With none given, all steps are kept."""

    last: int | None
    every: int | None
    interval_s: float | None
    best: Best | None
    condition: Callable[[Step], bool] | None

    @property
    def keeps_all(self) -> bool:
        conditions = (self.last, self.every, self.interval_s, self.best, self.condition)
        return all(condition is None for condition in conditions)

    def described(self) -> dict[str, str]:
        """By argument, to compare with that of another process."""
        return {
            "keep": str(self.last),
            "keep_every": str(self.every),
            "keep_interval_s": str(self.interval_s),
            "keep_best": str(self.best),
            "keep_if": "None" if self.condition is None else "a function",
        }


def check_best(name: str, best: Any) -> Best | None:
    """A Best or None. A metric alone is refused: it does not say whether low or high is best."""
    if best is None or isinstance(best, Best):
        return best
    metric = best if isinstance(best, str) else "loss"
    raise TypeError(
        f"{name} must be a Best, such as Best({metric!r}, 'min') for the lowest or "
        f"Best({metric!r}, 'max') for the highest, not {best!r}"
    )


def check_keep(last: Any, every: Any, interval_s: Any, best: Any, condition: Any) -> Keep:
    """A manager's conditions. Raises TypeError or ValueError, naming the argument."""
    return Keep(
        check_count("keep", last),
        check_count("keep_every", every),
        check_seconds("keep_interval_s", interval_s),
        check_best("keep_best", best),
        check_function("keep_if", condition),
    )


def find_superfluous(steps: Sequence[Step], keep: Keep, *, just_saved: int) -> list[int]:
    """The steps to delete, the oldest first; `steps` ascend.

    Never the newest, a pinned one, or the one that was just saved.
    """
    if keep.keeps_all:
        return []
    kept = {just_saved, *(step.step for step in steps[-1:])}
    kept.update(step.step for step in steps if step.pinned)
    kept.update(step.step for step in _chosen(steps, keep))
    return [step.step for step in steps if step.step not in kept]


def _chosen(steps: Sequence[Step], keep: Keep) -> Iterator[Step]:
    if keep.last is not None:
        yield from steps[-keep.last :]
    if keep.every is not None:
        yield from (step for step in steps if step.step % keep.every == 0)
    if keep.interval_s is not None:
        yield from _one_per_interval(steps, keep.interval_s)
    if keep.best is not None:
        yield from keep.best.ranked(steps)[: keep.best.n]
    if keep.condition is not None:
        yield from (step for step in steps if keep.condition(step))


def _one_per_interval(steps: Sequence[Step], interval_s: float) -> Iterator[Step]:
    """The first step, and each that was saved `interval_s` or more after the last one kept.

    If the clock was set back, or a time is unknown, a new interval begins: one step too many is
    kept rather than one too few.
    """
    since: float | None = None
    for step in steps:
        now = step.saved_s
        if since is None or now is None or now < since or now - since >= interval_s:
            since = now
            yield step
