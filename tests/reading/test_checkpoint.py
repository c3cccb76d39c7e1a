"""Which checkpoint a path means."""

import errno
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from ostraka.errors import Busy, CheckpointNotFound, Damaged, Problem
from ostraka.reading import locate as _checkpoint
from ostraka.reading.locate import locate, open_at, read_whole
from ostraka.storage import MemoryStore
from places import Place


def save_steps(root: Place, *names: str) -> Place:
    for name in names:
        ostraka.save(root / name, {"name": name})
    return root


def path_restored(path: Any) -> str:
    records: list[Any] = []
    ostraka.restore(path, on_record=records.append)
    return records[0].path


def test_a_step_by_its_number_and_the_newest(place: Place):
    save_steps(place, "step_00000006", "step_00000007", "step_9", "10", "step_00000070")
    for given, step in (
        *((given, "step_00000007") for given in ("7", "007", "step_7", "step_00000007")),
        ("9", "step_9"),
        ("10", "10"),
        ("", "step_00000070"),
    ):
        path = place / given if given else place
        found = ostraka.open(path).path, ostraka.verify(path).path, path_restored(path)
        assert found == (f"{place}/{step}",) * 3, given


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_steps(tmp_path / "runs", "step_00000001")
    monkeypatch.chdir(tmp_path / "runs")
    step = f"{tmp_path}/runs/step_00000001"
    assert locate(".").location == locate("1").location == locate("../runs/1").location == step


def test_only_committed_steps_count(place: Place):
    save_steps(place, "step_1", "step_2", "step_3")
    (place / "step_3" / "_METADATA").unlink()
    (place / "step_4").mkdir()
    (place / "5").write_text("a file")
    assert ostraka.open(place)["name"] == "step_2"


def test_what_is_there_wins(place: Place):
    save_steps(place, "step_00000007", "7")
    assert ostraka.open(place / "7")["name"] == "7"


def test_an_empty_directory_and_a_link(tmp_path: Path):
    save_steps(tmp_path / "runs", "step_00000007")
    os.symlink(tmp_path / "runs", tmp_path / "link")
    assert ostraka.open(tmp_path / "link" / "7")["name"] == "step_00000007"
    (tmp_path / "8").mkdir()
    save_steps(tmp_path, "step_00000008")
    with pytest.raises(CheckpointNotFound, match="the directory is empty"):
        ostraka.open(tmp_path / "8")


def test_a_checkpoint_beside_steps_is_itself(place: Place):
    """A directory that is both: `_METADATA` decides."""
    ostraka.save(place / "run", {"name": "run", "x": np.arange(3)})
    save_steps(place / "run", "step_9")
    assert ostraka.open(place / "run")["name"] == "run"
    (place / "run" / "_METADATA").unlink()
    with pytest.raises(CheckpointNotFound, match="a save to it never finished"):
        ostraka.open(place / "run")


def test_names_that_are_no_steps(place: Place):
    save_steps(place, "step_00000007", "latest")
    for name in ("-7", "7.0", "step-7", "seven"):
        with pytest.raises(CheckpointNotFound, match="there is no such directory"):
            ostraka.open(place / name)
    assert ostraka.open(place / "latest")["name"] == "latest"


def test_a_save_never_means_another_path(place: Place):
    save_steps(place, "step_00000007")
    ostraka.save(place / "7", {"name": "another"})
    assert ostraka.open(place / "step_00000007")["name"] == "step_00000007"
    assert (place / "7" / "_METADATA").exists()


def test_a_directory_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the names known, what is in it can be read."""
    save_steps(tmp_path, "step_1")

    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    assert ostraka.open(tmp_path / "step_1")["name"] == "step_1"


def test_the_newest_step_that_is_deleted_while_it_is_opened(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    save_steps(place, "step_00000001", "step_00000002")
    real = _checkpoint.open_source

    def delete_first(store: Any) -> Any:
        monkeypatch.setattr(_checkpoint, "open_source", real)
        (place / "step_00000002" / "_METADATA").unlink()
        return real(store)

    monkeypatch.setattr(_checkpoint, "open_source", delete_first)
    assert open_at(place).location == f"{place}/step_00000001"


def test_a_checkpoint_that_is_always_replaced(place: Place):
    path = place / "c"
    ostraka.save(path, {"x": np.arange(3)})
    tries: list[str] = []

    def work(sources: Any) -> None:
        tries.append(sources[0].saved.id)
        ostraka.save(path, {"x": np.arange(3)})
        raise Damaged(str(path), [Problem("shard", "it is missing")])

    with pytest.raises(Busy, match="was overwritten 10 times while it was being read; wait for"):
        read_whole([path], work)
    assert len(set(tries)) == 10


def test_a_run_in_memory_is_found_like_one_in_a_directory():
    root = f"memory://{uuid.uuid4().hex}/runs"
    for step in (3, 7):
        ostraka.save(f"{root}/step_{step:08d}", {"step": step})
    assert ostraka.restore(root) == {"step": 7}
    assert ostraka.restore(f"{root}/3") == {"step": 3}
    assert ostraka.open(root).path == f"{root}/step_00000007"
    with pytest.raises(CheckpointNotFound, match="the steps in .*/runs are 3, 7"):
        ostraka.restore(f"{root}/5")


def test_nothing_in_a_store_that_no_path_leads_to():
    store = MemoryStore(uuid.uuid4().hex)
    store.location = "bucket://runs/7"
    with pytest.raises(CheckpointNotFound, match="no checkpoint at bucket://runs/7: "):
        ostraka.restore(store)
