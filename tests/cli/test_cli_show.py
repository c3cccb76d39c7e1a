"""`ostraka show`: the tree, one leaf, steps."""

import dataclasses
import json
import socket
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from cli_runs import Holder, as_json, assert_fails, flip, put, run
from ostraka.compat.orbax import PyTreeCheckpointer
from ostraka.layout import metadata as _metadata
from ostraka.storage import LocalStore
from ostraka.testing import run_processes
from replacing import replaced_once, saving_in_a_loop


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


def test_leaves_and_totals(model: Path):
    result = run("show", model)
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


def test_who_wrote_it_when_and_how_long_that_took(model: Path):
    first, *_, took, _ = run("show", model).stdout.splitlines()
    assert first.startswith(f"{model}  saved 20")
    assert first.endswith(f" UTC by ostraka {ostraka.__version__} with jax {jax.__version__}")
    assert took.startswith("took ")
    assert "write " in took


def test_as_json(model: Path):
    document = as_json("show", model)
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
        "memory": None,
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
    PyTreeCheckpointer().save(tmp_path / "empty", {"opt": {}})
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


def test_sorting(deep: Path):
    paths = {
        sort: [leaf["path"] for leaf in as_json("show", deep, "--sort", sort)["leaves"]]
        for sort in ("tree", "size", "name")
    }
    assert paths["tree"][0] == "model/layers/0/kernel"
    assert paths["size"][0] == "model/head"
    assert paths["name"] == sorted(paths["tree"])


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("model/layers/*/kernel", 3), ("**/bias", 3), ("model/layers/1", 2), ("model/", 7)],
)
def test_patterns_choose_leaves(deep: Path, pattern: str, count: int):
    assert len(as_json("show", deep, pattern)["leaves"]) == count
    assert f"{count} leaves of {pattern!r}, " in run("show", deep, pattern).stdout


def test_statistics_of_many_leaves(deep: Path):
    found = rows(run("show", deep, "model", "--stats").stdout)
    assert found["leaf"][-6:] == ["least", "most", "mean", "std", "nan", "inf"]
    assert found["model/layers/2/kernel"][-6:] == ["2", "2", "2", "0", "0", "0"]
    document = as_json("show", deep, "--stats")
    leaves = {leaf["path"]: leaf for leaf in document["leaves"]}
    assert leaves["model/layers/1/kernel"]["statistics"]["mean"] == 1.0
    assert "statistics" not in leaves["step"]


# One leaf


def test_a_leaf_with_its_sharding_and_files(model: Path):
    result = run("show", model, "kernel")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"kernel of {model}"
    assert lines[1] == "bfloat16  64 × 32  4.0 KiB  P('fsdp', 'tp')"
    assert "(64, 32) P('fsdp', 'tp') on fsdp=4, tp=2" in lines
    assert "16:32 │   2   │   3   │" in lines
    assert any(line.startswith("[16:32, 16:32]  shard_00003.safetensors  ") for line in lines)


def test_the_told_bytes_are_the_elements(model: Path):
    document = as_json("show", model, "kernel")
    whole = np.asarray(ostraka.open(model)["kernel"])
    assert len(document["boxes"]) == 8
    for entry in document["boxes"]:
        data = (model / entry["file"]).read_bytes()
        part = data[entry["offset"] : entry["offset"] + entry["bytes"]]
        box = tuple(slice(*bounds) for bounds in entry["box"])
        assert part == whole[box].tobytes()


def test_a_slice(model: Path):
    output = run("show", model, "kernel", "--slice", "0:2,:3").stdout
    assert output.endswith("[0:2,:3]\n[[ 0.  1.  2.]\n [32. 33. 34.]]\n")
    document = as_json("show", model, "kernel", "--slice", "-1,::16")
    assert document["slice"]["shape"] == [2]
    whole = np.asarray(ostraka.open(model)["kernel"]).astype(float)
    assert document["slice"]["values"] == whole[-1, ::16].tolist()


def test_slices_that_json_has_no_numbers_for(tmp_path: Path):
    tree = {"z": np.array([1 + 2j]), "n": np.array([np.nan, 1]), "b": np.array([True])}
    ostraka.save(tmp_path / "c", tree)

    def values(leaf: str) -> object:
        result = run("show", tmp_path / "c", leaf, "--slice", "...", "--json")
        return json.loads(result.stdout)["slice"]["values"]

    assert (values("z"), values("n"), values("b")) == (["(1+2j)"], ["nan", 1.0], [True])


def test_statistics_of_a_leaf(model: Path):
    assert "least 0  most 2048  mean " in run("show", model, "kernel", "--stats").stdout
    document = as_json("show", model, "table", "--stats")
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


