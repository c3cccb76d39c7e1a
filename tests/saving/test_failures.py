"""Processes that fail, die, are interrupted or get in each other's way: all hear of it, at once,
and what was saved before is still there."""

import errno
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from figures import Figures
from mounts import mounted
from ostraka.errors import Busy, Damaged, RestoreFailed, SaveFailed, store_error
from ostraka.layout import shard_file
from ostraka.processes import operation as _coordinate
from ostraka.processes import service
from ostraka.saving import _commit, _write
from ostraka.saving import save as _save
from ostraka.storage import _claim, claimed, open_store
from ostraka.storage import file as _file
from ostraka.testing import FaultyStore, run_processes
from places import BucketPath, Place, at, copy_tree, flip

WITHIN_S = 60.0
"""From the failure of one process until all have raised: far less than any time limit here."""
LONG_S = 60.0
NEVER_S = 1000.0
DEAD_AFTER_S = 10.0
"""Long enough for a process that lives and does not get its turn for a while."""


def make_tree(number: int, rows: int = 96) -> dict[str, Any]:
    """Every element of every leaf is `number`, so that a mix of two saves shows."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def place(shape: tuple[int, ...], spec: P) -> jax.Array:
        value = np.full(shape, number, np.float32)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda index: value[index])

    return {
        "sharded": place((rows, 128), P("x")),
        "replicated": place((rows, 32), P()),
        "host": np.full(1000, number),
        "number": number,
    }


def number_in(tree: dict[str, Any]) -> int | str:
    """The number that a tree is made of, as far as this process holds it."""
    found = {int(tree["number"]), *np.unique(tree["host"]).tolist()}
    for name in ("sharded", "replicated"):
        for shard in tree[name].addressable_shards:
            found |= {int(n) for n in np.unique(np.asarray(shard.data))}
    return found.pop() if len(found) == 1 else f"a mix of {sorted(found)}"


def names_in(path: str | Place) -> list[str]:
    """What is in a checkpoint's directory: without leftovers `_METADATA` and one directory."""
    return [name.split("-")[0] for name in open_store(path).list()]


CLEAN = ["_METADATA", "shards"]


def wait_for_ever() -> None:
    """Nobody is given up because of the time: who hears of a failure was told of it."""
    _coordinate.ARRIVE_WITHIN_S = NEVER_S
    _coordinate.DEAD_AFTER_S = NEVER_S


def in_time(attempt: Callable[[Place], float], folder: Place, limit_s: float = WITHIN_S) -> bool:
    """Whether one of three tries took less.

    A process that the machine does not let run is late once or twice, but not each time.
    """
    return any(attempt(folder / str(number)) < limit_s for number in range(3))


def meet(name: str) -> None:
    """Wait for all processes; a collective of JAX's would wait for 30 s only."""
    from jax._src import distributed

    client: Any = distributed.global_state.client
    client.wait_at_barrier(name, timeout_in_ms=200_000)


# Faults, each on one process


@contextmanager
def broken(
    owner: Any, name: str, error: BaseException, *, after: int = 0
) -> Generator[list[float], None, None]:
    """Let a function raise, from its call number `after` on; yields the times at which it did."""
    real = getattr(owner, name)
    raised_at: list[float] = []
    calls = 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= after:
            return real(*args, **options)
        raised_at.append(time.monotonic())
        raise error

    with patch.object(owner, name, fail):
        yield raised_at


@contextmanager
def small_files(nbytes: int) -> Generator[list[float], None, None]:
    """No file of this process may grow past a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield [time.monotonic()]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Raised(list[float]):
    """When a fault came up, and the store that has it."""

    store: FaultyStore


@contextmanager
def failing(
    path: str, verb: str, error: BaseException, *, name: str = "", after: int = 0
) -> Generator[Raised, None, None]:
    """A store whose verb raises, for files of this name, from its call number `after` on."""

    def fail(called: str, file: str) -> None:
        if called == verb and file.endswith(name) and next(calls) >= after:
            raised.append(time.monotonic())
            raise error

    calls = count()
    raised = Raised()
    raised.store = FaultyStore(path, before=fail)
    yield raised


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def sync_after_commit(path: str) -> Generator[list[float], None, None]:
    """`_METADATA` is new, but the store won't say that it will stay so."""
    kind: Any = type(open_store(path))
    real = kind.put
    raised_at: list[float] = []

    def put(store: Any, name: str, data: bytes, **options: Any) -> None:
        real(store, name, data, **options)
        if name == "_METADATA":
            raised_at.append(time.monotonic())
            raise eio("directory")

    with patch.object(kind, "put", put):
        yield raised_at


@contextmanager
def held(path: str) -> Generator[list[float], None, None]:
    """As if another program were saving to the path."""
    with claimed(open_store(path)):
        yield [time.monotonic()]


class Unsavable:
    pass


def eio(name: str = "write") -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO), f"/the/{name}")


