"""Claims: one writer at a time, with locks and without, whoever stops where."""

import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest

import ostraka
from figures import Figures
from mounts import in_memory
from ostraka.errors import Busy, SaveFailed, StoreError
from ostraka.manager.retain import remove_step
from ostraka.manager.steps import Root
from ostraka.saving.place import collect_garbage
from ostraka.storage import Claim, LocalStore, MemoryStore, _claim, claimed, is_claim, open_store
from ostraka.testing import FaultyStore
from places import Place
from suspended import LONG_S, Suspended, hurry


def tree_of(number: int) -> dict[str, Any]:
    return {"w": np.full(100, number), "number": number}


def number_in(path: Any) -> int:
    tree = ostraka.restore(path)
    (found,) = {int(tree["number"]), *np.unique(tree["w"]).tolist()}
    return found


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A directory where a sync costs nothing, if there is one."""
    with in_memory(tmp_path) as directory:
        yield directory


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Owners that stand still are soon taken for dead."""
    hurry(monkeypatch, 0.02, 0.1, look_every_s=0.01)
    return monkeypatch


def save(number: int) -> Callable[[Any], str]:
    return lambda store: ostraka.save(store, tree_of(number)) or "returned"


def count_steps(path: Path) -> int:
    saver = Suspended(path, save(0))
    assert saver.finish() == "returned"
    return saver.steps


def assert_consistent(path: Path, first: Suspended, second: Suspended, before: int | None) -> None:
    outcomes = {1: first.outcome, 2: second.outcome}
    assert all(one == "returned" or isinstance(one, Busy | SaveFailed) for one in outcomes.values())
    returned = [number for number in outcomes if outcomes[number] == "returned"]
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
    taken_over = 0
    for step in range(1, count_steps(fast / "counted") + 10):
        path = fast / str(step)
        if over:
            ostraka.save(path, tree_of(0))
        first = Suspended(path, save(1), step)
        second = Suspended(path, save(2))
        assert second.finish() == "returned", step
        taken_over += first.finish() != "returned"
        assert_consistent(path, first, second, 0 if over else None)
    assert taken_over > 5


def test_a_save_that_is_slow_at_any_step_is_not_taken_for_dead(
    fast: Path, hurried: pytest.MonkeyPatch
):
    hurried.setattr(_claim, "DEAD_AFTER_S", LONG_S)
    refused = 0
    for step in range(1, count_steps(fast / "counted") + 1):
        path = fast / str(step)
        first = Suspended(path, save(1), step, renews=True)
        second = Suspended(path, save(2))
        refused += isinstance(second.finish(), Busy)
        assert first.finish() == "returned", step
        assert_consistent(path, first, second, None)
    assert refused > 5


@pytest.mark.parametrize("verb", ["create", "publish", pytest.param("", marks=pytest.mark.soak)])
def test_two_saves_that_are_suspended_at_any_two_steps(
    fast: Path, hurried: pytest.MonkeyPatch, verb: str, figures: Figures
):
    """The first stands still, then the second; the first goes on to its end, then the second."""
    ostraka.save(fast / "counted", tree_of(0))
    whole = Suspended(fast / "counted", save(1))
    whole.finish()
    calls = [name for name, _ in whole.store.calls]
    # The last one of its kind: of `publish` the moment of the commit itself.
    chosen = [len(calls) - calls[::-1].index(verb)] if verb else range(1, len(calls) + 5)
    for first_step in chosen:
        for second_step in range(1, len(calls) + 5):
            path = fast / f"{first_step}-{second_step}"
            ostraka.save(path, tree_of(0))
            first = Suspended(path, save(1), first_step)
            second = Suspended(path, save(2), second_step)
            first.finish()
            second.finish()
            assert_consistent(path, first, second, 0)
            figures.add("pairs of saves, each suspended at one of its steps")


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (os.unlink, "shard_00000.safetensors, which this save has written, is gone"),
        (lambda file: os.truncate(file, 100), "has 100 of its .* bytes: another save or program"),
    ],
    ids=["gone", "cut short"],
)
def test_a_save_whose_shards_were_harmed_is_not_committed(tmp_path: Path, harm: Any, told: str):
    """By a program that cleans up, for instance."""

    def harm_all(verb: str, name: str) -> None:
        if verb == "files" and name.startswith("shards-"):
            for file in tmp_path.glob("c/shards-*/*.safetensors"):
                harm(file)

    with pytest.raises(SaveFailed, match=told):
        ostraka.save(FaultyStore(tmp_path / "c", before=harm_all), tree_of(1))
    assert not (tmp_path / "c").exists()


def test_a_metadata_that_was_replaced_meanwhile_is_not_replaced(tmp_path: Path):
    """By a program that knows nothing of claims, such as cp."""
    ostraka.save(tmp_path / "c", tree_of(1))
    ostraka.save(tmp_path / "other", tree_of(2))
    data = (tmp_path / "other" / "_METADATA").read_bytes()

    def copy(verb: str, name: str) -> None:
        if (verb, name) == ("publish", "_METADATA"):
            os.replace(tmp_path / "other" / "_METADATA", tmp_path / "c" / "_METADATA")

    with pytest.raises(SaveFailed, match="another save has replaced .*_METADATA meanwhile"):
        ostraka.save(FaultyStore(tmp_path / "c", before=copy), tree_of(3))
    assert (tmp_path / "c" / "_METADATA").read_bytes() == data


