"""Watching a run: which steps are seen, and that none is deleted while it is read."""

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import pytest

import ostraka
from ostraka import Manager
from ostraka.errors import Busy, Damaged, StoreError
from ostraka.manager._keep import check_keep
from ostraka.manager.leases import ReaderLease, is_lease, remove_expired_leases
from ostraka.manager.retain import Retention, remove_step
from ostraka.manager.steps import Root
from ostraka.manager.watch import Watch
from ostraka.storage import MemoryStore, Store, _claim, _memory, open_store
from ostraka.testing import FaultyStore, kill_when, run_processes
from places import names_of
from runs import LONG_S, damage, fill, tree_of, wait_until

KEEP_ONE = check_keep(1, None, None, None, None)


def writing(root: Any, **options: Any) -> Manager:
    return Manager(root, asynchronous=False, **{"keep": 1, **options})


def save(writer: Manager, *steps: int) -> list[int]:
    """Save steps, and return those that are there then."""
    for step in steps:
        writer.save(step, tree_of(step))
    return writer.steps()


def watching(root: Any, **options: Any) -> Generator[int]:
    return Manager(root, read_only=True).watch(**{"timeout_s": 0, **options})


def leases(root: Any) -> list[str]:
    """What the leases in a root cover."""
    names = filter(is_lease, open_store(root).list())
    return sorted("-".join(name.split("-")[-2:]) for name in names)


# Which steps


def test_the_steps_that_are_there_then_new_ones(tmp_path: Path):
    root = tmp_path
    with writing(root, keep=None) as writer:
        save(writer, 1, 2, 5)
        reader = Manager(root, read_only=True)
        seen: list[int] = []
        for step in reader.watch(timeout_s=0):
            assert reader.restore(step)["step"] == step
            assert leases(root) == [f"step-{step}"]
            seen.append(step)
            if 5 <= step < 8:
                save(writer, step + 1)
        assert seen == [1, 2, 5, 6, 7, 8]
        assert leases(root) == []
        assert list(reader.watch(after=6, timeout_s=0)) == [7, 8]
        assert list(reader.watch(after=8, timeout_s=0)) == []


def test_only_the_newest(tmp_path: Path):
    """Nothing waits for its reader."""
    with writing(tmp_path) as writer:
        save(writer, 1, 2)
        seen: list[int] = []
        for step in watching(tmp_path, newest_only=True):
            seen.append(step)
            assert leases(tmp_path) == [f"step-{step}"]
            if step < 6:
                assert save(writer, step + 1, step + 2) == [step, step + 2]
    assert seen == [2, 4, 6]


def test_waits_for_a_run_that_has_not_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It says so, and makes nothing."""
    root = tmp_path / "later"
    with caplog.at_level(logging.INFO, "ostraka"):
        assert list(watching(root)) == []
    assert f"waiting for {root}, which is not there yet" in caplog.text
    assert not root.exists()
    watched = watching(root, timeout_s=None)
    training = threading.Thread(target=fill, args=(root, 1, 2))
    training.start()
    assert [next(watched), next(watched)] == [1, 2]
    training.join()
    assert leases(root) == ["step-2"]
    watched.close()
    assert leases(root) == []


def test_what_is_no_step_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It ends after the timeout, and not before."""
    fill(tmp_path, 1, 2, 3, 4)
    damage(tmp_path, 2, 4, name="_METADATA")
    (tmp_path / "step_00000005" / "shards-0123456789abcdef").mkdir(parents=True)  # being saved
    began_s = time.monotonic()
    assert list(watching(tmp_path, timeout_s=0.3)) == [1, 3]
    assert time.monotonic() - began_s >= 0.3
    assert caplog.text.count("step 2 is left out") == 1
    assert caplog.text.count("step 4 is left out") == 1  # although it looks again and again
    damage(tmp_path, 3)
    reader = Manager(tmp_path, read_only=True)
    for step in reader.watch(after=2, timeout_s=0):
        with pytest.raises(Damaged, match="step_00000003"):
            reader.restore(step)


