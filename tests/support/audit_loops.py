"""Small training loops, and faults that a resume may have in them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ostraka

SAVED, REACHED = 6, 9
"""The first run saves this step, and ends after that one."""

State = dict[str, Any]
Fault = Callable[[State, State], None]
"""Breaks a resumed state. It also gets a new state, as the program makes it at its start."""


class Numbers:
    """A data iterator with a state."""

    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.position)
        self.position += 1
        inputs = rng.standard_normal((16, 8)).astype(np.float32)
        return inputs, inputs.sum(1, keepdims=True) * 0.1

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@dataclass(frozen=True)
class Loop:
    make: Callable[[], State]
    advance: Callable[[State], dict[str, Any]]
    """Take one step. Returns values to audit."""
    faults: dict[str, tuple[Fault, str]] = field(default_factory=dict)
    """By name, a fault and what the message must say."""


def run(
    loop: Loop,
    directory: Path,
    last: int,
    fault: Fault | None = None,
    place: Callable[[State], State] = lambda state: state,
    **options: Any,
) -> int:
    """Train up to a step. Returns the step that it resumed from."""
    state = place(loop.make())
    with ostraka.Manager(directory, every=SAVED, audit_every=1, **options) as manager:
        start = manager.resume(state)
        if fault is not None:
            fault(state, place(loop.make()))
        for step in range(start + 1, last + 1):
            audit = loop.advance(state)
            manager.save(step, state, audit=audit)
    return start


def copied(*names: str) -> Fault:
    """These entries are as the program makes them at its start."""

    def fault(state: State, new: State) -> None:
        for name in names:
            state[name] = new[name]

    return fault


def mlp(params: Any, inputs: Any) -> Any:
    hidden = jax.nn.relu(inputs @ params["a"]["kernel"] + params["a"]["bias"])
    return hidden @ params["b"]["kernel"] + params["b"]["bias"]


def mlp_params(seed: int = 0) -> Any:
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "a": {"kernel": jax.random.normal(one, (8, 32)) * 0.3, "bias": jnp.zeros(32)},
        "b": {"kernel": jax.random.normal(two, (32, 1)) * 0.3, "bias": jnp.zeros(1)},
    }


def squares(params: Any, batch: Any) -> Any:
    inputs, targets = batch
    return jnp.mean((mlp(params, inputs) - targets) ** 2)


def restart_counts(state: State, new: State) -> None:
    """The counts start over, the moments stay."""
    state["opt_state"] = jax.tree.map(
        lambda one, fresh: fresh if one.ndim == 0 else one, state["opt_state"], new["opt_state"]
    )


def shift_counts(state: State, new: State) -> None:
    shift = lambda one: one + 1 if one.ndim == 0 else one  # noqa: E731
    state["opt_state"] = jax.tree.map(shift, state["opt_state"])


def drop_moments(state: State, new: State) -> None:
    zero = lambda one: jnp.zeros_like(one) if one.ndim else one  # noqa: E731
    state["opt_state"] = jax.tree.map(zero, state["opt_state"])


def cast_params(state: State, new: State) -> None:
    state["params"] = jax.tree.map(lambda one: one.astype(jnp.bfloat16), state["params"])


def skip_batch(state: State, new: State) -> None:
    next(state["data"])


def adam() -> Loop:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.02, 4, 40)
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(squares)(params, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    def make() -> State:
        params = mlp_params()
        return {"params": params, "opt_state": tx.init(params), "data": Numbers()}

    def advance(state: State) -> dict[str, Any]:
        batch = next(state["data"])
        state["params"], state["opt_state"], loss = step(state["params"], state["opt_state"], batch)
        return {"batch": batch, "loss": loss}

    faults = {
        "optimizer re-created": (copied("opt_state"), "optimizer state was not restored"),
        "moments dropped": (drop_moments, "optimizer's moments were not restored.*mu"),
        "schedule restarted": (restart_counts, "count started over: 'opt_state/.*' is 1 and was 7"),
        "step off by one": (shift_counts, "off by one: 'opt_state/.*' is 8 and was 7"),
        "data replayed": (copied("data"), "data iterator started over, it is that of step 1"),
        "batch skipped": (skip_batch, "data iterator is (off by one|at another position)"),
        "weights not loaded": (copied("params"), "weights were not restored"),
        "dtype changed": (cast_params, "a dtype changed: 'params/a/bias' was float32"),
    }
    return Loop(make, advance, faults)


def diffusion() -> Loop:
    """Noise from a key, and a moving average of the weights."""
    tx = optax.sgd(0.01, momentum=0.9)

    @jax.jit
    def step(params: Any, ema: Any, opt_state: Any, key: Any, batch: Any) -> Any:
        key, noise = jax.random.split(key)

        def loss_of(params: Any) -> Any:
            eps = jax.random.normal(noise, batch[0].shape)
            return squares(params, (batch[0] + 0.5 * eps, batch[1]))

        grads = jax.grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, ema, params)
        return params, ema, opt_state, key

    def make() -> State:
        params = mlp_params(1)
        ema = jax.tree.map(jnp.copy, params)
        state = {"params": params, "ema": ema, "opt_state": tx.init(params)}
        return {**state, "key": jax.random.key(5), "data": Numbers()}

    def advance(state: State) -> dict[str, Any]:
        batch = next(state["data"])
        names = ("params", "ema", "opt_state", "key")
        state |= zip(names, step(*(state[name] for name in names), batch), strict=True)
        return {"batch": batch}

    faults = {
        "EMA not restored": (copied("ema"), "moving average was not restored: 'ema/"),
        "RNG replayed": (copied("key"), "'key' differs: the RNG started over, it is .* step 1"),
        "momentum dropped": (copied("opt_state"), "trace.* (all zero|differ)"),
    }
    return Loop(make, advance, faults)


def linen() -> Loop:
    """Batch statistics and dropout in a TrainState."""
    import flax.linen as nn
    from flax.training import train_state

    class Net(nn.Module):
        @nn.compact
        def __call__(self, inputs: Any, train: bool = True) -> Any:
            inputs = nn.Dense(16)(inputs)
            inputs = nn.BatchNorm(use_running_average=not train)(inputs)
            inputs = nn.Dropout(0.2, deterministic=not train)(nn.relu(inputs))
            return nn.Dense(1)(inputs)

    class TrainState(train_state.TrainState):
        batch_stats: Any

    net, tx = Net(), optax.adamw(0.01)

    @jax.jit
    def step(state: Any, rng: Any, batch: Any) -> Any:
        rng, dropout = jax.random.split(rng)

        def loss_of(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, changed = net.apply(
                variables, batch[0], rngs={"dropout": dropout}, mutable=["batch_stats"]
            )
            return jnp.mean((out - batch[1]) ** 2), changed["batch_stats"]

        grads, stats = jax.grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), rng

    def make() -> State:
        variables = net.init(jax.random.key(0), jnp.ones((2, 8)), train=False)
        train = TrainState.create(apply_fn=net.apply, tx=tx, **variables)
        return {"train": train, "rng": jax.random.key(1), "data": Numbers()}

    def advance(state: State) -> dict[str, Any]:
        batch = next(state["data"])
        state["train"], state["rng"] = step(state["train"], state["rng"], batch)
        return {"batch": batch}

    def replaced(*names: str) -> Fault:
        def fault(state: State, new: State) -> None:
            old = {name: getattr(new["train"], name) for name in names}
            state["train"] = state["train"].replace(**old)

        return fault

    faults = {
        "batch statistics lost": (replaced("batch_stats"), "batch statistics were not restored"),
        "RNG replayed": (copied("rng"), "'rng' differs: the RNG started over"),
        "optimizer re-created": (replaced("opt_state"), "optimizer state was not restored"),
        "step restarted": (replaced("step"), "count started over: 'train/step' is 1 and was 7"),
    }
    return Loop(make, advance, faults)


def nnx_loop() -> Loop:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any):
            self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, inputs: Any) -> Any:
            return self.b(self.dropout(nnx.relu(self.a(inputs))))

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> None:
        grads = nnx.grad(lambda model: jnp.mean((model(batch[0]) - batch[1]) ** 2))(model)
        optimizer.update(model, grads)

    def make() -> State:
        model = Net(nnx.Rngs(0, dropout=1))
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer, "data": Numbers()}

    def advance(state: State) -> dict[str, Any]:
        batch = next(state["data"])
        step(state["model"], state["optimizer"], batch)
        return {"batch": batch}

    def replay(state: State, new: State) -> None:
        nnx.update(state["model"], nnx.state(new["model"], nnx.RngState))

    def forget(state: State, new: State) -> None:
        nnx.update(state["model"], nnx.state(new["model"], nnx.Param))

    faults = {
        "optimizer re-created": (copied("optimizer"), "optimizer state was not restored"),
        "RNG replayed": (replay, "dropout.* differs: the RNG started over"),
        "weights not loaded": (forget, "weights were not restored"),
    }
    return Loop(make, advance, faults)


def agent() -> Loop:
    """Q-learning: a target network, an environment and an exploring key."""
    tx = optax.rmsprop(0.01)

    @jax.jit
    def step(state: Any) -> Any:
        key, act = jax.random.split(state["explore_key"])
        env = jnp.tanh(state["env"] + 0.3 * jax.random.normal(act, (8,)))

        def loss_of(params: Any) -> Any:
            goal = env.sum() + 0.9 * mlp(state["target"], env)
            return jnp.sum((mlp(params, state["env"]) - goal) ** 2)

        grads = jax.grad(loss_of)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        target = jax.tree.map(lambda a, b: 0.95 * a + 0.05 * b, state["target"], params)
        changed = {"params": params, "target": target, "opt_state": opt_state}
        return {**changed, "env": env, "explore_key": key}

    def make() -> State:
        params = mlp_params(2)
        state = {"params": params, "target": mlp_params(2), "opt_state": tx.init(params)}
        return {**state, "env": jnp.ones(8), "explore_key": jax.random.key(9)}

    def advance(state: State) -> dict[str, Any]:
        state |= step(state)
        return {"reward": state["env"].sum()}

    faults = {
        "exploration replayed": (copied("explore_key"), "'explore_key' differs: the RNG started")
    }
    return Loop(make, advance, faults)


def accumulate() -> Loop:
    """Gradients that are accumulated over three steps."""
    tx = optax.MultiSteps(optax.adam(0.01), every_k_schedule=4)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(squares)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def make() -> State:
        params = mlp_params(3)
        return {"params": params, "opt_state": tx.init(params), "data": Numbers()}

    def advance(state: State) -> dict[str, Any]:
        batch = next(state["data"])
        state["params"], state["opt_state"] = step(state["params"], state["opt_state"], batch)
        return {"batch": batch}

    faults = {
        "accumulated gradients lost": (copied("opt_state"), "optimizer state was not restored"),
    }
    return Loop(make, advance, faults)


def grain_loop() -> Loop:
    """A real Grain pipeline, shuffled and batched."""
    import grain

    base = adam()

    def make() -> State:
        rows: Any = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
        data = grain.MapDataset.source(rows).shuffle(seed=3).to_iter_dataset().batch(16)
        return {**base.make(), "data": iter(data)}

    class Batches:
        def __init__(self, inner: Any):
            self.inner = inner

        def __next__(self) -> Any:
            inputs = next(self.inner)
            return inputs, inputs.sum(1, keepdims=True) * 0.1

    def advance(state: State) -> dict[str, Any]:
        data = state["data"]
        state["data"] = Batches(data)
        audit = base.advance(state)
        state["data"] = data
        return audit

    faults = {"pipeline restarted": (copied("data"), "data iterator started over, it is .* step 1")}
    return Loop(make, advance, faults)


def equinox_loop() -> Loop:
    import equinox as eqx

    tx = optax.adam(0.01)

    @eqx.filter_jit
    def step(model: Any, opt_state: Any, batch: Any) -> Any:
        loss_of = lambda model: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)  # noqa: E731
        updates, opt_state = tx.update(eqx.filter_grad(loss_of)(model), opt_state)
        return eqx.apply_updates(model, updates), opt_state

    def make() -> State:
        model = eqx.nn.MLP(8, 1, 16, 2, key=jax.random.key(0))
        return {
            "model": model,
            "opt_state": tx.init(eqx.filter(model, eqx.is_array)),
            "data": Numbers(),
        }

    def advance(state: State) -> dict[str, Any]:
        batch = next(state["data"])
        state["model"], state["opt_state"] = step(state["model"], state["opt_state"], batch)
        return {"batch": batch}

    faults = {
        "optimizer re-created": (copied("opt_state"), "optimizer state was not restored"),
        "weights not loaded": (copied("model"), "weights were not restored"),
    }
    return Loop(make, advance, faults)


def haiku_loop() -> Loop:
    import haiku as hk  # pyright: ignore[reportMissingImports]

    net = hk.transform(lambda inputs: hk.nets.MLP([16, 1])(inputs))  # noqa: PLW0108
    tx = optax.adam(0.01)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss_of = lambda params: jnp.mean((net.apply(params, None, batch[0]) - batch[1]) ** 2)  # noqa: E731
        updates, opt_state = tx.update(jax.grad(loss_of)(params), opt_state)
        return optax.apply_updates(params, updates), opt_state

    def make() -> State:
        params = net.init(jax.random.key(0), jnp.ones((1, 8)))
        return {"params": params, "opt_state": tx.init(params), "data": Numbers()}

    def advance(state: State) -> dict[str, Any]:
        batch = next(state["data"])
        state["params"], state["opt_state"] = step(state["params"], state["opt_state"], batch)
        return {"batch": batch}

    faults = {"data replayed": (copied("data"), "data iterator started over")}
    return Loop(make, advance, faults)


LOOPS = {
    "adam": adam,
    "diffusion": diffusion,
    "linen": linen,
    "nnx": nnx_loop,
    "agent": agent,
    "accumulate": accumulate,
    "grain": grain_loop,
    "equinox": equinox_loop,
    "haiku": haiku_loop,
}


@cache
def loop_of(name: str) -> Loop:
    return LOOPS[name]()
