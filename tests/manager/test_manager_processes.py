"""The manager on real processes: one answer for all, kills and going on."""

import hashlib
import logging
import os
import random
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from figures import Figures
from nnx_models import ADAM, train
from ostraka import Best, Manager, sharding
from ostraka.manager import _pending
from ostraka.storage import _claim
from ostraka.testing import kill_when, run_processes
from places import at, flip, remove_tree
from runs import error_of, steps_in

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def mesh_of_all() -> Mesh:
    return jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))


def spread(value: np.ndarray) -> jax.Array:
    placed = NamedSharding(mesh_of_all(), P("data"))
    return jax.make_array_from_callback(value.shape, placed, lambda index: value[index])


def tree_of(step: int) -> dict[str, Any]:
    return {"a": spread(np.full(4096, step, np.int32)), "step": step}


# One answer for all


def decide_alike(root: str) -> dict[str, Any]:
    """Many decisions in one run, since starting one takes long."""
    process = jax.process_index()
    _claim.RENEW_EVERY_S = 0.5  # so that it is soon known who is alive
    said: dict[str, Any] = {}
    with Manager(
        root, when=lambda step: step == 3 or process > 0, keep_best=Best("loss")
    ) as manager:
        said["nothing"] = manager.latest()
        said["when"] = [s for s in range(5) if manager.save(s, tree_of(s), metrics={"loss": s})]
        said["busy"] = error_of(lambda: Manager(root, if_busy="raise"))
        said["wrong"] = error_of(lambda: manager.pin(77))
        manager.save(4, tree_of(4), metrics={"loss": 1}, force=True)
        manager.save(5, tree_of(5), metrics={"loss": 2}, force=True)
        manager.wait()
        manager.pin(5)
        said["steps"] = (manager.steps(), manager.latest(), manager.best())
        said["lower"] = error_of(lambda: manager.save(1, tree_of(1), force=False))
        said["condition"] = error_of(lambda: Manager(f"{root}-x", when=refuse).should_save(1))
    said["seconds"] = save_by_the_clock(f"{root}-clock")
    said["emptied"] = save_without_arrays(f"{root}-emptied")
    return said


def refuse(step: int) -> bool:
    raise KeyError(f"no {step}")


def save_by_the_clock(root: str) -> list[int]:
    """Each process has its own idea of the time."""
    saved: list[int] = []
    with Manager(root, every_s=0.2, keep=1) as manager:
        for step in range(10_000):
            time.sleep(random.uniform(0, 0.006))
            if manager.save(step, {"step": step}):
                saved.append(step)
            # Where steps are slow each may be saved: so not by their number. Who alone came to
            # this end would leave the others waiting.
            if len(saved) == 5:
                break
    return saved


def save_without_arrays(root: str) -> list[str]:
    with Manager(root, keep=1) as manager:
        manager.save(1, tree_of(1))
        said = [error_of(lambda: manager.save(2, {"step": 2}, asynchronous=False))]
        manager.save(2, {"step": 2})
        said.append(error_of(manager.wait))
        assert manager.steps() == [1]
        manager.save(2, {"step": 2}, force=True)
    return said


def test_all_processes_decide_alike(tmp_path: Path):
    results = run_processes(decide_alike, str(tmp_path / "root"), processes=4)
    first = results[0].value
    assert all(len(result.value["seconds"]) == 5 for result in results)
    for result in results[1:]:
        condition = result.value.pop("condition")
        assert condition.startswith("OstrakaError: ")
        assert "failed on process 0: KeyError: 'no 1'" in condition
    assert first.pop("condition") == "KeyError: 'no 1'"
    assert all(result.value == first for result in results)
    assert first["nothing"] is None
    assert first["when"] == [3]
    assert re.match("Busy: .*only one may at a time", first["busy"])
    assert first["wrong"].startswith("CheckpointNotFound: there is no step 77")
    assert first["steps"] == ([4, 5], 5, 4)
    assert first["lower"] == ""  # not due, so nobody asked whether it may
    for said in first["emptied"]:
        assert said.startswith("SaveFailed: ")
        assert re.search(r"step 2 has no arrays, and step 1 in .* has 1 \(is the model", said)
    assert Manager(f"{tmp_path}/root-emptied", read_only=True).steps() == [2]


