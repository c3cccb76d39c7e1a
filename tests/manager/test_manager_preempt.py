"""SIGTERM: one step is saved and the program ends; a second one ends whatever it does."""

import ctypes
import gc
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ostraka
from figures import Figures
from ostraka import Manager
from ostraka.errors import Preempted, SaveFailed
from ostraka.manager import _preempt
from ostraka.testing import FaultyStore, ProcessResult, free_port, run_processes
from runs import Gate, fill, steps_in, tree_of, wait_until

# pyright: reportPrivateUsage=false

ROUNDS = 50
"""For each of four seeds."""


@contextmanager
def ends(match: str) -> Generator[None]:
    """The block ends in the way that ends the program, and SIGTERM is handled as before."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match=match) as caught:
        yield
    assert caught.value.code == 143
    assert not isinstance(caught.value, Exception)  # A loop that catches all errors ends, too.
    assert signal.getsignal(signal.SIGTERM) == before


def sigterm() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two SIGTERMs are two, however soon they come."""
    monkeypatch.setattr(_preempt, "SAME_NOTICE_S", 0.0)


@contextmanager
def handled_by(handler: Any) -> Generator[None]:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGTERM, before)


def sigterms_of(manager: Manager) -> int:
    """How many SIGTERMs it has noted."""
    assert manager._preemption is not None
    assert manager._preemption._sigterm is not None
    return manager._preemption._sigterm.count


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# One step is saved, and the program ends