# Leases


def test_retention_leaves_what_is_read(root: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.05)
    store = open_store(root)
    with writing(root) as writer:
        save(writer, 1)
        reader = Manager(root, read_only=True)
        watched = reader.watch(timeout_s=0, backlog=0)
        assert next(watched) == 1
        (name,) = filter(is_lease, store.list())
        before = store.look(name)
        wait_until(lambda: store.look(name) != before)  # It is renewed.
        assert save(writer, 2, 3) == [1, 3]
        with pytest.raises(Busy, match=rf"step 1 of .* is being read by .*\.{os.getpid()}\."):
            writer.delete(1)
        assert reader.restore(1)["step"] == 1
        writer.save(1, tree_of(100), force=True)
        assert reader.restore(1)["step"] == 100
        assert next(watched) == 3
        assert save(writer, 4) == [3, 4]
        watched.close()
        assert leases(root) == []
        assert save(writer, 5) == [5]
        writer.delete(5)
        assert writer.steps() == []


def test_one_who_waits_keeps_the_next_step(tmp_path: Path):
    with writing(tmp_path) as writer:
        save(writer, 1)
        lease = ReaderLease(open_store(tmp_path), backlog=0)
        lease.wait_from(2)
        assert save(writer, 2, 3, 4) == [2, 4]
        lease.begin(4)  # Of the two leases that it has now only this one counts.
        assert leases(tmp_path) == ["from-2", "step-4"]
        assert save(writer, 5) == [4, 5]
        lease.take_back()
        assert save(writer, 6) == [4, 6]
        lease.release()
        assert save(writer, 7) == [7]


LEASE = "_LEASE-there.7.0123-step-1"


def test_the_lease_of_a_dead_reader_ends(root: Any, monkeypatch: pytest.MonkeyPatch):
    """Retention removes it, and so does a manager that opens."""
    store = open_store(root)
    with writing(root) as writer:
        save(writer, 1)
        store.touch(LEASE, create=True)
        assert save(writer, 2) == [1, 2]
        monkeypatch.setattr(_claim, "DEAD_AFTER_S", -5.0)  # instead of waiting for it
        assert save(writer, 3) == [3]
        assert leases(root) == []
    store.touch(LEASE, create=True)
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 30.0)
    Manager(root).close()
    assert leases(root) == ["step-1"]
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", -5.0)
    Manager(root).close()
    assert leases(root) == []


# A clock that ran ahead, and was set back


def touch_ahead(path: Path) -> None:
    path.touch()
    ahead_s = time.time() + 3600
    os.utime(path, (ahead_s, ahead_s))


def test_retention_watches_a_lease_from_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 0.1)
    with writing(tmp_path) as writer:
        save(writer, 1)
        touch_ahead(tmp_path / LEASE)
        numbers = itertools.count(2)
        assert 1 in save(writer, next(numbers))
        wait_until(lambda: 1 not in save(writer, next(numbers)))
        assert leases(tmp_path) == []
        touch_ahead(tmp_path / f"{LEASE[:-1]}{writer.latest()}")
        writer.delete(writer.latest() or 0)  # by hand
        assert writer.steps() == []


def test_leases_and_claims_from_the_future_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 0.1)
    fill(tmp_path, 1)
    touch_ahead(tmp_path / LEASE)
    assert remove_expired_leases(open_store(tmp_path)) == []
    assert remove_expired_leases(open_store(tmp_path), wait=True) == [LEASE]
    touch_ahead(tmp_path / "step_00000001" / f"_CLAIM-{'a' * 32}")
    assert next(watching(tmp_path, timeout_s=LONG_S)) == 1


def test_without_permission_to_write_a_lease(tmp_path: Path):
    fill(tmp_path, 1, 2)
    refused = StoreError("can't write: Read-only file system")
    store = FaultyStore(tmp_path, fail={"touch": refused})
    with pytest.warns(UserWarning, match="may be deleted while they are read, .*: can't") as warned:
        assert list(Manager(store, read_only=True).watch(timeout_s=0)) == [1, 2]
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]


