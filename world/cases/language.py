"""google-tunix's language models and qwix's quantised and adapted ones, in tiny sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.llama3 import model as llama
from tunix.models.qwen3 import model as qwen

from world.case import Program, Registry, integers, numbers, shapes_of

CASES = Registry()
TOKENS = 6
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 16,
    "hidden_dim": 32,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
}


def language_model(build: Any, *, words: int = 32, wrt: Any = nnx.Param) -> Program:
    transform = optax.adamw(1e-2)

    def make() -> Any:
        # Their variables name axes of a mesh; here the harness says where arrays go.
        with nnx.use_eager_sharding(False):
            model = build()
            return {"model": model, "optimizer": nnx.Optimizer(model, transform, wrt=wrt)}

    def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.tile(jnp.arange(TOKENS), (tokens.shape[0], 1))
        mask = jnp.tile(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), (tokens.shape[0], 1, 1))
        logits, _ = model(tokens, positions, None, mask)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
        ).mean()

    @nnx.jit
    def update(state: Any, tokens: jax.Array) -> jax.Array:
        differentiate = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))
        loss, grads = differentiate(state["model"], tokens)
        state["optimizer"].update(state["model"], grads)
        return loss

    def step(state: Any, i: int) -> Any:
        with nnx.use_eager_sharding(False):
            return state, update(state, integers(i, 2, TOKENS, below=words))

    return Program(make, step)


def tiny_gemma() -> Any:
    config = gemma.ModelConfig(
        **SIZES,
        num_embed=32,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL),
        sliding_window_size=4,
    )
    return gemma.Gemma(config, rngs=nnx.Rngs(0))


def tiny_llama(*, tied: bool = False) -> Any:
    config = llama.ModelConfig(
        **SIZES, vocab_size=32, rope_theta=10_000, norm_eps=1e-5, weight_tying=tied
    )
    return llama.Llama3(config, rngs=nnx.Rngs(0))


def tiny_qwen(**more: Any) -> Any:
    config = qwen.ModelConfig(**SIZES, vocab_size=32, rope_theta=10_000, norm_eps=1e-6, **more)
    return qwen.Qwen3(config, rngs=nnx.Rngs(0))


@CASES.case("google-tunix", "Gemma 2, tiny", "enums in its configuration, named axes")
def gemma_case() -> Program:
    return language_model(tiny_gemma)


@CASES.case("google-tunix", "Llama 3.2, tiny", "tied embeddings, named axes")
def llama_case() -> Program:
    return language_model(lambda: tiny_llama(tied=True))


@CASES.case("google-tunix", "Qwen 3, tiny", "grouped queries, bfloat16 parameters")
def qwen_case() -> Program:
    return language_model(lambda: tiny_qwen(param_dtype=jnp.bfloat16))


@CASES.case("google-tunix", "Qwen 3 with experts, tiny", "kernels of experts")
def qwen_experts() -> Program:
    return language_model(lambda: tiny_qwen(num_experts=4, num_experts_per_tok=2))


def inputs() -> dict[str, jax.Array]:
    return {
        "input_tokens": jnp.zeros((2, TOKENS), jnp.int32),
        "positions": jnp.tile(jnp.arange(TOKENS), (2, 1)),
        "cache": None,
        "attention_mask": jnp.ones((2, TOKENS, TOKENS), bool),
    }


@CASES.case("qwix", "LoRA on tunix's Llama", "adapters trained on a frozen base")
def lora() -> Program:
    def build() -> Any:
        provider = qwix.LoraProvider(module_path=".*(q_proj|v_proj|gate_proj).*", rank=2, alpha=4.0)
        return qwix.apply_lora_to_model(tiny_llama(), provider, **inputs(), rngs=nnx.Rngs(1))

    return language_model(build, wrt=nnx.LoRAParam)


@CASES.case("qwix", "QLoRA: int8 base, LoRA on it", "QArray: int8 values with scales")
def qlora() -> Program:
    def build() -> Any:
        provider = qwix.LoraProvider(
            module_path=".*(q_proj|v_proj|gate_proj).*", rank=2, alpha=4.0, weight_qtype="int8"
        )
        return qwix.apply_lora_to_model(tiny_llama(), provider, **inputs(), rngs=nnx.Rngs(1))

    # Traced, qwix adapts fewer layers than it does otherwise.
    program = language_model(build, wrt=nnx.LoRAParam)
    return replace(program, abstract=lambda: shapes_of(program.make()))


@CASES.case("qwix", "quantisation-aware training of Linear layers", "fake quantisation, nnx")
def aware() -> Program:
    width = 8

    def make() -> Any:
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(nnx.Linear(width, 16, rngs=rngs), nnx.Linear(16, width, rngs=rngs))
        rules = [qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")]
        model = qwix.quantize_model(model, qwix.QtProvider(rules), jnp.zeros((4, width)))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)}

    @nnx.jit
    def update(state: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(state["model"])
        state["optimizer"].update(state["model"], grads)
        return loss

    return Program(make, lambda state, i: (state, update(state, numbers(i, 4, width))))
