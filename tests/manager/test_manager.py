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
from collections.abc import Generator
from contextlib import contextmanager, suppress
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
)
from ostraka.formats import open_source
from ostraka.manager import steps as _steps
from ostraka.manager._when import Schedule
from ostraka.reading.metrics import RESERVED_KEY
from ostraka.storage import claimed, open_store
from places import names_of, remove_tree
from runs import damage, fill, tree_of


def names_in(root: Path) -> list[str]:
    """All names, but for `_RUN`."""
    names = (str(path.relative_to(root)) for path in root.rglob("*"))
    return sorted(name for name in names if not name.startswith("_RUN"))


# When to save


@pytest.mark.parametrize(
    ("options", "steps", "due"),
    [
        ({}, range(3), [0, 1, 2]),
        ({"every": 4, "at": [3, 9]}, range(11), [0, 3, 4, 8, 9]),
        # A loop that takes several steps at once misses none.
        ({"every": 10, "at": [22]}, range(7, 50, 7), [14, 21, 28, 35, 42]),
        ({"every": 10, "at": [30], "from": 14}, range(21, 50, 7), [21, 35, 42]),
        ({"every": 21, "from": 21}, [42], [42]),
        ({"every": 10, "from": 20}, [20, 21, 15, 30], [20, 30]),
        ({"when": lambda step: step in (2, 5)}, range(7), [2, 5]),
        ({"when": lambda step: step == 2, "every": 3}, range(7), [0, 2, 3, 6]),
        ({"every_s": 10}, range(30), [3, 7, 11, 15, 19, 23, 27]),
        ({"every_s": 10, "every": 5}, range(11), [0, 4, 5, 9, 10]),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else str(given),
)
def test_which_steps_are_due(
    options: dict[str, Any], steps: Any, due: list[int], monkeypatch: pytest.MonkeyPatch
):
    """A step takes 3 s, by a clock that nobody can set."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: 0.0)
    schedule = Schedule(*(options.get(n, d) for n, d in WHEN.items()))
    if "from" in options:
        schedule.note_restore(options["from"])
    found: list[int] = []
    for step in steps:
        now[0] += 3
        if schedule.is_due(step):
            found.append(step)
            schedule.note_save()
        assert schedule.is_due(step) == (step in found)  # the answer stays
    assert found == due


WHEN: dict[str, Any] = {"every": None, "every_s": None, "at": (), "when": None}


def test_a_manager_saves_what_is_due_or_forced(tmp_path: Path):
    root = tmp_path / "new" / "run"
    with Manager(root, every=10) as manager:
        assert not manager.should_save(12)
        assert not manager.save(13, tree_of(13))
        assert manager.save(13, tree_of(13), force=True)
        assert manager.save(20, tree_of(20))
        manager.wait()
        assert (manager.steps(), manager.latest()) == ([13, 20], 20)
        assert manager.restore() == {"a": pytest.approx(np.full(8, 20)), "step": 20}
        assert manager.restored == 20
    with Manager(root, every=10) as manager:
        manager.restore(13)
        assert manager.should_save(27)  # 20 lies between


# What is a step


@pytest.mark.parametrize("name", ["100", "0100", "step_100", "step_00000100", "step_0000000100"])
def test_names_of_steps(tmp_path: Path, name: str):
    ostraka.save(tmp_path / name, tree_of(100))
    with Manager(tmp_path, keep=1, asynchronous=False) as manager:
        assert manager.steps() == [100]
        assert manager.restore()["step"] == 100
        assert manager.path(100) == str(tmp_path / name)
        manager.save(100, {"new": 1}, force=True)  # where it is already
        assert names_of(tmp_path) == [name]
        assert manager.restore() == {"new": 1}
        manager.save(101, tree_of(101))
        assert names_of(tmp_path) == ["step_00000101"]


def test_foreign_things_are_no_steps_and_not_touched(tmp_path: Path):
    names = ["step", "step_", "step_-1", "step_1.5", "step_7.tmp", "7x", "Step_7", "step_٣", ".7"]
    for name in [*names, "best"]:
        ostraka.save(tmp_path / name, tree_of(7))
    for name in ("7", "9", "10", "shards-0123456789abcdef"):
        (tmp_path / name).mkdir()
    (tmp_path / "9" / "_METADATA").write_text('{"of": "somebody else"}')
    for name in ("8", "10/notes.txt", "README"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "step_11").symlink_to(tmp_path / "nowhere")
    before = names_in(tmp_path)
    with Manager(tmp_path, keep=1, asynchronous=False) as manager:
        assert (manager.steps(), manager.latest()) == ([], None)
        with pytest.raises(CheckpointNotFound, match="there is no step in .* to restore"):
            manager.restore()
        for step in (20, 21, 22):
            manager.save(step, tree_of(step))
        assert manager.steps() == [22]
        manager.delete(22)
    assert names_in(tmp_path) == before


def test_several_names_of_one_step(tmp_path: Path):
    """The manager's own name counts; the step is deleted under all its names."""
    for name in ("100", "step_100", "step_00000100"):
        ostraka.save(tmp_path / name, {"name": name})
    with Manager(tmp_path) as manager:
        assert manager.steps() == [100]
        assert manager.restore() == {"name": "step_00000100"}
        # One that is damaged does not hide a good one.
        (tmp_path / "step_00000100" / "_METADATA").write_bytes(b'{"format":"ostraka", cut')
        assert manager.restore() == {"name": "100"}
        remove_tree(tmp_path / "step_00000100")
        assert manager.restore() == {"name": "100"}
        manager.delete(100)
        assert manager.steps() == []
    assert names_of(tmp_path) == []


def test_steps_saved_and_removed_by_others_are_seen(tmp_path: Path):
    with Manager(tmp_path, read_only=True) as reader:
        assert reader.steps() == []
        fill(tmp_path, 1, 2)
        assert reader.steps() == [1, 2]
        remove_tree(tmp_path / "step_00000002")
        assert reader.steps() == [1]
        ostraka.save(tmp_path / "step_00000001", {"new": 1}, metadata={RESERVED_KEY: "odd"})
        assert reader.restore() == {"new": 1}
        assert reader.metrics(1) == {}


# A step saved twice, and a lower one


def test_a_step_saved_twice_is_replaced(tmp_path: Path):
    with Manager(tmp_path) as manager:
        manager.save(5, tree_of(1), metrics={"loss": 2})
        manager.save(5, tree_of(2), metrics={"loss": 1})
        manager.wait()
        assert manager.steps() == [5]
        assert manager.restore()["step"] == 2
        assert manager.metrics(5) == {"loss": 1}
    assert len(names_of(tmp_path / "step_00000005")) == 2  # _METADATA and the new shards


def test_a_step_lower_than_the_latest(tmp_path: Path):
    fill(tmp_path, 10, 20)
    with Manager(tmp_path, asynchronous=False, keep=2) as manager:
        with pytest.raises(ValueError, match="step 15 is lower than 20, the latest step in"):
            manager.save(15, tree_of(15))
        assert manager.steps() == [10, 20]
        assert manager.save(12, tree_of(12), force=True)
        assert manager.steps() == [12, 20]
        assert manager.save(11, tree_of(11), force=True)
        assert manager.steps() == [11, 12, 20]  # the one just saved stays
        assert manager.latest() == 20
        remove_tree(tmp_path / "step_00000020")
        assert manager.save(13, tree_of(13))  # what is lower is told from the disk
        manager.delete(13)
        assert manager.save(12, tree_of(12))


# Metrics


def test_metrics_and_the_best(tmp_path: Path):
    losses = [3.0, 1.0, math.nan, 1.0]
    with Manager(tmp_path, asynchronous=False) as manager:
        assert manager.best(Best("loss")) is None
        for step, loss in enumerate(losses):
            manager.save(step, tree_of(step), metrics={"loss": jnp.float32(loss), "n": step})
        manager.save(9, tree_of(9), metadata={"run": "x"})
        assert manager.best(Best("loss")) == 3  # of equal ones the later
        manager.save(10, tree_of(10), metrics={"loss": -math.inf}, metadata={"run": "x"})
        assert manager.best(Best("loss")) == 10
        assert manager.metrics(1) == {"loss": 1.0, "n": 1.0}
        assert math.isnan(manager.metrics(2)["loss"])
        assert manager.metrics(9) == {}
        with pytest.raises(ValueError, match="needs a metric"):
            manager.best()
        manager.save(11, tree_of(11), metrics={"loss": 0.5}, metadata={"run": "x"})
        found = ostraka.open(manager.path(11)).metadata
        assert found["run"] == "x"
        assert found[RESERVED_KEY] == {"step": 11, "metrics": {"loss": 0.5}}
    with Manager(tmp_path, read_only=True, keep_best=Best("loss", "max")) as reader:
        assert reader.best() == 0


# Restoring


def test_restore_passes_its_options_on(tmp_path: Path):
    fill(tmp_path, 1)
    with Manager(tmp_path) as manager:
        mesh = jax.make_mesh((8,), ("x",))
        placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        like = {"a": jax.ShapeDtypeStruct((8,), jnp.int32, sharding=placed), "step": 0}
        with pytest.raises(Mismatch, match="saved as int64"):
            manager.restore(like=like)
        assert manager.restored is None
        assert manager.restore(only="step", like={"step": 0}) == {"step": 1}
        with pytest.raises(TypeError, match="unexpected keyword argument 'lik'"):
            manager.restore(lik=like)  # type: ignore[call-arg]


def test_restore_returns_what_ostraka_restore_returns(tmp_path: Path):
    """Also in place: NNX objects are changed, and are what comes back."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with Manager(tmp_path, asynchronous=False) as manager:
        manager.save(1, model)
        path = manager.path(1)
        results: list[Any] = []
        for restore in (manager.restore, lambda **options: ostraka.restore(path, **options)):
            target = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
            result = restore(into=target)
            np.testing.assert_array_equal(target.kernel[...], model.kernel[...])
            results.append(None if result is None else result is target)
        assert results[0] == results[1]


def test_restore_has_the_arguments_of_restore():
    own = inspect.signature(Manager.restore).parameters
    for name, parameter in inspect.signature(ostraka.restore).parameters.items():
        if name != "path":
            assert own[name].annotation == parameter.annotation, name
            assert own[name].kind == inspect.Parameter.KEYWORD_ONLY
            if name not in ("like", "into"):
                assert own[name].default == parameter.default, name
    others = set(own) - set(inspect.signature(ostraka.restore).parameters)
    assert others == {"self", "step", "fallback"}


def test_a_damaged_newest_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    fill(tmp_path, 10, 20, 30)
    damage(tmp_path, 30)
    with pytest.raises(Damaged, match="leaf 'a'") as plain:
        ostraka.restore(tmp_path / "step_00000030")
    with Manager(tmp_path) as manager:
        with (
            caplog.at_level(logging.ERROR, "ostraka"),
            pytest.raises(
                Damaged, match=r"leaf 'a'.*the step before it is 20: pass step=20, or"
            ) as managed,
        ):
            manager.restore()
        assert managed.value.problems == plain.value.problems
        assert plain.value.problems[0].process == 0
        assert plain.value.problems[0].boxes
        assert "step 30 can't be restored" in caplog.text
        assert manager.restore(step=20)["step"] == 20
        with pytest.warns(UserWarning, match="step 30 can't be restored, so step 20 is") as said:
            assert manager.restore(fallback=True)["step"] == 20
        assert said[0].filename == __file__
        assert manager.restored == 20
        damage(tmp_path, 20)
        with pytest.warns(UserWarning, match="can't be restored, so step") as said:
            assert manager.restore(30, fallback=True)["step"] == 10
        assert "step 20 can't be restored, so step 10 is" in str(said[-1].message)
        damage(tmp_path, 10)
        with (
            pytest.warns(UserWarning, match="can't be restored, so step"),
            pytest.raises(Damaged, match="step_00000010 is damaged.* no intact step before it"),
        ):
            manager.restore(fallback=True)


def test_a_damaged_metadata_is_not_passed_over_in_silence(tmp_path: Path):
    fill(tmp_path, 10, 20)
    file = tmp_path / "step_00000020" / "_METADATA"
    file.write_bytes(file.read_bytes()[:-20])
    with Manager(tmp_path, keep=1, asynchronous=False) as manager:
        assert manager.steps() == [10]
        with pytest.raises(Damaged, match="_METADATA: its digest .*the step before it is 10"):
            manager.restore()
        with pytest.warns(UserWarning, match="so step 10 is"):
            assert manager.restore(fallback=True)["step"] == 10
        assert list(tmp_path.glob("step_00000020/shards-*"))  # left for repair
        manager.save(20, tree_of(20))
        assert manager.steps() == [20]


def test_a_step_known_to_be_damaged_counts_for_nothing(tmp_path: Path):
    fill(tmp_path, 10, 20, 30)
    damage(tmp_path, 30)
    with Manager(tmp_path, keep=2, asynchronous=False) as manager:
        with pytest.warns(UserWarning, match="so step 20 is"):
            manager.restore(fallback=True)
        assert manager.save(22, tree_of(22))  # goes on from 20
        assert manager.steps() == [20, 22, 30]
        assert manager.save(30, tree_of(30))  # repaired
        assert manager.steps() == [22, 30]
        assert manager.restore()["step"] == 30


# Reading only, locks, closing


def test_reading_only_never_writes(tmp_path: Path):
    fill(tmp_path, 1, 2)
    (tmp_path / "step_00000003" / "shards-0123456789abcdef").mkdir(parents=True)
    before = names_in(tmp_path)
    with Manager(tmp_path, read_only=True, keep=1) as reader:
        assert reader.restore()["step"] == 2
        assert repr(reader) == f"<Manager of {tmp_path}, read-only>"
        for attempt in (lambda _: reader.save(3, {}), reader.delete, reader.pin, reader.unpin):
            with pytest.raises(StoreError, match="opened with read_only=True"):
                attempt(1)
    assert names_in(tmp_path) == before
    assert Manager(tmp_path / "nothing", read_only=True).latest() is None
    assert not (tmp_path / "nothing").exists()


HOLD = """
import os, sys, time
if sys.argv[2] == "fork of a slow child":
    os.register_at_fork(after_in_child=lambda: time.sleep(0.2))  # before it lets go of the lock
from ostraka.manager.leases import RootLock
from ostraka.storage import open_store
store = open_store(sys.argv[1])
store.prepare()
lock = RootLock(store)
lock.acquire(wait=True)
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


@contextmanager
def held(root: Path, kind: str) -> Generator[subprocess.Popen[bytes]]:
    """A process that holds the lock of a run directory until its stdin is closed."""
    program = [sys.executable, "-c", HOLD, str(root), kind]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield holder
        finally:
            with suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGKILL)


