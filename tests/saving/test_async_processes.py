"""`save_async` in whole processes: programs that end or are interrupted, and several at once."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

import ostraka
from numbered import CLEAN, caught, make_tree, names_in, restored_number
from ostraka.processes import operation as _coordinate
from ostraka.processes.operation import Operation
from ostraka.testing import FaultyStore, run_processes
from ostraka.testing._processes import _reserve_port
from places import Place, in_the_way
from runs import writes_held

# Programs of one process

PROGRAM_START = """
import atexit, logging, os, signal, sys, threading, time, warnings
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np
import ostraka
from ostraka.testing import FaultyStore

go_on = threading.Event()
go_on.set()

def write_slowly(verb, name):
    if verb == "write":
        go_on.wait()
        print("writing", flush=True)
        time.sleep(0.05)

path = FaultyStore(sys.argv[1], before=write_slowly)
tree = {f"w{n}": np.full(1 << 16, n, np.float32) for n in range(16)}
"""


@contextmanager
def start(body: str, path: Place, *more: str) -> Generator["subprocess.Popen[str]"]:
    """A program whose every write of a block takes some time, and waits for `go_on`."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM_START + body, str(path), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    ) as program:
        try:
            yield program
        finally:
            program.kill()  # if it has not ended


def run(body: str, path: Place) -> tuple[int, str, str]:
    with start(body, path) as program:
        out, err = program.communicate(timeout=120)
    return program.returncode, out, err


def assert_complete(path: Place) -> None:
    assert ostraka.verify(path).ok
    restored = ostraka.restore(path)
    assert all((restored[f"w{n}"] == n).all() for n in range(16))


LATE = """
def late():
    ostraka.save(sys.argv[1] + "-now", tree)
    ostraka.save_async(path, tree)
"""


@dataclass(frozen=True, slots=True)
class Ending:
    body: str
    code: int = 0
    out: str = ""
    err: str = "^$"


