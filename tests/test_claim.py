"""Claims: one writer at a time, with locks and without, whoever stops where."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from figures import Figures
from ostraka.errors import Busy, SaveFailed
from ostraka.storage import Claim, LocalStore, MemoryStore, _claim, claimed, is_claim
from ostraka.testing import FaultyStore

LONG_S = 60.0
SHARED_MEMORY = "/dev/shm"


def tree_of(number: int) -> dict[str, Any]:
    return {"w": np.full(100, number), "number": number}


def number_in(path: Any) -> int:
    tree = ostraka.restore(path)
    (found,) = {int(tree["number"]), *np.unique(tree["w"]).tolist()}
    return found


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory where a sync costs nothing, if there is one."""
    if not os.path.isdir(SHARED_MEMORY):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        yield Path(directory)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Owners that stand still are soon taken for dead."""
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.02)
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 0.1)
    monkeypatch.setattr(_claim, "_PAUSES_S", (0.01, 0.02, 0.04))
    for kind in (LocalStore, MemoryStore):
        monkeypatch.setattr(kind, "parts", replace(kind.parts, look_every_s=0.01))
    return monkeypatch


class Saver:
    """A save in a thread, to a place without locks, that stops before one of its steps.

    With `suspended` its claim is not renewed either, as if the whole process stood still.
    """

    def __init__(self, path: Path, number: int, stop_at: int | None, *, suspended: bool = True):
        self.number = number
        self.outcome: Any = None
        self.steps = 0
        self._stop_at = stop_at
        self._suspended = suspended
        self._stopped, self._go_on = threading.Event(), threading.Event()
        self.store = FaultyStore(path, has_locks=False, before=self._before)
        self._thread = threading.Thread(target=self._save)
        self._thread.start()

    def run_until_stopped(self) -> None:
        assert self._stopped.wait(LONG_S)

    def finish(self) -> None:
        self._go_on.set()
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()

    def _save(self) -> None:
        try:
            ostraka.save(self.store, tree_of(self.number))
            self.outcome = "returned"
        except (Busy, SaveFailed) as error:
            self.outcome = error
        except BaseException as error:
            self.outcome = f"wrong: {type(error).__name__}: {error}"
        finally:
            self._stopped.set()

    def _before(self, verb: str, name: str) -> None:
        renews = verb == "touch" and threading.current_thread() is not self._thread
        if not renews:
            self.steps += 1
            if self.steps == self._stop_at:
                self._stopped.set()
        is_stopped = self._stop_at is not None and self.steps >= self._stop_at
        if is_stopped and (self._suspended or not renews):
            assert self._go_on.wait(LONG_S)


def count_steps(path: Path) -> int:
    saver = Saver(path, 0, None)
    saver.finish()
    assert saver.outcome == "returned"
    return saver.steps


def assert_consistent(path: Path, savers: list[Saver], before: int | None) -> None:
    outcomes = {saver.number: saver.outcome for saver in savers}
    assert not [text for text in outcomes.values() if str(text).startswith("wrong")], outcomes
    returned = [saver.number for saver in savers if saver.outcome == "returned"]
    if returned or before is not None:
        assert ostraka.verify(path).ok, outcomes
        assert number_in(path) in (returned or [before]), outcomes
    # Nothing that they left is in the way.
    ostraka.save(path, tree_of(99))
    assert number_in(path) == 99
    assert sorted(name.split("-")[0] for name in os.listdir(path)) == ["_METADATA", "shards"]


# Two savers to one path, without locks


@pytest.mark.parametrize("over", [False, True], ids=["new", "over"])
def test_a_save_that_is_suspended_at_any_step_while_another_runs(
    fast: Path, hurried: pytest.MonkeyPatch, over: bool
):
    steps = count_steps(fast / "counted") + 10
    taken_over = 0
    for step in range(1, steps):
        path = fast / str(step)
        if over:
            ostraka.save(path, tree_of(0))
        first = Saver(path, 1, step)
        first.run_until_stopped()
        second = Saver(path, 2, None)
        second.finish()
        first.finish()
        assert_consistent(path, [first, second], 0 if over else None)
        assert second.outcome == "returned", step
        taken_over += first.outcome != "returned"
    assert taken_over > 5


def test_a_save_that_is_slow_at_any_step_is_not_taken_for_dead(
    fast: Path, hurried: pytest.MonkeyPatch
):
    hurried.setattr(_claim, "DEAD_AFTER_S", LONG_S)
    refused = 0
    for step in range(1, count_steps(fast / "counted") + 1):
        path = fast / str(step)
        first = Saver(path, 1, step, suspended=False)
        first.run_until_stopped()
        second = Saver(path, 2, None)
        second.finish()
        first.finish()
        assert first.outcome == "returned", step
        refused += isinstance(second.outcome, Busy)
        assert_consistent(path, [first, second], None)
    assert refused > 5


@pytest.mark.parametrize("verb", ["create", "publish", pytest.param("", marks=pytest.mark.soak)])
def test_two_saves_that_are_suspended_at_any_two_steps(
    fast: Path, hurried: pytest.MonkeyPatch, verb: str, figures: Figures
):
    """The first stands still, then the second; the first goes on to its end, then the second."""
    ostraka.save(fast / "counted", tree_of(0))
    whole = Saver(fast / "counted", 1, None)
    whole.finish()
    calls = [name for name, _ in whole.store.calls]
    # The last one of its kind: of `publish` the moment of the commit itself.
    chosen = [len(calls) - calls[::-1].index(verb)] if verb else range(1, len(calls) + 5)
    for first_step in chosen:
        for second_step in range(1, len(calls) + 5):
            path = fast / f"{first_step}-{second_step}"
            ostraka.save(path, tree_of(0))
            first = Saver(path, 1, first_step)
            first.run_until_stopped()
            second = Saver(path, 2, second_step)
            second.run_until_stopped()
            first.finish()
            second.finish()
            assert_consistent(path, [first, second], 0)
            figures.add("pairs of saves, each suspended at one of its steps")


def test_a_save_whose_shards_are_gone_is_not_committed(tmp_path: Path):
    """Whoever removed them: a program that cleans up, for instance."""

    def remove(verb: str, name: str) -> None:
        if verb == "files" and name.startswith("shards-"):
            for file in tmp_path.glob("c/shards-*/*.safetensors"):
                file.unlink()

    with pytest.raises(
        SaveFailed, match=r"shard_00000.safetensors, which this save has written, is gone"
    ):
        ostraka.save(FaultyStore(tmp_path / "c", before=remove), tree_of(1))
    assert not (tmp_path / "c").exists()


def test_a_save_whose_shards_were_cut_short_is_not_committed(tmp_path: Path):
    def cut(verb: str, name: str) -> None:
        if verb == "files" and name.startswith("shards-"):
            for file in tmp_path.glob("c/shards-*/*.safetensors"):
                os.truncate(file, 100)

    with pytest.raises(SaveFailed, match="has 100 of its .* bytes: another save or program"):
        ostraka.save(FaultyStore(tmp_path / "c", before=cut), tree_of(1))


def test_a_metadata_that_was_replaced_meanwhile_is_not_replaced(tmp_path: Path):
    """By a program that knows nothing of claims, such as cp."""
    ostraka.save(tmp_path / "c", tree_of(1))
    ostraka.save(tmp_path / "other", tree_of(2))

    def copy(verb: str, name: str) -> None:
        if (verb, name) == ("publish", "_METADATA"):
            data = (tmp_path / "other" / "_METADATA").read_bytes()
            (tmp_path / "copy").write_bytes(data)
            os.replace(tmp_path / "copy", tmp_path / "c" / "_METADATA")

    with pytest.raises(SaveFailed, match="another save has replaced .*_METADATA meanwhile"):
        ostraka.save(FaultyStore(tmp_path / "c", before=copy), tree_of(3))
    data = (tmp_path / "other" / "_METADATA").read_bytes()
    assert (tmp_path / "c" / "_METADATA").read_bytes() == data


# Dead owners

SAVE_AND_DIE = """
import os, signal, sys
import numpy as np
import ostraka
from ostraka.testing import FaultyStore

