"""Names of layers, and of their arrays, in widely used models. No JAX.

The names are those of Flax, Hugging Face, MaxText, bonsai, tunix, Gemma, GPT-2, LLaMA, T5 and
DeepSeek.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


INTO_HEADS = _words(
    """
    query key value q k v q_proj k_proj v_proj query_proj key_proj value_proj wq wk wv
    q_einsum k_einsum v_einsum kv_einsum qkv_einsum kv kv_proj wkv qkv qkv_proj wqkv
    query_key_value c_attn in_proj in_proj_qkv to_q to_k to_v to_qkv q_lin k_lin v_lin
    wq_b wkv_b q_b_proj kv_b_proj
    """
)
FUSED = _words("kv_einsum qkv_einsum kv kv_proj wkv qkv qkv_proj wqkv query_key_value to_qkv")
"""Layers with keys and values, or queries too, in one kernel."""
OUT_OF_HEADS = _words(
    "out o o_proj out_proj wo attn_out c_proj attn_vec_einsum o_einsum to_out out_lin"
)
INTO_HIDDEN = _words(
    """
    up gate up_proj gate_proj gate_up_proj fc1 fc_in linear1 linear_1 dense1 linear_fc1 lin1
    wi wi_0 wi_1 w1 w3 c_fc dense_h_to_4h intermediate mlp_in ff_proj gating_einsum ffn_in
    w_in w_gate w_up pwconv1
    """
)
OUT_OF_HIDDEN = _words(
    """
    down down_proj fc2 fc_out linear2 linear_2 dense2 linear_fc2 lin2 w2 dense_4h_to_h mlp_out
    ff_out ffn_out w_out w_down pwconv2
    """
)
INTO_WORDS = _words("lm_head unembed logits_dense logitdense embed_out output_projection")
OUT_OF_WORDS = _words(
    """
    embed embedding embeddings embedder embed_tokens tok_embeddings token_embedder
    token_embedding word_embeddings wte embed_in shared
    """
)
GPT2 = ("c_attn", "c_fc", "c_proj")
KERNELS = frozenset({"kernel", "weight", "w"})
ARRAYS = KERNELS | {"embedding", "bias", "scale"}
"""What a layer calls its arrays."""

_BOXED = ARRAYS | INTO_HEADS | OUT_OF_HEADS | INTO_HIDDEN | OUT_OF_HIDDEN


def names_on(path: str) -> tuple[str, ...]:
    """The names on a path, without the one that Linen's boxes add."""
    names = path.split("/")
    if len(names) > 1 and names[-1] == "value" and names[-2] in _BOXED:
        names.pop()
    return tuple(names)


def is_norm(layer: str) -> bool:
    return "norm" in layer.lower() or re.fullmatch(r"ln(\w{1,2}|_\w+)?", layer.lower()) is not None


def is_norm_of_heads(layer: str) -> bool:
    """Whether a norm is over a head, or over something else that has not the model's width."""
    found = re.search(r"(^|_)(q|k|v|kv|query|key|value|head)_?(layer)?norm", layer.lower())
    return found is not None


def is_of_positions(name: str) -> bool:
    """Whether an embedding is of positions or kinds, rather than of words."""
    return "pos" in name.lower() or "type" in name.lower() or name == "wpe"


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """A key by which Dense_10 comes after Dense_2."""
    return [
        (not part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"(\d+)", name)
    ]
