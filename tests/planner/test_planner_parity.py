"""What parity costs, as planned: the same files, bytes and `_METADATA` as a save writes."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.cli import main
from ostraka.planner.sources import plan_checkpoint
from test_planner import assert_metadata_as_planned, written


def tree_on(devices: int = 8) -> dict[str, Any]:
    mesh = Mesh(jax.devices()[:devices], ("x",))
    ones = jnp.ones((8 * 40, 100))
    return {
        "cut": jax.device_put(ones, NamedSharding(mesh, P("x"))),
        "whole": jax.device_put(ones[:3], NamedSharding(mesh, P())),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"parity": 1},
        {"parity": 2},
        {"parity": 1, "dtype": "bfloat16", "metadata": {"run": 1}, "max_file_bytes": 10_000},
    ],
    ids=str,
)
def test_a_save_writes_what_was_planned(tmp_path: Path, options: dict[str, Any]) -> None:
    planned = ostraka.plan(tree_on(), **options)
    ostraka.save(tmp_path / "c", tree_on(), **options)
    assert planned.files == written(tmp_path / "c")
    data = (tmp_path / "c" / "_METADATA").read_bytes()
    assert_metadata_as_planned(planned, data)
    assert planned.total_bytes == sum(planned.files.values()) + 2 * planned.metadata_bytes
    assert planned.bytes_by_process == [sum(planned.files.values())]
    again = plan_checkpoint(tmp_path / "c")
    assert again.files == planned.files
    assert again.total_bytes == sum(again.files.values()) + 2 * len(data)
    assert planned.staging_bytes() > ostraka.plan(tree_on()).staging_bytes()


def test_the_share_of_parity() -> None:
    plain = ostraka.plan("gpt2", mesh={"data": 8}, specs="fsdp")
    one = ostraka.plan("gpt2", mesh={"data": 8}, specs="fsdp", parity=1)
    assert one.parity is not None
    assert one.parity.covers == "files"
    assert 1.12 < one.total_bytes / plain.total_bytes < 1.14
    many = {"mesh": {"data": 256}, "specs": "fsdp", "processes": 32}
    two = ostraka.plan("llama-3.1-8b", parity=2, **many)
    assert two.parity is not None
    assert two.parity.covers == "hosts"
    assert two.total_bytes / ostraka.plan("llama-3.1-8b", **many).total_bytes < 1.27
    # All hosts write alike, and read back about as much as they write, for each of two sums.
    assert two.process_spread.skew < 0.02
    assert max(two.parity.read_bytes_by_process) < 2.5 * two.process_spread.mean


def test_the_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["plan", *arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    text = run("gpt2", "--mesh", "data=32", "--parity", "1")
    assert "any 1 host" in text
    assert "a host reads back" in text
    few = run("gpt2", "--mesh", "data=8", "--parity", "2")
    assert "any 2 shard files" in few
    assert "too few hosts" in few
    document = json.loads(run("gpt2", "--mesh", "data=32", "--parity", "2", "--json"))
    parity = document["variants"][0]["parity"]
    assert (parity["count"], parity["covers"]) == (2, "hosts")
    ostraka.save(tmp_path / "c", tree_on(), parity=1)
    assert "parity" in run(str(tmp_path / "c"))
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "c"), "--files"])
    assert "parity_00000.safetensors" in shown.output