FAULTS: dict[str, tuple[int, str, Callable[[str], Any]]] = {
    # name: the process that it is on, what all must say, how to bring it about
    "file too large": (2, "File too large", lambda _: small_files(5000)),
    "i/o error": (2, "Input/output error", lambda _: broken(os, "pwritev", eio())),
    "permission": (
        3,
        "Permission denied",
        lambda _: broken(
            os, "open", PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/the/shard")
        ),
    ),
    "fsync": (2, "Input/output error", lambda _: broken(os, "fsync", eio("fsync"))),
    "late": (1, "Input/output error", lambda _: broken(os, "pwritev", eio(), after=1)),
    "any exception": (
        2,
        "RuntimeError: the cat sat on it",
        lambda path: failing(path, "write", RuntimeError("the cat sat on it")),
    ),
    "no memory": (
        1,
        "MemoryError",
        lambda _: broken(shard_file, "block_digest", MemoryError()),
    ),
    "planning": (
        2,
        "ZeroDivisionError",
        lambda _: broken(_save, "plan_write", ZeroDivisionError()),
    ),
    "planning on 0": (
        0,
        "KeyError: 'plan'",
        lambda _: broken(_save, "plan_write", KeyError("plan")),
    ),
    "capture": (
        3,
        "TypeError: odd tree",
        lambda _: broken(_save, "capture", TypeError("odd tree")),
    ),
    "committing": (
        0,
        "No space left on device",
        lambda path: failing(path, "publish", no_space(), name="_METADATA"),
    ),
    "encoding": (
        0,
        "ValueError: too much",
        lambda _: broken(_commit, "encode_metadata", ValueError("too much")),
    ),
    "busy": (0, "another save to", held),
    "index": (2, "Input/output error", lambda _: broken(os, "replace", eio("index"))),
    "after the commit": (0, "Input/output error", sync_after_commit),
    "write": (2, "Input/output error", lambda path: failing(path, "write", eio())),
    "create": (
        3,
        "Permission denied",
        lambda path: failing(path, "create", PermissionError(errno.EACCES, "Permission denied")),
    ),
    "a late write": (1, "Input/output error", lambda path: failing(path, "write", eio(), after=1)),
    "finish": (2, "Input/output error", lambda path: failing(path, "finish", eio())),
    "put": (2, "Input/output error", lambda path: failing(path, "put", eio(), name=".json")),
    "interrupt": (
        2,
        "KeyboardInterrupt",
        lambda _: broken(_write, "_write_all", KeyboardInterrupt()),
    ),
    "exit": (1, "SystemExit", lambda _: broken(_save, "plan_write", SystemExit())),
}
OF_DIRECTORIES = {"file too large", "i/o error", "permission", "fsync", "late", "index"}
"""Brought about where the system is called: a bucket is reached in another way."""
BY_ITSELF = {"interrupt": "KeyboardInterrupt", "exit": "SystemExit"}
"""What is raised as it is on the process where it came from."""


def save_with_fault(path: str, fault: str) -> dict[str, Any]:
    """Save 1, fail to save 2, look whether 1 is intact, save 3."""
    me = jax.process_index()
    process, _, make = FAULTS[fault]
    ostraka.save(path, make_tree(1))
    tree = make_tree(2)
    said = kind = cause = None
    raised_at: list[float] = []
    with make(path) if me == process else nullcontext([]) as times:
        try:
            ostraka.save(getattr(times, "store", path), tree)
        except BaseException as error:
            said, kind, cause = str(error), type(error).__name__, getattr(error, "process", None)
        caught_at = time.monotonic()
        raised_at = list(times)
    intact = number_in(ostraka.restore(path, like=tree))
    ostraka.save(path, make_tree(3))
    return {
        "said": said,
        "kind": kind,
        "process": cause,
        "raised at": raised_at[:1],
        "caught at": caught_at,
        "before": intact,
        "after": number_in(ostraka.restore(path, like=tree)),
        "names": names_in(path),
    }


def save_with_faults(root: str, faults: list[str]) -> dict[str, dict[str, Any]]:
    wait_for_ever()
    return {fault: save_with_fault(f"{root}/{fault.replace('/', '')}", fault) for fault in faults}


def check_fault(root: Place, fault: str, outcomes: list[dict[str, Any]]) -> float:
    """Returns how long it took until all had raised."""
    process, cause, _ = FAULTS[fault]
    (raised_at,) = outcomes[process]["raised at"]
    for me, outcome in enumerate(outcomes):
        where = (fault, me, outcome)
        if me == process and fault in BY_ITSELF:
            assert outcome["kind"] == BY_ITSELF[fault], where
        else:
            assert outcome["kind"] == "SaveFailed", where
            assert outcome["process"] == process, where
            assert f"on process {process}" in outcome["said"], where
            assert cause in outcome["said"], where
            assert str(root) in outcome["said"], where
            assert "\n" not in outcome["said"], where
        assert outcome["before"] in ((1, 2) if fault == "after the commit" else (1,)), where
        assert outcome["after"] == 3, where
        assert outcome["names"] == CLEAN, where
    return max(outcome["caught at"] for outcome in outcomes) - raised_at


@pytest.mark.parametrize("half", [0, 1])
def test_a_failure_on_one_of_four_processes(place: Place, half: int):
    on_disk = isinstance(place, Path)
    faults = [fault for fault in FAULTS if on_disk or fault not in OF_DIRECTORIES][half::2]
    results = run_processes(save_with_faults, str(place), faults, processes=4)
    late = {
        fault
        for fault in faults
        if check_fault(place, fault, [result.value[fault] for result in results]) >= WITHIN_S
    }
    assert all(in_time(partial(fail_once, fault), place / "again") for fault in late), late


