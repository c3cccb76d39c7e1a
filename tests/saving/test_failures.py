"""Processes that fail, die, are interrupted or get in each other's way: all hear of it, at once,
and what was saved before is still there."""

import errno
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest

import ostraka
from figures import Figures
from mounts import mounted
from numbered import (
    CLEAN,
    caught,
    make_tree,
    names_in,
    number_in,
    restored_number,
    threads_left,
)
from ostraka.errors import Busy
from ostraka.layout import shard_file
from ostraka.processes import operation as _coordinate
from ostraka.processes import service
from ostraka.saving import _commit, _write
from ostraka.saving import save as _save
from ostraka.storage import _claim, claimed, open_store
from ostraka.storage import file as _file
from ostraka.testing import FaultyStore, run_processes
from places import BucketPath, Place, at, copy_tree, flip
from runs import Gate

NEVER_S = 1000.0
DEAD_AFTER_S = 10.0
"""Long enough for a process that lives and does not get its turn for a while."""


def wait_for_ever() -> None:
    """Nobody is given up because of the time: who hears of a failure was told of it."""
    _coordinate.ARRIVE_WITHIN_S = _coordinate.DEAD_AFTER_S = NEVER_S


def meet(name: str) -> None:
    """Wait for all processes; a collective of JAX's would wait for 30 s only."""
    from jax._src import distributed

    client: Any = distributed.global_state.client
    client.wait_at_barrier(name, timeout_in_ms=200_000)


def wait_for(*marks: Place, unless: Callable[[], bool] = lambda: False) -> None:
    while not all(mark.exists() for mark in marks) and not unless():
        time.sleep(0.01)


def in_thread(work: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """Do something to processes beside the run that has started them."""
    return lambda popens: threading.Thread(target=work, args=(popens,), daemon=True).start()


# Faults, each on one process


@contextmanager
def broken(
    path: str, owner: Any, name: str, error: BaseException, *, after: int = 0
) -> Generator[str]:
    """Let a function raise, from its call number `after` on."""
    real, calls = getattr(owner, name), count()

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls) < after:
            return real(*args, **options)
        raise error

    with patch.object(owner, name, fail):
        yield path


@contextmanager
def small_files(path: str) -> Generator[str]:
    """No file of this process may grow past a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def breaking(owner: Any, name: str, error: BaseException, after: int = 0) -> Callable[[str], Any]:
    return lambda path: broken(path, owner, name, error, after=after)


def failing(verb: str, error: BaseException, *, name: str = "") -> Callable[[str], Any]:
    """A store whose verb raises for files of this name."""

    def fail(called: str, file: str) -> None:
        if called == verb and file.endswith(name):
            raise error

    return lambda path: nullcontext(FaultyStore(path, before=fail))


@contextmanager
def sync_after_commit(path: str) -> Generator[str]:
    """`_METADATA` is new, but the store won't say that it will stay so."""
    kind: Any = type(open_store(path))
    real = kind.put

    def put(store: Any, name: str, data: bytes, **options: Any) -> None:
        real(store, name, data, **options)
        if name == "_METADATA":
            raise system_error(errno.EIO)

    with patch.object(kind, "put", put):
        yield path


@contextmanager
def held(path: str) -> Generator[str]:
    """As if another program were saving to the path."""
    with claimed(open_store(path)):
        yield path


def slow_to_clean_up(path: str, *, fails: bool = False) -> Any:
    """One fails and takes its time to remove files: the others must not be blamed for it."""

    def before(verb: str, name: str) -> None:
        if verb == "write" and fails:
            raise system_error(errno.EIO)
        time.sleep({"write": 0.2, "delete": 0.4}.get(verb, 0.0))

    return nullcontext(FaultyStore(path, before=before))


