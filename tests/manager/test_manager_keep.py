"""Retention: what is kept is what a ten-line model says, whatever is killed on the way."""

import itertools
import math
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ostraka
from ostraka import Best, Manager
from ostraka.manager import Step
from ostraka.manager._keep import Keep, find_superfluous
from ostraka.saving import place as _leftovers
from ostraka.storage import LocalStore, _claim, is_claim, open_store
from ostraka.testing import FaultyStore, run_processes
from places import BucketPath, Place, names_of

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""Where syncing costs nothing, if there is such a place."""

# The model


def kept_by(policy: dict[str, Any], steps: dict[int, Step], just_saved: int) -> set[int]:
    order = sorted(steps)
    kept = {order[-1], just_saved, *(n for n in order if steps[n].pinned)}
    if "keep" in policy:
        kept |= set(order[-policy["keep"] :])
    if "keep_every" in policy:
        kept |= {n for n in order if n % policy["keep_every"] == 0}
    if "keep_best" in policy:
        sign = -1 if policy["keep_best"].mode == "max" else 1
        ranks = sorted((sign * steps[n].metrics["loss"], -n) for n in order if has_loss(steps[n]))
        kept |= {-n for _, n in ranks[: policy["keep_best"].n]}
    if "keep_every_s" in policy:
        kept |= one_per_interval([(steps[n].saved_at, n) for n in order], policy["keep_every_s"])
    if "keep_if" in policy:
        kept |= {n for n in order if policy["keep_if"](steps[n])}
    return kept if policy else set(order)


def has_loss(step: Step) -> bool:
    return step.metrics.get("loss", math.nan) == step.metrics.get("loss", math.nan)


def one_per_interval(times: list[tuple[Any, int]], interval_s: float) -> set[int]:
    kept: list[tuple[float, int]] = []
    for duration_s, number in times:
        if not kept or not 0 <= duration_s - kept[-1][0] < interval_s:
            kept.append((duration_s, number))
    return {number for _, number in kept}


def is_lucky(step: Step) -> bool:
    return step.step % 7 == 3


POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "keep": st.integers(1, 4),
        "keep_every": st.integers(1, 6),
        "keep_every_s": st.sampled_from([0.5, 5.0, 1e9]),
        "keep_best": st.builds(
            Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)
        ),
        "keep_if": st.just(is_lucky),
    },
)
LOSSES = st.none() | st.sampled_from([0.5, 1.0, 2.0, -1.0, math.nan, math.inf])


@st.composite
def step_lists(draw: st.DrawFn) -> list[Step]:
    numbers = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=12)))
    return [
        Step(
            step=number,
            saved_at=draw(st.integers(-20, 20)) / 1.0,
            metrics={} if (loss := draw(LOSSES)) is None else {"loss": loss},
            pinned=draw(st.booleans()) and draw(st.booleans()),
        )
        for number in numbers
    ]


@given(steps=step_lists(), policy=POLICIES, data=st.data())
@settings(max_examples=300)
def test_what_is_kept(steps: list[Step], policy: dict[str, Any], data: st.DataObject):
    just_saved = data.draw(st.sampled_from(steps)).step
    by_number = {step.step: step for step in steps}
    names = ("keep", "keep_every", "keep_every_s", "keep_best", "keep_if")
    keep = Keep(*map(policy.get, names))
    gone = find_superfluous(steps, keep, just_saved=just_saved)
    assert gone == sorted(gone)
    assert set(by_number) - set(gone) == kept_by(policy, by_number, just_saved)
    # Deleting changes nothing about what is to be kept.
    left = [step for step in steps if step.step not in gone]
    assert find_superfluous(left, keep, just_saved=just_saved) == []


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([0, 5, 10, 15, 20, 25], [0, 2, 4, 5]),
        ([0, 5, 10, -100, -95, -90, -85], [0, 2, 3, 5, 6]),  # set back
        ([0, 5, 1e9, 10, 15, 20], [0, 2, 3, 5]),  # set forward, and back again
        ([0, None, 5, 7, 20], [0, 1, 2, 4]),  # it can't be told
    ],
    ids=["steady", "set back", "set forward", "unknown"],
)
def test_intervals_and_the_clock(times: list[float | None], kept: list[int]):
    """A clock that was set back keeps one step too many, and never all or none."""
    steps = [Step(number, saved_at, {}, False) for number, saved_at in enumerate(times)]
    gone = find_superfluous(steps, Keep(interval_s=10.0), just_saved=len(times) - 1)
    assert [n for n in range(len(times)) if n not in gone] == kept


def test_a_clock_set_back_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every step is saved, and steps are kept by the order of their numbers."""
    now = [datetime(2030, 1, 1, tzinfo=UTC)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return now[0]

    monkeypatch.setattr("ostraka.saving._commit.datetime", Clock)
    policy: dict[str, Any] = {"keep": 2, "keep_every_s": 3600}
    with Manager(tmp_path, asynchronous=False, **policy) as manager:
        for step in range(12):
            now[0] += timedelta(minutes=20) if step != 6 else timedelta(days=-400)
            assert manager.save(step, {"step": step})
        assert manager.steps() == [0, 3, 6, 9, 10, 11]
        assert manager.restore() == {"step": 11}


# On disk and in a bucket, with kills


class KilledHere(OSError):
    """Stands for SIGKILL: from here on nothing changes there."""


def end_waiting(patch: Any = None) -> None:
    """Whoever left a marker in a bucket is dead, and does not come back."""
    for owner, name, value in (
        (_claim, "DEAD_AFTER_S", -1.0),
        (_claim, "_PAUSES_S", ()),
        (_leftovers, "GONE_AFTER_S", -5.0),
    ):
        (patch.setattr if patch else setattr)(owner, name, value)


@contextmanager
def killed_after(root: Place, count: int | None) -> Generator[None]:
    """Let so many changes of the store happen, and none after them."""
    left = itertools.count() if count is None else iter(range(count))

    def guard(change: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise KilledHere
            return change(*args, **options)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        kind: Any = type(open_store(root))
        for name in ("create", "put", "delete", "prepare"):
            patch.setattr(kind, name, guard(getattr(kind, name)))
        if kind is LocalStore:
            for name in ("unlink", "rmdir"):
                patch.setattr(os, name, guard(getattr(os, name)))
        else:
            patch.setattr(kind, "_delete", guard(kind._delete))
        yield


def look(root: Place) -> dict[int, Step]:
    """What is there, every step of it whole."""
    reader = Manager(root, read_only=True)
    found = {step.step: step for step in reader._root.steps()}
    assert reader.steps() == sorted(found)
    for number in found:
        assert ostraka.verify(reader.path(number)).ok
    return found


def abandon(manager: Manager) -> None:
    """What the kernel does for a process that was killed."""
    manager._lock.release()
    assert manager._preemption is None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("save"), st.integers(0, 30), LOSSES, st.none() | st.none() | st.integers(0, 14)
        ),
        st.tuples(st.just("reopen"), POLICIES),
        st.tuples(st.just("pin"), st.integers(0, 5)),
        st.tuples(st.just("unpin"), st.integers(0, 5)),
        st.tuples(st.just("delete"), st.integers(0, 5)),
    ),
    max_size=14,
)


