"""Equinox and what is built on it: diffrax, lineax, optimistix, flowjax."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import flowjax.bijections
import flowjax.distributions
import flowjax.flows
import jax
import jax.numpy as jnp
import lineax
import optax
import optimistix
import paramax

from world.case import Program, Registry, numbers

CASES = Registry()
WIDTH = 8


def trained(make_model: Any, loss_of: Any, shape: tuple[int, ...] = (4, WIDTH)) -> Program:
    """A module whose arrays are trained; what is no array is the program's own."""
    transform = optax.adam(1e-2)

    def make() -> Any:
        arrays = eqx.filter(make_model(), eqx.is_array)
        return {"model": arrays, "opt": transform.init(eqx.filter(arrays, eqx.is_inexact_array))}

    @eqx.filter_jit
    def update(state: Any, x: jax.Array) -> Any:
        model = eqx.combine(state["model"], static)
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, x)
        updates, opt = transform.update(
            grads, state["opt"], eqx.filter(model, eqx.is_inexact_array)
        )
        model = eqx.apply_updates(model, updates)
        return {"model": eqx.filter(model, eqx.is_array), "opt": opt}, loss

    static = eqx.filter(make_model(), eqx.is_array, inverse=True)
    return Program(
        make,
        lambda state, i: update(state, numbers(i, *shape)),
        lambda: eqx.filter_eval_shape(make),
    )


def own_loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


@CASES.case("equinox", "nn.MLP, its arrays", "modules with functions left out (None)")
def mlp() -> Program:
    return trained(lambda: eqx.nn.MLP(WIDTH, WIDTH, 16, 2, key=jax.random.key(0)), own_loss)


@CASES.case("equinox", "nn.Linear as a whole", "a module with its static fields")
def whole_mlp() -> Program:
    def make() -> Any:
        return {"model": eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)), "count": jnp.zeros(())}

    @eqx.filter_jit
    def update(state: Any, x: jax.Array) -> Any:
        loss, grads = eqx.filter_value_and_grad(own_loss)(state["model"], x)
        model = eqx.apply_updates(state["model"], jax.tree.map(lambda g: -0.1 * g, grads))
        return {"model": model, "count": state["count"] + 1}, loss

    return Program(
        make,
        lambda state, i: update(state, numbers(i, 4, WIDTH)),
        lambda: eqx.filter_eval_shape(make),
    )


@CASES.case(
    "equinox", "nn.MultiheadAttention, LayerNorm, Conv1d", "tuples of modules", as_dicts=True
)
def attention() -> Program:
    class Block(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        conv: eqx.nn.Conv1d
        layers: tuple[eqx.nn.Linear, ...]
        scale: float = eqx.field(static=True)

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key, 4)
            self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=keys[0])
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.conv = eqx.nn.Conv1d(5, 5, 3, padding=1, key=keys[1])
            self.layers = tuple(eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys[2:])
            self.scale = 0.5

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.conv(jax.vmap(self.norm)(self.attention(x, x, x)))
            for layer in self.layers:
                y = y + self.scale * jax.vmap(layer)(y)
            return y

    return trained(lambda: Block(jax.random.key(0)), own_loss, (2, 5, WIDTH))


@CASES.case("equinox", "nn.BatchNorm with nn.State", "statistics beside the model")
def batch_norm() -> Program:
    transform = optax.adam(1e-2)

    def build() -> Any:
        def both(key: jax.Array) -> Any:
            return eqx.nn.Sequential(
                [
                    eqx.nn.Linear(WIDTH, WIDTH, key=key),
                    eqx.nn.BatchNorm(WIDTH, axis_name="batch", mode="batch"),
                ]
            )

        return eqx.nn.make_with_state(both)(jax.random.key(0))

    template, first_state = build()
    static = eqx.filter(template, eqx.is_array, inverse=True)
    leaves, structure = jax.tree.flatten(first_state)
    assert leaves

    def make() -> Any:
        model, bn_state = build()
        arrays = eqx.filter(model, eqx.is_array)
        return {
            "model": arrays,
            "state": jax.tree.leaves(bn_state),
            "opt": transform.init(eqx.filter(arrays, eqx.is_inexact_array)),
        }

    @eqx.filter_jit
    def update(state: Any, x: jax.Array) -> Any:
        def loss_of(model: Any, bn_state: Any) -> Any:
            y, bn_state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
                x, bn_state
            )
            return jnp.mean((y - x) ** 2), bn_state

        model = eqx.combine(state["model"], static)
        bn_state = jax.tree.unflatten(structure, state["state"])
        (loss, bn_state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, bn_state)
        updates, opt = transform.update(
            grads, state["opt"], eqx.filter(model, eqx.is_inexact_array)
        )
        model = eqx.filter(eqx.apply_updates(model, updates), eqx.is_array)
        return {"model": model, "state": jax.tree.leaves(bn_state), "opt": opt}, loss

    return Program(
        make,
        lambda state, i: update(state, numbers(i, 4, WIDTH)),
        lambda: eqx.filter_eval_shape(make),
    )


