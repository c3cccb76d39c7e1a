"""What the command has, in Python: names, configs, times; and one line to look at."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import ostraka
from cli_runs import planned as answer
from cli_runs import run
from ostraka import plan, sharding

TREE = {"x": jnp.ones((8, 8))}
MESH = {"data": 16, "model": 4}


# Sources


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sizes = {"model_type": "gpt2", "n_embd": 128, "n_layer": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path / "config.json"


def test_a_name_and_a_config_are_planned_as_by_the_command(config: Path):
    arguments = ["--mesh", "data=16,model=4", "--optimizer", "adamw", "--max-file-bytes", "1MiB"]
    for source in ("smollm2-135m", config, str(config.parent)):
        planned = plan(source, mesh=MESH, optimizer="adamw", max_file_bytes="1MiB")
        found = answer(source, *arguments)
        assert planned.total_bytes == found["total_bytes"]
        assert planned.process_count == found["hosts"] == 8
        assert planned.process_spread.most == found["host_bytes"]["most"]
        assert planned.parameters == found["parameters"]


def test_specs_for_a_name():
    by_name = plan("gpt2", mesh={"data": 8}, specs="fsdp")
    assert plan("gpt2", mesh={"data": 8}, specs=sharding.fsdp("data")).files == by_name.files
    whole = plan("gpt2", mesh={"data": 8}, specs=P(), processes=2)
    assert whole.lost_process().sole_bytes == 0
    mesh = jax.make_mesh((8,), ("data",))
    assert plan("gpt2", mesh=mesh, specs="fsdp").files == by_name.files
    assert plan("gpt2", metadata={"run": "x" * 999}).metadata_bytes > plan("gpt2").metadata_bytes


def test_a_checkpoint_saved_anew(tmp_path: Path):
    ostraka.save(tmp_path / "c", TREE)
    planned = plan(tmp_path / "c", mesh={"data": 8}, specs=sharding.fsdp("data", min_size=1))
    assert len(planned._write.files) == 8
    options: list[dict[str, Any]] = [{"processes": 3}, {"specs": P()}, {"max_file_bytes": "1MiB"}]
    for given in options:
        with pytest.raises(ValueError, match="is planned as it is: to plan saving it anew, give a"):
            plan(tmp_path / "c", **given)
    with pytest.raises(ValueError, match="has the optimizer that it was saved with"):
        plan(tmp_path / "c", optimizer="adam")


# Meshes and sizes


def test_sizes_as_text_and_of_numpy():
    cut = plan("gpt2", max_file_bytes="5MB")
    assert cut.files == plan("gpt2", max_file_bytes=5_000_000).files
    assert max(cut.files.values()) <= 5_000_000
    assert plan(TREE, max_file_bytes="1GiB").files == plan(TREE).files
    assert plan(TREE, mesh={"data": np.int64(8)}).restore(mesh={"data": np.int32(4)})


# Times


def test_times_are_those_of_the_command():
    planned = plan("gpt2", mesh={"data": 8}, optimizer="adamw", processes=4)
    times = planned.times(
        write_bandwidth="1GB/s", read_bandwidth=2e9, device_bandwidth="80Gbit/s", mtbf_s=4 * 3600
    )
    text = (
        "gpt2 --mesh data=8 --optimizer adamw --hosts 4 --write-bandwidth 1GB/s --mtbf 4h "
        "--read-bandwidth 2GB/s --device-bandwidth 10GB/s --onto data=4"
    )
    found = answer(*text.split())
    assert times.save_s == found["save"]["duration_s"] == planned.process_spread.most / 1e9
    assert times.save_async_blocked_s == found["save"]["save_async_blocked_s"]
    assert times.restore_s == found["restore"]["duration_s"]
    assert times.save_every is not None
    assert times.save_async_every is not None
    assert times.save_every.interval_s == found["interval"]["save"]["interval_s"]
    assert times.save_async_every.interval_s == found["interval"]["save_async"]["interval_s"]
    onto = planned.restore(mesh={"data": 4}, processes=2)
    assert onto.duration_s(read_bandwidth="2GB/s") == found["onto"][0]["duration_s"]


def test_a_save_in_the_background_is_advised_more_often():
    """Only what it blocks counts; Young's estimate is close where that is short."""
    planned = plan("llama-3.1-8b", mesh={"data": 64}, optimizer="adamw")
    times = planned.times(write_bandwidth="1GB/s", device_bandwidth="50GB/s", mtbf_s=6 * 3600)
    alone, beside = times.save_every, times.save_async_every
    assert alone is not None
    assert beside is not None
    assert (
        times.save_async_blocked_s == beside.blocked_s == pytest.approx(alone.blocked_s / 50, 0.1)
    )
    assert beside.interval_s == pytest.approx(math.sqrt(2 * beside.blocked_s * 6 * 3600), rel=0.05)
    assert beside.interval_s < alone.interval_s / 5
    assert beside.lost_share < alone.lost_share