class Story:
    """One root, its manager and what the model says about it."""

    def __init__(self, root: Place, policy: dict[str, Any]):
        self.root = root
        self.serial = 0
        self.has_been_killed = False
        self.open(policy)

    def open(self, policy: dict[str, Any]) -> None:
        self.policy = {name: value for name, value in policy.items() if name != "keep_every_s"}
        self.manager = Manager(self.root, on_preemption=False, asynchronous=False, **self.policy)
        self.steps = look(self.root)
        there = [name for name in names_of(self.root) if not is_claim(name)]
        leftovers = [name for name in there if name not in self.names()]
        # What was killed just before its commit can't be told from a step that has lost its
        # `_METADATA`, and is left: it has the copy. Nothing else is left.
        spared = [name for name in leftovers if list((self.root / name).glob("*/metadata.json"))]
        assert all(not names_of(self.root / name) for name in leftovers if name not in spared)
        assert self.has_been_killed or not spared

    def names(self) -> set[str]:
        return {f"step_{number:08d}" for number in self.steps}

    def save(self, number: int, loss: float | None, kill: int | None) -> None:
        self.serial += 1
        metrics = {"serial": self.serial} | ({} if loss is None else {"loss": loss})
        with suppress(Exception), killed_after(self.root, kill):
            self.manager.save(number, {"n": np.int32(number)}, metrics=metrics, force=True)
        found = look(self.root)
        committed = number in found and found[number].metrics["serial"] == self.serial
        after = {**self.steps, number: found[number]} if committed else self.steps
        kept = kept_by(self.policy, after, number) if committed else set(after)
        gone = sorted(set(after) - kept)
        if kill is None:
            assert committed
            assert set(found) == kept
        else:
            # Some of what is superfluous is gone, the oldest first, and nothing else.
            assert any(set(found) == set(after) - set(gone[:n]) for n in range(len(gone) + 1))
            self.has_been_killed = True
            abandon(self.manager)
            self.open(self.policy)
        assert not self.steps or max(found) >= max(after)
        self.steps = found

    def change(self, what: str, index: int) -> None:
        if not self.steps:
            return
        number = sorted(self.steps)[index % len(self.steps)]
        getattr(self.manager, what)(number)
        found = look(self.root)
        assert set(found) == set(self.steps) - ({number} if what == "delete" else set())
        assert what == "delete" or found[number].pinned == (what == "pin")
        self.steps = found