def fail_once(fault: str, folder: Place) -> float:
    results = run_processes(save_with_faults, str(folder), [fault], processes=4)
    return check_fault(folder, fault, [result.value[fault] for result in results])


def save_unsavable(path: str) -> tuple[str, float]:
    wait_for_ever()
    tree = make_tree(1)
    if jax.process_index() == 2:
        tree["odd"] = Unsavable()
    meet("begin")
    begin = time.monotonic()
    try:
        ostraka.save(path, tree)
    except SaveFailed as error:
        return str(error), time.monotonic() - begin
    return "saved", 0.0


def seconds_until_unsavable_is_heard_of(folder: Place) -> float:
    path = folder / "checkpoint"
    results = run_processes(save_unsavable, str(path), processes=4)
    assert all("on process 2: leaf 'odd' is a" in result.value[0] for result in results)
    assert not path.exists()
    return max(result.value[1] for result in results)


def test_a_leaf_that_can_not_be_saved_on_one_process(place: Place):
    assert in_time(seconds_until_unsavable_is_heard_of, place)


def save_to_nowhere(path: str) -> list[str]:
    """Process 2 does not know where to save; a later save of all must still work."""
    wait_for_ever()
    said: list[str] = []
    try:
        ostraka.save("" if jax.process_index() == 2 else path, make_tree(1))
    except (SaveFailed, ValueError) as error:
        said.append(str(error))
    try:
        ostraka.save(path, make_tree(2))
        said.append("saved")
    except SaveFailed as error:
        said.append(str(error))
    return said


def seconds_without_a_path(folder: Place) -> float:
    begin = time.monotonic()
    results = run_processes(save_to_nowhere, str(folder / "checkpoint"), processes=4, check=False)
    for result in results:
        assert result.error is None, result.traceback
        said, later = result.value
        assert "path is empty" in said, result.process
        assert later == "saved", result.process
    return time.monotonic() - begin


def test_a_process_without_a_path(place: Place):
    assert in_time(seconds_without_a_path, place, NEVER_S / 4)


def save_twice_with_slow_clean_up(path: str) -> tuple[str, int | str]:
    """Process 2 fails and takes its time to remove files; the others must not be blamed for it."""
    me = jax.process_index()
    ostraka.save(path, make_tree(1))

    def before(verb: str, name: str) -> None:
        if verb == "write":
            if me == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            time.sleep(0.4)
        elif verb == "delete":
            time.sleep(1.0)

    said = "saved"
    try:
        ostraka.save(FaultyStore(path, before=before), make_tree(2))
    except SaveFailed as error:
        said = str(error)
    return said, number_in(ostraka.restore(path, like=make_tree(0)))


def test_the_first_failure_is_the_one_that_is_named(place: Place):
    path = str(place / "checkpoint")
    for result in run_processes(save_twice_with_slow_clean_up, path, processes=4):
        said, number = result.value
        assert "on process 2" in said
        assert "Input/output error" in said
        assert number == 1


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    with mounted(tmp_path / "small", options="size=24m", for_what="a disk that is full") as disk:
        yield disk


def fill_disk(path: str) -> tuple[str, int | str, int | str, list[str]]:
    _coordinate._VERDICT_WITHIN_S = LONG_S  # several fail, and say the same once they are told
    like = make_tree(0, rows=10_000)
    ostraka.save(path, make_tree(1, rows=10_000))  # 6 MiB
    said = "saved"
    try:
        ostraka.save(path, make_tree(2, rows=40_000))  # 24 MiB
    except SaveFailed as error:
        said = str(error)
    before = number_in(ostraka.restore(path, like=like))
    ostraka.save(path, make_tree(3, rows=10_000))
    return said, before, number_in(ostraka.restore(path, like=like)), names_in(path)


def test_a_full_disk(small_disk: Path):
    results = run_processes(fill_disk, str(small_disk / "checkpoint"), processes=4)
    assert len({result.value[0] for result in results}) == 1
    for result in results:
        said, before, after, names = result.value
        assert "No space left on device" in said
        assert "on process" in said
        assert "bytes, " in said  # how much was needed, how much was free
        assert (before, after, names) == (1, 3, CLEAN)


def test_a_full_disk_with_one_process(small_disk: Path):
    path = small_disk / "checkpoint"
    ostraka.save(path, {"a": np.ones(1 << 20)})
    with pytest.raises(SaveFailed, match="No space left on device") as caught:
        ostraka.save(path, {"a": np.ones(4 << 20)})
    assert str(path) in str(caught.value)
    assert names_in(path) == CLEAN
    assert ostraka.restore(path)["a"].sum() == 1 << 20


# A process that dies