def system_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Fault:
    process: int
    said: str
    """All must say it."""
    make: Callable[[str], Any]
    """Brings it about on that process: yields the path or the store to save to."""
    others: Callable[[str], Any] = nullcontext
    in_buckets: bool = False
    """Brought about in the store, so that it is another one in a bucket."""
    kind: str = "SaveFailed"
    """What is raised on the process where it comes from."""


IO_ERROR = "Input/output error"
EIO = system_error(errno.EIO)
FULL = system_error(errno.ENOSPC)
DENIED = system_error(errno.EACCES)
CAT = "the cat sat on it"
FAULTS = {
    "file too large": Fault(2, "File too large", small_files),
    "fsync": Fault(2, IO_ERROR, breaking(os, "fsync", EIO)),
    "late": Fault(1, IO_ERROR, breaking(os, "pwritev", EIO, after=1)),
    "index": Fault(2, IO_ERROR, breaking(os, "replace", EIO)),
    "write": Fault(2, IO_ERROR, failing("write", EIO), in_buckets=True),
    "create": Fault(3, "Permission denied", failing("create", DENIED), in_buckets=True),
    "finish": Fault(2, IO_ERROR, failing("finish", EIO), in_buckets=True),
    "put": Fault(2, IO_ERROR, failing("put", EIO, name=".json"), in_buckets=True),
    "any exception": Fault(2, f"RuntimeError: {CAT}", failing("write", RuntimeError(CAT))),
    "no memory": Fault(1, "MemoryError", breaking(shard_file, "block_digest", MemoryError())),
    "plan": Fault(2, "ZeroDivisionError", breaking(_save, "plan_write", ZeroDivisionError())),
    "plan on 0": Fault(0, "KeyError: 'plan'", breaking(_save, "plan_write", KeyError("plan"))),
    "capture": Fault(3, "TypeError: odd", breaking(_save, "capture", TypeError("odd"))),
    "unsavable leaf": Fault(2, "leaf 'odd' is a", nullcontext),
    "no path": Fault(2, "path is empty", lambda path: nullcontext("")),
    "committing": Fault(
        0, FULL.args[1], failing("publish", FULL, name="_METADATA"), in_buckets=True
    ),
    "encoding": Fault(
        0, "ValueError: much", breaking(_commit, "encode_metadata", ValueError("much"))
    ),
    "busy": Fault(0, "another save to", held, in_buckets=True),
    "after the commit": Fault(0, IO_ERROR, sync_after_commit, in_buckets=True),
    "slow clean-up": Fault(
        2, IO_ERROR, partial(slow_to_clean_up, fails=True), slow_to_clean_up, in_buckets=True
    ),
    "interrupt": Fault(
        2,
        "KeyboardInterrupt",
        breaking(_write, "_write_all", KeyboardInterrupt()),
        kind="KeyboardInterrupt",
        in_buckets=True,
    ),
    "exit": Fault(1, "SystemExit", breaking(_save, "plan_write", SystemExit()), kind="SystemExit"),
}


class Unsavable:
    pass


def save_with_faults(path: str, names: list[str]) -> list[tuple[Any, ...]]:
    """Save, fail to save another tree, look whether the first is intact; again and again."""
    wait_for_ever()
    ostraka.save(path, make_tree(0))
    outcomes: list[tuple[Any, ...]] = []
    for number, name in enumerate(names):
        fault = FAULTS[name]
        tree = make_tree(-1)
        is_here = jax.process_index() == fault.process
        if is_here and name == "unsavable leaf":
            tree["odd"] = Unsavable()
        said = kind = process = None
        with (fault.make if is_here else fault.others)(path) as target:
            try:
                ostraka.save(target, tree)
            except BaseException as error:
                said, kind, process = str(error), type(error).__name__, vars(error).get("process")
        intact = restored_number(path)
        ostraka.save(path, make_tree(number + 1))
        meet(f"after {name}")
        outcomes.append((kind, said, process, intact, names_in(path)))
        meet(f"before the fault after {name}")
    assert restored_number(path) == len(names)
    return outcomes


