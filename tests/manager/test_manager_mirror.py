"""A manager's mirror: what is copied there, what it is good for, what goes wrong with it."""

import errno
import gc
import logging
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ostraka
from figures import Figures
from ostraka import Manager
from ostraka.common.record import Record
from ostraka.errors import CheckpointNotFound, Damaged, PathInTheWay, StoreError
from ostraka.saving.place import find_leftovers
from ostraka.storage import _claim, open_store
from ostraka.testing import FaultyStore, run_processes
from places import names_of, place_of_kind
from runs import LONG_S, Gate, contents, damage, fill, raises_from, steps_in, tree_of

# pyright: reportPrivateUsage=false


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


# What is copied


@pytest.mark.parametrize("kind", ["directory", "memory", "store", "bucket"])
def test_multiples_are_copied_and_none_is_deleted(
    root: Path, kind: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: Any
):
    mirror = place_of_kind(kind, "mirror", request, tmp_path)
    records: list[Record] = []
    options = {"keep": 1, "mirror_every": 2, "on_record": records.append}
    with Manager(root, mirror=mirror, **options) as manager:
        for step in range(1, 7):
            manager.save(step, tree_of(step))
            manager.wait()
            assert manager.steps() == [step]
            assert steps_in(mirror) == list(range(2, step + 1, 2))
    copies = [record for record in records if record.operation == "mirror"]
    place = open_store(mirror)
    assert [record.path for record in copies] == [
        place.at(f"step_{step:08d}").location for step in (2, 4, 6)
    ]
    assert copies[-1].bytes == sum(f.size for f in place.at("step_00000006").files(""))
    assert list(copies[-1].phases) == ["copy", "commit"]
    assert copies[-1].blocked_s == 0
    assert contents(place.at("step_00000006")) == contents(root / "step_00000006")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    # The run goes on with an empty root.
    shutil.rmtree(root)
    with Manager(root, mirror=mirror, keep=2) as manager:
        assert manager.latest() == 6
        state = tree_of(0)
        assert manager.resume(state) == manager.restored == state["step"] == 6
        assert manager.steps() == []
        assert manager.path(6) == place.at("step_00000006").location
        with pytest.raises(ValueError, match=r"step 5 is lower than 6, the latest step in .* or "):
            manager.save(5, tree_of(5))
        for value in (7, 8):  # A step that is saved again is copied again.
            manager.save(7, tree_of(value))
            manager.wait()
            assert ostraka.restore(place.at("step_00000007"))["step"] == value
    assert steps_in(root) == [7]
    assert steps_in(mirror) == [2, 4, 6, 7]


def test_a_root_in_a_bucket(bucket: str, mirror: Path):
    fill(f"{bucket}/runs", 1, 2, mirror=mirror)
    assert contents(mirror) == contents(f"{bucket}/runs")


def test_a_run_that_was_without_a_mirror_gets_one(root: Path, mirror: Path, caplog: Any):
    """Damaged steps are not copied."""
    fill(root, 1, 2, 3)
    damage(root, 2)
    Manager(root, mirror=mirror).close()
    assert steps_in(mirror) == [1, 3]
    assert "step 2 is not copied to" in caplog.text
    assert "not as they were written" in caplog.text
    assert open_store(mirror).at("step_00000002").list() == []
    # What is there is not copied again.
    shutil.rmtree(root / "step_00000002")
    there = FaultyStore(mirror)
    Manager(root, mirror=there).close()
    assert {verb for verb, _ in there.calls}.isdisjoint({"create", "put", "delete"})


def test_steps_of_another_history_are_replaced(
    root: Path, mirror: Path, tmp_path: Path, caplog: Any
):
    fill(tmp_path / "old", 1, 2, 3, mirror=mirror)
    before = contents(mirror)
    fill(root, 2)
    with Manager(root, mirror=mirror):
        assert "has step 3, later than step 2, the newest in its root" in caplog.text
    others = {name: data for name, data in before.items() if not name.startswith("step_00000002")}
    assert contents(mirror) == others | contents(root)


