"""What parity costs, as planned: the same files, bytes and `_METADATA` as a save writes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from cli_runs import planned, run
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
    made = ostraka.plan(tree_on(), **options)
    ostraka.save(tmp_path / "c", tree_on(), **options)
    assert made.files == written(tmp_path / "c")
    data = (tmp_path / "c" / "_METADATA").read_bytes()
    assert_metadata_as_planned(made, data)
    assert made.total_bytes == sum(made.files.values()) + 2 * made.metadata_bytes
    assert made.bytes_by_process == [sum(made.files.values())]
    again = plan_checkpoint(tmp_path / "c")
    assert again.files == made.files
    assert again.total_bytes == sum(again.files.values()) + 2 * len(data)
    assert made.staging_bytes() > ostraka.plan(tree_on()).staging_bytes()


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
    text = run("plan", "gpt2", "--mesh", "data=32", "--parity", "1").stdout
    assert "any 1 host" in text
    assert "a host reads back" in text
    few = run("plan", "gpt2", "--mesh", "data=8", "--parity", "2").stdout
    assert "any 2 shard files" in few
    assert "too few hosts" in few
    parity = planned("gpt2", "--mesh", "data=32", "--parity", "2")["parity"]
    assert (parity["count"], parity["covers"]) == (2, "hosts")
    ostraka.save(tmp_path / "c", tree_on(), parity=1)
    assert "parity" in run("plan", tmp_path / "c").stdout
    assert "parity_00000.safetensors" in run("show", tmp_path / "c", "--files").stdout
