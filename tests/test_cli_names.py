"""`--names`: directories of Hugging Face as the tree that a restore makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import ostraka
from ostraka.cli import main
from test_convert import save_for_hugging_face


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_for_hugging_face(tmp_path / "llama")
    return tmp_path / "llama"


def paths_of(shown: Result) -> list[str]:
    return [leaf["path"] for leaf in json.loads(shown.stdout)["leaves"]]


@pytest.mark.parametrize("names", ["hf", "llama"])
def test_show_has_the_paths_of_a_restore(llama: Path, names: str):
    shown = run("show", llama, "--names", names, "--json")
    assert shown.exit_code == 0, shown.stderr
    assert set(paths_of(shown)) == set(ostraka.open(llama, names=names))
    assert "layers/1/mlp/down_proj/kernel" in paths_of(shown)
    assert "model.norm.weight" in paths_of(run("show", llama, "--json"))


def test_show_a_leaf_and_what_is_in_it(llama: Path):
    leaf = "layers/0/mlp/up_proj/kernel"
    shown = run("show", llama, leaf, "--names", "hf", "--slice", "0,:2")
    assert shown.exit_code == 0, shown.stderr
    assert leaf in shown.stdout
    shown = run("show", llama, leaf, "--names", "hf", "--json")
    assert json.loads(shown.stdout)["shape"] == [64, 96]
    shown = run("show", llama, "layers/0/**", "--names", "hf", "--stats")
    assert shown.exit_code == 0, shown.stderr
    found = run("show", llama, "--names", "hf", "--nan", "--json")  # They are random bits.
    assert found.exit_code == 1
    assert "layers/1/mlp/down_proj/kernel" in found.stdout


def test_diff_of_a_model_and_what_was_converted_of_it(llama: Path, tmp_path: Path):
    ostraka.convert(llama, tmp_path / "ours", to="ostraka", names="hf")
    for one, other in ((llama, tmp_path / "ours"), (tmp_path / "ours", llama), (llama, llama)):
        found = run("diff", one, other, "--names", "hf")
        assert found.exit_code == 0, found.stdout + found.stderr
    assert run("diff", llama, tmp_path / "ours").exit_code == 1


def test_plan_as_a_restore_sees_it(llama: Path):
    planned = run("plan", llama, "--names", "hf", "--mesh", "data=2", "--json")
    assert planned.exit_code == 0, planned.stderr
    as_files = run("show", llama, "--json")
    variant = json.loads(planned.stdout)["variants"][0]
    assert set(variant["groups"]) == {"embed_tokens", "layers", "norm", "lm_head"}
    leaves = json.loads(as_files.stdout)["leaves"]
    assert variant["data_bytes"] == sum(leaf["bytes"] for leaf in leaves)
    assert "gpt2" in run("plan", "--names").stdout.split()


def test_names_that_do_not_fit_are_one_sentence(llama: Path, tmp_path: Path):
    ostraka.save(tmp_path / "ours", {"w": 1.0})
    for arguments in (
        ("show", llama, "--names", "mixtral-of-nobody"),
        ("show", tmp_path / "ours", "--names", "hf"),
        ("plan", llama, "--names", "nothing.json", "--mesh", "data=2"),
        ("plan", "x.py:make", "--names", "hf"),
        ("diff", llama, llama, "--names", "nobody"),
    ):
        found = run(*arguments)
        assert found.exit_code not in (0, 1), found.stdout
        assert found.stdout == ""
        assert "Traceback" not in found.stderr
        assert found.exception is None or isinstance(found.exception, SystemExit)
