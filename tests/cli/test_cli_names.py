"""`--names`: directories of Hugging Face as the tree that a restore makes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file

import ostraka
from cli_runs import as_json, assert_fails, put, run
from hf_files import save_for_hugging_face
from ostraka.common.units import human_bytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("names") / "llama"
    save_for_hugging_face(path)
    return path


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


def test_totals_of_a_tied_model(tmp_path: Path):
    tensors = {
        "wte.weight": np.ones((64, 32), np.float32),
        "wpe.weight": np.ones((16, 32), np.float32),
        "h.0.attn.c_attn.weight": np.ones((32, 96), np.float32),
        "ln_f.weight": np.ones(32, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    shown = run("show", tmp_path, "--names", "hf")
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert f"\n4 arrays, {size / 1024:.1f} KiB in 1 file\n" in shown.stdout
    totals = as_json("show", tmp_path, "--names", "hf")["totals"]
    assert (totals["arrays"], totals["bytes"]) == (4, size)
    assert totals["file_bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert (totals["processes"], totals["devices"]) == (None, None)
    for options in ((), ("--mesh", "x=2")):
        planned = run("plan", tmp_path, "--names", "hf", "--json", *options)
        (plan,) = json.loads(planned.stdout)["variants"]
        assert (plan["arrays"], plan["data_bytes"]) == (4, size), options


RULES: dict[str, Any] = {
    "e{e}": {"path": "experts", "transpose": True, "stack": "e"},
    "qkv": {"cut": {"axis": 0, "into": {"q": 32, "k": -1}}},
    "step": None,
    "left_out": None,
}


def test_totals_of_a_view_are_those_of_what_is_shown_and_of_all_files(tmp_path: Path):
    noise = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    tree = {
        "e0": put(np.zeros((64, 4096), np.float32), "fsdp"),
        "e1": put(np.zeros((64, 4096), np.float32), "fsdp"),
        "qkv": put(noise, "fsdp"),
        "left_out": noise,
        "step": np.int32(7),
    }
    ostraka.save(tmp_path / "plain", tree)
    ostraka.save(tmp_path / "packed", tree, compress="zstd", parity=1)
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    rules = ("--names", tmp_path / "rules.json")
    by = "written by 1 process with 8 devices"
    shown = run("show", tmp_path / "plain", *rules).stdout
    assert f"\n3 arrays, 3.0 MiB of 4.0 MiB in 8 files, {by}\n" in shown
    shown = run("show", tmp_path / "packed", *rules).stdout
    files = list((tmp_path / "packed").glob("*/*.safetensors")) + list(
        (tmp_path / "packed").glob("*.safetensors")
    )
    shards = [file.stat().st_size for file in files if file.name.startswith("shard_")]
    parity = [file.stat().st_size for file in files if not file.name.startswith("shard_")]
    assert parity
    assert (
        f"3 arrays, 3.0 MiB of 4.0 MiB compressed to {sum(shards) / 2**20:.1f} MiB in "
        f"{len(files)} files, {len(parity)} of them parity of {human_bytes(sum(parity))}, {by}\n"
    ) in shown
    shown = run("show", tmp_path / "packed").stdout
    assert f"5 arrays, 4.0 MiB compressed to {sum(shards) / 2**20:.1f} MiB in" in shown


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
        assert_fails(run(*arguments))
