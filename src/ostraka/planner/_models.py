"""The parameters of the common decoder families, from their Hugging Face configs. No JAX.

A parameter has the path and the shape that it has in a Flax NNX model: kernels are (in, out), and
names are those of Hugging Face where the sharding presets know them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ostraka.errors import nearest

_MOST = 10_000_000
"""A larger number is rather a mistake, and a plan for it would take for ever."""

Parameter = tuple[str, tuple[int, ...]]
"""A path below the model, and a shape."""


@dataclass(frozen=True, slots=True)
class Config:
    """A `config.json`, read with the defaults of its family."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    traits: Mapping[str, Any]
    """What tells the members of the family apart, which no config has a say in."""

    def number(self, name: str, default: int | None = None) -> int:
        """A positive count, which must be there unless it has a default."""
        found = self.get(name)
        if found is None and default is not None:
            return default
        if type(found) is not int or not 0 < found <= _MOST:
            what = "has no" if found is None else f"has {found!r} as its"
            raise ValueError(
                f"the config {what} {name!r}; it must be a positive integer, at most {_MOST:,}"
            )
        return found

    def get(self, name: str) -> Any:
        found = self.values.get(name)
        return self.defaults.get(name) if found is None else found

    def flag(self, name: str) -> bool:
        return bool(self.get(name))


def parameters_of(values: Mapping[str, Any]) -> list[Parameter]:
    """All parameters of the model that a config describes, ordered as NNX orders them."""
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
    family = FAMILIES[kind]
    found = list(family.parameters(Config(values, family.defaults, family.traits)))
    return sorted(found, key=lambda parameter: _order(parameter[0]))


def dtype_of(values: Mapping[str, Any]) -> str:
    """The dtype that the weights are published in."""
    return str(values.get("torch_dtype") or values.get("dtype") or "float32")


def _order(path: str) -> list[tuple[bool, int, str]]:
    """By name, numbers by their value: the order of `nnx.State`."""
    names = path.split("/")
    return [(not n.isdigit(), int(n) if n.isdigit() else 0, n) for n in names]


@dataclass(frozen=True, slots=True)
class _Family:
    parameters: Callable[[Config], Iterator[Parameter]]
    defaults: Mapping[str, Any]
    traits: Mapping[str, Any]


def _dense(path: str, inputs: int, outputs: int, *, bias: bool = False) -> Iterator[Parameter]:
    yield f"{path}/kernel", (inputs, outputs)
    if bias:
        yield f"{path}/bias", (outputs,)


def _layer_norm(path: str, width: int) -> Iterator[Parameter]:
    yield f"{path}/scale", (width,)
    yield f"{path}/bias", (width,)


def _decoder(config: Config) -> Iterator[Parameter]:
    """Llama and its relatives: RMS norms, grouped queries, gated units."""
    width = config.number("hidden_size")
    vocabulary = config.number("vocab_size")
    yield "embed_tokens/embedding", (vocabulary, width)
    for layer in range(config.number("num_hidden_layers")):
        at = f"layers/{layer}"
        for norm in config.traits["norms"]:
            yield f"{at}/{norm}/scale", (width,)
        yield from _attention(config, f"{at}/self_attn", width)
        if config.traits.get("experts"):
            yield from _experts(config, f"{at}/block_sparse_moe", width)
        else:
            yield from _gated(config, f"{at}/mlp", width)
    yield "norm/scale", (width,)
    if not config.flag("tie_word_embeddings"):
        yield "lm_head/kernel", (width, vocabulary)


