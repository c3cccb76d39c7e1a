"""`save_async` in whole processes: programs that end or are interrupted, and several at once."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.processes import operation as _coordinate
from ostraka.processes.operation import Operation
from ostraka.testing import FaultyStore, run_processes
from ostraka.testing._processes import _reserve_port
from places import Place, in_the_way, names_of

WITHIN_S = 60.0
"""From the failure of one process until all have raised: far less than any time limit here."""

# Programs of one process

PROGRAM_START = """
import signal, sys, threading, time
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
        time.sleep(SECONDS)

path = FaultyStore(sys.argv[1], before=write_slowly)
tree = {f"w{n}": np.full(1 << 18, n, np.float32) for n in range(16)}
"""


def start(body: str, path: Place, *more: str, seconds: float = 0.1) -> "subprocess.Popen[str]":
    """Start a program whose every write of a block takes so long, and waits for `go_on`."""
    program = PROGRAM_START.replace("SECONDS", str(seconds)) + body
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )


def run(body: str, path: Place, *, seconds: float = 0.1) -> tuple[int, str, str]:
    with start(body, path, seconds=seconds) as program:
        out, err = program.communicate(timeout=120)
    return program.returncode, out, err


def assert_complete(path: Place) -> None:
    assert ostraka.verify(path).ok
    restored = ostraka.restore(path)
    assert all((restored[f"w{n}"] == n).all() for n in range(16))


def test_program_that_ends_finishes_its_save(place: Place):
    body = """
go_on.clear()
ostraka.save_async(path, tree)
print("last line", flush=True)
go_on.set()
"""
    code, out, err = run(body, place)
    assert (code, err) == (0, "")
    assert out.startswith("last line\nwriting")
    assert_complete(place)


def test_program_that_ends_with_its_own_threads_finishes_its_save(place: Place):
    body = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
jobs = [pool.submit(time.sleep, 0.5) for _ in range(4)]
threading.Thread(target=time.sleep, args=(1.0,)).start()
threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
ostraka.save_async(path, tree)
raise SystemExit(3)
"""
    code, _, err = run(body, place)
    assert (code, err) == (3, "")
    assert_complete(place)


@pytest.mark.parametrize("call", ["save", "save_async"])
@pytest.mark.parametrize(
    "when",
    [
        "atexit.register(late)",
        "ostraka.save_async; atexit.register(late)",
        "atexit.register(late); ostraka.save_async",
    ],
    ids=["only then", "before the library ends", "after the library has ended"],
)
def test_save_that_is_begun_when_the_program_ends(place: Place, call: str, when: str):
    body = f"""
import atexit
def late(): ostraka.{call}(path, tree)
{when}
"""
    assert run(body, place)[::2] == (0, "")
    assert_complete(place)


def test_error_of_a_save_that_is_begun_when_the_program_ends(place: Place):
    path = in_the_way(place / "file" / "c")
    body = """
import atexit, logging
logging.disable()
atexit.register(lambda: ostraka.save_async(path, tree))
ostraka.save_async
"""
    code, _, err = run(body, path)
    assert code == 0
    assert len(re.findall(r"PathInTheWay: .*/file/c holds something", err)) == 1


def test_save_that_a_thread_begins_after_the_main_one_has_ended(place: Place):
    body = """
def late():
    threading.main_thread().join()
    ostraka.save_async(path, tree)
threading.Thread(target=late).start()
"""
    assert run(body, place)[::2] == (0, "")
    assert_complete(place)


def test_program_that_ends_by_an_error_finishes_its_save(place: Place):
    code, _, err = run("ostraka.save_async(path, tree)\nraise ValueError('mine')", place)
    assert code == 1
    assert "ValueError: mine" in err
    assert_complete(place)


def test_program_that_forks_ends_in_both_processes(place: Place):
    body = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
go_on.clear()  # nor may a thread be printing: the child would have its lock for ever
handle = ostraka.save_async(path, tree)
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join(300)
print("exit code", child.exitcode, handle.done())
go_on.set()
"""
    code, out, err = run(body, place)
    assert (code, err) == (0, "")
    assert "exit code 0 False" in out
    assert_complete(place)


def test_forked_process_does_not_wait_for_a_save_that_is_not_its_own(place: Place):
    body = """
import os, warnings
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
    code, out, err = run(body, place)
    assert (code, err) == (0, "")
    said = f"the save to {place}/step_00000001 goes on in process "
    assert f"RuntimeError {said}" in out
    assert f"closed: {said}" in out
    assert out.endswith("[1]\n")


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "sys.stderr = None"])
def test_error_that_nobody_asked_for_is_told_when_the_program_ends(place: Place, ending: str):
    path = in_the_way(place / "file" / "c")
    body = f"""
import atexit, logging
atexit.register(print, "others are called", flush=True)
logging.disable()
ostraka.save_async(path, tree)
{ending}
"""
    code, out, err = run(body, path)
    assert code == 120
    assert out.endswith("others are called\n")
    if ending == "sys.stderr = None":  # nobody to tell: the exit status does
        assert err == ""
    else:
        assert len(re.findall(r"PathInTheWay: .*/file/c holds something", err)) == 1


