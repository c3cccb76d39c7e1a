"""What is deleted as a leftover, and what never is: shards that a damaged `_METADATA` may need."""

import errno
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from cli_runs import run
from figures import Figures
from ostraka import Manager
from ostraka.errors import Damaged, PathInTheWay, SaveFailed
from ostraka.layout import metadata, shard_file
from ostraka.saving.place import UNKNOWN, committed_directory, find_leftovers, put_back
from ostraka.storage import MOST_BYTES, LocalStore, open_store
from ostraka.testing import FaultyStore
from places import BucketPath, Place, remove_tree
from sealed import sealed

TREE = {"w": np.arange(3, dtype=np.int8)}


@pytest.fixture
def step(place: Place) -> Place:
    return make_step(place)


def make_step(place: Place) -> Any:
    """A step of a root, complete, with nothing beside it."""
    ostraka.save(place / "root" / "7", TREE)
    return place / "root" / "7"


def files(step: Place) -> dict[str, bytes]:
    return {str(f.relative_to(step)): f.read_bytes() for f in step.rglob("*") if f.is_file()}


def bit_flips(data: bytes) -> Iterator[bytes]:
    for position in range(len(data)):
        for bit in range(8):
            yield bytes([*data[:position], data[position] ^ 1 << bit, *data[position + 1 :]])


def open_a_manager(step: Place) -> None:
    Manager(step.parent, on_preemption=False).close()


def collect_garbage(step: Place) -> None:
    assert run("gc", step.parent, "--yes").exit_code == 0


def full(path: Place) -> FaultyStore:
    """A disk that takes no more files."""
    return FaultyStore(path, fail={"create": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))})


def fail_to_save(step: Place) -> None:
    """To the same path, after the save has begun."""
    with pytest.raises(SaveFailed, match="No space left"):
        ostraka.save(full(step), TREE)


def fail_to_save_a_step(step: Place) -> None:
    """By a manager that deletes what it need not keep."""
    with (
        Manager(full(step.parent), keep=1, asynchronous=False, on_preemption=False) as manager,
        pytest.raises(SaveFailed, match="No space left"),
    ):
        manager.save(7, TREE, force=True)


ATTEMPTS = [open_a_manager, collect_garbage, fail_to_save, fail_to_save_a_step]


def assert_nothing_is_deleted(step: Place, damaged: bytes, attempts: list[Callable[[Place], None]]):
    (step / "_METADATA").write_bytes(damaged)
    before = files(step)
    for attempt in attempts:
        attempt(step)
        left = files(step)
        assert {name: left.get(name) for name in before} == before, (attempt.__name__, damaged)


def test_no_flipped_bit_makes_a_leftover_of_a_shard(step: Place):
    """Each bit of the beginning, which has the id, and some of the rest. All deletions ask this."""
    whole = (step / "_METADATA").read_bytes()
    store = open_store(step)
    flips = list(bit_flips(whole))
    # A bucket takes milliseconds for what a disk does in microseconds.
    on_disk = isinstance(step, Path)
    for damaged in [*flips[: 8 * 100], *flips[8 * 100 :: 29]] if on_disk else flips[::101]:
        (step / "_METADATA").write_bytes(damaged)
        assert find_leftovers(store) == [], damaged
        assert committed_directory(store) == UNKNOWN, damaged
    (step / "_METADATA").write_bytes(whole)
    assert committed_directory(store) == next(step.glob("shards-*")).name
    assert find_leftovers(store) == []
    assert ostraka.verify(step).ok


def test_no_flipped_bit_of_the_id_has_shards_deleted(step: Place, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    whole = (step / "_METADATA").read_bytes()
    digits = whole.index(b'"id":"') + len('"id":"')
    ids = slice(digits, digits + 16)
    taken_for_ids = [
        damaged
        for damaged in bit_flips(whole)
        if damaged[ids] != whole[ids]
        and shard_file.ID_PATTERN.fullmatch(damaged[ids].decode("latin-1"))
    ]
    assert len(taken_for_ids) > 16
    for damaged in taken_for_ids[:: 8 if isinstance(step, BucketPath) else 4]:
        assert_nothing_is_deleted(step, damaged, ATTEMPTS)
    ostraka.save(step, TREE)  # it replaces what is damaged
    assert ostraka.verify(step).ok
    assert len(list(step.glob("shards-*"))) == 1


@pytest.mark.soak
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_no_flipped_bit_has_shards_deleted(
    step: Place,
    attempt: Callable[[Place], None],
    caplog: pytest.LogCaptureFixture,
    figures: Figures,
):
    """Every bit of `_METADATA`, through everything that deletes."""
    caplog.set_level(logging.CRITICAL)
    for damaged in bit_flips((step / "_METADATA").read_bytes()):
        assert_nothing_is_deleted(step, damaged, [attempt])
        figures.add("flipped bits")
        for left in sorted(step.glob("shards-*"))[1:]:
            remove_tree(left)


def resealed(whole: bytes, **changes: object) -> bytes:
    return sealed({**json.loads(whole), **changes})


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut at {n}": lambda whole, n=n: whole[:n] for n in (0, 1, 19, 100, -1, -50)},
    "zeros": lambda whole: bytes(len(whole)),
    "a newer version": lambda whole: resealed(whole, version=2, id="of another kind"),
    # As beside a copy that has only begun: `_METADATA` comes before `shards-…` in the alphabet.
    "other shards": lambda whole: resealed(whole, id="0123456789abcdef"),
}


def test_a_damaged_metadata_has_no_shards_deleted(tmp_path: Path):
    step = make_step(tmp_path)
    whole = (step / "_METADATA").read_bytes()
    for damage in DAMAGES.values():
        assert_nothing_is_deleted(step, damage(whole), ATTEMPTS)


