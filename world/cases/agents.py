"""brax, flashbax, gymnax, e3nn-jax: environments, replay buffers, equivariant nets."""

from __future__ import annotations

from typing import Any

import e3nn_jax as e3nn
import flashbax
import gymnax
import jax
import jax.numpy as jnp
import optax
from brax.training import types
from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo import losses as ppo_losses
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo_train

from world.case import Program, Registry, numbers

CASES = Registry()


@CASES.case("brax", "PPO's TrainingState, with normalised observations", "nested flax.struct")
def brax_ppo() -> Program:
    networks = ppo_networks.make_ppo_networks(
        4, 2, policy_hidden_layer_sizes=(8,), value_hidden_layer_sizes=(8,)
    )
    transform = optax.adam(1e-2)

    def make() -> Any:
        one, two = jax.random.split(jax.random.PRNGKey(0))
        params = ppo_losses.PPONetworkParams(
            policy=networks.policy_network.init(one), value=networks.value_network.init(two)
        )
        return ppo_train.TrainingState(
            optimizer_state=transform.init(params),
            params=params,
            normalizer_params=running_statistics.init_state(
                specs.Array((4,), jnp.dtype("float32"))
            ),
            env_steps=types.UInt64(hi=0, lo=0),
        )

    @jax.jit
    def update(state: Any, observations: jax.Array) -> Any:
        normalizer = running_statistics.update(state.normalizer_params, observations)

        def loss_of(params: Any) -> jax.Array:
            values = networks.value_network.apply(normalizer, params.value, observations)
            logits = networks.policy_network.apply(normalizer, params.policy, observations)
            return jnp.mean((values - observations.sum(-1)) ** 2) + jnp.mean(logits**2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt = transform.update(grads, state.optimizer_state)
        return state.replace(
            optimizer_state=opt,
            params=optax.apply_updates(state.params, updates),
            normalizer_params=normalizer,
            env_steps=state.env_steps + 8,
        ), loss

    return Program(make, lambda state, i: update(state, numbers(i, 8, 4)))


@CASES.case("flashbax", "item and prioritised trajectory buffers", "buffers beside an agent")
def buffers() -> Program:
    flat = flashbax.make_item_buffer(16, 2, 2, add_batches=True)
    prioritised = flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=2,
        sample_batch_size=2,
        sample_sequence_length=2,
        period=1,
        min_length_time_axis=2,
        max_size=32,
    )
    item = {"observation": jnp.zeros(4), "reward": jnp.zeros(()), "done": jnp.zeros((), bool)}

    def make() -> Any:
        return {
            "flat": flat.init(item),
            "prioritised": prioritised.init(item),
            "weights": jnp.ones(4),
            "key": jax.random.key(0),
        }

    @jax.jit
    def update(state: Any, seen: jax.Array) -> Any:
        key, one, two = jax.random.split(state["key"], 3)
        batch = {"observation": seen, "reward": seen.sum(-1), "done": seen.sum(-1) > 0}
        flat_state = flat.add(state["flat"], batch)
        steps = jax.tree.map(lambda x: jnp.stack([x[:2], x[2:]], 1), batch)
        own = prioritised.add(state["prioritised"], steps)
        sampled, ordered = flat.sample(flat_state, one), prioritised.sample(own, two)
        own = prioritised.set_priorities(own, ordered.indices, ordered.probabilities + 0.1)
        loss = jnp.sum(sampled.experience["observation"] @ state["weights"]) + jnp.sum(
            ordered.experience["reward"]
        )
        weights = 0.9 * state["weights"] + 0.01 * loss
        return {"flat": flat_state, "prioritised": own, "weights": weights, "key": key}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, 4)))


@CASES.case("gymnax", "CartPole and its parameters, in the state", "an environment that goes on")
def environment() -> Program:
    env, default = gymnax.make("CartPole-v1")

    def make() -> Any:
        observation, state = env.reset(jax.random.key(0), default)
        return {
            "observation": observation,
            "env": state,
            "params": default,
            "key": jax.random.key(1),
        }

    @jax.jit
    def act(state: Any) -> Any:
        key, own = jax.random.split(state["key"])
        action = (state["observation"][2] > 0).astype(jnp.int32)
        observation, env_state, reward, *_ = env.step(own, state["env"], action, state["params"])
        after = {
            "observation": observation,
            "env": env_state,
            "params": state["params"],
            "key": key,
        }
        return after, reward + observation.sum()

    return Program(make, lambda state, i: act(state))


@CASES.case(
    "e3nn-jax", "IrrepsArray weights of a flax module", "arrays with irreps attached", as_dicts=True
)
def equivariant() -> Program:
    layer = e3nn.flax.Linear("4x0e + 2x1o")
    transform = optax.adam(1e-2)
    irreps = e3nn.Irreps("2x0e + 2x1o")

    def make() -> Any:
        x = e3nn.IrrepsArray(irreps, jnp.ones((4, irreps.dim)))
        params = layer.init(jax.random.key(0), x)
        return {"params": params, "opt": transform.init(params), "mean": x[0]}

    @jax.jit
    def update(state: Any, values: jax.Array) -> Any:
        x = e3nn.IrrepsArray(irreps, values)

        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((layer.apply(params, x).array - 0.5) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = transform.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "mean": 0.9 * state["mean"] + e3nn.mean(x, 0)}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, irreps.dim)))
