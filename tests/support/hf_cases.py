"""The configs whose shapes `transformers` is asked for: all built-in models, and odd ones.

`python tests/support/hf_cases.py` prints them; see record_hf_shapes.py.
"""

import json
from collections.abc import Mapping
from typing import Any

from ostraka.families.catalog import MODELS

# Numbers that can't be taken for each other.
SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 112,
}
WITHOUT_HIDDEN = {name: size for name, size in SMALL.items() if name != "intermediate_size"}
GPT2: dict[str, Any] = {
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 40,
    "vocab_size": 112,
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "moe_intermediate_size": 28}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
}
# The rest is left to the config classes. All their numbers of heads divide 192, and none is hidden
# by the width, as `head_dim` is not what would follow from them.
LEFT_OUT = {"hidden_size": 192, "num_hidden_layers": 1, "head_dim": 20}
DECODERS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "gemma3_text", "phi3", "starcoder2", "olmo2"),
)
# Defaults that are out of bounds for a small model, or make it a large one.
NEEDED = {"phi3": {"pad_token_id": 0}, "qwen2_moe": EXPERTS, "qwen3_moe": EXPERTS}
BIASES = {"attention_bias": True, "mlp_bias": True, "qkv_bias": True, "use_bias": True}
NO_BIASES = dict.fromkeys(BIASES, False)


def without_dtype(config: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes do not depend on it."""
    return {name: value for name, value in config.items() if name != "torch_dtype"}


def decoder_cases() -> dict[str, dict[str, Any]]:
    """For every family the same settings, be they obeyed or not."""
    settings: dict[str, dict[str, Any]] = {
        "defaults": {},
        "default heads": LEFT_OUT,
        "default key heads": LEFT_OUT | {"num_attention_heads": 96},
        "biases, head_dim, tied": SMALL | BIASES | {"head_dim": 20, "tie_word_embeddings": True},
        "no biases, untied": SMALL | NO_BIASES | {"tie_word_embeddings": False},
    }
    return {
        f"{kind}: {name}": {
            "model_type": kind,
            **fields,
            **(NEEDED.get(kind, {}) if fields else {}),
        }
        for kind in DECODERS
        for name, fields in settings.items()
    }


def made(kind: str, sizes: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {**sizes, "model_type": kind, **fields}


ODD: dict[str, dict[str, Any]] = {
    "llama: keys as queries": made("llama", SMALL, num_key_value_heads=None),
    "phi3: keys as queries": made("phi3", SMALL, num_key_value_heads=None, pad_token_id=0),
    "qwen2: keys as queries": made("qwen2", SMALL, num_key_value_heads=None),
    "qwen3: keys as queries": made("qwen3", SMALL, num_key_value_heads=None),
    "olmo2: keys as queries": made("olmo2", SMALL, num_key_value_heads=None),
    "mistral: null head_dim": made("mistral", SMALL, head_dim=None),
    "mistral: heads that do not divide": made("mistral", SMALL, hidden_size=50),
    "llama: scaled rotations": made(
        "llama",
        SMALL,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "phi3: long rotations": made(
        "phi3",
        SMALL,
        pad_token_id=0,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    ),
    "qwen2: sliding windows": made("qwen2", SMALL, use_sliding_window=True, max_window_layers=1),
    "mixtral: local experts": made("mixtral", SMALL, num_local_experts=3),
    "mixtral: experts by another name": made("mixtral", SMALL, num_experts=3),
    "qwen3_moe: local experts": made("qwen3_moe", SMALL, num_local_experts=3),
    "qwen2_moe: layers without experts": made(
        "qwen2_moe",
        SMALL,
        **EXPERTS,
        num_hidden_layers=6,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        shared_expert_intermediate_size=36,
    ),
    "qwen3_moe: layers without experts": made("qwen3_moe", SMALL, **EXPERTS, mlp_only_layers=[0]),
    "qwen3_moe: no experts": made("qwen3_moe", WITHOUT_HIDDEN, num_experts=0),
    "qwen2_moe: no experts": made("qwen2_moe", WITHOUT_HIDDEN, num_experts=0),
    "gemma3: defaults": {"model_type": "gemma3"},
    "gemma3: without a pooling head": {
        "model_type": "gemma3",
        "text_config": SMALL,
        "vision_config": {**VISION, "vision_use_head": False},
        "mm_tokens_per_image": 16,
    },
    "gemma3: untied": {
        "model_type": "gemma3",
        "text_config": {**SMALL, "head_dim": 20, "attention_bias": True},
        "vision_config": {**VISION, "num_channels": 1},
        "mm_tokens_per_image": 16,
        "tie_word_embeddings": False,
    },
    "gemma3: untied within": {
        "model_type": "gemma3",
        "text_config": {**SMALL, "tie_word_embeddings": False},
        "vision_config": VISION,
        "mm_tokens_per_image": 16,
    },
    "gpt2: defaults": {"model_type": "gpt2"},
    "gpt2: n_inner, untied": made("gpt2", GPT2, n_inner=100, tie_word_embeddings=False),
    "gpt2: other names": {
        "model_type": "gpt2",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "max_position_embeddings": 40,
    },
    "gpt2: attention across": made("gpt2", GPT2, n_inner=None, add_cross_attention=True),
    "gpt_neox: defaults": {"model_type": "gpt_neox"},
    "gpt_neox: small": made("gpt_neox", SMALL, rotary_pct=1.0),
    "gpt_neox: no biases, tied": made(
        "gpt_neox",
        SMALL,
        attention_bias=False,
        tie_word_embeddings=True,
        use_parallel_residual=False,
    ),
}

CASES: dict[str, dict[str, Any]] = {
    **{name: without_dtype(config) for name, config in MODELS.items()},
    **decoder_cases(),
    **ODD,
}

if __name__ == "__main__":
    print(json.dumps(CASES))