def test_a_metadata_that_the_disk_has_lost_has_no_shards_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    step = make_step(tmp_path)

    def get(self: LocalStore, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        if name == "_METADATA":
            raise ostraka.errors.StoreError("can't read it", errno=errno.EIO)
        return read(self, name, most_bytes)

    read = LocalStore.get
    before = files(step)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "get", get)
        for attempt in ATTEMPTS:
            attempt(step)
        assert {name: files(step)[name] for name in before} == before
        # The step is not lost to the run: saved again, it is a good one.
        ostraka.save(step, TREE)
    assert ostraka.verify(step).ok
    assert len(list(step.glob("shards-*"))) == 1


@pytest.mark.parametrize("target", ["nowhere", "_METADATA"])
def test_a_metadata_that_is_a_link_to_nowhere_has_no_shards_deleted(tmp_path: Path, target: str):
    """As of a disk that is not mounted now; or in a circle."""
    step = make_step(tmp_path)
    (step / "_METADATA").rename(step.parent / "kept")
    (step / "_METADATA").symlink_to(target)
    before = sorted(step.glob("shards-*/*"))
    for attempt in (open_a_manager, collect_garbage):
        with suppress(AssertionError):  # gc says that it can't read it
            attempt(step)
        assert sorted(step.glob("shards-*/*")) == before
    with pytest.raises(Damaged, match="no step in .* can be read"):
        Manager(step.parent, read_only=True).latest()
    (step / "_METADATA").unlink()
    (step.parent / "kept").rename(step / "_METADATA")
    assert ostraka.verify(step).ok


def test_gc_goes_on_after_a_place_that_it_cannot_read(tmp_path: Path):
    step = make_step(tmp_path)
    (step / "_METADATA").unlink()
    (step / "_METADATA").mkdir()
    left = step.parent / "8" / "shards-0123456789abcdef"
    left.mkdir(parents=True)
    result = run("gc", step.parent, "--yes")
    assert result.exit_code == 2
    assert f"can't read {step}/_METADATA: it is a directory, not a file" in result.stderr
    assert not left.exists()
    assert list(step.glob("shards-*/*"))
    refused = json.loads(run("gc", step.parent, "--json").stdout)["refused"]
    assert [str(step) in text for text in refused] == [True]


def test_a_checkpoint_without_arrays_needs_no_shards(place: Place):
    ostraka.save(place, {"step": 1})
    left = place / "shards-0123456789abcdef"
    left.mkdir()
    (left / "shard_00000.safetensors").write_bytes(b"")
    assert find_leftovers(open_store(place)) == [left.name]


def test_a_metadata_of_another_program_is_in_the_way(place: Place):
    (place / "_METADATA").write_text("{}")
    with pytest.raises(PathInTheWay, match="holds something that Ostraka did not write"):
        ostraka.save(place, TREE)
    assert (place / "_METADATA").read_text() == "{}"


def test_a_save_over_a_checkpoint_reads_its_id_alone(step: Place, monkeypatch: pytest.MonkeyPatch):
    """To decode all of a large `_METADATA` takes longer than to save a small tree."""

    def refuse(data: bytes) -> None:
        raise AssertionError("all of it is decoded")

    old = next(step.glob("shards-*"))
    store = FaultyStore(step)
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "decode_metadata", refuse)
        ostraka.save(store, TREE)
    assert store.calls.count(("get", "_METADATA")) == 1
    assert not old.exists()
    assert ostraka.verify(step).ok


def test_a_checkpoint_is_durable_before_leftovers_beside_it_are_deleted(tmp_path: Path):
    """A power failure could bring back the one before it, whose shards would then be gone."""
    step = make_step(tmp_path)
    (step / "shards-0123456789abcdef").mkdir()
    store = FaultyStore(step)
    ostraka.save(store, TREE)
    assert store.calls[store.calls.index(("delete", "shards-0123456789abcdef")) - 1] == ("sync", "")


def test_a_step_that_may_have_lost_its_metadata_is_spared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It can't be told from a save that died just before its commit, and all of it is there."""
    step = make_step(tmp_path)
    before = files(step)
    (step / "_METADATA").unlink()
    for _ in range(2):
        open_a_manager(step)
    told = [r.getMessage() for r in caplog.records if "ostraka repair" in r.getMessage()]
    assert len(told) == 2
    assert f"{step} has all files of a checkpoint but _METADATA" in told[0]
    assert Manager(step.parent, on_preemption=False, read_only=True).latest() is None
    assert run("repair", step, "--yes").exit_code == 0
    assert files(step) == before
    (step / "_METADATA").unlink()
    collect_garbage(step)
    assert not step.exists()


def test_only_a_complete_checkpoint_is_put_back(tmp_path: Path):
    """Where a lock may run out, a deletion may have removed the `_METADATA` of a newer save."""
    step = make_step(tmp_path)
    whole = files(step)
    (step / "_METADATA").unlink()
    put_back(open_store(step))
    assert files(step) == whole
    put_back(open_store(step))  # One that is there stays.
    assert files(step) == whole
    (step / "_METADATA").unlink()
    next(step.glob("*/*.safetensors")).unlink()
    put_back(open_store(step))
    assert not (step / "_METADATA").exists()


def test_a_deletion_that_died_is_not_taken_for_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    step = make_step(tmp_path)
    delete = LocalStore.delete

    class Died(BaseException):
        pass

    def delete_and_die(self: LocalStore, name: str, **options: Any) -> None:
        delete(self, name, **options)
        if name == "_METADATA":
            raise Died("killed")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", delete_and_die)
        with pytest.raises(Died, match="killed"):
            Manager(step.parent, on_preemption=False).delete(7)
    assert step.exists()
    open_a_manager(step)
    assert not step.exists()
