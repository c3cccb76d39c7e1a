"""The parameters of model families: one row a parameter. Pure.

A row has the tensor of a Hugging Face file and the leaf of a Flax NNX model that is made of it. The
rules for names and the shapes that the planner counts both come from these rows.

Kernels are (in, out) in Flax and (out, in) in PyTorch, so their axes are reversed. GPT-2 is the
exception: its files have kernels as (in, out), too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Axes = tuple[int, ...] | Literal["reversed"] | None

_WIDTH, _HIDDEN, _SHARED = "hidden_size", "intermediate_size", "shared_expert_intermediate_size"
_QKV = "queries, keys, values"
_ALWAYS = ""
_RARE = "rare biases"
"""Biases that no family here has. There are rules for them, for related models."""


class Row(NamedTuple):
    """A parameter, or the same parameter of all layers (`{n}`) or of all experts (`{e}`)."""

    tensor: str
    """Pattern of the tensor's published name."""
    path: str
    """Pattern of the leaf's path. All experts of a layer are one leaf, so it has no `{e}`."""
    shape: tuple[int | str, ...]
    """The leaf's shape: numbers, fields of the config, or sizes that the family derives."""
    axes: Axes = None
    """The tensor's axes in the order of the leaf, without the axis of experts."""
    parts: tuple[str, ...] = ()
    """Optional parts of a model that the parameter belongs to. A model needs all of them."""


def _dense(
    name: str,
    inputs: int | str,
    outputs: int | str,
    *parts: str,
    path: str | None = None,
    bias: str = _RARE,
    axes: Axes = "reversed",
) -> tuple[Row, Row]:
    path = path or name.replace(".", "/")
    return (
        Row(f"{name}.weight", f"{path}/kernel", (inputs, outputs), axes, parts),
        Row(f"{name}.bias", f"{path}/bias", (outputs,), None, (*parts, bias) if bias else parts),
    )


def _norm(name: str, size: str, *parts: str, bias: str = _RARE) -> tuple[Row, Row]:
    path = name.replace(".", "/")
    return (
        Row(f"{name}.weight", f"{path}/scale", (size,), None, parts),
        Row(f"{name}.bias", f"{path}/bias", (size,), None, (*parts, bias) if bias else parts),
    )


def _experts(name: str, count: str, hidden: str, names: Iterable[str], part: str) -> Iterable[Row]:
    """The rows of gate, up and down kernels. JAX multiplies the kernels of all experts at once."""
    up, down = (count, _WIDTH, hidden), (count, hidden, _WIDTH)
    path = name.replace(".", "/")
    for kernel, shape in zip(names, (up, up, down), strict=True):
        leaf = f"{path}/{kernel}/kernel"
        yield Row(f"{name}.{{e}}.{kernel}.weight", leaf, shape, "reversed", (part,))


