"""Flax's own NNX modules, its optimizers, transforms and bridges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.nnx import bridge

from world.case import Program, Registry, numbers

CASES = Registry()
WIDTH = 8


def trained(
    make_model: Callable[[], nnx.Module],
    transform: optax.GradientTransformation | None = None,
    *,
    shape: tuple[int, ...] = (4, WIDTH),
    wrt: Any = nnx.Param,
) -> Program:
    """A model that learns to give back its input, with its optimizer."""
    transform = transform or optax.adam(1e-2)

    def make() -> Any:
        model = make_model()
        return {"model": model, "optimizer": nnx.Optimizer(model, transform, wrt=wrt)}

    def loss_of(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((model(x) - x) ** 2)

    @nnx.jit
    def update(state: Any, x: jax.Array) -> jax.Array:
        selected = nnx.DiffState(0, wrt)
        loss, grads = nnx.value_and_grad(loss_of, argnums=selected)(state["model"], x)
        state["optimizer"].update(state["model"], grads)
        return loss

    def step(state: Any, i: int) -> tuple[Any, Any]:
        loss = update(state, numbers(i, *shape))
        return state, loss

    return Program(make, step)


@CASES.case("flax", "nnx.Sequential of Linear, Dropout, LayerNorm", "RNG streams that move on")
def sequential() -> Program:
    def model() -> nnx.Module:
        rngs = nnx.Rngs(0, dropout=1)
        return nnx.Sequential(
            nnx.Linear(WIDTH, 16, rngs=rngs),
            nnx.gelu,
            nnx.Dropout(0.2, rngs=rngs),
            nnx.LayerNorm(16, rngs=rngs),
            nnx.Linear(16, WIDTH, rngs=rngs),
        )

    return trained(model)


@CASES.case("flax", "nnx.BatchNorm, GroupNorm, RMSNorm", "running statistics")
def norms() -> Program:
    def model() -> nnx.Module:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.Linear(WIDTH, WIDTH, rngs=rngs),
            nnx.BatchNorm(WIDTH, rngs=rngs),
            nnx.GroupNorm(WIDTH, 2, rngs=rngs),
            nnx.RMSNorm(WIDTH, rngs=rngs),
        )

    return trained(model)


@CASES.case("flax", "nnx.WeightNorm", "tuples as keys of a state")
def weight_norm() -> Program:
    return trained(
        lambda: nnx.WeightNorm(nnx.Linear(WIDTH, WIDTH, rngs=(r := nnx.Rngs(0))), rngs=r)
    )


@CASES.case("flax", "nnx.SpectralNorm", "tuples as keys of a state, batch statistics")
def spectral_norm() -> Program:
    def model() -> nnx.Module:
        rngs = nnx.Rngs(0)
        return nnx.SpectralNorm(nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs)

    return trained(model)


@CASES.case("flax", "nnx.MultiHeadAttention", "kernels of three dimensions, dropout inside")
def attention() -> Program:
    def model() -> nnx.Module:
        return nnx.MultiHeadAttention(
            num_heads=2,
            in_features=WIDTH,
            decode=False,
            dropout_rate=0.1,
            deterministic=False,
            rngs=nnx.Rngs(0, dropout=1),
        )

    return trained(model, shape=(2, 5, WIDTH))


@CASES.case("flax", "nnx.MultiHeadAttention decoding", "nnx.Cache variables, not trained")
def decoding() -> Program:
    def make() -> Any:
        module = nnx.MultiHeadAttention(
            num_heads=2, in_features=WIDTH, decode=True, rngs=nnx.Rngs(0)
        )
        module.init_cache((2, 8, WIDTH))
        return {"model": module}

    @nnx.jit
    def decode(model: Any, token: jax.Array) -> jax.Array:
        return jnp.sum(model(token))

    def step(state: Any, i: int) -> tuple[Any, Any]:
        return state, decode(state["model"], numbers(i, 2, 1, WIDTH))

    return Program(make, step)


@CASES.case("flax", "nnx.Conv, ConvTranspose, Embed, Einsum", "kernels of four dimensions")
def convolutions() -> Program:
    class Picture(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.down = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
            self.up = nnx.ConvTranspose(8, 3, (3, 3), strides=2, rngs=rngs)
            self.mix = nnx.Einsum("bhwc,cd->bhwd", (3, 3), (3,), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.mix(self.up(nnx.relu(self.down(x))))

    return trained(lambda: Picture(nnx.Rngs(0)), shape=(2, 8, 8, 3))


@CASES.case("flax", "nnx.RNN of OptimizedLSTMCell, Bidirectional GRU", "carries, RNG streams")
def recurrent() -> Program:
    def model() -> nnx.Module:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.RNN(nnx.OptimizedLSTMCell(WIDTH, WIDTH, rngs=rngs)),
            nnx.Bidirectional(
                nnx.RNN(nnx.GRUCell(WIDTH, 4, rngs=rngs)), nnx.RNN(nnx.GRUCell(WIDTH, 4, rngs=rngs))
            ),
        )

    return trained(model, shape=(2, 5, WIDTH))


@CASES.case("flax", "nnx.LoRA and LoRALinear", "only LoRAParams are trained, the base is frozen")
def lora() -> Program:
    def model() -> nnx.Module:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs),
            nnx.LoRA(WIDTH, 2, WIDTH, base_module=nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs),
        )

    return trained(model, wrt=nnx.LoRAParam)


@CASES.case("flax", "layers stacked by nnx.vmap, run by nnx.scan", "a leading axis of layers")
def stacked() -> Program:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.dropout(nnx.tanh(self.linear(x)))

    class Stack(nnx.Module):
        def __init__(self):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def blocks(rngs: nnx.Rngs) -> Block:
                return Block(rngs)

            self.blocks = blocks(nnx.Rngs(0, dropout=1))

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x: jax.Array, block: Block) -> jax.Array:
                return block(x)

            return forward(x, self.blocks)

    return trained(Stack)


@CASES.case("flax", "nnx.ModelAndOptimizer beside its model", "every Param occurs twice")
def model_and_optimizer() -> Program:
    def make() -> Any:
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.ModelAndOptimizer(model, optax.adam(1e-2))}

    @nnx.jit
    def update(state: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(state["model"])
        state["optimizer"].update(grads)
        return loss

    def step(state: Any, i: int) -> tuple[Any, Any]:
        return state, update(state, numbers(i, 4, WIDTH))

    return Program(make, step)


@CASES.case("flax", "nnx.Embed with tied weights", "one Param under two names")
def tied() -> Program:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(WIDTH, 16, rngs=rngs)
            self.head = nnx.Linear(16, WIDTH, rngs=rngs)
            self.again = self.embed
            self.table = self.embed.embedding

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(x @ self.table[...]) + self.again.attend(self.head.kernel.T[:WIDTH])

    return trained(lambda: Tied(nnx.Rngs(0)), shape=(WIDTH, WIDTH))


@CASES.case("flax", "nnx.metrics.MultiMetric", "metrics that are kept over a restart")
def metrics() -> Program:
    def make() -> Any:
        return {
            "metrics": nnx.MultiMetric(
                loss=nnx.metrics.Average("loss"),
                accuracy=nnx.metrics.Accuracy(),
                spread=nnx.metrics.Welford("loss"),
            )
        }

    def step(state: Any, i: int) -> tuple[Any, Any]:
        scores = jnp.asarray(numbers(i, 4, 3))
        state["metrics"].update(loss=scores.mean(), logits=scores, labels=jnp.zeros(4, jnp.int32))
        computed = state["metrics"].compute()
        return state, computed["loss"] + computed["accuracy"] + computed["spread"].mean

    return Program(make, step)


@CASES.case("flax", "bridge.ToNNX of a Linen module", "Linen's variables in an NNX module")
def to_nnx() -> Program:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = linen.LayerNorm()(linen.Dense(16)(x))
            return linen.Dense(WIDTH)(linen.relu(x))

    def model() -> nnx.Module:
        return bridge.lazy_init(bridge.ToNNX(Block(), rngs=nnx.Rngs(0)), jnp.zeros((4, WIDTH)))

    return trained(model)


@CASES.case("flax", "bridge.to_linen of an NNX module", "NNX boxes in Linen's variables")
def to_linen() -> Program:
    module = bridge.to_linen(nnx.Linear, WIDTH, WIDTH)
    transform = optax.adam(1e-2)

    def make() -> Any:
        variables = module.init(jax.random.key(0), jnp.zeros((4, WIDTH)))
        return {"params": variables["params"], "opt": transform.init(variables["params"])}

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((module.apply({"params": params}, x) - x) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = transform.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, WIDTH)))


@CASES.case("flax", "nnx.List and nnx.Dict of modules", "containers that are modules")
def containers() -> Program:
    class Several(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(11)])
            self.norms = nnx.Dict(first=nnx.LayerNorm(WIDTH, rngs=rngs))
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = x + 0.1 * layer(x)
            return self.norms["first"](x) * self.scale[...]

    return trained(lambda: Several(nnx.Rngs(0)))


@CASES.case("flax", "nnx.EMA-like copy by nnx.clone, nnx.Rngs apart", "two models and streams")
def averaged() -> Program:
    def make() -> Any:
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        return {
            "model": model,
            "ema": nnx.clone(model),
            "optimizer": nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param),
            "rngs": nnx.Rngs(noise=7),
        }

    @nnx.jit
    def update(state: Any, x: jax.Array) -> jax.Array:
        noisy = x + 0.1 * jax.random.normal(state["rngs"].noise(), x.shape)
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(noisy) - x) ** 2))(state["model"])
        state["optimizer"].update(state["model"], grads)
        new = jax.tree.map(
            lambda old, now: 0.9 * old + 0.1 * now,
            nnx.state(state["ema"]),
            nnx.state(state["model"]),
        )
        nnx.update(state["ema"], new)
        return loss

    def step(state: Any, i: int) -> tuple[Any, Any]:
        return state, update(state, numbers(i, 4, WIDTH))

    return Program(make, step)


@CASES.case("flax", "nnx.split: a GraphDef kept by the program, its State saved", "nnx.State")
def split_state() -> Program:
    def build() -> nnx.Module:
        rngs = nnx.Rngs(0, dropout=1)
        return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Dropout(0.2, rngs=rngs))

    graphdef = nnx.graphdef(build())
    transform = optax.adam(1e-2)

    def make() -> Any:
        _, params, rest = nnx.split(build(), nnx.Param, ...)
        return {"params": params, "rest": rest, "opt": transform.init(params)}

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            model = nnx.merge(graphdef, params, state["rest"], copy=True)
            loss = jnp.mean((model(x) - x) ** 2)
            return loss, nnx.split(model, nnx.Param, ...)[2]

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = transform.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "rest": rest, "opt": opt}, loss

    def step(state: Any, i: int) -> tuple[Any, Any]:
        return update(state, numbers(i, 4, WIDTH))

    return Program(make, step)