# Damage, and failures


def fall_back(root: str) -> dict[str, Any]:
    like = {"a": spread(np.zeros(4096, np.int32)), "step": 0}
    said: dict[str, Any] = {}
    with Manager(root) as manager:
        for step in (10, 20, 30):
            manager.save(step, tree_of(step))
        manager.wait()
        if jax.process_index() == 0:
            flip(max(Path(root).glob("step_00000030/shards-*/*.safetensors")), -1)
        multihost_utils.sync_global_devices("damaged")
        said["damaged"] = error_of(lambda: manager.restore(like=like))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tree = manager.restore(like=like, fallback=True)
        said["warnings"] = [str(warning.message) for warning in caught]
        said["restored"] = (manager.restored, tree["step"])
        said["values"] = {int(np.asarray(s.data)[0]) for s in tree["a"].addressable_shards}
        said["mismatch"] = error_of(lambda: manager.restore(like={"b": like["a"]}))
    with Manager(root, every=10) as manager:
        said["failed"] = fail_on_process_2(manager)
        said["invalid"] = be_wrong_on_process_1(manager)
        said["steps"] = manager.steps()
    return said


def fail_on_process_2(manager: Manager) -> list[str]:
    """A file-size limit: a real refusal of the operating system, for one process alone."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _pending._TIMEOUT_S = 60.0  # for a process that is slow, not gone
    said: list[str] = []
    for step, patience_s in ((50, 60.0), (60, 0.0)):
        if jax.process_index() == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
        manager.save(step, tree_of(step))
        said.append(wait_for_error(manager, step, patience_s))
        assert step not in manager.steps()
        assert manager.restore(20, like=tree_of(0))["step"] == 20
        resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)
    manager.save(70, tree_of(70))
    manager.wait()
    return said


def wait_for_error(manager: Manager, step: int, patience_s: float) -> str:
    """From a call that does not save, as soon as it is known; else from one that waits."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if error := error_of(lambda: manager.save(step + 1, {})):
            return error
        time.sleep(0.01)
    return error_of(manager.wait)


def be_wrong_on_process_1(manager: Manager) -> list[str]:
    """What can't be saved is noticed at once where it is, and in the background elsewhere."""
    wrong = {"a": object()} if jax.process_index() == 1 else {"a": 1}
    said = [error_of(lambda: manager.save(80, wrong, asynchronous=False))]
    here = error_of(lambda: manager.save(90, wrong))
    assert bool(here) == (jax.process_index() == 1)
    said.append(error_of(manager.wait))
    manager.save(100, tree_of(100))
    manager.wait()
    return said


def test_damage_and_failures_are_heard_of_by_all(tmp_path: Path):
    root = tmp_path / "root"
    results = run_processes(fall_back, str(root), processes=4)
    file = max(root.glob("step_00000030/shards-*/*.safetensors"))
    for result in results:
        said = result.value
        assert said["damaged"].startswith("Damaged: ")
        assert f"{file.parent.name}/{file.name} (leaf 'a')" in said["damaged"]
        assert "the step before it is 20: pass step=20" in said["damaged"]
        (warning,) = said["warnings"]
        assert "step 30 can't be restored, so step 20 is" in warning
        assert said["restored"] == (20, 20)
        assert said["values"] == {20}
        assert re.match("(Mismatch|RestoreFailed): ", said["mismatch"])
        for message in said["failed"]:
            assert re.match(r"SaveFailed: (.|\n)*on process 2: (.|\n)*File too large", message)
        for message in said["invalid"]:
            assert re.match(r"SaveFailed: (.|\n)*on process 1: (.|\n)*can't be saved", message)
        assert said["steps"] == [10, 20, 30, 70, 100]