def test_closing_the_manager_ends_the_lease(tmp_path: Path):
    fill(tmp_path, 1)
    with Manager(tmp_path, read_only=True) as reader:
        watched = reader.watch()
        assert next(watched) == 1
    assert leases(tmp_path) == []
    with pytest.raises(ValueError, match="is closed"):
        next(watched)


def watch_and_fork(root: str) -> list[str]:
    """The leases after the end of a fork of a process that watches, which does not close them."""
    manager = Manager(root, read_only=True)
    watched = manager.watch()
    assert next(watched) == 1
    warnings.simplefilter("ignore")  # JAX warns of forks
    child = os.fork()
    if not child:
        manager.close()
        del watched
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    return leases(root)


def test_the_end_of_a_program_ends_the_lease_and_that_of_a_fork_does_not(tmp_path: Path):
    fill(tmp_path, 1)
    (result,) = run_processes(watch_and_fork, str(tmp_path), processes=1)
    assert result.value == ["step-1"]
    assert leases(tmp_path) == []


# A reader that is behind


def test_what_waits_for_a_reader_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with writing(tmp_path) as writer:
        save(writer, 1)
        reader = Manager(tmp_path, read_only=True)
        watched = reader.watch(timeout_s=0, backlog=3)
        assert next(watched) == 1
        save(writer, 2, 3, 4, 5)
        assert "are deleted before" not in caplog.text
        # 5 and 6 came when three were waiting for it already.
        assert save(writer, 6, 7) == [1, 2, 3, 4, 7]
        assert leases(tmp_path) == ["step-1"]
        missed = [r.getMessage() for r in caplog.records if "are deleted before" in r.getMessage()]
        assert [text.partition("came to them: ")[2] for text in missed] == [
            "5; its backlog is 3",
            "6; its backlog is 3",
        ]
        assert all(f".{os.getpid()}." in text for text in missed)
        for step in (2, 3, 4):
            assert next(watched) == step
            assert reader.restore(step)["step"] == step
        assert save(writer, 8) == [4, 7, 8]
        assert list(watched) == [7, 8]
        assert caplog.text.count("are deleted before") == 2
        assert leases(tmp_path) == []
        assert save(writer, 9) == [9]


def test_a_run_says_once_which_reader_is_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with writing(tmp_path, keep=2) as writer:
        save(writer, 1)
        watched = watching(tmp_path)
        assert next(watched) == 1
        assert save(writer, 2, 3, 4, 5) == [1, 2, 3, 4, 5]
        assert caplog.text == ""  # Two are kept for it, and two by the run itself.
        save(writer, 6, 7, 8)
        (record,) = caplog.records
        assert f".{os.getpid()}." in record.getMessage()
        assert "has fallen behind: 3 steps that would be deleted are kept" in record.getMessage()
        assert "up to 64 may be" in record.getMessage()
        watched.close()


def test_two_readers_one_of_which_begins_in_the_middle(tmp_path: Path):
    with writing(tmp_path) as writer:
        save(writer, 1)
        first = watching(tmp_path, backlog=2)
        assert next(first) == 1
        save(writer, 2, 3)
        second = watching(tmp_path, after=2, backlog=1)
        assert next(second) == 3
        assert save(writer, 4, 5, 6) == [1, 2, 3, 4, 6]
        first.close()
        assert save(writer, 7) == [3, 4, 7]
        assert list(second) == [4, 7]
        assert leases(tmp_path) == []


def test_a_step_that_waits_is_deleted_by_hand_and_missed_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with writing(tmp_path, keep=None) as writer:
        save(writer, 1, 2, 3)
        watched = watching(tmp_path)
        assert next(watched) == 1
        writer.delete(3)
        assert "came to them: 3; its backlog is 64" in caplog.text
        assert leases(tmp_path) == ["step-1"]
        assert list(watched) == [2]
        assert leases(tmp_path) == []