def test_files_that_the_mirror_has_lost_come_back(root: Path, mirror: Path):
    fill(root, 1, 2, mirror=mirror)
    whole = contents(mirror)
    max(mirror.glob("step_00000001/shards-*/*.safetensors")).unlink()
    shutil.rmtree(min(mirror.glob("step_00000002/shards-*")))
    left = mirror / "step_00000003" / "shards-0123456789abcdef"  # by a copy that died
    left.mkdir(parents=True)
    (left / "shard_00000.safetensors").write_bytes(b"half")
    fill(root, 4, mirror=mirror)
    assert contents(mirror) == whole | contents(root)
    assert not (mirror / "step_00000003").exists()


# A mirror that is slower than the run


@pytest.mark.parametrize(
    ("every", "held", "copied"), [(None, [1, 6], [1, 6]), (2, [2, 6, 7], [2, 6])]
)
def test_a_slow_mirror_makes_no_save_wait_and_fills_no_disk(
    root: Path, mirror: Path, every: int | None, held: list[int], copied: list[int], caplog: Any
):
    """The step being copied is kept, and the newest that is due."""
    gate = Gate("create")
    options: dict[str, Any] = {"keep": 1, "mirror_every": every, "asynchronous": False}
    with Manager(root, mirror=FaultyStore(mirror, before=gate), **options) as manager:
        manager.save(held[0], tree_of(held[0]))
        gate.wait_until_reached()
        for step in range(held[0] + 1, held[-1] + 1):
            manager.save(step, tree_of(step))
        assert manager.steps() == held
        assert steps_in(mirror) == []
        gate.open()
        manager.wait()
        assert manager.steps() == held[-1:]
    assert steps_in(mirror) == copied
    passed_over = 5 if every is None else 4
    assert f"step {passed_over} was deleted from" in caplog.text
    assert "step 6 was deleted from" not in caplog.text


@pytest.mark.parametrize("when", ["deleted", "replaced", "replaced after it was copied"])
def test_a_step_that_changes_while_it_is_copied(root: Path, mirror: Path, when: str, caplog: Any):
    gate = Gate("mirror" if "after" in when else "create")
    options: dict[str, Any] = {
        "mirror": FaultyStore(mirror, before=gate),
        "on_record": lambda record: gate(record.operation, record.path),
    }
    with Manager(root, asynchronous=False, **options) as manager:
        manager.save(1, tree_of(1))
        gate.wait_until_reached()
        if when == "deleted":
            manager.delete(1)
        else:
            manager.save(1, tree_of(5))
        gate.open()
        manager.wait()
        manager.save(2, tree_of(2))
    assert contents(mirror) == contents(root)
    assert names_of(mirror) == names_of(root)
    assert ("step 1 was deleted from" in caplog.text) == (when == "deleted")


def test_a_record_that_waits_for_its_own_copy(root: Path, mirror: Path, caplog: Any):
    def wait(record: Record) -> None:
        if record.operation == "mirror":
            manager.wait()

    with Manager(root, mirror=mirror, on_record=wait) as manager:
        manager.save(1, tree_of(1))
    assert "on_record is a part of the copy to the mirror, and can't wait for it" in caplog.text
    assert steps_in(mirror) == [1]


# Restoring


def test_a_reader_restores_from_the_mirror(root: Path, mirror: Path, tmp_path: Path):
    fill(root, 1, 2, 3, mirror=mirror)
    for step in (1, 2):
        shutil.rmtree(root / f"step_{step:08d}")
    before = contents(mirror)
    with Manager(root, mirror=mirror, read_only=True) as manager:
        assert manager.steps() == [3]
        assert manager.restore(2)["step"] == manager.restored == 2
        assert manager.restore()["step"] == 3
        with pytest.raises(CheckpointNotFound, match=r"no step 7 in .* or its mirror .*; it has 1"):
            manager.restore(7)
        with pytest.raises(CheckpointNotFound, match="there is no step 7 in"):
            manager.metrics(7)
    with Manager(tmp_path / "elsewhere", mirror=mirror, read_only=True) as manager:
        assert manager.latest() == 3
        assert manager.restore()["step"] == 3
    assert contents(mirror) == before
    with Manager(tmp_path / "new", mirror=tmp_path / "empty") as manager:
        assert manager.latest() is None
        with pytest.raises(CheckpointNotFound, match="or its mirror .* to restore"):
            manager.restore()