def test_error_that_was_seen_is_not_printed_again(place: Place):
    path = in_the_way(place / "file" / "c")
    body = """
import logging
logging.disable()
handle = ostraka.save_async(path, tree)
print(type(handle.exception()).__name__)
"""
    assert run(body, path) == (0, "PathInTheWay\n", "")


def test_one_interrupt_lets_the_save_finish(place: Place):
    body = "ostraka.save_async(path, tree)\nwhile True: time.sleep(0.01)"
    with start(body, place) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=120)
    assert "KeyboardInterrupt" in err
    assert_complete(place)


def test_second_interrupt_gives_the_save_up(place: Place):
    ostraka.save(place, {"old": np.ones(3)})
    body = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
go_on.clear()
handle = ostraka.save_async(path, tree)
give_up = handle._give_up

def give_up_and_go_on():
    give_up()
    go_on.set()

handle._give_up = give_up_and_go_on
print("begun", flush=True)
while True:
    time.sleep(0.01)
"""
    with start(body, place) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == f"waiting for the save to {place}\n"
        time.sleep(0.1)  # rather while it waits than while it is still saying so
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=120)
    assert "it was interrupted, and gave the save up" in err
    assert ostraka.restore(place)["old"].tolist() == [1, 1, 1]
    assert sorted(name.split("-")[0] for name in names_of(place)) == ["_METADATA", "shards"]
    ostraka.save(place, {"new": 1})


def test_programs_of_one_run_that_end_finish_their_save(place: Place):
    body = """
import jax
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
if jax.process_index() == 1:
    time.sleep(0.5)
ostraka.save_async(path, tree)
"""
    with _reserve_port() as reservation:  # as long as they run: others choose ports, too
        port = str(reservation.getsockname()[1])
        programs = [start(body, place, port, str(number)) for number in range(2)]
        for program in programs:
            with program:
                _, err = program.communicate(timeout=120)
            assert (program.returncode, err) == (0, "")
    assert_complete(place)


# Several processes


def make_tree(number: int) -> dict[str, Any]:
    """Every element of every leaf is `number`, so that a mix of two saves shows."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def place(spec: P) -> jax.Array:
        value = np.full((64, 64), number, np.float32)
        return jax.make_array_from_callback(
            (64, 64), NamedSharding(mesh, spec), lambda index: value[index]
        )

    return {
        "sharded": place(P("x")),
        "replicated": place(P()),
        "host": np.full(1000, number),
        "own": np.full(10, number + jax.process_index() / 8),
    }


def number_in(tree: dict[str, Any]) -> float | str:
    own = tree["own"] - jax.process_index() / 8
    found = {*np.unique(tree["host"]).tolist(), *np.unique(own).tolist()}
    for name in ("sharded", "replicated"):
        for shard in tree[name].addressable_shards:
            found |= set(np.unique(np.asarray(shard.data)).tolist())
    return found.pop() if len(found) == 1 else f"a mix of {sorted(found)}"


@contextmanager
def held(path: str) -> Generator[tuple[FaultyStore, threading.Event]]:
    """A store in which all writes wait until the event is set."""
    go_on = threading.Event()

    def wait(verb: str, name: str) -> None:
        if verb == "write":
            go_on.wait()

    try:
        yield FaultyStore(path, before=wait), go_on
    finally:
        go_on.set()


def have_endless_patience() -> None:
    """What is heard of then was said by somebody; what is not would be waited for until too late.

    So no clock need tell whether a failure was told of at once, or found out in the end.
    """
    _coordinate.DEAD_AFTER_S = _coordinate.ARRIVE_WITHIN_S = 3600.0
    _coordinate._VERDICT_WITHIN_S = 3600.0


def caught(work: Callable[[], Any]) -> tuple[str, str, float]:
    """The type and the words of what `work` raises, and how long it took."""
    began = time.monotonic()
    try:
        work()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def save_and_step(folder: str) -> dict[str, Any]:
    """Values, refusals, exchanges and callbacks while a save goes on; all on every process."""
    found: dict[str, Any] = {}
    commits: list[Any] = []
    tree = make_tree(1)
    step = jax.jit(lambda t: jax.tree.map(lambda a: a + 1, t), donate_argnums=0)
    path = f"{folder}/a"
    with held(path) as (store, go_on):
        handle = ostraka.save_async(store, tree, on_commit=lambda: commits.append(path))
        arrays = {name: tree[name] for name in ("sharded", "replicated")}
        for _ in range(3):
            arrays = step(arrays)
        tree["host"][:] = 9
        tree["own"][:] = 9
        found["refused"] = caught(
            lambda: ostraka.save_async(f"{folder}/b", make_tree(2), if_busy="raise")
        )
        found["sums"] = []
        for number in range(40):
            with Operation("count") as operation:
                found["sums"].append(operation.exchange("sum", number, sum))
        found["was_running"] = not handle.done()
        go_on.set()
        handle.wait()
    found["record"] = handle.record
    found["commits"] = commits
    found["restored"] = number_in(ostraka.restore(path, like=make_tree(0)))
    handle = ostraka.save_async(path, make_tree(3))
    ostraka.save(path, make_tree(4))
    found["was_done"] = handle.done()
    found["last"] = number_in(ostraka.restore(path, like=make_tree(0)))
    return found