def test_a_reader_that_a_listing_has_missed_is_looked_for_again(tmp_path: Path):
    """Names are listed one after the other, while a reader moves on."""
    hides = False

    class Hiding(FaultyStore):
        def list(self) -> list[str]:
            nonlocal hides
            names = super().list()
            if hides:
                names, hides = [name for name in names if not is_lease(name)], False
            return names

    fill(tmp_path, 1, 2, 3)
    retention = Retention(Root(Hiding(tmp_path)), KEEP_ONE)
    lease = ReaderLease(open_store(tmp_path), backlog=2)
    lease.wait_from(1)
    retention.run(just_saved=3)
    assert [step.step for step in Root(tmp_path).steps()] == [1, 2, 3]
    hides = True
    retention.run(just_saved=3)
    assert not hides
    assert [step.step for step in Root(tmp_path).steps()] == [1, 2, 3]
    lease.release()
    retention.run(just_saved=3)
    assert [step.step for step in Root(tmp_path).steps()] == [3]


# A reader and a deletion at the same time


def gated(store: Store, permits: threading.Semaphore, arrived: threading.Semaphore) -> FaultyStore:
    """A store whose user stops before each verb until it gets a permit."""

    def before(verb: str, name: str) -> None:
        arrived.release()
        assert permits.acquire(timeout=LONG_S)

    return FaultyStore(store, before=before)


def copy_of(store: Store) -> MemoryStore:
    copy = MemoryStore(uuid.uuid4().hex)
    for file in store.files(""):
        copy.put(file.name, store.get(file.name))
    return copy


def race(store: Store, deletes_before: int, reads: int) -> tuple[int | None, bool, bool]:
    """Retention makes some calls, then a reader some, then retention ends, then the reader.

    Retention's calls count from when it begins to delete step 1. Returns the step that the reader
    got, and whether retention and the reader came that far.
    """
    permits, arrived = threading.Semaphore(0), threading.Semaphore(0)
    root = Root(gated(store, permits, arrived))
    watch = Watch(root, after=None, newest_only=False, backlog=0, timeout_s=0.0, warn=pytest.fail)
    got: list[int | None] = []

    def read() -> None:
        step = watch.wait()
        got.append(None if step is None else step.step)
        arrived.release()

    reader = threading.Thread(target=read)
    calls = itertools.count()
    reached = [False, False]
    has_begun = False
    guard: Any = _memory._guard

    def before(verb: str, name: str) -> None:
        nonlocal has_begun
        if guard._is_owned():
            return  # The store in memory checks and removes under one lock: nobody comes between.
        has_begun = has_begun or verb == "lock"
        if has_begun and next(calls) == deletes_before:
            reached[0] = True
            reader.start()
            for _ in range(reads):
                assert arrived.acquire(timeout=LONG_S)
                permits.release()
            assert arrived.acquire(timeout=LONG_S)
            reached[1] = not got

    retention = Retention(Root(FaultyStore(store, before=before)), KEEP_ONE)
    retention.run(just_saved=2)
    if not reached[0]:
        return None, False, False
    permits.release(1000)
    reader.join(LONG_S)
    if got[0] is not None:
        assert ostraka.verify(store.at(f"step_{got[0]:08d}")).ok
    watch.close()
    return got[0], reached[0], reached[1]


def test_a_reader_and_a_deletion_at_the_same_time():
    """Wherever one interrupts the other: what the reader gets is whole, and stays."""
    filled = MemoryStore(uuid.uuid4().hex)
    fill(filled, 1, 2)
    outcomes: set[int | None] = set()
    deletes_before = 0
    while race(copy_of(filled), deletes_before, 0)[1]:
        for reads in itertools.count():
            step, _, is_reading = race(copy_of(filled), deletes_before, reads)
            outcomes.add(step)
            if not is_reading:
                break
        deletes_before += 1
    assert deletes_before > 8
    assert {1, 2} <= outcomes


