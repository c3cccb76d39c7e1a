"""When to save."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


@dataclass
class DecisionContext:
    is_saving_in_progress: bool
    reached_preemption: bool
    multiprocessing_options: Any = None


class SaveDecisionPolicy(Protocol):
    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool: ...


@dataclass
class FixedIntervalPolicy(SaveDecisionPolicy):
    """At multiples of `interval`."""

    interval: int

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return step.step % self.interval == 0


@dataclass
class SpecificStepsPolicy(SaveDecisionPolicy):
    steps: Container[int] = ()

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return step.step in self.steps


@dataclass
class ContinuousCheckpointingPolicy(SaveDecisionPolicy):
    """Whenever no save is under way, and so many seconds have gone by since the last step."""

    minimum_interval_secs: float | None = None

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        if context.is_saving_in_progress:
            return False
        if not previous_steps or self.minimum_interval_secs is None:
            return True
        return time.time() - previous_steps[-1].time.timestamp() >= self.minimum_interval_secs


class PreemptionCheckpointingPolicy(SaveDecisionPolicy):
    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return context.reached_preemption


class InitialSavePolicy(SaveDecisionPolicy):
    """If there is no step yet."""

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return not previous_steps


@dataclass
class AnySavePolicy(SaveDecisionPolicy):
    policies: Sequence[Any]

    def should_save(
        self, step: Any, previous_steps: Sequence[Any], *, context: DecisionContext
    ) -> bool:
        return any(p.should_save(step, previous_steps, context=context) for p in self.policies)