def die_while_writing(path: str, dying: int) -> tuple[str, float, float]:
    """One process kills itself in the middle of its shard; how long ago it was heard of, and died.

    The first is at least as long as since it last answered a roll call, or came. No process has a
    connection that would tell: as if its host was gone, or their ports were blocked.
    """
    service.Connections.open = lambda self: None
    _coordinate.ARRIVE_WITHIN_S = NEVER_S
    _coordinate.DEAD_AFTER_S = DEAD_AFTER_S
    me = jax.process_index()
    ostraka.save(path, make_tree(1))
    mark = at(path + ".died")
    heard_s = time.monotonic()
    real_set = service.Keys.set

    def die(verb: str, name: str) -> None:
        if me == dying and verb == "finish":
            mark.write_text(f"{heard_s} {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def set_and_note(keys: Any, key: str, value: Any) -> None:
        nonlocal heard_s
        begin = time.monotonic()
        real_set(keys, key, value)
        if key.startswith("here/"):
            heard_s = begin

    with patch.object(service.Keys, "set", set_and_note):
        try:
            ostraka.save(FaultyStore(path, before=die), make_tree(2))
        except SaveFailed as error:
            if dying == 0:
                time.sleep(NEVER_S)  # JAX is about to end this process too
            caught_at = time.monotonic()
            heard_at, died_at = map(float, mark.read_text().split())
            return str(error), caught_at - heard_at, caught_at - died_at
    return "saved", 0.0, 0.0


def assert_intact(path: Place) -> None:
    """Version 1 is there, and a save in this process clears the rest away."""
    assert ostraka.verify(path).ok
    like = make_tree(0)
    assert number_in(ostraka.restore(path, like=like)) == 1
    ostraka.save(path, make_tree(5))
    assert number_in(ostraka.restore(path, like=like)) == 5
    assert names_in(path) == CLEAN


def seconds_until_a_death_is_heard_of(folder: Place) -> float:
    path = folder / "checkpoint"
    folder.mkdir()
    results = run_processes(die_while_writing, str(path), 2, processes=4, check=False)
    assert [result.exit_code for result in results] == [0, 0, -9, 0]
    slowest = 0.0
    for result in results:
        if result.process == 2:
            continue
        said, unheard_s, dead_s = result.value
        assert "on process 2: it has not been heard of for 10 s" in said
        assert str(path) in said
        assert unheard_s > DEAD_AFTER_S
        slowest = max(slowest, dead_s)
    assert_intact(path)
    return slowest


def test_a_process_that_is_killed(place: Place):
    assert in_time(seconds_until_a_death_is_heard_of, place, DEAD_AFTER_S + WITHIN_S)


def die_between(path: str, dying: int) -> list[str]:
    """One process kills itself when all have saved; what the others hear of it, each time."""
    wait_for_ever()
    ostraka.save(path, make_tree(1))
    manager = ostraka.Manager(f"{path}.runs", asynchronous=False)
    if jax.process_index() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    attempts: list[Callable[[], object]] = [
        lambda: ostraka.save(path, make_tree(2)),
        lambda: ostraka.save_async(path, make_tree(2)).wait(),
        lambda: ostraka.restore(path, like=make_tree(0)),
        lambda: manager.save(1, make_tree(2)),
        manager.latest,
    ]
    said: list[str] = []
    for attempt in attempts:
        try:
            attempt()
        except (ostraka.errors.OstrakaError, _coordinate.ProcessFailed) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("dying", [1, 3])
def test_a_process_that_is_killed_between_two_saves(place: Place, dying: int):
    """The others never wait for it, though they would wait for ever for one that is late."""
    path = place / "checkpoint"
    results = run_processes(die_between, str(path), dying, processes=4, check=False)
    assert [result.exit_code for result in results] == [-9 * (n == dying) for n in range(4)]
    for result in results:
        if result.process == dying:
            continue
        assert len(result.value) == 5, result.value
        for said in result.value:
            assert f"process {dying}: it has ended, or was killed, before it came to" in said
    assert [said.split(":")[0] for said in results[0].value[:3]] == [
        "SaveFailed",
        "SaveFailed",
        "RestoreFailed",
    ]
    assert_intact(path)


def test_process_0_is_killed(place: Place, monkeypatch: pytest.MonkeyPatch):
    """JAX ends the others: nobody is left to raise, and nothing is committed."""
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 3.0)  # which it is
    path = place / "checkpoint"
    results = run_processes(die_while_writing, str(path), 0, processes=4, check=False)
    assert results[0].exit_code == -9
    assert all(result.exit_code != 0 for result in results)
    assert_intact(path)


def stay_away(path: str) -> str:
    """One process never comes to the save."""
    _coordinate.ARRIVE_WITHIN_S = 10.0  # the others are sure to come in this time
    said = "stayed away"
    meet("begin")
    if jax.process_index() != 1:
        try:
            ostraka.save(path, make_tree(1))
            said = "saved"
        except SaveFailed as error:
            said = str(error)
    meet("end")
    return said


def test_a_process_that_never_comes(place: Place):
    path = place / "checkpoint"
    results = run_processes(stay_away, str(path), processes=3)
    assert results[1].value == "stayed away"
    for said in (results[0].value, results[2].value):
        assert "on process 1: it did not" in said
        assert said.endswith("in 10 s")
    assert not path.exists()


