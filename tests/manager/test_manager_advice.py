"""What a save costs the loop, and the advice that follows, measured on a made-up loop."""

import logging
from pathlib import Path

import numpy as np
import pytest

from ostraka import Manager
from ostraka.common.record import best_interval_s
from ostraka.manager._advice import CostMeter


class MadeUpLoop:
    """A clock that stands where it was put."""

    def __init__(self, mtbf_s: float | None):
        self.now = 0.0
        self.meter = CostMeter(mtbf_s, lambda: self.now)

    def step(self, step: int, *, takes: float, blocks: float = 0.0, saving: bool = False) -> None:
        self.now += takes
        self.meter.enter(step)
        self.now += blocks
        self.meter.leave(step, began=blocks > 0, saving=saving)


def test_the_cost_of_saving_is_measured():
    loop = MadeUpLoop(mtbf_s=10_000.0)
    assert loop.meter.advise() is None
    for step in range(60):
        begins = step % 10 == 5
        busy = step % 10 in (6, 7, 8)  # three steps are slower by 0.5 s each
        loop.step(
            step,
            takes=1.5 if busy and step > 9 else 1.0,
            blocks=0.25 if begins else 0.0,
            saving=step % 10 in (5, 6, 7),
        )
    advice = loop.meter.advise()
    assert advice is not None
    assert advice.saves == 6
    assert advice.blocked_s == pytest.approx(0.25)
    assert advice.slowdown_s == pytest.approx(1.5)
    assert advice.cost_s == pytest.approx(1.75)
    assert advice.step_s == pytest.approx(1.0)
    assert advice.interval_s == pytest.approx(best_interval_s(1.75, 10_000.0))
    assert advice.interval_steps == round(best_interval_s(1.75, 10_000.0))
    assert "with a failure every 10,000 s, save every 186 s, which is 186 steps" in str(advice)


def test_without_a_time_between_failures_there_is_only_the_cost():
    loop = MadeUpLoop(mtbf_s=None)
    loop.step(1, takes=1.0, blocks=0.5)
    advice = loop.meter.advise()
    assert advice is not None
    assert advice.interval_s is None
    assert str(advice) == "a save costs the loop 0.5 s (blocked 0.5 s, slower steps 0 s)"


def test_the_manager_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with (
        caplog.at_level(logging.INFO, "ostraka"),
        Manager(tmp_path, every=2, mtbf_s=3600) as manager,
    ):
        assert manager.advice is None
        for step in range(5):
            manager.save(step, {"a": np.arange(10)})
        advice = manager.advice
    assert advice is not None
    assert advice.saves == 3
    assert advice.cost_s > 0
    assert advice.interval_steps
    assert "with a failure every 3,600 s, save every" in caplog.text