@pytest.mark.parametrize("name", [".safetensors", "_METADATA"])
def test_a_damaged_step_is_restored_from_the_mirror(
    root: Path, mirror: Path, name: str, caplog: Any
):
    fill(root, 1, 2, mirror=mirror)
    damage(root, 2, name=name)
    with Manager(root, mirror=mirror) as manager:
        assert manager.latest() == 2
        with pytest.warns(UserWarning, match="step 2 is restored from the mirror .* is damaged"):
            assert manager.restore()["a"].tolist() == [2] * 8
        assert manager.restored == 2
        assert "step 2 is restored from the mirror" in caplog.text
        assert manager.restore(1)["step"] == 1
    with pytest.raises(Damaged, match="step_00000002"):
        ostraka.restore(root / "2")  # it stays for repair
    assert 2 in steps_in(mirror)


def test_both_are_damaged(root: Path, mirror: Path):
    fill(root, 1, 2, 3, mirror=mirror)
    shutil.rmtree(root / "step_00000002")
    damage(root, 3)
    damage(mirror, 3)
    from_mirror = "step 3 is restored from the mirror"
    several: list[dict[str, Any]] = [{}, {"like": tree_of(0)}]
    with Manager(root, mirror=mirror, read_only=True) as manager:
        with (
            pytest.warns(UserWarning, match=from_mirror),
            pytest.raises(Damaged, match=r"mirror.*; the step before it is 2"),
        ):
            manager.restore()
        for options in several:
            with (
                pytest.warns(UserWarning, match=from_mirror),
                pytest.warns(UserWarning, match="step 3 can't be restored, so step 2 is"),
            ):
                assert manager.restore(fallback=True, **options)["step"] == 2


def test_later_steps_of_a_mirror_do_not_count(root: Path, mirror: Path):
    """They were deleted from the root, or are those of a run that went another way."""
    fill(root, 1, 2, 3, mirror=mirror)
    with Manager(root, mirror=mirror) as manager:
        manager.delete(3)
        assert manager.latest() == 2
        assert manager.restore()["step"] == 2
        assert manager.restore(3)["step"] == 3
        damage(root, 2)
        with pytest.warns(UserWarning, match="step 2 is restored from the mirror"):
            assert manager.restore()["step"] == 2


def test_a_mirror_that_cannot_be_read_hides_no_step(root: Path, mirror: Path, caplog: Any):
    fill(root, 1, 2)
    fill(mirror, 2)
    damage(root, 2)
    manager = Manager(root, mirror=mirror, read_only=True)
    with pytest.raises(Damaged, match="the step before it is 1"):
        manager.restore()  # Another save of the same step is no copy.
    broken: dict[str, BaseException] = {}
    manager = Manager(root, mirror=FaultyStore(mirror, before=raises_from(broken)), read_only=True)
    broken["list"] = StoreError("the mirror is away")
    assert manager.latest() == 2
    with pytest.raises(Damaged, match="the step before it is 1"):
        manager.restore()
    with pytest.warns(UserWarning, match="so step 1 is"):
        assert manager.restore(fallback=True)["step"] == 1
    assert "the mirror is away" in caplog.text
    with pytest.raises(StoreError, match="the mirror is away"):
        manager.restore(7)
    shutil.rmtree(root)
    with pytest.raises(StoreError, match="the mirror is away"):
        manager.latest()  # never: begin from scratch


# Faults of the mirror


