"""`every="auto"` and `if_running`: how often to save, and what becomes of a running save."""

import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from ostraka import Manager, errors
from ostraka.manager._advice import Advice, CostMeter
from ostraka.testing import FaultyStore, run_processes

# A made-up cluster: steps, saves and failures take time on a clock of its own


class Cluster:
    """Failures at random, lost work, restarts."""

    def __init__(self, seed: int):
        chance = random.Random(seed)
        self.now = 0.0
        self.mtbf_s = chance.uniform(1_800, 20_000)
        self.cost_s = chance.choice([0.5, 3, 10, 30])
        self.step_s = chance.uniform(1, 6)
        self.restart_s = chance.uniform(30, 300)
        self.failures = [chance.expovariate(1 / self.mtbf_s)]
        while self.failures[-1] < 50 * self.mtbf_s:
            self.failures.append(self.failures[-1] + chance.expovariate(1 / self.mtbf_s))

    def useful_s(self, steps_until_save: Callable[[CostMeter], int]) -> float:
        """The work that no failure took back, in seconds of steps."""
        self.now, saved = 0.0, 0
        advice: Advice | None = None
        for failure in self.failures:
            meter, work = CostMeter(self.mtbf_s, lambda: self.now), saved
            if advice is not None:  # as a manager finds it in `_RUN`
                meter.expect(advice.cost_s)
            while self.now < failure:
                steps = steps_until_save(meter)
                self.now += steps * self.step_s
                work += steps
                meter.enter(work)
                is_due = meter.left_s() <= 0 or steps > 1
                self.now += self.cost_s if is_due else 0.0
                saved = work if is_due and self.now < failure else saved
                meter.leave(work, began=is_due, saving=False)
            self.now = failure + self.restart_s
            advice = meter.advise()
        return saved * self.step_s

    def by_optimum(self, meter: CostMeter) -> int:
        """The steps until the meter asks for a save."""
        left_s = meter.left_s()
        return 1 if math.isinf(left_s) else max(1, math.ceil(left_s / self.step_s))


def test_the_optimum_is_as_good_as_the_best_fixed_interval():
    shares: list[float] = []
    for seed in range(50):
        cluster = Cluster(seed)
        fixed = [max(2, round(20 * 1.5**n / cluster.step_s)) for n in range(15)]
        best = max(cluster.useful_s(lambda _, steps=steps: steps) for steps in fixed)
        shares.append(cluster.useful_s(cluster.by_optimum) / best)
    assert min(shares) >= 0.98, shares


class Clock:
    now = 0.0


def test_the_budget_holds_and_follows_the_cost():
    clock = Clock()
    meter = CostMeter(None, lambda: clock.now, overhead=0.01)
    spent, saves = 0.0, list[float]()
    for step in range(1, 20_001):
        clock.now += 0.1
        meter.enter(step)
        is_due = meter.left_s() <= 0
        cost_s = 0.05 if step < 8_000 else 0.4
        if is_due:
            clock.now += cost_s
            spent += cost_s
            saves.append(clock.now)
        meter.leave(step, began=is_due, saving=False)
        if len(saves) > 1:
            surprise_s = 0.0 if step < 8_000 else 0.4  # The first dear one could not be foreseen.
            assert spent <= 0.01 * clock.now + surprise_s
    gaps = np.diff(saves)
    assert saves[0] < 1  # The first one shows the cost.
    assert np.median(gaps[gaps < 10]) == pytest.approx(5, abs=0.5)
    assert gaps[-1] == pytest.approx(40, abs=1)
    advice = meter.advise()
    assert advice is not None
    assert "with at most 0.01 of the time for saves, save every 40 s, which is 400 steps" in str(
        advice
    )


class BudgetLoop:
    """Steps of a second, and saves that take as long as they are told to."""

    def __init__(self, mtbf_s: float | None = None):
        self.clock = Clock()
        self.clock.now = 0.0
        self.meter = CostMeter(mtbf_s, lambda: self.clock.now, overhead=0.01)
        self.step = 0
        self.spent_s = 0.0
        self.saves: list[float] = []

    def run(self, until_s: float, cost_s: Callable[[int], float]) -> None:
        while self.clock.now < until_s:
            self.step += 1
            self.clock.now += 1.0
            self.meter.enter(self.step)
            is_due = self.meter.left_s() <= 0
            if is_due:
                took_s = cost_s(len(self.saves))
                self.clock.now += took_s
                self.spent_s += took_s
                self.saves.append(self.clock.now)
            self.meter.leave(self.step, began=is_due, saving=False)