def test_the_text_has_both_intervals():
    arguments = ["gpt2", "--mtbf", "4h", "--write-bandwidth", "100MB/s"]
    text = run("plan", *arguments, "--device-bandwidth", "50MB/s").stdout
    assert "save every" in text
    assert "save_async every" in text
    assert "blocked 9.96 s" in text
    assert "restoring not counted" in text
    fast = run("plan", *arguments, "--read-bandwidth", "1GB", "--device-bandwidth", "1TB/s").stdout
    assert "no faster than the write, 4.98 s" in fast
    assert "restoring not counted" not in fast
    unknown = run("plan", *arguments).stdout
    assert "--device-bandwidth tells how long it blocks" in unknown


def test_a_directory_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.planner.time._PROBE_BYTES", 1 << 20)
    times = plan("gpt2").times(probe=tmp_path)
    assert times.save_s is not None
    assert times.restore_s is not None
    assert times.save_s > 0 < times.restore_s
    assert times.save_every is None
    assert plan("gpt2").times(read_bandwidth="1GB/s").save_s is None


# Comparing


def compared(*arguments: object) -> dict[str, Any]:
    result = run("plan", *arguments, "--json")
    return {row["key"]: row for row in json.loads(result.stdout)["comparison"]}


def test_the_best_of_equals_is_none():
    arguments = ["gpt2", "--mesh", "data=8", "--write-bandwidth", "1GB/s"]
    rows = compared(*arguments, "--compare", "--max-file-bytes 20MB")
    assert (rows["total_bytes"]["best"], rows["total_bytes"]["equal"]) == ([], False)
    assert (rows["save.duration_s"]["best"], rows["save.duration_s"]["equal"]) == ([], False)
    assert rows["files.shards"]["best"] == ["gpt2"]
    assert rows["recovery.lost_host.sole_bytes"]["equal"]
    text = run("plan", *arguments, "--compare", "--max-file-bytes 20MB").stdout
    ends = [line.rstrip() for line in text[text.index("compared") :].splitlines()]
    assert any(line.endswith("equal within 1%") for line in ends)
    assert any(line.endswith(" equal") for line in ends)


def test_two_of_three_may_be_the_best():
    rows = compared("gpt2", "--compare", "--dtype bfloat16", "--compare", "--dtype float16")
    assert rows["total_bytes"]["best"] == ["--dtype bfloat16", "--dtype float16"]


# To look at


def test_a_plan_is_one_short_line():
    model = nnx.eval_shape(lambda: nnx.Linear(64, 128, rngs=nnx.Rngs(0)))
    planned = plan(model, mesh={"data": 64}, processes=8, optimizer="adamw")
    assert repr(planned) == str(planned)
    assert repr(planned).startswith("<Plan: ")
    for text in ("8 arrays (float32, int32, uint32)", "8 processes", "files"):
        assert text in repr(planned)
    large = plan("llama-3.1-8b", mesh={"data": 512}, optimizer="adamw")
    onto = large.restore(mesh={"data": 256}, processes=32)
    for shown in (planned, large, onto, onto.processes[0], large.lost_shard(), large.largest_file):
        assert len(repr(shown)) < 200
        assert "\n" not in repr(shown)
    assert repr(onto).startswith("<RestorePlan onto data=256, 32 processes, each reads at most ")
    assert len(repr(large.times(write_bandwidth="1GB/s", mtbf_s=3600))) < 400