@pytest.mark.parametrize("verb", ["create", "write", "finish", "publish", "touch", "list"])
def test_a_mirror_that_refuses_stops_no_run(root: Path, mirror: Path, verb: str, caplog: Any):
    faults: dict[str, BaseException] = {}
    there = FaultyStore(mirror, before=raises_from(faults), has_locks=False)
    manager = Manager(root, mirror=there, keep=2)
    faults[verb] = StoreError("no space left there", errno=errno.ENOSPC)
    for step in range(1, 6):
        assert manager.save(step, tree_of(step))
    lacks = r"lacks steps 4, 5 of .*: .*no space left there; the root"
    for end in (manager.wait, manager.close):
        with pytest.raises(StoreError, match=lacks):
            end()
    assert steps_in(root) == [4, 5]
    assert caplog.text.count("saving goes on, and copying is tried again") == 1
    faults.clear()
    assert steps_in(mirror) == []
    Manager(root, mirror=mirror).close()
    assert contents(mirror) == contents(root)


def test_a_mirror_that_comes_back(root: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch):
    """Without anybody waiting for it, nor another step."""
    monkeypatch.setattr("ostraka.manager._mirror._FIRST_PAUSE_S", 0.01)
    faults: dict[str, BaseException] = {"create": StoreError("the mirror is away")}
    copied = threading.Event()

    def note(record: Record) -> None:
        if record.operation == "mirror":
            copied.set()

    there = FaultyStore(mirror, before=raises_from(faults))
    with Manager(root, mirror=there, on_record=note) as manager:
        manager.save(1, tree_of(1))
        with pytest.raises(StoreError, match="the mirror is away"):
            manager.wait()
        faults.clear()
        assert copied.wait(LONG_S)
        manager.wait()
        shutil.rmtree(mirror)  # It is made again.
        manager.save(2, tree_of(2))
    assert steps_in(mirror) == [2]


def test_something_else_in_the_place_of_one_step_or_of_all(
    root: Path, mirror: Path, tmp_path: Path
):
    with Manager(tmp_path / "a", mirror=mirror) as first:
        first.save(1, tree_of(1))
        first.wait()
        with pytest.raises(StoreError, match="another Manager is writing to .*mirror"):
            fill(root, 5, mirror=mirror)
    assert steps_in(mirror) == [1]
    Manager(root, mirror=mirror).close()
    assert steps_in(mirror) == [1, 5]
    # One step does not hold up those before it.
    fill(root, 6, 7)
    (mirror / "step_00000007").mkdir()
    (mirror / "step_00000007" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"lacks step 7 of .* with other things in it \(notes.txt"):
        Manager(root, mirror=mirror).close()
    assert steps_in(mirror) == [1, 5, 6]


def test_mirrors_that_cannot_be_one(root: Path, tmp_path: Path, bucket: str):
    (tmp_path / "link").symlink_to(root)
    for place in (root, root / "mirror", tmp_path, tmp_path / "link", f"file://{root}/"):
        with pytest.raises(ValueError, match="are one place, or one is inside the other"):
            Manager(root, mirror=place)
    with pytest.raises(ValueError, match="are one place"):
        Manager(f"{bucket}/runs", mirror=f"{bucket}/runs/mirror")
    with pytest.raises(StoreError, match="there is no such bucket; create it"):
        Manager(root, mirror="s3://no-such-bucket-anywhere/runs")
    ostraka.save(tmp_path / "one", {"a": 1})
    for read_only, kind in ((False, PathInTheWay), (True, CheckpointNotFound)):
        with pytest.raises(kind, match="is itself a checkpoint"):
            Manager(root, mirror=tmp_path / "one", read_only=read_only)
    Manager(root).close()  # The lock was given back each time.


# The end


def live_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ostraka-mirror"]


def open_when_left(manager: Manager, gate: Gate) -> None:
    """A verb that hangs ends after the copying was given up, and not before."""
    assert manager._mirror is not None
    copier: Any = manager._mirror._copier
    leave = copier.leave

    def leave_and_open() -> None:
        leave()
        gate.open()

    copier.leave = leave_and_open


