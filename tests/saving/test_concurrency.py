"""Threads, forks and signals that come in the middle of a save, a look or a read."""

import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from numbered import caught, threads_left
from ostraka.layout import shard_file
from ostraka.testing import run_processes
from programs import run_quietly

START = """
import os, signal, sys, threading, time, warnings
warnings.simplefilter("ignore")  # JAX warns of forks
"""
IMPORTS = """
import jax
import numpy as np
import ostraka
from ostraka.live import values as _values
from ostraka.testing import FaultyStore
root = sys.argv[1]
tree = {"w": np.arange(1000.0)}

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(300)  # what can't go on is ended
        work()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


# Threads of the program


def test_a_numpy_array_that_is_written_to_during_a_save(tmp_path: Path):
    live = np.zeros((1 << 20, 3), np.float32)
    tree = {"contiguous": live, "not": live.T, "one": live[5]}
    real = shard_file.block_digest

    def digest_and_change(pieces: Any) -> str:
        digest = real(pieces)
        np.add(live, 1, out=live)
        return digest

    with patch.object(shard_file, "block_digest", digest_and_change):
        ostraka.save(tmp_path, tree)
    assert live[0, 0] > 0
    assert ostraka.verify(tmp_path).ok


@pytest.fixture
def threads_switch_often() -> Generator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_switch_often")
@pytest.mark.parametrize(
    "begin", [ostraka.save, lambda *given: ostraka.save_async(*given).wait()], ids=["now", "async"]
)
def test_arrays_that_a_thread_looks_at_during_a_save(begin: Callable[..., Any], tmp_path: Path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    numbers = np.arange(64, dtype=np.float32)
    path = f"memory://{tmp_path}"
    for _ in range(20):
        tree = [jax.device_put(numbers + n, NamedSharding(mesh, P("x"))) for n in range(40)]
        barrier = threading.Barrier(2)

        def look(tree: list[jax.Array] = tree, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            for array in tree:
                array.addressable_data(0)

        looker = threading.Thread(target=look)
        looker.start()
        barrier.wait()
        begin(path, tree)
        looker.join()
        found = ostraka.restore(path, mesh=mesh, specs=P())
        assert all(np.array_equal(found[n], numbers + n) for n in range(40))


# Programs: signal handlers that save, and forks

DATA = """
class Data:
    def get_state(self):
        signal.raise_signal(signal.SIGUSR1)
        return {}

    def set_state(self, state):
        pass

def slow(verb, name):
    if verb == "put":
        time.sleep(0.5)  # far longer than the program would go on

handler = FaultyStore(root + "/handler", before=slow)
"""
BOTH_BEGUN = """
signal.signal(signal.SIGUSR1, lambda *_: ostraka.{}(handler, tree))
ostraka.save_async(root + "/loop", {{"data": Data(), **tree}})
"""


@dataclass(frozen=True, slots=True)
class Program:
    body: str
    out: str = ""
    saved: tuple[str, ...] = ()
    """The checkpoints that must be complete afterwards."""
    start: str = START


PROGRAMS = {
    "a handler saves while an array is taken apart": Program(
        """
array = jax.numpy.arange(10)
listed = _values._listed

def interrupted(array):
    _values._listed = listed
    signal.raise_signal(signal.SIGUSR1)
    return listed(array)

signal.signal(signal.SIGUSR1, lambda *_: ostraka.save(root + "/handler", [array]))
_values._listed = interrupted
signal.alarm(300)
ostraka.save(root + "/loop", [array])
""",
        saved=("handler", "loop"),
    ),
    "a handler saves while a save is begun": Program(
        DATA + BOTH_BEGUN.format("save"), saved=("handler", "loop")
    ),
    "a handler begins a save while another is begun": Program(
        DATA + BOTH_BEGUN.format("save_async"), saved=("handler", "loop")
    ),
    "a handler begins a save while another is waited for": Program(
        DATA
        + """
