"""Threads, forks and signals that come in the middle of a save, a look or a read."""

import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.layout import shard_file
from ostraka.testing import run_processes
from places import Place
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


def run(body: str, root: Place, *, start: str = START) -> str:
    return run_quietly(start + IMPORTS + body, root)


# Threads of the program


def test_a_numpy_array_that_is_written_to_during_a_save(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    live = np.zeros((1 << 20, 3), np.float32)
    tree = {"contiguous": live, "not": live.T, "one": live[5]}
    real = shard_file.block_digest

    def digest_and_change(pieces: Any) -> str:
        digest = real(pieces)
        np.add(live, 1, out=live)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(shard_file, "block_digest", digest_and_change)
        ostraka.save(place, tree)
    assert live[0, 0] > 0
    assert ostraka.verify(place).ok


@pytest.fixture
def threads_switch_often() -> Generator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_switch_often")
@pytest.mark.parametrize("begin", ["save", "save_async"])
def test_arrays_that_a_thread_looks_at_during_a_save(begin: str, tmp_path: Path):
    mesh = Mesh(np.array(jax.devices()), ("x",))
    numbers = np.arange(64, dtype=np.float32)
    path = f"memory://{tmp_path}"
    for _ in range(40):
        tree = [jax.device_put(numbers + n, NamedSharding(mesh, P("x"))) for n in range(40)]
        barrier = threading.Barrier(2)

        def look(tree: list[jax.Array] = tree, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            for array in tree:
                array.addressable_data(0)

        looker = threading.Thread(target=look)
        looker.start()
        barrier.wait()
        if begin == "save":
            ostraka.save(path, tree)
        else:
            ostraka.save_async(path, tree).wait()
        looker.join()
        found = ostraka.open(path)
        assert [found[str(n)][0] for n in range(40)] == list(range(40))
        assert all(np.array_equal(found[str(n)][...], numbers + n) for n in range(40))


# Signal handlers that save


def test_a_handler_that_saves_while_an_array_is_taken_apart(tmp_path: Path):
    body = """
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
print(ostraka.verify(root + "/handler").ok, ostraka.verify(root + "/loop").ok)
"""
    assert run(body, tmp_path) == "True True\n"


DATA = """
class Data:
    def get_state(self):
        signal.raise_signal(signal.SIGUSR1)
        return {}

    def set_state(self, state):
        pass
"""

SLOW = """
def slow(verb, name):
    if verb == "put":
        time.sleep(2)  # far longer than the program would go on

handler = FaultyStore(root + "/handler", before=slow)
"""


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_a_save_that_a_handler_begins_while_another_is_begun_is_not_lost(call: str, tmp_path: Path):
    body = f"""
signal.signal(signal.SIGUSR1, lambda *_: ostraka.{call}(handler, tree))
ostraka.save_async(root + "/loop", {{"data": Data(), **tree}})
"""
    run(SLOW + DATA + body, tmp_path)
    assert ostraka.verify(tmp_path / "handler").ok
    assert ostraka.verify(tmp_path / "loop").ok


def test_a_save_that_a_handler_begins_while_another_is_waited_for_is_not_lost(tmp_path: Path):
    body = """
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
"""
    run(SLOW + body, tmp_path)
    for name in ("first", "handler", "second"):
        assert ostraka.verify(tmp_path / name).ok


def test_the_error_of_a_save_that_a_handler_has_begun_is_not_lost(tmp_path: Path):
    body = """
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
"""
    assert run(DATA + body, tmp_path) == "told\n"


# Interrupts


def test_a_close_that_was_interrupted_can_be_made_up_for(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt("Ctrl-C")

    manager = ostraka.Manager(place)
    with monkeypatch.context() as patch:
        patch.setattr("ostraka.manager._preempt.Preemption.stop", interrupt)
        with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
            manager.close()
    ostraka.Manager(place).close()
    manager.close()


def save_interrupted(root: str, part: str, who: int) -> list[str]:
    """Interrupt a save on one process, then save again on all."""
    from ostraka.processes import operation
    from ostraka.saving import save as _save

    told: list[str] = []
    tree = {"w": np.arange(10)}
    start, begin = operation.Operation._start_listening, _save.run_in_background
    interrupts = [KeyboardInterrupt()] if jax.process_index() == who else []

    def interrupt_threads(self: Any) -> None:
        start(self)
        if interrupts:
            raise interrupts.pop()

    def interrupt_background(*args: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return begin(*args)

    if part == "in_the_background":
        _save.run_in_background = interrupt_background
    else:
        operation.Operation._start_listening = interrupt_threads
    try:
        if part == "in_the_manager":
            ostraka.Manager(f"{root}/manager")
        else:
            ostraka.save_async(f"{root}/first", tree).wait()
    except BaseException as error:
        told.append(type(error).__name__)
    ostraka.save(f"{root}/second", tree)
    return told + threads_that_stay()


def threads_that_stay() -> list[str]:
    """The names of threads of ours that do not end; one may last a moment longer than its save."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("ostraka")]
    deadline = time.monotonic() + 60
    for thread in ours:
        thread.join(max(0, deadline - time.monotonic()))
    return [thread.name for thread in ours if thread.is_alive()]


@pytest.mark.parametrize("part", ["in_the_background", "in_the_manager"])
@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_between_the_parts_of_a_save_reaches_all(part: str, who: int, place: Place):
    results = run_processes(save_interrupted, str(place), part, who)
    other = "SaveFailed" if part == "in_the_background" else "OstrakaError"
    expected = [["KeyboardInterrupt"] if number == who else [other] for number in range(2)]
    assert [result.value for result in results] == expected
    assert ostraka.verify(place / "second").ok


INTERRUPT_EVERYWHERE = """
import gc, linecache
from pathlib import Path

FILES = {%s}
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
    assert ostraka.verify(root + "/second").ok
    assert gc.isenabled()
    in_thread = threading.Thread(target=ostraka.save, args=(root + "/third", tree))
    in_thread.start()
    in_thread.join()
assert ostraka.verify(root + "/first").ok
print("steps", number > 20)
"""


@pytest.mark.parametrize("files", ["background.py", "save.py", "threading.py"])
def test_an_interrupt_at_any_line_of_beginning_a_save_costs_no_other(files: str, tmp_path: Path):
    """Ctrl-C as the thread is started once left its work to two, or to nobody."""
    assert run(INTERRUPT_EVERYWHERE % repr(files), tmp_path) == "steps True\n"


def save_without_threads(root: str) -> str:
    start = threading.Thread.start

    def fail(self: threading.Thread) -> None:
        if self.name.startswith("ostraka_listen") and jax.process_index() == 1:
            raise RuntimeError("can't start new thread")
        start(self)

    threading.Thread.start = fail
    try:
        ostraka.save(root, {"w": np.arange(10)})
    except ostraka.errors.SaveFailed as error:
        return str(error)
    return "saved"


def test_a_process_that_can_start_no_thread_says_so(place: Place):
    said = [result.value for result in run_processes(save_without_threads, str(place / "x"))]
    assert all("process 1: RuntimeError: can't start new thread" in text for text in said), said


# Forks


def test_sigterm_that_comes_to_a_child_before_it_has_begun(tmp_path: Path):
    # Before the child has got rid of the manager's handler, as it is with start(); terminate().
    early = """
children = []

def end_child():
    if children:
        os.kill(os.getpid(), signal.SIGTERM)

os.register_at_fork(after_in_child=end_child)
"""
    body = """
manager = ostraka.Manager(root)
before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
children.append(True)
in_child(lambda: None)
print(manager.reached_preemption(1), signal.pthread_sigmask(signal.SIG_BLOCK, []) == before)
os.kill(os.getpid(), signal.SIGTERM)
print(manager.reached_preemption(2))
"""
    assert run(body, tmp_path, start=START + early) == "-15\nFalse True\nTrue\n"


def test_a_child_that_is_forked_during_retention_can_look(tmp_path: Path):
    body = """
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
"""
    assert run(body, tmp_path) == "[1, 2]\n0\n"


def test_a_child_that_is_forked_while_a_checkpoint_is_read_can_read_it(tmp_path: Path):
    body = """
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
"""
    assert run(body, tmp_path) == "[0. 1. 2.]\n0\n"