ENDINGS = {
    "at its end": Ending(
        """
go_on.clear()
ostraka.save_async(path, tree)
print("last line", flush=True)
go_on.set()
""",
        out="^last line\nwriting",
    ),
    "with threads of its own": Ending(
        """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
jobs = [pool.submit(time.sleep, 0.3) for _ in range(4)]
threading.Thread(target=time.sleep, args=(0.5,)).start()
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
ostraka.save_async(path, tree)
raise SystemExit(3)
""",
        code=3,
    ),
    "by an error": Ending(
        "ostraka.save_async(path, tree)\nraise ValueError('mine')", code=1, err="ValueError: mine"
    ),
    "saves only then": Ending(LATE + "atexit.register(late)"),
    "save_async only then": Ending("atexit.register(lambda: ostraka.save_async(path, tree))"),
    "saves before the library ends": Ending(LATE + "ostraka.save_async; atexit.register(late)"),
    "saves after the library has ended": Ending(LATE + "atexit.register(late); ostraka.save_async"),
    "save in a thread after the main one": Ending(
        """
def late():
    threading.main_thread().join()
    ostraka.save_async(path, tree)
threading.Thread(target=late).start()
"""
    ),
    "with a forked child": Ending(
        """
import multiprocessing
warnings.simplefilter("ignore")
go_on.clear()  # nor may a thread be printing: the child would have its lock for ever
handle = ostraka.save_async(path, tree)
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join(300)
print("exit code", child.exitcode, handle.done())
go_on.set()
""",
        out="exit code 0 False",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_program_that_ends_finishes_its_save(tmp_path: Path, name: str):
    ending = ENDINGS[name]
    code, out, err = run(ending.body, tmp_path / "c")
    assert code == ending.code, err
    assert re.search(ending.out, out)
    assert re.search(ending.err, err), err
    for path in ("c", "c-now") if LATE in ending.body else ("c",):
        assert_complete(tmp_path / path)


def test_forked_process_does_not_wait_for_a_save_that_is_not_its_own(tmp_path: Path):
    body = """
warnings.simplefilter("ignore")
manager = ostraka.Manager(path)
go_on.clear()
manager.save(1, tree)
handle = manager._pending._handle
if os.fork() == 0:
    print(type(handle.exception()).__name__, handle.exception(), handle.done(), flush=True)
    try:
        manager.close()
    except RuntimeError as error:
        print("closed:", error, flush=True)
    os._exit(0)
os.wait()
go_on.set()
manager.close()
print(manager.steps())
"""
    code, out, err = run(body, tmp_path)
    assert (code, err) == (0, "")
    said = f"the save to {tmp_path}/step_00000001 goes on in process "
    assert f"RuntimeError {said}" in out
    assert f"closed: {said}" in out
    assert out.endswith("[1]\n")


IN_THE_WAY = "PathInTheWay: .*/file/c holds something"
OTHERS = "atexit.register(print, 'others are called', flush=True)\nostraka.save_async(path, tree)\n"
FAILURES = {
    "begun at the end": Ending(
        "atexit.register(lambda: ostraka.save_async(path, tree))\nostraka.save_async",
        err=IN_THE_WAY,
    ),
    "nobody asked": Ending(OTHERS, 120, "others are called\n$", IN_THE_WAY),
    "another exit status": Ending(
        OTHERS + "raise SystemExit(3)", 120, "others are called\n$", IN_THE_WAY
    ),
    # Nobody is there to tell: the exit status does.
    "no stderr": Ending(OTHERS + "sys.stderr = None", 120, "others are called\n$"),
    "it was seen": Ending(
        "print(type(ostraka.save_async(path, tree).exception()).__name__)", out="^PathInTheWay\n$"
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_error_is_told_once_when_the_program_ends(tmp_path: Path, name: str):
    ending = FAILURES[name]
    path = in_the_way(tmp_path / "file" / "c")
    code, out, err = run("logging.disable()\n" + ending.body, path)
    assert code == ending.code, err
    assert re.search(ending.out, out)
    assert len(re.findall(ending.err, err)) == 1, err


def test_one_interrupt_lets_the_save_finish(tmp_path: Path):
    body = "ostraka.save_async(path, tree)\nwhile True: time.sleep(0.01)"
    with start(body, tmp_path) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=120)
    assert "KeyboardInterrupt" in err
    assert_complete(tmp_path)


def test_second_interrupt_gives_the_save_up(tmp_path: Path):
    ostraka.save(tmp_path, {"old": np.ones(3)})
    body = """
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
go_on.clear()
handle = ostraka.save_async(path, tree)
give_up = handle._give_up

def give_up_and_go_on(reason):
    give_up(reason)
    go_on.set()

handle._give_up = give_up_and_go_on
print("begun", flush=True)
while True:
    time.sleep(0.01)
"""
    with start(body, tmp_path) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == f"waiting for the save to {tmp_path}\n"
        time.sleep(0.1)  # rather while it waits than while it is still saying so
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=120)
    assert "it was interrupted, and gave the save up" in err
    assert ostraka.restore(tmp_path)["old"].tolist() == [1, 1, 1]
    assert names_in(tmp_path) == CLEAN
    ostraka.save(tmp_path, {"new": 1})


def test_programs_of_one_run_that_end_finish_their_save(tmp_path: Path):
    body = """
import jax
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
if jax.process_index() == 1:
    time.sleep(0.5)
ostraka.save_async(path, tree)
"""
    with _reserve_port() as reservation:  # as long as they run: others choose ports, too
        port = str(reservation.getsockname()[1])
        with ExitStack() as stack:
            programs = [
                stack.enter_context(start(body, tmp_path, port, str(number))) for number in range(2)
            ]
            for program in programs:
                _, err = program.communicate(timeout=120)
                assert (program.returncode, err) == (0, "")
    assert_complete(tmp_path)


# Several processes


def save_and_step(folder: str) -> dict[str, Any]:
    """Values, refusals, exchanges and callbacks while a save goes on; all on every process."""
    found: dict[str, Any] = {}
    commits: list[Any] = []
    tree = make_tree(1)
    step = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t), donate_argnums=0)
    path = f"{folder}/a"
    with writes_held(path) as (store, gate):
        handle = ostraka.save_async(store, tree, on_commit=lambda: commits.append(path))
        arrays = {name: tree[name] for name in ("sharded", "replicated")}
        for _ in range(3):
            arrays = step(arrays)
        tree["host"][:] = 9
        found["refused"] = caught(
            lambda: ostraka.save_async(f"{folder}/b", make_tree(2), if_busy="raise")
        )
        found["sums"] = []
        for number in range(40):
            with Operation("count") as operation:
                found["sums"].append(operation.exchange("sum", number, sum))
        found["was_running"] = not handle.done()
        gate.open()
        handle.wait()
    found["record"] = handle.record
    found["commits"] = commits
    found["restored"] = restored_number(path)
    handle = ostraka.save_async(path, make_tree(3))
    ostraka.save(path, make_tree(4))
    found["was_done"] = handle.done()
    found["last"] = restored_number(path)
    return found