def test_a_failure_on_one_of_four_processes(place: Place):
    is_bucket = isinstance(place, BucketPath)
    names = [name for name, fault in FAULTS.items() if fault.in_buckets or not is_bucket]
    path = str(place / "checkpoint")
    results = run_processes(save_with_faults, path, names, processes=4, timeout_s=500)
    for result in results:
        for number, (name, outcome) in enumerate(zip(names, result.value, strict=True)):
            where = (name, result.process, outcome)
            fault = FAULTS[name]
            kind, said, process, intact, left = outcome
            if result.process == fault.process and fault.kind != "SaveFailed":
                assert kind == fault.kind, where
            else:
                assert (kind, process) == ("SaveFailed", fault.process), where
                assert f"on process {fault.process}" in said, where
                assert fault.said in said, where
                assert path in said or name == "no path", where
                assert "\n" not in said, where
            assert intact in ((number, -1) if name == "after the commit" else (number,)), where
            assert left == CLEAN, where


# A full disk


def fill_disk(path: str) -> tuple[str, int | str, int | str, list[str]]:
    _coordinate._VERDICT_WITHIN_S = 60.0  # several fail, and say the same once they are told
    ostraka.save(path, make_tree(1, rows=10_000))  # 6 MiB
    _, said = caught(lambda: ostraka.save(path, make_tree(2, rows=40_000)))  # 24 MiB
    before = restored_number(path, rows=10_000)
    ostraka.save(path, make_tree(3, rows=10_000))
    return said, before, restored_number(path, rows=10_000), names_in(path)


def test_a_full_disk(tmp_path: Path):
    with mounted(tmp_path / "small", options="size=24m", for_what="a disk that is full") as disk:
        results = run_processes(fill_disk, str(disk / "checkpoint"), processes=4)
    assert len({result.value[0] for result in results}) == 1
    for result in results:
        said, before, after, names = result.value
        assert "No space left on device" in said
        assert "on process" in said
        assert "bytes, " in said  # how much was needed, how much was free
        assert (before, after, names) == (1, 3, CLEAN)


# A process that dies


def stop_while_writing(path: str) -> tuple[str, int | str]:
    """Process 2 stands still for so long that it counts as dead, and then goes on."""
    once = threading.Lock()  # a second thread that stopped the process would stop it for good
    stopped = at(path + ".stopped")

    def stop(verb: str, name: str) -> None:
        if verb != "write":
            return
        with once:
            if jax.process_index() == 2 and not stopped.exists():
                stopped.touch()
                os.kill(os.getpid(), signal.SIGSTOP)

    _, said = caught(lambda: ostraka.save(FaultyStore(path, before=stop), make_tree(2)))
    at(f"{path}.over{jax.process_index()}").touch()
    return said, restored_number(path)


def die_while_writing(path: str, dying: int) -> tuple[str, float]:
    """One process kills itself in the middle of its shard; how long it had not been heard of then.

    That is at least as long as since it last answered a roll call, or came. No process has a
    connection that would tell: as if its host was gone, or their ports were blocked.
    """
    service.Connections.open = lambda self: None
    mark = at(path + ".died")
    heard_s = time.monotonic()
    real_set = service.Keys.set

    def die(verb: str, name: str) -> None:
        if jax.process_index() == dying and verb == "finish":
            mark.write_text(str(heard_s))
            os.kill(os.getpid(), signal.SIGKILL)

    def set_and_note(keys: Any, key: str, value: Any) -> None:
        nonlocal heard_s
        begin = time.monotonic()
        real_set(keys, key, value)
        if key.startswith("here/"):
            heard_s = begin

    with patch.object(service.Keys, "set", set_and_note):
        _, said = caught(lambda: ostraka.save(FaultyStore(path, before=die), make_tree(2)))
    if dying == 0:
        time.sleep(NEVER_S)  # JAX is about to end this process too
    return said, time.monotonic() - float(mark.read_text())


