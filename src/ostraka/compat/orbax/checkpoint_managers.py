"""The manager's policies: which steps to save, and which to keep."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

preservation_policy: Any
save_decision_policy: Any
"""This module: `checkpoint_managers` has two modules in Orbax."""


@dataclass
class PolicyCheckpointInfo:
    """A step that policies decide about."""

    step: int
    time: datetime
    metrics: Any = None


Steps = Sequence[Any]
"""Objects like `PolicyCheckpointInfo`, by ascending step."""


# preservation_policy


@dataclass
class PreservationContext:
    multiprocessing_options: Any = None


class PreservationPolicy(Protocol):
    """Decides which steps to keep. Returns True or False for each step."""

    def should_preserve(
        self, checkpoints: Steps, *, context: PreservationContext
    ) -> Sequence[bool]: ...


@dataclass
class LatestN(PreservationPolicy):
    """Keeps the last `n` steps, or all if `n` is None."""

    n: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        count = len(checkpoints)
        kept = count if self.n is None else self.n
        return [number >= count - kept for number in range(count)]


class PreserveAll(LatestN):
    """Keeps all steps."""


@dataclass
class EveryNSteps(PreservationPolicy):
    """Keeps multiples of the interval, the `max_to_keep` latest of them.

    With `exact_interval=False` it keeps the first step, and each that is at least an interval
    after the last one kept.
    """

    interval_steps: int
    exact_interval: bool = True
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        if self.interval_steps == 0:
            raise ValueError("interval_steps must not be 0.")
        if self.exact_interval:
            kept = [
                n for n, found in enumerate(checkpoints) if found.step % self.interval_steps == 0
            ]
        else:
            kept = _spaced([found.step for found in checkpoints], self.interval_steps)
        return _latest_of(kept, self.max_to_keep, len(checkpoints))


@dataclass
class EveryNStepsClosest(PreservationPolicy):
    """Keeps the step closest to each multiple of the interval, and the last step."""

    interval_steps: int
    max_to_keep: int | None = None

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        if self.interval_steps == 0:
            raise ValueError("interval_steps must not be 0.")
        closest: dict[int, tuple[int, int]] = {}
        for number, found in enumerate(checkpoints):
            multiple = round(found.step / self.interval_steps)
            off = abs(found.step - multiple * self.interval_steps)
            if multiple not in closest or off <= closest[multiple][0]:
                closest[multiple] = (off, number)
        kept = {number for _, number in closest.values()} | {len(checkpoints) - 1}
        return _latest_of(kept, self.max_to_keep, len(checkpoints))


def _spaced(values: Sequence[Any], interval: Any) -> list[int]:
    """Return the indexes of the first value, and of each an interval after the last one kept."""
    kept: list[int] = []
    for number, value in enumerate(values):
        if not kept or value - values[kept[-1]] >= interval:
            kept.append(number)
    return kept


def _latest_of(kept: Collection[int], most: int | None, count: int) -> list[bool]:
    """Return True for the `most` latest of the indexes that are kept, out of `count`."""
    if most is not None:
        kept = sorted(kept)[-most:]  # as Orbax has it, 0 is no limit
    return [number in kept for number in range(count)]


@dataclass
class LatestDuration(PreservationPolicy):
    """Keeps the first step that is no older than `duration`, and all after it."""

    duration: timedelta

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        since = datetime.now(UTC) - self.duration
        young = [found.time >= since for found in checkpoints]
        return [any(young[: number + 1]) for number in range(len(young))]


@dataclass
class EveryNSeconds(PreservationPolicy):
    """Keeps the first step, and each that is at least an interval after the last one kept."""

    interval_secs: float

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        times = [found.time for found in checkpoints]
        kept = _spaced(times, timedelta(seconds=self.interval_secs))
        return _latest_of(kept, None, len(checkpoints))


@dataclass
class CustomSteps(PreservationPolicy):
    steps: Collection[int]

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        return [found.step in self.steps for found in checkpoints]


@dataclass
class BestN(PreservationPolicy):
    """Keeps the `n` steps with the highest metric, or the lowest with `reverse`. None keeps all."""

    get_metric_fn: Callable[[Any], Any]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        if not self.n or len(checkpoints) <= self.n:
            return [self.n != 0] * len(checkpoints)
        best = [found.step for found in ranked(checkpoints, self.get_metric_fn, self.reverse)]
        kept = set(best[-self.n :])
        without = self.keep_checkpoints_without_metrics
        return [found.step in kept or (without and found.metrics is None) for found in checkpoints]


def ranked(checkpoints: Steps, metric: Callable[[Any], Any], reverse: bool) -> list[Any]:
    """Return the steps that have metrics, the best last."""
    rated = [found for found in checkpoints if found.metrics is not None]
    return sorted(rated, key=lambda found: metric(found.metrics), reverse=reverse)


@dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """Keeps the steps that any of several policies keeps."""

    policies: Sequence[Any]

    def should_preserve(self, checkpoints: Steps, *, context: PreservationContext) -> list[bool]:
        votes = [p.should_preserve(checkpoints, context=context) for p in self.policies]
        return [any(column) for column in zip(*votes, strict=True)]


# save_decision_policy


@dataclass
class DecisionContext:
    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: Any = None


class SaveDecisionPolicy(Protocol):
    """Decides if a step is saved."""

    def should_save(
        self, step: Any, previous_steps: Steps, *, context: DecisionContext
    ) -> bool: ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """Saves multiples of `interval`."""

    interval: int

    def should_save(self, step: Any, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return step.step % self.interval == 0


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    steps: Container[int] = ()

    def should_save(self, step: Any, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return step.step in self.steps


@dataclass
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Saves if no save is running and the last step is old enough."""

    minimum_interval_secs: float | None = None

    def should_save(self, step: Any, previous_steps: Steps, *, context: DecisionContext) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return time.time() - previous_steps[-1].time.timestamp() >= self.minimum_interval_secs


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    def should_save(self, step: Any, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return context.reached_preemption


class InitialSavePolicy(SaveDecisionPolicy):
    """Saves if there is no step yet."""

    def should_save(self, step: Any, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    policies: Sequence[Any]

    def should_save(self, step: Any, previous_steps: Steps, *, context: DecisionContext) -> bool:
        return any(p.should_save(step, previous_steps, context=context) for p in self.policies)


@dataclass
class ShouldSaveFnPolicy(SaveDecisionPolicy):
    """Saves a step if a function of it and of the last step returns True."""

    should_save_fn: Callable[[int, int | None], bool]

    def should_save(self, step: Any, previous_steps: Steps, *, context: DecisionContext) -> bool:
        last = previous_steps[-1].step if previous_steps else None
        return self.should_save_fn(step.step, last)