def write_slowly(path: str) -> int | str:
    """One process takes longer than the others would wait for one that does not come at all."""
    wait_for_ever()
    _coordinate.DEAD_AFTER_S = DEAD_AFTER_S
    begin = time.monotonic()

    def before(verb: str, name: str) -> None:
        if verb != "finish":
            return
        _coordinate.ARRIVE_WITHIN_S = 1.0  # by now all have come
        if jax.process_index() == 1:
            time.sleep(max(0.0, begin + DEAD_AFTER_S + 1 - time.monotonic()))

    meet("begin")
    begin = time.monotonic()
    ostraka.save(FaultyStore(path, before=before), make_tree(1))
    wait_for_ever()
    return number_in(ostraka.restore(path, like=make_tree(0)))


def test_a_slow_process_is_waited_for(place: Place):
    results = run_processes(write_slowly, str(place / "checkpoint"), processes=2)
    assert [result.value for result in results] == [1, 1]


def stop_while_writing(path: str) -> tuple[str, int | str, int | str, list[str]]:
    """One process stands still for so long that it counts as dead, and then goes on."""
    wait_for_ever()
    _coordinate.DEAD_AFTER_S = DEAD_AFTER_S
    like = make_tree(0)
    ostraka.save(path, make_tree(1))
    stopped = at(path + ".stopped")
    once = threading.Lock()  # a second thread that stopped the process would stop it for good

    def stop(verb: str, name: str) -> None:
        if verb != "write":
            return
        with once:
            if jax.process_index() == 2 and not stopped.exists():
                stopped.touch()
                os.kill(os.getpid(), signal.SIGSTOP)

    said = "saved"
    try:
        ostraka.save(FaultyStore(path, before=stop), make_tree(2))
    except SaveFailed as error:
        said = str(error)
    at(f"{path}.over{jax.process_index()}").touch()
    before = number_in(ostraka.restore(path, like=like))
    ostraka.save(path, make_tree(3))
    return said, before, number_in(ostraka.restore(path, like=like)), names_in(path)


def wake(process: int, marks: list[Place]) -> Callable[[list[Any]], None]:
    """Once all files are there."""

    def watch(popen: Any) -> None:
        while not all(mark.exists() for mark in marks) and popen.returncode is None:
            time.sleep(0.01)
        popen.send_signal(signal.SIGCONT)

    return lambda popens: threading.Thread(
        target=watch, args=(popens[process],), daemon=True
    ).start()


def test_a_process_that_stands_still_and_comes_back(place: Place):
    path = place / "checkpoint"
    results = run_processes(
        stop_while_writing,
        str(path),
        processes=4,
        # Process 0 waits for it a little, before it cleans up.
        on_start=wake(2, [at(f"{path}.over1"), at(f"{path}.over3")]),
    )
    for result in results:
        said, before, after, names = result.value
        assert "on process 2: it has not been heard of" in said
        assert (before, after, names) == (1, 3, CLEAN)


def be_stopped_while_writing(path: str, awake: str, calls: str) -> int | str:
    """The machine is suspended for longer than it takes to count as dead."""
    _coordinate.ARRIVE_WITHIN_S = NEVER_S
    _coordinate.DEAD_AFTER_S = DEAD_AFTER_S
    real_call = _coordinate.Operation._call_roll

    def before(verb: str, name: str) -> None:
        if verb == "finish" and jax.process_index() == 1:
            while not os.path.exists(awake):
                time.sleep(0.01)

    def call_roll(operation: Any, stage: str, roll: Any) -> None:
        real_call(operation, stage, roll)
        if stage == "commit":
            with open(calls, "a") as file:
                file.write("x")

    with patch.object(_coordinate.Operation, "_call_roll", call_roll):
        ostraka.save(FaultyStore(path, before=before), make_tree(1))
    return number_in(ostraka.restore(path, like=make_tree(0)))


def test_a_machine_that_is_suspended_in_the_middle(place: Place, tmp_path: Path):
    awake, calls = tmp_path / "awake", tmp_path / "calls"

    def wait_for_roll_calls(popens: list[Any], number: int) -> None:
        """Wait for so many more."""
        least = number + (calls.stat().st_size if calls.exists() else 0)
        while not calls.exists() or calls.stat().st_size < least:
            if any(popen.returncode is not None for popen in popens):
                break
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

    results = run_processes(
        be_stopped_while_writing,
        str(place / "checkpoint"),
        str(awake),
        str(calls),
        processes=2,
        on_start=lambda popens: threading.Thread(
            target=suspend, args=(popens,), daemon=True
        ).start(),
    )
    assert [result.value for result in results] == [1, 1]


# Restores


def restore_damaged(path: str) -> dict[str, Any]:
    """Each process needs its own shard, and no other."""
    wait_for_ever()
    me = jax.process_index()
    like = {"sharded": make_tree(0)["sharded"]}
    ostraka.save(path, {"sharded": make_tree(1)["sharded"]})
    shards = sorted(at(path).glob("shards-*/shard_*.safetensors"))
    flip_last_byte(shards[2], only=me == 0)
    meet("flipped")
    begin = time.monotonic()
    said = kind = process = None
    try:
        ostraka.restore(path, like=like)
    except (RestoreFailed, Damaged) as error:
        said, kind, process = str(error), type(error).__name__, getattr(error, "process", None)
    seconds = time.monotonic() - begin
    flip_last_byte(shards[2], only=me == 0)
    meet("flipped back")
    again = ostraka.restore(path, like=like)["sharded"].addressable_data(0)
    return {
        "said": said,
        "kind": kind,
        "process": process,
        "seconds": seconds,
        "again": np.unique(np.asarray(again)).tolist(),
        "file": shards[2].name,
    }


