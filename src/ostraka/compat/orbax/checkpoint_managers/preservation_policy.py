"""Which steps stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


@dataclass
class PolicyCheckpointInfo:
    """A step that is there."""

    step: int
    time: datetime
    metrics: Any = None


@dataclass
class PreservationContext:
    multiprocessing_options: Any = None


class PreservationPolicy(Protocol):
    """For each step, in ascending order, whether it stays."""

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]: ...


@dataclass
class PreserveAll(PreservationPolicy):
    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        return [True] * len(checkpoints)


@dataclass
class LatestN(PreservationPolicy):
    """The last `n`; None for all."""

    n: int | None = None

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        count = len(checkpoints)
        kept = count if self.n is None else self.n
        return [number >= count - kept for number in range(count)]


@dataclass
class EveryNSteps(PreservationPolicy):
    interval_steps: int

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        if self.interval_steps == 0:
            raise ValueError("interval_steps must not be 0.")
        return [found.step % self.interval_steps == 0 for found in checkpoints]


@dataclass
class EveryNSeconds(PreservationPolicy):
    """The first, and each that is at least so many seconds after the last one that stays."""

    interval_secs: float

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        result: list[bool] = []
        last: datetime | None = None
        for found in checkpoints:
            kept = last is None or (found.time - last).total_seconds() >= self.interval_secs
            result.append(kept)
            last = found.time if kept else last
        return result


@dataclass
class CustomSteps(PreservationPolicy):
    steps: Collection[int]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        return [found.step in self.steps for found in checkpoints]


@dataclass
class BestN(PreservationPolicy):
    """The `n` with the highest metric, with `reverse` the lowest; None for all."""

    get_metric_fn: Callable[[Any], Any]
    reverse: bool = False
    n: int | None = None
    keep_checkpoints_without_metrics: bool = True

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        if self.n is None:
            return [True] * len(checkpoints)
        best = [found.step for found in ranked(checkpoints, self.get_metric_fn, self.reverse)]
        kept = set(best[-self.n :] if self.n else [])
        without = self.keep_checkpoints_without_metrics
        return [found.step in kept or (without and found.metrics is None) for found in checkpoints]


def ranked(checkpoints: Sequence[Any], metric: Callable[[Any], Any], reverse: bool) -> list[Any]:
    """Those with metrics, the best last."""
    rated = [found for found in checkpoints if found.metrics is not None]
    return sorted(rated, key=lambda found: metric(found.metrics), reverse=reverse)


@dataclass
class AnyPreservationPolicy(PreservationPolicy):
    """What any of several policies keeps."""

    policies: Sequence[Any]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: PreservationContext
    ) -> Sequence[bool]:
        votes = [p.should_preserve(checkpoints, context=context) for p in self.policies]
        return [any(column) for column in zip(*votes, strict=True)]