@given(policy=POLICIES, actions=ACTIONS)
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_kept_on_disk(policy: dict[str, Any], actions: list[Any]):
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        tell(Story(Path(directory), policy), actions)


@given(policy=POLICIES, actions=ACTIONS)
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_kept_in_a_bucket(
    new_bucket: Callable[[str], BucketPath], policy: dict[str, Any], actions: list[Any]
):
    with pytest.MonkeyPatch.context() as patch:
        end_waiting(patch)
        tell(Story(new_bucket("moto"), policy), actions)


def tell(story: Story, actions: list[Any]) -> None:
    for action, *arguments in actions:
        if action == "save":
            story.save(*arguments)
        elif action == "reopen":
            story.manager.close()
            story.open(*arguments)
        else:
            story.change(action, *arguments)
    story.manager.close()


# SIGKILL for real: a parent that never starts JAX's backend forks a child for each trial


def forked(work: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Run a function in a forked process: how it ended, and what it returned."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(writing, pickle.dumps(work(*args)))
            code = 0
        except BaseException:
            os.write(writing, pickle.dumps(traceback.format_exc()))
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        data = said.read()
    _, status = os.waitpid(pid, 0)
    return status, pickle.loads(data) if data else None


def save_and_die(root: str, first: int, removals: int) -> None:
    """Save steps until retention has removed so many files; then this process is no more."""
    end_waiting()
    left = iter(range(removals))

    def watch(event: str, _: Any) -> None:
        if event in ("os.remove", "os.rmdir") and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    with Manager(root) as manager:
        for step in range(first, first + 2):
            manager.save(step, {"a": np.arange(1), "step": step})
    sys.addaudithook(watch)
    with Manager(root, keep=1) as manager:
        manager.save(first + 2, {"a": np.arange(1), "step": first + 2})


def look_and_go_on(root: str, newest: int) -> tuple[list[int], list[int], list[str], list[str]]:
    end_waiting()
    reader = Manager(root, read_only=True)
    before = reader.steps()
    for step in before:
        assert ostraka.verify(reader.path(step)).ok
        assert reader.restore(step)["step"] == step
    with Manager(root, keep=1, asynchronous=False) as manager:
        leftovers = sorted({path.parent.name for path in Path(root).glob("*/shards-*")})
        manager.save(newest + 1, {"a": np.arange(1), "step": newest + 1})
        steps = manager.steps()
    # A directory that was emptied and not yet removed is like any empty one: nobody's.
    names = [name for name in names_of(Path(root)) if names_of(Path(root, name))]
    return before, steps, leftovers, names


def kill_in_retention(root: str) -> list[list[int]]:
    """The steps that are there after a kill before each second removal, until none comes."""
    seen: list[list[int]] = []
    for removals in range(0, 60, 2):
        newest = removals * 10 + 2
        status, said = forked(save_and_die, root, newest - 2, removals)
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0, said
        status, said = forked(look_and_go_on, root, newest)
        assert status == 0, said
        before, after, leftovers, names = said
        assert before[-1] == newest
        assert len(leftovers) == len(before)  # shards only where there is a step
        assert after == [newest + 1]
        assert names == [f"step_{newest + 1:08d}"]
        seen.append(before)
        if not killed:
            return seen
    raise AssertionError("every save was killed")


def test_sigkill_during_retention():
    with tempfile.TemporaryDirectory(dir=MEMORY) as root:
        (result,) = run_processes(kill_in_retention, root, processes=1, timeout_s=240)
    assert len(result.value) >= 6
    assert {len(before) for before in result.value} >= {1, 2, 3, 4}


def test_a_manager_that_has_lost_its_root_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It stood still while it saved, and another has taken the root over."""

    def take_root(verb: str, name: str) -> None:
        if verb == "publish" and name == "step_00000002/_METADATA":
            for marker in tmp_path.glob("_CLAIM-*"):
                marker.unlink()

    store = FaultyStore(tmp_path, has_locks=False, before=take_root)
    with Manager(store, keep=1, asynchronous=False) as manager:
        manager.save(1, {"w": np.zeros(3)})
        manager.save(2, {"w": np.zeros(3)})
        assert manager.steps() == [1, 2]
    assert f"steps of {tmp_path} can't be deleted now" in caplog.text