def test_the_next_save_saves_and_ends_the_program(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    with ends("preempted; step 20 is saved"), Manager(root, every=100, mirror=mirror) as manager:
        assert not manager.save(1, tree_of(1))
        sigterm()
        assert not manager.reached_preemption(1)  # the answer for a step stays
        manager.save(20, tree_of(20))
    assert steps_in(root) == steps_in(mirror) == [20]
    (line,) = warnings_in(caplog)
    assert "step 20 is saved in" in line
    assert "reached_preemption(step)" in line


def test_a_mirror_that_refuses_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    mirror = FaultyStore(tmp_path / "mirror", fail={"create": OSError(28, "No space left")})
    with ends("step 2 is saved"), Manager(tmp_path / "root", mirror=mirror) as manager:
        sigterm()
        manager.save(2, tree_of(2))
    assert "lacks step 2" in caplog.text
    assert steps_in(tmp_path / "root") == [2]


@pytest.mark.parametrize("which", ["the save before", "the last save"])
def test_a_save_that_failed_does_not_cost_the_last_one(tmp_path: Path, which: str):
    def fail(verb: str, name: str) -> None:
        if verb == "finish" and name.startswith("step_00000001"):
            raise OSError(28, "No space left on device")

    manager = Manager(FaultyStore(tmp_path, before=fail))
    if which == "the save before":
        manager.save(1, tree_of(1))
        manager._pending._handle.exception()  # type: ignore[union-attr]
        sigterm()
    else:
        sigterm()
        with pytest.raises(SaveFailed, match="No space left"):
            manager.save(1, tree_of(1))
    with pytest.raises(Preempted, match="step 2 is saved"):
        manager.save(2, tree_of(2))
    assert manager.steps() == [2]
    manager.close()  # It has been told.


# The loop decides


def test_a_loop_that_goes_on_is_back_to_its_schedule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    saved: list[int] = []
    reached: list[int] = []
    gate = Gate("finish", "step_00000012")
    store = FaultyStore(tmp_path, before=gate)
    with Manager(store, every=4, keep=4, on_preemption="continue") as manager:
        for step in range(1, 23):
            if step == 6:
                sigterm()
            if manager.save(step, tree_of(step)):
                saved.append(step)
            if manager.reached_preemption(step):
                reached.append(step)
            if step == 6:
                assert manager.steps() == [4, 6]  # on disk, not under way
            if step == 12:
                gate.wait_until_reached()  # `save` has returned while the step is being written
                gate.open()
        assert saved == [4, 6, 8, 12, 16, 20]
        assert reached == list(range(6, 23))
    assert steps_in(tmp_path) == [8, 12, 16, 20]
    (line,) = warnings_in(caplog)
    assert "reached_preemption(6) is true" in line


def test_a_step_that_is_due_anyway_is_saved_once(tmp_path: Path):
    with Manager(tmp_path, every=10, on_preemption="continue") as manager:
        manager.save(9, tree_of(9))
        sigterm()
        assert [step for step in range(10, 20) if manager.save(step, tree_of(step))] == [10]


# A second SIGTERM, and a third


@pytest.mark.usefixtures("each_counts")
@pytest.mark.parametrize("mode", ["exit", "continue"])
def test_a_second_sigterm_ends_a_program_that_never_saves(tmp_path: Path, mode: Any):
    """The handlers that others have set hear both."""
    heard: list[int] = []

    def hear(number: int, frame: Any) -> None:
        heard.append(number)

    with (
        handled_by(hear),
        ends("SIGTERM came a second time"),
        Manager(tmp_path, on_preemption=mode),
    ):
        sigterm()
        sigterm()
        pytest.fail("the program goes on")
    assert heard == [signal.SIGTERM] * 2


def test_sigterms_that_come_together_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`timeout` sends one to the process, and one to its group."""
    monkeypatch.setattr(_preempt, "SAME_NOTICE_S", 1000.0)
    with ends("step 1 is saved"), Manager(tmp_path) as manager:
        for _ in range(5):
            sigterm()
        manager.save(1, tree_of(1))


@pytest.mark.usefixtures("each_counts")
def test_a_second_sigterm_waits_for_the_save_that_is_under_way(tmp_path: Path):
    def let_go_on() -> None:
        wait_until(lambda: manager._pending._handle is None)  # `with` waits for it
        gate.open()

    gate = Gate("finish")
    with ends("a second time"), Manager(FaultyStore(tmp_path, before=gate)) as manager:
        manager.save(1, tree_of(1))
        gate.wait_until_reached()
        threading.Thread(target=let_go_on, daemon=True).start()
        sigterm()
        sigterm()
    assert steps_in(tmp_path) == [1]


@pytest.mark.usefixtures("each_counts")
def test_a_second_sigterm_while_the_first_is_answered(tmp_path: Path):
    def interrupt(verb: str, name: str) -> None:
        if verb == "finish" and not second:
            second.append(True)
            os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, which waits for the save
            wait_until(lambda: sigterms_of(manager) == 2)

    second: list[bool] = []
    with ends("a second time"), Manager(FaultyStore(tmp_path, before=interrupt)) as manager:
        sigterm()
        manager.save(1, tree_of(1))
    assert steps_in(tmp_path) == [1]  # which `with` has waited for


def be_told_three_times(root: str) -> None:
    _preempt.SAME_NOTICE_S = 0.0
    with Manager(root):
        sigterm()
        try:
            sigterm()
        finally:
            print("unwinding", flush=True)
            sigterm()
            print("still here", flush=True)


def open_a_manager(root: str) -> None:
    print("unwinding", flush=True)
    Manager(FaultyStore(root, before=lambda verb, _: sigterm() if verb == "lock" else None))


@pytest.mark.parametrize("program", [be_told_three_times, open_a_manager])
def test_a_third_sigterm_has_its_default_action(tmp_path: Path, program: Callable[[str], None]):
    """So has the first one while a manager opens."""
    (result,) = run_processes(program, str(tmp_path), processes=1, check=False)
    assert (result.exit_code, result.stdout) == (-signal.SIGTERM, "unwinding\n")
    Manager(tmp_path).close()  # It was not left locked.


# SIGTERM that nobody answers


def test_close_ends_a_program_that_was_not_told(tmp_path: Path):
    with ends("SIGTERM came after the last save"), Manager(tmp_path) as manager:
        manager.save(1, tree_of(1))
        sigterm()
    assert steps_in(tmp_path) == [1]
    manager.close()  # a second time


@pytest.mark.parametrize("why", ["it was told", "it has a handler", "it ignores SIGTERM"])
def test_close_does_not_end_a_program(tmp_path: Path, why: str):
    heard: list[int] = []
    own: dict[str, Any] = {
        "it was told": signal.SIG_DFL,
        "it has a handler": lambda number, frame: heard.append(number),
        "it ignores SIGTERM": signal.SIG_IGN,
    }
    with (
        handled_by(own[why]),
        Manager(tmp_path / "a", on_preemption="continue") as first,
        Manager(tmp_path / "b", on_preemption="continue") as second,
    ):
        sigterm()
        if why == "it was told":
            assert first.reached_preemption(1)
            assert second.reached_preemption(1)
    assert heard == [signal.SIGTERM] * (why == "it has a handler")


def test_an_error_comes_before_sigterm(tmp_path: Path):
    def fail() -> None:
        with Manager(tmp_path):
            sigterm()
            raise KeyError("loss")

    with pytest.raises(KeyError, match="loss"):
        fail()


@pytest.mark.parametrize("first_closed", [0, 1])
def test_the_last_of_several_managers_tells(tmp_path: Path, first_closed: int):
    managers = [Manager(tmp_path / "a"), Manager(tmp_path / "b")]
    sigterm()
    managers.pop(first_closed).close()
    with pytest.raises(Preempted, match="step 1 is saved"):
        managers[0].save(1, tree_of(1))
    managers[0].close()


# SIGTERM at other times


def test_sigterm_during_a_restore_is_answered_by_the_next_save(tmp_path: Path):
    def interrupt(verb: str, name: str) -> None:
        if verb == "get" and is_restoring and threading.current_thread() is threading.main_thread():
            is_restoring.pop()
            sigterm()

    is_restoring: list[bool] = []
    fill(tmp_path, 1)
    store = FaultyStore(tmp_path, before=interrupt)
    with ends("step 2 is saved"), Manager(store, every=100) as manager:
        is_restoring.append(True)
        assert manager.restore(like=tree_of(0))["step"] == 1
        assert not is_restoring
        manager.save(2, tree_of(2))
    assert steps_in(tmp_path) == [1, 2]


def test_sigterm_while_a_manager_closes(tmp_path: Path):
    def interrupt(verb: str, name: str) -> None:
        if verb == "finish":
            os.kill(os.getpid(), signal.SIGTERM)

    store = FaultyStore(tmp_path, before=interrupt)
    with ends("after the last save"), Manager(store) as manager:
        manager.save(1, tree_of(1))
    assert steps_in(tmp_path) == [1]


@pytest.mark.usefixtures("each_counts")
def test_a_program_that_watches_is_ended_by_the_second(tmp_path: Path):
    with ends("a second time"), Manager(tmp_path) as manager:
        sigterm()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        for _ in manager.watch():
            pass


# Whole programs

TRAIN = """
import sys
import jax.numpy as jnp
import ostraka

state = {"w": jnp.zeros(4), "step": 0}
with ostraka.Manager(sys.argv[1], every=1000, keep=3) as manager:
    for step in range(1, 1_000_000):
        state = {"w": state["w"] * 0.5 + 1, "step": step}
        manager.save(step, state)
        if step % 50 == 0:
            print("at", step, flush=True)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def expect(popen: subprocess.Popen[str], line: str) -> None:
    assert popen.stdout is not None
    assert popen.stdout.readline() == f"{line}\n"


def test_a_program_that_does_nothing_about_it(tmp_path: Path):
    """As `timeout 4 python train.py` runs it: two signals, one step, one line, exit code 143."""
    popen = start(TRAIN, tmp_path / "run")
    expect(popen, "at 50")
    popen.send_signal(signal.SIGTERM)
    popen.send_signal(signal.SIGTERM)
    _, said = popen.communicate(timeout=100)
    assert popen.returncode == 143
    step = max(Manager(tmp_path / "run", read_only=True).steps())
    assert step >= 50
    (line,) = said.splitlines()
    assert f"step {step} is" in line
    assert ostraka.restore(tmp_path / "run" / f"step_{step:08d}")["step"] == step


HANGS = """
import sys, time
import jax

root, processes, index, port = sys.argv[1], *map(int, sys.argv[2:])
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
import ostraka
from ostraka.manager import _preempt
from ostraka.testing import FaultyStore

_preempt.SAME_NOTICE_S = 0.0
manager = ostraka.Manager(FaultyStore(root, lag_s=0.05))
manager.save(1, {"a": 1})
print("at 1", flush=True)
while not manager._preemption._sigterm.count:
    time.sleep(0.01)
print("told", flush=True)
time.sleep(1000)
"""


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_that_never_closes_its_manager_ends_with_its_save(tmp_path: Path, processes: int):
    """A process that is ended alone does not wait for the others: JAX would, for minutes."""
    port = free_port()
    programs = [start(HANGS, tmp_path / "c", processes, n, port) for n in range(processes)]
    for program in programs:
        expect(program, "at 1")
    for program in reversed(programs):
        program.send_signal(signal.SIGTERM)
        expect(program, "told")
        program.send_signal(signal.SIGTERM)
        _, said = program.communicate(timeout=100)
        assert program.returncode == 143
        assert processes > 1 or said == ""
    assert steps_in(tmp_path / "c") == [1]


# Several processes


def train_together(root: str, how: str) -> tuple[int, int | None] | None:
    _preempt.SAME_NOTICE_S = 0.0
    process = jax.process_index()
    rng = random.Random(process)
    mode = "continue" if how == "continue" else "exit"
    with Manager(root, every=50, keep=2, on_preemption=mode) as manager:
        for step in range(1, 100_000):
            time.sleep(rng.uniform(0, 0.004))  # each at its own pace
            manager.save(step, tree_of(step))
            if step == 20:
                Path(f"{root}.go.{process}").touch()
            while how == "stuck" and step == 20:
                time.sleep(0.01)
                if sigterms_of(manager):
                    Path(f"{root}.told.{process}").touch()
            if how == "continue" and manager.reached_preemption(step):
                return step, manager.latest()
    return None


def signal_at(
    root: str, moments: Sequence[tuple[str, float]], victims: Sequence[int]
) -> Callable[[list[subprocess.Popen[bytes]]], None]:
    """Send SIGTERM so long after each process has made its mark."""

    def watch(popens: list[subprocess.Popen[bytes]]) -> None:
        for mark, pause_s in moments:
            marks = [Path(f"{root}.{mark}.{n}") for n in range(len(popens))]
            wait_until(lambda marks=marks: all(path.exists() for path in marks))
            time.sleep(pause_s)
            for victim in victims:
                popens[victim].send_signal(signal.SIGTERM)

    return lambda popens: threading.Thread(target=watch, args=(popens,), daemon=True).start()


@pytest.mark.parametrize(
    ("how", "victims"), [("exit", [1]), ("continue", [0, 1, 2]), ("stuck", [0, 1])]
)
def test_all_processes_save_one_step_and_end(tmp_path: Path, how: str, victims: list[int]):
    """Under `jax.distributed` JAX has SIGTERM, and ignores all but the first."""
    root = str(tmp_path / "root")
    moments = [("go", 0.0), ("told", 0.0)] if how == "stuck" else [("go", 0.0)]
    on_start = signal_at(root, moments, victims)
    results = run_processes(
        train_together, root, how, processes=max(victims) + 1, check=False, on_start=on_start
    )
    code = 0 if how == "continue" else 143
    assert {result.exit_code for result in results} == {code}
    if how == "stuck":
        assert all("SIGTERM came a second time" in str(result.error) for result in results)
        return
    *others, newest = steps_in(root)
    assert all(step % 50 == 0 for step in others)
    assert results[0].stderr.count("is being preempted (SIGTERM)") == 1
    for result in results:
        if how == "continue":
            assert result.value == (newest, newest)
        else:
            assert f"step {newest} is saved" in str(result.error)
            assert result.error == results[0].error


def handler_in_c() -> int:
    action = _preempt._Action()
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, ctypes.byref(action))
    return action.handler


