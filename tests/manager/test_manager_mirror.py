"""A manager's mirror: what is copied there, what it is good for, what goes wrong with it."""

import errno
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from figures import Figures
from ostraka import Manager
from ostraka.common.record import Record
from ostraka.errors import CheckpointNotFound, Damaged, PathInTheWay, StoreError
from ostraka.saving.place import find_leftovers
from ostraka.storage import _claim, open_store
from ostraka.testing import FaultyStore, run_processes
from places import place_of_kind

LONG_S = 120.0


def tree_of(step: int) -> dict[str, Any]:
    return {"a": np.full(1000, step), "b": np.arange(300_000) + step, "step": step}


def contents(path: Any) -> dict[str, bytes]:
    store = open_store(path)
    return {file.name: store.get(file.name) for file in store.files("")}


def steps_in(path: Any) -> list[int]:
    """The steps that a place lists; each of them must be whole."""
    store = open_store(path)
    with Manager(store, read_only=True) as manager:
        steps = manager.steps()
        for step in steps:
            assert ostraka.verify(manager.path(step)).ok
    return steps


def fill(root: Any, *steps: int, waits: bool = False, **options: Any) -> None:
    with Manager(root, asynchronous=False, **options) as manager:
        for step in steps:
            manager.save(step, tree_of(step))
            if waits:
                manager.wait()