def stop_then_die(path: str) -> tuple[tuple[str, int | str], tuple[str, float]]:
    service.Connections.open = lambda self: None
    wait_for_ever()
    _coordinate.DEAD_AFTER_S = DEAD_AFTER_S
    ostraka.save(path, make_tree(1))
    stopped = stop_while_writing(path)
    ostraka.save(path, make_tree(1))
    meet("saved")
    assert names_in(path) == CLEAN
    meet("looked")
    return stopped, die_while_writing(path, 3)


def assert_intact(path: Place) -> None:
    """Version 1 is there, and a save in this process clears the rest away."""
    assert ostraka.verify(path).ok
    assert restored_number(path) == 1
    ostraka.save(path, make_tree(5))
    assert restored_number(path) == 5
    assert names_in(path) == CLEAN


def test_a_process_that_is_killed(tmp_path: Path):
    """Before that another one stands still for as long as if it were dead, and comes back."""
    path = tmp_path / "checkpoint"

    def wake(popens: list[Any]) -> None:
        # Process 0 waits for it a little, before it cleans up.
        marks = [at(f"{path}.over1"), at(f"{path}.over3")]
        wait_for(*marks, unless=lambda: popens[2].returncode is not None)
        popens[2].send_signal(signal.SIGCONT)

    results = run_processes(
        stop_then_die, str(path), processes=4, check=False, on_start=in_thread(wake)
    )
    assert [result.exit_code for result in results] == [0, 0, 0, -9], results
    for result in results[:3]:
        stopped, (said, unheard_s) = result.value
        assert stopped[1] == 1
        for process, words in ((2, stopped[0]), (3, said)):
            assert f"{path} failed on process {process}: it has not been heard of for 10 s" in words
        assert unheard_s > DEAD_AFTER_S
    assert_intact(path)


def die_between(path: str) -> list[str]:
    """Process 1 kills itself when all have saved; what the others hear of it, each time."""
    wait_for_ever()
    ostraka.save(path, make_tree(1))
    manager = ostraka.Manager(f"{path}.runs", asynchronous=False)
    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    attempts: list[Callable[[], object]] = [
        lambda: ostraka.save(path, make_tree(2)),
        lambda: ostraka.save_async(path, make_tree(2)).wait(),
        lambda: restored_number(path),
        lambda: manager.save(1, make_tree(2)),
        manager.latest,
    ]
    return [": ".join(caught(attempt)) for attempt in attempts]


def test_a_process_that_is_killed_between_two_saves(tmp_path: Path):
    """The others never wait for it, though they would wait for ever for one that is late."""
    path = tmp_path / "checkpoint"
    results = run_processes(die_between, str(path), processes=3, check=False)
    assert [result.exit_code for result in results] == [0, -9, 0]
    kinds = ["SaveFailed", "SaveFailed", "RestoreFailed", "SaveFailed", "OstrakaError"]
    for result in (results[0], results[2]):
        assert [said.split(":")[0] for said in result.value] == kinds
        for said in result.value:
            assert "process 1: it has ended, or was killed, before it came to" in said
    assert_intact(path)


def die_first(path: str) -> None:
    ostraka.save(path, make_tree(1))
    die_while_writing(path, 0)


def test_process_0_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """JAX ends the others: nobody is left to raise, and nothing is committed."""
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 3.0)  # which it is
    path = tmp_path / "checkpoint"
    results = run_processes(die_first, str(path), processes=3, check=False)
    assert results[0].exit_code == -9
    assert all(result.exit_code != 0 for result in results)
    assert_intact(path)