def die(verb, name):
    if verb == "finish":
        os.kill(os.getpid(), signal.SIGKILL)

store = FaultyStore(sys.argv[1], has_locks=sys.argv[2] == "locks", before=die)
ostraka.save(store, {"w": np.ones(100)})
"""


@pytest.mark.parametrize("locks", ["locks", "none"])
def test_after_a_save_that_was_killed(tmp_path: Path, hurried: pytest.MonkeyPatch, locks: str):
    path = tmp_path / "c"
    killed = subprocess.run([sys.executable, "-c", SAVE_AND_DIE, path, locks], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len([name for name in os.listdir(path) if is_claim(name)]) == 1
    if locks == "locks":
        # At once: the age of the marker does not matter.
        hurried.setattr(_claim, "DEAD_AFTER_S", 1e9)
    ostraka.save(FaultyStore(path, has_locks=locks == "locks"), tree_of(1))
    assert number_in(path) == 1
    assert not [name for name in os.listdir(path) if is_claim(name)]


def test_a_marker_of_another_machine_counts_although_the_lock_is_free(
    tmp_path: Path, hurried: pytest.MonkeyPatch
):
    """As on a network file system that locks on each machine for itself."""
    hurried.setattr(_claim, "DEAD_AFTER_S", 6000.0)
    store = LocalStore(str(tmp_path))
    store.touch(f"_CLAIM-{'a' * 32}", create=True)
    said = r"is under way, or died a moment ago; .* try again in (59|60)\d\d s"
    with pytest.raises(Busy, match=said):
        Claim(store).take(wait=False)
    hurried.setattr(_claim, "DEAD_AFTER_S", 0.05)
    with claimed(store, wait=True):
        assert len([name for name in os.listdir(tmp_path) if is_claim(name)]) == 1
    assert os.listdir(tmp_path) == []


def test_the_age_of_a_marker_is_told_by_the_stores_clock(
    tmp_path: Path, hurried: pytest.MonkeyPatch
):
    """This machine's clock may be wrong by any time."""
    hurried.setattr("time.time", lambda: 0.0)
    store = FaultyStore(tmp_path, has_locks=False)
    store.touch(f"_CLAIM-{'a' * 32}", create=True)
    with claimed(store, wait=True):
        pass


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_claim_is_renewed(tmp_path: Path, hurried: pytest.MonkeyPatch, kind: str):
    store = LocalStore(str(tmp_path)) if kind == "local" else MemoryStore(str(tmp_path))
    store.prepare()
    renewed = threading.Event()
    count = iter(range(3))

    def before(verb: str, name: str) -> None:
        if verb == "touch" and next(count, None) is None:
            renewed.set()

    claim = Claim(FaultyStore(store, has_locks=False, before=before))
    claim.take(wait=True)
    try:
        assert renewed.wait(LONG_S)
        claim.check()
        for marker in filter(is_claim, store.list()):
            store.delete(marker)
        with pytest.raises(Busy, match="took this one for dead, since it had stood still"):
            claim.check()
        assert not claim.is_held()
    finally:
        claim.release()
    assert store.list() == []


def test_a_store_that_is_away_for_a_moment_does_not_end_the_renewing(
    tmp_path: Path, hurried: pytest.MonkeyPatch
):
    renewed = threading.Event()
    count = iter(range(4))

    def before(verb: str, name: str) -> None:
        number = next(count, None) if verb == "touch" else 0
        if number in (1, 2):
            raise OSError("away")
        if number is None:
            renewed.set()

    with claimed(FaultyStore(tmp_path, has_locks=False, before=before)) as claim:
        assert renewed.wait(LONG_S)
        claim.check()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"_CLAIM-{'0' * 32}", True),
        (f"_CLAIM-{'0' * 31}", False),
        (f"_CLAIM-{'g' * 32}", False),
        ("_CLAIM-", False),
        ("shards-0123456789abcdef", False),
    ],
)
def test_names_of_claims(name: str, expected: bool):
    assert is_claim(name) == expected
