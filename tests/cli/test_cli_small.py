"""The small commands: `which`, `pin`, `unpin`, `du`."""

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ostraka
from cli_runs import PROGRAM, as_json, assert_fails, run
from ostraka import Manager
from ostraka.manager.steps import Root
from places import Place


def fill(path: Place) -> Place:
    with Manager(path, every=None, keep=None, asynchronous=False) as manager:
        for step in (9, 10, 11):
            manager.save(step, {"x": np.full(1000 * step, step)})
    return path


@pytest.fixture
def root(place: Place) -> Place:
    return fill(place / "runs")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    fill(tmp_path / "runs")
    return tmp_path / "runs"


# which


def test_which_is_the_newest_committed_step(root: Place):
    result = run("which", root)
    assert (result.exit_code, result.stdout) == (0, f"{root}/step_00000011\n")
    document = as_json("which", root)
    assert (document["step"], document["path"]) == (11, f"{root}/step_00000011")
    (root / "step_00000011" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    assert run("which", root).stdout == f"{root}/step_00000010\n"
    (root / "step_00000010" / "_METADATA").unlink()
    assert run("which", root).stdout == f"{root}/step_00000009\n"
    (root.parent / "empty").mkdir(exist_ok=True)
    (root.parent / "empty" / "notes.txt").write_text("no steps here")
    for name in ("nowhere", "empty", "runs/step_00000009"):
        assert_fails(run("which", root.parent / name))


# pin and unpin


def pinned(root: Place) -> list[int]:
    return [step.step for step in Root(root).steps() if step.pinned]


def test_pins_of_several_steps(root: Place):
    result = run("pin", root / "9", root / "step_00000010")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{root}/step_00000009: pinned\n{root}/step_00000010: pinned\n"
    assert pinned(root) == [9, 10]
    assert run("pin", root / "9").exit_code == 0
    document = as_json("unpin", root / "9")
    assert document["steps"] == [{"step": 9, "path": f"{root}/step_00000009", "pinned": False}]
    assert pinned(root) == [10]


def test_nothing_is_pinned_if_one_of_them_is_no_step(local: Path):
    for wrong, message in (
        (local / "12", "there is no step 12 in"),
        (local, "is no step of a run; give the path of one, such as runs/7"),
    ):
        assert_fails(run("pin", local / "9", wrong), message)
    assert pinned(local) == []


def test_a_run_that_is_under_way_respects_a_pin_of_another_process(local: Path):
    with Manager(local, every=None, keep=1, asynchronous=False) as manager:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "pin", str(local / "9")], check=False, text=True
        )
        assert done.returncode == 0
        manager.save(12, {"x": np.ones(3)})
        assert manager.steps() == [9, 12]
        assert run("unpin", local / "9").exit_code == 0
        manager.save(13, {"x": np.ones(3)})
        assert manager.steps() == [13]


# du


def test_du_by_step_largest_first(root: Place):
    document = as_json("du", root)
    names = [one["path"].rpartition("/")[2] for one in document["checkpoints"]]
    assert names == ["step_00000011", "step_00000010", "step_00000009"]
    for one in document["checkpoints"]:
        files = [
            file for file in (root / one["path"].rpartition("/")[2]).rglob("*") if file.is_file()
        ]
        assert one["bytes"] == sum(file.stat().st_size for file in files)
        assert one["groups"] == {"parameters": 0, "optimizer": 0, "other": one["groups"]["other"]}
    assert document["bytes"] == sum(one["bytes"] for one in document["checkpoints"])
    lines = run("du", root).stdout.splitlines()
    assert lines[0].split() == ["files", "parameters", "optimizer", "other", "checkpoint"]
    assert lines[1].endswith(f"  {root}/step_00000011")
    assert lines[-1].startswith("3 checkpoints, ")


def test_du_by_group(tmp_path: Path):
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    state = {"params": params, "opt_state": optax.adamw(0.1).init(params), "steps": jnp.arange(8)}
    ostraka.save(tmp_path / "c", state)
    (one,) = as_json("du", tmp_path / "c")["checkpoints"]
    own = 4 * (64 * 64 + 64)
    assert one["groups"] == {"parameters": own, "optimizer": 2 * own + 4, "other": 32}
    assert one["problem"] is None


def test_du_of_a_damaged_step_counts_its_files(local: Path):
    (local / "step_00000010" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    found = as_json("du", local)["checkpoints"]
    assert [(one["groups"] == {}, one["problem"] is not None) for one in found] == [
        (False, False),
        (True, True),
        (False, False),
    ]
    assert all(one["bytes"] for one in found)
    assert run("du", local / "12").exit_code == 2
