"""Models by name and by config.json: published totals, paths of NNX modules, optax's states.

The modules here are written with Flax's layers after the published architectures, apart from the
planner: what they have in common with it are the names. What `transformers` builds is compared in
test_planner_hf.py, for all families.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from ostraka import sharding
from ostraka.families.catalog import MODELS
from ostraka.families.families import dtype_of, parameters_of
from ostraka.live.parse import parse
from ostraka.planner import plan
from ostraka.planner.sources import plan_source
from ostraka.planner.state import (
    OPTIMIZERS,
    PlanOptions,
    factored_shapes,
    mesh_of_sizes,
    optimizer_leaves,
)
from ostraka.tree.nodes import leaves_of

# What others publish, found in public and equal to what the planner counts:
# hub: the Hugging Face API's or index's count of what is in the safetensors files, as cited in
#     public code. Those of Llama 2 have 64 rotary frequencies a layer besides, no parameters:
#     6,738,417,664 is 6,738,415,616 + 32 * 64. Those of tied models may have the head twice.
# card: the publisher's model card or README.
# keras: the presets of KerasHub, a third implementation.
# gguf: the count that llama.cpp and Ollama read off the converted weights.
# counted: what others who loaded the published weights counted.
# cited: a number in a public table that does not say where it is from.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,  # hub, without the frequencies
    "llama-2-13b": 13_015_864_320,  # hub, without the frequencies
    "llama-2-70b": 68_976_648_192,  # hub, without the frequencies
    "llama-3.1-8b": 8_030_261_248,  # hub
    "llama-3.1-70b": 70_553_706_496,  # hub
    "llama-3.1-405b": 405_853_388_800,  # hub
    "llama-3.2-1b": 1_235_814_400,  # hub
    "llama-3.2-3b": 3_212_749_824,  # hub
    "llama-3.3-70b": 70_553_706_496,  # hub
    "tinyllama-1.1b": 1_100_048_384,  # hub
    "smollm2-135m": 134_515_008,  # hub
    "smollm2-1.7b": 1_711_376_384,  # gguf, counted
    "mistral-7b": 7_241_732_096,  # hub, v0.1
    "mistral-nemo-12b": 12_247_782_400,  # hub
    "mistral-small-24b": 23_572_403_200,  # cited, 2501; keras of its descendants
    "mixtral-8x7b": 46_702_792_704,  # hub, keras
    "mixtral-8x22b": 140_620_634_112,  # hub, of the weights with 32,000 tokens
    "qwen1.5-moe-a2.7b": 14_315_784_192,  # hub, keras
    "qwen2.5-0.5b": 494_032_768,  # counted
    "qwen2.5-1.5b": 1_543_714_304,  # hub
    "qwen2.5-3b": 3_085_938_688,  # keras, gguf
    "qwen2.5-7b": 7_615_616_512,  # hub
    "qwen2.5-14b": 14_770_033_664,  # gguf
    "qwen2.5-32b": 32_763_876_352,  # hub, keras
    "qwen2.5-72b": 72_706_203_648,  # hub
    "qwen3-0.6b": 596_049_920,  # counted, gguf; the files have the tied head twice
    "qwen3-1.7b": 1_720_574_976,  # keras, gguf; the files have the tied head twice
    "qwen3-4b": 4_022_468_096,  # hub, gguf
    "qwen3-8b": 8_190_735_360,  # hub
    "qwen3-14b": 14_768_307_200,  # keras, gguf
    "qwen3-32b": 32_762_123_264,  # hub
    "qwen3-30b-a3b": 30_532_122_624,  # hub
    "qwen3-235b-a22b": 235_093_634_560,  # hub, keras
    "gemma-2b": 2_506_172_416,  # keras
    "gemma-7b": 8_537_680_896,  # keras
    "gemma-2-2b": 2_614_341_888,  # hub
    "gemma-2-9b": 9_241_705_984,  # hub
    "gemma-2-27b": 27_227_128_320,  # hub
    "gemma-3-270m": 268_098_176,  # keras, gguf
    "gemma-3-1b": 999_885_952,  # keras, hub
    "gemma-3-4b": 4_300_079_472,  # hub
    "gemma-3-12b": 12_187_325_040,  # hub
    "gemma-3-27b": 27_432_406_640,  # hub, keras
    "phi-3-mini": 3_821_079_552,  # hub
    "phi-3-medium": 13_960_238_080,  # counted
    "phi-4": 14_659_507_200,  # hub
    "phi-4-mini": 3_836_021_760,  # hub
    "olmo-2-1b": 1_484_916_736,  # hub
    "olmo-2-7b": 7_298_617_344,  # hub
    "olmo-2-13b": 13_716_198_400,  # hub
    "olmo-2-32b": 32_234_279_936,  # cited
    "gpt2": 124_439_808,  # counted; OpenAI's own figures are rounded
    "gpt2-medium": 354_823_168,  # keras, counted
    "gpt2-large": 774_030_080,  # keras, counted
    "gpt2-xl": 1_557_611_200,  # keras, counted
    "gpt-neox-20b": 20_554_567_680,  # card
    "pythia-70m": 70_426_624,  # card
    "pythia-160m": 162_322_944,  # card
    "pythia-410m": 405_334_016,  # card
    "pythia-1b": 1_011_781_632,  # card
    "pythia-1.4b": 1_414_647_808,  # card
    "pythia-2.8b": 2_775_208_960,  # card
    "pythia-6.9b": 6_857_302_016,  # card
    "pythia-12b": 11_846_072_320,  # card
}


def total(config: Any) -> int:
    return sum(prod(shape) for _, shape in parameters_of(config))


@pytest.mark.parametrize("name", MODELS)
def test_totals_are_the_published_ones(name: str):
    if name == "gpt-3-175b":
        # Only a rounded number is public: the paper has 174,600 million.
        assert round(total(MODELS[name]) / 1e8) * 1e8 == 174_600e6
    else:
        assert total(MODELS[name]) == PUBLISHED[name]


# Real modules


class Attention(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
        width, heads = c["hidden_size"], c["num_attention_heads"]
        size = c.get("head_dim") or width // heads
        keys = c["num_key_value_heads"] * size
        bias = c["model_type"] == "qwen2" or c.get("attention_bias", False)
        self.q_proj = nnx.Linear(width, heads * size, use_bias=bias, rngs=rngs)
        self.k_proj = nnx.Linear(width, keys, use_bias=bias, rngs=rngs)
        self.v_proj = nnx.Linear(width, keys, use_bias=bias, rngs=rngs)
        bias = bias and c["model_type"] != "qwen2"
        self.o_proj = nnx.Linear(heads * size, width, use_bias=bias, rngs=rngs)
        if c["model_type"] == "qwen3":
            self.q_norm = nnx.RMSNorm(size, rngs=rngs)
            self.k_norm = nnx.RMSNorm(size, rngs=rngs)


class Gated(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
        width, hidden = c["hidden_size"], c["intermediate_size"]
        bias = c.get("mlp_bias", False)
        self.gate_proj = nnx.Linear(width, hidden, use_bias=bias, rngs=rngs)
        self.up_proj = nnx.Linear(width, hidden, use_bias=bias, rngs=rngs)
        self.down_proj = nnx.Linear(hidden, width, use_bias=bias, rngs=rngs)


class Stacked(nnx.Module):
    def __init__(self, count: int, inputs: int, outputs: int):
        self.kernel = nnx.Param(jnp.zeros((count, inputs, outputs)))


class Experts(nnx.Module):
    def __init__(self, c: dict[str, Any]):
        count, width, hidden = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
        self.w1 = Stacked(count, width, hidden)
        self.w2 = Stacked(count, hidden, width)
        self.w3 = Stacked(count, width, hidden)


class Mixture(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
        self.router = nnx.Linear(
            c["hidden_size"], c["num_local_experts"], use_bias=False, rngs=rngs
        )
        self.experts = Experts(c)


class DecoderLayer(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
        width = c["hidden_size"]
        self.input_layernorm = nnx.RMSNorm(width, rngs=rngs)
        self.post_attention_layernorm = nnx.RMSNorm(width, rngs=rngs)
        if c["model_type"] == "gemma2":
            self.pre_feedforward_layernorm = nnx.RMSNorm(width, rngs=rngs)
            self.post_feedforward_layernorm = nnx.RMSNorm(width, rngs=rngs)
        self.self_attn = Attention(c, rngs)
        if c["model_type"] == "mixtral":
            self.block_sparse_moe = Mixture(c, rngs)
        else:
            self.mlp = Gated(c, rngs)


class Decoder(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
        width, vocabulary = c["hidden_size"], c["vocab_size"]
        self.embed_tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(c, rngs) for _ in range(c["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        if not c.get("tie_word_embeddings", c["model_type"].startswith("gemma")):
            self.lm_head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)


class Gpt2Attention(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.c_attn = nnx.Linear(width, 3 * width, rngs=rngs)
        self.c_proj = nnx.Linear(width, width, rngs=rngs)


class Gpt2Mlp(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.c_fc = nnx.Linear(width, 4 * width, rngs=rngs)
        self.c_proj = nnx.Linear(4 * width, width, rngs=rngs)


class Gpt2Layer(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.ln_1 = nnx.LayerNorm(width, rngs=rngs)
        self.attn = Gpt2Attention(width, rngs)
        self.ln_2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = Gpt2Mlp(width, rngs)


class Gpt2(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
        width = c["n_embd"]
        self.wte = nnx.Embed(c["vocab_size"], width, rngs=rngs)
        self.wpe = nnx.Embed(c["n_positions"], width, rngs=rngs)
        self.h = nnx.List([Gpt2Layer(width, rngs) for _ in range(c["n_layer"])])
        self.ln_f = nnx.LayerNorm(width, rngs=rngs)


class NeoxAttention(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.query_key_value = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out_proj = nnx.Linear(width, width, rngs=rngs)


class NeoxMlp(nnx.Module):
    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.dense_h_to_4h = nnx.Linear(width, hidden, rngs=rngs)
        self.dense_4h_to_h = nnx.Linear(hidden, width, rngs=rngs)


class NeoxLayer(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
        width = c["hidden_size"]
        self.input_layernorm = nnx.LayerNorm(width, rngs=rngs)
        self.post_attention_layernorm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = NeoxAttention(width, rngs)
        self.mlp = NeoxMlp(width, c["intermediate_size"], rngs)


class Neox(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
        width = c["hidden_size"]
        self.embed_in = nnx.Embed(c["vocab_size"], width, rngs=rngs)
        self.layers = nnx.List([NeoxLayer(c, rngs) for _ in range(c["num_hidden_layers"])])
        self.final_layer_norm = nnx.LayerNorm(width, rngs=rngs)
        self.lm_head = nnx.Linear(width, c["vocab_size"], use_bias=False, rngs=rngs)


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama"},
    "llama with biases": {
        **SMALL,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {**SMALL, "model_type": "mistral", "head_dim": None},
    "mixtral": {**SMALL, "model_type": "mixtral", "num_local_experts": 4},
    "qwen2": {**SMALL, "model_type": "qwen2"},
    "qwen3": {**SMALL, "model_type": "qwen3", "head_dim": 16},
    "gemma": {**SMALL, "model_type": "gemma", "head_dim": 32},
    "gemma2": {**SMALL, "model_type": "gemma2", "head_dim": 32},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_positions": 128,
        "vocab_size": 512,
    },
    "gpt_neox": {**SMALL, "model_type": "gpt_neox"},
}


def make(config: dict[str, Any]) -> Any:
    kind = {"gpt2": Gpt2, "gpt_neox": Neox}.get(config["model_type"], Decoder)
    return nnx.eval_shape(lambda: kind(config, nnx.Rngs(0)))


def shapes(tree: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(leaf.path, tuple(leaf.value.shape)) for leaf in leaves_of(parse(tree))]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_shapes_of_a_real_module(name: str):
    assert parameters_of(CONFIGS[name]) == shapes(make(CONFIGS[name]))


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_plan_of_a_config_is_that_of_the_module(tmp_path: Path, name: str, optimizer: str):
    """From a config.json, and from the real module with the real optimizer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    mesh = {"data": 4, "model": 2}
    options = PlanOptions(mesh=mesh_of_sizes(mesh), hosts=2, optimizer=optimizer)
    by_config = plan_source(str(tmp_path / "config.json"), options)
    rules = sharding.fsdp("data") | sharding.tensor_parallel("model")
    by_module = plan(make(CONFIGS[name]), mesh=mesh, specs=rules, processes=2, optimizer=optimizer)
    assert by_config._write == by_module._write
    assert by_config.files == by_module.files
    assert by_config.parameters == by_module.parameters == total(CONFIGS[name])
    # But for the name of the module's class.
    assert abs(by_config.metadata_bytes - by_module.metadata_bytes) < 40


