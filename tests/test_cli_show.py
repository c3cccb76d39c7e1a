"""`ostraka show`: the tree, one leaf, steps."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from cli_runs import flip, put, run, save_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("show") / "checkpoint")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deep") / "checkpoint"
    layers = {
        str(number): {"kernel": np.full((4, number + 1), number, np.float32), "bias": np.ones(2)}
        for number in range(3)
    }
    ostraka.save(path, {"model": {"layers": layers, "head": np.zeros((8, 8))}, "step": 7})
    return path


def rows(output: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in output.splitlines() if line}


def test_leaves_and_totals(checkpoint: Path):
    result = run("show", checkpoint)
    assert result.exit_code == 0
    found = rows(result.stdout)
    assert found["leaf"] == ["dtype", "shape", "spec", "size"]
    assert found["kernel"] == ["bfloat16", "64", "×", "32", "P('fsdp',", "'tp')", "4.0", "KiB"]
    assert found["key"] == ["key<threefry2x32>", "()", "one", "device", "8", "B"]
    assert found["table"] == ["int8", "3", "×", "5", "host", "memory", "15", "B"]
    assert found["step"] == ["int", "100"]
    assert found["rate"] == ["float", "nan"]
    assert found["note"][1].endswith("xxx…")
    assert "3 arrays, 3 values, 4.0 KiB in 8 files, written by 1 process with 8 devices" in (
        result.stdout
    )
    assert "mesh: fsdp=4, tp=2" in result.stdout
    assert 'metadata: {"run": "first"}' in result.stdout


def test_who_wrote_it_when_and_how_long_that_took(checkpoint: Path):
    first, *_, took, _ = run("show", checkpoint).stdout.splitlines()
    assert first.startswith(f"{checkpoint}  saved 20")
    assert first.endswith(f" UTC by ostraka {ostraka.__version__} with jax {jax.__version__}")
    assert took.startswith("took ")
    assert "write " in took


def test_as_json(checkpoint: Path):
    document = json.loads(run("show", checkpoint, "--json").stdout)
    leaves = {leaf["path"]: leaf for leaf in document["leaves"]}
    assert list(leaves) == ["kernel", "key", "table", "step", "rate", "note"]
    assert leaves["kernel"] == {
        "path": "kernel",
        "kind": "jax",
        "dtype": "bfloat16",
        "shape": [64, 32],
        "spec": [["fsdp"], ["tp"]],
        "mesh": 0,
        "prng": None,
        "per_process": False,
        "bytes": 4096,
    }
    assert leaves["key"]["prng"] == "threefry2x32"
    assert leaves["table"]["spec"] is None
    assert leaves["step"] == {"path": "step", "kind": "value", "type": "int", "value": 100}
    assert leaves["rate"]["value"] == "nan"
    assert document["meshes"][0] == {"fsdp": 4, "tp": 2}
    assert document["metadata"] == {"run": "first"}
    assert document["totals"]["bytes"] == 4096 + 8 + 15
    assert document["totals"]["files"] == 8
    assert document["writer"]["timeline"]["bytes"] > 0


def test_an_empty_tree(tmp_path: Path):
    ostraka.save(tmp_path / "empty", {})
    assert "0 arrays, 0 B in 0 files" in run("show", tmp_path / "empty").stdout


def test_text_of_a_checkpoint_does_not_reach_the_terminal_raw(tmp_path: Path):
    tree = {"\x1b[31mred\n": put(np.ones((8, 2)), "fsdp"), "value": "\x1b[2J"}
    path = tmp_path / "odd\x1b[1m"
    ostraka.save(path, tree, metadata={"\x1b": "\x1b"})
    for arguments in [
        ("show", path),
        ("show", path, "\x1b[31mred\n", "--stats"),
        ("verify", path),
        ("diff", path, path, "--all"),
        ("ls", path.parent),
        ("show", path, "\x1b"),
    ]:
        result = run(*arguments)
        assert "\x1b" not in result.stdout + result.stderr, arguments
    assert r"\x1b[31mred\n" in run("show", path).stdout


# Parts of the tree


def test_depth_sums_up_what_lies_deeper(deep: Path):
    found = rows(run("show", deep, "--depth", 2).stdout)
    assert found["model/layers/"] == ["float32,", "float64", "6", "leaves", "144", "B"]
    assert found["model/head"][-2:] == ["512", "B"]
    assert found["step"] == ["int", "7"]
    assert "model/layers/0/kernel" not in found
    assert rows(run("show", deep, "--depth", 1).stdout)["model/"][-2:] == ["656", "B"]


@pytest.mark.parametrize(
    ("sort", "first"), [("tree", "model/layers/0/kernel"), ("size", "model/head"), ("name", None)]
)
def test_sorting(deep: Path, sort: str, first: str | None):
    result = run("show", deep, "--sort", sort, "--json")
    paths = [leaf["path"] for leaf in json.loads(result.stdout)["leaves"]]
    assert paths[0] == (first or min(paths))
    assert paths == sorted(paths) or sort != "name"


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("model/layers/*/kernel", 3), ("**/bias", 3), ("model/layers/1", 2), ("model/", 7)],
)
def test_patterns_choose_leaves(deep: Path, pattern: str, count: int):
    result = run("show", deep, pattern, "--json")
    assert len(json.loads(result.stdout)["leaves"]) == count
    assert f"{count} leaves of {pattern!r}, " in run("show", deep, pattern).stdout


def test_statistics_of_many_leaves(deep: Path):
    found = rows(run("show", deep, "model", "--stats").stdout)
    assert found["leaf"][-6:] == ["least", "most", "mean", "std", "nan", "inf"]
    assert found["model/layers/2/kernel"][-6:] == ["2", "2", "2", "0", "0", "0"]
    document = json.loads(run("show", deep, "--stats", "--json").stdout)
    leaves = {leaf["path"]: leaf for leaf in document["leaves"]}
    assert leaves["model/layers/1/kernel"]["statistics"]["mean"] == 1.0
    assert "statistics" not in leaves["step"]


# One leaf


def test_a_leaf_with_its_sharding_and_files(checkpoint: Path):
    result = run("show", checkpoint, "kernel")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"kernel of {checkpoint}"
    assert lines[1] == "bfloat16  64 × 32  4.0 KiB  P('fsdp', 'tp')"
    assert "(64, 32) P('fsdp', 'tp') on fsdp=4, tp=2" in lines
    assert "16:32 │   2   │   3   │" in lines
    assert any(line.startswith("[16:32, 16:32]  shard_00003.safetensors  ") for line in lines)


def test_the_told_bytes_are_the_elements(checkpoint: Path):
    document = json.loads(run("show", checkpoint, "kernel", "--json").stdout)
    whole = np.asarray(ostraka.open(checkpoint)["kernel"])
    assert len(document["boxes"]) == 8
    for entry in document["boxes"]:
        data = (checkpoint / entry["file"]).read_bytes()
        part = data[entry["offset"] : entry["offset"] + entry["bytes"]]
        box = tuple(slice(*bounds) for bounds in entry["box"])
        assert part == whole[box].tobytes()


def test_a_slice(checkpoint: Path):
    output = run("show", checkpoint, "kernel", "--slice", "0:2,:3").stdout
    assert output.endswith("[0:2,:3]\n[[ 0.  1.  2.]\n [32. 33. 34.]]\n")
    document = json.loads(run("show", checkpoint, "kernel", "--slice", "-1,::16", "--json").stdout)
    assert document["slice"]["shape"] == [2]
    whole = np.asarray(ostraka.open(checkpoint)["kernel"]).astype(float)
    assert document["slice"]["values"] == whole[-1, ::16].tolist()


def test_slices_that_json_has_no_numbers_for(tmp_path: Path):
    tree = {"z": np.array([1 + 2j]), "n": np.array([np.nan, 1]), "b": np.array([True])}
    ostraka.save(tmp_path / "c", tree)

    def values(leaf: str) -> object:
        result = run("show", tmp_path / "c", leaf, "--slice", "...", "--json")
        return json.loads(result.stdout)["slice"]["values"]

    assert (values("z"), values("n"), values("b")) == (["(1+2j)"], ["nan", 1.0], [True])


def test_statistics_of_a_leaf(checkpoint: Path):
    assert "least 0  most 2048  mean " in run("show", checkpoint, "kernel", "--stats").stdout
    document = json.loads(run("show", checkpoint, "table", "--stats", "--json").stdout)
    assert document["statistics"] == {
        "count": 15,
        "least": 1,
        "most": 1,
        "mean": 1.0,
        "std": 0.0,
        "nan": 0,
        "infinite": 0,
    }


def test_dimensions_of_a_leaf_of_higher_rank(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"x": put(jnp.zeros((4, 6, 8)), "fsdp", None, "tp")})
    output = run("show", tmp_path / "c", "x").stdout
    assert "1:2 │  2  │  3  │" in output
    turned = run("show", tmp_path / "c", "x", "--dimensions", "1,2").stdout
    assert turned.count("dimension 0: ") == 4


def test_of_many_boxes_some_are_listed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.cli._show_leaf._MOST_BOXES", 3)
    output = run("show", checkpoint, "kernel").stdout
    assert output.count("shard_0") == 3
    assert "… and 5 more boxes; --json has all" in output


def test_a_leaf_in_host_memory_has_no_picture(checkpoint: Path):
    output = run("show", checkpoint, "table").stdout
    assert "int8  3 × 5  15 B  host memory" in output
    assert "┌" not in output


def test_damage_in_a_leaf_that_is_read(tmp_path: Path):
    path = save_model(tmp_path / "c")
    flip(path)
    assert run("show", path, "kernel").exit_code == 0
    result = run("show", path, "kernel", "--stats")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "(leaf 'kernel'" in result.stderr


# What can't be done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernal"], "has no leaf 'kernal' (did you mean 'kernel'?)"),
        (["kernel", "--slice", "a:b"], "'a:b' is not an index; give integers and slices, as in"),
        (["kernel", "--slice", "::0"], "'::0' is not an index"),
        (["kernel", "--slice", "64"], "index 64 is out of range for dimension 0 of 64 elements"),
        (["kernel", "--slice", "0,0,0"], "leaf 'kernel' has 2 dimensions, not 3"),
        (["--slice", "0"], "--slice needs the path of one array, and no LEAF is given"),
        (["step", "--slice", "0"], "--slice needs the path of one array, and 'step' is not one"),
        (["k*", "--dimensions", "0,1"], "--dimensions needs the path of one array"),
        (["kernel", "--dimensions", "0"], "'0' is not two numbers of dimensions, as in 0,2"),
        (["kernel", "--dimensions", "0,2"], "must be two of the array's 2 dimensions"),
        (["table", "--dimensions", "0,1"], "needs an array on a mesh, and 'table' was on none"),
        (["--depth", "0"], "0 is not in the range x>=1"),
        (["--sort", "colour"], "'colour' is not one of 'tree', 'size', 'name'"),
    ],
)
def test_wrong_arguments(checkpoint: Path, arguments: list[str], message: str):
    result = run("show", checkpoint, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "(see ostraka show --help)" in result.stderr


def test_a_slice_that_is_too_large(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"x": np.zeros((1 << 10, 1 << 13))})
    result = run("show", tmp_path / "c", "x", "--slice", "...")
    assert result.exit_code == 0
    ostraka.save(tmp_path / "c", {"x": np.zeros((1 << 10, (1 << 13) + 1))})
    result = run("show", tmp_path / "c", "x", "--slice", "...")
    assert result.exit_code == 2
    assert "spans 64.0 MiB, more than 64.0 MiB; take a smaller one, or --stats" in result.stderr
