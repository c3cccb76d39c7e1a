"""One decoder in NNX for Llama, Qwen3 and Gemma, with the names that the planner has.

Enough of them to compare logits with `transformers`: no cache, no dropout, no sliding windows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Norm(nnx.Module):
    """An RMS norm; Gemma has what is added to one."""

    def __init__(self, width: int, config: dict[str, Any]):
        self.scale = nnx.Param(jnp.ones(width))
        self.epsilon = config["rms_norm_eps"]
        self.is_gemma = config["model_type"].startswith("gemma")

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.epsilon)
        return x * (1 + self.scale[...]) if self.is_gemma else x * self.scale[...]


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """(batch, length, heads, size), each pair of a head turned by its position."""
    size = x.shape[-1]
    angles = jnp.arange(x.shape[1])[:, None] / theta ** (jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs):
        width = config["hidden_size"]
        self.heads, self.grouped = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config["head_dim"]
        self.theta = config["rope_theta"]
        bias = config.get("attention_bias", False)
        inner = self.heads * self.size
        self.q_proj = nnx.Linear(width, inner, use_bias=bias, rngs=rngs)
        self.k_proj = nnx.Linear(width, self.grouped * self.size, use_bias=bias, rngs=rngs)
        self.v_proj = nnx.Linear(width, self.grouped * self.size, use_bias=bias, rngs=rngs)
        self.o_proj = nnx.Linear(inner, width, use_bias=bias, rngs=rngs)
        if config["model_type"] == "qwen3":
            self.q_norm, self.k_norm = Norm(self.size, config), Norm(self.size, config)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, self.heads, self.size)
        k = self.k_proj(x).reshape(batch, length, self.grouped, self.size)
        v = self.v_proj(x).reshape(batch, length, self.grouped, self.size)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        k, v = (jnp.repeat(y, self.heads // self.grouped, axis=2) for y in (k, v))
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / self.size**0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores, -1), v)
        return self.o_proj(mixed.reshape(batch, length, -1))


class FeedForward(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs):
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(width, hidden, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(hidden, width, use_bias=False, rngs=rngs)
        self.is_gemma = config["model_type"].startswith("gemma")

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = self.gate_proj(x)
        gate = jax.nn.gelu(gate, approximate=True) if self.is_gemma else jax.nn.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs):
        self.input_layernorm = Norm(config["hidden_size"], config)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = Norm(config["hidden_size"], config)
        self.mlp = FeedForward(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """From tokens to logits."""

    def __init__(self, config: dict[str, Any], *, has_head: bool, rngs: nnx.Rngs):
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embed_tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config["num_hidden_layers"])])
        self.norm = Norm(width, config)
        if has_head:
            self.lm_head = nnx.Linear(width, vocabulary, use_bias=False, rngs=rngs)
        self.width = width
        self.is_gemma = config["model_type"].startswith("gemma")

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens(tokens)
        if self.is_gemma:
            x = x * self.width**0.5
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.lm_head(x) if hasattr(self, "lm_head") else self.embed_tokens.attend(x)


def make_decoder(config: dict[str, Any], *, has_head: bool) -> Decoder:
    return Decoder(config, has_head=has_head, rngs=nnx.Rngs(0))
