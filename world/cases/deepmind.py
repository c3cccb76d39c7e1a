"""dm-haiku, distrax, rlax, jraph, mctx, chex."""

from __future__ import annotations

from typing import Any

import chex
import distrax
import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import mctx
import numpy as np
import optax
import rlax

from world.case import Program, Registry, integers, numbers, shapes_of

CASES = Registry()
WIDTH = 8


@CASES.case("dm-haiku", "transform_with_state: Linear, BatchNorm, dropout", "state beside params")
def haiku_net() -> Program:
    def forward(x: jax.Array) -> jax.Array:
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x), is_training=True)
        return hk.Linear(WIDTH)(hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(x)))

    net, transform = hk.transform_with_state(forward), optax.adam(1e-2)

    def make() -> Any:
        params, state = net.init(jax.random.PRNGKey(0), jnp.zeros((4, WIDTH)))
        return {
            "params": params,
            "state": state,
            "opt": transform.init(params),
            "rng": jax.random.PRNGKey(1),
        }

    @jax.jit
    def update(all_state: Any, x: jax.Array) -> Any:
        rng, own = jax.random.split(all_state["rng"])

        def loss_of(params: Any) -> Any:
            y, state = net.apply(params, all_state["state"], own, x)
            return jnp.mean((y - x) ** 2), state

        (loss, state), grads = jax.value_and_grad(loss_of, has_aux=True)(all_state["params"])
        updates, opt = transform.update(grads, all_state["opt"])
        params = optax.apply_updates(all_state["params"], updates)
        return {"params": params, "state": state, "opt": opt, "rng": rng}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, WIDTH)))


@CASES.case("dm-haiku", "LSTM with its LSTMState, PRNGSequence", "a carry, a sequence of keys")
def haiku_lstm() -> Program:
    def forward(x: jax.Array, carry: Any) -> Any:
        return hk.LSTM(WIDTH)(x, carry)

    net, transform = hk.without_apply_rng(hk.transform(forward)), optax.sgd(0.1, momentum=0.9)

    def make() -> Any:
        carry = hk.LSTMState(jnp.zeros((4, WIDTH)), jnp.zeros((4, WIDTH)))
        params = net.init(jax.random.PRNGKey(0), jnp.zeros((4, WIDTH)), carry)
        keys = hk.PRNGSequence(5)
        next(keys)
        return {
            "params": params,
            "carry": carry,
            "opt": transform.init(params),
            "keys": keys.internal_state,
        }

    @jax.jit
    def update(state: Any, x: jax.Array, key: jax.Array) -> Any:
        x = x + 0.1 * jax.random.normal(key, x.shape)

        def loss_of(params: Any) -> Any:
            y, carry = net.apply(params, x, state["carry"])
            return jnp.mean((y - x) ** 2), carry

        (loss, carry), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = transform.update(grads, state["opt"])
        return optax.apply_updates(state["params"], updates), carry, opt, loss

    def step(state: Any, i: int) -> Any:
        keys = hk.PRNGSequence(0)
        keys.replace_internal_state(state["keys"])
        params, carry, opt, loss = update(state, numbers(i, 4, WIDTH), next(keys))
        after = {"params": params, "carry": carry, "opt": opt, "keys": keys.internal_state}
        return after, loss

    return Program(make, step)


@CASES.case(
    "distrax", "a distribution and a bijector as leaves' owners", "jittable objects", as_dicts=True
)
def distributions() -> Program:
    def make() -> Any:
        return {
            "posterior": distrax.MultivariateNormalDiag(jnp.zeros(WIDTH), jnp.ones(WIDTH)),
            "key": jax.random.key(0),
        }

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        key, own = jax.random.split(state["key"])
        posterior = state["posterior"]

        def loss_of(mean: jax.Array, scale: jax.Array) -> jax.Array:
            now = distrax.MultivariateNormalDiag(mean, scale)
            noise = 0.01 * jax.random.normal(own, x.shape)
            return -jnp.mean(now.log_prob(x + noise))

        loss, (mean, scale) = jax.value_and_grad(loss_of, (0, 1))(
            posterior.loc, posterior.scale_diag
        )
        posterior = distrax.MultivariateNormalDiag(
            posterior.loc - 0.1 * mean, posterior.scale_diag - 0.01 * scale
        )
        return {"posterior": posterior, "key": key}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, WIDTH)))