def test_of_many_boxes_some_are_listed(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.cli._show_arrays._MOST_BOXES", 3)
    output = run("show", model, "kernel").stdout
    assert output.count("shard_0") == 3
    assert "… and 5 more boxes; --json has all" in output


def test_a_leaf_in_host_memory_has_no_picture(model: Path):
    output = run("show", model, "table").stdout
    assert "int8  3 × 5  15 B  host memory" in output
    assert "┌" not in output


def test_damage_in_a_leaf_that_is_read(checkpoint: Path):
    flip(checkpoint)
    assert run("show", checkpoint, "kernel").exit_code == 0
    result = run("show", checkpoint, "kernel", "--stats")
    assert_fails(result, "(leaf 'kernel'", code=1)


# Who wrote which file


def test_process_and_host_of_each_file(model: Path):
    host = socket.gethostname()
    assert f"host: {host}" in run("show", model).stdout.splitlines()
    files = rows(run("show", model, "--files").stdout)
    assert files["file"] == ["device", "process", "host", "size"]
    assert files["shard_00003.safetensors"][:3] == ["3", "0", host]
    assert files["kernel"][0] == "bfloat16"
    boxes = run("show", model, "kernel").stdout.splitlines()
    (line,) = (line for line in boxes if "shard_00003" in line)
    assert line.split()[3:5] == ["0", host]
    document = as_json("show", model)
    assert document["writer"]["hosts"] == [host]
    for file in document["files"]:
        assert (model / file["file"]).stat().st_size == file["bytes"]
        assert (file["process"], file["host"]) == (0, host)
    leaf = as_json("show", model, "kernel")
    assert {(box["process"], box["host"]) for box in leaf["boxes"]} == {(0, host)}


def save_as_another_host(path: str) -> None:
    """Every process claims to run on a host of its own."""
    name = f"node-{jax.process_index()}"
    socket.gethostname = lambda: name
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    shape = (jax.device_count() * 2,)
    ostraka.save(path, {"w": jax.make_array_from_callback(shape, spec, lambda _: np.ones(2))})


def test_files_of_several_hosts(tmp_path: Path):
    path = tmp_path / "c"
    run_processes(save_as_another_host, str(path))
    assert "hosts: node-0, node-1" in run("show", path).stdout.splitlines()
    document = as_json("show", path)
    found = {(file["process"], file["host"]) for file in document["files"]}
    assert found == {(0, "node-0"), (1, "node-1")}
    listed = rows(run("show", path, "--files").stdout)
    shards = {name: cells for name, cells in listed.items() if name.startswith("shard_")}
    assert len(shards) == len(document["files"])
    for name, (device, process, host, *_) in shards.items():
        assert int(name[6:11]) == int(device)
        assert host == f"node-{process}"


@pytest.mark.parametrize("hosts", [None, "a host", [1, 2], []])
def test_hosts_that_are_not_told(checkpoint: Path, hosts: Any):
    store = LocalStore(str(checkpoint))
    metadata = _metadata.decode_metadata(store.get("_METADATA"))
    writer = {name: value for name, value in metadata.writer.items() if name != "hosts"}
    writer |= {} if hosts is None else {"hosts": hosts}
    store.put("_METADATA", _metadata.encode_metadata(dataclasses.replace(metadata, writer=writer)))
    assert "host:" not in run("show", checkpoint).stdout
    listed = rows(run("show", checkpoint, "--files").stdout)
    assert listed["shard_00000.safetensors"][2] == "unknown"
    assert " unknown " in run("show", checkpoint, "kernel").stdout
    assert as_json("show", checkpoint)["files"][0]["host"] is None


# NaN and infinity


@pytest.fixture(scope="module")
def diverged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nan") / "checkpoint"
    weights = jnp.zeros((64, 32), jnp.bfloat16).at[3, :5].set(jnp.nan).at[0, 0].set(jnp.inf)
    tree = {
        "model": {"kernel": put(weights, "fsdp", "tp"), "bias": np.zeros(3, np.float32)},
        "loss": float("inf"),
        "count": np.arange(3),
        "rate": 0.1,
    }
    ostraka.save(path, tree)
    return path


def test_leaves_that_are_not_finite(diverged: Path):
    result = run("show", diverged, "--nan")
    assert result.exit_code == 1
    found = rows(result.stdout)
    assert found["leaf"] == ["dtype", "shape", "nan", "inf"]
    assert found["model/kernel"] == ["bfloat16", "64", "×", "32", "5", "1"]
    assert found["loss"] == ["float", "0", "1"]
    assert "model/bias" not in found
    assert result.stdout.endswith(
        "NaN or infinity in 2 of 4 leaves of floating-point numbers: 5 NaN, 2 infinite\n"
    )


def test_leaves_that_are_not_finite_as_json(diverged: Path):
    result = run("show", diverged, "--nan", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["finite"], document["nan"], document["infinite"]) == (False, 5, 2)
    assert [(leaf["path"], leaf["nan"], leaf["infinite"]) for leaf in document["leaves"]] == [
        ("model/kernel", 5, 1),
        ("loss", 0, 1),
    ]


def test_leaves_that_are_finite(diverged: Path):
    for leaf in ("model/bias", "count", "rate"):
        result = run("show", diverged, leaf, "--nan")
        assert result.exit_code == 0
        assert "no NaN and no infinity in " in result.stdout
        document = as_json("show", diverged, leaf, "--nan")
        assert (document["finite"], document["leaves"]) == (True, []), leaf


# Saves that come in between


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--stats",), "   1     1     1    0    0    0\n"),
        (("x", "--stats"), "least 1  most 1"),
        (("x", "--slice", ":"), "[1 1 1]"),
        (("--nan",), "no NaN"),
    ],
)
def test_a_checkpoint_that_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
):
    path = tmp_path / "c"
    before = {"x": np.zeros(3, int), "y": np.full(3, np.nan)}
    ostraka.save(path, before)
    with replaced_once(path, {"x": np.ones(3, int), "y": np.zeros(3)}, monkeypatch):
        result = run("show", path, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert expected in result.stdout


def test_beside_a_process_that_saves_damage_is_never_told(tmp_path: Path):
    path = tmp_path / "c"
    kept = tmp_path / "kept"
    ostraka.save(kept, {"x": np.zeros(50_000, int), "y": np.zeros(50_000, int)})
    complete = 0
    deadline = time.monotonic() + 300
    with saving_in_a_loop(path):
        while complete < 12 and time.monotonic() < deadline:
            for arguments in (
                ("show", path, "--stats"),
                ("show", path, "--nan"),
                ("diff", path, kept),
            ):
                result = run(*arguments)
                assert "damage" not in result.stderr
                if result.exit_code == 2:
                    assert "was overwritten 10 times while it was being read" in result.stderr
                else:
                    complete += 1
    assert complete


# What can't be done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kernal"], "has no leaf 'kernal' (did you mean 'kernel'?)"),
        (["--nan", "--stats"], "--nan does not go together with --stats; give one"),
        (["kernel", "--nan", "--slice", "0"], "--nan does not go together with --slice"),
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
def test_wrong_arguments(model: Path, arguments: list[str], message: str):
    result = run("show", model, *arguments)
    assert_fails(result, message, "(see ostraka show --help)")


def test_a_name_above_leaves_that_is_mistyped(deep: Path):
    for leaf, close in (
        ("modle", "model"),
        ("model/layer", "model/layers"),
        ("head", "model/head"),
    ):
        said = f"{deep} has no leaf {leaf!r} (did you mean {close!r}?)"
        assert_fails(run("show", deep, leaf), said)


def test_a_slice_that_is_too_large(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"x": np.zeros((1 << 10, 1 << 13))})
    result = run("show", tmp_path / "c", "x", "--slice", "...")
    assert result.exit_code == 0
    ostraka.save(tmp_path / "c", {"x": np.zeros((1 << 10, (1 << 13) + 1))})
    said = "spans 64.0 MiB, more than 64.0 MiB; take a smaller one, or --stats"
    assert_fails(run("show", tmp_path / "c", "x", "--slice", "..."), said)


