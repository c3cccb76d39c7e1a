"""`ostraka copy`."""

from pathlib import Path

import numpy as np
import pytest

import ostraka
from cli_runs import as_json, assert_fails, flip, run, run_on_terminal
from ostraka import Manager


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    with Manager(path, every=None, keep=None, asynchronous=False) as manager:
        for step in (100, 200):
            manager.save(step, {"x": np.full(1000, step)})
    return path


def test_copy(model: Path, tmp_path: Path):
    result = run("copy", model, tmp_path / "there")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{model} to {tmp_path / 'there'}: 1 checkpoint, ")
    assert "already" not in result.stdout
    assert ostraka.verify(tmp_path / "there").ok
    again = run("copy", model, tmp_path / "there")
    assert again.exit_code == 0
    assert ": 0 checkpoints, 0 B; already there: 1 checkpoint, " in again.stdout


def test_copy_as_json(root: Path, tmp_path: Path):
    document = as_json("copy", root, tmp_path / "there")
    assert document["source"] == str(root)
    assert document["target"] == str(tmp_path / "there")
    assert (document["copied"], document["skipped"]) == (2, 0)
    size = sum(file.stat().st_size for file in root.glob("step_*/**/*") if file.is_file())
    assert (document["bytes_copied"], document["bytes_skipped"]) == (size, 0)
    assert document["duration_s"] > 0
    again = as_json("copy", root, tmp_path / "there")
    assert (again["copied"], again["skipped"], again["bytes_skipped"]) == (0, 2, size)


def test_copy_of_a_step_to_a_bucket_and_back(root: Path, bucket: str, tmp_path: Path):
    assert run("copy", root / "200", f"{bucket}/step_200").exit_code == 0
    assert run("copy", f"{bucket}/200", tmp_path / "back").exit_code == 0
    assert ostraka.restore(tmp_path / "back")["x"][0] == 200


def test_copy_of_what_is_damaged(root: Path, tmp_path: Path):
    flip(root / "step_00000100")
    result = run("copy", root, tmp_path / "there")
    assert_fails(result, f"checkpoint {root} is damaged: step_00000100/shards-", code=1)
    assert Manager(tmp_path / "there", read_only=True).steps() == [200]


def test_copy_that_can_not_be(model: Path, root: Path, tmp_path: Path):
    for arguments, message in (
        ((tmp_path / "nothing", tmp_path / "there"), "there is no checkpoint at"),
        ((model, root), "is a directory of steps"),
        ((model, model), "can't be copied onto itself"),
        ((model,), "Missing argument 'DST'"),
    ):
        assert_fails(run("copy", *arguments), message)


def test_copy_draws_a_bar_on_a_terminal(model: Path, tmp_path: Path):
    code, shown = run_on_terminal("copy", model, tmp_path / "there")
    assert code == 0
    assert f"copying {model}"[:20] in shown
    assert "1 checkpoint" in shown
