"""A manager's mirror on several real processes: each copies its own, and all agree."""

import random
import re
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka import Manager
from ostraka.common.record import Record
from ostraka.errors import Damaged
from ostraka.testing import FaultyStore, kill_when, run_processes
from runs import LONG_S, contents, damage, error_of, raises_from, steps_in


def tree_of(step: int, size: int = 3 << 12) -> dict[str, Any]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    value = np.arange(size, dtype=np.int32) + step
    place = NamedSharding(mesh, P("data"))
    spread = jax.make_array_from_callback(value.shape, place, lambda index: value[index])
    return {"a": spread, "step": step}


# Copying together


def train(root: str, mirror: str, steps: list[int]) -> dict[str, Any]:
    there = FaultyStore(mirror)
    records: list[Record] = []
    with Manager(root, keep=2, mirror=there, mirror_every=2, on_record=records.append) as manager:
        begun = manager.latest()
        restored = None if begun is None else manager.restore(only="step")["step"]
        for step in steps:
            manager.save(step, tree_of(step))
            if step % 3 == 0:
                manager.latest()  # other agreements, while copies are under way
        manager.wait()
        seen = manager.steps()
    made = [name for verb, name in there.calls if verb == "create"]
    copies = [record for record in records if record.operation == "mirror"]
    return {
        "begun": begun,
        "restored": restored,
        "seen": seen,
        "made": made,
        "copies": [(record.path, record.bytes) for record in copies],
    }


def test_each_process_copies_what_it_wrote(tmp_path: Path):
    root, mirror = tmp_path / "runs", tmp_path / "mirror"
    args = (train, str(root), str(mirror), list(range(1, 9)))
    results = [r.value for r in run_processes(*args, processes=4, devices_per_process=2)]
    assert steps_in(root) == [7, 8]
    copied = steps_in(mirror)
    assert copied[-1] == 8
    assert all(step % 2 == 0 for step in copied)
    made = [name for result in results for name in result["made"]]
    assert len(made) == len(set(made))
    for step in copied:
        source = ostraka.open(mirror / str(step))._source  # pyright: ignore
        for process, result in enumerate(results):
            mine = [n for n in result["made"] if n.startswith(f"step_{step:08d}/")]
            wrote = {f"step_{step:08d}/{f.name}" for f in source.files() if f.process == process}
            assert wrote
            assert wrote == set(mine)
    assert all(result["copies"] == results[0]["copies"] for result in results)
    assert len(results[0]["copies"]) == len(copied)

    # On a new disk, with other numbers of processes and devices.
    shutil.rmtree(root)
    args = (train, str(root), str(mirror), [9, 10])
    for result in run_processes(*args, processes=2, devices_per_process=2):
        assert (result.value["begun"], result.value["restored"]) == (8, 8)
    assert steps_in(mirror) == [*copied, 10]


def test_processes_that_copy_to_a_bucket(tmp_path: Path, bucket: str):
    root, mirror = tmp_path / "runs", f"{bucket}/mirror"
    results = run_processes(train, str(root), mirror, [1, 2], processes=2)
    assert all(result.value["made"] for result in results)
    assert steps_in(mirror) == [2]
    shutil.rmtree(root)
    for result in run_processes(train, str(root), mirror, [3], processes=2):
        assert (result.value["begun"], result.value["restored"]) == (2, 2)


def test_steps_that_more_processes_wrote(tmp_path: Path):
    """What was not copied by them is copied by fewer, each a part."""
    root, mirror = tmp_path / "runs", tmp_path / "mirror"
    run_processes(save_without_mirror, str(root), processes=4)
    results = run_processes(train, str(root), str(mirror), [], processes=2)
    assert steps_in(mirror) == [2]
    assert contents(mirror / "step_00000002") == contents(root / "step_00000002")
    assert all(result.value["made"] for result in results)


def save_without_mirror(root: str) -> None:
    with Manager(root) as manager:
        for step in (1, 2):
            manager.save(step, tree_of(step))


# Restoring together


