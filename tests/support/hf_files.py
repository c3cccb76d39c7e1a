"""A model in several files, as the safetensors package writes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from orbax_cases import numbers


def save_for_hugging_face(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A model of several files with an index, as the safetensors package writes them."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (128, 64),
    }
    for layer in range(2):
        above = f"model.layers.{layer}"
        shapes |= {
            f"{above}.self_attn.q_proj.weight": (128, 64),
            f"{above}.self_attn.k_proj.weight": (64, 64),
            f"{above}.self_attn.v_proj.weight": (64, 64),
            f"{above}.self_attn.o_proj.weight": (64, 128),
            f"{above}.mlp.gate_proj.weight": (96, 64),
            f"{above}.mlp.up_proj.weight": (96, 64),
            f"{above}.mlp.down_proj.weight": (64, 96),
            f"{above}.input_layernorm.weight": (64,),
            f"{above}.post_attention_layernorm.weight": (64,),
        }
    found = {name: numbers(shape, np.float16, n) for n, (name, shape) in enumerate(shapes.items())}
    names = list(found)
    path.mkdir()
    weights: dict[str, str] = {}
    for number in (1, 2, 3):
        file = f"model-{number:05d}-of-00003.safetensors"
        part = {name: found[name] for name in names[number - 1 :: 3]}
        save_file(part, path / file, {"format": "pt"})
        weights |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in found.values())}}
    (path / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": weights}))
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return found
