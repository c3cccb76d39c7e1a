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
    "whole": P,
    "fsdp": lambda: ostraka.sharding.fsdp("x"),
    "tp": lambda: ostraka.sharding.tensor_parallel("x"),
    "inputs": lambda: {"**/kernel": P("x"), "embed_tokens/embedding": P(None, "x")},
    "outputs": lambda: {"**/kernel": P(None, "x"), "embed_tokens/embedding": P("x")},
}


Case = tuple[str, str, Any]
"""A path, the kind of its specs, and its names."""


def restore_cases(cases: list[Case], share_reads: bool | None) -> list[list[int]]:
    """Restore each case onto all processes.

    Returns the bytes that this process has read, those that it holds, those that all have read, the
    most that one has, and those of the model.
    """
    like = nnx.eval_shape(lambda: make_decoder({**CONFIG, **WIDE}, has_head=True))
    mesh, tensors = auto_mesh(x=8), llama_tensors(**WIDE)
    # The first restore imports what all need.
    ostraka.restore(cases[0][0], like=like, names=cases[0][2], mesh=mesh, specs=P())
    options: dict[str, Any] = {} if share_reads is None else {"share_reads": share_reads}
    found: list[list[int]] = []
    for path, kind, names in cases:
        records: list[Any] = []
        options |= {"names": names, "mesh": mesh, "specs": SPECS[kind]()}
        before = bytes_read()
        model = ostraka.restore(path, like=like, on_record=records.append, **options)
        read = bytes_read() - before
        assert_is_wide(model, tensors)
        arrays = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
        shards = [{str(s.index): s.data.nbytes for s in a.addressable_shards} for a in arrays]
        held = sum(sum(by_index.values()) for by_index in shards)
        total = sum(array.nbytes for array in arrays)
        record = records[0]
        found.append([read, held, record.bytes, int(record.process_bytes.most), total])
    return found


def assert_is_wide(model: Any, tensors: dict[str, Any]) -> None:
    layer = model.layers[1]
    for name in ("mlp.down_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.v_proj"):
        block, _, part = name.partition(".")
        wanted = tensors[f"model.layers.1.{name}.weight"].T
        for shard in getattr(getattr(layer, block), part).kernel[...].addressable_shards:
            assert np.array_equal(np.asarray(shard.data), wanted[shard.index]), name


def bytes_read() -> int:
    """What this process has read, as the kernel counts it: headers and the index, too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def run_cases(cases: list[Case], share_reads: bool | None = None) -> list[tuple[Any, ...]]:
    """What each process found for each case, with the kind and the path of the case."""
    results = run_processes(
        restore_cases, cases, share_reads, processes=4, devices_per_process=2, timeout_s=600
    )
    return [
        (case[:2], *found)
        for result in results
        for case, found in zip(cases, result.value, strict=True)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Any]]:
    """A model in three layouts: where it is, and its names."""
    root, tensors = tmp_path_factory.mktemp("models"), llama_tensors(**WIDE)
    made: dict[str, tuple[str, Any]] = {"apart": (str(root / "apart"), "hf")}
    write_hf(root / "apart", tensors, **WIDE)
    for layout in ("in rows", "by group"):
        write_hf(root / layout, fused(tensors, layout), **WIDE)
        made[layout] = (str(root / layout), rules_for(layout))
    return made


def test_each_reads_its_share(models: dict[str, tuple[str, Any]]):
    kinds = {"apart": ["fsdp", "tp", "inputs", "outputs"]}
    cases = [
        (path, kind, names)
        for layout, (path, names) in models.items()
        for kind in kinds.get(layout, ["tp", "inputs", "outputs"])
    ]
    for case, read, held, _, _, total in run_cases(cases, share_reads=False):
        assert held < total / 2, case
        assert held <= read <= 1.1 * held, case


def test_shared_reads(models: dict[str, tuple[str, Any]]):
    """What several need is read once: of a model that all have whole, each reads a quarter."""
    cases = [(path, "whole", names) for path, names in models.values()]
    for case, _, _, in_all, most, total in run_cases(cases, share_reads=True):
        assert in_all <= 1.1 * total, case
        assert most <= 0.35 * total, case


def test_a_bucket_is_read_once(models: dict[str, tuple[str, Any]], bucket: str):
    """Also where processes need parts of the same rows, which are too short for requests."""
    cases: list[Case] = []
    for layout, kind in (("apart", "fsdp"), ("apart", "inputs"), ("in rows", "inputs")):
        path, names = models[layout]
        there = f"{bucket}/{layout.replace(' ', '-')}"
        ostraka.copy(path, there)
        cases.append((there, kind, names))
    for case, _, _, in_all, most, total in run_cases(cases):
        assert in_all <= 1.1 * total, case
        assert most <= 0.35 * total, case


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