@pytest.mark.parametrize("factor", [4, 20])
def test_a_save_that_cost_more_is_made_up_for_before_the_next(factor: int):
    loop = BudgetLoop()
    loop.run(10_000, lambda _: 0.2)
    loop.run(10_000 + 1, lambda _: 0.2 * factor)
    seen = len(loop.saves)
    while loop.clock.now < 20_000:
        loop.run(loop.clock.now + 1, lambda _: 0.2 * factor)
        surprise_s = 0.2 * factor
        assert loop.spent_s <= 0.01 * loop.clock.now + surprise_s
        if len(loop.saves) > seen + 1:  # The second dear one was foreseen.
            assert loop.spent_s <= 0.01 * loop.clock.now
    assert len(loop.saves) > seen + 3


@pytest.mark.parametrize("at", [0, 1, 2, 50])
@pytest.mark.parametrize("mtbf_s", [None, 7 * 86_400.0])
def test_one_dear_save_does_not_stop_the_others_for_long(at: int, mtbf_s: float | None):
    loop = BudgetLoop(mtbf_s)
    loop.run(100_000, lambda save: 300.0 if save == at else 0.1)
    gaps = np.diff([0.0, *loop.saves])
    assert max(gaps) <= 1800 + 300 + 1
    assert loop.spent_s <= 0.01 * loop.clock.now
    assert gaps[-1] < (400 if mtbf_s else 12)


def test_saves_that_stay_dear_are_two_intervals_apart_at_most():
    loop = BudgetLoop()
    loop.run(200_000, lambda _: 60.0)
    assert max(np.diff([0.0, *loop.saves])) <= 2 * 6000 + 60 + 1
    assert loop.spent_s <= 0.01 * loop.clock.now + 60


def test_the_advice_tells_of_a_longer_wait(caplog: pytest.LogCaptureFixture):
    loop = BudgetLoop()
    loop.run(1_000, lambda _: 0.5)
    advice = loop.meter.advise()
    assert advice is not None
    assert advice.wait_s is None
    assert advice.spent == pytest.approx(0.01, abs=0.0005)
    with caplog.at_level(logging.INFO, "ostraka"):
        loop.meter.log_changes()
        seen = len(loop.saves)
        while len(loop.saves) == seen:
            loop.run(loop.clock.now + 1, lambda _: 2.0)
            loop.meter.log_changes()
        advice = loop.meter.advise()
        assert advice is not None
        assert advice.wait_s is not None
        assert advice.interval_s == pytest.approx(50, abs=1)
        said = f"; saves have cost {advice.spent:.2g} of the time so far; the next one comes "
        assert said + f"{advice.wait_s:,.0f} s after the last" in str(advice)
        last_s = loop.clock.now
        while len(loop.saves) == seen + 1:
            loop.run(loop.clock.now + 1, lambda _: 0.5)
            loop.meter.log_changes()
    assert loop.saves[-1] - 0.5 - last_s == pytest.approx(advice.wait_s, abs=1.1)
    assert [record.getMessage().count("the next one comes") for record in caplog.records] == [0, 1]


def test_a_run_expects_what_the_run_before_has_measured(tmp_path: Path):
    loop = BudgetLoop()
    loop.meter.expect(2.0)
    loop.run(1_000, lambda _: 2.0)
    assert loop.saves[0] == pytest.approx(200, abs=3)
    assert loop.spent_s <= 0.01 * loop.clock.now
    loop = BudgetLoop()
    loop.meter.expect(1e12)  # `_RUN` may say anything.
    loop.run(4_000, lambda _: 0.1)
    assert loop.saves[0] <= 1802
    state = {"a": np.arange(10)}
    with Manager(tmp_path, every=1, mtbf_s=3600) as manager:
        manager.save(1, state)
    before = json.loads((tmp_path / "_RUN").read_text())
    before["advice"] |= {"blocked_s": 500.0, "slowdown_s": 0.0}
    (tmp_path / "_RUN").write_text(json.dumps(before))
    with Manager(tmp_path, every="auto") as manager:
        assert not any(manager.save(step, state) for step in range(2, 9))


def test_no_save_is_due_while_one_runs():
    loop = BudgetLoop()
    loop.run(500, lambda _: 0.1)
    loop.clock.now += 100
    assert loop.meter.left_s() <= 0
    assert loop.meter.left_s(saving=True) > 0
    loop.clock.now += 1800
    assert loop.meter.left_s(saving=True) <= 0