def share_sigterm_with_jax(root: str) -> dict[str, Any]:
    """One process under `jax.distributed`."""
    found: dict[str, Any] = {}
    of_jax = handler_in_c()
    with Manager(root) as first:
        with Manager(f"{root}/other"):
            first.save(1, tree_of(1))
        found["held until the last is closed"] = handler_in_c() != of_jax
    found["given back when closed"] = handler_in_c() == of_jax
    manager = Manager(root)
    del manager
    gc.collect()
    found["given back when dropped"] = handler_in_c() == of_jax

    manager = Manager(root, every=10_000)
    found["ours"] = handler_in_c() != of_jax
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    os.kill(child, signal.SIGTERM)
    found["child"] = os.waitpid(child, 0)[1]

    # While the main thread is in C, as in a step that takes long, and Python can't call it.
    is_told = threading.Event()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    call = _preempt._NativeHandler.call

    def tell(self: _preempt._NativeHandler, number: int) -> None:
        found.setdefault("told by", threading.current_thread().name)
        call(self, number)
        is_told.set()

    def release() -> None:
        asleep = 0
        while asleep < 20:  # The main thread waits for the mutex, and not for this one to start.
            state = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2]
            asleep = asleep + 1 if state.split()[0] == "S" else 0
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        found["told in time"] = is_told.wait(60)
        libc.pthread_mutex_unlock(mutex)

    _preempt._NativeHandler.call = tell
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=release).start()
    libc.pthread_mutex_lock(mutex)
    try:
        for number in range(1, 10_000):
            time.sleep(0.001)
            manager.save(number, tree_of(number))
    except Preempted as preempted:
        found["code"] = preempted.code
    manager.close()
    found["after"] = signal.getsignal(signal.SIGTERM)
    with Manager(root):
        pass
    return found


