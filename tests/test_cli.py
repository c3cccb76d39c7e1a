"""The command: what it prints, where, and its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result
from jax.sharding import NamedSharding, PartitionSpec

import ostraka
from ostraka.cli import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    kernel = jnp.arange(64 * 32, dtype=jnp.bfloat16).reshape(64, 32)
    tree = {
        "kernel": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec("fsdp", "tp"))),
        "key": jax.random.key(7),
        "table": np.ones((3, 5), np.int8),
        "step": 100,
        "rate": float("nan"),
        "note": "x" * 500,
    }
    path = tmp_path / "checkpoint"
    ostraka.save(path, tree, metadata={"run": "first"})
    return path


def flip(path: Path) -> Path:
    """Change the last byte of the first shard."""
    shard = min(path.glob("shards-*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return shard


def test_verify_says_intact_in_one_line(checkpoint: Path):
    result = run("verify", checkpoint)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{checkpoint}: intact (3 ")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_verify_lists_damage_and_ends_with_1(checkpoint: Path):
    shard = flip(checkpoint)
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    first, *problems = result.stdout.splitlines()
    assert first.startswith(f"{checkpoint}: 1 problem")
    assert len(problems) == 1
    assert shard.name in problems[0]
    assert "(leaf 'kernel'" in problems[0]


def test_verify_as_json(checkpoint: Path):
    intact = json.loads(run("verify", checkpoint, "--json").stdout)
    assert (intact["ok"], intact["leaves"], intact["problems"]) == (True, 3, [])
    shard = flip(checkpoint)
    result = run("verify", checkpoint, "--json")
    assert result.exit_code == 1
    damaged = json.loads(result.stdout)
    assert damaged["ok"] is False
    (problem,) = damaged["problems"]
    assert problem["file"].endswith(shard.name)
    assert "kernel" in problem["leaves"]
    assert "not as they were written" in problem["found"]


@pytest.mark.parametrize("as_json", [False, True])
def test_damaged_metadata_is_a_result_of_verify(checkpoint: Path, as_json: bool):
    metadata = checkpoint / "_METADATA"
    metadata.write_bytes(metadata.read_bytes().replace(b'"kernel"', b'"kernal"'))
    result = run("verify", checkpoint, *["--json"] * as_json)
    assert result.exit_code == 1
    if as_json:
        assert json.loads(result.stdout)["problems"][0]["file"] == "_METADATA"
    else:
        assert result.stdout.splitlines() == [
            f"{checkpoint}: damaged",
            "  _METADATA: its digest is not the one that was written",
        ]


def test_show_of_damaged_metadata_ends_with_1(checkpoint: Path):
    (checkpoint / "_METADATA").write_bytes(b'{"format":"ostraka"')
    result = run("show", checkpoint)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "damaged" in result.stderr


def test_show_lists_leaves_and_totals(checkpoint: Path):
    result = run("show", checkpoint)
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line}
    assert rows["leaf"] == ["dtype", "shape", "spec", "size"]
    assert rows["kernel"] == ["bfloat16", "64", "×", "32", "P('fsdp',", "'tp')", "4.0", "KiB"]
    assert rows["key"] == ["key<threefry2x32>", "()", "one", "device", "8", "B"]
    assert rows["table"] == ["int8", "3", "×", "5", "host", "memory", "15", "B"]
    assert rows["step"] == ["int", "100"]
    assert rows["rate"] == ["float", "nan"]
    assert rows["note"][1].endswith("x…")
    assert "3 arrays, 3 values, 4.0 KiB in 8 files, written by 1 process with 8 devices" in (
        result.stdout
    )
    assert "mesh: fsdp=4, tp=2" in result.stdout
    assert 'metadata: {"run": "first"}' in result.stdout


def test_show_as_json(checkpoint: Path):
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


def test_show_of_an_empty_tree(tmp_path: Path):
    ostraka.save(tmp_path / "empty", {})
    assert "0 arrays, 0 B in 0 files" in run("show", tmp_path / "empty").stdout


def test_text_of_a_checkpoint_does_not_reach_the_terminal_raw(tmp_path: Path):
    tree = {"\x1b[31mred\n": np.ones(2), "value": "\x1b[2J"}
    ostraka.save(tmp_path / "odd", tree, metadata={"\x1b": "\x1b"})
    output = run("show", tmp_path / "odd").stdout
    assert "\x1b" not in output
    assert r"\x1b[31mred\n" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "Missing argument 'PATH' (see ostraka show --help)"),
        (["verify", "--wrong", "x"], "(see ostraka verify --help)"),
        (["shew", "x"], "No such command 'shew'"),
        (["show", "nowhere"], "there is no checkpoint at "),
        (["verify", "nowhere"], "there is no checkpoint at "),
        (["show", __file__], "is a file, not a checkpoint directory"),
        (["show", "gopher://x"], "has no store for gopher://"),
    ],
)
def test_an_error_is_one_line_on_stderr(arguments: list[str], message: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("ostraka: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["show", "verify"])
def test_help_has_an_example(command: str):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Examples:\n    ostraka {command} runs/7\n" in result.stdout
    assert "--json" in result.stdout


def test_without_arguments_it_helps():
    result = run()
    assert result.exit_code == 0
    assert "show" in result.stdout
    assert "verify" in result.stdout


def test_version():
    assert run("--version").stdout == f"ostraka {ostraka.__version__}\n"


@pytest.mark.parametrize("command", ["show", "verify"])
def test_jax_is_not_imported(checkpoint: Path, command: str):
    program = (
        "import sys\n"
        "from ostraka.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code\n"
        "assert not {'jax', 'jaxlib', 'flax'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program, command, checkpoint], check=True)
