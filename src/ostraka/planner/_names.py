"""Well-known models by name: the numbers of their published configs. No JAX.

Only models whose exact number of parameters is published are listed, and a test compares. GPT-3 is
the exception: its paper has 174,600 million.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostraka.errors import nearest


def config_of(name: str) -> Mapping[str, Any]:
    """The config of a model by its name. Raises ValueError, with the nearest name."""
    if name not in MODELS:
        raise ValueError(
            f"there is no built-in model {name!r}{nearest(name, list(MODELS))}; "
            f"those there are: {', '.join(MODELS)}"
        )
    return MODELS[name]


def _decoder(
    kind: str,
    layers: int,
    width: int,
    hidden: int,
    heads: int,
    grouped: int,
    vocabulary: int,
    **rest: Any,
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": grouped,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        **rest,
    }


def _gpt2(layers: int, width: int, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": width,
        "n_positions": 1024,
        "vocab_size": 50257,
        "torch_dtype": "float32",
        **rest,
    }


def _pythia(layers: int, width: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "vocab_size": vocabulary,
        "torch_dtype": "float16",
    }


_TIED = {"tie_word_embeddings": True}

MODELS: dict[str, Mapping[str, Any]] = {
    "llama-2-7b": _decoder("llama", 32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": _decoder("llama", 40, 5120, 13824, 40, 40, 32000),
    "llama-2-70b": _decoder("llama", 80, 8192, 28672, 64, 8, 32000),
    "llama-3.1-8b": _decoder("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": _decoder("llama", 80, 8192, 28672, 64, 8, 128256),
    "llama-3.1-405b": _decoder("llama", 126, 16384, 53248, 128, 8, 128256),
    "llama-3.2-1b": _decoder("llama", 16, 2048, 8192, 32, 8, 128256, head_dim=64, **_TIED),
    "llama-3.2-3b": _decoder("llama", 28, 3072, 8192, 24, 8, 128256, head_dim=128, **_TIED),
    "mistral-7b": _decoder("mistral", 32, 4096, 14336, 32, 8, 32000),
    "mixtral-8x7b": _decoder("mixtral", 32, 4096, 14336, 32, 8, 32000, num_local_experts=8),
    "qwen2.5-0.5b": _decoder("qwen2", 24, 896, 4864, 14, 2, 151936, **_TIED),
    "qwen2.5-1.5b": _decoder("qwen2", 28, 1536, 8960, 12, 2, 151936, **_TIED),
    "qwen2.5-3b": _decoder("qwen2", 36, 2048, 11008, 16, 2, 151936, **_TIED),
    "qwen2.5-7b": _decoder("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _decoder("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": _decoder("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": _decoder("qwen2", 80, 8192, 29568, 64, 8, 152064),
    "qwen3-8b": _decoder("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "gemma-2b": _decoder("gemma", 18, 2048, 16384, 8, 1, 256000, head_dim=256),
    "gemma-7b": _decoder("gemma", 28, 3072, 24576, 16, 16, 256000, head_dim=256),
    "gemma-2-2b": _decoder("gemma2", 26, 2304, 9216, 8, 4, 256000, head_dim=256),
    "gemma-2-9b": _decoder("gemma2", 42, 3584, 14336, 16, 8, 256000, head_dim=256),
    "gemma-2-27b": _decoder("gemma2", 46, 4608, 36864, 32, 16, 256000, head_dim=128),
    "gpt2": _gpt2(12, 768),
    "gpt2-medium": _gpt2(24, 1024),
    "gpt2-large": _gpt2(36, 1280),
    "gpt2-xl": _gpt2(48, 1600),
    "gpt-3-175b": _gpt2(96, 12288, n_positions=2048),
    "pythia-70m": _pythia(6, 512, 50304),
    "pythia-160m": _pythia(12, 768, 50304),
    "pythia-410m": _pythia(24, 1024, 50304),
    "pythia-1b": _pythia(16, 2048, 50304),
    "pythia-1.4b": _pythia(24, 2048, 50304),
    "pythia-2.8b": _pythia(32, 2560, 50304),
    "pythia-6.9b": _pythia(32, 4096, 50432),
    "pythia-12b": _pythia(36, 5120, 50688),
}