from ostraka.saving import background as _handle
wait = _handle.SaveHandle._wait_for_end

def interrupted(self, timeout=None):
    _handle.SaveHandle._wait_for_end = wait
    signal.raise_signal(signal.SIGUSR1)
    wait(self, timeout)

signal.signal(signal.SIGUSR1, lambda *_: ostraka.save_async(handler, tree))
ostraka.save_async(root + "/first", tree)
_handle.SaveHandle._wait_for_end = interrupted
ostraka.save_async(root + "/second", tree)
""",
        saved=("first", "handler", "second"),
    ),
    "the error of a save that a handler has begun is not lost": Program(
        DATA
        + """
import logging
logging.getLogger("ostraka").addHandler(logging.NullHandler())
os.mkdir(root + "/handler")
open(root + "/handler/other", "w").close()
signal.signal(signal.SIGUSR1, lambda *_: ostraka.save_async(root + "/handler", tree))
try:
    ostraka.save_async(root + "/loop", {"data": Data(), **tree})
except ostraka.errors.PathInTheWay:
    print("told")
ostraka.save(root + "/next", tree)
""",
        "told\n",
        ("next",),
    ),
    # Before the child has got rid of the manager's handler, as it is with start(); terminate().
    "SIGTERM comes to a child before it has begun": Program(
        """
manager = ostraka.Manager(root)
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
children.append(True)
in_child(lambda: None)
print(manager.reached_preemption(1), signal.pthread_sigmask(signal.SIG_BLOCK, []) == before)
os.kill(os.getpid(), signal.SIGTERM)
print(manager.reached_preemption(2))
""",
        "-15\nFalse True\nTrue\n",
        start=START
        + """
children = []

def end_child():
    if children:
        os.kill(os.getpid(), signal.SIGTERM)

os.register_at_fork(after_in_child=end_child)
""",
    ),
    "a child that is forked during retention can look": Program(
        """
deleting, go_on = threading.Event(), threading.Event()

def stop(verb, name):
    if verb == "delete" and name.startswith("step_00000001"):
        deleting.set()
        go_on.wait()

with ostraka.Manager(root) as manager:
    manager.save(1, tree)
manager = ostraka.Manager(FaultyStore(root, before=stop), keep=1)
manager.save(2, tree)
deleting.wait()
in_child(lambda: print(manager.steps(), flush=True))
go_on.set()
manager.close()
""",
        "[1, 2]\n0\n",
    ),
    "a child that is forked while a checkpoint is read can read it": Program(
        """
reading, go_on = threading.Event(), threading.Event()

def stop(verb, name):
    if verb == "get" and threading.current_thread() is not threading.main_thread():
        reading.set()
        go_on.wait()