def test_one_who_finds_a_claim_waits_until_the_step_is_spared_or_gone(tmp_path: Path):
    fill(tmp_path, 1, 2)
    has_turned_back = threading.Event()

    def before(verb: str, name: str) -> None:
        if verb == "delete" and name.endswith("-step-1"):
            has_turned_back.set()

    root = Root(FaultyStore(tmp_path, before=before))
    watch = Watch(root, after=None, newest_only=False, backlog=0, timeout_s=None, warn=pytest.fail)
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.append(watch.wait()))

    def look_for_leases(verb: str, name: str) -> None:
        if verb == "look" and name == theirs and not reader.is_alive():
            reader.start()
            assert has_turned_back.wait(LONG_S)
            assert not got

    # Another reader has it, so it is spared.
    other = ReaderLease(open_store(tmp_path), backlog=0)
    other.begin(1)
    (theirs,) = filter(is_lease, open_store(tmp_path).list())
    with pytest.raises(Busy, match="is being read by"):
        remove_step(Root(FaultyStore(tmp_path, before=look_for_leases)), 1)
    other.release()
    reader.join(LONG_S)
    assert got[0].step == 1
    watch.close()


def test_the_claim_of_a_dead_one_is_waited_for_no_longer_than_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(tmp_path, 1)
    (tmp_path / "step_00000001" / f"_CLAIM-{'a' * 32}").touch()
    assert list(watching(tmp_path)) == []
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", -5.0)
    assert list(watching(tmp_path)) == [1]


# Other processes

TRAIN = """
import sys
import numpy as np
from ostraka import Manager

root, (done, first, last, ahead) = sys.argv[1], map(int, sys.argv[2:])
with Manager(root, keep=2) as manager:
    assert manager.latest() == (first - 1 or None), manager.steps()
    for step in range(first, last + 1):
        while done < step - ahead:
            done = int(sys.stdin.readline())
        manager.save(step, {"a": np.full(8, step), "step": step})
        manager.wait()
        assert len(manager.steps()) <= ahead, manager.steps()
        print("saved", step, flush=True)
"""


class Run:
    """A training run in another process, at most `ahead` steps ahead of its reader.

    So what is seen does not depend on how this machine shares out its time. `done` is the last step
    that the reader is through with when the run begins.
    """

    def __init__(self, root: Path, first: int, last: int, *, ahead: int = 3, done: int = 0):
        self.first = first
        self.last = last
        numbers = map(str, (done, first, last, ahead))
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAIN, str(root), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, seen: list[int]) -> None:
        """The reader waits for the next after these steps."""
        self.check()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # It may have saved its last step, and ended.
            os.write(self.process.stdin.fileno(), f"{seen[-1] if seen else 0}\n".encode())

    def check(self) -> None:
        """One that has failed saves no more steps: a reader would wait for ever."""
        assert self.process.poll() in (None, 0)

    def kill_after(self, step: int) -> None:
        """Once it has saved this step and deleted what it does not keep: with no claim."""
        assert self.process.stdout is not None
        for saved in range(self.first, step + 1):
            assert self.process.stdout.readline() == f"saved {saved}\n"
        self.process.kill()
        assert self.process.communicate()[0] == ""

    def end(self) -> None:
        saved = [f"saved {step}\n" for step in range(self.first, self.last + 1)]
        assert self.process.communicate(timeout=LONG_S)[0] == "".join(saved)
        assert self.process.returncode == 0


class Reader:
    """Restores each step, once a later one is there if so told."""

    def __init__(self, root: Path, run: Callable[[], Run], **options: Any):
        self._root = root
        self._start = run
        self.run: Run | None = None
        self.seen: list[int] = []
        self._manager = Manager(FaultyStore(root, before=self._tell), read_only=True)
        self.watched = self._manager.watch(**options)

    def read_up_to(self, last: int, later: Callable[[int], int]) -> Run:
        while not self.seen or self.seen[-1] < last:
            step = next(self.watched)
            assert self.run is not None
            name = f"step_{min(later(step), self.run.last):08d}"
            wait_until(lambda run=self.run, name=name: self._is_there(run, name))
            assert self._manager.restore(step)["step"] == step
            self.seen.append(step)
        assert self.run is not None
        return self.run

    def _is_there(self, run: Run, name: str) -> bool:
        run.check()
        return (self._root / name / "_METADATA").exists()

    def _tell(self, verb: str, name: str) -> None:
        if (verb, name) == ("list", ""):  # It has its lease before it looks at the root.
            self.run = self.run or self._start()
            self.run.tell(self.seen)


