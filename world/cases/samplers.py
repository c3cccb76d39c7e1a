"""numpyro, blackjax, gpjax, tinygp, ott-jax, evosax: samplers, processes, strategies."""

from __future__ import annotations

from typing import Any

import blackjax
import equinox as eqx
import evosax.algorithms
import gpjax
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import paramax
import tinygp
from numpyro import infer
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn

from world.case import Program, Registry, numbers

CASES = Registry()


def regression(x: Any, y: Any = None) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    offset = numpyro.sample("offset", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(slope * x + offset.sum(), noise), obs=y)


X = numbers(70, 16)
Y = 2 * X + 0.5 + 0.1 * numbers(71, 16)


@CASES.case("numpyro", "NUTS, sample by sample", "HMCState with adaptation inside")
def nuts() -> Program:
    kernel = infer.NUTS(regression, max_tree_depth=3)

    def make() -> Any:
        return kernel.init(jax.random.key(0), 10, None, model_args=(X, Y), model_kwargs={})

    make()  # the kernel learns the model's structure
    sample = jax.jit(lambda state: kernel.sample(state, (X, Y), {}))

    def step(state: Any, i: int) -> Any:
        state = sample(state)
        return state, state.potential_energy + state.adapt_state.step_size

    return Program(make, step)


@CASES.case("numpyro", "SVI with AutoNormal and optax", "SVIState with an optax state")
def svi() -> Program:
    guide = infer.autoguide.AutoNormal(regression)
    inference = infer.SVI(regression, guide, optax.adam(0.05), infer.Trace_ELBO())

    def make() -> Any:
        return inference.init(jax.random.key(0), X, Y)

    make()
    update = jax.jit(lambda state: inference.update(state, X, Y)[0])

    def step(state: Any, i: int) -> Any:
        # numpyro adds up its loss in the order of a set, which is another one in each process.
        state = update(state)
        return state, sum(float(p.sum()) for p in inference.get_params(state).values())

    return Program(make, step)


def log_density(position: Any) -> jax.Array:
    return -jnp.sum((position["a"] - 1.0) ** 2) - jnp.sum((position["b"] * jnp.arange(8.0)) ** 2)


POSITION = {"a": jnp.zeros(4), "b": jnp.full(8, 0.3)}


@CASES.case("blackjax", "NUTS and HMC", "states of samplers as named tuples")
def blackjax_nuts() -> Program:
    inverse_mass = jnp.ones(12)
    nuts = blackjax.nuts(log_density, 0.1, inverse_mass, max_num_doublings=3)
    hmc = blackjax.hmc(log_density, 0.1, inverse_mass, 4)

    def make() -> Any:
        return {
            "nuts": nuts.init(POSITION),
            "hmc": hmc.init(POSITION),
            "key": jax.random.key(0),
        }

    @jax.jit
    def step_both(state: Any) -> Any:
        key, first, second = jax.random.split(state["key"], 3)
        one, info = nuts.step(first, state["nuts"])
        two, _ = hmc.step(second, state["hmc"])
        return {"nuts": one, "hmc": two, "key": key}, one.logdensity + two.logdensity + info.energy

    return Program(make, lambda state, i: step_both(state))


@CASES.case("blackjax", "SGLD", "a position and a key, no class of its own")
def blackjax_sgld() -> Program:
    sgld = blackjax.sgld(lambda position, batch: jax.grad(log_density)(position))

    def make() -> Any:
        return {"position": sgld.init(POSITION), "key": jax.random.PRNGKey(0)}

    @jax.jit
    def move(state: Any, batch: jax.Array) -> Any:
        key, own = jax.random.split(state["key"])
        position = sgld.step(own, state["position"], batch, 1e-3)
        return {"position": position, "key": key}, log_density(position)

    return Program(make, lambda state, i: move(state, numbers(i, 4)))