# Deletions, copies and repairs that another takes over


def remove_seven(store: Any) -> None:
    remove_step(Root(store), 7, even_if_read=True)


@pytest.mark.parametrize("moment", ["delete", "remove"])
@pytest.mark.parametrize("of", ["metadata.json", "_METADATA", "shards-"])
def test_a_removal_that_another_takes_over_deletes_nothing_newer(
    place: Place, hurried: pytest.MonkeyPatch, moment: str, of: str
):
    """Before a deletion begins (`delete`), and between its check and the event (`remove`)."""

    def is_next(verb: str, name: str) -> bool:
        name = name.removeprefix("7/")
        whole = name.startswith(of) and "/" not in name if of == "shards-" else name.endswith(of)
        return verb == moment and whole

    ostraka.save(place / "7", tree_of(1))
    removal = Suspended(place, remove_seven, is_next)
    assert removal.outcome is None
    ostraka.save(FaultyStore(place / "7", has_locks=False), tree_of(2))
    outcome = removal.finish()
    assert ostraka.verify(place / "7").ok
    assert number_in(place / "7") == 2
    if of != "shards-":  # What is left of what it was to delete, the other has deleted.
        assert isinstance(outcome, Busy)


def test_a_removal_decides_about_what_it_has_seen(place: Place):
    """Not about what was saved since then under the same number."""
    ostraka.save(place / "7", tree_of(1))
    root = Root(place)
    seen = root.find(7)
    ostraka.save(place / "7", tree_of(2))
    with pytest.raises(Busy, match="has been saved again meanwhile"):
        remove_step(root, 7, seen=seen)
    assert number_in(place / "7") == 2


def test_a_link_that_became_a_step_is_not_deleted(tmp_path: Path):
    ostraka.save(tmp_path / "elsewhere", tree_of(1))
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "7").symlink_to(tmp_path / "elsewhere")

    def replace_link(verb: str, name: str) -> None:
        if verb == "delete_link":
            (tmp_path / "root" / "7").unlink()
            ostraka.save(tmp_path / "root" / "7", tree_of(2))

    root = Root(FaultyStore(tmp_path / "root", before=replace_link))
    with pytest.raises(StoreError, match="can't delete the link .*7: it is no link any more"):
        remove_step(root, 7)
    assert number_in(tmp_path / "root" / "7") == 2


@pytest.mark.parametrize("moment", ["delete", "remove"])
def test_garbage_that_a_copy_needs_by_now_is_not_deleted(
    fast: Path, hurried: pytest.MonkeyPatch, moment: str
):
    """What a copy that died has left is used by the next one of the same checkpoint."""
    ostraka.save(fast / "a", tree_of(1))
    (fast / "c").mkdir()
    (shards,) = (fast / "a").glob("shards-*")
    shutil.copytree(shards, fast / "c" / shards.name)
    collection = Suspended(
        fast / "c", collect_garbage, lambda verb, name: (verb, name) == (moment, shards.name)
    )
    ostraka.copy(fast / "a", FaultyStore(fast / "c", has_locks=False))
    assert isinstance(collection.finish(), Busy)
    assert ostraka.verify(fast / "c").ok


def test_a_copy_that_another_takes_over_deletes_none_of_its_files(
    place: Place, hurried: pytest.MonkeyPatch
):
    ostraka.save(place / "a", tree_of(1))
    source, target = open_store(place / "a"), open_store(place / "c")
    target.prepare()
    for file in source.files("shards-"):
        if file.name.endswith(".safetensors"):
            writer = target.create(file.name, 3)
            writer.write(0, [b"cut"])
            writer.finish()
    copying = Suspended(
        place / "c",
        lambda store: ostraka.copy(place / "a", store),
        lambda verb, name: verb in ("create", "delete") and name.endswith(".safetensors"),
    )
    ostraka.copy(place / "a", FaultyStore(place / "c", has_locks=False))
    copying.finish()
    assert ostraka.verify(place / "c").ok
    # Not even for a moment.
    deleted = [name for verb, name in copying.store.calls if verb == "delete"]
    assert not [name for name in deleted if name.endswith(".safetensors")]