def be_stopped_while_writing(path: str, awake: str, calls: str) -> int | str:
    """The machine is suspended for longer than it takes to count as dead, or not to come."""
    wait_for_ever()
    real_call = _coordinate.Operation._call_roll

    def before(verb: str, name: str) -> None:
        if verb == "finish":  # by now all have come
            _coordinate.ARRIVE_WITHIN_S, _coordinate.DEAD_AFTER_S = 1.0, DEAD_AFTER_S
            if jax.process_index() == 1:
                wait_for(Path(awake))

    def call_roll(operation: Any, stage: str, roll: Any) -> None:
        real_call(operation, stage, roll)
        if stage == "commit":
            with open(calls, "a") as file:
                file.write("x")

    with patch.object(_coordinate.Operation, "_call_roll", call_roll):
        ostraka.save(FaultyStore(path, before=before), make_tree(1))
    wait_for_ever()
    return restored_number(path)


def test_a_machine_that_is_suspended_in_the_middle(tmp_path: Path):
    awake, calls = tmp_path / "awake", tmp_path / "calls"
    calls.touch()

    def wait_for_roll_calls(popens: list[Any], number: int) -> None:
        """Wait for so many more."""
        least = number + calls.stat().st_size
        while calls.stat().st_size < least and all(popen.returncode is None for popen in popens):
            time.sleep(0.01)

    def suspend(popens: list[Any]) -> None:
        wait_for_roll_calls(popens, 1)
        popens[1].send_signal(signal.SIGSTOP)
        wait_for_roll_calls(popens, 2)  # so that process 0 waits for an answer
        popens[0].send_signal(signal.SIGSTOP)
        time.sleep(DEAD_AFTER_S + 1)
        for popen in popens:
            popen.send_signal(signal.SIGCONT)
            time.sleep(0.8)  # so that process 0 goes on alone for a moment
        awake.touch()

    paths = map(str, (tmp_path / "checkpoint", awake, calls))
    results = run_processes(be_stopped_while_writing, *paths, on_start=in_thread(suspend))
    assert [result.value for result in results] == [1, 1]


# Restores


def restore_with_faults(path: str) -> list[tuple[str, str, int | None, str]]:
    """A block is damaged that process 2 alone needs; then process 1 can't read, for two reasons."""
    wait_for_ever()
    me = jax.process_index()
    sharded = {"sharded": make_tree(1)["sharded"]}
    ostraka.save(path, sharded)
    file = sorted(at(path).glob("shards-*/shard_*.safetensors"))[2]
    found: list[tuple[str, str, int | None, str]] = []

    def restore() -> None:
        try:
            ostraka.restore(path, like=sharded)
        except Exception as error:
            found.append((type(error).__name__, str(error), vars(error).get("process"), file.name))

    for mark in ("flipped", "flipped back"):
        if me == 0:
            flip(file, -1)
        meet(mark)
        restore()
    for code in (errno.ESTALE, errno.EIO):
        with broken(path, os, "preadv", system_error(code)) if me == 1 else nullcontext():
            restore()
        assert number_in(ostraka.restore(path, like=sharded)) == 1
    return found


def test_a_failed_read_on_one_of_four_processes(tmp_path: Path):
    path = str(tmp_path / "checkpoint")
    expected = [
        (2, "Damaged", "not as they were written"),
        (1, "StoreError", os.strerror(errno.ESTALE)),
        (1, "Damaged", os.strerror(errno.EIO)),
    ]
    for result in run_processes(restore_with_faults, path, processes=4):
        for (failing, raised, cause), outcome in zip(expected, result.value, strict=True):
            kind, said, process, file = outcome
            assert cause in said, outcome
            if failing == 2:
                assert file in said, outcome
                assert path in said, outcome
            if result.process == failing:
                assert kind == raised, outcome
                assert failing == 1 or "'sharded'" in said, outcome
            else:
                assert (kind, process) == ("RestoreFailed", failing), outcome
                assert f"on process {failing}" in said, outcome


