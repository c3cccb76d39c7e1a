"""Models whose attention has a kernel each for queries, keys and values, and the rules that a user
writes for the tensors of `transformers`, which has them fused: Phi-3, GPT-2 and GPT-NeoX.

The decoder of Phi-3 is that of `hf_decoder`. GPT-2 and GPT-NeoX have blocks of Flax's own modules.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hf_decoder import rotate

CONFIGS: dict[str, dict[str, Any]] = {
    "phi3": {
        "model_type": "phi3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 64,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "rotary_pct": 1.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def phi3_rules(config: dict[str, Any]) -> dict[str, Any]:
    attn, mlp, inner = "layers/{n}/self_attn", "layers/{n}/mlp", config["intermediate_size"]
    size = config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    qkv = {f"{attn}/q_proj/kernel": q, f"{attn}/k_proj/kernel": kv, f"{attn}/v_proj/kernel": kv}
    gate_up = {f"{mlp}/gate_proj/kernel": inner, f"{mlp}/up_proj/kernel": inner}
    return {
        "model.embed_tokens.weight": "embed_tokens/embedding",
        "model.layers.{n}.self_attn.qkv_proj.weight": {
            "transpose": True,
            "cut": {"axis": 1, "into": qkv},
        },
        "model.layers.{n}.mlp.gate_up_proj.weight": {
            "transpose": True,
            "cut": {"axis": 1, "into": gate_up},
        },
        "model.layers.{n}.self_attn.o_proj.weight": {
            "path": f"{attn}/o_proj/kernel",
            "transpose": True,
        },
        "model.layers.{n}.mlp.down_proj.weight": {
            "path": f"{mlp}/down_proj/kernel",
            "transpose": True,
        },
        "model.layers.{n}.{norm}.weight": "layers/{n}/{norm}/scale",
        "model.norm.weight": "norm/scale",
        "lm_head.weight": {"path": "lm_head/kernel", "transpose": True},
    }


def gpt2_rules(config: dict[str, Any]) -> dict[str, Any]:
    heads, attn = config["n_head"], "h/{n}/attn"
    parts = ("query", "key", "value")
    return {
        "transformer.wte.weight": "wte/embedding",
        "transformer.wpe.weight": "wpe/embedding",
        "transformer.h.{n}.attn.c_attn.weight": {  # (in, 3 * heads * size), not transposed
            "split": {1: [3, heads, -1]},
            "cut": {"axis": 1, "into": [f"{attn}/{part}/kernel" for part in parts]},
        },
        "transformer.h.{n}.attn.c_attn.bias": {
            "split": {0: [3, heads, -1]},
            "cut": {"axis": 0, "into": [f"{attn}/{part}/bias" for part in parts]},
        },
        "transformer.h.{n}.attn.c_proj.weight": {
            "path": f"{attn}/out/kernel",
            "split": {0: [heads, -1]},
        },
        "transformer.h.{n}.attn.c_proj.bias": f"{attn}/out/bias",
        "transformer.h.{n}.mlp.{layer}.weight": "h/{n}/mlp/{layer}/kernel",
        "transformer.h.{n}.mlp.{layer}.bias": "h/{n}/mlp/{layer}/bias",
        "transformer.h.{n}.{norm}.weight": "h/{n}/{norm}/scale",
        "transformer.h.{n}.{norm}.bias": "h/{n}/{norm}/bias",
        "transformer.ln_f.weight": "ln_f/scale",
        "transformer.ln_f.bias": "ln_f/bias",
    }


def gpt_neox_rules(config: dict[str, Any]) -> dict[str, Any]:
    heads, attn = config["num_attention_heads"], "layers/{n}/attn"
    parts = ("query", "key", "value")
    at = "gpt_neox.layers.{n}"
    return {
        "gpt_neox.embed_in.weight": "embed/embedding",
        f"{at}.attention.query_key_value.weight": {  # (heads * 3 * size, in)
            "transpose": True,
            "split": {1: [heads, 3, -1]},
            "cut": {"axis": 2, "into": [f"{attn}/{part}/kernel" for part in parts]},
        },
        f"{at}.attention.query_key_value.bias": {
            "split": {0: [heads, 3, -1]},
            "cut": {"axis": 1, "into": [f"{attn}/{part}/bias" for part in parts]},
        },
        f"{at}.attention.dense.weight": {
            "path": f"{attn}/out/kernel",
            "transpose": True,
            "split": {0: [heads, -1]},
        },
        f"{at}.attention.dense.bias": f"{attn}/out/bias",
        f"{at}.mlp.{{layer}}.weight": {"path": "layers/{n}/mlp/{layer}/kernel", "transpose": True},
        f"{at}.mlp.{{layer}}.bias": "layers/{n}/mlp/{layer}/bias",
        f"{at}.{{norm}}.weight": "layers/{n}/{norm}/scale",
        f"{at}.{{norm}}.bias": "layers/{n}/{norm}/bias",
        "gpt_neox.final_layer_norm.weight": "norm/scale",
        "gpt_neox.final_layer_norm.bias": "norm/bias",
        "embed_out.weight": {"path": "lm_head/kernel", "transpose": True},
    }


RULES = {"phi3": phi3_rules, "gpt2": gpt2_rules, "gpt_neox": gpt_neox_rules}


class FeedForward(nnx.Module):
    """Two layers, under the names that the tensors have."""

    def __init__(self, names: tuple[str, str], width: int, inner: int, rngs: nnx.Rngs):
        self.names = names
        setattr(self, names[0], nnx.Linear(width, inner, rngs=rngs))
        setattr(self, names[1], nnx.Linear(inner, width, rngs=rngs))

    def __call__(self, x: jax.Array, *, approximate: bool) -> jax.Array:
        first, second = (getattr(self, name) for name in self.names)
        return second(jax.nn.gelu(first(x), approximate=approximate))


class Gpt2Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.ln_1 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.mlp = FeedForward(("c_fc", "c_proj"), width, 4 * width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(self.ln_2(x), approximate=True)


class Gpt2(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs):
        width = config["n_embd"]
        self.wte = nnx.Embed(config["vocab_size"], width, rngs=rngs)
        self.wpe = nnx.Embed(config["n_positions"], width, rngs=rngs)
        blocks = [Gpt2Block(width, config["n_head"], rngs) for _ in range(config["n_layer"])]
        self.h = nnx.List(blocks)
        self.ln_f = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


def attend_rotated(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    query, key = rotate(query, 10000.0), rotate(key, 10000.0)
    return nnx.dot_product_attention(query, key, value, mask=options["mask"])


class NeoxBlock(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs):
        width, inner = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"]
        self.input_layernorm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            heads, width, decode=False, attention_fn=attend_rotated, rngs=rngs
        )
        self.post_attention_layernorm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.mlp = FeedForward(("dense_h_to_4h", "dense_4h_to_h"), width, inner, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = self.attn(self.input_layernorm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + mixed + self.mlp(self.post_attention_layernorm(x), approximate=False)


class Neox(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs):
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List(
            [NeoxBlock(config, rngs) for _ in range(config["num_hidden_layers"])]
        )
        self.norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.lm_head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