def test_a_full_disk_can_be_cleared(tmp_path: Path):
    """Where there is no room for the directory that is the fence."""
    ostraka.save(tmp_path / "7", tree_of(1))
    with patch("os.mkdir", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        remove_step(Root(tmp_path), 7)
    assert os.listdir(tmp_path) == []


# Markers from the future


def set_ahead(path: Path, by_s: float = 3600.0) -> None:
    ahead_s = time.time() + by_s
    os.utime(path, (ahead_s, ahead_s))


@pytest.mark.parametrize("wait", [True, False])
def test_a_marker_from_the_future_expires(
    tmp_path: Path, hurried: pytest.MonkeyPatch, wait: bool, caplog: pytest.LogCaptureFixture
):
    """A clock ran ahead, and was set back."""
    hurried.setattr(_claim, "LOG_AFTER_S", 0.0)
    store = FaultyStore(tmp_path, has_locks=False)
    name = f"_CLAIM-{'a' * 32}"
    store.touch(name, create=True, note=b"owner far.example 4711\n")
    set_ahead(tmp_path / name)
    with claimed(store, wait=wait) as claim:
        assert claim.found_dead
    said = f"waiting for process 4711 of the host far.example, which holds the lock on {tmp_path}"
    assert [one.getMessage() for one in caplog.records if said in one.getMessage()]
    assert os.listdir(tmp_path) == []


def test_a_marker_from_the_future_that_is_renewed_does_not_expire(
    tmp_path: Path, hurried: pytest.MonkeyPatch
):
    hurried.setattr(_claim, "DEAD_AFTER_S", LONG_S)
    name = f"_CLAIM-{'a' * 32}"

    def renew(verb: str, file: str) -> None:
        if verb == "files":
            set_ahead(tmp_path / name, random.uniform(1000, 2000))

    store = FaultyStore(tmp_path, has_locks=False, before=renew)
    store.touch(name, create=True)
    with pytest.raises(Busy, match="is under way; wait for it"), claimed(store, wait=True):
        pass
    assert os.listdir(tmp_path) == [name]


def test_the_owner_of_a_marker_is_told(tmp_path: Path):
    with claimed(FaultyStore(tmp_path, has_locks=False)):
        (name,) = os.listdir(tmp_path)
        told = _claim.owner_of(LocalStore(str(tmp_path)), name)
    assert told == f"process {os.getpid()} of the host {socket.gethostname()}"
    (tmp_path / name).touch()  # as versions before this one made it
    told = _claim.owner_of(LocalStore(str(tmp_path)), name)
    assert told == "a process of an unknown host"


class Shifted(FaultyStore):
    """A store that tells other times of the markers of others."""

    shifts_s: ClassVar[dict[str, float]] = {}

    def look(self, name: str) -> Any:
        found = super().look(name)
        return found and self._shift(found)

    def files(self, prefix: str) -> Any:
        return [self._shift(file) for file in super().files(prefix)]

    def _shift(self, file: Any) -> Any:
        shift_s = self.shifts_s.get(file.name, 0.0)
        return replace(file, changed_s=file.changed_s + shift_s)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["disk", "moto"])
def test_markers_of_any_time_expire_if_they_are_not_renewed(
    kind: str,
    fast: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    figures: Figures,
):
    """Times from long ago to far ahead, renewed or not, with and without waiting for it."""
    top = str(fast) if kind == "disk" else request.getfixturevalue("bucket")
    # A bucket tells times in whole seconds.
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.2 if kind == "disk" else 1.5)
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 2.0 if kind == "disk" else 6.0)
    rounds = 240
    rng = random.Random(kind)
    plans = [
        (number, rng.uniform(-60, 60) * 10 ** rng.randrange(4), rng.random() < 0.5)
        for number in range(rounds)
    ]

    def run(plan: tuple[int, float, bool]) -> str:
        number, shift_s, renewed = plan
        store = Shifted(f"{top}/{number}", has_locks=False)
        store.prepare()
        marker = _claim.Marker(store, f"_CLAIM-{os.urandom(16).hex()}")
        if renewed:
            # A living owner's clock may be wrong, too, but it is the store's: less than it may be.
            shift_s = max(shift_s, -_claim.RENEW_EVERY_S)
            marker.put()
        else:
            store.touch(marker.name, create=True)
        Shifted.shifts_s[marker.name] = shift_s
        try:
            with claimed(store, wait=True) as claim:
                return "taken" if claim.found_dead and not renewed else f"wrong: {plan}"
        except Busy:
            return "refused" if renewed else f"wrong: {plan}"
        finally:
            if renewed:
                marker.remove()

    with ThreadPoolExecutor(24) as pool:
        outcomes = Counter(pool.map(run, plans))
    assert set(outcomes) == {"taken", "refused"}, outcomes
    figures.add("markers of any time that were not renewed, taken over", outcomes["taken"])
    figures.add("markers of any time that were renewed, respected", outcomes["refused"])


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


@pytest.mark.parametrize("away", [(), (1, 2)], ids=["always", "while the store is away"])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_claim_is_renewed(
    tmp_path: Path, hurried: pytest.MonkeyPatch, kind: str, away: tuple[int, ...]
):
    store = LocalStore(str(tmp_path)) if kind == "local" else MemoryStore(str(tmp_path))
    store.prepare()
    renewed = threading.Event()
    count = iter(range(4))

    def before(verb: str, name: str) -> None:
        number = next(count, None) if verb == "touch" else 0
        if number in away:
            raise OSError("away")
        if number is None:
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


def test_names_of_claims():
    assert is_claim(f"_CLAIM-{'0' * 32}")
    for name in (f"_CLAIM-{'0' * 31}", f"_CLAIM-{'g' * 32}", "_CLAIM-", "shards-0123456789abcdef"):
        assert not is_claim(name)