def flip_last_byte(file: Place, *, only: bool) -> None:
    """On one process."""
    if only:
        flip(file, -1)


def seconds_until_damage_is_heard_of(folder: Place) -> float:
    path = folder / "checkpoint"
    results = run_processes(restore_damaged, str(path), processes=4)
    for result in results:
        outcome = result.value
        assert outcome["file"] in outcome["said"], outcome
        assert str(path) in outcome["said"], outcome
        assert "not as they were written" in outcome["said"], outcome
        assert outcome["again"] == [1]
        if result.process == 2:
            assert outcome["kind"] == "Damaged"
            assert "'sharded'" in outcome["said"]
        else:
            assert (outcome["kind"], outcome["process"]) == ("RestoreFailed", 2)
            assert "on process 2" in outcome["said"], outcome
    return max(result.value["seconds"] for result in results)


def test_a_damaged_block_on_one_process(place: Place):
    assert in_time(seconds_until_damage_is_heard_of, place)


def restore_with_fault(path: str, code: int) -> tuple[str, str, float, int | str]:
    """What the system says on one process, which may or may not be about the bytes."""
    wait_for_ever()
    me = jax.process_index()
    like = make_tree(0)
    ostraka.save(path, make_tree(1))
    meet("begin")
    begin = time.monotonic()
    said = kind = ""
    refusal = OSError(code, os.strerror(code))
    source: Any = path
    if me == 1 and isinstance(at(path), BucketPath):
        refused = store_error("read", "a shard", refusal)
        source = FaultyStore(path, fail={"read_into": refused})
    with broken(os, "preadv", refusal) if me == 1 else nullcontext():
        try:
            ostraka.restore(source, like=like)
        except Exception as error:
            said, kind = str(error), type(error).__name__
    seconds = time.monotonic() - begin
    return said, kind, seconds, number_in(ostraka.restore(path, like=like))


def seconds_until_a_read_error_is_heard_of(code: int, raised: str, folder: Place) -> float:
    results = run_processes(restore_with_fault, str(folder / "checkpoint"), code, processes=4)
    for result in results:
        said, kind, _, again = result.value
        assert os.strerror(code) in said
        assert kind == (raised if result.process == 1 else "RestoreFailed")
        if result.process != 1:
            assert "on process 1" in said
        assert again == 1
    return max(result.value[2] for result in results)


@pytest.mark.parametrize(("code", "raised"), [(errno.ESTALE, "StoreError"), (errno.EIO, "Damaged")])
def test_a_read_error_on_one_process(place: Place, code: int, raised: str):
    assert in_time(partial(seconds_until_a_read_error_is_heard_of, code, raised), place)


def restore_while_replaced(path: str) -> int | str:
    """Another save is committed after process 0 has read `_METADATA`, and before the others do."""
    from ostraka.restoring import restore as _read

    me = jax.process_index()
    like = make_tree(0)
    real = _read.open_at
    waited = False

    def load(store: Any, names: Any) -> Any:
        nonlocal waited
        if waited:
            return real(store, names)
        waited = True
        if me != 0:
            while not at(path + ".replaced").exists():
                time.sleep(0.01)
            return real(store, names)
        found = real(store, names)
        at(path + ".new").rename(at(f"{path}/_METADATA"))  # pyright: ignore[reportArgumentType]
        at(path + ".replaced").touch()
        return found

    meet("start")
    with patch.object(_read, "open_at", load):
        return number_in(ostraka.restore(path, like=like))


def save_two(path: str, other: str) -> None:
    ostraka.save(path, make_tree(1))
    ostraka.save(other, make_tree(2))


def test_processes_restore_the_same_save(place: Place):
    """Never a mix of two checkpoints, although each process reads for itself."""
    path, other = place / "checkpoint", place / "other"
    run_processes(save_two, str(path), str(other), processes=2)
    (shards,) = other.glob("shards-*")
    copy_tree(shards, path / shards.name)
    copy_tree(other / "_METADATA", at(f"{path}.new"))
    results = run_processes(restore_while_replaced, str(path), processes=2)
    assert results[0].value == results[1].value
    assert results[0].value in (1, 2)


# Interrupts


def ostraka_threads() -> list[str]:
    """Those that don't end; one that was just being started is given the time to."""
    deadline = time.monotonic() + LONG_S
    while True:
        names = [t.name for t in threading.enumerate() if t.name.startswith("ostraka")]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.001)


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