@pytest.mark.parametrize(
    ("steps", "ahead"), [(16, 8), pytest.param(500, 500, marks=pytest.mark.soak)]
)
def test_a_run_that_does_not_wait_is_seen_whole(tmp_path: Path, steps: int, ahead: int):
    """It saves as fast as it can, up to as many steps as the backlog has room for."""

    def later(step: int) -> int:
        return step + ahead - 1 if ahead < steps and step % ahead == 1 else step

    reader = Reader(tmp_path, lambda: Run(tmp_path, 1, steps, ahead=ahead), backlog=ahead)
    run = reader.read_up_to(steps, later)
    reader.watched.close()
    assert reader.seen == list(range(1, steps + 1))
    run.end()
    fill(tmp_path, steps + 1, keep=2)
    assert names_of(tmp_path) == [f"step_{steps:08d}", f"step_{steps + 1:08d}"]


def test_a_run_that_is_killed_and_goes_on(tmp_path: Path):
    """Each step is restored when only its lease still keeps it: two later ones are there."""
    reader = Reader(tmp_path, lambda: Run(tmp_path, 1, 100))
    # Having saved step 4, it waits until the reader asks for the next one.
    reader.read_up_to(2, lambda step: step + 2).kill_after(4)
    reader.run = Run(tmp_path, 5, 8, done=2)
    reader.read_up_to(8, lambda step: step + 2)
    assert reader.seen == list(range(1, 9))
    reader.watched.close()
    reader.run.end()
    left = set(names_of(tmp_path)) - {"step_00000006"}
    assert left == {"step_00000007", "step_00000008"}


def read_and_hang(root: str) -> None:
    for step in Manager(root, read_only=True).watch():
        Path(f"{root}.read").write_text(str(step))
        time.sleep(1000)


def test_a_reader_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "root"
    with writing(root) as writer:
        save(writer, 1)
        (result,) = run_processes(
            read_and_hang,
            str(root),
            processes=1,
            check=False,
            on_start=kill_when(0, appears=f"{root}.read"),
        )
        assert result.exit_code == -signal.SIGKILL
        assert save(writer, 2, 3) == [1, 2, 3]  # It is not known yet that it died.
        monkeypatch.setattr(_claim, "DEAD_AFTER_S", -5.0)
        assert save(writer, 4) == [4]
    assert leases(root) == []


def evaluate_together(root: str) -> list[Any]:
    reader = Manager(root, read_only=True)
    seen: list[Any] = []
    for step in reader.watch(timeout_s=LONG_S, after=1):
        seen.append([step, reader.restore(step)["step"]])
        if step == 5:
            break
    if jax.process_index() == 0:
        seen.append(leases(root))
    return seen


def test_all_processes_of_an_evaluation_get_the_same_steps(tmp_path: Path):
    fill(tmp_path, 1, 2, 3)

    def train(_: object) -> None:
        def save() -> None:
            wait_until(lambda: leases(tmp_path) == ["from-4"])
            fill(tmp_path, 4)
            wait_until(lambda: leases(tmp_path) == ["from-5"])
            fill(tmp_path, 5)

        threading.Thread(target=save).start()

    results = run_processes(evaluate_together, str(tmp_path), processes=2, on_start=train)
    seen = [[step, step] for step in (2, 3, 4, 5)]
    assert [result.value for result in results] == [[*seen, []], seen]
    assert remove_expired_leases(open_store(tmp_path)) == []