@CASES.case("tinygp", "a Gaussian process's kernel, trained", "kernels as trees")
def tiny_gp() -> Program:
    transform = optax.adam(0.05)

    def make() -> Any:
        kernel = tinygp.kernels.ExpSquared(jnp.asarray(0.5)) * jnp.asarray(1.5)
        return {"kernel": kernel, "opt": transform.init(kernel)}

    @jax.jit
    def update(state: Any) -> Any:
        def loss_of(kernel: Any) -> jax.Array:
            return -tinygp.GaussianProcess(kernel, X, diag=0.1).log_probability(Y)

        loss, grads = jax.value_and_grad(loss_of)(state["kernel"])
        updates, opt = transform.update(grads, state["opt"])
        return {"kernel": optax.apply_updates(state["kernel"], updates), "opt": opt}, loss

    return Program(make, lambda state, i: update(state))


@CASES.case("ott-jax", "Sinkhorn potentials, warm-started", "duals carried from step to step")
def optimal_transport() -> Program:
    def make() -> Any:
        return {"x": jnp.asarray(numbers(80, 8, 2)), "f": jnp.zeros(8), "g": jnp.zeros(8)}

    @jax.jit
    def update(state: Any, y: jax.Array) -> Any:
        def cost(x: jax.Array) -> Any:
            geometry = pointcloud.PointCloud(x, y, epsilon=0.1)
            problem = linear_problem.LinearProblem(geometry)
            solver = sinkhorn.Sinkhorn(max_iterations=20, min_iterations=20)
            output = solver(problem, init=(state["f"], state["g"]))
            return output.reg_ot_cost, output

        (loss, output), grad = jax.value_and_grad(cost, has_aux=True)(state["x"])
        return {"x": state["x"] - 0.1 * grad, "f": output.f, "g": output.g}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 8, 2)))


@CASES.case("evosax", "CMA-ES and OpenES", "strategies' states and parameters")
def evolution() -> Program:
    solution = jnp.zeros(6)
    strategies = {
        "cma": evosax.algorithms.CMA_ES(population_size=8, solution=solution),
        "open": evosax.algorithms.Open_ES(population_size=8, solution=solution),
    }

    def make() -> Any:
        return {
            "key": jax.random.key(0),
            "params": {name: es.default_params for name, es in strategies.items()},
            "states": {
                name: es.init(jax.random.key(1), solution, es.default_params)
                for name, es in strategies.items()
            },
        }

    @jax.jit
    def generation(state: Any) -> Any:
        states, best = {}, 0.0
        key, *keys = jax.random.split(state["key"], 5)
        for number, (name, es) in enumerate(strategies.items()):
            params = state["params"][name]
            population, own = es.ask(keys[2 * number], state["states"][name], params)
            fitness = jnp.sum((population - 1.0) ** 2, -1)
            own, _ = es.tell(keys[2 * number + 1], population, fitness, own, params)
            states[name] = own
            best = best + fitness.min()
        return {"key": key, "params": state["params"], "states": states}, best

    return Program(make, lambda state, i: generation(state))


@CASES.case("gpjax", "a conjugate posterior, trained", "constrained parameters", as_dicts=True)
def gp_posterior() -> Program:
    data = gpjax.Dataset(X=jnp.asarray(X)[:, None], y=jnp.asarray(Y)[:, None])
    transform = optax.adam(0.05)

    def build() -> Any:
        prior = gpjax.gps.Prior(
            mean_function=gpjax.mean_functions.Constant(), kernel=gpjax.kernels.RBF()
        )
        return prior * gpjax.likelihoods.Gaussian(0.2)

    static = eqx.filter(build(), eqx.is_inexact_array, inverse=True)

    def make() -> Any:
        arrays = eqx.filter(build(), eqx.is_inexact_array)
        return {"posterior": arrays, "opt": transform.init(arrays)}

    @eqx.filter_jit
    def update(state: Any) -> Any:
        def loss_of(arrays: Any) -> jax.Array:
            posterior = paramax.unwrap(eqx.combine(arrays, static))
            return -gpjax.objectives.conjugate_mll(posterior, data)

        loss, grads = jax.value_and_grad(loss_of)(state["posterior"])
        updates, opt = transform.update(grads, state["opt"])
        return {"posterior": eqx.apply_updates(state["posterior"], updates), "opt": opt}, loss

    return Program(make, lambda state, i: update(state), lambda: eqx.filter_eval_shape(make))