def restore_while_replaced(path: str, other: str) -> int | str:
    """Another save is committed after process 0 has read `_METADATA`, and before the others do."""
    from ostraka.restoring import restore as _read

    ostraka.save(path, make_tree(1))
    ostraka.save(other, make_tree(2))
    meet("saved")
    me = jax.process_index()
    real, calls = _read.open_at, count()

    def load(store: Any, names: Any) -> Any:
        if next(calls):
            return real(store, names)
        if me != 0:
            wait_for(at(path + ".replaced"))
            return real(store, names)
        found = real(store, names)
        (shards,) = at(other).glob("shards-*")
        copy_tree(shards, at(path) / shards.name)
        copy_tree(at(other) / "_METADATA", at(f"{path}.new"))
        at(path + ".new").rename(at(f"{path}/_METADATA"))  # pyright: ignore[reportArgumentType]
        at(path + ".replaced").touch()
        return found

    with patch.object(_read, "open_at", load):
        return restored_number(path)


def test_processes_restore_the_same_save(tmp_path: Path):
    """Never a mix of two checkpoints, although each process reads for itself."""
    paths = str(tmp_path / "checkpoint"), str(tmp_path / "other")
    results = run_processes(restore_while_replaced, *paths)
    assert results[0].value == results[1].value
    assert results[0].value in (1, 2)


# Interrupts


@contextmanager
def interrupt(path: str, delay_s: float | None) -> Generator[str | FaultyStore]:
    """Ctrl-C after a time, however late, or without one for sure while a shard is written."""
    once = threading.Lock()

    def interrupt_a_write(verb: str, name: str) -> None:
        if verb == "write" and once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)

    if delay_s is None:
        yield FaultyStore(path, before=interrupt_a_write)
        return
    timer = threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        yield path
        timer.join()
        time.sleep(0.01)  # an interrupt that comes late
    finally:
        timer.join()


def interrupt_saves(path: str, trials: int, seed: int) -> int:
    """Ctrl-C at random moments of saves that overwrite each other; how many came in time."""
    # Whoever runs the tests in the background has interrupts ignored, here too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = np.random.default_rng(seed)
    values = [np.full((1 << 19,), 0.0, np.float32) for _ in range(16)]  # 32 MiB

    def tree(number: int) -> list[np.ndarray]:
        for value in values:
            value[:] = number
        return values

    def save(number: int, target: Any = path) -> float:
        wanted = tree(number)
        begin = time.monotonic()
        ostraka.save(target, wanted)
        return time.monotonic() - begin

    save(0)
    usual_s = save(0)
    committed, interrupted = 0, 0
    for number in range(1, trials + 1):
        # A timer may come too late each time: of every four one is made sure of.
        delay_s = None if number % 4 == 0 else rng.uniform(0, 1.1) * usual_s
        returned = False
        try:
            with interrupt(path, delay_s) as target:
                usual_s = save(number, target)  # it differs by much from minute to minute
                returned = True
        except KeyboardInterrupt:
            interrupted += not returned
        found = number_in(ostraka.restore(path))
        where = f"trial {number}: {committed} before, {found} found, returned: {returned}"
        assert found in ((number,) if returned else (committed, number)), where
        assert threads_left() == [], where
        committed = found
    save(-1)
    assert number_in(ostraka.restore(path)) == -1
    assert names_in(path) == CLEAN
    return interrupted


@pytest.mark.parametrize("trials", [12, pytest.param(500, marks=pytest.mark.soak)])
def test_an_interrupt_at_any_moment(tmp_path: Path, trials: int, figures: Figures):
    path = str(tmp_path / "checkpoint")
    (result,) = run_processes(
        interrupt_saves, path, trials, 3, processes=1, timeout_s=200 + 3 * trials
    )
    assert result.value > trials // 5
    figures.add("saves with a Ctrl-C", trials)
    figures.add("interrupted by it", result.value)