# Optimizers


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizers_have_the_state_of_optax(name: str, dtype: str):
    def make_both() -> Any:
        model = Wide(dtype, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, getattr(optax, name)(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make_both)
    found = optimizer_leaves(name, shapes(model), dtype)
    assert [(path, shape, kept) for path, shape, kept, _ in found] == [
        (leaf.path, tuple(leaf.value.shape), leaf.value.dtype.name)
        for leaf in leaves_of(parse(optimizer))
    ]


class Wide(nnx.Module):
    """Shapes on both sides of what Adafactor factors, with equal dimensions and three of them."""

    def __init__(self, dtype: str, *, rngs: nnx.Rngs):
        self.wide = nnx.Linear(256, 512, param_dtype=dtype, rngs=rngs)
        self.tall = nnx.Linear(512, 128, param_dtype=dtype, rngs=rngs)
        self.square = nnx.Linear(256, 256, param_dtype=dtype, rngs=rngs)
        self.small = nnx.Linear(100, 300, param_dtype=dtype, rngs=rngs)
        self.heads = nnx.LinearGeneral(256, (4, 128), param_dtype=dtype, rngs=rngs)


def test_no_optimizer_has_no_state():
    assert optimizer_leaves("none", [("w", (4,))], "float32") == []
    with pytest.raises(ValueError, match=r"no optimizer 'adamm' \(did you mean 'adam"):
        optimizer_leaves("adamm", [], "float32")
    assert factored_shapes((4,)) == {"v": (4,), "v_col": (1,), "v_row": (1,)}


# Configs that can't be planned


def test_configs_that_say_too_little():
    with pytest.raises(ValueError, match="the config has no 'model_type': give the config.json"):
        parameters_of({})
    with pytest.raises(ValueError, match=r"family 'lama' \(did you mean 'llama'\?\); those that"):
        parameters_of({"model_type": "lama"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "4"}, "has '4' as its 'hidden_size'; it must be a positive integer, at"),
        ({"hidden_size": None}, "has null as its 'hidden_size'; it must be a positive integer"),
        ({"vocab_size": True}, "has true as its 'vocab_size'; it must be a positive integer"),
        ({"tie_word_embeddings": "no"}, "has 'no' as its 'tie_word_embeddings'; it must be true"),
        ({"hidden_size": 8}, "has 32 as its 'num_attention_heads', more than its 'hidden_size'"),
        ({"num_experts": -1}, "has -1 as its 'num_experts'; it must be an integer, zero or more"),
        ({"mlp_only_layers": 3}, "has 3 as its 'mlp_only_layers'; it must be a list of integers"),
        ({"mlp_only_layers": ["0"]}, "as its 'mlp_only_layers'; it must be a list of integers"),
    ],
)
def test_fields_that_make_no_sense(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        parameters_of({"model_type": "qwen3_moe", **fields})


def test_a_config_within_a_config():
    with pytest.raises(ValueError, match="has 4 as its 'text_config'; it must be a JSON object"):
        parameters_of({"model_type": "gemma3", "text_config": 4})
    assert dtype_of({"text_config": {"torch_dtype": "bfloat16"}}) == "bfloat16"


def test_dtypes():
    assert dtype_of({}) == "float32"
    assert dtype_of({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert dtype_of({"dtype": "float16"}) == "float16"