def _attention(config: Config, at: str, width: int) -> Iterator[Parameter]:
    heads = config.number("num_attention_heads")
    grouped = config.number("num_key_value_heads", heads)
    size = config.number("head_dim", max(width // heads, 1))
    bias = config.flag("attention_bias")
    output_bias = bias and config.traits.get("output_bias") is not False
    yield from _dense(f"{at}/q_proj", width, heads * size, bias=bias)
    yield from _dense(f"{at}/k_proj", width, grouped * size, bias=bias)
    yield from _dense(f"{at}/v_proj", width, grouped * size, bias=bias)
    yield from _dense(f"{at}/o_proj", heads * size, width, bias=output_bias)
    if config.traits.get("norms_of_heads"):
        yield f"{at}/q_norm/scale", (size,)
        yield f"{at}/k_norm/scale", (size,)


def _gated(config: Config, at: str, width: int) -> Iterator[Parameter]:
    hidden = config.number("intermediate_size")
    bias = config.flag("mlp_bias")
    yield from _dense(f"{at}/gate_proj", width, hidden, bias=bias)
    yield from _dense(f"{at}/up_proj", width, hidden, bias=bias)
    yield from _dense(f"{at}/down_proj", hidden, width, bias=bias)


def _experts(config: Config, at: str, width: int) -> Iterator[Parameter]:
    hidden = config.number("intermediate_size")
    count = config.number("num_local_experts")
    yield from _dense(f"{at}/router", width, count)
    for expert in range(count):
        yield from _dense(f"{at}/experts/{expert}/w1", width, hidden)
        yield from _dense(f"{at}/experts/{expert}/w2", hidden, width)
        yield from _dense(f"{at}/experts/{expert}/w3", width, hidden)


def _gpt2(config: Config) -> Iterator[Parameter]:
    width = config.number("n_embd")
    hidden = config.number("n_inner", 4 * width)
    vocabulary = config.number("vocab_size")
    yield "wte/embedding", (vocabulary, width)
    yield "wpe/embedding", (config.number("n_positions"), width)
    for layer in range(config.number("n_layer")):
        at = f"h/{layer}"
        yield from _layer_norm(f"{at}/ln_1", width)
        yield from _dense(f"{at}/attn/c_attn", width, 3 * width, bias=True)
        yield from _dense(f"{at}/attn/c_proj", width, width, bias=True)
        yield from _layer_norm(f"{at}/ln_2", width)
        yield from _dense(f"{at}/mlp/c_fc", width, hidden, bias=True)
        yield from _dense(f"{at}/mlp/c_proj", hidden, width, bias=True)
    yield from _layer_norm("ln_f", width)
    if not config.flag("tie_word_embeddings"):
        yield "lm_head/kernel", (width, vocabulary)


def _gpt_neox(config: Config) -> Iterator[Parameter]:
    width = config.number("hidden_size")
    hidden = config.number("intermediate_size")
    bias = config.flag("attention_bias")
    vocabulary = config.number("vocab_size")
    yield "embed_in/embedding", (vocabulary, width)
    for layer in range(config.number("num_hidden_layers")):
        at = f"layers/{layer}"
        yield from _layer_norm(f"{at}/input_layernorm", width)
        yield from _layer_norm(f"{at}/post_attention_layernorm", width)
        yield from _dense(f"{at}/attention/query_key_value", width, 3 * width, bias=bias)
        yield from _dense(f"{at}/attention/out_proj", width, width, bias=bias)
        yield from _dense(f"{at}/mlp/dense_h_to_4h", width, hidden, bias=True)
        yield from _dense(f"{at}/mlp/dense_4h_to_h", hidden, width, bias=True)
    yield from _layer_norm("final_layer_norm", width)
    if not config.flag("tie_word_embeddings"):
        yield "lm_head/kernel", (width, vocabulary)


_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS = (*_TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

# What Hugging Face's config classes say where a config.json says nothing; and the family's traits.
FAMILIES: dict[str, _Family] = {
    "llama": _Family(_decoder, {}, {"norms": _TWO_NORMS}),
    "mistral": _Family(_decoder, {"num_key_value_heads": 8}, {"norms": _TWO_NORMS}),
    "mixtral": _Family(
        _decoder,
        {"num_key_value_heads": 8, "num_local_experts": 8},
        {"norms": _TWO_NORMS, "experts": True},
    ),
    "qwen2": _Family(
        _decoder, {"attention_bias": True}, {"norms": _TWO_NORMS, "output_bias": False}
    ),
    "qwen3": _Family(_decoder, {"head_dim": 128}, {"norms": _TWO_NORMS, "norms_of_heads": True}),
    "gemma": _Family(
        _decoder, {"head_dim": 256, "tie_word_embeddings": True}, {"norms": _TWO_NORMS}
    ),
    "gemma2": _Family(
        _decoder, {"head_dim": 256, "tie_word_embeddings": True}, {"norms": _FOUR_NORMS}
    ),
    "gpt2": _Family(
        _gpt2, {"n_positions": 1024, "vocab_size": 50257, "tie_word_embeddings": True}, {}
    ),
    "gpt_neox": _Family(_gpt_neox, {"attention_bias": True}, {}),
}
