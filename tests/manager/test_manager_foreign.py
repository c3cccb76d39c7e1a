"""A Manager on a directory that another library wrote to: it reads Orbax steps, and keeps them."""

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from safetensors.numpy import save_file

import ostraka
from cli_runs import run
from orbax_cases import ocp
from ostraka import Best, Manager
from ostraka.errors import CheckpointNotFound, Damaged, PathInTheWay, UnsupportedFormat
from ostraka.formats.orbax._read import import_tensorstore
from ostraka.manager.steps import Root
from ostraka.testing import run_processes
from places import names_of
from runs import contents


def tree_of(step: int) -> dict[str, Any]:
    return {"w": jnp.full(8, step, jnp.float32), "step": step}


def write_steps(directory: Path, *steps: int, **naming: Any) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], **naming)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
            for step in steps:
                metrics = {"loss": 1.0 / step}
                manager.save(step, args=ocp.args.StandardSave(tree_of(step)), metrics=metrics)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("orbax") / "runs"
    write_steps(directory, 2, 4, 8)
    return directory


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    """Steps 2, 4 and 8, which Orbax wrote."""
    return Path(shutil.copytree(written, tmp_path / "runs"))


# One answer


def test_a_manager_reads_what_orbax_wrote(root: Path):
    with Manager(root, keep=1) as manager:
        assert manager.latest() == 8
        assert manager.steps() == [2, 4, 8]
        assert manager.metrics(4) == {"loss": 0.25}
        assert manager.best(Best("loss", "max")) == 2
        assert manager.path(8) == str(root / "8")
        assert manager.restore()["step"] == manager.restored == 8
        restored = manager.restore(4, like=tree_of(0))
        assert restored["step"] == 4
        np.testing.assert_array_equal(restored["w"], tree_of(4)["w"])
        assert manager.restore(into=tree_of(0), fallback=True)["step"] == 8
        assert list(manager.watch(timeout_s=0)) == [2, 4, 8]
        assert list(manager.watch(timeout_s=0, newest_only=True)) == [8]


NAMINGS: list[tuple[str, dict[str, Any]]] = [
    ("8", {}),
    ("0008", {"step_format_fixed_length": 4}),
    ("step_8", {"step_prefix": "step"}),
    ("step_00000008", {"step_prefix": "step", "step_format_fixed_length": 8}),
    ("ckpt_8", {"step_prefix": "ckpt"}),
]


@pytest.mark.parametrize(("name", "naming"), NAMINGS, ids=[name for name, _ in NAMINGS])
def test_all_ways_to_look_at_a_directory_agree(root: Path, name: str, naming: dict[str, Any]):
    # As Orbax names it; its content does not depend on that.
    shutil.rmtree(root / "2")
    for step in (4, 8):
        made = ocp.step.standard_name_format(**naming).build_name(step)
        (root / str(step)).rename(root / f"{made}-")
        (root / f"{made}-").rename(root / made)
    assert (root / name).is_dir()
    assert ostraka.open(root).path == str(root / name)
    assert ostraka.restore(root)["step"] == 8
    assert ostraka.open(root / "4")["step"] == 4
    reader = Manager(root, read_only=True)
    assert (reader.latest(), reader.steps(), reader.path(8)) == (8, [4, 8], str(root / name))
    assert reader.restore(like=tree_of(0))["step"] == 8
    assert list(reader.watch(timeout_s=0)) == [4, 8]
    listed = json.loads(run("ls", root, "--json").stdout)["steps"]
    assert [(one["step"], one["format"], one["foreign"]) for one in listed] == [
        (4, "orbax", True),
        (8, "orbax", True),
    ]
    assert listed[1]["path"] == str(root / name)
    assert "foreign (Orbax)" in run("ls", root).stdout


def test_a_prefix_is_never_that_of_the_newest_step_beside_others(root: Path):
    """`ckpt_8` may be an earlier step of the run, and `export_2030` is none of it."""
    for step in (2, 4, 8):
        (root / str(step)).rename(root / f"ckpt_{step}")
    with Manager(root, asynchronous=False) as manager:
        assert manager.latest() == ostraka.open(root)["step"] == 8
        manager.save(9, tree_of(9))
        shutil.copytree(root / "ckpt_2", root / "export_2030")
        assert manager.latest() == ostraka.open(root)["step"] == 9
        assert manager.steps() == list(manager.watch(timeout_s=0)) == [2, 4, 8, 9]
        assert manager.restore()["step"] == 9
        assert manager.restore(4)["step"] == 4
        manager.save(10, tree_of(10))