def interrupt_saves(path: str, trials: int, seed: int) -> dict[str, Any]:
    """Ctrl-C at random moments of saves that overwrite each other."""
    # Whoever runs the tests in the background has interrupts ignored, here too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = np.random.default_rng(seed)
    values = [np.full((1 << 19,), 0.0, np.float32) for _ in range(16)]  # 32 MiB

    def tree(number: int) -> dict[str, Any]:
        for value in values:
            value[:] = number
        return {"number": number, "values": values}

    ostraka.save(path, tree(0))
    begin = time.monotonic()
    ostraka.save(path, tree(0))
    usual_s = time.monotonic() - begin
    committed, interrupted = 0, 0
    wrong: list[Any] = []
    for number in range(1, trials + 1):
        wanted = tree(number)
        # A timer may come too late each time: of every four one is made sure of.
        delay_s = None if number % 4 == 0 else rng.uniform(0, 1.1) * usual_s
        returned = False
        try:
            with interrupt(path, delay_s) as place:
                begin = time.monotonic()
                ostraka.save(place, wanted)
                usual_s = time.monotonic() - begin  # it differs by much from minute to minute
                returned = True
        except KeyboardInterrupt:
            interrupted += not returned
        found = read_number(path)
        if found not in ((number,) if returned else (committed, number)):
            wrong.append((number, committed, returned, found))
        if threads := ostraka_threads():
            wrong.append((number, threads))
        committed = found if isinstance(found, int) else committed
    ostraka.save(path, tree(-1))
    return {
        "interrupted": interrupted,
        "wrong": wrong,
        "last": read_number(path),
        "names": names_in(path),
    }


def read_number(path: str) -> int | str:
    try:
        tree = ostraka.restore(path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = {tree["number"], *(int(n) for value in tree["values"] for n in np.unique(value))}
    return found.pop() if len(found) == 1 else f"a mix of {sorted(found)}"


@pytest.mark.parametrize("trials", [25, pytest.param(500, marks=pytest.mark.soak)])
def test_an_interrupt_at_any_moment(place: Place, trials: int, figures: Figures):
    if isinstance(place, BucketPath):
        trials //= 3  # 32 MiB are much for moto
    path = str(place / "checkpoint")
    (result,) = run_processes(
        interrupt_saves, path, trials, 3, processes=1, timeout_s=200 + 3 * trials
    )
    outcome = result.value
    assert outcome["wrong"] == []
    assert outcome["last"] == -1
    assert outcome["names"] == CLEAN
    assert outcome["interrupted"] > trials // 5
    figures.add("saves with a Ctrl-C", trials)
    figures.add("interrupted by it", outcome["interrupted"])


ERRORS = [KeyboardInterrupt(), eio("directory"), RuntimeError("odd")]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_at_any_step_of_a_save(place: Place, error: Any, monkeypatch: pytest.MonkeyPatch):
    """Whatever happens when, one of the two checkpoints is there, and the next save goes well.

    A save that fails once `_METADATA` is new must not take the new shards away.
    """
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 1.0)  # one that could not remove its marker
    path = place / "checkpoint"
    ostraka.save(path, make_tree(1))
    has_failed = True
    # In a bucket, where it takes long, each error comes at a third of the steps.
    thinned = isinstance(path, BucketPath)
    for step in range(ERRORS.index(error), 200, 3) if thinned else range(200):
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
    for after in range(8):
        with broken(_file, "sync_directory", eio(), after=after) as raised_at:
            if after == 0:
                with pytest.raises(SaveFailed, match="Input/output error"):
                    ostraka.save(path, make_tree(2))
            else:
                with suppress(SaveFailed):
                    ostraka.save(path, make_tree(2))
        assert ostraka.verify(path).ok, after
        assert number_in(ostraka.restore(path)) in (1, 2), after
        if not raised_at:
            break
    else:
        pytest.fail("a save syncs more directories than this test expects")


def interrupted_after_reporting(path: str) -> tuple[str, int | str]:
    """Ctrl-C reaches a process that has reported and waits for process 0 to commit."""
    me = jax.process_index()
    like = make_tree(0)
    ostraka.save(path, make_tree(1))
    real_await = _coordinate.Operation._await_answer
    committing = at(path + ".committing")
    interrupted = at(path + ".interrupted")

    def wait_for(mark: Place) -> None:
        deadline = time.monotonic() + LONG_S
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def await_answer(operation: Any, stage: str) -> Any:
        if me == 1 and stage == "commit":
            wait_for(committing)
            raise KeyboardInterrupt
        return real_await(operation, stage)

    def hold_the_commit(verb: str, name: str) -> None:
        if verb == "put" and name == "_METADATA":
            committing.touch()
            wait_for(interrupted)

    said = "saved"
    with patch.object(_coordinate.Operation, "_await_answer", await_answer):
        try:
            ostraka.save(FaultyStore(path, before=hold_the_commit), make_tree(2))
        except (SaveFailed, KeyboardInterrupt) as error:
            said = f"{type(error).__name__}: {error}"
        if me == 1:
            interrupted.touch()
    meet("done")
    return said, number_in(ostraka.restore(path, like=like))


def test_an_interrupt_while_another_process_commits(place: Place):
    path = place / "checkpoint"
    results = run_processes(interrupted_after_reporting, str(path), processes=3)
    assert results[1].value[0].startswith("KeyboardInterrupt")
    assert len({result.value[1] for result in results}) == 1
    assert results[0].value[1] in (1, 2)
    assert ostraka.verify(path).ok


# Two at once