def _below(tensor: str, path: str, rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows with a beginning for all tensors and one for all paths."""
    return tuple(r._replace(tensor=f"{tensor}{r.tensor}", path=f"{path}{r.path}") for r in rows)


_MOE = "block_sparse_moe"
_GATED = ("gate_proj", "up_proj", "down_proj")

_DECODER_LAYER = (
    *_norm("input_layernorm", _WIDTH, "input_layernorm", bias="norm bias"),
    *_norm("post_attention_layernorm", _WIDTH, bias="norm bias"),
    *_norm("pre_feedforward_layernorm", _WIDTH, "pre_feedforward_layernorm"),
    *_norm("post_feedforward_layernorm", _WIDTH, "post_feedforward_layernorm"),
    *_dense("self_attn.q_proj", _WIDTH, "queries", "separate", bias="input bias"),
    *_dense("self_attn.k_proj", _WIDTH, "keys", "separate", bias="input bias"),
    *_dense("self_attn.v_proj", _WIDTH, "keys", "separate", bias="input bias"),
    *_dense("self_attn.qkv_proj", _WIDTH, _QKV, "fused"),
    *_dense("self_attn.o_proj", "queries", _WIDTH, bias="output bias"),
    *_norm("self_attn.q_norm", "head", "one norm for all heads"),
    *_norm("self_attn.k_norm", "head", "one norm for all heads"),
    *_norm("self_attn.q_norm", "queries", "a norm for each head"),
    *_norm("self_attn.k_norm", "keys", "a norm for each head"),
    *_dense("mlp.gate_proj", _WIDTH, _HIDDEN, "gated", bias="mlp bias"),
    *_dense("mlp.up_proj", _WIDTH, _HIDDEN, "gated", bias="mlp bias"),
    *_dense("mlp.down_proj", _HIDDEN, _WIDTH, "gated", bias="mlp bias"),
    *_dense("mlp.gate_up_proj", _WIDTH, "gate, up", "fused"),
    *_dense("mlp.down_proj", _HIDDEN, _WIDTH, "fused"),
    *_dense("mlp.c_fc", _WIDTH, _HIDDEN, "two kernels", bias="mlp bias"),
    *_dense("mlp.c_proj", _HIDDEN, _WIDTH, "two kernels", bias="mlp bias"),
    # The sharding presets know `router`. They can't tell what `gate` is.
    *_dense(f"{_MOE}.gate", _WIDTH, "num_local_experts", "mixtral", path=f"{_MOE}/router"),
    *_experts(f"{_MOE}.experts", "num_local_experts", _HIDDEN, ("w1", "w3", "w2"), "mixtral"),
    *_dense("mlp.gate", _WIDTH, "num_experts", "sparse", path="mlp/router"),
    *_experts("mlp.experts", "num_experts", "moe_intermediate_size", _GATED, "sparse"),
    *_dense("mlp.shared_expert.gate_proj", _WIDTH, _SHARED, "shared"),
    *_dense("mlp.shared_expert.up_proj", _WIDTH, _SHARED, "shared"),
    *_dense("mlp.shared_expert.down_proj", _SHARED, _WIDTH, "shared"),
    *_dense("mlp.shared_expert_gate", _WIDTH, 1, "shared"),
)


_EMBEDDING = ("vocab_size", _WIDTH)


def _decoder(tensor: str, path: str, head: str) -> tuple[Row, ...]:
    """Llama and its relatives: each has some of these parts."""
    return (
        Row(f"{tensor}embed_tokens.weight", f"{path}embed_tokens/embedding", _EMBEDDING),
        *_below(f"{tensor}layers.{{n}}.", f"{path}layers/{{n}}/", _DECODER_LAYER),
        *_below(tensor, path, _norm("norm", _WIDTH, bias="norm bias")),
        *_dense(head, _WIDTH, "vocab_size", "head", path="lm_head"),
    )


DECODER = _decoder("model.", "", "lm_head")
GEMMA3_TEXT = _decoder("language_model.model.", "language_model/", "language_model.lm_head")

_PROJECTION = ("vision width", "text width")
GEMMA3_PROJECTOR = _below(
    "multi_modal_projector.",
    "multi_modal_projector/",
    (
        Row("mm_input_projection_weight", "mm_input_projection/kernel", _PROJECTION),
        *_norm("mm_soft_emb_norm", "vision width"),
    ),
)


def _pooling(rows: Iterable[Row]) -> Iterable[Row]:
    return (row._replace(parts=("pooling", *row.parts)) for row in rows)


_TOWER_MLP = (
    *_dense("mlp.fc1", _WIDTH, _HIDDEN, bias=_ALWAYS),
    *_dense("mlp.fc2", _HIDDEN, _WIDTH, bias=_ALWAYS),
)
_TOWER_LAYER = (
    *_norm("layer_norm1", _WIDTH, bias=_ALWAYS),
    *_norm("layer_norm2", _WIDTH, bias=_ALWAYS),
    *(
        row
        for name in ("q_proj", "k_proj", "v_proj", "out_proj")
        for row in _dense(f"self_attn.{name}", _WIDTH, _WIDTH, bias=_ALWAYS)
    ),
    *_TOWER_MLP,
)
_TOWER_HEAD = (
    Row("probe", "probe", (1, 1, _WIDTH)),
    Row("attention.in_proj_weight", "attention/in_proj/kernel", (_WIDTH, _QKV), "reversed"),
    Row("attention.in_proj_bias", "attention/in_proj/bias", (_QKV,)),
    *_dense("attention.out_proj", _WIDTH, _WIDTH, bias=_ALWAYS),
    *_norm("layernorm", _WIDTH, bias=_ALWAYS),
    *_TOWER_MLP,
)
SIGLIP = _below(
    "vision_tower.vision_model.",
    "vision_tower/",
    (
        Row(
            "embeddings.patch_embedding.weight",
            "embeddings/patch_embedding/kernel",
            ("patch_size", "patch_size", "num_channels", _WIDTH),
            (2, 3, 1, 0),
        ),
        Row("embeddings.patch_embedding.bias", "embeddings/patch_embedding/bias", (_WIDTH,)),
        Row(
            "embeddings.position_embedding.weight",
            "embeddings/position_embedding/embedding",
            ("patches", _WIDTH),
        ),
        *_below("encoder.layers.{n}.", "encoder/layers/{n}/", _TOWER_LAYER),
        *_norm("post_layernorm", _WIDTH, bias=_ALWAYS),
        *_below("head.", "head/", _pooling(_TOWER_HEAD)),
    ),
)


def _gpt2_dense(name: str, inputs: str, outputs: str, *parts: str) -> tuple[Row, Row]:
    return _dense(name, inputs, outputs, *parts, bias=_ALWAYS, axes=None)


_GPT2_LAYER = (
    *_norm("ln_1", "n_embd", bias=_ALWAYS),
    *_gpt2_dense("attn.c_attn", "n_embd", _QKV),
    *_gpt2_dense("attn.c_proj", "n_embd", "n_embd"),
    *_norm("ln_2", "n_embd", bias=_ALWAYS),
    *_norm("ln_cross_attn", "n_embd", "cross-attention", bias=_ALWAYS),
    *_gpt2_dense("crossattention.q_attn", "n_embd", "n_embd", "cross-attention"),
    *_gpt2_dense("crossattention.c_attn", "n_embd", "keys, values", "cross-attention"),
    *_gpt2_dense("crossattention.c_proj", "n_embd", "n_embd", "cross-attention"),
    *_gpt2_dense("mlp.c_fc", "n_embd", "inner"),
    *_gpt2_dense("mlp.c_proj", "inner", "n_embd"),
)
GPT2 = (
    Row("transformer.wte.weight", "wte/embedding", ("vocab_size", "n_embd")),
    Row("transformer.wpe.weight", "wpe/embedding", ("n_positions", "n_embd")),
    *_below("transformer.h.{n}.", "h/{n}/", _GPT2_LAYER),
    *_below("transformer.", "", _norm("ln_f", "n_embd", bias=_ALWAYS)),
    *_dense("lm_head", "n_embd", "vocab_size", "head"),
)

_NEOX_LAYER = (
    *_norm("input_layernorm", _WIDTH, bias=_ALWAYS),
    *_norm("post_attention_layernorm", _WIDTH, bias=_ALWAYS),
    *_dense("attention.query_key_value", _WIDTH, _QKV, bias="attention"),
    *_dense("attention.dense", _WIDTH, _WIDTH, path="attention/out_proj", bias="attention"),
    *_dense("mlp.dense_h_to_4h", _WIDTH, _HIDDEN, bias=_ALWAYS),
    *_dense("mlp.dense_4h_to_h", _HIDDEN, _WIDTH, bias=_ALWAYS),
)
GPT_NEOX = (
    Row("gpt_neox.embed_in.weight", "embed_in/embedding", _EMBEDDING),
    *_below("gpt_neox.layers.{n}.", "layers/{n}/", _NEOX_LAYER),
    *_below("gpt_neox.", "", _norm("final_layer_norm", _WIDTH, bias=_ALWAYS)),
    *_dense("embed_out", _WIDTH, "vocab_size", "head", path="lm_head"),
)