@pytest.mark.parametrize(
    ("place", "error"),
    [("disk", KeyboardInterrupt()), ("bucket", KeyboardInterrupt()), ("disk", EIO)],
    indirect=["place"],
    ids=["interrupt", "interrupt in a bucket", "input/output"],
)
def test_an_error_at_any_step_of_a_save(place: Place, error: Any, monkeypatch: pytest.MonkeyPatch):
    """Whatever happens when, one of the two checkpoints is there, and the next save goes well.

    A save that fails once `_METADATA` is new must not take the new shards away.
    """
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 1.0)  # one that could not remove its marker
    path = place / "checkpoint"
    ostraka.save(path, make_tree(1))
    has_failed = True
    # In a bucket, where it takes long, at a third of the steps.
    for step in range(0, 200, 3 if isinstance(path, BucketPath) else 1):
        if not has_failed:
            return
        has_failed = save_and_fail(path, step, error)
        assert ostraka.verify(path).ok, step
        assert number_in(ostraka.restore(path)) in (1, 2), step
        ostraka.save(path, make_tree(1))
        assert names_in(path) == CLEAN, step
    pytest.fail("a save has more steps than this test expects")


def save_and_fail(path: Place, step: int, error: BaseException) -> bool:
    """Save 2 to a store where one step raises; whether it came to that."""
    left = iter(range(step + 1))

    def fail(verb: str, name: str) -> None:
        nonlocal failed
        if next(left, None) == step:
            failed = True
            raise error

    failed = False
    with suppress(BaseException):
        ostraka.save(FaultyStore(path, before=fail), make_tree(2))
    return failed


def test_every_directory_sync_may_fail(tmp_path: Path):
    path = tmp_path / "checkpoint"
    ostraka.save(path, make_tree(1))
    outcomes: list[tuple[str, str]] = []
    while not outcomes or outcomes[-1][0]:
        after = len(outcomes)
        assert after < 8, "a save syncs more directories than this test expects"
        with broken("", _file, "sync_directory", system_error(errno.EIO), after=after):
            outcomes.append(caught(lambda: ostraka.save(path, make_tree(2))))
        assert ostraka.verify(path).ok, after
        assert number_in(ostraka.restore(path)) in (1, 2), after
    assert outcomes[0][0] == "SaveFailed"
    assert "Input/output error" in outcomes[0][1]


def interrupted_after_reporting(path: str) -> tuple[str, int | str]:
    """Ctrl-C reaches a process that has reported and waits for process 0 to commit."""
    me = jax.process_index()
    ostraka.save(path, make_tree(1))
    real_await = _coordinate.Operation._await_answer
    committing, interrupted = at(path + ".committing"), at(path + ".interrupted")

    def await_answer(operation: Any, stage: str) -> Any:
        if me == 1 and stage == "commit":
            wait_for(committing)
            raise KeyboardInterrupt
        return real_await(operation, stage)

    def hold_the_commit(verb: str, name: str) -> None:
        if verb == "put" and name == "_METADATA":
            committing.touch()
            deadline = time.monotonic() + 60
            wait_for(interrupted, unless=lambda: time.monotonic() > deadline)

    store = FaultyStore(path, before=hold_the_commit)
    with patch.object(_coordinate.Operation, "_await_answer", await_answer):
        kind, _ = caught(lambda: ostraka.save(store, make_tree(2)))
        if me == 1:
            interrupted.touch()
    meet("done")
    return kind, restored_number(path)


def test_an_interrupt_while_another_process_commits(tmp_path: Path):
    path = tmp_path / "checkpoint"
    results = run_processes(interrupted_after_reporting, str(path), processes=3)
    assert results[1].value[0] == "KeyboardInterrupt"
    assert len({result.value[1] for result in results}) == 1
    assert results[0].value[1] in (1, 2)
    assert ostraka.verify(path).ok


# Two at once


