"""A save, a copy and a repair commit in the same steps, and say the same if they can't tell."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from ostraka.errors import Busy, NotDurable, OutcomeUnknown, SaveFailed
from ostraka.layout.shard_file import is_shards_directory
from ostraka.saving import place
from ostraka.storage import open_store
from ostraka.testing import FaultyStore

TREE = {"w": np.arange(3000, dtype=np.int16)}


def save(source: Path, target: Any) -> None:
    ostraka.save(target, TREE)


def copy(source: Path, target: Any) -> None:
    ostraka.copy(source, target)


def repair(source: Path, target: Any) -> None:
    """Of a checkpoint that has lost its `_METADATA`."""
    below = Path(target.location)
    ostraka.copy(source, below)
    (below / "_METADATA").unlink()
    ostraka.repair(target)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    ostraka.save(tmp_path / "source", TREE)
    return tmp_path / "source"


@pytest.mark.parametrize("work", [save, copy, repair])
def test_names_are_durable_before_the_commit(
    work: Callable[[Path, Any], None], source: Path, tmp_path: Path
):
    store = FaultyStore(tmp_path / "target")
    work(source, store)
    at = store.calls.index(("publish", "_METADATA"))
    before = store.calls[:at]
    put = len(before) - 1 - before[::-1].index(("put", "_METADATA"))
    assert before[put - 1] == ("sync", "")
    assert any(verb == "touch" for verb, _ in before[put:]), "the claim is checked last"


@pytest.mark.parametrize("work", [save, copy, repair])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OutcomeUnknown("no answer"), "whether the new checkpoint or what was there before"),
        (NotDurable("can't sync"), "the new checkpoint is in place, but may not survive a power"),
    ],
)
def test_an_unknown_outcome_is_explained(
    work: Callable[[Path, Any], None],
    error: OutcomeUnknown,
    said: str,
    source: Path,
    tmp_path: Path,
):
    def fail(verb: str, name: str) -> None:
        if (verb, name) == ("publish", "_METADATA"):
            raise error

    with pytest.raises((SaveFailed, OutcomeUnknown), match=rf"{said}.*: .*; {work.__name__} again"):
        work(source, FaultyStore(tmp_path / "target", before=fail))
    assert list((tmp_path / "target").glob("shards-*/*.safetensors")), "it may be committed"


@pytest.mark.parametrize("work", [save, copy])
def test_a_commit_that_stood_still_finds_that_its_files_are_gone(
    work: Callable[[Path, Any], None],
    source: Path,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """A bucket accepts the `_METADATA` of a process whose files another has deleted meanwhile."""
    monkeypatch.setattr(place, "STOOD_STILL_S", 0.0)

    def delete_shards(verb: str, name: str) -> None:
        if (verb, name) == ("publish", "_METADATA"):
            for directory in filter(is_shards_directory, store.list()):
                open_store(f"{bucket}/target").delete(directory)

    store = FaultyStore(f"{bucket}/target", before=delete_shards)
    with pytest.raises((Busy, SaveFailed), match=r"which this (save|copy) has written, is gone"):
        work(source, store)
