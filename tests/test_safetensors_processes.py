"""Four processes read a Hugging Face directory: each its own ranges, and no more."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import ostraka
from hf_decoder import make_decoder
from ostraka.testing import run_processes
from test_safetensors import CONFIG, auto_mesh, llama_tensors, write_hf

WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 2048,
}
SPECS: dict[str, Any] = {
    "fsdp": lambda: ostraka.sharding.fsdp("x"),
    "tp": lambda: ostraka.sharding.tensor_parallel("x"),
    "inputs": lambda: {"**/kernel": P("x"), "embed_tokens/embedding": P(None, "x")},
    "outputs": lambda: {"**/kernel": P(None, "x"), "embed_tokens/embedding": P("x")},
}


def restore_share(path: str, kind: str) -> list[int]:
    """Restore onto all processes; returns the bytes read and those that this process holds."""
    config = {**CONFIG, **WIDE}
    like = nnx.eval_shape(lambda: make_decoder(config, has_head=True))
    options: dict[str, Any] = {"names": "hf", "mesh": auto_mesh(x=8), "specs": SPECS[kind]()}
    model = ostraka.restore(path, like=like, **options)  # which has imported what it needs
    del model
    before = bytes_read()
    model = ostraka.restore(path, like=like, **options, share_reads=False)
    read = bytes_read() - before
    arrays = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
    share = 0
    for array in arrays:
        seen: set[str] = set()
        for shard in array.addressable_shards:
            if str(shard.index) not in seen:
                seen.add(str(shard.index))
                share += shard.data.nbytes
    kernel = model.layers[1].mlp.down_proj.kernel[...]
    tensors = llama_tensors(**WIDE)
    wanted = tensors["model.layers.1.mlp.down_proj.weight"].T
    for shard in kernel.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), wanted[shard.index])
    return [read, share, sum(array.nbytes for array in arrays)]


def bytes_read() -> int:
    """What this process has read, as the kernel counts it: headers and the index, too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.parametrize("kind", SPECS)
def test_each_reads_its_share(tmp_path: Path, kind: str):
    path = write_hf(tmp_path / "llama", llama_tensors(**WIDE), **WIDE)
    found = run_processes(restore_share, str(path), kind, processes=4, devices_per_process=2)
    for read, share, total in (result.value for result in found):
        assert share < total / 2
        assert read <= 1.1 * share, (read, share)
        assert read >= share


def test_shared_reads(tmp_path: Path):
    """What several need is read once: of a model that all have whole, each reads a quarter."""
    path = write_hf(tmp_path / "llama", llama_tensors(**WIDE), **WIDE)
    found = run_processes(restore_whole, str(path), processes=4)
    for in_all, most, total in (result.value for result in found):
        assert in_all <= 1.1 * total
        assert most <= 0.35 * total


@pytest.mark.parametrize("kind", ["fsdp", "inputs"])
def test_a_bucket_is_read_once(tmp_path: Path, bucket: str, kind: str):
    """Also where processes need parts of the same rows, which are too short for requests."""
    path = write_hf(tmp_path / "llama", llama_tensors(**WIDE), **WIDE)
    ostraka.copy(path, f"{bucket}/llama")
    found = run_processes(
        restore_parts, f"{bucket}/llama", kind, processes=4, devices_per_process=2
    )
    for in_all, most, total in (result.value for result in found):
        assert in_all <= 1.1 * total, (in_all, total)
        assert most <= 0.35 * total


def restore_parts(path: str, kind: str) -> list[int]:
    return restore_and_count(path, mesh=auto_mesh(x=8), specs=SPECS[kind]())


def restore_whole(path: str) -> list[int]:
    return restore_and_count(path, mesh=auto_mesh(x=4), specs=P(), share_reads=True)


def restore_and_count(path: str, **options: Any) -> list[int]:
    """The bytes that all have read, the most that one has, and those of the model."""
    config = {**CONFIG, **WIDE}
    like = nnx.eval_shape(lambda: make_decoder(config, has_head=True))
    records: list[Any] = []
    model = ostraka.restore(path, like=like, names="hf", on_record=records.append, **options)
    kernel = model.layers[1].mlp.down_proj.kernel[...]
    wanted = llama_tensors(**WIDE)["model.layers.1.mlp.down_proj.weight"].T
    for shard in kernel.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), wanted[shard.index])
    total = sum(a.nbytes for a in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))))
    return [records[0].bytes, int(records[0].process_bytes.most), total]