def test_jax_still_gets_sigterm_and_its_handler_back(tmp_path: Path):
    (result,) = run_processes(share_sigterm_with_jax, str(tmp_path), processes=1, distributed=True)
    assert result.value == {
        "held until the last is closed": True,
        "given back when closed": True,
        "given back when dropped": True,
        "ours": True,
        "child": signal.SIGTERM,
        "told by": "ostraka-sigterm",
        "told in time": True,
        "code": 143,
        "after": signal.SIG_DFL,
    }


# Random trials


@dataclass(frozen=True)
class Trial:
    """A training that is preempted, and how."""

    every: int
    keep: int | None
    asynchronous: bool
    mode: Literal["exit", "continue"]
    processes: int
    victims: tuple[int, ...]
    pauses_s: tuple[float, ...]
    """Before each SIGTERM, the first counted from when the manager watches."""
    steps: int
    pace_s: float


def make_trial(rng: random.Random, number: int) -> Trial:
    processes = 2 if number % 8 == 7 else 1
    together = processes == 2
    # As often one as several. Two at once are what `timeout` sends.
    several = rng.choice([(), (), (), (0.0,), (rng.uniform(0.05, 0.3),), (0.1, 0.1)])
    return Trial(
        every=rng.choice([1, 7, 25, 1000]),
        keep=rng.choice([None, 1, 2, 3]),
        asynchronous=rng.random() < 0.8,
        mode=rng.choice(["exit", "exit", "exit", "continue"]),
        processes=processes,
        victims=(0, 1)
        if together and (several or rng.random() < 0.5)
        else (rng.randrange(processes),),
        pauses_s=(rng.uniform(0.0, 0.3), *several),
        steps=3000 if together else 300,
        pace_s=0.002,
    )