def recover(root: str, mirror: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught, Manager(root, mirror=mirror) as manager:
        warnings.simplefilter("always")
        said["latest"] = manager.latest()
        tree = manager.restore(like=tree_of(0))
        said["step"] = (manager.restored, tree["step"])
        said["missing"] = manager.restore(1, like=tree_of(0))["step"]
        said["nothing"] = error_of(lambda: manager.restore(7))
        said["warned"] = [str(warning.message) for warning in caught]
    return said


def test_a_part_that_one_process_reads_is_damaged(tmp_path: Path):
    root, mirror = tmp_path / "runs", tmp_path / "mirror"
    with Manager(root, mirror=mirror, asynchronous=False) as manager:
        for step in (1, 2):
            manager.save(step, tree_of(step))
    shutil.rmtree(root / "step_00000001")
    file = min((root / "step_00000002").glob("shards-*/*.safetensors"))
    damage(root, 2)
    with pytest.raises(Damaged, match=file.name):
        ostraka.verify(root / "2")
    results = [r.value for r in run_processes(recover, str(root), str(mirror), processes=2)]
    assert results[0] == results[1]
    assert results[0]["latest"] == 2
    assert results[0]["step"] == (2, 2)
    assert results[0]["missing"] == 1
    assert "CheckpointNotFound: there is no step 7 in" in results[0]["nothing"]
    (warned,) = results[0]["warned"]
    assert f"step 2 is restored from the mirror {mirror}" in warned
    assert file.name in warned


# What goes wrong on one process


def fail_on_one(root: str, mirror: str) -> dict[str, Any]:
    faults: dict[str, BaseException] = {}
    if jax.process_index() == 1:
        faults["create"] = OSError(28, "No space left on device")
    said: dict[str, Any] = {}
    there = FaultyStore(mirror, before=raises_from(faults))
    with Manager(root, mirror=there, keep=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree_of(step))
        said["refused"] = error_of(manager.wait)
        said["steps"] = manager.steps()
        faults.clear()
        said["then"] = error_of(manager.wait)
    return said


def test_a_process_that_cannot_write_to_the_mirror(tmp_path: Path):
    root, mirror = tmp_path / "runs", tmp_path / "mirror"
    results = [r.value for r in run_processes(fail_on_one, str(root), str(mirror), processes=3)]
    for said in results:
        assert said == results[0]
        assert said["refused"].startswith("StoreError: the mirror")
        assert "process 1: OSError: No space left on device" in said["refused"]
        assert said["steps"][-1] == 3
        assert said["then"] == ""
    assert steps_in(mirror)[-1] == 3


def leave_one(root: str, mirror: str) -> str:
    manager = Manager(root, mirror=mirror)
    manager.save(2, tree_of(2))
    manager.wait()
    deadline = time.monotonic() + LONG_S
    if jax.process_index() == 1:
        manager.__exit__(RuntimeError, RuntimeError("here alone"), None)
    if jax.process_index() > 0:
        # Process 0 has to notice while they live.
        while not Path(mirror, "noticed").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return ""
    said = ""
    while not said and time.monotonic() < deadline:
        # As if it was saved again; the others know nothing of it.
        mirrors = manager._mirror  # pyright: ignore
        assert mirrors is not None
        shutil.rmtree(Path(mirror, "step_00000002"), ignore_errors=True)
        mirrors.note_commit(2)
        said = error_of(mirrors.wait)
    Path(mirror, "noticed").touch()
    return said


def test_a_process_that_leaves_after_an_error(tmp_path: Path):
    args = (leave_one, str(tmp_path / "runs"), str(tmp_path / "mirror"))
    said = [r.value for r in run_processes(*args, processes=3)]
    # Between two copies, or in one.
    assert re.search("process 1(: Stopped: its manager was left| has left its manager)", said[0])
    assert steps_in(tmp_path / "mirror") == []


def use_memory(root: str) -> str:
    manager = Manager(root, mirror="memory://mine")
    manager.save(1, tree_of(1))
    said = error_of(manager.wait)
    assert error_of(manager.close) == said
    return said


def test_a_mirror_that_is_not_the_same_for_all(tmp_path: Path):
    results = run_processes(use_memory, str(tmp_path / "runs"), processes=2)
    for result in results:
        assert "which another process has copied: all processes must have one" in result.value
    assert steps_in(tmp_path / "runs") == [1]


def leave_open(root: str, mirror: str) -> None:
    manager = Manager(root, mirror=mirror)
    manager.save(1, tree_of(1))
    manager.wait()
    threading.current_thread().manager = manager  # type: ignore[attr-defined]


def test_managers_that_are_never_closed(tmp_path: Path):
    results = run_processes(leave_open, str(tmp_path / "runs"), str(tmp_path / "mirror"))
    assert [result.exit_code for result in results] == [0, 0]
    assert steps_in(tmp_path / "mirror") == [1]


# kill -9


def train_large(root: str, mirror: str, first: int) -> str:
    from ostraka.processes import operation as _coordinate

    _coordinate.DEAD_AFTER_S = 8.0
    manager = Manager(root, keep=2, mirror=mirror)
    for step in range(first, first + 4):
        manager.save(step, tree_of(step, 3 << 20), asynchronous=False)
    said = error_of(manager.wait)
    if "can't be reached" in said:
        time.sleep(1000)  # process 0 is gone, so JAX is about to end this one too
    return said


@pytest.mark.parametrize("victim", [0, 1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_process_is_killed_while_it_copies(tmp_path: Path, victim: int):
    root, mirror = tmp_path / "runs", tmp_path / "mirror"
    chance = random.Random(victim)
    results = run_processes(
        train_large,
        str(root),
        str(mirror),
        1,
        processes=4,
        check=False,
        heartbeat_timeout_s=30,
        on_start=kill_when(
            victim, appears=mirror / "**/*.safetensors", after_s=chance.uniform(0, 0.2)
        ),
    )
    assert results[victim].exit_code == -9
    listed = steps_in(mirror)
    (finished, _) = run_processes(train, str(root), str(mirror), [20], processes=2)
    due = [step for step in finished.value["seen"] if step % 2 == 0]
    assert set(due) | set(listed) <= set(steps_in(mirror))
    for step in due:
        assert contents(mirror / f"step_{step:08d}") == contents(root / f"step_{step:08d}")
