"""What checkpoints cost a run: against a clock that the test sets, and in a real loop."""

import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import ostraka
from ostraka.manager._advice import CostMeter
from ostraka.manager._losses import Losses


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Loop:
    """Steps of one second, and calls of `save` that take as long as they are told to."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.losses = Losses(CostMeter(None, self.clock), self.clock)

    def step(
        self, number: int, *, takes_s: float = 1.0, saves_s: float = 0.0, saving: bool = False
    ):
        self.clock.now_s += takes_s
        self.losses.enter(number)
        self.clock.now_s += saves_s
        self.losses.leave(number, began=saves_s > 0, saving=saving)


def test_each_second_is_counted_once():
    loop = Loop()
    for number in range(1, 5):
        loop.step(number)
    loop.step(5, saves_s=0.5, saving=True)
    loop.step(6, takes_s=1.75, saving=True)
    loop.step(7, takes_s=1.25)
    for number in range(8, 11):
        loop.step(number)
    with loop.losses.timing("waiting"):
        loop.clock.now_s += 3.0
    found = loop.losses.stats()
    assert found.by_reason() == {
        "saving": 0.5,
        "slower": 1.0,
        "waiting": 3.0,
        "restoring": 0.0,
        "repeated": 0.0,
    }
    assert found.elapsed_s == 10 + 0.5 + 1.0 + 3.0
    assert found.lost_s == 4.5
    assert found.lost_share == pytest.approx(4.5 / 14.5)
    assert found.goodput == pytest.approx(10 / 14.5)


@pytest.mark.parametrize("audit_every", [1, 3])
def test_steps_are_repeated_up_to_the_last_known_one(audit_every: int):
    """The journal is read at the first audited step."""
    loop = Loop()
    with loop.losses.timing("restoring"):
        loop.clock.now_s += 2.0
    loop.losses.note_restore(20, is_audited=True)
    for number in range(21, 30):
        if number % audit_every == 0:
            loop.losses.reached = 24
        loop.step(number, saves_s=0.5 if number == 22 else 0.0)
    found = loop.losses.stats()
    assert found.restoring_s == 2.0
    assert found.repeated_s == 4.0
    assert found.lost_s == 6.5


def test_nobody_knows_what_is_repeated_without_an_audit():
    loop = Loop()
    loop.losses.note_restore(20, is_audited=False)
    loop.step(21)
    assert loop.losses.stats().repeated_s is None
    assert loop.losses.stats().lost_s == 0.0


def test_a_real_loop(tmp_path: Path):
    """Each part takes at least what the loop itself measures, and all together no more."""
    options: dict[str, Any] = {"asynchronous": False, "audit_every": 1}
    state = {"x": jnp.ones(1000)}
    step_s: dict[int, float] = {}

    def train(manager: ostraka.Manager, first: int, last: int) -> None:
        for step in range(first, last + 1):
            began_s = time.perf_counter()
            time.sleep(0.03)
            state["x"] = state["x"] + 1
            step_s[step] = time.perf_counter() - began_s
            manager.save(step, state)

    with ostraka.Manager(tmp_path, every=4, **options) as manager:
        assert manager.resume(state) == 0
        train(manager, 1, 7)
        assert manager.stats.repeated_s == 0.0
        assert manager.stats.saving_s > 0
    began_s = time.perf_counter()
    with ostraka.Manager(tmp_path, every=4, **options) as manager:
        assert manager.resume(state) == 4
        resumed_s = time.perf_counter() - began_s
        train(manager, 5, 12)
        stats = manager.stats
    whole_s = time.perf_counter() - began_s
    assert stats.repeated_s is not None
    assert 0 < stats.restoring_s <= resumed_s
    assert stats.repeated_s >= sum(step_s[step] for step in (5, 6, 7))
    assert stats.lost_s >= stats.repeated_s + stats.restoring_s + stats.saving_s
    assert stats.elapsed_s <= whole_s
    # What is not lost are the steps that nobody had done before.
    assert stats.elapsed_s - stats.lost_s >= sum(step_s[step] for step in range(8, 13))
    assert stats.goodput == pytest.approx(1 - stats.lost_s / stats.elapsed_s)
