"""The manager and the commands for steps, on every kind of store; steps of a newer version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ostraka
from cli_runs import run
from ostraka import Best, Manager
from ostraka.errors import Busy, CheckpointNotFound, Damaged, UnsupportedFormat
from ostraka.layout import metadata, shard_file
from ostraka.saving import place as _leftovers
from ostraka.storage import Store, _claim, open_store
from places import place_of_kind
from runs import damage, fill, tree_of


@pytest.fixture(params=["directory", "memory", "without locks", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What a Manager may be given."""
    return place_of_kind(request.param, "runs", request, tmp_path)


# A run


def names_in(root: Any) -> list[str]:
    """The names in a run directory, but for `_RUN`."""
    return [name for name in open_store(root).list() if name != "_RUN"]


def test_a_run(root: Any):
    with Manager(root, every=2, keep=2) as manager:
        assert manager.latest() is None
        saved = [step for step in range(8) if manager.save(step, tree_of(step))]
        manager.wait()
        assert saved == [0, 2, 4, 6]
        assert manager.steps() == [4, 6]
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


def test_one_manager_at_a_time(root: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_claim, "RENEW_EVERY_S", 0.02)  # so that it is soon known to be alive
    with Manager(root):
        with pytest.raises(Busy, match="another Manager is writing to"):
            Manager(root)
        assert Manager(root, read_only=True).steps() == []
    Manager(root).close()


def test_pins_metrics_and_deletions(root: Any):
    fill(root, 1, 2, 3)
    with Manager(root, keep=1, asynchronous=False) as manager:
        manager.pin(1)
        manager.save(4, tree_of(4))
        assert manager.steps() == [1, 4]
        assert manager.metrics(1) == {"loss": 1.0}
        assert manager.best(Best("loss")) == 1
        manager.unpin(1)
        manager.save(5, tree_of(5))
        assert manager.steps() == [5]
        manager.delete(5)
        assert manager.steps() == []
        with pytest.raises(CheckpointNotFound, match="there is no step 5 in"):
            manager.delete(5)
    assert names_in(root) == []


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


# The commands


def test_gc_beside_a_manager_that_is_open(root: Any):
    with Manager(root, asynchronous=False) as manager:
        manager.save(1, tree_of(1))
        location = open_store(root).location
        assert run("gc", location, "--yes").stdout == f"{location}: nothing was left behind\n"
        assert manager.restore()["step"] == 1


# Steps of a newer version


def rewrite(place: Store, change: Callable[[dict[str, Any]], None]) -> None:
    """Change `_METADATA` and give it the digest that it then has."""
    document = json.loads(place.get("_METADATA"))
    change(document)
    document.pop("digest")
    text = json.dumps(document, separators=(",", ":")).encode()[:-1]
    whole = text + b',"digest":"' + shard_file.digest(text).encode() + b'"}\n'
    assert metadata.metadata_is_intact(whole)
    place.put("_METADATA", whole)


def make_newer(root: Any, step: int) -> None:
    place = open_store(root).at(f"step_{step:08d}")
    rewrite(place, lambda document: document.update(version=3))


NEWER = "install a newer ostraka"


def test_the_newest_step_is_of_a_newer_version(tmp_path: Path):
    fill(tmp_path, 1, 2)
    make_newer(tmp_path, 2)
    with Manager(tmp_path, keep=1, asynchronous=False) as manager:
        for call in (manager.latest, manager.restore, lambda: manager.restore(2)):
            with pytest.raises(UnsupportedFormat, match=NEWER):
                call()
        with pytest.raises(UnsupportedFormat, match=NEWER):
            manager.restore(fallback=True)
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


def test_a_damaged_step_after_one_of_a_newer_version(tmp_path: Path):
    fill(tmp_path, 1, 2, 3)
    make_newer(tmp_path, 2)
    open_store(tmp_path).at("step_00000003").put("_METADATA", b'{"format":"ostraka"')
    manager = Manager(tmp_path, read_only=True)
    with pytest.raises(UnsupportedFormat, match=NEWER):
        manager.latest()
    with (
        pytest.warns(UserWarning, match="step 3 can't be restored, so step 2 is"),
        pytest.raises(UnsupportedFormat, match=NEWER),
    ):
        manager.restore(fallback=True)


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