def test_two_saves_to_one_path(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.2)  # so that it is soon known to be alive
    path = place / "checkpoint"
    ostraka.save(path, make_tree(1))
    writing, go_on = threading.Event(), threading.Event()

    def before(verb: str, name: str) -> None:
        if verb == "write":
            writing.set()
            assert go_on.wait(60)

    store = FaultyStore(path, before=before)
    first = threading.Thread(target=ostraka.save, args=(store, make_tree(2)))
    first.start()
    assert writing.wait(60)
    try:
        with pytest.raises(Busy, match="another save to .* is under way") as caught:
            ostraka.save(path, make_tree(3))
        assert str(path) in str(caught.value)
        assert number_in(ostraka.restore(path)) == 1
    finally:
        go_on.set()
        first.join()
    assert number_in(ostraka.restore(path)) == 2
    ostraka.save(path, make_tree(4))
    assert number_in(ostraka.restore(path)) == 4
    assert names_in(path) == CLEAN


def test_two_saves_to_one_place_in_memory():
    path = "memory://failures/busy"
    ostraka.save(path, {"a": 1})
    with claimed(open_store(path)), pytest.raises(Busy, match="another save to memory://"):
        ostraka.save(path, {"a": 2})
    ostraka.save(path, {"a": 3})
    assert ostraka.restore(path) == {"a": 3}


def test_two_paths_at_once(place: Place):
    """Saves to different paths don't get in each other's way."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(3):
                ostraka.save(place / str(number), make_tree(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [number_in(ostraka.restore(place / str(n))) for n in range(4)] == [0, 1, 2, 3]


def overwrite_or_read(
    path: str, root: str, seconds: float, leaves: int, nbytes: int
) -> dict[str, Any]:
    """One process overwrites a path again and again, the others restore from it."""
    values = [np.zeros(nbytes // 4, np.int32) for _ in range(leaves)]

    def tree(number: int) -> dict[str, Any]:
        return {"number": number, "values": [value + number for value in values]}

    role = take_turn(root)
    count = 0
    found: list[Any] = []
    if role == 0:
        ostraka.save(path, tree(0))
        Path(f"{root}/ready").touch()
        end = time.monotonic() + seconds
        while time.monotonic() < end or count < 4 or not have_read(root, 2):
            count += 1
            ostraka.save(path, tree(count))
            if time.monotonic() > end:
                time.sleep(0.2)  # for a reader that is too slow
        Path(f"{root}/over").touch()
        return {"role": "writer", "count": count}
    while not Path(f"{root}/ready").exists():
        time.sleep(0.01)
    last, versions = 0, set[int]()
    while not Path(f"{root}/over").exists():
        number = read_number(path)
        if str(number).startswith("Busy: "):
            continue  # it was kept from reading for long, and nothing wrong was returned
        count += 1
        if count == 4:
            Path(f"{root}/reader {role}").touch()
        if not isinstance(number, int) or number < last:
            found.append((last, number))
        else:
            last = number
            versions.add(number)
        if role == 2:
            with suppress(BaseException):
                report = ostraka.verify(path, raises=False)
                found += [str(problem) for problem in report.problems[:1]]
    return {"role": "reader", "count": count, "versions": len(versions), "wrong": found[:5]}


def have_read(root: str, readers: int) -> bool:
    return len(list(Path(root).glob("reader *"))) == readers


def take_turn(root: str) -> int:
    """A number that no other process has."""
    for number in range(100):
        with suppress(FileExistsError):
            os.close(os.open(f"{root}/turn {number}", os.O_CREAT | os.O_EXCL))
            return number
    raise AssertionError


@pytest.mark.parametrize(
    ("leaves", "nbytes", "seconds"),
    [
        (3, 64, 4.0),
        (20, 1 << 18, 4.0),
        pytest.param(3, 64, 120.0, marks=pytest.mark.soak),
        pytest.param(200, 1 << 16, 120.0, marks=pytest.mark.soak),
    ],
)
def test_reading_while_another_process_overwrites(
    place: Place, tmp_path: Path, leaves: int, nbytes: int, seconds: float, figures: Figures
):
    results = run_processes(
        overwrite_or_read,
        str(place / "checkpoint"),
        str(tmp_path),
        seconds,
        leaves,
        nbytes,
        processes=3,
        distributed=False,
        timeout_s=seconds + 200,
    )
    outcomes = [result.value for result in results]
    (writer,) = [outcome for outcome in outcomes if outcome["role"] == "writer"]
    readers = [outcome for outcome in outcomes if outcome["role"] == "reader"]
    assert len(readers) == 2
    for reader in readers:
        assert reader["wrong"] == [], (reader, writer)
        assert reader["count"] > 3
    assert writer["count"] > 3
    figures.add("saves over what is being read", writer["count"])
    figures.add("reads", sum(reader["count"] for reader in readers))


def test_the_index_of_a_failed_save_is_gone(place: Place):
    """Nothing that a failed save wrote is ever taken for a part of a later one."""
    path = place / "checkpoint"
    with (
        broken(_commit, "encode_metadata", RuntimeError("odd")),
        pytest.raises(RuntimeError, match="odd"),
    ):
        ostraka.save(path, make_tree(1))
    assert not path.exists()
    ostraka.save(path, make_tree(2))
    (index,) = path.glob("shards-*/process_*.json")
    named = json.loads(index.read_bytes())["files"]
    assert sorted(named) == sorted(file.name for file in path.glob("shards-*/*.safetensors"))