def test_a_second_writer_waits(tmp_path: Path):
    """The first one ends when the second says that it waits, and not before."""

    class End(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            assert first.stdin is not None
            first.stdin.close()

    said: list[str] = []
    with held(tmp_path, "alone") as first:
        end = End(logging.WARNING)
        logging.getLogger("ostraka").addHandler(end)
        try:
            with Manager(tmp_path) as second:
                assert second.save(1, tree_of(1))
        finally:
            logging.getLogger("ostraka").removeHandler(end)
    assert said == [f"waiting for another Manager to end its work in {tmp_path}"]


@pytest.mark.parametrize("if_busy", ["wait", "raise"])
def test_a_second_writer_in_one_process_would_wait_for_itself(tmp_path: Path, if_busy: Any):
    with Manager(tmp_path):
        with pytest.raises(Busy, match="another Manager is writing to .* it is in this process: "):
            Manager(tmp_path, if_busy=if_busy)
        assert Manager(tmp_path, read_only=True).steps() == []
    Manager(tmp_path, if_busy=if_busy).close()


@pytest.mark.parametrize("kind", ["alone", "fork", "fork of a slow child"])
def test_the_lock_of_a_dead_process_does_not_block(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    with held(tmp_path, kind) as holder:
        with pytest.raises(Busy, match="another Manager is writing .* if_busy='wait' or read_only"):
            Manager(tmp_path, if_busy="raise")
        holder.kill()
        holder.wait()
        if kind == "fork of a slow child":  # not slower than anyone's patience
            monkeypatch.setattr("ostraka.manager.leases._RETRY_S", 60)
        Manager(tmp_path, if_busy="raise").close()


def test_a_closed_manager(tmp_path: Path):
    manager = Manager(tmp_path)
    assert repr(manager) == f"<Manager of {tmp_path}, open>"
    manager.save(1, tree_of(1))
    manager.close()
    manager.close()
    assert repr(manager) == f"<Manager of {tmp_path}, closed>"
    assert manager.steps() == [1]
    calls = (manager.restore, lambda: manager.save(2, tree_of(2)), lambda: manager.resume({}))
    for call in calls:
        with pytest.raises(ValueError, match="the manager of .* is closed"):
            call()
    assert ostraka.verify(tmp_path / "step_00000001").ok
    before = signal.getsignal(signal.SIGTERM)
    abandoned = Manager(tmp_path, audit_every=1)
    assert signal.getsignal(signal.SIGTERM) != before
    abandoned.save(2, tree_of(2))
    abandoned.wait()
    del abandoned
    assert signal.getsignal(signal.SIGTERM) == before
    Manager(tmp_path).close()


def test_an_error_in_the_block_is_not_covered_up(tmp_path: Path):
    def run() -> None:
        with Manager(tmp_path) as manager:
            manager.save(1, tree_of(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert Manager(tmp_path, read_only=True).steps() == [1]
    Manager(tmp_path).close()


# Leftovers


def test_leftovers_are_removed_at_opening_but_not_those_of_a_live_save(tmp_path: Path):
    """Dead saves and deletions leave shards without `_METADATA`, and beside another's."""
    fill(tmp_path, 1, 2)
    for name in ("step_00000001", "step_00000003", "4", "5"):
        directory = tmp_path / name / "shards-0123456789abcdef"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "shard_00000.safetensors").write_bytes(b"half")
        (tmp_path / name / "_METADATA.01234567.tmp").write_bytes(b"half")
    (tmp_path / "4" / "notes.txt").write_text("mine")
    with claimed(open_store(tmp_path / "5")):  # as a save does
        there = names_of(tmp_path / "5")
        with Manager(tmp_path) as manager:
            assert manager.steps() == [1, 2]
            assert names_of(tmp_path) == ["4", "5", "step_00000001", "step_00000002"]
            assert names_of(tmp_path / "4") == ["notes.txt"]
            assert names_of(tmp_path / "5") == there != []
            assert len(names_of(tmp_path / "step_00000001")) == 2
            assert ostraka.verify(manager.path(1)).ok
    Manager(tmp_path).close()
    assert not (tmp_path / "5").exists()


# SIGTERM


def test_managers_closed_in_any_order_and_thread(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    first, second, third = (Manager(tmp_path / name, every=9) for name in "abc")
    first.close()
    thread = threading.Thread(target=second.close)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    assert third.reached_preemption(1)
    third.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_sigterm_may_be_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    before = signal.getsignal(signal.SIGTERM)
    with Manager(tmp_path, on_preemption=False) as manager:
        assert signal.getsignal(signal.SIGTERM) == before
        assert not manager.reached_preemption(1)
    thread = threading.Thread(target=fill, args=(tmp_path, 1))
    thread.start()
    thread.join()
    assert "SIGTERM is not watched" in caplog.text
    assert Manager(tmp_path, read_only=True).steps() == [1]


# Deletions and saves that fail


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
    fill(tmp_path, 5, 6, keep_if=lambda step: 1 // 0 > 0)
    assert Manager(tmp_path, read_only=True).steps() == [4, 5, 6]
    assert "ZeroDivisionError" in caplog.text


def test_a_save_that_fails_is_heard_of_and_never_listed(tmp_path: Path):
    """A step that other people's files are in is deleted, and they survive."""
    fill(tmp_path, 1)
    (tmp_path / "step_00000001" / "notes.txt").write_text("mine")
    with Manager(tmp_path, keep=1) as manager:
        manager.save(2, tree_of(2))
        manager.wait()
        assert manager.steps() == [2]
        assert names_in(tmp_path / "step_00000001") == ["notes.txt"]
        in_the_way = "step_00000001 is a directory with other things"
        with pytest.raises(PathInTheWay, match=in_the_way):
            manager.save(1, tree_of(1), force=True, asynchronous=False)
        with pytest.raises(InvalidTree, match="can't be saved"):
            manager.save(3, {"a": object()}, asynchronous=False)
        manager.save(1, tree_of(1), force=True)
        with pytest.raises(PathInTheWay, match=in_the_way):
            manager.wait()
        assert manager.steps() == [2]
        manager.save(3, tree_of(3))
        manager.wait()
        assert manager.steps() == [3]


# Records


def test_saves_and_restores_are_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def call_back(record: ostraka.Record) -> None:
        records.append((record.operation, record.path))
        raise OSError("of the callback's own")

    records: list[tuple[str, str]] = []
    with Manager(tmp_path, on_record=call_back) as manager:
        manager.save(1, tree_of(1))
        assert manager.restore()["step"] == 1
    path = f"{tmp_path}/step_00000001"
    assert records == [("save", path), ("restore", path)]
    assert caplog.text.count("what it was told of is done all the same") == 2


def test_a_record_tells_how_long_the_loop_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    with Manager(tmp_path, on_record=slow) as manager:
        manager.save(1, tree_of(1))
        manager.save(2, tree_of(2))
        manager.save(3, tree_of(3), asynchronous=False)
    _, second, third = records
    assert 0.1 < second.phases["wait"] < second.blocked_s < second.total_s
    assert third.blocked_s == third.total_s


# Steps without arrays


def test_a_step_without_arrays_after_one_that_has_some_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    looked: list[str] = []

    def look(place: Any) -> Any:
        looked.append(place.location)
        return open_source(place)

    monkeypatch.setattr(_steps, "open_source", look)
    with Manager(tmp_path, keep=1) as manager:
        assert manager.save(1, {"step": 1})  # Nothing is lost.
        assert manager.save(2, tree_of(2))
        assert looked == []  # A step with arrays costs no look at the one before.
        for step in (2, 3):
            for asynchronous in (False, True):
                match = rf"step {step} has no arrays, and step 2 in .* has 1 \(is the model missing"
                with pytest.raises(InvalidTree, match=match):
                    manager.save(step, {"step": step}, asynchronous=asynchronous)
        assert len(looked) == 4
        manager.wait()
        assert manager.restore(like=tree_of(0))["step"] == 2
        manager.save(3, {"step": 3}, force=True)
        manager.save(4, {"step": 4})  # The step before has none either.
        manager.wait()
        assert manager.steps() == [4]