def train_and_be_told(root: str, trial: Trial, pace_s: float) -> tuple[int, str]:
    """Train to the end, from where it was left; returns where that was, and what came out."""
    _preempt.SAME_NOTICE_S = 0.03
    process = jax.process_index()
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spread = NamedSharding(mesh, PartitionSpec("x"))
    start = np.arange(16, dtype=np.float32)
    state: dict[str, Any] = {
        "w": jax.make_array_from_callback((16,), spread, lambda index: start[index]),
        "step": 0,
    }
    train = jax.jit(lambda w, noise: w * 0.99 + jnp.sin(w * noise))
    said = Path(f"{root}.said.{process}")
    manager = Manager(
        root,
        every=trial.every,
        keep=trial.keep,
        asynchronous=trial.asynchronous,
        on_preemption=trial.mode,
    )
    with said.open("ab", buffering=0) as file, manager:
        if manager.latest() is not None:
            state = manager.restore(like=state)
        begun = state["step"]
        Path(f"{root}.watching.{process}").touch()
        for step in range(begun + 1, trial.steps + 1):
            time.sleep(pace_s)
            state = {"w": train(state["w"], np.float32(step % 7)), "step": step}
            file.write(f"trained {step}\n".encode())
            if manager.save(step, state):
                file.write(f"saved {step}\n".encode())
            if manager.reached_preemption(step):
                file.write(f"stopped {step}\n".encode())
                break
    Path(f"{root}.closed.{process}").touch()
    shards = b"".join(np.asarray(s.data).tobytes() for s in state["w"].addressable_shards)
    return begun, shards.hex()


