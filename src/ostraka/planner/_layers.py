"""The parameters of a decoder's layers: norms, attention, feed-forward units, experts. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ostraka.planner._config import Config

Parameter = tuple[str, tuple[int, ...]]
"""A path below the model, and a shape."""

TWO_NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR_NORMS = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Differences between families of decoders that no config field controls.

    A bias is there always, never, or if the config says so in the field of that name.
    """

    feed_forward: Callable[[Config, str, int], Iterator[Parameter]]
    """A function of the config, the path of a layer, and its number."""
    norms: tuple[str, ...] = TWO_NORMS
    norms_have_bias: bool = False
    input_bias: bool | str = False
    """Of queries, keys and values."""
    output_bias: bool | str = False
    head_norms: Literal["none", "one for all heads", "one for each"] = "none"
    is_fused: bool = False
    """Whether queries, keys and values are one kernel."""


def dense(path: str, inputs: int, outputs: int, *, bias: bool = False) -> Iterator[Parameter]:
    """A kernel as Flax has it, (in, out)."""
    yield f"{path}/kernel", (inputs, outputs)
    if bias:
        yield f"{path}/bias", (outputs,)


def norm(path: str, width: int, *, bias: bool = False) -> Iterator[Parameter]:
    """An RMS norm, or with a bias a layer norm."""
    yield f"{path}/scale", (width,)
    if bias:
        yield f"{path}/bias", (width,)


def decoder(config: Config, traits: Traits) -> Iterator[Parameter]:
    """Llama and its relatives."""
    width = config.number("hidden_size")
    vocabulary = config.number("vocab_size")
    yield "embed_tokens/embedding", (vocabulary, width)
    for layer in range(config.number("num_hidden_layers")):
        at = f"layers/{layer}"
        for name in traits.norms:
            yield from norm(f"{at}/{name}", width, bias=traits.norms_have_bias)
        yield from _attention(config, traits, f"{at}/self_attn", width)
        yield from traits.feed_forward(config, at, layer)
    yield from norm("norm", width, bias=traits.norms_have_bias)
    if not config.flag("tie_word_embeddings"):
        yield from dense("lm_head", width, vocabulary)


def _attention(config: Config, traits: Traits, at: str, width: int) -> Iterator[Parameter]:
    heads = config.number("num_attention_heads")
    grouped = config.number("num_key_value_heads", heads)
    size = _head_size(config, width, heads)
    bias = _has_bias(config, traits.input_bias)
    if traits.is_fused:
        yield from dense(f"{at}/qkv_proj", width, (heads + 2 * grouped) * size, bias=bias)
    else:
        yield from dense(f"{at}/q_proj", width, heads * size, bias=bias)
        yield from dense(f"{at}/k_proj", width, grouped * size, bias=bias)
        yield from dense(f"{at}/v_proj", width, grouped * size, bias=bias)
    output_bias = _has_bias(config, traits.output_bias)
    yield from dense(f"{at}/o_proj", heads * size, width, bias=output_bias)
    if traits.head_norms == "one for all heads":
        yield from norm(f"{at}/q_norm", size)
        yield from norm(f"{at}/k_norm", size)
    elif traits.head_norms == "one for each":
        yield from norm(f"{at}/q_norm", heads * size)
        yield from norm(f"{at}/k_norm", grouped * size)


def _head_size(config: Config, width: int, heads: int) -> int:
    if config.get("head_dim") is None and heads > width:
        raise ValueError(
            f"the config has {heads:,} as its 'num_attention_heads', more than its 'hidden_size' "
            f"of {width:,} can be divided among: give 'head_dim', or fewer heads"
        )
    return config.number("head_dim", width // heads)


def _has_bias(config: Config, bias: bool | str) -> bool:
    return config.flag(bias) if isinstance(bias, str) else bias


# Feed-forward units


def gated(config: Config, at: str, layer: int) -> Iterator[Parameter]:
    yield from _gated(config, f"{at}/mlp", config.number("intermediate_size"))


def gated_with_bias(config: Config, at: str, layer: int) -> Iterator[Parameter]:
    """As `gated`, with biases if the config has `mlp_bias`."""
    hidden, bias = config.number("intermediate_size"), config.flag("mlp_bias")
    yield from _gated(config, f"{at}/mlp", hidden, bias=bias)


def gated_and_fused(config: Config, at: str, layer: int) -> Iterator[Parameter]:
    width, hidden = config.number("hidden_size"), config.number("intermediate_size")
    yield from dense(f"{at}/mlp/gate_up_proj", width, 2 * hidden)
    yield from dense(f"{at}/mlp/down_proj", hidden, width)


def two_kernels(config: Config, at: str, layer: int) -> Iterator[Parameter]:
    width, hidden = config.number("hidden_size"), config.number("intermediate_size")
    bias = config.flag("use_bias")
    yield from dense(f"{at}/mlp/c_fc", width, hidden, bias=bias)
    yield from dense(f"{at}/mlp/c_proj", hidden, width, bias=bias)


def _gated(config: Config, at: str, hidden: int, *, bias: bool = False) -> Iterator[Parameter]:
    width = config.number("hidden_size")
    yield from dense(f"{at}/gate_proj", width, hidden, bias=bias)
    yield from dense(f"{at}/up_proj", width, hidden, bias=bias)
    yield from dense(f"{at}/down_proj", hidden, width, bias=bias)


# Experts


def mixtral_experts(config: Config, at: str, layer: int) -> Iterator[Parameter]:
    hidden, count = config.number("intermediate_size"), config.number("num_local_experts")
    names = ("w1", "w3", "w2")
    yield from _experts(config, f"{at}/block_sparse_moe", count, hidden, names)


def qwen2_experts(config: Config, at: str, layer: int) -> Iterator[Parameter]:
    """Besides those that are chosen, one that every token passes through."""
    yield from qwen3_experts(config, at, layer)
    if _is_sparse(config, layer):
        shared = config.number("shared_expert_intermediate_size")
        yield from _gated(config, f"{at}/mlp/shared_expert", shared)
        yield from dense(f"{at}/mlp/shared_expert_gate", config.number("hidden_size"), 1)


def qwen3_experts(config: Config, at: str, layer: int) -> Iterator[Parameter]:
    """In the layers that have them; the others have one unit, of another size."""
    if not _is_sparse(config, layer):
        yield from gated(config, at, layer)
        return
    count, hidden = config.number("num_experts"), config.number("moe_intermediate_size")
    names = ("gate_proj", "up_proj", "down_proj")
    yield from _experts(config, f"{at}/mlp", count, hidden, names)


def _experts(
    config: Config, at: str, count: int, hidden: int, names: tuple[str, str, str]
) -> Iterator[Parameter]:
    """The kernels of all experts in one array, as JAX multiplies them at once."""
    width = config.number("hidden_size")
    gate, up, down = names
    yield from dense(f"{at}/router", width, count)
    yield f"{at}/experts/{gate}/kernel", (count, width, hidden)
    yield f"{at}/experts/{up}/kernel", (count, width, hidden)
    yield f"{at}/experts/{down}/kernel", (count, hidden, width)


def _is_sparse(config: Config, layer: int) -> bool:
    step = config.number("decoder_sparse_step")
    some = config.number("num_experts", least=0) > 0
    return some and (layer + 1) % step == 0 and layer not in config.numbers("mlp_only_layers")