def go_away_after_an_error(root: str) -> str:
    """Process 1 can't save, and does nothing more; the others must not wait for it to agree."""
    _pending._TIMEOUT_S = 1.0
    process = jax.process_index()
    manager = Manager(root)
    message = error_of(lambda: manager.save(1, {"a": object()} if process == 1 else {"a": 1}))
    if process != 1:
        message = error_of(lambda: manager.save(2, {"a": 1}))
    at(f"{root}.done{process}").touch()
    while len(list(at(root).parent.glob("*.done*"))) < 3:
        time.sleep(0.01)
    return message


def test_a_process_that_went_away_because_of_the_error(tmp_path: Path):
    results = run_processes(go_away_after_an_error, str(tmp_path / "root"), processes=3)
    for result in results:
        assert "on process 1: leaf 'a' is a builtins.object" in result.value


# Training, killed and resumed


class Small(nnx.Module):
    """Parameters and random numbers; quick to compile."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(4, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(jax.nn.relu(self.up(x))))


def train_on(
    root: str, marks: str, steps: int, every: int, stop: int | None = None
) -> tuple[int, str]:
    """Train up to `steps`, from where it was left; returns where that was, and what came out.

    At the step `stop` it waits to be killed, if it has not been by then.
    """
    _claim.DEAD_AFTER_S, _claim.RENEW_EVERY_S = 10.0, 0.5
    # What is compiled in one round serves the next. A file that is half-written is not taken.
    jax.config.update("jax_compilation_cache_dir", f"{marks}-compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    mesh = mesh_of_all()
    rules = sharding.fsdp("data", min_size=16)
    model, optimizer = sharding.init(lambda: Small(nnx.Rngs(0)), mesh, rules, ADAM)
    state = {"model": model, "optimizer": optimizer}
    with Manager(root, every=every, keep=2) as manager:
        if manager.latest() is not None:
            manager.restore(into=state)
        begun = manager.restored or 0
        for step in range(begun + 1, steps + 1):
            batch = np.random.default_rng(step).standard_normal((8, 4), np.float32)
            loss = train(model, optimizer, spread(batch))
            manager.save(step, state, metrics={"loss": float(loss)})
            if jax.process_index() == 0:
                (Path(marks) / str(step)).touch()
            if step == stop:
                signal.pause()
    return begun, digest_of(state)


def digest_of(tree: Any) -> str:
    """Of all that this process holds, bit for bit."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        for shard in leaf.addressable_shards:
            found.update(np.asarray(shard.data).tobytes())
    return found.hexdigest()


def kill_at(
    mark: str, victim: int, delay_s: float
) -> Callable[[list[subprocess.Popen[bytes]]], None]:
    """Kill one process, and soon after the rest, as whatever started them would."""

    def start(popens: list[subprocess.Popen[bytes]]) -> None:
        for process in range(len(popens)):
            pause_s = delay_s + 0.3 * (process != victim)
            kill_when(process, appears=mark, after_s=pause_s)(popens)

    return start


def check_every_step(root: str, reached: int, every: int) -> None:
    there = steps_in(root)
    assert there, "the last good step is gone"
    # The one before the last that was begun is on disk, or it would have raised.
    assert there[-1] >= reached - 2 * every


def train_undisturbed(
    root: Path, marks: Path, steps: int, every: int, processes: int
) -> tuple[list[str], list[int]]:
    marks.mkdir()
    results = run_processes(
        train_on, str(root), str(marks), steps, every, processes=processes, timeout_s=600
    )
    for file in marks.iterdir():
        file.unlink()
    return [r.value[1] for r in results], Manager(root, read_only=True).steps()