def check_trial(root: str, trial: Trial, results: list[ProcessResult]) -> str:
    """That it ended as it must, and has lost nothing; returns how it ended."""
    said = [line.split() for line in Path(f"{root}.said.0").read_text().splitlines()]
    trained, saved, stopped = (
        [int(step) for what, step in said if what == kind]
        for kind in ("trained", "saved", "stopped")
    )
    reader = Manager(root, read_only=True)
    there = reader.steps()
    for step in there:
        assert ostraka.verify(reader.path(step)).ok
        assert ostraka.open(reader.path(step))["step"] == step
    codes = {result.exit_code for result in results}
    errors = [str(result.error) for result in results]
    is_closed = Path(f"{root}.closed.0").exists()
    by_save = re.fullmatch(r"Preempted: .*; step (\d+) is saved", errors[0])
    several = len(trial.pauses_s) > 1
    if by_save is not None:
        how = "ended by save"
        last = int(by_save[1])
        assert trial.mode == "exit"
        assert codes == {143} or (several and codes <= {143, -signal.SIGTERM}), codes
        assert len(set(errors)) == 1 or several, errors
        assert there[-1] == last == trained[-1], "not the last step, or trained after it"
        saved.append(last)
    elif stopped:
        how = "stopped by the loop"
        assert trial.mode == "continue"
        assert there[-1] == stopped[0] == trained[-1]
        assert codes == {0} or several, codes
    elif codes == {0}:
        how = "done before it was told"
        assert trained[-1] == trial.steps
    elif any("SIGTERM came a second time" in error for error in errors):
        how = "ended by the second SIGTERM"
        assert several
        # The other process may learn of it from the save that they were at.
        assert codes <= {143, -signal.SIGTERM, 1}, (codes, errors)
        assert all("SIGTERM came" in error for error in errors if error != "None"), errors
    elif any("after the last save" in error for error in errors):
        how = "ended by close"
        assert trained[-1] == trial.steps
        assert codes <= {143, -signal.SIGTERM}, codes
    else:
        how = "killed"
        assert several or is_closed, (codes, errors)
        assert codes <= {143, -signal.SIGTERM}, (codes, errors)
    # At most one step that the schedule does not ask for, and it is the newest.
    assert [step for step in there if step % trial.every] in ([], there[-1:])
    lost = [step for step in saved if not there or step > there[-1]]
    assert len(lost) <= 1, "more than the save that was under way is lost"
    # `save` may have been interrupted, and the save that it waited for be there.
    committed = sorted({*saved, *there} - set(lost))
    wanted = committed if trial.keep is None else committed[-trial.keep :]
    assert set(wanted) <= set(there), f"{wanted} are not all in {there}"
    return how


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_random_preemptions(tmp_path: Path, seed: int, figures: Figures):
    rng = random.Random(seed)
    undisturbed: dict[tuple[int, int], list[str]] = {}
    for number in range(ROUNDS):
        trial = make_trial(rng, number)
        to_the_end = replace(trial, every=1000, keep=1, asynchronous=True)
        n = trial.processes
        key = n, trial.steps
        if key not in undisturbed:
            root = str(tmp_path / f"undisturbed{n}")
            results = run_processes(train_and_be_told, root, to_the_end, 0.0, processes=n)
            undisturbed[key] = [result.value[1] for result in results]
        root = str(tmp_path / str(number))
        results = run_processes(
            *(train_and_be_told, root, trial, trial.pace_s),
            processes=n,
            check=False,
            timeout_s=120,
            on_start=signal_at(root, [("watching", s) for s in trial.pauses_s], trial.victims),
        )
        try:
            how = check_trial(root, trial, results)
            there = Manager(root, read_only=True).steps()
            resumed = run_processes(train_and_be_told, root, to_the_end, 0.0, processes=n)
            begun = {result.value[0] for result in resumed}
            assert begun == {there[-1] if there else 0}
            assert [result.value[1] for result in resumed] == undisturbed[key]
        except BaseException as error:
            ended = [(r.exit_code, r.error, r.stderr) for r in results]
            error.add_note(f"round {number}: {trial}, {ended}, {os.listdir(root)}")
            raise
        figures.add("trainings preempted at a random moment, and resumed")
        figures.add(f"preempted trainings {how}")
        shutil.rmtree(root)
