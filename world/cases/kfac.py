"""kfac-jax, apart from the others: it lags behind JAX, and must not keep them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import kfac_jax

from world.case import Program, Registry, numbers

CASES = Registry()
WIDTH = 8


@CASES.case("kfac-jax", "K-FAC on a small net", "curvature blocks in nested dataclasses")
def kfac() -> Program:
    def loss_of(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        hidden = jnp.tanh(x @ params["a"]["w"] + params["a"]["b"])
        out = hidden @ params["b"]["w"] + params["b"]["b"]
        kfac_jax.register_squared_error_loss(out, y)
        return jnp.mean(jnp.sum((out - y) ** 2, -1)) / 2

    optimizer = kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(loss_of),
        l2_reg=1e-3,
        value_func_has_aux=False,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=1.0,
        num_burnin_steps=0,
    )

    def make() -> Any:
        params = {
            "a": {"w": jnp.asarray(numbers(1, WIDTH, 4)), "b": jnp.zeros(4)},
            "b": {"w": jnp.asarray(numbers(2, 4, WIDTH)), "b": jnp.zeros(WIDTH)},
        }
        key = jax.random.PRNGKey(0)
        x = jnp.asarray(numbers(0, 4, WIDTH))
        return {"params": params, "opt": optimizer.init(params, key, (x, x)), "key": key}

    def step(state: Any, i: int) -> Any:
        x = jnp.asarray(numbers(i, 4, WIDTH))
        key, own = jax.random.split(state["key"])
        # It donates what it is given, and counts steps of its own.
        params, opt, *_, stats = optimizer.step(
            state["params"], state["opt"], own, batch=(x, x), global_step_int=i
        )
        return {"params": params, "opt": opt, "key": key}, stats["loss"]

    return Program(make, step)
