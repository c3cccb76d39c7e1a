"""The parameters of GPT-2 and GPT-NeoX. No JAX."""

from __future__ import annotations

from collections.abc import Iterator

from ostraka.planner._config import Config
from ostraka.planner._layers import Parameter, dense, norm


def gpt2(config: Config) -> Iterator[Parameter]:
    width = config.number("n_embd")
    vocabulary = config.number("vocab_size")
    yield "wte/embedding", (vocabulary, width)
    yield "wpe/embedding", (config.number("n_positions"), width)
    for layer in range(config.number("n_layer")):
        yield from _gpt2_layer(config, f"h/{layer}", width)
    yield from norm("ln_f", width, bias=True)
    if not config.flag("tie_word_embeddings"):
        yield from dense("lm_head", width, vocabulary)


def _gpt2_layer(config: Config, at: str, width: int) -> Iterator[Parameter]:
    hidden = config.number("n_inner", 4 * width)
    yield from norm(f"{at}/ln_1", width, bias=True)
    yield from dense(f"{at}/attn/c_attn", width, 3 * width, bias=True)
    yield from dense(f"{at}/attn/c_proj", width, width, bias=True)
    yield from norm(f"{at}/ln_2", width, bias=True)
    if config.flag("add_cross_attention"):
        yield from norm(f"{at}/ln_cross_attn", width, bias=True)
        yield from dense(f"{at}/crossattention/q_attn", width, width, bias=True)
        yield from dense(f"{at}/crossattention/c_attn", width, 2 * width, bias=True)
        yield from dense(f"{at}/crossattention/c_proj", width, width, bias=True)
    yield from dense(f"{at}/mlp/c_fc", width, hidden, bias=True)
    yield from dense(f"{at}/mlp/c_proj", hidden, width, bias=True)


def gpt_neox(config: Config) -> Iterator[Parameter]:
    width = config.number("hidden_size")
    hidden = config.number("intermediate_size")
    bias = config.flag("attention_bias")
    vocabulary = config.number("vocab_size")
    yield "embed_in/embedding", (vocabulary, width)
    for layer in range(config.number("num_hidden_layers")):
        at = f"layers/{layer}"
        yield from norm(f"{at}/input_layernorm", width, bias=True)
        yield from norm(f"{at}/post_attention_layernorm", width, bias=True)
        yield from dense(f"{at}/attention/query_key_value", width, 3 * width, bias=bias)
        yield from dense(f"{at}/attention/out_proj", width, width, bias=bias)
        yield from dense(f"{at}/mlp/dense_h_to_4h", width, hidden, bias=True)
        yield from dense(f"{at}/mlp/dense_4h_to_h", hidden, width, bias=True)
    yield from norm("final_layer_norm", width, bias=True)
    if not config.flag("tie_word_embeddings"):
        yield from dense("lm_head", width, vocabulary)
