"""Linen modules, their collections, partitioned boxes, and TrainState."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, struct
from flax.core import FrozenDict, freeze
from flax.training import dynamic_scale, train_state

from world.case import Program, Registry, numbers

CASES = Registry()
WIDTH = 8


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(16)(x))
        x = linen.Dropout(0.2, deterministic=not train)(linen.relu(x))
        return linen.Dense(WIDTH)(x)


class State(train_state.TrainState):
    """As Flax's examples have it: batch statistics and a key beside the parameters."""

    batch_stats: Any
    key: jax.Array


@CASES.case("flax", "Linen TrainState", "apply_fn and tx as static fields", as_dicts=True)
def with_train_state() -> Program:
    net, transform = Net(), optax.adamw(1e-2)

    def make() -> Any:
        variables = net.init(jax.random.key(0), jnp.zeros((4, WIDTH)), train=False)
        return State.create(
            apply_fn=net.apply,
            params=variables["params"],
            tx=transform,
            batch_stats=variables["batch_stats"],
            key=jax.random.key(1),
        )

    @jax.jit
    def update(state: State, x: jax.Array) -> Any:
        def loss_of(params: Any) -> Any:
            y, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(state.key, state.step)},
            )
            return jnp.mean((y - x) ** 2), changed

        (loss, changed), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"]), loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, WIDTH)))


@struct.dataclass
class Boxed:
    params: FrozenDict
    opt: Any
    scale: dynamic_scale.DynamicScale
    name: str = struct.field(pytree_node=False)


@CASES.case(
    "flax", "Linen FrozenDict, partitioned boxes", "linen.with_partitioning, struct.dataclass"
)
def boxed() -> Program:
    init = linen.with_partitioning(linen.initializers.lecun_normal(), ("in", "out"))
    net = linen.Sequential([linen.Dense(16, kernel_init=init), linen.tanh, linen.Dense(WIDTH)])
    transform = optax.adam(1e-2)

    def make() -> Any:
        params = freeze(net.init(jax.random.key(0), jnp.zeros((4, WIDTH)))["params"])
        return Boxed(params, transform.init(params), dynamic_scale.DynamicScale(), "boxed")

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((net.apply({"params": linen.unbox(params)}, x) - x) ** 2)

        scale, _, loss, grads = state.scale.value_and_grad(loss_of)(state.params)
        updates, opt = transform.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(params=params, opt=opt, scale=scale), loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, WIDTH)))