@pytest.mark.parametrize("error", [RuntimeError("diverged"), KeyboardInterrupt()], ids=repr)
def test_an_error_ends_the_copying(
    root: Path,
    mirror: Path,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """In the block, or Ctrl-C while `close` waits for the mirror."""

    def wait() -> None:
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        real()

    def train() -> None:
        nonlocal real
        gate = Gate("create")
        there = FaultyStore(mirror, before=gate)
        with Manager(root, mirror=there, asynchronous=False) as manager:
            manager.save(1, tree_of(1))
            gate.wait_until_reached()
            open_when_left(manager, gate)
            if isinstance(error, Exception):
                raise error
            assert manager._mirror is not None
            real = manager._mirror.wait
            monkeypatch.setattr(manager._mirror, "wait", wait)

    real: Callable[[], None] = wait
    with pytest.raises(type(error), match=f"^{error}$"):
        train()
    assert "lacks step 1 of" in caplog.text
    assert "the next Manager with this mirror copies what is missing" in caplog.text
    assert live_threads() == []
    assert steps_in(mirror) == []
    Manager(root, mirror=mirror).close()
    assert steps_in(mirror) == [1]


def test_a_manager_that_nobody_has_any_more(root: Path, mirror: Path):
    fill(root, 1)
    manager = Manager(root, mirror=mirror)
    manager.wait()
    del manager
    gc.collect()
    assert live_threads() == []
    fill(root, 2, mirror=mirror)
    assert steps_in(mirror) == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="NOT TESTED HERE: forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
def test_a_forked_child_leaves_the_mirror_alone(root: Path, mirror: Path):
    gate = Gate("create")
    with Manager(root, mirror=FaultyStore(mirror, before=gate), asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        gate.wait_until_reached()
        child = os.fork()
        if child == 0:
            manager.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        gate.open()
    assert steps_in(mirror) == [1]


# kill -9


def save_until_killed(root: str, mirror: str, moment: int) -> None:
    """In a process of its own, which ends at the given write to the mirror."""
    left = moment

    def before(verb: str, name: str) -> None:
        nonlocal left
        if verb in ("create", "write", "finish", "put", "publish", "sync", "touch", "delete"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    there = FaultyStore(mirror, before=before)
    with Manager(root, keep=2, mirror=there, mirror_every=2) as manager:
        first = (manager.latest() or 0) + 1
        for step in range(first, first + 6):
            manager.save(step, tree_of(step))


def kill_and_go_on(root: Path, mirror: Any, moments: list[int]) -> None:
    """Runs that are killed, one after the other; then one that isn't, which finishes it all."""
    ends: set[int] = set()
    for moment in moments:
        arguments = (save_until_killed, str(root), str(mirror), moment)
        (result,) = run_processes(*arguments, processes=1, check=False)
        assert result.error is None
        ends.add(result.exit_code)
        steps_in(mirror)
    assert -signal.SIGKILL in ends
    assert ends <= {0, -signal.SIGKILL}
    Manager(root, keep=2, mirror=mirror, mirror_every=2).close()
    # A step that is older than those to keep may have been killed in the middle of its deletion.
    due = [step for step in steps_in(root)[-2:] if step % 2 == 0]
    assert due
    copied = steps_in(mirror)
    assert set(due) <= set(copied)
    assert all(step % 2 == 0 for step in copied)
    for step in due:
        name = f"step_{step:08d}"
        assert contents(root / name) == contents(open_store(mirror).at(name))
    assert all(find_leftovers(open_store(mirror).at(f"step_{step:08d}")) == [] for step in copied)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_time_the_next_run_finishes(root: Path, mirror: Path, seed: int):
    chance = random.Random(seed)
    kill_and_go_on(root, mirror, [chance.randint(1, 60) for _ in range(3)])


def test_killed_while_it_copies_to_a_bucket(
    root: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_claim, "DEAD_AFTER_S", 2.0)
    kill_and_go_on(root, f"{bucket}/mirror", [9])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_killed_again_and_again(root: Path, mirror: Path, seed: int, figures: Figures):
    chance = random.Random(f"soak {seed}")
    # Early at least once: a run may have written all that it has to before a late one.
    moments = [chance.randint(1, 15), *(chance.randint(1, 90) for _ in range(4))]
    kill_and_go_on(root, mirror, moments)
    figures.add("kills while copying to a mirror", 5)
