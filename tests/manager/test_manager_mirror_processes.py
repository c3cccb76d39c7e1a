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

import ostraka
from numbered import on_all
from ostraka import Manager
from ostraka.common.record import Record
from ostraka.errors import Damaged
from ostraka.testing import FaultyStore, kill_when, run_processes
from runs import LONG_S, contents, damage, error_of, raises_from, steps_in


def tree_of(step: int, size: int = 3 << 12) -> dict[str, Any]:
    return {"a": on_all(np.arange(size, dtype=np.int32) + step, "x"), "step": step}


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


def train_twice(root: str, mirror: str, first: list[int]) -> list[dict[str, Any]]:
    """A run with a mirror, and one that gets its mirror when it goes on."""
    with Manager(f"{root}-late") as manager:
        for step in first:
            manager.save(step, tree_of(step))
    return [train(root, mirror, list(range(1, 9)))]


def go_on(root: str, mirror: str) -> list[dict[str, Any]]:
    return [train(root, mirror, [9, 10]), train(f"{root}-late", f"{mirror}-late", [])]


def test_each_process_copies_what_it_wrote(tmp_path: Path):
    root, mirror = tmp_path / "runs", tmp_path / "mirror"
    args = (train_twice, str(root), str(mirror), [1, 2])
    results = [r.value[0] for r in run_processes(*args, processes=4, devices_per_process=2)]
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
    results = run_processes(go_on, str(root), str(mirror), processes=2, devices_per_process=2)
    for result in results:
        known, late = result.value
        assert (known["begun"], known["restored"]) == (8, 8)
        assert late["made"]  # Fewer copy what more have written, each a part.
    assert steps_in(mirror) == [*copied, 10]
    assert steps_in(tmp_path / "mirror-late") == [2]
    name = "step_00000002"
    assert contents(tmp_path / "mirror-late" / name) == contents(tmp_path / "runs-late" / name)


def test_processes_that_copy_from_a_bucket_to_a_bucket(bucket: str):
    results = run_processes(train, f"{bucket}/runs", f"{bucket}/mirror", [1, 2], processes=2)
    assert all(result.value["made"] for result in results)
    assert steps_in(f"{bucket}/runs") == [1, 2]
    assert steps_in(f"{bucket}/mirror") == [2]


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


def use_memory(root: str) -> str:
    manager = Manager(root, mirror="memory://mine")
    manager.save(1, tree_of(1))
    said = error_of(manager.wait)
    assert error_of(manager.close) == said
    return said


def do_wrong(root: str) -> dict[str, Any]:
    said = fail_on_one(root, f"{root}-mirror")
    said["memory"] = use_memory(f"{root}-memory")
    manager = Manager(f"{root}-open", mirror=f"{root}-open-mirror")
    manager.save(1, tree_of(1))
    manager.wait()
    threading.current_thread().manager = manager  # type: ignore[attr-defined]
    return said


def test_what_goes_wrong_on_one_process_is_known_to_all(tmp_path: Path):
    """It can't write to the mirror, has another one, or never closes its manager."""
    root = str(tmp_path / "runs")
    results = run_processes(do_wrong, root, processes=3)
    for said in (result.value for result in results):
        assert said == results[0].value
        assert said["refused"].startswith("StoreError: the mirror")
        assert "process 1: OSError: No space left on device" in said["refused"]
        assert said["steps"][-1] == 3
        assert said["then"] == ""
        assert "which another process has copied: all processes must have one" in said["memory"]
    assert steps_in(f"{root}-mirror")[-1] == 3
    assert steps_in(f"{root}-memory") == [1]
    assert [result.exit_code for result in results] == [0, 0, 0]
    assert steps_in(f"{root}-open-mirror") == [1]


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