def test_four_processes_save_while_they_go_on(place: Place):
    results = run_processes(save_and_step, str(place), processes=4, devices_per_process=2)
    for result in results:
        found = result.value
        assert found["refused"][:2] == (
            "Busy",
            f"a save to {place}/a is still under way; wait for it first",
        )
        assert found["sums"] == [4 * number for number in range(40)]
        assert found["was_running"]
        assert found["commits"] == ([f"{place}/a"] if result.process == 0 else [])
        assert (found["restored"], found["was_done"], found["last"]) == (1, True, 4)
        assert found["record"].bytes == results[0].value["record"].bytes
        assert 0 < found["record"].process_bytes.least <= found["record"].process_bytes.most
    assert ostraka.verify(place / "a").ok
    assert not (place / "b").exists()


def fail_on_one(folder: str) -> dict[str, Any]:
    """Process 2 can't write; everybody hears of it at the next call, seen or not."""
    have_endless_patience()
    me = jax.process_index()
    path = f"{folder}/a"
    found: dict[str, Any] = {}
    ostraka.save(path, make_tree(1))

    full = OSError(28, "No space left on device", "the disk of process 2")
    store = FaultyStore(path, fail={"write": full} if me == 2 else None)

    def begin() -> ostraka.SaveHandle:
        return ostraka.save_async(store, make_tree(2))

    begin()
    found["next"] = caught(lambda: ostraka.save_async(path, make_tree(3)))
    handle = begin()
    found["wait"] = caught(handle.wait)
    found["exception"] = type(handle.exception()).__name__
    found["old"] = number_in(ostraka.restore(path, like=make_tree(0)))
    ostraka.save_async(path, make_tree(4)).wait()

    # Some have seen it and some have not: nobody is left waiting for the others.
    handle = begin()
    if me == 1:
        found["seen"] = type(handle.exception()).__name__
    found["uneven"] = caught(lambda: ostraka.save(path, make_tree(5)))
    found["kept"] = number_in(ostraka.restore(path, like=make_tree(0)))
    ostraka.save_async(path, make_tree(6)).wait()
    found["last"] = number_in(ostraka.restore(path, like=make_tree(0)))
    return found


def slowest_to_hear(folder: str) -> float:
    """How long the last of four processes took to hear of the failure of one."""
    results = run_processes(fail_on_one, folder, processes=4, devices_per_process=2)
    slowest = 0.0
    for result in results:
        found = result.value
        for when in ("next", "wait", "uneven"):
            kind, words, seconds = found[when]
            assert kind == "SaveFailed"
            assert "No space left on device: the disk of process 2" in words
            assert "on process 2" in words
            slowest = max(slowest, seconds)
        assert found["exception"] == "SaveFailed"
        assert (found["old"], found["kept"], found["last"]) == (1, 4, 6)
    return slowest


def test_one_of_four_processes_fails_in_the_background(place: Place):
    # A process that the machine does not let run may be late once or twice, but not each time.
    assert any(slowest_to_hear(f"{place}/{attempt}") < WITHIN_S for attempt in range(3))


def wait_until_given_up(handle: ostraka.SaveHandle) -> None:
    """Until this process knows it; one that went on before could still have committed."""
    operation = cast(Any, handle._give_up).func.__self__
    while operation._verdict is None:
        time.sleep(0.01)


def give_up_on_one(folder: str) -> dict[str, Any]:
    """Process 1 gives up a save, as a second Ctrl-C does; then it is too late to."""
    have_endless_patience()
    path = f"{folder}/a"
    ostraka.save(path, make_tree(1))
    with held(path) as (store, go_on):
        handle = ostraka.save_async(store, make_tree(2))
        if jax.process_index() == 1:
            handle._give_up()
        wait_until_given_up(handle)
        go_on.set()
        given_up = caught(handle.wait)
    handle = ostraka.save_async(path, make_tree(3))
    handle.wait()
    handle._give_up()
    kept = number_in(ostraka.restore(path, like=make_tree(0)))
    # Process 0 goes on failing alone for longer than the service remembers; others still hear it.
    late: list[str] = []
    if jax.process_index() == 1:
        time.sleep(1.5)
    for _ in range(18):
        bad = {"x": object()} if jax.process_index() == 0 else {"x": 1}
        late.append(caught(lambda bad=bad: ostraka.save(path, bad))[0])
    return {"given_up": given_up, "kept": kept, "late": late}


def test_process_that_gives_up_and_process_that_comes_late(place: Place):
    results = run_processes(give_up_on_one, str(place), processes=2, devices_per_process=2)
    for result in results:
        kind, words, _ = result.value["given_up"]
        assert (kind, result.value["kept"]) == ("SaveFailed", 3)
        assert "failed on process 1: it was interrupted, and gave the save up" in words
        assert result.value["late"] == ["SaveFailed"] * 18
