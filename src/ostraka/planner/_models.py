"""The parameters of the common decoder families, from their Hugging Face configs. No JAX.

A parameter has the path and the shape that it has in a Flax NNX model: kernels are (in, out), and
names are those of Hugging Face where the sharding presets know them. What a config leaves out is
what the config class of `transformers` says; `tests/record_hf_shapes.py` asks the real models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ostraka.errors import nearest
from ostraka.planner._config import Config, decoder_sizes
from ostraka.planner._gpt import gpt2, gpt_neox
from ostraka.planner._layers import (
    FOUR_NORMS,
    Parameter,
    Traits,
    decoder,
    gated,
    gated_and_fused,
    gated_with_bias,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
    two_kernels,
)
from ostraka.planner._vision import gemma3


def parameters_of(values: Mapping[str, Any]) -> list[Parameter]:
    """All parameters of the model that a config describes, ordered as NNX orders them."""
    family = _family_of(values)
    found = family.parameters(family.read(values))
    return sorted(found, key=lambda parameter: _order(parameter[0]))


def dtype_of(values: Mapping[str, Any]) -> str:
    """The dtype that the weights are published in."""
    within = values.get("text_config")
    for fields in (values, within if isinstance(within, Mapping) else {}):
        found = fields.get("torch_dtype") or fields.get("dtype")
        if found:
            return str(found)
    return "float32"


def _family_of(values: Mapping[str, Any]) -> Family:
    kind = values.get("model_type")
    if kind is None:
        raise ValueError(
            "the config has no 'model_type': give the config.json of a Hugging Face model"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"the config is of the family {kind!r}{nearest(str(kind), list(FAMILIES))}; those that "
            f"can be planned are {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def _order(path: str) -> list[tuple[bool, int, str]]:
    """By name, numbers by their value: the order of `nnx.State`."""
    names = path.split("/")
    return [(not n.isdigit(), int(n) if n.isdigit() else 0, n) for n in names]


@dataclass(frozen=True, slots=True)
class Family:
    """The models of one `model_type`."""

    parameters: Callable[[Config], Iterable[Parameter]]
    defaults: Mapping[str, Any]
    """What the config class says where a config.json says nothing."""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Aliases of fields."""

    def read(self, values: Mapping[str, Any]) -> Config:
        named = {self.aliases.get(name, name): value for name, value in values.items()}
        return Config(named, self.defaults)


def _decoder(
    traits: Traits,
    sizes: Mapping[str, Any],
    *,
    aliases: Mapping[str, str] | None = None,
    **defaults: Any,
) -> Family:
    def parameters(config: Config) -> Iterator[Parameter]:
        return decoder(config, traits)

    return Family(parameters, {**sizes, **defaults}, aliases or {})


def _gemma3(config: Config) -> Iterator[Parameter]:
    text = FAMILIES["gemma3_text"].read(config.section("text_config"))
    vision = Config(config.section("vision_config"), _SIGLIP)
    return gemma3(config, text=text, vision=vision, traits=_GEMMA3_TEXT)


_LLAMA = Traits(
    feed_forward=gated_with_bias, input_bias="attention_bias", output_bias="attention_bias"
)
_MISTRAL = Traits(feed_forward=gated)
_MIXTRAL = Traits(feed_forward=mixtral_experts)
_QWEN2 = Traits(feed_forward=gated, input_bias=True)
_QWEN2_MOE = Traits(feed_forward=qwen2_experts, input_bias="qkv_bias")
_GEMMA = replace(_LLAMA, feed_forward=gated)
_QWEN3 = replace(_GEMMA, head_norms="one for all heads")
_QWEN3_MOE = replace(_QWEN3, feed_forward=qwen3_experts)
_GEMMA2 = replace(_GEMMA, norms=FOUR_NORMS)
_GEMMA3_TEXT = replace(_GEMMA2, head_norms="one for all heads")
_PHI3 = Traits(feed_forward=gated_and_fused, is_fused=True)
_STARCODER2 = Traits(
    feed_forward=two_kernels, norms_have_bias=True, input_bias="use_bias", output_bias="use_bias"
)
_OLMO2 = replace(
    _GEMMA,
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    head_norms="one for each",
)

_SIGLIP = {
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "vision_use_head": True,
}
_NEOX = {
    "num_hidden_layers": 44,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "vocab_size": 50432,
    "attention_bias": True,
}
_GPT2 = {
    "n_layer": 12,
    "n_embd": 768,
    "n_positions": 1024,
    "vocab_size": 50257,
    "tie_word_embeddings": True,
}
_GPT2_ALIASES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
}

FAMILIES: dict[str, Family] = {
    "llama": _decoder(_LLAMA, decoder_sizes(32, 4096, 11008, 32, None, 32000)),
    "mistral": _decoder(_MISTRAL, decoder_sizes(32, 4096, 14336, 32, 8, 32000)),
    "mixtral": _decoder(
        _MIXTRAL,
        decoder_sizes(32, 4096, 14336, 32, 8, 32000),
        aliases={"num_experts": "num_local_experts"},
        num_local_experts=8,
    ),
    "qwen2": _decoder(_QWEN2, decoder_sizes(32, 4096, 22016, 32, 32, 151936)),
    "qwen2_moe": _decoder(
        _QWEN2_MOE,
        decoder_sizes(24, 2048, 5632, 16, 16, 151936),
        num_experts=60,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        decoder_sparse_step=1,
        qkv_bias=True,
    ),
    "qwen3": _decoder(_QWEN3, decoder_sizes(32, 4096, 22016, 32, 32, 151936), head_dim=128),
    "qwen3_moe": _decoder(
        _QWEN3_MOE,
        decoder_sizes(24, 2048, 6144, 32, 4, 151936),
        aliases={"num_local_experts": "num_experts"},
        num_experts=128,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
    ),
    "gemma": _decoder(
        _GEMMA,
        decoder_sizes(28, 3072, 24576, 16, 16, 256000),
        head_dim=256,
        tie_word_embeddings=True,
    ),
    "gemma2": _decoder(
        _GEMMA2,
        decoder_sizes(26, 2304, 9216, 8, 4, 256000),
        head_dim=256,
        tie_word_embeddings=True,
    ),
    "gemma3": Family(_gemma3, {"tie_word_embeddings": True}),
    "gemma3_text": _decoder(
        _GEMMA3_TEXT,
        decoder_sizes(26, 2304, 9216, 8, 4, 262208),
        head_dim=256,
        tie_word_embeddings=True,
    ),
    "phi3": _decoder(_PHI3, decoder_sizes(32, 3072, 8192, 32, None, 32064)),
    "starcoder2": _decoder(
        _STARCODER2,
        decoder_sizes(30, 3072, 12288, 24, 2, 49152),
        use_bias=True,
        tie_word_embeddings=True,
    ),
    "olmo2": _decoder(_OLMO2, decoder_sizes(32, 4096, 11008, 32, None, 50304)),
    "gpt2": Family(gpt2, _GPT2, _GPT2_ALIASES),
    "gpt_neox": Family(gpt_neox, _NEOX),
}
