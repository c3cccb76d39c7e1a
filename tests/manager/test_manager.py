"""The manager of steps, in one process: when it saves, what is a step, restoring, locks."""

import errno
import inspect
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ostraka
from ostraka import Best, Manager
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    Damaged,
    InvalidTree,
    Mismatch,
    PathInTheWay,
    StoreError,
    UnsupportedFormat,
)
from ostraka.formats import open_source
from ostraka.manager import steps as _steps
from ostraka.reading.metrics import RESERVED_KEY
from ostraka.saving import place as _leftovers
from ostraka.storage import _claim
from places import Place, names_of, remove_tree


@pytest.fixture(autouse=True)
def _quick_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is soon known who is alive."""
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.2)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes back to what he left in a bucket, so there is nothing to wait for."""
    monkeypatch.setattr(_leftovers, "GONE_AFTER_S", -5.0)


def tree_of(step: int) -> dict[str, Any]:
    return {"a": np.full(8, step), "step": step}


def fill(root: Place, *steps: int, **options: Any) -> None:
    with Manager(root, asynchronous=False, **options) as manager:
        for step in steps:
            manager.save(step, tree_of(step), force=True)


def damage(root: Place, step: int) -> None:
    """Change one byte of the step's array."""
    file = min(root.glob(f"step_{step:08d}/shards-*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def names_but_claims(directory: Place) -> list[str]:
    return [name for name in names_of(directory) if not name.startswith("_CLAIM-")]


def names_in(root: Place) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def saved_among(manager: Manager, steps: range) -> list[int]:
    return [step for step in steps if manager.save(step, tree_of(step))]


# When to save


def test_without_a_policy_every_call_saves(place: Place):
    with Manager(place / "new" / "run") as manager:
        assert saved_among(manager, range(3)) == [0, 1, 2]
        manager.wait()
        assert manager.steps() == [0, 1, 2]
        assert manager.latest() == 2
        assert manager.restore() == {"a": pytest.approx(np.full(8, 2)), "step": 2}
        assert manager.restored == 2


def test_every_so_many_steps_and_given_ones(place: Place):
    with Manager(place, every=4, at=[3, 9]) as manager:
        assert not manager.should_save(2)
        assert manager.should_save(3)
        assert saved_among(manager, range(11)) == [0, 3, 4, 8, 9]


def test_a_loop_that_takes_several_steps_at_once_misses_none(place: Place):
    with Manager(place, every=10, at=[22]) as manager:
        assert saved_among(manager, range(7, 50, 7)) == [14, 21, 28, 35, 42]


def test_a_condition(place: Place):
    with Manager(place, when=lambda step: step in (2, 5)) as manager:
        assert saved_among(manager, range(7)) == [2, 5]


def test_force_saves_in_any_case(place: Place):
    with Manager(place, every=100) as manager:
        assert not manager.save(7, tree_of(7))
        assert manager.save(7, tree_of(7), force=True)
    assert Manager(place, read_only=True).steps() == [7]


def test_seconds(place: Place, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    saved: list[int] = []
    with Manager(place, every_s=10, asynchronous=False) as manager:
        for step in range(30):
            now[0] += 3
            if manager.save(step, tree_of(step)):
                saved.append(step)
    assert saved == [3, 7, 11, 15, 19, 23, 27]


def test_seconds_do_not_depend_on_a_clock_that_can_be_set(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("time.time", lambda: 0.0)
    with Manager(place, every_s=1e-9) as manager:
        assert saved_among(manager, range(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    "name", ["every", "every_s", "keep", "keep_every", "keep_every_s", "mtbf_s"]
)
def test_numbers_that_make_no_sense(place: Place, name: str):
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be more than 0, not 0"):
        Manager(place, **options)


def test_other_arguments_that_make_no_sense(place: Place):
    with pytest.raises(ValueError, match='if_busy is \'maybe\'; it must be "wait" or "raise"'):
        Manager(place, if_busy="maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'min' or 'max', not 'most'"):
        Best("loss", "most")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="n of Best must be more than 0, not 0"):
        Best("loss", n=0)
    with pytest.raises(UnsupportedFormat, match="has no store for ftp://"):
        Manager("ftp://x")
    with Manager(place) as manager:
        with pytest.raises(ValueError, match="a step must be 0 or more, not -1"):
            manager.save(-1, {})
        with pytest.raises(TypeError, match="a step must be a whole number, not True"):
            manager.save(True, {"a": 1})
        with pytest.raises(TypeError, match="a step must be a whole number, not 1.5"):
            manager.save(1.5, {})  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="a step must be a whole number, not '7'"):
            manager.should_save("7")  # type: ignore[arg-type]
        assert manager.save(np.int64(3), {"a": 1})
        with pytest.raises(InvalidTree, match="tuple"):
            manager.save(4, {"a": 1}, metadata={"t": (1, 2)}, asynchronous=False)


# What is a step


@pytest.mark.parametrize("name", ["100", "0100", "step_100", "step_00000100", "step_0000000100"])
def test_names_of_steps(place: Place, name: str):
    ostraka.save(place / name, tree_of(100))
    with Manager(place, keep=1, asynchronous=False) as manager:
        assert manager.steps() == [100]
        assert manager.restore()["step"] == 100
        assert manager.path(100) == str(place / name)
        manager.save(100, {"new": 1}, force=True)  # where it is already
        assert names_but_claims(place) == [name]
        assert manager.restore() == {"new": 1}
        manager.save(101, tree_of(101))
        assert names_but_claims(place) == ["step_00000101"]


@pytest.mark.parametrize(
    "name",
    ["step", "step_", "step_-1", "step_1.5", "step_7.tmp", "7x", "Step_7", "step_٣", ".7", "best"],
)
def test_names_that_are_not_of_steps(place: Place, name: str):
    ostraka.save(place / name, tree_of(7))
    before = names_in(place)
    with Manager(place, keep=1, asynchronous=False) as manager:
        assert manager.steps() == []
        assert manager.latest() is None
        with pytest.raises(CheckpointNotFound, match="there is no step in .* to restore"):
            manager.restore()
        manager.save(1, {"a": 1})
        manager.delete(1)
    assert names_in(place) == before


def test_two_names_of_one_step(place: Place):
    """The manager's own name counts; the step is deleted under all its names."""
    ostraka.save(place / "100", {"name": "100"})
    ostraka.save(place / "step_100", {"name": "step_100"})
    ostraka.save(place / "step_00000100", {"name": "own"})
    with Manager(place) as manager:
        assert manager.steps() == [100]
        assert manager.restore() == {"name": "own"}
        remove_tree(place / "step_00000100")
        assert manager.restore() == {"name": "100"}
        manager.delete(100)
        assert manager.steps() == []
    assert names_but_claims(place) == []


def test_a_damaged_directory_does_not_hide_a_good_one_of_the_same_step(place: Place):
    ostraka.save(place / "step_00000100", {"name": "own"})
    ostraka.save(place / "100", {"name": "100"})
    (place / "step_00000100" / "_METADATA").write_bytes(b'{"format":"ostraka", cut')
    assert Manager(place, read_only=True).restore() == {"name": "100"}


def make_foreign(root: Place) -> None:
    (root / "7").mkdir()
    (root / "8").write_text("a file")
    (root / "9").mkdir()
    (root / "9" / "_METADATA").write_text('{"of": "somebody else"}')
    (root / "10").mkdir()
    (root / "10" / "notes.txt").write_text("mine")
    if isinstance(root, Path):
        (root / "step_11").symlink_to(root / "nowhere")
    (root / "README").write_text("mine")
    (root / "shards-0123456789abcdef").mkdir()


def test_foreign_things_are_no_steps_and_not_touched(place: Place):
    make_foreign(place)
    before = names_in(place)
    with Manager(place, keep=1, asynchronous=False) as manager:
        assert manager.steps() == []
        for step in (20, 21, 22):
            manager.save(step, tree_of(step))
        assert manager.steps() == [22]
        manager.delete(22)
    assert names_in(place) == before


def test_foreign_files_in_a_step_survive_it(place: Place):
    fill(place, 1)
    (place / "step_00000001" / "notes.txt").write_text("mine")
    with Manager(place, keep=1, asynchronous=False) as manager:
        manager.save(2, tree_of(2))
        assert manager.steps() == [2]
        assert names_in(place / "step_00000001") == ["notes.txt"]
        with pytest.raises(PathInTheWay, match="step_00000001 is a directory with other things"):
            manager.save(1, tree_of(1), force=True)


def test_a_linked_step_is_read_but_what_it_leads_to_is_not_deleted(tmp_path: Path):
    ostraka.save(tmp_path / "elsewhere", tree_of(1))
    root = tmp_path / "root"
    root.mkdir()
    (root / "step_1").symlink_to(tmp_path / "elsewhere")
    with Manager(root, keep=1, asynchronous=False) as manager:
        assert manager.restore()["step"] == 1
        manager.save(2, tree_of(2))
        manager.save(3, tree_of(3))
        assert manager.steps() == [1, 3]
        manager.delete(1)
        assert manager.steps() == [3]
    assert ostraka.verify(tmp_path / "elsewhere").ok


def test_a_failed_save_is_never_listed(place: Place):
    fill(place, 1)
    with Manager(place) as manager:
        with pytest.raises(InvalidTree, match="can't be saved"):
            manager.save(2, {"a": object()}, asynchronous=False)
        assert manager.steps() == [1]
        assert manager.save(3, tree_of(3), asynchronous=False)
        assert manager.steps() == [1, 3]


def test_steps_saved_and_removed_by_others_are_seen(place: Place):
    with Manager(place, read_only=True) as reader:
        assert reader.steps() == []
        fill(place, 1, 2)
        assert reader.steps() == [1, 2]
        remove_tree(place / "step_00000002")
        assert reader.steps() == [1]
        ostraka.save(place / "step_00000001", {"new": 1}, metadata={RESERVED_KEY: "odd"})
        assert reader.restore() == {"new": 1}
        assert reader.metrics(1) == {}


# A step saved twice, and a lower one


def test_a_step_saved_twice_is_replaced(place: Place):
    with Manager(place) as manager:
        manager.save(5, tree_of(1), metrics={"loss": 2})
        manager.save(5, tree_of(2), metrics={"loss": 1})
        manager.wait()
        assert manager.steps() == [5]
        assert manager.restore()["step"] == 2
        assert manager.metrics(5) == {"loss": 1}
    assert len(names_but_claims(place / "step_00000005")) == 2  # _METADATA and the new shards


def test_a_step_lower_than_the_latest(place: Place):
    fill(place, 10, 20)
    with Manager(place, asynchronous=False, keep=2) as manager:
        with pytest.raises(ValueError, match="step 15 is lower than 20, the latest step in"):
            manager.save(15, tree_of(15))
        assert manager.steps() == [10, 20]
        assert manager.save(12, tree_of(12), force=True)
        assert manager.steps() == [12, 20]
        assert manager.save(11, tree_of(11), force=True)
        assert manager.steps() == [11, 12, 20]  # the one just saved stays
        assert manager.latest() == 20
        remove_tree(place / "step_00000020")
        assert manager.save(13, tree_of(13))  # what is lower is told from the disk
        manager.delete(13)
        assert manager.save(12, tree_of(12))


# Metrics


def test_metrics_and_the_best(place: Place):
    losses = [3.0, 1.0, math.nan, 1.0]
    with Manager(place, asynchronous=False) as manager:
        assert manager.best(Best("loss")) is None
        for step, loss in enumerate(losses):
            manager.save(step, tree_of(step), metrics={"loss": jnp.float32(loss), "n": step})
        manager.save(9, tree_of(9))
        assert manager.best(Best("loss")) == 3  # of equal ones the later
        manager.save(10, tree_of(10), metrics={"loss": -math.inf})
        assert manager.best(Best("loss")) == 10
        assert manager.metrics(1) == {"loss": 1.0, "n": 1.0}
        assert math.isnan(manager.metrics(2)["loss"])
        assert manager.metrics(9) == {}
    with Manager(place, read_only=True, keep_best=Best("loss", "max")) as reader:
        assert reader.best() == 0


def test_metrics_lie_beside_the_users_metadata(place: Place):
    with Manager(place, asynchronous=False) as manager:
        manager.save(3, {"a": 1}, metrics={"loss": 0.5}, metadata={"run": "x"})
        found = ostraka.open(manager.path(3)).metadata
        assert found["run"] == "x"
        assert found[RESERVED_KEY] == {"step": 3, "metrics": {"loss": 0.5}}
        with pytest.raises(ValueError, match=f"metadata has the key '{RESERVED_KEY}'"):
            manager.save(4, {"a": 1}, metadata={RESERVED_KEY: 1})
        with pytest.raises(TypeError, match="metric 'loss' must be a number, not 'low'"):
            manager.save(4, {"a": 1}, metrics={"loss": "low"})
        with pytest.raises(TypeError, match="the name of a metric must be text, not 1"):
            manager.save(4, {"a": 1}, metrics={1: 2.0})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="needs a metric"):
            manager.best()


# Pins


def test_pins_survive_and_keep(place: Place):
    fill(place, 1, 2)
    with Manager(place) as manager:
        manager.pin(1)
        manager.pin(1)
        with pytest.raises(CheckpointNotFound, match="there is no step 7 in .*; it has 1, 2"):
            manager.pin(7)
    with Manager(place, keep=1, asynchronous=False) as manager:
        manager.save(3, tree_of(3))
        assert manager.steps() == [1, 3]
        assert ostraka.verify(manager.path(1)).ok
        manager.save(1, {"again": 1}, force=True)  # stays pinned
        manager.save(4, tree_of(4))
        assert manager.steps() == [1, 4]
        manager.unpin(1)
        manager.unpin(1)
        manager.save(5, tree_of(5))
        assert manager.steps() == [5]
        manager.pin(5)
        manager.delete(5)  # asked for, so it is done
        assert names_but_claims(place) == []
        manager.save(5, tree_of(5))
        manager.save(6, tree_of(6))
        assert manager.steps() == [6]


# Restoring


def test_restore_passes_its_options_on(place: Place):
    fill(place, 1)
    with Manager(place) as manager:
        mesh = jax.make_mesh((8,), ("x",))
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        like = {"a": jax.ShapeDtypeStruct((8,), jnp.int32, sharding=placed), "step": 0}
        with pytest.raises(Mismatch, match="saved as int64"):
            manager.restore(like=like)
        assert manager.restored is None
        assert manager.restore(only="step", like={"step": 0}) == {"step": 1}
        with pytest.raises(CheckpointNotFound, match="there is no step 2 in .*; it has 1"):
            manager.restore(2)


def test_restore_returns_what_ostraka_restore_returns(place: Place):
    """Also in place: NNX objects are changed, and are what comes back."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with Manager(place, asynchronous=False) as manager:
        manager.save(1, model)
        path = manager.path(1)
        results: list[Any] = []
        for restore in (manager.restore, lambda **options: ostraka.restore(path, **options)):
            target = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
            result = restore(into=target)
            np.testing.assert_array_equal(target.kernel[...], model.kernel[...])
            results.append(None if result is None else result is target)
        assert results[0] == results[1]
        with pytest.raises(TypeError, match="unexpected keyword argument 'lik'"):
            manager.restore(lik=model)  # type: ignore[call-arg]


def test_a_damaged_newest_step(place: Place, caplog: pytest.LogCaptureFixture):
    fill(place, 10, 20, 30)
    damage(place, 30)
    with Manager(place) as manager:
        with (
            caplog.at_level(logging.ERROR, "ostraka"),
            pytest.raises(Damaged, match=r"leaf 'a'.*the step before it is 20: pass step=20, or"),
        ):
            manager.restore()
        assert "step 30 can't be restored" in caplog.text
        assert manager.restore(step=20)["step"] == 20
        with pytest.warns(UserWarning, match="step 30 can't be restored, so step 20 is") as said:
            assert manager.restore(fallback=True)["step"] == 20
        assert said[0].filename == __file__
        assert manager.restored == 20
        damage(place, 20)
        with pytest.warns(UserWarning, match="can't be restored, so step") as said:
            assert manager.restore(30, fallback=True)["step"] == 10
        assert "step 20 can't be restored, so step 10 is" in str(said[-1].message)
        damage(place, 10)
        with (
            pytest.warns(UserWarning, match="can't be restored, so step"),
            pytest.raises(Damaged, match="step_00000010 is damaged.* no intact step before it"),
        ):
            manager.restore(fallback=True)


def test_a_damaged_metadata_is_not_passed_over_in_silence(place: Place):
    fill(place, 10, 20)
    file = place / "step_00000020" / "_METADATA"
    file.write_bytes(file.read_bytes()[:-20])
    with Manager(place, keep=1, asynchronous=False) as manager:
        assert manager.steps() == [10]
        with pytest.raises(Damaged, match="_METADATA: its digest .*the step before it is 10"):
            manager.restore()
        with pytest.warns(UserWarning, match="so step 10 is"):
            assert manager.restore(fallback=True)["step"] == 10
        assert list(place.glob("step_00000020/shards-*"))  # left for repair
        manager.save(20, tree_of(20))
        assert manager.steps() == [20]


def test_a_step_known_to_be_damaged_counts_for_nothing(place: Place):
    fill(place, 10, 20, 30)
    damage(place, 30)
    with Manager(place, keep=2, asynchronous=False) as manager:
        with pytest.warns(UserWarning, match="so step 20 is"):
            manager.restore(fallback=True)
        assert manager.save(22, tree_of(22))  # goes on from 20
        assert manager.steps() == [20, 22, 30]
        assert manager.save(30, tree_of(30))  # mended
        assert manager.steps() == [22, 30]
        assert manager.restore()["step"] == 30


def test_falling_back_in_place_mixes_nothing(place: Place):
    """With strict=False an older step may lack what the damaged one had brought."""
    from flax import nnx

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert model.bias is not None
    with Manager(place, asynchronous=False) as manager:
        manager.save(1, {"model": {"kernel": np.full((2, 2), 1.0, np.float32)}})
        kernel = np.full((2, 2), 2.0, np.float32)
        manager.save(2, {"model": {"bias": np.full(2, 2.0, np.float32), "kernel": kernel}})
        damage(place, 2)
        bias = np.asarray(model.bias[...])
        with pytest.warns(UserWarning, match="step 2 can't be|'model/bias'|missing") as said:
            manager.restore(into={"model": model}, strict=False, fallback=True)
    assert "step 2 can't be restored" in str(said[0].message)
    assert np.all(np.asarray(model.kernel[...]) == 1)
    assert np.array_equal(np.asarray(model.bias[...]), bias)


# Reading only, locks, closing


def test_reading_only_never_writes(place: Place):
    fill(place, 1, 2)
    (place / "step_00000003" / "shards-0123456789abcdef").mkdir(parents=True)
    before = names_in(place)
    with Manager(place, read_only=True, keep=1) as reader:
        assert reader.restore()["step"] == 2
        attempts: list[Callable[[], Any]] = [
            lambda: reader.save(3, {}),
            lambda: reader.delete(1),
            lambda: reader.pin(1),
            lambda: reader.unpin(1),
        ]
        for attempt in attempts:
            with pytest.raises(StoreError, match="opened with read_only=True"):
                attempt()
    assert names_in(place) == before
    assert Manager(place / "nothing", read_only=True).latest() is None
    assert not (place / "nothing").exists()


def test_a_second_writer_is_refused(place: Place):
    with Manager(place) as first:
        with pytest.raises(Busy, match="another Manager is writing to .* only one may at a time"):
            Manager(place)
        first.save(1, tree_of(1))
        first.wait()
        assert Manager(place, read_only=True).restore()["step"] == 1
    Manager(place).close()


def test_a_second_writer_may_wait(place: Place):
    """The first one ends its work when the second says that it waits, and not before."""

    class End(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            first.close()

    said: list[str] = []
    first = Manager(place)
    end = End(logging.WARNING)
    logging.getLogger("ostraka").addHandler(end)
    try:
        with Manager(place, if_busy="wait") as second:
            assert second.save(1, tree_of(1))
    finally:
        logging.getLogger("ostraka").removeHandler(end)
    assert said == [f"waiting for another Manager to end its work in {place}"]


HOLD = """
import os, sys, time
if sys.argv[2] == "fork of a slow child":
    os.register_at_fork(after_in_child=lambda: time.sleep(0.2))  # before it lets go of the lock
import ostraka.storage._claim
ostraka.storage._claim.RENEW_EVERY_S = 0.2
manager = ostraka.Manager(sys.argv[1], on_preemption=False)
if sys.argv[2] == "alone" or os.fork():
    if sys.argv[2] != "fork":
        print("held", flush=True)
    sys.stdin.read()  # until the test is over
else:
    if sys.argv[2] == "fork":
        print("held", flush=True)  # by the parent: the child has let go before it comes here
    os.close(1)
    sys.stdin.read()  # outlives its parent, as a data worker may
    os._exit(0)
"""


@pytest.mark.parametrize("kind", ["alone", "fork", "fork of a slow child"])
def test_the_lock_of_a_dead_process_does_not_block(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Busy, match="another Manager is writing"):
            Manager(place)
        holder.kill()
        holder.wait()
        monkeypatch.setattr(_claim, "DEAD_AFTER_S", 2.0)
        if kind == "fork of a slow child":  # not slower than anyone's patience, on a busy machine
            monkeypatch.setattr("ostraka.manager.leases._RETRY_S", 60)
        Manager(place).close()
    finally:
        os.killpg(holder.pid, signal.SIGKILL) if kind != "alone" else holder.kill()
        holder.wait()
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.close()
        holder.stdout.close()


def test_a_manager_that_nobody_has_any_more_lets_go(place: Place):
    manager = Manager(place)
    del manager
    Manager(place).close()


def test_a_closed_manager(place: Place):
    manager = Manager(place)
    assert repr(manager) == f"<Manager of {place}, open>"
    manager.save(1, tree_of(1))
    manager.close()
    manager.close()
    assert manager.steps() == [1]
    with pytest.raises(ValueError, match="the manager of .* is closed"):
        manager.save(2, tree_of(2))
    with pytest.raises(ValueError, match="the manager of .* is closed"):
        manager.restore()
    assert ostraka.verify(place / "step_00000001").ok


def test_an_error_in_the_block_is_not_covered_up(place: Place):
    def run() -> None:
        with Manager(place) as manager:
            manager.save(1, tree_of(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert Manager(place, read_only=True).steps() == [1]
    Manager(place).close()


# Leftovers


def leave_behind(root: Place) -> None:
    """What dead saves and deletions leave: shards without `_METADATA`, and beside another's."""
    fill(root, 1, 2)
    for name in ("step_00000001", "step_00000003", "4"):
        directory = root / name / "shards-0123456789abcdef"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "shard_00000.safetensors").write_bytes(b"half")
        (root / name / "_METADATA.01234567.tmp").write_bytes(b"half")


@pytest.mark.usefixtures("at_once")
def test_leftovers_are_removed_at_opening(place: Place):
    leave_behind(place)
    (place / "4" / "notes.txt").write_text("mine")
    with Manager(place) as manager:
        assert manager.steps() == [1, 2]
        assert names_but_claims(place) == ["4", "step_00000001", "step_00000002"]
        assert names_but_claims(place / "4") == ["notes.txt"]
        assert len(names_but_claims(place / "step_00000001")) == 2
        assert ostraka.verify(manager.path(1)).ok


@pytest.mark.usefixtures("at_once")
def test_leftovers_of_a_live_save_stay(place: Place):
    leave_behind(place)
    with ostraka.storage.claimed(ostraka.storage.open_store(place / "4")):  # as a save does
        there = names_but_claims(place / "4")
        Manager(place).close()
        assert names_but_claims(place / "4") == there != []
    Manager(place).close()
    assert not (place / "4").exists()


# SIGTERM


def test_sigterm_still_reaches_who_listened_before(place: Place):
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Manager(place / "a") as first, Manager(place / "b") as second:
            os.kill(os.getpid(), signal.SIGTERM)
            assert first.reached_preemption(1)
            assert second.reached_preemption(1)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_managers_closed_in_any_order_and_thread(place: Place):
    before = signal.getsignal(signal.SIGTERM)
    first, second, third = (Manager(place / name, every=9) for name in "abc")
    first.close()
    thread = threading.Thread(target=second.close)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    assert third.reached_preemption(1)
    third.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_may_be_left_alone(place: Place):
    before = signal.getsignal(signal.SIGTERM)
    with Manager(place, on_preemption=False) as manager:
        assert signal.getsignal(signal.SIGTERM) == before
        assert not manager.reached_preemption(1)


def test_a_manager_in_a_thread(place: Place, caplog: pytest.LogCaptureFixture):
    thread = threading.Thread(target=fill, args=(place, 1))
    thread.start()
    thread.join()
    assert "SIGTERM is not watched" in caplog.text
    assert Manager(place, read_only=True).steps() == [1]


# Deleting that fails


def test_what_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(path: Any, *args: Any, dir_fd: int | None = None) -> None:
        above = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        if "step_00000001" in f"{above}/{path}":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        unlink(path, *args, dir_fd=dir_fd)

    unlink = os.unlink
    fill(tmp_path, 1, 2)
    with Manager(tmp_path, keep=1, asynchronous=False) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", refuse)
            assert manager.save(3, tree_of(3))
        assert "step 1 of" in caplog.text
        assert manager.steps() == [1, 3]
        manager.save(4, tree_of(4))
        assert manager.steps() == [4]


def test_a_condition_that_raises_deletes_nothing(place: Place, caplog: pytest.LogCaptureFixture):
    with Manager(place, keep_if=lambda step: 1 // 0 > 0, asynchronous=False) as manager:
        for step in range(3):
            manager.save(step, tree_of(step))
        assert manager.steps() == [0, 1, 2]
    assert "ZeroDivisionError" in caplog.text


def test_a_save_that_fails_in_the_background_is_heard_of(place: Place):
    """Something of another program is in the way."""
    with Manager(place) as manager:
        manager.save(1, tree_of(1))
        manager.wait()
        (place / "step_00000002").mkdir()
        (place / "step_00000002" / "notes.txt").write_text("mine")

        def save_and_wait() -> None:
            manager.save(2, tree_of(2))
            manager.wait()

        with pytest.raises(PathInTheWay, match="with other things in it"):
            save_and_wait()
        assert manager.steps() == [1]
        assert manager.save(3, tree_of(3))
        manager.wait()
        assert manager.steps() == [1, 3]


# Records


def test_saves_and_restores_are_recorded(place: Place):
    records: list[ostraka.Record] = []
    with Manager(place, on_record=records.append) as manager:
        manager.save(1, tree_of(1))
        manager.restore()
    assert [(r.operation, r.path) for r in records] == [
        ("save", f"{place}/step_00000001"),
        ("restore", f"{place}/step_00000001"),
    ]


def test_a_record_tells_how_long_the_loop_waited(place: Place, monkeypatch: pytest.MonkeyPatch):
    """For the end, where that was asked for, and for the save before."""
    records: list[ostraka.Record] = []
    goes_on = threading.Event()

    def slow(record: ostraka.Record) -> None:
        records.append(record)
        goes_on.wait()

    def wait_for_end(self: ostraka.SaveHandle, timeout: float | None = None) -> None:
        # Only now: the loop has come to where it waits, however slow it was on the way.
        timer = threading.Timer(0.2, goes_on.set)
        timer.start()
        real(self, timeout)
        timer.join()

    real = ostraka.SaveHandle._wait_for_end
    monkeypatch.setattr(ostraka.SaveHandle, "_wait_for_end", wait_for_end)
    with Manager(place, on_record=slow) as manager:
        manager.save(1, tree_of(1))
        manager.save(2, tree_of(2))
        manager.save(3, tree_of(3), asynchronous=False)
    _, second, third = records
    assert 0.1 < second.phases["wait"] < second.blocked_s < second.total_s
    assert third.blocked_s == third.total_s


def test_callback_that_raises_fails_nothing(place: Place, caplog: pytest.LogCaptureFixture):
    def call_back(record: ostraka.Record) -> None:
        raise OSError("of the callback's own")

    with Manager(place, on_record=call_back) as manager:
        manager.save(1, tree_of(1))
        assert manager.restore()["step"] == 1
    assert caplog.text.count("what it was told of is done all the same") == 2


def test_restore_has_the_arguments_of_restore():
    own = inspect.signature(Manager.restore).parameters
    for name, parameter in inspect.signature(ostraka.restore).parameters.items():
        if name != "path":
            assert own[name].annotation == parameter.annotation, name
            assert own[name].kind == inspect.Parameter.KEYWORD_ONLY
            if name not in ("like", "into"):
                assert own[name].default == parameter.default, name
    assert set(own) - set(inspect.signature(ostraka.restore).parameters) == {
        "self",
        "step",
        "fallback",
    }


# Steps without arrays


def test_a_step_without_arrays_after_one_that_has_some_is_refused(place: Place):
    with Manager(place, keep=1) as manager:
        assert manager.save(1, {"step": 1})  # Nothing is lost.
        assert manager.save(2, tree_of(2))
        for step in (2, 3):
            for wait in (True, False):
                match = rf"step {step} has no arrays, and step 2 in .* has 1 \(is the model missing"
                with pytest.raises(InvalidTree, match=match):
                    manager.save(step, {"step": step}, asynchronous=not wait)
        manager.wait()
        assert manager.restore(like=tree_of(0))["step"] == 2
        manager.save(3, {"step": 3}, force=True)
        manager.save(4, {"step": 4})  # The step before has none either.
        manager.wait()
        assert manager.steps() == [4]


def test_a_step_with_arrays_costs_no_look_at_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    looked: list[str] = []

    def look(place: Any) -> Any:
        looked.append(place.location)
        return open_source(place)

    monkeypatch.setattr(_steps, "open_source", look)
    with Manager(tmp_path, asynchronous=False) as manager:
        for step in range(3):
            manager.save(step, tree_of(step))
        assert looked == []
        with pytest.raises(InvalidTree, match="step 3 has no arrays"):
            manager.save(3, {"step": 3})
        assert len(looked) == 1
