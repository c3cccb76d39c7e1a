"""Keras on JAX and Penzai: frameworks whose models are not trees of plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from penzai import pz
from penzai.models import simple_mlp
from penzai.models.transformer.variants import llamalike_common

from world.case import Program, Registry, integers, numbers

CASES = Registry()
WIDTH = 8


@CASES.case("keras", "a functional model, trained by stateless_apply", "lists of variables' values")
def keras_model() -> Program:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(16, activation="relu")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(WIDTH)(keras.layers.Dropout(0.1)(hidden)))
    optimizer = keras.optimizers.AdamW(1e-2)
    optimizer.build(model.trainable_variables)
    first = {
        "trainable": [np.asarray(v.value) for v in model.trainable_variables],
        "rest": [np.asarray(v.value) for v in model.non_trainable_variables],
        "optimizer": [np.asarray(v.value) for v in optimizer.variables],
    }

    def make() -> Any:
        return jax.tree.map(jnp.asarray, first)

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        def loss_of(trainable: Any) -> Any:
            y, rest = model.stateless_call(trainable, state["rest"], x, training=True)
            return jnp.mean((y - x) ** 2), rest

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(state["trainable"])
        trainable, own = optimizer.stateless_apply(state["optimizer"], grads, state["trainable"])
        return {"trainable": trainable, "rest": rest, "optimizer": own}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, WIDTH)))


@CASES.case("keras", "LSTM and attention by name, Lion", "a dict of paths with slashes in them")
def keras_named() -> Program:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, WIDTH), name="x")
    y = keras.layers.LSTM(WIDTH, return_sequences=True)(inputs)
    y = keras.layers.MultiHeadAttention(2, 4)(y, y)
    model = keras.Model(inputs, keras.layers.LayerNormalization()(y))
    variables = {v.path: v for v in model.trainable_variables}
    first = {path: np.asarray(v.value) for path, v in variables.items()}
    rest = [np.asarray(v.value) for v in model.non_trainable_variables]
    transform = optax.lion(1e-2)

    def make() -> Any:
        params = jax.tree.map(jnp.asarray, first)
        return {"params": params, "opt": transform.init(params)}

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            y, _ = model.stateless_call(list(params.values()), rest, x)
            return jnp.mean((y - x) ** 2)

        # A jitted dict comes with its keys in order; the model wants its own.
        ordered = {path: state["params"][path] for path in variables}
        loss, grads = jax.value_and_grad(lambda p: loss_of({k: p[k] for k in variables}))(ordered)
        updates, opt = transform.update(grads, state["opt"], ordered)
        return {"params": optax.apply_updates(ordered, updates), "opt": opt}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 2, 5, WIDTH)))


def penzai_program(
    build: Callable[[], Any], loss_of: Callable[[Any, Any], Any], batch: Any
) -> Program:
    """Trains the frozen values of a model's parameters, which are NamedArrays with labels."""
    transform = optax.adam(1e-2)
    unbound, _ = pz.unbind_params(build())

    def make() -> Any:
        _, values = pz.unbind_params(build(), freeze=True)
        return {"params": values, "opt": transform.init(values)}

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        def loss_with(values: Any) -> jax.Array:
            return loss_of(pz.bind_variables(unbound, values), x)

        loss, grads = jax.value_and_grad(loss_with)(state["params"])
        updates, opt = transform.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return Program(make, lambda state, i: update(state, batch(i)))


@CASES.case(
    "penzai", "an MLP, its parameters unbound", "NamedArrays in labelled values", as_dicts=True
)
def penzai_mlp() -> Program:
    def loss_of(model: Any, x: jax.Array) -> jax.Array:
        y = model(pz.nx.wrap(x).tag("batch", "features"))
        return jnp.mean((y.unwrap("batch", "features") - x) ** 2)

    def build() -> Any:
        return simple_mlp.MLP.from_config(jax.random.key(0), [WIDTH, 16, WIDTH])

    return penzai_program(build, loss_of, lambda i: numbers(i, 4, WIDTH))


@CASES.case(
    "penzai", "a Llama-like transformer, tiny", "tied embeddings, positions by name", as_dicts=True
)
def penzai_transformer() -> Program:
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=1,
        query_head_multiplier=2,
        embedding_dim=16,
        projection_dim=8,
        mlp_hidden_dim=32,
        num_decoder_blocks=2,
        vocab_size=32,
        mlp_variant="swiglu",
        rope_wavelength=10_000,
        tie_embedder_and_logits=True,
        attention_type=llamalike_common.AttentionTypeGlobalCausal(),
        rms_norm_eps=1e-6,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
    )

    def build() -> Any:
        return llamalike_common.build_llamalike_transformer(config, jax.random.key(0))

    def loss_of(model: Any, tokens: jax.Array) -> jax.Array:
        named = pz.nx.wrap(tokens).tag("batch", "seq")
        logits = model(named, token_positions=pz.nx.arange("seq", 6))
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.unwrap("batch", "seq", "vocabulary"), tokens
        ).mean()

    return penzai_program(build, loss_of, lambda i: integers(i, 2, 6, below=32))
