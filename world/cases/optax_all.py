"""Every optimizer and transformation of optax and optax.contrib, through nnx.Optimizer and raw.

The names are read from the packages, so that what a new version adds is tested, too.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import nnx

from world.case import Program, Registry, numbers

CASES = Registry()
WIDTH = 8


class Group(enum.StrEnum):
    MATRIX = "matrix"
    VECTOR = "vector"


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def by_group(params: Any) -> Any:
    return jax.tree.map(lambda x: Group.MATRIX if jnp.ndim(x) > 1 else Group.VECTOR, params)


# What each needs beyond its defaults, and what only combinations show.
ARGUMENTS: dict[str, Callable[[], Any]] = {
    "adadelta": lambda: optax.adadelta(0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "add_decayed_weights": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "apply_every": lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.05),
    "skip_not_finite": lambda: optax.MultiSteps(
        optax.adam(0.01), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "trace": lambda: optax.chain(optax.trace(0.9), optax.sgd(0.1)),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: -0.1 / (1 + n)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
    "masked": lambda: optax.masked(optax.adam(0.01), is_matrix),
    "multi_transform, bools": lambda: optax.multi_transform(
        {True: optax.adam(0.01), False: optax.sgd(0.1, momentum=0.9)}, is_matrix
    ),
    "multi_transform, enums": lambda: optax.multi_transform(
        {Group.MATRIX: optax.adamw(0.01), Group.VECTOR: optax.lion(0.01)}, by_group
    ),
    "multi_transform, strings": lambda: optax.multi_transform(
        {"matrix": optax.adam(0.01), "vector": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda group: group.value, by_group(params)),
    ),
    "partition, floats": lambda: optax.partition(
        {0.5: optax.adam(0.01), 1.5: optax.sgd(0.1)},
        lambda params: jax.tree.map(lambda x: 0.5 if jnp.ndim(x) > 1 else 1.5, params),
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.cosine_decay_schedule(0.1, 10), weight_decay=1e-3
    ),
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip_by_global_norm(1.0)), ("adam", optax.adam(0.01))
    ),
    "adam in bfloat16": lambda: optax.adam(0.01, mu_dtype=jnp.bfloat16),
    "warmup, clip, adamw, ema": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
        optax.ema(0.9),
    ),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "contrib.sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=False),
    "contrib.muon": lambda: optax.contrib.muon(0.02),
    "contrib.mechanize": lambda: optax.contrib.mechanize(optax.sgd(0.1), 1e-2, 6, s_init=1e-2),
    "contrib.reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=1e-1)
    ),
}
NOT_ALONE = {
    "contrib.scale_by_muon",  # wants to know which dimensions of a leaf it turns; `muon` tells it
}


def discovered() -> dict[str, Callable[[], Any]]:
    """Optimizers, and `scale_by_…` with a learning rate, that can be made with no or one number."""
    found: dict[str, Callable[[], Any]] = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name in sorted(dir(module)):
            function = getattr(module, name)
            key = prefix + name
            if key in ARGUMENTS or key in NOT_ALONE or not inspect.isfunction(function):
                continue
            build = partial(_attempt, function, name)
            if build() is not None:
                found[key] = build
    return found


def _attempt(function: Any, name: str) -> Any:
    """The transformation, or None if the function makes none with as little."""
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    names = [parameter.name for parameter in needed]
    if names not in ([], ["learning_rate"]):
        return None
    try:
        made = function(*[0.01 for _ in needed])
    except Exception:
        return None
    if not isinstance(made, optax.GradientTransformation):
        return None
    return optax.chain(made, optax.scale(-0.01)) if name.startswith("scale_by") else made


def all_transformations() -> dict[str, Callable[[], Any]]:
    named = {name: build for name, build in ARGUMENTS.items() if build() is not None}
    return dict(sorted({**discovered(), **named}.items()))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.second = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return jnp.mean((hidden @ params["second"]["kernel"] + params["second"]["bias"] - x) ** 2)


def extra(name: str, value: Any, grads: Any, value_fn: Any) -> dict[str, Any]:
    """What some updates want to know beside gradients."""
    if "linesearch" in name or "lbfgs" in name:
        return {"value": value, "grad": grads, "value_fn": value_fn}
    if "sophia" in name or "hutchinson" in name:
        return {"obj_fn": value_fn}
    return {"value": value} if any(word in name for word in ("momo", "plateau", "polyak")) else {}


def raw(name: str, build: Callable[[], Any]) -> Program:
    transform = optax.with_extra_args_support(build())

    def make() -> Any:
        params = {
            "first": {"kernel": jnp.asarray(numbers(1, WIDTH, 16)), "bias": jnp.zeros(16)},
            "second": {"kernel": jnp.asarray(numbers(2, 16, WIDTH)), "bias": jnp.zeros(WIDTH)},
        }
        return {"params": params, "opt": transform.init(params)}

    @jax.jit
    def update(state: Any, x: jax.Array) -> Any:
        params = state["params"]
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        more = extra(name, loss, grads, lambda p: loss_of(p, x))
        updates, opt = transform.update(grads, state["opt"], params, **more)
        return {"params": optax.apply_updates(params, updates), "opt": opt}, loss

    return Program(make, lambda state, i: update(state, numbers(i, 4, WIDTH)))


def in_nnx(name: str, build: Callable[[], Any]) -> Program:
    def make() -> Any:
        model = Net(nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.Optimizer(model, build(), wrt=nnx.Param)}

    def model_loss(model: Net, x: jax.Array) -> jax.Array:
        return jnp.mean((model(x) - x) ** 2)

    @nnx.jit
    def update(state: Any, x: jax.Array) -> jax.Array:
        model = state["model"]
        loss, grads = nnx.value_and_grad(model_loss)(model, x)
        graphdef, _ = nnx.split(model)
        more = extra(name, loss, grads, lambda p: model_loss(nnx.merge(graphdef, p, copy=True), x))
        state["optimizer"].update(model, grads, **more)
        return loss

    def step(state: Any, i: int) -> tuple[Any, Any]:
        return state, update(state, numbers(i, 4, WIDTH))

    return Program(make, step)


for _name, _build in all_transformations().items():
    # A sign, or a quotient of small numbers, may turn over on another mesh.
    CASES.case("optax", _name, "raw", mesh_tolerance=5e-2)(partial(raw, _name, _build))