def fail_on_one(path: str) -> dict[str, Any]:
    """Process 2 can't write; everybody hears of it at the next call, seen or not."""
    me = jax.process_index()
    found: dict[str, Any] = {}
    ostraka.save(path, make_tree(1))
    full = OSError(28, "No space left on device", "the disk of process 2")
    store = FaultyStore(path, fail={"write": full} if me == 2 else None)

    ostraka.save_async(store, make_tree(2))
    found["next"] = caught(lambda: ostraka.save_async(path, make_tree(3)))
    handle = ostraka.save_async(store, make_tree(2))
    found["wait"] = caught(handle.wait)
    found["exception"] = type(handle.exception()).__name__
    found["old"] = restored_number(path)
    ostraka.save_async(path, make_tree(4)).wait()

    # Some have seen it and some have not: nobody is left waiting for the others.
    handle = ostraka.save_async(store, make_tree(2))
    if me == 1:
        found["seen"] = type(handle.exception()).__name__
    found["uneven"] = caught(lambda: ostraka.save(path, make_tree(5)))
    found["kept"] = restored_number(path)
    ostraka.save_async(path, make_tree(6)).wait()
    found["last"] = restored_number(path)
    return found


def give_up_on_one(path: str) -> dict[str, Any]:
    """Process 1 gives up a save, as a second Ctrl-C does; then it is too late to."""
    me = jax.process_index()
    ostraka.save(path, make_tree(1))
    with writes_held(path) as (store, gate):
        handle = ostraka.save_async(store, make_tree(2))
        if me == 1:
            handle._give_up("it was interrupted, and gave the save up")
        # One that went on before it knew could still have committed.
        operation = cast(Any, handle._give_up).__self__
        while operation._verdict is None:
            time.sleep(0.01)
        gate.open()
        given_up = caught(handle.wait)
    handle = ostraka.save_async(path, make_tree(3))
    handle.wait()
    handle._give_up("it was interrupted, and gave the save up")
    kept = restored_number(path)
    # Process 0 goes on failing alone for longer than the service remembers; others still hear it.
    if me == 1:
        time.sleep(1.5)
    trees: list[Any] = [{"x": object()} if me == 0 else {"x": 1}] * 18
    late = [caught(lambda tree=tree: ostraka.save(path, tree))[0] for tree in trees]
    return {"given_up": given_up, "kept": kept, "late": late}


def work_among_four(folder: str) -> dict[str, dict[str, Any]]:
    # With endless patience, what is heard of was said by somebody. What is not would be waited for
    # until too late, so no clock need tell whether a failure was told of at once.
    _coordinate.DEAD_AFTER_S = _coordinate.ARRIVE_WITHIN_S = 3600.0
    _coordinate._VERDICT_WITHIN_S = 3600.0
    return {
        "goes on": save_and_step(folder),
        "fails": fail_on_one(f"{folder}/fails"),
        "gives up": give_up_on_one(f"{folder}/given up"),
    }


def test_four_processes_save_while_they_go_on_fail_and_give_up(tmp_path: Path):
    results = run_processes(work_among_four, str(tmp_path), processes=4, devices_per_process=2)
    for result in results:
        found = result.value["goes on"]
        busy = f"a save to {tmp_path}/a is still under way; wait for it first"
        assert found["refused"] == ("Busy", busy)
        assert found["sums"] == [4 * number for number in range(40)]
        assert found["was_running"]
        assert found["commits"] == ([f"{tmp_path}/a"] if result.process == 0 else [])
        assert (found["restored"], found["was_done"], found["last"]) == (1, True, 4)
        assert found["record"].bytes == results[0].value["goes on"]["record"].bytes
        assert 0 < found["record"].process_bytes.least <= found["record"].process_bytes.most

        found = result.value["fails"]
        for when in ("next", "wait", "uneven"):
            kind, words = found[when]
            assert kind == "SaveFailed", when
            assert "No space left on device: the disk of process 2" in words, when
            assert "on process 2" in words, when
        assert found["exception"] == found.get("seen", "SaveFailed") == "SaveFailed"
        assert (found["old"], found["kept"], found["last"]) == (1, 4, 6)

        found = result.value["gives up"]
        kind, words = found["given_up"]
        assert (kind, found["kept"]) == ("SaveFailed", 3)
        assert "failed on process 1: it was interrupted, and gave the save up" in words
        assert found["late"] == ["SaveFailed"] * 18
    assert ostraka.verify(tmp_path / "a").ok
    assert not (tmp_path / "b").exists()