@CASES.case("rlax", "double Q-learning with Polyak averages", "online and target networks")
def q_learning() -> Program:
    transform = optax.rmsprop(1e-2)

    def make() -> Any:
        table = jax.random.normal(jax.random.key(0), (WIDTH, 4))
        return {
            "online": {"table": table},
            "target": {"table": table},
            "opt": transform.init({"table": table}),
            "epsilon": 0.5,
            "key": jax.random.key(7),
        }

    @jax.jit
    def update(state: Any, s: jax.Array, r: jax.Array) -> Any:
        key, own = jax.random.split(state["key"])
        a = jax.random.randint(own, s.shape, 0, 4)

        def loss_of(online: Any) -> jax.Array:
            now, then = online["table"][s], state["target"]["table"][(s + 1) % WIDTH]
            selected = online["table"][(s + 1) % WIDTH]
            error = jax.vmap(rlax.double_q_learning)(
                now, a, r, 0.9 * jnp.ones_like(r), then, selected
            )
            return jnp.mean(rlax.l2_loss(error))

        loss, grads = jax.value_and_grad(loss_of)(state["online"])
        updates, opt = transform.update(grads, state["opt"])
        online = optax.apply_updates(state["online"], updates)
        target = optax.incremental_update(online, state["target"], 0.1)
        epsilon = state["epsilon"] * 0.9
        after = {"online": online, "target": target, "opt": opt, "epsilon": epsilon, "key": key}
        return after, loss

    return Program(
        make, lambda state, i: update(state, integers(i, 16, below=WIDTH), numbers(i, 16))
    )


@CASES.case("jraph", "a graph network on a GraphsTuple", "the graph is part of the state")
def graph() -> Program:
    transform = optax.adam(1e-2)
    net = jraph.GraphNetwork(
        update_edge_fn=lambda e, s, r, g: e + jnp.tanh(s + r),
        update_node_fn=lambda n, s, r, g: n + 0.1 * (s + r),
    )

    def make() -> Any:
        tuple_ = jraph.GraphsTuple(
            nodes=jnp.asarray(numbers(90, 8, 4)),
            edges=jnp.asarray(numbers(91, 12, 4)),
            senders=jnp.asarray(integers(92, 12, below=8)),
            receivers=jnp.asarray(integers(93, 12, below=8)),
            globals=None,
            n_node=jnp.asarray([8]),
            n_edge=jnp.asarray([12]),
        )
        params = {"w": jnp.eye(4)}
        return {"graph": tuple_, "params": params, "opt": transform.init(params)}

    @jax.jit
    def update(state: Any) -> Any:
        def loss_of(params: Any) -> Any:
            after = net(state["graph"]._replace(nodes=state["graph"].nodes @ params["w"]))
            return jnp.mean(after.nodes**2), after

        (loss, after), grads = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
        updates, opt = transform.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"graph": after, "params": params, "opt": opt}, loss

    return Program(make, lambda state, i: update(state))


@CASES.case("mctx", "a policy improved by MCTS", "a search tree in the state")
def search() -> Program:
    def recurrent(params: Any, key: Any, action: Any, embedding: Any) -> Any:
        reward = jnp.sin(embedding + action)
        output = mctx.RecurrentFnOutput(
            reward=reward,
            discount=jnp.full_like(reward, 0.9),
            prior_logits=jnp.tile(params["prior"], (reward.shape[0], 1)),
            value=params["value"] * reward,
        )
        return output, embedding + action

    @jax.jit
    def plan(params: Any, key: Any) -> Any:
        root = mctx.RootFnOutput(
            prior_logits=jnp.tile(params["prior"], (2, 1)),
            value=jnp.zeros(2),
            embedding=jnp.asarray([0.1, 0.2]),
        )
        output = mctx.muzero_policy(params, key, root, recurrent, num_simulations=6)
        prior = params["prior"] + 0.1 * output.action_weights.mean(0)
        value = params["value"] + 0.01 * output.search_tree.summary().value.mean()
        return {"prior": prior, "value": value}, output.search_tree

    def make() -> Any:
        params = {"prior": jnp.zeros(4), "value": jnp.asarray(0.5)}
        key = jax.random.key(0)
        params, tree = plan(params, key)
        return {"params": params, "tree": tree, "key": key}

    def step(state: Any, i: int) -> Any:
        key, own = jax.random.split(state["key"])
        params, tree = plan(state["params"], own)
        loss = jnp.sum(params["prior"]) + params["value"] + jnp.sum(state["tree"].node_values)
        return {"params": params, "tree": tree, "key": key}, loss

    return Program(make, step)


@CASES.case("chex", "chex.dataclass, mappable and frozen, with numpy inside", "mappable classes")
def chex_classes() -> Program:
    make, step = _chex_program()

    return Program(make, step, lambda: shapes_of(make()))


@chex.dataclass(frozen=True)
class Statistics:
    mean: Any
    seen: Any


@chex.dataclass(mappable_dataclass=True)
class Learner:
    params: Any
    statistics: Statistics
    table: Any


def _chex_program() -> Any:
    def make() -> Any:
        return Learner(
            params={"w": jnp.eye(WIDTH)},
            statistics=Statistics(mean=jnp.zeros(WIDTH), seen=np.int32(0)),
            table=np.arange(6, dtype=np.int32).reshape(2, 3),
        )

    @jax.jit
    def update(params: Any, mean: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] - x[:, ::-1]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), 0.9 * mean + x.mean(0), loss

    def step(state: Any, i: int) -> Any:
        params, mean, loss = update(state.params, state.statistics.mean, numbers(i, 4, WIDTH))
        seen = Statistics(mean=mean, seen=np.int32(state.statistics.seen + 4))
        return Learner(params=params, statistics=seen, table=state.table + 1), loss

    return make, step
