"""NNX objects anywhere in a tree: what is saved, under which names, and what comes back."""

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import ostraka
from nnx_models import (
    Block,
    assert_same,
    bits,
    make_block,
    make_optimizer,
    paths_of,
    train,
    trained,
)


class Mode(enum.IntEnum):
    FAST = 1


class Quantity(nnx.Variable):
    """A kind of variable of our own."""


class Adapter(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.base = nnx.Linear(4, 4, rngs=rngs)
        self.lora = nnx.LoRA(4, 2, 4, rngs=rngs)
        self.quantity = Quantity(jnp.arange(5))
        self.cache = nnx.Cache(jnp.zeros((2, 3)))
        self.seen = nnx.Intermediate((jnp.ones(2), jnp.zeros(3)))


def round_trip(path: Path, tree: Any, like: Any) -> Any:
    ostraka.save(path, tree)
    return ostraka.restore(path, like=like)


class Tied(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.head = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.output = self.embed.embedding
        self.shared = nnx.List([self.head, self.head])


class Scaled(nnx.Variable):
    """Reads as twice what it holds, and holds half of what is written."""

    def get_value(self, **options: Any) -> Any:
        return super().get_value(**options) * 2

    def set_value(self, value: Any, **options: Any) -> None:
        super().set_value(value / 2, **options)


def make_both(seed: int) -> dict[str, Any]:
    model = make_block(seed)
    optimizer = make_optimizer(model)
    if seed == 0:
        model, optimizer = trained()
    return {"model": model, "optimizer": optimizer, "step": seed, "note": str(seed)}


def make_lists(seed: int) -> nnx.Module:
    rngs = nnx.Rngs(seed)
    return nnx.Dict(
        many=nnx.List([nnx.Param(jnp.full(2, float(seed))), nnx.Linear(1, 2, rngs=rngs)]),
        more=nnx.Dict({"a/b": nnx.Param(jnp.full(3, float(seed)))}),
        chain=nnx.Sequential(jax.nn.relu, nnx.Linear(2, 2, rngs=rngs), jax.nn.relu),
        twelve=nnx.List([nnx.Param(jnp.full(2, float(seed + n))) for n in range(12)]),
    )


def make_rngs(seed: int) -> nnx.Rngs:
    rngs = nnx.Rngs(seed, params=seed + 1, dropout=jax.random.key(seed + 2, impl="rbg"))
    rngs.dropout()
    return rngs


def make_variables(seed: int) -> dict[str, nnx.Variable]:
    value = jnp.full(2, float(seed))
    return {
        "param": nnx.Param(value),
        "own": Quantity(value),
        "scaled": Scaled(value),
        "numpy": nnx.Variable(np.full(3, seed)),
    }


def make_labelled(seed: int) -> nnx.Optimizer[Any]:
    """Its state has keys that are no text."""
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    both = {True: optax.adam(1e-2), 1.5: optax.sgd(1e-2, 0.9)}

    def pick(params: Any) -> Any:
        return jax.tree.map(lambda x: True if x.ndim > 1 else 1.5, params)

    optimizer = nnx.Optimizer(model, optax.multi_transform(both, pick), wrt=nnx.Param)
    grads = jax.tree.map(lambda x: jnp.full_like(x, seed + 1), nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    return optimizer


def make_norm(kind: Any) -> Callable[[int], Any]:
    """Its state has tuples as keys."""
    return lambda seed: kind(nnx.Linear(3, 4, rngs=nnx.Rngs(seed)), rngs=nnx.Rngs(seed))


MODELS: dict[str, Callable[[int], Any]] = {
    "both": make_both,
    "one object": lambda seed: nnx.ModelAndOptimizer(Tied(seed), optax.adam(1e-2), wrt=nnx.Param),
    "containers": lambda seed: {"runs": [(Tied(seed), 1), (Tied(seed + 1), seed)], "none": None},
    "state": lambda seed: nnx.state(make_block(seed)),
    "filtered": lambda seed: nnx.state(make_block(seed), nnx.Param),
    "split": lambda seed: nnx.split(Tied(seed)),
    "variables": make_variables,
    "one variable": lambda seed: nnx.Param(jnp.full(3, float(seed))),
    "every kind": lambda seed: Adapter(rngs=nnx.Rngs(seed)),
    "lists": make_lists,
    "no variables": lambda seed: {"drop": nnx.Dropout(0.5), "n": seed},
    "tied": Tied,
    "rngs": make_rngs,
    "labels": make_labelled,
    "weight norm": make_norm(nnx.WeightNorm),
    "spectral norm": make_norm(nnx.SpectralNorm),
}
PATHS = {
    "both": {
        "model/first/kernel",
        "model/layers/0/bias",
        "model/sequence/layers/2/kernel",
        "model/norm/mean",
        "model/table",
        "model/dropout/rngs/key",
        "optimizer/step",
        "optimizer/opt_state/0/mu/layers/0/kernel",
        "optimizer/opt_state/0/count",
    },
    "one object": {"model/embed/embedding", "model/head/kernel"},
    "lists": {"many/0", "more/a~1b", "chain/layers/1/kernel", "twelve/11"},
}
"""Some names of leaves, after attributes."""


@pytest.mark.parametrize("name", MODELS)
def test_it_comes_back_by_a_template_an_abstract_one_and_in_place(tmp_path: Path, name: str):
    make = MODELS[name]
    tree, like, target = make(0), make(1), make(2)
    expected, before = bits(tree), bits(like)
    ostraka.save(tmp_path / "c", tree)
    found = [ostraka.restore(tmp_path / "c", like=like)]
    assert bits(like) == before
    if name not in ("both", "split", "no variables", "containers", "variables"):  # No plain values
        found.append(ostraka.restore(tmp_path / "c", like=nnx.eval_shape(lambda: make(1))))
        found.append(ostraka.restore(tmp_path / "c", into=nnx.eval_shape(lambda: make(1))))
    found.append(ostraka.restore(tmp_path / "c", into=target))
    for restored in found:
        assert_same(restored, tree)
    assert bits(tree) == expected
    paths = paths_of(tmp_path / "c")
    assert PATHS.get(name, set()) <= paths
    assert not any("value" in path for path in paths)


def test_restored_objects_work_as_the_saved_ones(tmp_path: Path):
    tree, like = make_both(0), make_both(1)
    restored = round_trip(tmp_path / "c", tree, like)
    assert restored["model"] is not like["model"]
    assert restored["model"].name == "block"
    x = jnp.full((2, 4), 3.0)
    for _ in range(2):  # Dropout draws new numbers.
        losses = [train(state["model"], state["optimizer"], x) for state in (tree, restored)]
        assert losses[0] == losses[1]
    assert_same(restored, tree)
    rngs, again = make_rngs(0), round_trip(tmp_path / "rngs", make_rngs(0), make_rngs(1))
    for stream in ("default", "params", "dropout"):
        assert bits(again[stream]()) == bits(rngs[stream]())
    drops = [{"drop": nnx.Dropout(rate), "n": n} for rate, n in ((0.5, 1), (0.1, 0))]
    dropped = round_trip(tmp_path / "drop", *drops)
    assert (dropped["drop"].rate, dropped["n"]) == (0.1, 1)


# States and graph definitions


def nested_state() -> nnx.State:
    """States in a state, and dicts, which JAX tells apart."""
    return nnx.State(
        {
            "state": nnx.State(
                {"v": nnx.Param(jnp.ones(2)), "deep": {"w": nnx.Param(jnp.ones(3))}}
            ),
            "dict": {5: nnx.BatchStat(jnp.zeros(2)), 3: nnx.Param(jnp.arange(4))},
            "array": jnp.arange(3.0),
        }
    )


@pytest.mark.parametrize(
    "make", [lambda: nnx.state(make_block()), nested_state], ids=["own", "nested"]
)
def test_a_state_has_the_same_containers_again(tmp_path: Path, make: Any):
    """Below the top Flax has dicts in a state: other containers would not go along with it."""
    state = make()
    ostraka.save(tmp_path / "c", {"state": state})
    abstract = jax.eval_shape(lambda: state)
    for restored in (
        ostraka.restore(tmp_path / "c", like={"state": state})["state"],
        ostraka.restore(tmp_path / "c", like={"state": abstract})["state"],
        ostraka.restore(tmp_path / "c", as_state=True)["state"],
    ):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(restored) == bits(state)
    plain = ostraka.restore(tmp_path / "c")["state"]
    assert type(plain) is type(plain.get("state", {})) is dict
    assert [*bits(plain).values()] == [*bits(state).values()]


@pytest.mark.parametrize("as_module", [True, False])
def test_module_and_state_have_the_same_leaves(tmp_path: Path, as_module: bool):
    """What was saved as the one can be restored as the other: splitting is never needed."""
    model, _ = trained()
    other = make_block(1)
    saved, like = (model, nnx.state(other)) if as_module else (nnx.state(model), other)
    restored = round_trip(tmp_path / "c", saved, like)
    assert type(restored) is type(like)
    assert bits(nnx.state(restored) if isinstance(restored, Block) else restored) == bits(
        nnx.state(model)
    )


def test_tied_variables_are_saved_once_and_stay_tied(tmp_path: Path):
    ostraka.save(tmp_path / "c", Tied())
    assert paths_of(tmp_path / "c") == {"embed/embedding", "head/kernel"}
    for restored in (
        ostraka.restore(tmp_path / "c", like=Tied(1)),
        ostraka.restore(tmp_path / "c", into=Tied(1)),
        ostraka.restore(tmp_path / "c", like=nnx.eval_shape(Tied)),
    ):
        assert restored.output is restored.embed.embedding
        assert restored.shared[0] is restored.shared[1] is restored.head


def test_keys_that_are_left_out_and_keys_with_a_slash(tmp_path: Path):
    ostraka.save(tmp_path / "c", make_lists(1))
    plain = ostraka.restore(tmp_path / "c")
    assert list(plain["chain"]["layers"]) == [1]
    assert np.array_equal(plain["more"]["a/b"], [1, 1, 1])


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_variables_that_are_references(tmp_path: Path, kind: str):
    """Flax's newer ways of holding a value are no different on disk."""
    makes = [nnx.Param(jnp.full(2, value), **{kind: True}) for value in (3.0, 0.0, 0.0)]
    restored = round_trip(tmp_path / "c", {"v": makes[0]}, {"v": makes[1]})["v"]
    assert getattr(restored, kind)
    assert np.array_equal(restored[...], [3, 3])
    ostraka.restore(tmp_path / "c", into={"v": makes[2]})
    assert np.array_equal(makes[2][...], [3, 3])
    assert np.array_equal(ostraka.restore(tmp_path / "c")["v"], [3, 3])


# Metadata of variables


def test_metadata_of_variables_is_kept(tmp_path: Path):
    spec = P(("fsdp", "tp"), None)
    about: dict[str, Any] = {
        "text": "x",
        "rank": 3,
        "range": (0.0, float("nan")),
        "mode": Mode.FAST,
        "also": [1, "x"],
        "names": ("fsdp", None),
        "out_sharding": spec,
        "eager_sharding": False,
    }
    variable = nnx.Param(jnp.ones((4, 2)), **about)
    like = {"v": variable.replace(jnp.zeros((4, 2)))}
    found = round_trip(tmp_path / "c", {"v": variable}, like)["v"].get_metadata()
    assert {name: found[name] for name in about} == about
    restored = ostraka.restore(tmp_path / "c", as_state=True)["v"]
    assert type(restored) is nnx.Param
    found = restored.get_metadata()
    for name in ("text", "rank", "range", "mode", "also", "names"):
        assert repr(found[name]) == repr(about[name]), name
    assert P(*found["out_sharding"]) == spec


# Values at the time of the call


def test_later_steps_do_not_reach_into_a_save():
    path = "memory://test_nnx/donation"
    model, optimizer = trained()
    counts = np.arange(3)
    expected = bits((model, optimizer))
    ostraka.save(path, {"model": model, "optimizer": optimizer, "counts": counts})
    counts += 1

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Block, optimizer: nnx.Optimizer) -> None:
        grads = nnx.grad(lambda m: jnp.sum(m(jnp.ones((2, 4)))))(model)
        optimizer.update(model, grads)

    for _ in range(2):
        step(model, optimizer)
    other = make_block(1)
    like = {"model": other, "optimizer": make_optimizer(other), "counts": np.zeros(3, int)}
    restored = ostraka.restore(path, like=like)
    assert bits((restored["model"], restored["optimizer"])) == expected
    assert np.array_equal(restored["counts"], [0, 1, 2])
