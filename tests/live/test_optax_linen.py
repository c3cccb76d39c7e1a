"""Optax states, Linen variables, TrainState and dataclasses, with a template and without."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

import ostraka
from nnx_models import assert_same, bits

PARAMS = {
    "dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)},
    "norm": {"scale": jnp.ones(3)},
}
LABELS = {"dense": {"kernel": "fast", "bias": "slow"}, "norm": {"scale": "still"}}
SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
TRANSFORMS = {
    "adam": optax.adam(1e-2),
    "adam in bfloat16": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "plain sgd": optax.sgd(1e-2),
    "identity": optax.identity(),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE), optax.ema(0.9)),
    "masked": optax.masked(optax.adam(1e-2), jax.tree.map(lambda x: x.ndim > 1, PARAMS)),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, weight_decay=1e-3),
    "several": optax.multi_transform(
        {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-3, 0.9), "still": optax.set_to_zero()},
        LABELS,
    ),
    "every other step": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "noise": optax.add_noise(0.1, 0.5, 7),
    "finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "lookahead": optax.contrib.schedule_free_sgd(),
}


def step_all(states: dict[str, Any]) -> dict[str, Any]:
    """The states after a step, so that no moment is zero."""
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    return {name: TRANSFORMS[name].update(grads, states[name], PARAMS)[1] for name in states}


def test_states_with_a_template_an_abstract_one_and_without(tmp_path: Path):
    """Their named tuples come back as themselves, empty ones and masks as well."""
    fresh = {name: transform.init(PARAMS) for name, transform in TRANSFORMS.items()}
    states = jax.jit(step_all)(fresh)
    ostraka.save(tmp_path / "c", states)
    for restored in (
        ostraka.restore(tmp_path / "c"),
        ostraka.restore(tmp_path / "c", like=fresh),
        ostraka.restore(tmp_path / "c", like=jax.eval_shape(lambda: fresh)),
    ):
        for name, state in states.items():
            assert jax.tree.structure(restored[name]) == jax.tree.structure(state), name
            assert bits(restored[name]) == bits(state), name
    assert isinstance(restored["masked"].inner_state[0].mu["dense"]["bias"], optax.MaskedNode)
    assert ostraka.open(tmp_path / "c")["injected/hyperparams/learning_rate"].shape == ()


def test_the_same_inside_an_nnx_optimizer(tmp_path: Path):
    class Net(nnx.Module):
        def __init__(self, seed: int):
            self.dense = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
            self.norm = nnx.LayerNorm(3, use_bias=False, rngs=nnx.Rngs(seed))

    def make(seed: int) -> dict[str, nnx.Optimizer[Any]]:
        names = ("masked", "injected", "several", "chain", "plain sgd")
        return {n: nnx.Optimizer(Net(seed), transform_for_state(n), wrt=nnx.Param) for n in names}

    model, optimizers = Net(0), make(0)
    for optimizer in optimizers.values():
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    ostraka.save(tmp_path / "c", optimizers)
    target = make(1)
    ostraka.restore(tmp_path / "c", into=target)
    assert bits(target) == bits(optimizers)
    for like in (make(1), nnx.eval_shape(lambda: make(1))):
        assert bits(ostraka.restore(tmp_path / "c", like=like)) == bits(optimizers)
    plain = ostraka.restore(tmp_path / "c")
    assert [int(found["step"]) for found in plain.values()] == [1] * 5
    assert len(jax.tree.leaves(plain)) == len(jax.tree.leaves(optimizers))


def transform_for_state(name: str) -> Any:
    """Masks and labels as functions, since NNX gives a State instead of a dict."""
    if name == "masked":
        return optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    if name == "several":

        def label(params: Any) -> Any:
            return jax.tree.map(lambda x: "fast" if x.ndim > 1 else "slow", params)

        both: Any = {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-3, 0.9)}
        return optax.multi_transform(both, label)
    return TRANSFORMS[name]


# Linen


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        kernel_init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
        return nn.Dense(2, kernel_init=kernel_init)(x)


def make_variables(seed: int) -> Any:
    return Net().init(jax.random.key(seed), jnp.ones((1, 3)))


def test_linen_variables(tmp_path: Path):
    variables = make_variables(0)
    ostraka.save(tmp_path / "c", variables)
    restored = ostraka.restore(tmp_path / "c", like=make_variables(1))
    assert_same(restored, variables)
    assert isinstance(restored["params"]["Dense_1"]["kernel"], nn.Partitioned)
    abstract = jax.eval_shape(lambda: make_variables(0))
    assert_same(ostraka.restore(tmp_path / "c", like=abstract), variables)
    x = jnp.ones((2, 3))
    net: Any = Net()
    assert np.array_equal(net.apply(restored, x), net.apply(variables, x))
    plain = ostraka.restore(tmp_path / "c")
    assert plain.keys() == {"params", "batch_stats"}
    assert np.array_equal(
        plain["params"]["Dense_0"]["kernel"], variables["params"]["Dense_0"]["kernel"]
    )


def test_the_axes_that_linen_names():
    specs = ostraka.sharding.spec_tree(make_variables(0), "metadata")
    kernel = specs["params"]["Dense_1"]["kernel"]
    assert jax.tree.leaves(kernel) == [P(None, "model")]
    assert jax.tree.leaves(specs["params"]["Dense_0"]["kernel"]) == [P()]


def make_train_state(seed: int) -> TrainState:
    params = nn.meta.unbox(make_variables(seed))["params"]
    return TrainState.create(apply_fn=Net().apply, params=params, tx=TRANSFORMS["adam"])


def test_a_train_state(tmp_path: Path):
    state, like = make_train_state(0), make_train_state(1)
    grads = jax.tree.map(jnp.ones_like, state.params)
    state = state.apply_gradients(grads=grads)
    ostraka.save(tmp_path / "c", state)
    restored = ostraka.restore(tmp_path / "c", like=like)
    assert type(restored) is TrainState
    assert (restored.step, restored.tx) == (1, like.tx)
    assert bits(restored) == bits(state)
    assert bits(restored.apply_gradients(grads=grads)) == bits(state.apply_gradients(grads=grads))
    plain = ostraka.restore(tmp_path / "c")  # a dict, since functions are not saved
    assert plain["step"] == 1
    for name in ("params", "opt_state"):
        assert jax.tree.structure(plain[name]) == jax.tree.structure(getattr(state, name))
        assert bits(plain[name]) == bits(getattr(state, name))


# Dataclasses


class MappableDataclass(Mapping[str, Any]):
    """What chex adds to a dataclass: it is a mapping as well, and its fields are known by name."""

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)


@dataclasses.dataclass(kw_only=True)
class Rollout(MappableDataclass):
    observations: Any
    step: int
    inner: Any = None


def _flatten_rollout(rollout: Rollout) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(rollout.__dict__))
    return [(GetAttrKey(name), rollout[name]) for name in names], names


def _unflatten_rollout(names: tuple[str, ...], values: Iterable[Any]) -> Rollout:
    made = object.__new__(Rollout)
    made.__dict__.update(zip(names, values, strict=True))
    return made


jax.tree_util.register_pytree_with_keys(Rollout, _flatten_rollout, _unflatten_rollout)


def test_mappable_dataclasses(tmp_path: Path):
    """As `chex.dataclass` makes them: with keyword arguments alone, flattened in sorted order."""
    rollout = Rollout(
        step=3, observations={"x": jnp.ones(2)}, inner=Rollout(observations=jnp.arange(3), step=4)
    )
    ostraka.save(tmp_path / "c", {"rollout": rollout})
    like = Rollout(
        step=0,
        observations={"x": jnp.zeros(2)},
        inner=Rollout(observations=jnp.zeros(3, jnp.int32), step=0),
    )
    for restored in (
        ostraka.restore(tmp_path / "c", like={"rollout": like})["rollout"],
        ostraka.restore(tmp_path / "c")["rollout"],
    ):
        assert type(restored) is Rollout
        assert type(restored.inner) is Rollout
        assert bits(restored) == bits(rollout)
        assert (restored.step, restored.inner.step) == (3, 4)