ostraka.save(root, tree)
checkpoint = ostraka.open(FaultyStore(root, before=stop))
reader = threading.Thread(target=lambda: checkpoint["w"][:3])
reader.start()
reading.wait()
in_child(lambda: print(checkpoint["w"][:3], flush=True))
go_on.set()
reader.join()
""",
        "[0. 1. 2.]\n0\n",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, tmp_path: Path):
    program = PROGRAMS[name]
    assert run_quietly(program.start + IMPORTS + program.body, tmp_path) == program.out
    for checkpoint in program.saved:
        assert ostraka.verify(tmp_path / checkpoint).ok


# Interrupts


def test_a_close_that_was_interrupted_can_be_made_up_for(tmp_path: Path):
    manager = ostraka.Manager(tmp_path)
    with (
        patch("ostraka.manager._preempt.Preemption.stop", side_effect=KeyboardInterrupt("Ctrl-C")),
        pytest.raises(KeyboardInterrupt, match="Ctrl-C"),
    ):
        manager.close()
    ostraka.Manager(tmp_path).close()
    manager.close()


PARTS = [(part, who) for part in ("in_the_background", "in_the_manager") for who in (0, 1)]


def save_interrupted(root: str, part: str, who: int) -> str:
    """Interrupt a save on one process, then save again on all."""
    from ostraka.processes import operation
    from ostraka.saving import save as _save

    is_manager = part == "in_the_manager"
    owner, name = (
        (operation.Operation, "_start_listening") if is_manager else (_save, "run_in_background")
    )
    real = getattr(owner, name)
    interrupts = [KeyboardInterrupt()] if jax.process_index() == who else []

    def interrupt(*args: Any) -> Any:
        if is_manager:
            real(*args)  # the thread has been started
        if interrupts:
            raise interrupts.pop()
        return None if is_manager else real(*args)

    tree = {"w": np.arange(10)}
    with patch.object(owner, name, interrupt):
        if is_manager:
            told, _ = caught(lambda: ostraka.Manager(f"{root}/manager"))
        else:
            told, _ = caught(lambda: ostraka.save_async(f"{root}/first", tree).wait())
    ostraka.save(f"{root}/second", tree)
    assert threads_left() == []
    return told


def save_without_threads(root: str) -> str:
    start = threading.Thread.start

    def fail(self: threading.Thread) -> None:
        if self.name.startswith("ostraka_listen") and jax.process_index() == 1:
            raise RuntimeError("can't start new thread")
        start(self)

    with patch.object(threading.Thread, "start", fail):
        return caught(lambda: ostraka.save(root, {"w": np.arange(10)}))[1]


def fail_between_parts(root: str) -> tuple[list[str], str]:
    told = [save_interrupted(f"{root}/{part} {who}", part, who) for part, who in PARTS]
    return told, save_without_threads(f"{root}/x")


def test_a_failure_between_the_parts_of_a_save_reaches_all(tmp_path: Path):
    for result in run_processes(fail_between_parts, str(tmp_path)):
        told, said = result.value
        others = {"in_the_background": "SaveFailed", "in_the_manager": "OstrakaError"}
        assert told == [
            "KeyboardInterrupt" if result.process == who else others[part] for part, who in PARTS
        ]
        assert "process 1: RuntimeError: can't start new thread" in said
    for part, who in PARTS:
        assert ostraka.verify(tmp_path / f"{part} {who}" / "second").ok


INTERRUPT_EVERYWHERE = """
import gc, linecache
from pathlib import Path

FILES = {"background.py", "save.py", "threading.py"}
root = "memory://everywhere"  # hundreds of saves to a disk would take long
signal.alarm(600)


class Interrupter:
    # Raises KeyboardInterrupt before the n-th line that this thread comes to in these files.
    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        return self.trace if Path(frame.f_code.co_filename).name in FILES else None

    def trace(self, frame, event, argument):
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # Between a lock and the block that it guards Python itself lets no signal through.
        if event == "line" and not line.strip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.trace


number = 0
done = False
while not done:
    number += 1
    interrupter = Interrupter(number)
    sys.settrace(interrupter)
    try:
        handle = ostraka.save_async(root + "/first", tree)
        done = interrupter.left > 0
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:
        # What Python makes of it inside of threading.Condition.
        assert str(error) == "release unlocked lock"
    finally:
        sys.settrace(None)
    # The next one is not told of it, does not wait for ever, and is there.
    tree["w"] = tree["w"] + 1
    ostraka.save(root + "/second", tree)
    assert ostraka.restore(root + "/second")["w"][0] == tree["w"][0]
    assert gc.isenabled()
    in_thread = threading.Thread(target=ostraka.save, args=(root + "/third", tree))
    in_thread.start()
    in_thread.join()
assert ostraka.verify(root + "/first").ok
print("steps", number > 60)
"""


def test_an_interrupt_at_any_line_of_beginning_a_save_costs_no_other(tmp_path: Path):
    """Ctrl-C as the thread is started once left its work to two, or to nobody."""
    assert run_quietly(START + IMPORTS + INTERRUPT_EVERYWHERE, tmp_path) == "steps True\n"