def test_two_saves_to_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.2)  # so that it is soon known to be alive
    path = tmp_path / "checkpoint"
    ostraka.save(path, make_tree(1))
    gate = Gate("write")
    store = FaultyStore(path, before=gate)
    first = threading.Thread(target=ostraka.save, args=(store, make_tree(2)))
    first.start()
    gate.wait_until_reached()
    try:
        with pytest.raises(Busy, match=f"another save to {path} is under way"):
            ostraka.save(path, make_tree(3))
        assert number_in(ostraka.restore(path)) == 1
    finally:
        gate.open()
        first.join()
    assert number_in(ostraka.restore(path)) == 2
    ostraka.save(path, make_tree(4))
    assert number_in(ostraka.restore(path)) == 4
    assert names_in(path) == CLEAN


def overwrite(path: str, marks: Path, seconds: float, values: list[np.ndarray]) -> int:
    """Save to the path again and again, until both readers have read, and for some time."""
    ostraka.save(path, values)
    (marks / "ready").touch()
    end = time.monotonic() + seconds
    for number in count(1):
        ostraka.save(path, [value + number for value in values])
        if time.monotonic() > end and number >= 4:
            if len(list(marks.glob("reader *"))) == 2:
                (marks / "over").touch()
                return number
            time.sleep(0.2)  # for a reader that is too slow
    raise AssertionError


def read_again_and_again(path: str, marks: Path, *, also_verify: bool) -> int:
    wait_for(marks / "ready")
    last, reads = 0, 0
    while not (marks / "over").exists():
        try:
            number = number_in(ostraka.restore(path))
        except Busy:
            continue  # it was kept from reading for long, and nothing wrong was returned
        assert isinstance(number, int), number
        assert number >= last
        last = number
        reads += 1
        if reads == 4:
            (marks / f"reader {os.getpid()}").touch()
        if also_verify:
            with suppress(ostraka.errors.OstrakaError):
                assert ostraka.verify(path, raises=False).problems == ()
    return reads


def overwrite_or_read(path: str, root: str, seconds: float, leaves: int, nbytes: int) -> Any:
    """One process overwrites a path again and again, the others restore from it."""
    for role in range(3):
        with suppress(FileExistsError):
            (Path(root) / f"turn {role}").touch(exist_ok=False)
            break
    else:
        raise AssertionError
    if role == 0:
        values = [np.zeros(nbytes // 4, np.int32) for _ in range(leaves)]
        return "saves", overwrite(path, Path(root), seconds, values)
    return "reads", read_again_and_again(path, Path(root), also_verify=role == 2)


@pytest.mark.parametrize(
    ("leaves", "nbytes", "seconds"),
    [
        (3, 64, 1.0),
        (20, 1 << 18, 1.0),
        pytest.param(3, 64, 120.0, marks=pytest.mark.soak),
        pytest.param(200, 1 << 16, 120.0, marks=pytest.mark.soak),
    ],
)
def test_reading_while_another_process_overwrites(
    tmp_path: Path, leaves: int, nbytes: int, seconds: float, figures: Figures
):
    args = (str(tmp_path / "checkpoint"), str(tmp_path), seconds, leaves, nbytes)
    results = run_processes(
        overwrite_or_read, *args, processes=3, distributed=False, timeout_s=seconds + 200
    )
    assert sorted(result.value[0] for result in results) == ["reads", "reads", "saves"]
    for what, number in (result.value for result in results):
        assert number > 3
        figures.add("saves over what is being read" if what == "saves" else "reads", number)


def test_the_index_of_a_failed_save_is_gone(tmp_path: Path):
    """Nothing that a failed save wrote is ever taken for a part of a later one."""
    path = tmp_path / "checkpoint"
    with (
        broken("", _commit, "encode_metadata", RuntimeError("odd")),
        pytest.raises(RuntimeError, match="odd"),
    ):
        ostraka.save(path, make_tree(1))
    assert not path.exists()
    ostraka.save(path, make_tree(2))
    (index,) = path.glob("shards-*/process_*.json")
    named = json.loads(index.read_bytes())["files"]
    assert sorted(named) == sorted(file.name for file in path.glob("shards-*/*.safetensors"))