def test_two_series_are_not_mixed(root: Path):
    (root / "2").rename(root / "ckpt_2")
    (root / "4").rename(root / "ckpt_4")
    (root / "8").rename(root / "ema_8")
    reader = Manager(root, read_only=True)
    several = r"holds several series of Orbax steps \(ckpt_4, ema_8\), and it can't be told which"
    readers = (reader.latest, reader.restore, lambda: ostraka.open(root))
    for read in readers:
        with pytest.raises(CheckpointNotFound, match=several):
            read()
    assert reader.restore(4)["step"] == ostraka.open(root / "ckpt_4")["step"] == 4


def test_a_step_with_several_items_is_what_open_gives(tmp_path: Path):
    with ocp.CheckpointManager(tmp_path / "runs") as manager:
        items = {
            "params": ocp.args.StandardSave({"w": jnp.ones(4)}),
            "about": ocp.args.JsonSave({"epoch": 3}),
        }
        manager.save(8, args=ocp.args.Composite(**items))
    with Manager(tmp_path / "runs") as manager:
        restored = manager.restore()
    assert sorted(restored) == ["about", "params"]
    assert restored["about"] == ostraka.restore(tmp_path / "runs")["about"] == {"epoch": 3}


def test_steps_that_orbax_never_finished_are_none(root: Path):
    (root / "8").rename(root / "8.orbax-checkpoint-tmp-1")
    about = root / "4" / "_CHECKPOINT_METADATA"
    for file in (root / "4").glob("commit_success*"):
        file.unlink()
    about.write_text(json.dumps(json.loads(about.read_text()) | {"commit_timestamp_nsecs": None}))
    reader = Manager(root, read_only=True)
    assert (reader.latest(), reader.steps()) == (2, [2])
    assert ostraka.open(root)["step"] == 2
    assert list(reader.watch(timeout_s=0)) == [2]


def test_a_damaged_step_is_not_passed_over(root: Path):
    (root / "8" / "_CHECKPOINT_METADATA").write_text("{")
    (root / "8" / "commit_success.txt").write_text("")
    with Manager(root) as manager:
        assert manager.steps() == [2, 4]
        with pytest.raises(Damaged, match="_CHECKPOINT_METADATA.*the step before it is 4"):
            manager.restore()
        with pytest.warns(UserWarning, match="so step 4 is"):
            assert manager.restore(fallback=True)["step"] == 4
    listed = run("ls", root)
    assert listed.exit_code == 1
    assert "damaged" in listed.stdout


