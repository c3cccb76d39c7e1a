"""Well-known models by name: the numbers of their published configs. No JAX.

Only models whose exact number of parameters can be found in public are listed, and a test compares.
GPT-3 is the exception: its paper has 174,600 million.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostraka.families.families import decoder_sizes


def _decoder(kind: str, *sizes: int, **rest: Any) -> dict[str, Any]:
    """The config of a decoder of these sizes, in the order of `decoder_sizes`."""
    return {"model_type": kind, **decoder_sizes(*sizes), "torch_dtype": "bfloat16", **rest}


def _qwen3_moe(layers: int, width: int, hidden: int, heads: int, **rest: Any) -> dict[str, Any]:
    experts = {"num_experts": 128, "head_dim": 128}
    return _decoder("qwen3_moe", layers, width, hidden, heads, 4, 151936, **experts, **rest)


def _gemma3(text: Mapping[str, Any]) -> dict[str, Any]:
    """From 4B on they are multimodal, all with the same vision tower."""
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {
            "num_hidden_layers": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "torch_dtype": "bfloat16",
    }


def _gpt2(layers: int, width: int, heads: int, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
        "torch_dtype": "float32",
        **rest,
    }


def _neox(layers: int, width: int, heads: int, vocabulary: int) -> dict[str, Any]:
    sizes = decoder_sizes(layers, width, 4 * width, heads, None, vocabulary)
    del sizes["num_key_value_heads"]  # Each head has keys and values of its own.
    return {"model_type": "gpt_neox", **sizes, "torch_dtype": "float16"}


_TIED = {"tie_word_embeddings": True}
_QWEN2_MOE = {
    "num_experts": 60,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}

MODELS: dict[str, Mapping[str, Any]] = {
    "llama-2-7b": _decoder("llama", 32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _decoder("llama", 40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _decoder("llama", 80, 8192, 28672, 64, 8, 32000),
    "llama-3.1-8b": _decoder("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": _decoder("llama", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": _decoder("llama", 126, 16384, 53248, 128, 8, 128256),
    "llama-3.2-1b": _decoder("llama", 16, 2048, 8192, 32, 8, 128256, head_dim=64, **_TIED),
    "llama-3.2-3b": _decoder("llama", 28, 3072, 8192, 24, 8, 128256, head_dim=128, **_TIED),
    "llama-3.3-70b": _decoder("llama", 80, 8192, 28672, 64, 8, 128256),
    "tinyllama-1.1b": _decoder("llama", 22, 2048, 5632, 32, 4, 32000),
    "smollm2-135m": _decoder("llama", 30, 576, 1536, 9, 3, 49152, **_TIED),
    "smollm2-1.7b": _decoder("llama", 24, 2048, 8192, 32, 32, 49152, **_TIED),
    "mistral-7b": _decoder("mistral", 32, 4096, 14336, 32, 8, 32000),
    "mistral-nemo-12b": _decoder("mistral", 40, 5120, 14336, 32, 8, 131072, head_dim=128),
    "mistral-small-24b": _decoder("mistral", 40, 5120, 32768, 32, 8, 131072, head_dim=128),
    "mixtral-8x7b": _decoder("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8),
    "mixtral-8x22b": _decoder("mixtral", 56, 6144, 16384, 48, 8, 32000, num_local_experts=8),
    "qwen1.5-moe-a2.7b": _decoder("qwen2_moe", 24, 2048, 5632, 16, 16, 151936, **_QWEN2_MOE),
    "qwen2.5-0.5b": _decoder("qwen2", 24, 896, 4864, 14, 2, 151936, **_TIED),
    "qwen2.5-1.5b": _decoder("qwen2", 28, 1536, 8960, 12, 2, 151936, **_TIED),
    "qwen2.5-3b": _decoder("qwen2", 36, 2048, 11008, 16, 2, 151936, **_TIED),
    "qwen2.5-7b": _decoder("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _decoder("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": _decoder("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": _decoder("qwen2", 80, 8192, 29568, 64, 8, 152064),
    "qwen3-0.6b": _decoder("qwen3", 28, 1024, 3072, 16, 8, 151936, head_dim=128, **_TIED),
    "qwen3-1.7b": _decoder("qwen3", 28, 2048, 6144, 16, 8, 151936, head_dim=128, **_TIED),
    "qwen3-4b": _decoder("qwen3", 36, 2560, 9728, 32, 8, 151936, head_dim=128, **_TIED),
    "qwen3-8b": _decoder("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "qwen3-14b": _decoder("qwen3", 40, 5120, 17408, 40, 8, 151936, head_dim=128),
    "qwen3-32b": _decoder("qwen3", 64, 5120, 25600, 64, 8, 151936, head_dim=128),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 6144, 32, moe_intermediate_size=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 12288, 64, moe_intermediate_size=1536),
    "gemma-2b": _decoder("gemma", 18, 2048, 16384, 8, 1, 256000, head_dim=256),
    "gemma-7b": _decoder("gemma", 28, 3072, 24576, 16, 16, 256000, head_dim=256),
    "gemma-2-2b": _decoder("gemma2", 26, 2304, 9216, 8, 4, 256000, head_dim=256),
    "gemma-2-9b": _decoder("gemma2", 42, 3584, 14336, 16, 8, 256000, head_dim=256),
    "gemma-2-27b": _decoder("gemma2", 46, 4608, 36864, 32, 16, 256000, head_dim=128),
    "gemma-3-270m": _decoder("gemma3_text", 18, 640, 2048, 4, 1, 262144, head_dim=256),
    "gemma-3-1b": _decoder("gemma3_text", 26, 1152, 6912, 4, 1, 262144, head_dim=256),
    "gemma-3-4b": _gemma3(_decoder("gemma3_text", 34, 2560, 10240, 8, 4, 262208, head_dim=256)),
    "gemma-3-12b": _gemma3(_decoder("gemma3_text", 48, 3840, 15360, 16, 8, 262208, head_dim=256)),
    "gemma-3-27b": _gemma3(_decoder("gemma3_text", 62, 5376, 21504, 32, 16, 262208, head_dim=128)),
    "phi-3-mini": _decoder("phi3", 32, 3072, 8192, 32, 32, 32064),
    "phi-3-medium": _decoder("phi3", 40, 5120, 17920, 40, 10, 32064),
    "phi-4": _decoder("phi3", 40, 5120, 17920, 40, 10, 100352),
    "phi-4-mini": _decoder("phi3", 32, 3072, 8192, 24, 8, 200064, **_TIED),
    "olmo-2-1b": _decoder("olmo2", 16, 2048, 8192, 16, 16, 100352),
    "olmo-2-7b": _decoder("olmo2", 32, 4096, 11008, 32, 32, 100352),
    "olmo-2-13b": _decoder("olmo2", 40, 5120, 13824, 40, 40, 100352),
    "olmo-2-32b": _decoder("olmo2", 64, 5120, 27648, 40, 8, 100352),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt-3-175b": _gpt2(96, 12288, 96, n_positions=2048),
    "gpt-neox-20b": _neox(44, 6144, 64, 50432),
    "pythia-70m": _neox(6, 512, 8, 50304),
    "pythia-160m": _neox(12, 768, 12, 50304),
    "pythia-410m": _neox(24, 1024, 16, 50304),
    "pythia-1b": _neox(16, 2048, 8, 50304),
    "pythia-1.4b": _neox(24, 2048, 16, 50304),
    "pythia-2.8b": _neox(32, 2560, 32, 50304),
    "pythia-6.9b": _neox(32, 4096, 32, 50432),
    "pythia-12b": _neox(36, 5120, 40, 50688),
}
