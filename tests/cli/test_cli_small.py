"""The small commands: `which`, `pin`, `unpin`, `du`."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ostraka
from cli_runs import PROGRAM, run, run_without
from ostraka import Manager
from ostraka.manager.steps import Root
from places import Place


@pytest.fixture
def root(place: Place) -> Place:
    path = place / "runs"
    with Manager(path, every=None, keep=None, asynchronous=False) as manager:
        for step in (9, 10, 11):
            manager.save(step, {"x": np.full(1000 * step, step)})
    return path


# which


def test_which_is_the_newest_committed_step(root: Place):
    result = run("which", root)
    assert (result.exit_code, result.stdout) == (0, f"{root}/step_00000011\n")
    document = json.loads(run("which", root, "--json").stdout)
    assert (document["step"], document["path"]) == (11, f"{root}/step_00000011")
    (root / "step_00000011" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    assert run("which", root).stdout == f"{root}/step_00000010\n"
    (root / "step_00000010" / "_METADATA").unlink()
    assert run("which", root).stdout == f"{root}/step_00000009\n"


@pytest.mark.parametrize("name", ["nowhere", "empty", "runs/step_00000009"])
def test_which_of_none_ends_with_2(root: Place, name: str):
    (root.parent / "empty").mkdir(exist_ok=True)
    (root.parent / "empty" / "notes.txt").write_text("no steps here")
    result = run("which", root.parent / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


# pin and unpin


def pinned(root: Place) -> list[int]:
    return [step.step for step in Root(root).steps() if step.pinned]


def test_pins_of_several_steps(root: Place):
    result = run("pin", root / "9", root / "step_00000010")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{root}/step_00000009: pinned\n{root}/step_00000010: pinned\n"
    assert pinned(root) == [9, 10]
    assert run("pin", root / "9").exit_code == 0
    document = json.loads(run("unpin", root / "9", "--json").stdout)
    assert document["steps"] == [{"step": 9, "path": f"{root}/step_00000009", "pinned": False}]
    assert pinned(root) == [10]


def test_nothing_is_pinned_if_one_of_them_is_no_step(root: Place):
    for wrong, message in (
        (root / "12", "there is no step 12 in"),
        (root, "is no step of a run; give the path of one, such as runs/7"),
    ):
        result = run("pin", root / "9", wrong)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert pinned(root) == []


def test_a_run_that_is_under_way_respects_a_pin_of_another_process(root: Place):
    with Manager(root, every=None, keep=1, asynchronous=False) as manager:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "pin", str(root / "9")], check=False, text=True
        )
        assert done.returncode == 0
        manager.save(12, {"x": np.ones(3)})
        assert manager.steps() == [9, 12]
        assert run("unpin", root / "9").exit_code == 0
        manager.save(13, {"x": np.ones(3)})
        assert manager.steps() == [13]


# du


def test_du_by_step_largest_first(root: Place):
    document = json.loads(run("du", root, "--json").stdout)
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


def test_du_by_group(place: Place):
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    state = {"params": params, "opt_state": optax.adamw(0.1).init(params), "steps": jnp.arange(8)}
    ostraka.save(place / "c", state)
    (one,) = json.loads(run("du", place / "c", "--json").stdout)["checkpoints"]
    own = 4 * (64 * 64 + 64)
    assert one["groups"] == {"parameters": own, "optimizer": 2 * own + 4, "other": 32}
    assert one["problem"] is None


def test_du_of_a_damaged_step_counts_its_files(root: Place):
    (root / "step_00000010" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    found = json.loads(run("du", root, "--json").stdout)["checkpoints"]
    assert [(one["groups"] == {}, one["problem"] is not None) for one in found] == [
        (False, False),
        (True, True),
        (False, False),
    ]
    assert all(one["bytes"] for one in found)
    assert run("du", root / "12").exit_code == 2


@pytest.mark.parametrize("command", ["which", "du"])
def test_jax_and_numpy_are_not_imported(tmp_path: Place, command: str):
    ostraka.save(tmp_path / "1", {"x": np.ones(3)})
    run_without({"jax", "numpy", "rich"}, command, tmp_path)