def test_without_tensorstore_the_steps_are_known(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    import_tensorstore.cache_clear()
    try:
        with Manager(root) as manager:
            assert manager.latest() == 8
            with pytest.raises(UnsupportedFormat, match="TensorStore.*pip install tensorstore"):
                manager.restore()
    finally:
        import_tensorstore.cache_clear()


# Never touched


def test_orbax_steps_are_neither_deleted_nor_counted(root: Path):
    before = contents(root)
    with Manager(root, keep=2, keep_best=Best("loss", "min"), asynchronous=False) as manager:
        for step in (9, 10, 11, 12):
            manager.save(step, tree_of(step), metrics={"loss": float(step)})
        assert manager.steps() == [2, 4, 8, 9, 11, 12]
        manager.delete(9)
        for change in (manager.delete, manager.pin, manager.unpin):
            with pytest.raises(PathInTheWay, match="step 8 of .* was written by Orbax, and"):
                change(8)
    refused = run("rm", root, 4, "--yes", "--force")
    assert refused.exit_code != 0
    assert f"delete {root}/4 yourself" in refused.stderr
    run("gc", root, "--yes")
    after = contents(root)
    assert {name: data for name, data in after.items() if name in before} == before


def test_a_step_of_orbax_is_not_replaced(root: Path):
    before = contents(root)
    with Manager(root, asynchronous=False) as manager:
        with pytest.raises(ValueError, match="step 8 in .* was written by Orbax, and is not"):
            manager.save(8, tree_of(80))
        with pytest.raises(ValueError, match="step 4 is lower than 8, the latest step"):
            manager.save(4, tree_of(40))
        manager.save(8, tree_of(80), force=True)
        assert manager.restore()["step"] == 80
        assert manager.path(8) == str(root / "step_00000008")
        manager.save(8, tree_of(81))
        assert manager.restore()["step"] == ostraka.open(root)["step"] == 81
        manager.delete(8)
        assert manager.restore()["step"] == 8
    assert contents(root) == before


def test_a_step_of_orbax_with_the_managers_own_name_is_in_the_way(root: Path):
    (root / "8").rename(root / "step_00000008")
    with Manager(root, asynchronous=False) as manager:
        with pytest.raises(Exception, match="step_00000008 .*that Ostraka did not write|other thi"):
            manager.save(8, tree_of(80), force=True)
        assert manager.restore()["step"] == 8


def test_a_mirror_gets_only_what_the_manager_saved(root: Path, tmp_path: Path):
    with Manager(root, keep=1, mirror=tmp_path / "copies") as manager:
        state = manager.restore(like=tree_of(0))
        manager.save(state["step"] + 1, tree_of(9))
    assert Manager(tmp_path / "copies", read_only=True).steps() == [9]
    found = [(step.step, step.format, step.is_foreign) for step in Root(root).steps()]
    assert found[2:] == [(8, "orbax", True), (9, "ostraka", False)]


def resume(root: str) -> list[Any]:
    with Manager(root, keep=1) as manager:
        found: list[Any] = [manager.latest(), manager.restore(like=tree_of(0))["step"]]
        try:
            manager.save(8, tree_of(8))
        except ValueError as error:
            found.append("written by Orbax" in str(error))
        manager.save(9, tree_of(9))
        manager.save(10, tree_of(10))
    return found


def test_all_processes_go_on_from_the_same_step(root: Path):
    results = run_processes(resume, str(root), processes=2)
    assert [result.value for result in results] == [[8, 8, True]] * 2
    assert Manager(root, read_only=True).steps() == [2, 4, 8, 10]


# A directory that is taken for empty


def write_safetensors(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    save_file({"w": np.ones(4)}, directory / "model.safetensors")


MSGPACK = serialization.to_bytes({"w": np.ones(4)})
LIKELY: dict[str, tuple[Callable[[Path], Any], str]] = {
    "msgpack": (
        lambda root: (root / "checkpoint_8").write_bytes(MSGPACK),
        "checkpoint_8 is a msgpack file",
    ),
    "hugging face": (
        lambda root: write_safetensors(root / "checkpoint-500"),
        "checkpoint-500 holds safetensors files; read them with ostraka.restore",
    ),
    "safetensors": (
        lambda root: write_safetensors(root / "8"),
        "8 holds safetensors files; read them with ostraka.restore",
    ),
    "below": (
        lambda root: ostraka.save(root / "ckpts" / "step_00000008", tree_of(8)),
        "ckpts holds steps; to go on from them, give the Manager .*/ckpts",
    ),
    "other name": (
        lambda root: ostraka.save(root / "epoch-8", tree_of(8)),
        "epoch-8 is a checkpoint, and its name is not that of a step",
    ),
    "npz": (
        lambda root: np.savez(root / "state_8.npz", w=np.ones(4)),
        "state_8.npz is a .npz file of numpy",
    ),
    "model": (write_safetensors, "it holds safetensors files"),
}


@pytest.mark.parametrize("kind", LIKELY)
def test_a_run_that_begins_beside_checkpoints_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
):
    write, what = LIKELY[kind]
    write(tmp_path)
    with Manager(tmp_path, asynchronous=False) as manager:
        assert manager.latest() is None
        with pytest.raises(CheckpointNotFound, match=f"no step in .* to restore; but .*{what}"):
            manager.restore()
        assert len(caplog.messages) == 1
        assert "begins from scratch there, but" in caplog.messages[0]
        assert any(word in caplog.messages[0] for word in what.split(";")[:1])
        manager.save(1, tree_of(1))
    caplog.clear()
    assert Manager(tmp_path, read_only=True).latest() == 1
    assert not caplog.messages


def test_a_listing_without_steps_says_what_is_there(tmp_path: Path):
    LIKELY["below"][0](tmp_path)
    assert "no steps; but ckpts holds steps" in run("ls", tmp_path).stdout


def test_one_level_too_low(root: Path, caplog: pytest.LogCaptureFixture):
    assert Manager(root / "9", read_only=True).latest() is None
    assert f"{root} holds steps; to go on from them" in caplog.text
    several: list[dict[str, Any]] = [{}, {"read_only": True}]
    for options in several:
        with pytest.raises((PathInTheWay, CheckpointNotFound), match="is itself a checkpoint"):
            Manager(root / "8", **options)
    assert names_of(root) == ["2", "4", "8"]


def test_a_directory_with_other_things_is_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "logs_2024").mkdir()
    (tmp_path / "events_17").write_text("text")
    (tmp_path / "config.json").write_text("{}")
    with caplog.at_level(logging.WARNING), Manager(tmp_path) as manager:
        assert manager.latest() is None
    assert not caplog.messages
