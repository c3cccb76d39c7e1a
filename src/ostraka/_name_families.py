"""The rules of model families: Hugging Face's tensors to NNX paths as the planner has them. Pure.

Kernels are (in, out) in Flax and (out, in) in PyTorch, so they are transposed, but for GPT-2, whose
layers are (in, out) there, too. The experts of a layer are tensors of their own in files, and one
leaf here. What files hold besides parameters (tables for rotations, masks) is left out.

Rules have the names that are published; `prefixes` has those of other versions of `transformers`,
and of models that were saved without their head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ostraka._form import AS_IT_IS, TRANSPOSED, Form
from ostraka._name_rules import Rule
from ostraka._names import Names

HEAD = "lm_head/kernel"
_IMAGE_KERNEL = Form((2, 3, 1, 0))
"""From (out, in, height, width) to (height, width, in, out)."""


@dataclass(frozen=True, slots=True)
class Family:
    """The rules of some model types."""

    rules: tuple[Rule, ...]
    embedding: str
    """The tensor that a tied head is made of."""
    prefixes: tuple[tuple[str, str], ...] = ()


def _dense(tensor: str, path: str, form: Form = TRANSPOSED) -> tuple[Rule, Rule]:
    return Rule(f"{tensor}.weight", f"{path}/kernel", form), Rule(f"{tensor}.bias", f"{path}/bias")


def _norm(tensor: str, path: str) -> tuple[Rule, Rule]:
    return Rule(f"{tensor}.weight", f"{path}/scale"), Rule(f"{tensor}.bias", f"{path}/bias")


def _experts(tensor: str, path: str, *names: str) -> tuple[Rule, ...]:
    """A tensor for each expert, and one leaf for all."""
    return tuple(
        Rule(f"{tensor}.{{e}}.{name}.weight", f"{path}/{name}/kernel", TRANSPOSED, ("e",))
        for name in names
    )


def _layer(tensor: str, path: str) -> tuple[Rule, ...]:
    """A layer of Llama or one of its relatives; each has some of these."""
    norms = (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        *("self_attn.q_norm", "self_attn.k_norm"),
    )
    kernels = (
        *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o", "qkv")),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down", "gate_up")),
        *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
        *("mlp.c_fc", "mlp.c_proj", "mlp.shared_expert_gate"),
    )
    sparse, moe = f"{tensor}.block_sparse_moe", f"{path}/block_sparse_moe"
    gated = ("gate_proj", "up_proj", "down_proj")
    return (
        *(rule for n in norms for rule in _norm(f"{tensor}.{n}", f"{path}/{_slashed(n)}")),
        *(rule for n in kernels for rule in _dense(f"{tensor}.{n}", f"{path}/{_slashed(n)}")),
        # `gate` alone says too little to the sharding presets.
        *_dense(f"{sparse}.gate", f"{moe}/router"),
        *_experts(f"{sparse}.experts", f"{moe}/experts", "w1", "w2", "w3"),
        *_dense(f"{tensor}.mlp.gate", f"{path}/mlp/router"),
        *_experts(f"{tensor}.mlp.experts", f"{path}/mlp/experts", *gated),
        Rule(f"{tensor}.self_attn.rotary_emb.inv_freq", None),
    )


def _slashed(name: str) -> str:
    return name.replace(".", "/")


def _decoder(tensor: str, path: str, head: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{tensor}embed_tokens.weight", f"{path}embed_tokens/embedding"),
        *_layer(f"{tensor}layers.{{n}}", f"{path}layers/{{n}}"),
        *_norm(f"{tensor}norm", f"{path}norm"),
        *_dense(head, "lm_head"),
        Rule(f"{tensor}rotary_emb.inv_freq", None),
    )


def _tower(tensor: str, path: str) -> tuple[Rule, ...]:
    """SigLIP, which sees for Gemma 3."""
    layer, at = f"{tensor}.encoder.layers.{{n}}", f"{path}/encoder/layers/{{n}}"
    head, head_at = f"{tensor}.head", f"{path}/head"
    dense = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    return (
        *_dense(
            f"{tensor}.embeddings.patch_embedding",
            f"{path}/embeddings/patch_embedding",
            _IMAGE_KERNEL,
        ),
        Rule(
            f"{tensor}.embeddings.position_embedding.weight",
            f"{path}/embeddings/position_embedding/embedding",
        ),
        Rule(f"{tensor}.embeddings.position_ids", None),
        *(
            rule
            for name in (*dense, "mlp.fc1", "mlp.fc2")
            for rule in _dense(f"{layer}.{name}", f"{at}/{_slashed(name)}")
        ),
        *_norm(f"{layer}.layer_norm1", f"{at}/layer_norm1"),
        *_norm(f"{layer}.layer_norm2", f"{at}/layer_norm2"),
        *_norm(f"{tensor}.post_layernorm", f"{path}/post_layernorm"),
        Rule(f"{head}.probe", f"{head_at}/probe"),
        Rule(f"{head}.attention.in_proj_weight", f"{head_at}/attention/in_proj/kernel", TRANSPOSED),
        Rule(f"{head}.attention.in_proj_bias", f"{head_at}/attention/in_proj/bias"),
        *_dense(f"{head}.attention.out_proj", f"{head_at}/attention/out_proj"),
        *_norm(f"{head}.layernorm", f"{head_at}/layernorm"),
        *_dense(f"{head}.mlp.fc1", f"{head_at}/mlp/fc1"),
        *_dense(f"{head}.mlp.fc2", f"{head_at}/mlp/fc2"),
    )


def _gpt2() -> tuple[Rule, ...]:
    layer, at = "transformer.h.{n}", "h/{n}"
    dense = (
        *("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        *("crossattention.q_attn", "crossattention.c_attn", "crossattention.c_proj"),
    )
    norms = ("ln_1", "ln_2", "ln_cross_attn")
    return (
        Rule("transformer.wte.weight", "wte/embedding"),
        Rule("transformer.wpe.weight", "wpe/embedding"),
        *(
            rule
            for name in dense
            for rule in _dense(f"{layer}.{name}", f"{at}/{_slashed(name)}", AS_IT_IS)
        ),
        *(rule for name in norms for rule in _norm(f"{layer}.{name}", f"{at}/{name}")),
        *_norm("transformer.ln_f", "ln_f"),
        *_dense("lm_head", "lm_head"),
        *(
            Rule(f"{layer}.{name}.{mask}", None)
            for name in ("attn", "crossattention")
            for mask in ("bias", "masked_bias")
        ),
    )


def _gpt_neox() -> tuple[Rule, ...]:
    layer, at = "gpt_neox.layers.{n}", "layers/{n}"
    return (
        Rule("gpt_neox.embed_in.weight", "embed_in/embedding"),
        *_norm(f"{layer}.input_layernorm", f"{at}/input_layernorm"),
        *_norm(f"{layer}.post_attention_layernorm", f"{at}/post_attention_layernorm"),
        *_dense(f"{layer}.attention.query_key_value", f"{at}/attention/query_key_value"),
        *_dense(f"{layer}.attention.dense", f"{at}/attention/out_proj"),
        *_dense(f"{layer}.mlp.dense_h_to_4h", f"{at}/mlp/dense_h_to_4h"),
        *_dense(f"{layer}.mlp.dense_4h_to_h", f"{at}/mlp/dense_4h_to_h"),
        *_norm("gpt_neox.final_layer_norm", "final_layer_norm"),
        *_dense("embed_out", "lm_head"),
        *(
            Rule(f"{layer}.attention.{name}", None)
            for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
        ),
        Rule("gpt_neox.rotary_emb.inv_freq", None),
    )


_LLAMA = Family(
    _decoder("model.", "", "lm_head"),
    "model.embed_tokens.weight",
    (("model.language_model.", "model."), ("language_model.", ""), ("", "model.")),
)
_GEMMA3 = Family(
    (
        *_decoder("language_model.model.", "language_model/", "language_model.lm_head"),
        *_tower("vision_tower.vision_model", "vision_tower"),
        Rule(
            "multi_modal_projector.mm_input_projection_weight",
            "multi_modal_projector/mm_input_projection/kernel",
        ),
        *_norm("multi_modal_projector.mm_soft_emb_norm", "multi_modal_projector/mm_soft_emb_norm"),
    ),
    "language_model.model.embed_tokens.weight",
    (
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.vision_model.", "vision_tower.vision_model."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("vision_tower.", "vision_tower.vision_model."),
        ("lm_head.", "language_model.lm_head."),
        ("model.", ""),
    ),
)
_GPT2 = Family(_gpt2(), "transformer.wte.weight", (("", "transformer."),))
_GPT_NEOX = Family(
    _gpt_neox(), "gpt_neox.embed_in.weight", (("lm_head.", "embed_out."), ("", "gpt_neox."))
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3"), _LLAMA),
    **dict.fromkeys(("qwen3_moe", "gemma", "gemma2"), _LLAMA),
    "gemma3": _GEMMA3,
    **dict.fromkeys(("gemma3_text", "phi3", "starcoder2", "olmo2"), _LLAMA),
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
}
"""By `model_type`."""

_TIED = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "starcoder2", "gpt2"})
"""Model types whose head is their embedding, unless a config says otherwise."""


def family_names(kind: str, config: Mapping[str, Any] | None, given: str) -> Names:
    """The names of a family, and of the model that a config describes, if it is known.

    The head of a tied model is made of its embedding, where a tree has one.
    """
    family = FAMILIES[kind]
    tied = (config or {}).get("tie_word_embeddings", kind in _TIED) is True
    return Names(
        given,
        family.rules,
        required=0,
        prefixes=family.prefixes,
        stand_ins=(Rule(family.embedding, HEAD, TRANSPOSED),) if tied else (),
        optional=frozenset({HEAD}) if tied else frozenset(),
    )
