"""Models of `transformers` whose tensors are fused: the same logits from NNX with kernels of their
own for queries, keys and values; and back, byte for byte."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import ostraka
from hf_decoder import make_decoder
from hf_fused import CONFIGS, RULES, Gpt2, Neox
from hf_python import assert_logits, assert_transformers_loads, write_models
from ostraka.errors import Mismatch
from test_hf_transformers import tensors_of

EXPERTS: dict[str, Any] = {
    name: {
        "model_type": name,
        "hidden_size": 64,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "pad_token_id": 0,
    }
    for name in ("gpt_oss", "llama4_text")
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("fused"), CONFIGS)


def template(family: str) -> Any:
    config = CONFIGS[family]
    if family == "phi3":
        return nnx.eval_shape(lambda: make_decoder(config, has_head=True))
    kind = {"gpt2": Gpt2, "gpt_neox": Neox}[family]
    return nnx.eval_shape(lambda: kind(config, nnx.Rngs(0)))


def restored(models: Path, family: str, specs: Any) -> Any:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    names = RULES[family](CONFIGS[family])
    return ostraka.restore(
        models / family, like=template(family), names=names, mesh=mesh, specs=specs
    )


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("specs", [P(None, "x"), P("x")], ids=["outputs", "inputs"])
def test_logits_are_those_of_transformers(models: Path, family: str, specs: P):
    parts = ("q_proj", "k_proj", "v_proj") if family == "phi3" else ("query", "key", "value")
    rules = {f"**/{part}/kernel": specs for part in parts}
    model = restored(models, family, {**rules, "**": P()})
    block = (model.h if family == "gpt2" else model.layers)[0]
    kernel = (block.self_attn.k_proj if family == "phi3" else block.attn.key).kernel[...]
    assert kernel.sharding.shard_shape(kernel.shape) != kernel.shape
    assert_logits(model, models / family)


@pytest.mark.parametrize("family", CONFIGS)
def test_back_to_the_tensors_of_transformers(models: Path, tmp_path: Path, family: str):
    """From a model on a mesh, with the same rules, in a file; `transformers` loads all of it."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(RULES[family](CONFIGS[family])))
    ostraka.save(tmp_path / "ours", {"model": restored(models, family, P())})
    back = tmp_path / "back"
    ostraka.convert(tmp_path / "ours", back, to="hf", names=rules, only="model")
    assert tensors_of(back) == tensors_of(models / family)
    ostraka.convert(models / family, tmp_path / "tree", to="ostraka", names=rules)
    ostraka.convert(tmp_path / "tree", tmp_path / "again", to="hf", names=rules)
    assert tensors_of(tmp_path / "again") == tensors_of(models / family)
    assert_transformers_loads(back, models / family)


def test_a_leaf_that_is_missing_is_named(models: Path, tmp_path: Path):
    model = restored(models, "phi3", P())
    del model.layers[1].self_attn.k_proj
    ostraka.save(tmp_path / "ours", model)
    said = (
        r"tensor 'model.layers.1.self_attn.qkv_proj.weight' is put together of 3 leaves, of which "
        r"there is no 'layers/1/self_attn/k_proj/kernel'"
    )
    names = RULES["phi3"](CONFIGS["phi3"])
    with pytest.raises(Mismatch, match=said):
        ostraka.convert(tmp_path / "ours", tmp_path / "back", to="hf", names=names)


def test_the_rules_of_the_family_have_it_fused(models: Path):
    """And then the leaves of a model with separate kernels are missing."""
    said = (
        r"'layers/0/mlp/gate_proj/kernel' is not in the checkpoint "
        r"\(did you mean 'layers/0/mlp/gate_up_proj/kernel'\?\)"
    )
    with pytest.raises(Mismatch, match=said):
        ostraka.restore(models / "phi3", like=template("phi3"), names="hf")


def test_a_family_with_own_rules_before_it(models: Path, tmp_path: Path):
    """Only what is other than the family has it needs rules."""
    whole = RULES["phi3"](CONFIGS["phi3"])
    own = {pattern: rule for pattern, rule in whole.items() if "cut" in rule}
    model = ostraka.restore(models / "phi3", like=template("phi3"), names=[own, "hf"])
    wanted = restored(models, "phi3", P())
    for one, two in zip(jax.tree.leaves(model), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, two)
    ostraka.save(tmp_path / "ours", model)
    ostraka.convert(tmp_path / "ours", tmp_path / "back", to="hf", names=[own, "phi3"])
    assert tensors_of(tmp_path / "back") == tensors_of(models / "phi3")
    other = {**own, "model.layers.{n}.qkv.weight": "layers/{n}/qkv"}
    with pytest.raises(Mismatch, match=r"qkv\.weight' matches no tensor"):
        ostraka.open(models / "phi3", names=(other, "phi3"))


# Experts that are one tensor on disk


@pytest.mark.parametrize("family", EXPERTS)
def test_fused_experts(tmp_path: Path, family: str):
    """Gate and up are cut apart, and all experts are one leaf; gpt_oss has gate and up in turn."""
    write_models(tmp_path, EXPERTS, logits=False)
    above = "model.layers.{n}.{mlp}.experts"
    kernels = [f"layers/{{n}}/{{mlp}}/{part}/kernel" for part in ("gate", "up")]
    biases = [f"layers/{{n}}/{{mlp}}/{part}/bias" for part in ("gate", "up")]
    names: dict[str, Any] = {f"{above}.down_proj": "layers/{n}/{mlp}/down/kernel"}
    if family == "gpt_oss":
        cut = {"axis": 3, "into": kernels}
        names[f"{above}.gate_up_proj"] = {"split": {2: [-1, 2]}, "cut": cut}
        cut = {"axis": 2, "into": biases}
        names[f"{above}.gate_up_proj_bias"] = {"split": {1: [-1, 2]}, "cut": cut}
    else:
        names[f"{above}.gate_up_proj"] = {"cut": {"axis": 2, "into": dict.fromkeys(kernels, 32)}}
    names["{rest*}"] = "{rest*}"
    opened = ostraka.open(tmp_path / family, names=names)
    raw = ostraka.open(tmp_path / family)
    mlp = "mlp" if family == "gpt_oss" else "feed_forward"
    for n in range(2):
        fused = np.asarray(raw[f"model.layers.{n}.{mlp}.experts.gate_up_proj"])
        turns = (fused[..., ::2], fused[..., 1::2])
        halves = (fused[..., :32], fused[..., 32:])
        gate, up = turns if family == "gpt_oss" else halves
        assert np.array_equal(np.asarray(opened[f"layers/{n}/{mlp}/gate/kernel"]), gate)
        assert np.array_equal(np.asarray(opened[f"layers/{n}/{mlp}/up/kernel"]), up)
        assert opened[f"layers/{n}/{mlp}/down/kernel"].shape == (4, 32, 64)
    ostraka.convert(tmp_path / family, tmp_path / "ours", to="ostraka", names=names)
    ostraka.convert(tmp_path / "ours", tmp_path / "back", to="hf", names=names)
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / family)