def spoil(root: Path, step: int, *, name: str = "shards-*/*.safetensors") -> None:
    """Change the last byte of a file."""
    file = max((root / f"step_{step:08d}").glob(name))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture(params=["directory", "memory", "store", "bucket"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return place_of_kind(request.param, "mirror", request, tmp_path)


# What is copied


def test_every_step_is_copied(tmp_path: Path, mirror: Any):
    with Manager(tmp_path / "runs", mirror=mirror) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree_of(step))
            manager.wait()
            assert manager.steps() == steps_in(mirror) == list(range(1, step + 1))
    assert contents(mirror) == contents(tmp_path / "runs")


def test_multiples_are_copied_and_none_is_deleted(tmp_path: Path, mirror: Any):
    records: list[Record] = []
    options = {"keep": 1, "mirror_every": 2, "on_record": records.append}
    with Manager(tmp_path / "runs", mirror=mirror, **options) as manager:
        for step in range(1, 7):
            manager.save(step, tree_of(step))
            manager.wait()
    assert steps_in(tmp_path / "runs") == [6]
    assert steps_in(mirror) == [2, 4, 6]
    copies = [record for record in records if record.operation == "mirror"]
    place = open_store(mirror)
    assert [record.path for record in copies] == [
        place.at(f"step_{step:08d}").location for step in (2, 4, 6)
    ]
    assert copies[-1].bytes == sum(f.size for f in place.at("step_00000006").files(""))
    assert list(copies[-1].phases) == ["copy", "commit"]
    assert copies[-1].blocked_s == 0


def test_a_root_in_a_bucket(bucket: str, tmp_path: Path):
    fill(f"{bucket}/runs", 1, 2, mirror=tmp_path / "mirror")
    assert contents(tmp_path / "mirror") == contents(f"{bucket}/runs")


def test_a_run_that_was_without_a_mirror_gets_one(tmp_path: Path, mirror: Any):
    fill(tmp_path / "runs", 1, 2, 3)
    Manager(tmp_path / "runs", mirror=mirror).close()
    assert steps_in(mirror) == [1, 2, 3]


def test_what_is_there_is_not_copied_again(tmp_path: Path):
    fill(tmp_path / "runs", 1, 2, mirror=tmp_path / "mirror")
    there = FaultyStore(tmp_path / "mirror")
    Manager(tmp_path / "runs", mirror=there).close()
    assert {verb for verb, _ in there.calls}.isdisjoint({"create", "put", "delete"})


def test_a_step_that_is_saved_again_is_copied_again(tmp_path: Path, mirror: Any):
    with Manager(tmp_path / "runs", mirror=mirror) as manager:
        for value in (7, 8):
            manager.save(1, tree_of(value))
            manager.wait()
            assert ostraka.restore(open_store(mirror).at("step_00000001"))["step"] == value
    assert contents(mirror) == contents(tmp_path / "runs")


def test_steps_of_another_history_are_replaced(tmp_path: Path, mirror: Any, caplog: Any):
    fill(tmp_path / "old", 1, 2, 3, mirror=mirror)
    before = contents(mirror)
    fill(tmp_path / "runs", 2)
    with Manager(tmp_path / "runs", mirror=mirror):
        assert "has step 3, later than step 2, the newest in its root" in caplog.text
    after = contents(mirror)
    mine = contents(tmp_path / "runs")
    assert {name: data for name, data in after.items() if name.startswith("step_00000002")} == mine
    for name in before.keys() | after.keys():
        if not name.startswith("step_00000002"):
            assert before[name] == after[name]


def test_files_that_the_mirror_has_lost_come_back(tmp_path: Path):
    root, there = tmp_path / "runs", tmp_path / "mirror"
    fill(root, 1, 2, mirror=there)
    whole = contents(there)
    max(there.glob("step_00000001/shards-*/*.safetensors")).unlink()
    shutil.rmtree(min(there.glob("step_00000002/shards-*")))
    Manager(root, mirror=there).close()
    assert contents(there) == whole


def test_a_damaged_step_is_not_copied(tmp_path: Path, mirror: Any, caplog: Any):
    root = tmp_path / "runs"
    fill(root, 1, 2, 3)
    spoil(root, 2)
    Manager(root, mirror=mirror).close()
    assert steps_in(mirror) == [1, 3]
    assert "step 2 is not copied to" in caplog.text
    assert "not as they were written" in caplog.text
    assert open_store(mirror).at("step_00000002").list() == []


def test_what_a_dead_copy_left_of_a_step_that_is_gone_is_removed(tmp_path: Path):
    root, there = tmp_path / "runs", tmp_path / "mirror"
    fill(root, 1, mirror=there)
    left = there / "step_00000002" / "shards-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "shard_00000.safetensors").write_bytes(b"half")
    fill(root, 3, mirror=there)
    assert not (there / "step_00000002").exists()
    assert steps_in(there) == [1, 3]


# A mirror that is slower than the run


class Gate:
    """Holds up one verb of a store, from its first call on, until it is opened."""

    def __init__(self, verb: str, *, name: str = ""):
        self.is_reached = threading.Event()
        self._is_open = threading.Event()
        self._verb = verb
        self._name = name

    def __call__(self, verb: str, name: str) -> None:
        if verb == self._verb and self._name in name:
            self.is_reached.set()
            assert self._is_open.wait(LONG_S)

    def open(self) -> None:
        self._is_open.set()


def test_a_slow_mirror_makes_no_save_wait_and_fills_no_disk(tmp_path: Path, caplog: Any):
    gate = Gate("create")
    there = FaultyStore(tmp_path / "mirror", before=gate)
    with Manager(tmp_path / "runs", keep=1, mirror=there, asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        assert gate.is_reached.wait(LONG_S)
        for step in range(2, 7):
            manager.save(step, tree_of(step))
            assert manager.steps() == [1, step]  # that being copied, and the newest
        assert steps_in(tmp_path / "mirror") == []
        gate.open()
        manager.wait()
        assert manager.steps() == [6]
    assert steps_in(tmp_path / "mirror") == [1, 6]
    assert "step 5 was deleted from" in caplog.text
    assert "step 6 was deleted from" not in caplog.text


def test_the_newest_that_is_due_is_kept_until_it_is_copied(tmp_path: Path):
    gate = Gate("create")
    there = FaultyStore(tmp_path / "mirror", before=gate)
    options = {"keep": 1, "mirror_every": 2, "asynchronous": False}
    with Manager(tmp_path / "runs", mirror=there, **options) as manager:
        manager.save(2, tree_of(2))
        assert gate.is_reached.wait(LONG_S)
        for step in range(3, 8):
            manager.save(step, tree_of(step))
        assert manager.steps() == [2, 6, 7]
        gate.open()
    assert steps_in(tmp_path / "runs") == [7]
    assert steps_in(tmp_path / "mirror") == [2, 6]


def test_a_step_that_is_deleted_while_it_is_copied(tmp_path: Path, caplog: Any):
    gate = Gate("create")
    there = FaultyStore(tmp_path / "mirror", before=gate)
    with Manager(tmp_path / "runs", mirror=there, asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        assert gate.is_reached.wait(LONG_S)
        manager.delete(1)
        gate.open()
        manager.wait()
        manager.save(2, tree_of(2))
    assert steps_in(tmp_path / "mirror") == [2]
    assert "step 1 was deleted from" in caplog.text
    assert os.listdir(tmp_path / "mirror") == ["step_00000002"]


def test_a_step_that_is_replaced_while_it_is_copied(tmp_path: Path):
    gate = Gate("create")
    there = FaultyStore(tmp_path / "mirror", before=gate)
    with Manager(tmp_path / "runs", mirror=there, asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        assert gate.is_reached.wait(LONG_S)
        manager.save(1, tree_of(5))
        gate.open()
    assert contents(tmp_path / "mirror") == contents(tmp_path / "runs")
    assert ostraka.restore(tmp_path / "mirror" / "1")["step"] == 5


def test_a_step_that_is_saved_again_just_after_it_was_copied(tmp_path: Path):
    gate = Gate("mirror")
    there = tmp_path / "mirror"
    options: dict[str, Any] = {"on_record": lambda record: gate(record.operation, record.path)}
    with Manager(tmp_path / "runs", mirror=there, asynchronous=False, **options) as manager:
        manager.save(1, tree_of(1))
        assert gate.is_reached.wait(LONG_S)  # It is there, and nobody has noted it yet.
        manager.save(1, tree_of(5))
        gate.open()
    assert contents(there) == contents(tmp_path / "runs")


def test_a_record_that_waits_for_its_own_copy(tmp_path: Path, caplog: Any):
    def wait(record: Record) -> None:
        if record.operation == "mirror":
            manager.wait()

    with Manager(tmp_path / "runs", mirror=tmp_path / "mirror", on_record=wait) as manager:
        manager.save(1, tree_of(1))
    assert "on_record is a part of the copy to the mirror, and can't wait for it" in caplog.text
    assert steps_in(tmp_path / "mirror") == [1]


# Restoring


def test_a_run_goes_on_with_an_empty_root(tmp_path: Path, mirror: Any):
    fill(tmp_path / "runs", 1, 2, 3, mirror=mirror)
    shutil.rmtree(tmp_path / "runs")
    with Manager(tmp_path / "runs", mirror=mirror, keep=2) as manager:
        assert manager.latest() == 3
        assert manager.restore(like=tree_of(0))["step"] == manager.restored == 3
        assert manager.steps() == []
        assert manager.path(3) == open_store(mirror).at("step_00000003").location
        with pytest.raises(ValueError, match=r"step 2 is lower than 3, the latest step in .* or "):
            manager.save(2, tree_of(2))
        for step in (4, 5):
            manager.save(step, tree_of(step))
            manager.wait()
    assert steps_in(tmp_path / "runs") == [4, 5]
    assert steps_in(mirror) == [1, 2, 3, 4, 5]


def test_a_reader_restores_from_the_mirror(tmp_path: Path, mirror: Any):
    fill(tmp_path / "runs", 1, 2, 3, waits=True, keep=1, mirror=mirror)
    before = contents(mirror)
    with Manager(tmp_path / "runs", mirror=mirror, read_only=True) as manager:
        assert manager.steps() == [3]
        assert manager.restore(2)["step"] == manager.restored == 2
        assert manager.restore()["step"] == 3
        with pytest.raises(CheckpointNotFound, match=r"no step 7 in .* or its mirror .*; it has 1"):
            manager.restore(7)
        with pytest.raises(CheckpointNotFound, match="there is no step 7 in"):
            manager.metrics(7)
    with Manager(tmp_path / "elsewhere", mirror=mirror, read_only=True) as manager:
        assert manager.latest() == 3
        assert manager.restore()["step"] == 3
    assert contents(mirror) == before


def test_nothing_anywhere(tmp_path: Path, mirror: Any):
    with Manager(tmp_path / "runs", mirror=mirror) as manager:
        assert manager.latest() is None
        with pytest.raises(CheckpointNotFound, match="or its mirror .* to restore"):
            manager.restore()


@pytest.mark.parametrize("name", ["shards-*/*.safetensors", "_METADATA"])
def test_a_damaged_step_is_restored_from_the_mirror(tmp_path: Path, name: str, caplog: Any):
    root, there = tmp_path / "runs", tmp_path / "mirror"
    fill(root, 1, 2, mirror=there)
    spoil(root, 2, name=name)
    with Manager(root, mirror=there) as manager:
        assert manager.latest() == 2
        with pytest.warns(UserWarning, match="step 2 is restored from the mirror .* is damaged"):
            assert np.array_equal(manager.restore()["b"], tree_of(2)["b"])
        assert manager.restored == 2
        assert "step 2 is restored from the mirror" in caplog.text
        assert manager.restore(1)["step"] == 1
    with pytest.raises(Damaged, match="step_00000002"):
        ostraka.restore(root / "2")  # it stays for repair
    assert 2 in steps_in(there)


def test_both_are_damaged(tmp_path: Path):
    root, there = tmp_path / "runs", tmp_path / "mirror"
    fill(root, 1, 2, 3, mirror=there)
    shutil.rmtree(root / "step_00000002")
    for place in (root, there):
        spoil(place, 3)
    with Manager(root, mirror=there, read_only=True) as manager:
        with (
            pytest.warns(UserWarning, match="step 3 is restored from the mirror"),
            pytest.raises(Damaged, match=r"mirror.*; the step before it is 2"),
        ):
            manager.restore()
        with (
            pytest.warns(UserWarning, match="step 3 is restored from the mirror"),
            pytest.warns(UserWarning, match="step 3 can't be restored, so step 2 is"),
        ):
            assert manager.restore(fallback=True)["step"] == 2
        with (
            pytest.warns(UserWarning, match="step 3 is restored from the mirror"),
            pytest.warns(UserWarning, match="step 3 can't be restored, so step 2 is"),
        ):
            assert manager.restore(like=tree_of(0), fallback=True)["step"] == 2


def test_another_save_of_the_same_step_is_no_copy(tmp_path: Path):
    root, there = tmp_path / "runs", tmp_path / "mirror"
    fill(root, 1, 2)
    fill(there, 2)
    spoil(root, 2)
    manager = Manager(root, mirror=there, read_only=True)
    with pytest.raises(Damaged, match="the step before it is 1"):
        manager.restore()


def test_later_steps_of_a_mirror_do_not_count(tmp_path: Path):
    """They were deleted from the root, or are those of a run that went another way."""
    root, there = tmp_path / "runs", tmp_path / "mirror"
    fill(root, 1, 2, 3, mirror=there)
    with Manager(root, mirror=there) as manager:
        manager.delete(3)
        assert manager.latest() == 2
        assert manager.restore()["step"] == 2
        assert manager.restore(3)["step"] == 3
        spoil(root, 2)
        with pytest.warns(UserWarning, match="step 2 is restored from the mirror"):
            assert manager.restore()["step"] == 2


def test_a_mirror_that_cannot_be_read_hides_no_step(tmp_path: Path, caplog: Any):
    root = tmp_path / "runs"
    fill(root, 1, 2)
    spoil(root, 2)
    broken: dict[str, BaseException] = {}
    there = FaultyStore(tmp_path / "mirror", before=raises_from(broken))
    manager = Manager(root, mirror=there, read_only=True)
    broken["list"] = StoreError("the mirror is away")
    assert manager.latest() == 2
    with pytest.raises(Damaged, match="the step before it is 1"):
        manager.restore()
    with pytest.warns(UserWarning, match="so step 1 is"):
        assert manager.restore(fallback=True)["step"] == 1
    assert "the mirror is away" in caplog.text
    with pytest.raises(StoreError, match="the mirror is away"):
        manager.restore(7)
    shutil.rmtree(root)
    with pytest.raises(StoreError, match="the mirror is away"):
        manager.latest()  # never: begin from scratch


def raises_from(faults: dict[str, BaseException]) -> Callable[[str, str], None]:
    def before(verb: str, name: str) -> None:
        if verb in faults:
            raise faults[verb]

    return before


# Faults of the mirror


@pytest.mark.parametrize("verb", ["create", "write", "finish", "publish", "touch", "list"])
def test_a_mirror_that_refuses_stops_no_run(tmp_path: Path, verb: str, caplog: Any):
    root = tmp_path / "runs"
    faults: dict[str, BaseException] = {}
    there = FaultyStore(tmp_path / "mirror", before=raises_from(faults), has_locks=False)
    manager = Manager(root, mirror=there, keep=2)
    faults[verb] = StoreError("no space left there", errno=errno.ENOSPC)
    for step in range(1, 6):
        assert manager.save(step, tree_of(step))
    with pytest.raises(
        StoreError, match=r"lacks steps 4, 5 of .*: .*no space left there; the root"
    ):
        manager.wait()
    with pytest.raises(StoreError, match="lacks steps 4, 5 of"):
        manager.close()
    assert steps_in(root) == [4, 5]
    assert caplog.text.count("saving goes on, and copying is tried again") == 1
    faults.clear()
    assert steps_in(tmp_path / "mirror") == []
    Manager(root, mirror=tmp_path / "mirror").close()
    assert contents(tmp_path / "mirror") == contents(root)


def test_a_mirror_that_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without anybody waiting for it, nor another step."""
    monkeypatch.setattr("ostraka.manager._mirror._FIRST_PAUSE_S", 0.01)
    faults: dict[str, BaseException] = {"create": StoreError("the mirror is away")}
    copied = threading.Event()
    there = FaultyStore(tmp_path / "mirror", before=raises_from(faults))

    def note(record: Record) -> None:
        if record.operation == "mirror":
            copied.set()

    with Manager(tmp_path / "runs", mirror=there, on_record=note) as manager:
        manager.save(1, tree_of(1))
        with pytest.raises(StoreError, match="the mirror is away"):
            manager.wait()
        faults.clear()
        assert copied.wait(LONG_S)
    assert steps_in(tmp_path / "mirror") == [1]


def test_something_else_in_the_place_of_one_step(tmp_path: Path):
    (tmp_path / "mirror" / "step_00000002").mkdir(parents=True)
    (tmp_path / "mirror" / "step_00000002" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"lacks step 2 of .* with other things in it \(notes.txt"):
        fill(tmp_path / "runs", 1, 2, 3, mirror=tmp_path / "mirror")
    assert steps_in(tmp_path / "mirror") == [1, 3]


def test_two_runs_with_one_mirror(tmp_path: Path):
    there = tmp_path / "mirror"
    with Manager(tmp_path / "a", mirror=there) as first:
        first.save(1, tree_of(1))
        first.wait()
        with (
            pytest.raises(StoreError, match="another Manager is writing to .*mirror"),
            Manager(tmp_path / "b", mirror=there) as second,
        ):
            second.save(5, tree_of(5))
    assert steps_in(there) == [1]
    Manager(tmp_path / "b", mirror=there).close()
    assert steps_in(there) == [1, 5]


def test_a_mirror_that_was_deleted_meanwhile(tmp_path: Path):
    with Manager(tmp_path / "runs", mirror=tmp_path / "mirror") as manager:
        manager.save(1, tree_of(1))
        manager.wait()
        shutil.rmtree(tmp_path / "mirror")
        manager.save(2, tree_of(2))
    assert steps_in(tmp_path / "mirror") == [2]


def test_mirrors_that_cannot_be_one(tmp_path: Path, bucket: str):
    root = tmp_path / "runs"
    (tmp_path / "link").symlink_to(root)
    for place in (root, root / "mirror", tmp_path, tmp_path / "link", f"file://{root}/"):
        with pytest.raises(ValueError, match="are one place, or one is inside the other"):
            Manager(root, mirror=place)
    with pytest.raises(ValueError, match="are one place"):
        Manager(f"{bucket}/runs", mirror=f"{bucket}/runs/mirror")
    with pytest.raises(ValueError, match="mirror_every=2 is given without mirror="):
        Manager(root, mirror_every=2)
    with pytest.raises(TypeError, match="mirror_every must be a whole number, not 2.5"):
        Manager(root, mirror=tmp_path / "mirror", mirror_every=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mirror_every must be more than 0, not 0"):
        Manager(root, mirror=tmp_path / "mirror", mirror_every=0)
    with pytest.raises(StoreError, match="there is no such bucket; create it"):
        Manager(root, mirror="s3://no-such-bucket-anywhere/runs")
    ostraka.save(tmp_path / "one", {"a": 1})
    with pytest.raises(PathInTheWay, match="is itself a checkpoint"):
        Manager(root, mirror=tmp_path / "one")
    with pytest.raises(CheckpointNotFound, match="is itself a checkpoint"):
        Manager(root, mirror=tmp_path / "one", read_only=True)
    Manager(root).close()  # The lock was given back each time.


# The end


def live_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ostraka-mirror"]


@contextmanager
def opened_when_left(gate: Gate) -> Generator[None]:
    """A verb that hangs does not end before it is let go."""
    timer = threading.Timer(0.5, gate.open)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        gate.open()


def test_an_error_in_the_block_ends_the_copying(tmp_path: Path, caplog: Any):
    gate = Gate("create")
    there = FaultyStore(tmp_path / "mirror", before=gate)

    def diverge() -> None:
        with Manager(tmp_path / "runs", mirror=there, asynchronous=False) as manager:
            manager.save(1, tree_of(1))
            assert gate.is_reached.wait(LONG_S)
            raise RuntimeError("diverged")

    with opened_when_left(gate), pytest.raises(RuntimeError, match="diverged"):
        diverge()
    assert "lacks step 1 of" in caplog.text
    assert "the next Manager with this mirror copies what is missing" in caplog.text
    assert live_threads() == []
    assert steps_in(tmp_path / "mirror") == []
    Manager(tmp_path / "runs", mirror=tmp_path / "mirror").close()
    assert steps_in(tmp_path / "mirror") == [1]


def test_ctrl_c_while_it_waits_for_the_mirror(tmp_path: Path):
    gate = Gate("create")
    manager = Manager(tmp_path / "runs", mirror=FaultyStore(tmp_path / "mirror", before=gate))
    manager.save(1, tree_of(1))
    assert gate.is_reached.wait(LONG_S)
    with opened_when_left(gate):
        interrupt = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        interrupt.start()
        with pytest.raises(KeyboardInterrupt, match="^$"):
            manager.close()
        interrupt.join()
    assert live_threads() == []
    Manager(tmp_path / "runs", mirror=tmp_path / "mirror").close()
    assert steps_in(tmp_path / "mirror") == [1]


def test_a_manager_that_nobody_has_any_more(tmp_path: Path):
    fill(tmp_path / "runs", 1)
    manager = Manager(tmp_path / "runs", mirror=tmp_path / "mirror")
    manager.wait()
    del manager
    gc.collect()
    assert live_threads() == []
    fill(tmp_path / "runs", 2, mirror=tmp_path / "mirror")
    assert steps_in(tmp_path / "mirror") == [1, 2]


UNCLOSED = """
import sys, ostraka
manager = ostraka.Manager(sys.argv[1] + "/runs", mirror=sys.argv[1] + "/mirror")
manager.save(1, {"a": 1})
manager.wait()
"""


def test_a_program_that_never_closes_its_manager(tmp_path: Path):
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_in(tmp_path / "mirror") == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="NOT TESTED HERE: forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_a_forked_child_leaves_the_mirror_alone(tmp_path: Path):
    gate = Gate("create")
    there = FaultyStore(tmp_path / "mirror", before=gate)
    with Manager(tmp_path / "runs", mirror=there, asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        assert gate.is_reached.wait(LONG_S)
        child = os.fork()
        if child == 0:
            manager.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        gate.open()
    assert steps_in(tmp_path / "mirror") == [1]


# kill -9


def save_until_killed(root: str, mirror: str, moment: int) -> None:
    """In a process of its own, which ends at the given write to the mirror."""
    left = moment

    def before(verb: str, name: str) -> None:
        nonlocal left
        if verb in ("create", "write", "finish", "put", "publish", "sync", "touch", "delete"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    there = FaultyStore(mirror, before=before)
    with Manager(root, keep=2, mirror=there, mirror_every=2) as manager:
        first = (manager.latest() or 0) + 1
        for step in range(first, first + 6):
            manager.save(step, tree_of(step))


def run_killed(root: Path, mirror: Any, moment: int) -> int:
    (result,) = run_processes(
        save_until_killed, str(root), str(mirror), moment, processes=1, check=False
    )
    assert result.error is None
    return result.exit_code


def kill_and_go_on(tmp_path: Path, mirror: Any, moments: list[int]) -> None:
    """Runs that are killed, one after the other; then one that isn't, which finishes it all."""
    root = tmp_path / "runs"
    ends: set[int] = set()
    for moment in moments:
        ends.add(run_killed(root, mirror, moment))
        steps_in(mirror)
    assert -signal.SIGKILL in ends
    assert ends <= {0, -signal.SIGKILL}
    Manager(root, keep=2, mirror=mirror, mirror_every=2).close()
    # A step that is older than those to keep may have been killed in the middle of its deletion.
    due = [step for step in steps_in(root)[-2:] if step % 2 == 0]
    assert due
    copied = steps_in(mirror)
    assert set(due) <= set(copied)
    assert all(step % 2 == 0 for step in copied)
    mine = contents(root)
    there = contents(mirror)
    for step in due:
        name = f"step_{step:08d}/"
        assert {n: d for n, d in mine.items() if n.startswith(name)} == {
            n: d for n, d in there.items() if n.startswith(name)
        }
    assert all(find_leftovers(open_store(mirror).at(f"step_{step:08d}")) == [] for step in copied)


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_any_time_the_next_run_finishes(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    kill_and_go_on(tmp_path, tmp_path / "mirror", [chance.randint(1, 60) for _ in range(3)])


def test_killed_while_it_copies_to_a_bucket(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 2.0)
    kill_and_go_on(tmp_path, f"{bucket}/mirror", [9])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_killed_again_and_again(tmp_path: Path, seed: int, figures: Figures):
    chance = random.Random(f"soak {seed}")
    # Early at least once: a run may have written all that it has to before a late one.
    moments = [chance.randint(1, 15), *(chance.randint(1, 90) for _ in range(4))]
    kill_and_go_on(tmp_path, tmp_path / "mirror", moments)
    figures.add("kills while copying to a mirror", 5)


def test_nothing_is_logged_when_all_is_well(tmp_path: Path, caplog: Any):
    fill(tmp_path / "runs", 1, 2, 3, waits=True, keep=1, mirror=tmp_path / "mirror")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
