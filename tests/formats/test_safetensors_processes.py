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


def restore_share(path: str, kind: str, names: Any = "hf") -> list[int]:
    """Restore onto all processes; returns the bytes read and those that this process holds."""
    config = {**CONFIG, **WIDE}
    like = nnx.eval_shape(lambda: make_decoder(config, has_head=True))
    options: dict[str, Any] = {"names": names, "mesh": auto_mesh(x=8), "specs": SPECS[kind]()}
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
    tensors = llama_tensors(**WIDE)
    layer = model.layers[1]
    for name, module in (
        ("mlp.down_proj", layer.mlp.down_proj),
        ("mlp.up_proj", layer.mlp.up_proj),
        ("self_attn.q_proj", layer.self_attn.q_proj),
        ("self_attn.v_proj", layer.self_attn.v_proj),
    ):
        wanted = tensors[f"model.layers.1.{name}.weight"].T
        for shard in module.kernel[...].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), wanted[shard.index]), name
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


# Queries, keys and values in one tensor


def fused(tensors: dict[str, Any], layout: str) -> dict[str, Any]:
    """One after the other, as Phi-3 has them, or a group of heads after the other."""
    left, made = dict(tensors), {}
    for n in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{n}."
        q, k, v = (left.pop(f"{at}self_attn.{name}_proj.weight") for name in "qkv")
        gate, up = (left.pop(f"{at}mlp.{name}_proj.weight") for name in ("gate", "up"))
        made[f"{at}mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
        groups = [array.reshape(4, -1, 128, 1024) for array in (q, k, v)]
        rows = np.concatenate([q, k, v]) if layout == "in rows" else np.concatenate(groups, axis=1)
        made[f"{at}self_attn.qkv_proj.weight"] = rows.reshape(-1, 1024)
    return {**left, **made}


def rules_for(layout: str) -> dict[str, Any]:
    attn, mlp = "layers/{n}/self_attn", "layers/{n}/mlp"
    sizes = {"q": 1024, "k": 512, "v": 512} if layout == "in rows" else {"q": 2, "k": 1, "v": 1}
    into = {f"{attn}/{name}_proj/kernel": size for name, size in sizes.items()}
    qkv: dict[str, Any] = {"transpose": True, "cut": {"axis": 1, "into": into}}
    if layout == "by group":
        qkv["cut"]["axis"] = 2
        qkv |= {"split": {1: [4, 4, 128]}, "merge": {1: [4, -1, 128]}}
    gate_up = {f"{mlp}/gate_proj/kernel": 2816, f"{mlp}/up_proj/kernel": -1}
    return {
        "model.layers.{n}.self_attn.qkv_proj.weight": qkv,
        "model.layers.{n}.mlp.gate_up_proj.weight": {
            "transpose": True,
            "cut": {"axis": 1, "into": gate_up},
        },
        "model.layers.{n}.{block}.{name}.weight": {
            "path": "layers/{n}/{block}/{name}/kernel",
            "transpose": True,
        },
        "model.layers.{n}.{norm}.weight": "layers/{n}/{norm}/scale",
        "model.embed_tokens.weight": "embed_tokens/embedding",
        "model.norm.weight": "norm/scale",
        "lm_head.weight": {"path": "lm_head/kernel", "transpose": True},
    }


@pytest.mark.parametrize("layout", ["in rows", "by group"])
@pytest.mark.parametrize("kind", ["tp", "inputs", "outputs"])
def test_each_reads_its_share_of_fused_tensors(tmp_path: Path, kind: str, layout: str):
    path = write_hf(tmp_path / "llama", fused(llama_tensors(**WIDE), layout), **WIDE)
    rules = rules_for(layout)
    found = run_processes(restore_share, str(path), kind, rules, processes=4, devices_per_process=2)
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


@pytest.mark.parametrize("layout", ["in rows", "by group"])
def test_shared_reads_of_fused_tensors(tmp_path: Path, layout: str):
    path = write_hf(tmp_path / "llama", fused(llama_tensors(**WIDE), layout), **WIDE)
    found = run_processes(restore_whole, str(path), rules_for(layout), processes=4)
    for in_all, most, total in (result.value for result in found):
        assert in_all <= 1.1 * total
        assert most <= 0.35 * total


@pytest.mark.parametrize("kind", ["fsdp", "inputs", "fused"])
def test_a_bucket_is_read_once(tmp_path: Path, bucket: str, kind: str):
    """Also where processes need parts of the same rows, which are too short for requests."""
    tensors, names = llama_tensors(**WIDE), "hf"
    if kind == "fused":
        tensors, names, kind = fused(tensors, "in rows"), rules_for("in rows"), "inputs"
    ostraka.copy(write_hf(tmp_path / "llama", tensors, **WIDE), f"{bucket}/llama")
    found = run_processes(
        restore_parts, f"{bucket}/llama", kind, names, processes=4, devices_per_process=2
    )
    for in_all, most, total in (result.value for result in found):
        assert in_all <= 1.1 * total, (in_all, total)
        assert most <= 0.35 * total


def restore_parts(path: str, kind: str, names: Any) -> list[int]:
    return restore_and_count(path, names=names, mesh=auto_mesh(x=8), specs=SPECS[kind]())


def restore_whole(path: str, names: Any = "hf") -> list[int]:
    return restore_and_count(path, names=names, mesh=auto_mesh(x=4), specs=P(), share_reads=True)


def restore_and_count(path: str, **options: Any) -> list[int]:
    """The bytes that all have read, the most that one has, and those of the model."""
    config = {**CONFIG, **WIDE}
    like = nnx.eval_shape(lambda: make_decoder(config, has_head=True))
    records: list[Any] = []
    model = ostraka.restore(path, like=like, on_record=records.append, **options)
    for name in ("mlp.down_proj", "self_attn.k_proj"):
        block, layer = name.split(".")
        kernel = getattr(getattr(model.layers[1], block), layer).kernel[...]
        wanted = llama_tensors(**WIDE)[f"model.layers.1.{name}.weight"].T
        for shard in kernel.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), wanted[shard.index])
    total = sum(a.nbytes for a in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))))
    return [records[0].bytes, int(records[0].process_bytes.most), total]
