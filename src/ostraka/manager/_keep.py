"""The choice of steps to keep: a pure function of the existing steps. No JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ostraka.manager._arguments import (
    check_count,
    check_function,
    check_number,
    check_seconds,
)
from ostraka.manager.steps import Step


@dataclass(frozen=True, slots=True)
class Best:
    """The best steps of a run by one metric.

    Between equal values the later step is better. A step without the metric, or whose value is NaN,
    is never among the best.

    Args:
        metric: The name of the metric, as in `Manager.save(…, metrics={"loss": 0.5})`.
        mode: `"min"` if low values are good, `"max"` if high values are.
        n: How many steps count as the best.

    Raises:
        TypeError: `metric` is not a string, or `n` not a whole number.
        ValueError: `mode` is neither `"min"` nor `"max"`, or `n` is less than 1.

    Example:
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
        check_number("n of Best", self.n, least=1)

    def ranked(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        having = [s for s in steps if not math.isnan(s.metrics.get(self.metric, math.nan))]
        return sorted(having, key=lambda s: (sign * s.metrics[self.metric], -s.step))


@dataclass(frozen=True, slots=True)
class Keep:
    """The conditions to keep a step, ORed. Without any, all steps stay."""

    last: int | None = None
    every: int | None = None
    interval_s: float | None = None
    best: Best | None = None
    condition: Callable[[Step], bool] | None = None

    @property
    def keeps_all(self) -> bool:
        return self == Keep()

    @property
    def asks_for_metrics(self) -> bool:
        return self.best is not None or self.condition is not None


_LOW_IS_GOOD = {
    "loss",
    "error",
    "err",
    "perplexity",
    "ppl",
    "mse",
    "mae",
    "rmse",
    "nll",
    "wer",
    "cer",
}
_HIGH_IS_GOOD = {"accuracy", "acc", "auc", "f1", "bleu", "rouge", "map", "iou", "psnr", "reward"}


def check_best(name: str, best: Any) -> Best | None:
    """Return a Best or None. The name of a metric must say whether low or high is good."""
    if best is None or isinstance(best, Best):
        return best
    metric = best if isinstance(best, str) else "loss"
    if isinstance(best, str):
        words = {*re.split(r"[^a-z0-9]+", best.lower())}
        if words & _LOW_IS_GOOD and not words & _HIGH_IS_GOOD:
            return Best(best, "min")
        if words & _HIGH_IS_GOOD and not words & _LOW_IS_GOOD:
            return Best(best, "max")
        raise ValueError(
            f"{name} is {best!r}, which does not say whether low or high is good; pass "
            f"Best({best!r}, 'min') or Best({best!r}, 'max')"
        )
    raise TypeError(
        f"{name} must be a Best, such as Best({metric!r}, 'min') for the lowest or "
        f"Best({metric!r}, 'max') for the highest, not {best!r}"
    )


def check_keep(last: Any, every: Any, interval_s: Any, best: Any, condition: Any) -> Keep:
    """Return a manager's conditions. Raises TypeError or ValueError, naming the argument."""
    return Keep(
        check_count("keep", last),
        check_count("keep_every", every),
        check_seconds("keep_every_s", interval_s),
        check_best("keep_best", best),
        check_function("keep_if", condition),
    )


def find_superfluous(steps: Sequence[Step], keep: Keep, *, just_saved: int) -> list[int]:
    """Return the steps to delete, the oldest first. `steps` must ascend.

    The newest, pinned ones and the one that was just saved are never among them. Foreign steps
    neither count nor are deleted.
    """
    if keep.keeps_all:
        return []
    steps = [step for step in steps if not step.is_foreign]
    kept = {just_saved, *(step.step for step in steps[-1:])}
    kept.update(step.step for step in steps if step.pinned)
    kept.update(step.step for step in _chosen(steps, keep))
    return [step.step for step in steps if step.step not in kept]


def find_counted(steps: Sequence[Step], keep: Keep) -> set[int]:
    """Return the steps that stay instead of others. `steps` must ascend."""
    steps = [step for step in steps if not step.is_foreign]
    counting = Keep(keep.last, None, keep.interval_s, keep.best, None)
    return {step.step for step in (*steps[-1:], *_chosen(steps, counting))}


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
    """Yield the first step, and each that was saved `interval_s` or more after the last one kept.

    If the clock was set back, or a time is unknown, a new interval begins. So one step too many
    stays rather than one too few.
    """
    since: float | None = None
    for step in steps:
        now = step.saved_at
        if since is None or now is None or now < since or now - since >= interval_s:
            since = now
            yield step