def kill_and_resume(
    place: Path, marks: Path, expected: Any, *, rounds: int, stride: int, every: int, seed: int
) -> None:
    rng = random.Random(seed)
    steps = stride * (rounds + 1)
    processes = len(expected[0])
    root = str(place / "killed")
    for number in range(rounds):
        # The second save begins when the first is there: from then on one must always be.
        reached = stride * number + rng.randint(2 * every, stride)
        # Before any step that the next round may reach, in case that the kill comes late.
        stop = stride * (number + 1) + 2 * every - 1
        mark = str(marks / str(reached))
        results = run_processes(
            train_on,
            root,
            str(marks),
            steps,
            every,
            stop,
            processes=processes,
            check=False,
            timeout_s=600,
            on_start=kill_at(mark, rng.randrange(processes), rng.uniform(0, 0.02)),
        )
        assert any(result.exit_code == -9 for result in results), results
        check_every_step(root, reached, every)
        for file in marks.iterdir():
            file.unlink()
    results = run_processes(
        train_on, root, str(marks), steps, every, processes=processes, timeout_s=600
    )
    assert all(result.value[0] > 0 for result in results)
    assert ([r.value[1] for r in results], Manager(root, read_only=True).steps()) == expected


@pytest.mark.timeout(1200)  # for 6 processes that compile, on a machine that has much else to do
def test_training_killed_and_resumed(tmp_path: Path):
    marks = tmp_path / "marks"
    expected = train_undisturbed(tmp_path / "whole", marks, 24, 3, processes=2)
    kill_and_resume(tmp_path, marks, expected, rounds=1, stride=12, every=3, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(5))
def test_training_killed_and_resumed_again_and_again(tmp_path: Path, part: int, figures: Figures):
    """300 steps each time, of which four rounds are killed; 200 rounds in five parts."""
    marks = tmp_path / "marks"
    expected = train_undisturbed(tmp_path / "whole", marks, 300, 5, processes=4)
    for number in range(10 * part, 10 * part + 10):
        directory = tmp_path / str(number)
        directory.mkdir()
        kill_and_resume(directory, marks, expected, rounds=4, stride=60, every=5, seed=number)
        figures.add("rounds of killed trainings", 4)
        remove_tree(directory)


# Growth


def measure_growth(root: str, saves: int) -> list[tuple[int, int, int]]:
    """Threads, open files and resident bytes, after the first fifth of the saves and at the end."""
    logging.getLogger("ostraka").setLevel(logging.ERROR)
    me = psutil.Process()
    found: list[tuple[int, int, int]] = []

    def measure() -> tuple[int, int, int]:
        manager.wait()
        end_threads_of_saves()
        return threading.active_count(), me.num_fds(), me.memory_info().rss

    tree = {"a": spread(np.zeros(1 << 18, np.float32)), "b": list(range(100))}
    # A thread that watches SIGTERM would live as long as the manager does.
    with Manager(root, keep=2, on_preemption=False) as manager:
        for step in range(saves):
            if step == saves // 5:
                found.append(measure())
            manager.save(step, tree, metrics={"loss": step})
        found.append(measure())
    return found


def end_threads_of_saves() -> None:
    """A save is over a moment before its thread is; one that never ends stays to be counted."""
    deadline = time.monotonic() + 60
    for thread in threading.enumerate():
        # The manager keeps the thread that hears of SIGTERM: to wait for that one would take 60 s.
        if thread.name.startswith("ostraka") and thread.name != "ostraka-sigterm":
            thread.join(max(0, deadline - time.monotonic()))


@pytest.mark.parametrize("processes", [1, 2])
def test_saves_leave_nothing_behind(tmp_path: Path, processes: int):
    saves = 60
    # What counts here is not the disk, which would sync 600 times.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    with tempfile.TemporaryDirectory(dir=memory) as root:
        results = run_processes(measure_growth, root, saves, processes=processes, timeout_s=280)
    for result in results:
        (threads, files, resident), (threads_after, files_after, resident_after) = result.value
        # JAX may have a few more; if one save in four left one behind, it would be ten and more.
        assert threads_after - threads < 10, result.value
        assert files_after - files < 10, result.value
        assert resident_after - resident < 24 << 20, result.value
