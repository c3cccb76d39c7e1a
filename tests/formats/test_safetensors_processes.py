"""Four processes read a Hugging Face directory: each its own ranges, and no more."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import ostraka
from hf_decoder import make_decoder
from ostraka.testing import run_processes
from test_safetensors import CONFIG, auto_mesh, llama_tensors, write_hf

WIDE: dict[str, Any] = {
    "hidden_size": 640,
    "intermediate_size": 1760,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 80,
    "vocab_size": 1024,
}
SPECS: dict[str, Any] = {
    "whole": P,
    "fsdp": lambda: ostraka.sharding.fsdp("x"),
    "tp": lambda: ostraka.sharding.tensor_parallel("x"),
    "inputs": lambda: {"**/kernel": P("x"), "embed_tokens/embedding": P(None, "x")},
    "outputs": lambda: {"**/kernel": P(None, "x"), "embed_tokens/embedding": P("x")},
}


class Case(NamedTuple):
    path: str
    specs: str
    names: Any
    options: dict[str, Any]


class Found(NamedTuple):
    """In bytes: what this process has read, and holds; what all have read, the most that one has;
    and the model."""

    read: int
    held: int
    in_all: int
    most: int
    total: int


def restore_cases(cases: list[Case]) -> list[Found]:
    """Restore each case onto all processes."""
    like = nnx.eval_shape(lambda: make_decoder({**CONFIG, **WIDE}, has_head=True))
    mesh, tensors = auto_mesh(x=8), llama_tensors(**WIDE)
    # The first restore imports what all need.
    ostraka.restore(cases[0].path, like=like, names=cases[0].names, mesh=mesh, specs=P())
    found: list[Found] = []
    for path, specs, names, options in cases:
        records: list[Any] = []
        options |= {"names": names, "mesh": mesh, "specs": SPECS[specs]()}
        before = bytes_read()
        model = ostraka.restore(path, like=like, on_record=records.append, **options)
        read = bytes_read() - before
        assert_is_wide(model, tensors)
        arrays = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
        shards = [{str(s.index): s.data.nbytes for s in a.addressable_shards} for a in arrays]
        held = sum(sum(by_index.values()) for by_index in shards)
        total = sum(array.nbytes for array in arrays)
        most = int(records[0].process_bytes.most)
        found.append(Found(read, held, records[0].bytes, most, total))
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


def test_each_reads_its_share_and_what_several_need_is_read_once(tmp_path: Path, bucket: str):
    tensors = llama_tensors(**WIDE)
    cases: list[Case] = []
    for layout in ("apart", "in rows", "by group"):
        path, names = str(tmp_path / layout), rules_for(layout)
        write_hf(Path(path), fused(tensors, layout), files=2, **WIDE)
        kinds = [*(["fsdp"] if layout == "apart" else []), "tp", "inputs", "outputs"]
        cases += [Case(path, specs, names, {"share_reads": False}) for specs in kinds]
        # Of a model that all have whole, each reads a quarter.
        cases.append(Case(path, "whole", names, {"share_reads": True}))
        # In a bucket also where processes need parts of the same rows, too short for requests.
        there = f"{bucket}/{layout.replace(' ', '-')}"
        ostraka.copy(path, there)
        in_bucket = {"apart": ["fsdp", "inputs"], "in rows": ["inputs"]}.get(layout, [])
        cases += [Case(there, specs, names, {}) for specs in in_bucket]
    processes: Any = {"processes": 4, "devices_per_process": 2, "timeout_s": 600}
    for result in run_processes(restore_cases, cases, **processes):
        for case, found in zip(cases, result.value, strict=True):
            if case.options.get("share_reads") is False:
                assert found.held < found.total / 2, case
                assert found.held <= found.read <= 1.1 * found.held, case
            else:
                assert found.in_all <= 1.1 * found.total, case
                assert found.most <= 0.35 * found.total, case


# Queries, keys and values in one tensor


def fused(tensors: dict[str, Any], layout: str) -> dict[str, Any]:
    """One after the other, as Phi-3 has them, or a group of heads after the other."""
    if layout == "apart":
        return tensors
    left, made = dict(tensors), {}
    for n in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{n}."
        q, k, v = (left.pop(f"{at}self_attn.{name}_proj.weight") for name in "qkv")
        gate, up = (left.pop(f"{at}mlp.{name}_proj.weight") for name in ("gate", "up"))
        made[f"{at}mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
        groups = [array.reshape(4, -1, 80, 640) for array in (q, k, v)]
        rows = np.concatenate([q, k, v]) if layout == "in rows" else np.concatenate(groups, axis=1)
        made[f"{at}self_attn.qkv_proj.weight"] = rows.reshape(-1, 640)
    return {**left, **made}


def rules_for(layout: str) -> Any:
    if layout == "apart":
        return "hf"
    attn, mlp = "layers/{n}/self_attn", "layers/{n}/mlp"
    sizes = {"q": 640, "k": 320, "v": 320} if layout == "in rows" else {"q": 2, "k": 1, "v": 1}
    into = {f"{attn}/{name}_proj/kernel": size for name, size in sizes.items()}
    qkv: dict[str, Any] = {"transpose": True, "cut": {"axis": 1, "into": into}}
    if layout == "by group":
        qkv["cut"]["axis"] = 2
        qkv |= {"split": {1: [4, 4, 80]}, "merge": {1: [4, -1, 80]}}
    gate_up = {f"{mlp}/gate_proj/kernel": 1760, f"{mlp}/up_proj/kernel": -1}
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
