"""The newest step, by `ostraka.latest` and by managers, and places that hold none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ostraka
from ostraka import Manager
from ostraka.errors import CheckpointNotFound, Damaged, PathInTheWay
from places import Place
from runs import damage, fill, tree_of


def latest_of_manager(root: Any) -> int | None:
    with Manager(root, read_only=True) as manager:
        return manager.latest()


LOOKS: list[Callable[[Any], Any]] = [ostraka.latest, latest_of_manager]


def test_the_newest_step(place: Place):
    """Also while a run writes. Nobody who looks writes."""
    run = place / "run"
    assert [look(run) for look in LOOKS] == [None, None]
    if isinstance(place, Path):
        assert [look(place) for look in LOOKS] == [None, None]
        assert list(place.iterdir()) == []
    with Manager(run, asynchronous=False) as manager:
        for step in (3, 12, 100):
            manager.save(step, tree_of(step))
            assert [look(run) for look in LOOKS] == [step, step]
    there = sorted(run.rglob("*"))
    assert [look(run) for look in LOOKS] == [100, 100]
    assert sorted(run.rglob("*")) == there
    if isinstance(place, Path):
        assert ostraka.latest(str(run)) == 100


def test_a_run_does_not_begin_anew_because_no_step_can_be_read(tmp_path: Path):
    fill(tmp_path, 10, 20)
    damage(tmp_path, 20, name="_METADATA")
    assert [look(tmp_path) for look in LOOKS] == [10, 10]
    damage(tmp_path, 10, name="_METADATA")
    message = "step_00000020 is damaged.* no step in .* can be read: repair one, or delete them"
    with Manager(tmp_path, asynchronous=False) as manager:
        for look in (*LOOKS, lambda _: manager.latest(), lambda _: manager.resume(tree_of(0))):
            with pytest.raises(Damaged, match=message):
                look(tmp_path)
        with pytest.raises(Damaged, match="step_00000020 is damaged.* no intact step before it"):
            manager.restore(fallback=True)
        manager.delete(20)
        manager.delete(10)
        assert manager.latest() is None
        manager.save(1, tree_of(1))
        assert manager.latest() == 1


@pytest.mark.parametrize(
    ("look", "kind"), [*((look, CheckpointNotFound) for look in LOOKS), (Manager, PathInTheWay)]
)
def test_a_checkpoint_and_a_file_hold_no_steps(
    tmp_path: Path, look: Callable[[Any], Any], kind: type[Exception]
):
    fill(tmp_path, 7)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(kind, match="step_00000007 is itself a checkpoint, .* the directory above"):
        look(tmp_path / "step_00000007")
    with pytest.raises(kind, match="file is a file; give a Manager a directory"):
        look(tmp_path / "file")
    assert ostraka.verify(tmp_path / "step_00000007").ok