def test_the_manager_chooses_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with (
        caplog.at_level(logging.INFO, "ostraka"),
        Manager(tmp_path, every="auto", asynchronous=False) as manager,
    ):
        saved = [manager.save(step, {"a": np.arange(10)}) for step in range(1, 7)]
        assert saved == [False, False, False, True, False, False]  # then it waits for a second
        assert manager.advice is not None
        assert manager.advice.overhead == 0.01
        assert manager.advice.interval_s is not None
        assert manager.advice.interval_s >= 1
    assert "with at most 0.01 of the time for saves, save every" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"every": "often"}, "every is 'often'; it must be a number of steps, or \"auto\""),
        ({"every": "auto", "overhead": 2}, "overhead is 2; it must be more than 0 and less than 1"),
        ({"if_running": "no"}, 'if_running is \'no\'; it must be "wait", "skip" or "cancel"'),
    ],
)
def test_wrong_arguments(tmp_path: Path, given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Manager(tmp_path, **given)


# A save that still runs


class Gate:
    """A store whose saves wait, before their shard files, until it is opened."""

    def __init__(self, path: Path):
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.store = FaultyStore(path, before=self._wait)

    def _wait(self, verb: str, name: str) -> None:
        if verb == "write" and name.endswith(".safetensors"):
            self.reached.set()
            assert self.opened.wait(60)


TREE = {"a": np.arange(1000.0)}


def test_a_step_is_skipped_while_an_earlier_one_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    gate = Gate(tmp_path)
    with caplog.at_level(logging.INFO, "ostraka"):
        with Manager(gate.store, if_running="skip") as manager:
            assert manager.save(1, TREE)
            assert not manager.save(2, TREE)
            gate.opened.set()
            manager.wait()
            assert manager.save(3, TREE)
        assert manager.steps() == [1, 3]
    assert "step 2 is skipped: the save of step 1 still runs" in caplog.text


def test_a_later_step_takes_the_place_of_a_running_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    gate = Gate(tmp_path)

    def open_later() -> None:
        # The first save ends at its next block, once the gate lets it go on.
        gate.reached.wait(60)
        time.sleep(0.05)
        gate.opened.set()

    with caplog.at_level(logging.INFO, "ostraka"):
        with Manager(gate.store, if_running="cancel") as manager:
            assert manager.save(1, TREE)
            gate.reached.wait(60)
            threading.Thread(target=open_later, daemon=True).start()
            assert manager.save(2, TREE)
            manager.wait()
        assert manager.steps() == [2]
    assert "the save of step 1 is cancelled in favour of step 2" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not list((tmp_path / "step_00000001").glob("*/*")), "its files are left"


def test_some_step_is_committed_however_often_saves_are_cancelled(tmp_path: Path):
    store = FaultyStore(tmp_path, lag_s=0.005)
    with Manager(store, if_running="cancel") as manager:
        for step in range(1, 41):
            manager.save(step, TREE)
        assert len(manager.steps()) >= 5


def test_an_error_of_its_own_is_not_swallowed(tmp_path: Path):
    store = FaultyStore(tmp_path, fail={"write": OSError(28, "no space left")})
    manager = Manager(store, if_running="cancel")
    manager.save(1, TREE)
    while manager._pending.is_running():
        time.sleep(0.01)
    with pytest.raises(errors.SaveFailed, match="no space left"):
        manager.save(2, TREE)
    manager.close()


def test_a_handle_is_cancelled(tmp_path: Path):
    gate = Gate(tmp_path / "c")
    ostraka.save(tmp_path / "c", {"a": np.zeros(3)})
    handle = ostraka.save_async(gate.store, TREE)
    gate.reached.wait(60)
    threading.Timer(0.05, gate.opened.set).start()
    assert handle.cancel()
    with pytest.raises(errors.SaveCancelled, match="it was cancelled"):
        handle.wait()
    assert ostraka.open(tmp_path / "c")["a"].shape == (3,)
    assert ostraka.verify(tmp_path / "c").ok
    done = ostraka.save_async(tmp_path / "c", TREE)
    done.wait()
    assert not done.cancel()
    assert ostraka.open(tmp_path / "c")["a"].shape == (1000,)


def _cancel_on_all(path: str) -> list[int]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import ostraka

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    value = jax.device_put(np.arange(8 * 1024.0), sharding)
    slow = FaultyStore(path, lag_s=0.05 if jax.process_index() == 1 else 0.0)
    with ostraka.Manager(slow, if_running="cancel") as manager:
        for step in range(1, 6):
            manager.save(step, {"a": value})
        manager.wait()
        return manager.steps()


def test_processes_cancel_together(tmp_path: Path):
    results = run_processes(_cancel_on_all, str(tmp_path), processes=2)
    found = [result.value for result in results]
    assert found[0] == found[1]
    assert 5 in found[0]
    for step in found[0]:
        assert ostraka.verify(tmp_path / f"step_{step:08d}").ok