# Arrays with several paths


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "checkpoint"
    x = jnp.arange(15.0).reshape(3, 5).at[0, 0].set(jnp.nan)
    ostraka.save(path, {"x": x, "again": {"y": x, "z": [x]}, "held": Holder(jnp.tanh), "step": 1})
    return path


def test_an_array_is_shown_and_counted_once(shared: Path):
    output = run("show", shared, "--all").stdout
    found = rows(output)
    assert found["x"][-2:] == ["60", "B"]
    assert (found["again/y"], found["again/z/0"]) == (["=", "x"], ["=", "x"])
    assert found["held/function"] == ["not", "saved", "jax.numpy.tanh"]
    assert "1 array at 3 paths, 1 value, 60 B in 1 file" in output
    assert rows(run("show", shared, "--depth", 1).stdout)["again/"] == ["2", "leaves", "0", "B"]
    document = as_json("show", shared)
    assert sum(leaf.get("bytes", 0) for leaf in document["leaves"]) == 60
    assert [leaf.get("same_as") for leaf in document["leaves"]] == [None, "x", "x", None, None]
    kept = {"path": "held/function", "kind": "kept", "name": "jax.numpy.tanh"}
    assert document["leaves"][3] == kept
    assert (document["totals"]["arrays"], document["totals"]["values"]) == (1, 1)


def test_an_array_by_another_of_its_paths(shared: Path):
    output = run("show", shared, "again/y", "--slice", "1").stdout
    assert "the same array as x" in output.splitlines()
    assert output.endswith("[1]\n[5. 6. 7. 8. 9.]\n")


def test_the_elements_of_an_array_count_once(shared: Path):
    document = as_json("show", shared, "--stats")
    found = [leaf["statistics"] for leaf in document["leaves"] if leaf["kind"] == "jax"]
    assert [(one["count"], one["nan"]) for one in found] == [(15, 1)] * 3
    assert as_json("show", shared, "--nan")["nan"] == 1
    assert as_json("show", shared, "again", "--nan")["nan"] == 1
    assert "again/y  float32  3 × 5    1    0" in run("show", shared, "again", "--nan").stdout


def test_the_line_of_parameters_is_broken_between_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "40")
    tree = {
        "model": jnp.ones((64, 64)),
        "opt_state": {"mu": jnp.ones((64, 64))},
        "step": jnp.ones(()),
    }
    ostraka.save(tmp_path / "c", tree)
    lines = run("show", tmp_path / "c").stdout.splitlines()
    assert "4,097 parameters of float32, 32.0 KiB" in lines
    assert "  (optimizer 16.0 KiB)" in lines
