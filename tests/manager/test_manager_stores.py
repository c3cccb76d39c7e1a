"""The manager on every kind of store; steps of a newer version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ostraka
from cli_runs import run
from ostraka import Manager
from ostraka.errors import Busy, CheckpointNotFound, Damaged, UnsupportedFormat
from ostraka.saving import place as _leftovers
from ostraka.storage import _claim, open_store
from runs import damage, fill, make_newer, tree_of

# A run


def names_in(root: Any) -> list[str]:
    """The names in a run directory, but for `_RUN`."""
    return [name for name in open_store(root).list() if name != "_RUN"]


def test_a_run(root: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.02)  # so that it is soon known to be alive
    with Manager(root, every=2, keep=2) as manager:
        assert manager.latest() is None
        saved = [step for step in range(8) if manager.save(step, tree_of(step))]
        manager.wait()
        assert saved == [0, 2, 4, 6]
        assert manager.steps() == [4, 6]
        location = open_store(root).location
        assert run("gc", location, "--yes").stdout == f"{location}: nothing was left behind\n"
    with Manager(root, every=2, keep=2) as manager:
        assert manager.restore()["step"] == manager.restored == 6
        assert manager.restore(4, like=tree_of(0))["step"] == 4
        assert manager.path(6) == open_store(root).at("step_00000006").location
        damage(root, 6)
        with pytest.raises(Damaged, match="the step before it is 4"):
            manager.restore()
        with pytest.warns(UserWarning, match="step 6 can't be restored, so step 4 is"):
            assert manager.restore(fallback=True)["step"] == 4
    assert names_in(root) == ["step_00000004", "step_00000006"]


def test_pins_survive_and_keep(root: Any):
    fill(root, 1, 2)
    with Manager(root) as manager:
        manager.pin(1)
        manager.pin(1)
        calls = (manager.pin, manager.unpin, manager.delete, manager.metrics, manager.restore)
        for call in calls:
            with pytest.raises(CheckpointNotFound, match="there is no step 7 in .*; it has 1, 2"):
                call(7)
    with Manager(root, keep=1, asynchronous=False) as manager:
        manager.save(3, tree_of(3))
        assert manager.steps() == [1, 3]
        assert (manager.metrics(1), manager.best("loss")) == ({"loss": 1.0}, 1)
        assert ostraka.verify(open_store(root).at("step_00000001")).ok
        manager.save(1, {"again": 1}, force=True)  # stays pinned
        manager.save(4, tree_of(4))
        assert manager.steps() == [1, 4]
        manager.unpin(1)
        manager.unpin(1)
        manager.save(5, tree_of(5))
        assert manager.steps() == [5]
        manager.pin(5)
        manager.delete(5)  # asked for, so it is done
        assert manager.steps() == []
        manager.save(5, tree_of(5))
        manager.save(6, tree_of(6))
    assert names_in(root) == ["step_00000006"]


def test_leftovers_are_removed_when_a_manager_is_opened(root: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        _leftovers, "GONE_AFTER_S", -5.0
    )  # of buckets: there is nothing to wait for
    fill(root, 1)
    place = open_store(root)
    for name in ("step_00000001", "step_00000002"):
        place.at(name).create("shards-0123456789abcdef/shard", 0).finish()
    Manager(root).close()
    assert names_in(place) == ["step_00000001"]
    assert len(place.at("step_00000001").list()) == 2
    assert ostraka.verify(place.at("step_00000001")).ok


def test_a_root_that_was_removed_is_made_and_locked_again(
    root: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.02)
    store = open_store(root)
    with Manager(root, asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        assert manager._run_file is not None
        manager._run_file.wait()  # It would write to the directory meanwhile.
        for name in store.list():
            store.delete(name)
        store.remove_if_empty()
        manager.save(2, tree_of(2))
        assert manager.steps() == [2]
        with pytest.raises(Busy, match="another Manager is writing"):
            Manager(root)


# Steps of a newer version

NEWER = "install a newer ostraka"


def test_the_newest_step_is_of_a_newer_version(tmp_path: Path):
    fill(tmp_path, 1, 2)
    make_newer(tmp_path, 2)
    with Manager(tmp_path, keep=1, asynchronous=False) as manager:
        calls: list[Callable[[], Any]] = [
            manager.latest,
            manager.restore,
            lambda: manager.restore(2),
            lambda: manager.restore(fallback=True),
            lambda: manager.resume(tree_of(0)),
            lambda: next(manager.watch(after=1)),
        ]
        for call in calls:
            with pytest.raises(UnsupportedFormat, match=NEWER):
                call()
        assert manager.restore(1)["step"] == 1
        assert manager.steps() == [1]
        # Going on from the older one, and saving what the newer one has done already.
        with pytest.raises(ValueError, match="step 1 is lower than 2, the latest step"):
            manager.save(1, tree_of(1))
        # Retention never deletes it.
        manager.save(3, tree_of(3))
        assert manager.latest() == 3
        assert manager.restore()["step"] == 3
    assert names_in(tmp_path) == ["step_00000002", "step_00000003"]
    assert open_store(tmp_path).at("step_00000002").files("shards-")
    # Then comes a damaged one.
    damage(tmp_path, 3, name="_METADATA")
    reader = Manager(tmp_path, read_only=True)
    with pytest.raises(UnsupportedFormat, match=NEWER):
        reader.latest()
    with (
        pytest.warns(UserWarning, match="step 3 can't be restored, so step 2 is"),
        pytest.raises(UnsupportedFormat, match=NEWER),
    ):
        reader.restore(fallback=True)


def test_ls_and_rm_of_a_step_of_a_newer_version(tmp_path: Path):
    fill(tmp_path, 1, 2)
    make_newer(tmp_path, 2)
    result = run("ls", tmp_path)
    assert "unsupported: " in result.stdout
    assert result.exit_code == 2
    (problem,) = json.loads(run("ls", tmp_path, "--json").stdout)["steps"][1]["problems"]
    assert NEWER in problem
    result = run("rm", tmp_path, 2, "--yes")
    assert "step 2 in" in result.stderr
    assert "is the newest good one" in result.stderr