@CASES.case("diffrax", "a solve that goes on: Dopri5 with a PID controller", "solver states")
def solve() -> Program:
    term = diffrax.ODETerm(lambda t, y, args: -y + jnp.sin(t))
    solver, controller = diffrax.Dopri5(), diffrax.PIDController(1e-5, 1e-5)

    def begin(y: jax.Array) -> Any:
        solution = diffrax.diffeqsolve(
            term,
            solver,
            0.0,
            0.1,
            0.01,
            y,
            stepsize_controller=controller,
            saveat=diffrax.SaveAt(t1=True, solver_state=True, controller_state=True),
        )
        return (solution.ys[-1], solution.solver_state, solution.controller_state)

    def make() -> Any:
        y, solver_state, controller_state = jax.jit(begin)(jnp.arange(1.0, 9.0))
        return {"y": y, "solver": solver_state, "controller": controller_state}

    @eqx.filter_jit
    def update(state: Any, t: jax.Array) -> Any:
        solution = diffrax.diffeqsolve(
            term,
            solver,
            t,
            t + 0.1,
            0.01,
            state["y"],
            stepsize_controller=controller,
            solver_state=state["solver"],
            controller_state=state["controller"],
            made_jump=False,
            saveat=diffrax.SaveAt(t1=True, solver_state=True, controller_state=True),
        )
        y = solution.ys[-1]
        after = {"y": y, "solver": solution.solver_state, "controller": solution.controller_state}
        return after, jnp.sum(y)

    return Program(make, lambda state, i: update(state, jnp.asarray(0.1 * (i + 1))))


@CASES.case("diffrax", "a neural ODE", "gradients through a solve")
def neural_ode() -> Program:
    def model() -> Any:
        return eqx.nn.MLP(WIDTH, WIDTH, 8, 1, activation=jnp.tanh, key=jax.random.key(3))

    def loss_of(field: Any, x: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, args: jax.vmap(field)(y)),
            diffrax.Tsit5(),
            0.0,
            0.5,
            0.1,
            x,
            stepsize_controller=diffrax.ConstantStepSize(),
        )
        return jnp.mean((solution.ys[-1] - 2 * x) ** 2)

    return trained(model, loss_of)


@CASES.case("optimistix", "BFGS, step by step", "a solver's state with an operator", as_dicts=True)
def bfgs() -> Program:
    solver = optimistix.BFGS(rtol=1e-6, atol=1e-6)

    def target(y: jax.Array, args: Any) -> tuple[jax.Array, None]:
        return jnp.sum((y**2 - jnp.arange(4.0)) ** 2), None

    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def begin() -> Any:
        y = jnp.full(4, 0.7)
        return y, solver.init(target, y, None, {}, shape, None, frozenset())

    static = eqx.filter(begin()[1], eqx.is_array, inverse=True)

    def make() -> Any:
        y, state = begin()
        return {"y": y, "solver": eqx.filter(state, eqx.is_array)}

    @eqx.filter_jit
    def update(state: Any) -> Any:
        own = eqx.combine(state["solver"], static)
        y, own, _ = solver.step(target, state["y"], None, {}, own, frozenset())
        return {"y": y, "solver": eqx.filter(own, eqx.is_array)}, target(y, None)[0] + jnp.sum(y)

    return Program(make, lambda state, i: update(state), lambda: eqx.filter_eval_shape(make))


@CASES.case(
    "lineax",
    "linear operators, tagged",
    "sets of tags as static fields",
    left_out={"none": "an identity operator has only static fields, so Ostraka refuses it"},
)
def operators() -> Program:
    def make() -> Any:
        matrix = jnp.eye(WIDTH) * 2 + 0.1
        return {
            "matrix": lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag),
            "diagonal": lineax.DiagonalLinearOperator(jnp.arange(1.0, WIDTH + 1)),
            "both": lineax.MatrixLinearOperator(matrix)
            + lineax.IdentityLinearOperator(jax.ShapeDtypeStruct((WIDTH,), jnp.float32)),
            "x": jnp.ones(WIDTH),
        }

    @eqx.filter_jit
    def update(state: Any, b: jax.Array) -> Any:
        x = lineax.linear_solve(state["matrix"], b, lineax.CG(1e-5, 1e-5)).value
        x = x + state["diagonal"].mv(state["x"]) * 0.01 + state["both"].mv(x) * 0.1
        return {**state, "x": x}, jnp.sum(x)

    return Program(
        make,
        lambda state, i: update(state, numbers(i, WIDTH)),
        lambda: eqx.filter_eval_shape(make),
    )


@CASES.case("flowjax", "a coupling flow", "parameters wrapped by paramax")
def flow() -> Program:
    def model() -> Any:
        return flowjax.flows.coupling_flow(
            jax.random.key(0),
            base_dist=flowjax.distributions.StandardNormal((2,)),
            transformer=flowjax.bijections.Affine(),
            flow_layers=2,
            nn_width=8,
            nn_depth=1,
        )

    def loss_of(flow: Any, x: jax.Array) -> jax.Array:
        return -jnp.mean(paramax.unwrap(flow).log_prob(x))

    return trained(model, loss_of, (8, 2))
