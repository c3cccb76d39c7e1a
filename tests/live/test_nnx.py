"""NNX objects anywhere in a tree: what is saved, under which names, and what comes back."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
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


def test_a_state_comes_back_as_a_state(tmp_path: Path):
    model, _ = trained()
    restored = round_trip(tmp_path / "c", nnx.state(model), nnx.state(make_block(1)))
    assert_same(restored, nnx.state(model))
    assert_same(nnx.merge(nnx.graphdef(model), restored), model)
    nnx.update(other := make_block(1), restored)
    assert_same(other, model)


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
        assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, state)


def test_a_state_without_a_template_is_made_of_dicts(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"state": nested_state()})
    plain = ostraka.restore(tmp_path / "c")["state"]
    assert type(plain["state"]["deep"]) is dict
    assert sorted(plain["dict"]) == [3, 5]
    assert isinstance(plain["dict"][3], jax.Array)


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


def test_a_cache_of_decoding(tmp_path: Path):
    def make(seed: int) -> nnx.MultiHeadAttention:
        attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(seed))
        attention.init_cache((1, 5, 8))
        return attention

    attention = make(0)
    attention(jnp.ones((1, 1, 8)))
    restored = round_trip(tmp_path / "c", attention, make(1))
    assert_same(restored, attention)
    assert int(restored.cache_index[...]) == 1
    token = jnp.full((1, 1, 8), 2.0)
    assert np.array_equal(restored(token), attention(token))


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
    variable = nnx.Param(
        jnp.ones((4, 2)), out_sharding=("fsdp", None), eager_sharding=False, tag="x", rank=3
    )
    ostraka.save(tmp_path / "c", {"v": variable})
    restored = ostraka.restore(tmp_path / "c", as_state=True)["v"]
    assert type(restored) is nnx.Param
    found = restored.get_metadata()
    assert found["tag"] == "x"
    assert found["rank"] == 3
    assert tuple(found["out_sharding"]) == ("fsdp", None)


def test_metadata_of_partition_specs_is_kept(tmp_path: Path):
    spec = P(("fsdp", "tp"), None)
    variable = nnx.Param(jnp.ones((4, 2)), out_sharding=spec, eager_sharding=False)
    restored = round_trip(
        tmp_path / "c", {"v": variable}, {"v": variable.replace(jnp.zeros((4, 2)))}
    )
    assert restored["v"].get_metadata()["out_sharding"] == spec
    as_state = ostraka.restore(tmp_path / "c", as_state=True)["v"]
    assert P(*as_state.get_metadata()["out_sharding"]) == spec


# Values at the time of the call


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_later_steps_do_not_reach_into_a_save(tmp_path: Path, store: str):
    path = tmp_path / "c" if store == "disk" else "memory://test_nnx/donation"
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


def test_steps_with_donation_after_a_restore_do_not_reach_into_another(tmp_path: Path):
    model, optimizer = trained()
    expected = bits(model)
    ostraka.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    first = ostraka.restore(tmp_path / "c", like={"model": make_block(1)})["model"]
    second = ostraka.restore(tmp_path / "c", like={"model": first})["model"]

    @nnx.jit(donate_argnums=0)
    def double(model: Block) -> None:
        nnx.update(model, jax.tree.map(lambda x: x * 2, nnx.state(model, nnx.Param)))

    double(first)
    assert bits(second) == expected
    assert bits(model) == expected


def test_sharded_variables_come_back_as_they_lie(tmp_path: Path):
    mesh = jax.make_mesh((8,), ("x",))
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    sharding = NamedSharding(mesh, P("x", None))
    model.kernel.set_value(jax.device_put(model.kernel.get_value(), sharding))
    restored = round_trip(tmp_path / "c", model, model)
    assert restored.kernel.get_value().sharding.is_equivalent_to(sharding, 2)
    assert_same(restored, model)


def test_no_warning_is_given(tmp_path: Path):
    """None of Flax's deprecations, either: pytest would hide nothing, but users' logs might."""
    model, optimizer = trained()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ostraka.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
        ostraka.restore(tmp_path / "c", like={"model": model, "optimizer": optimizer})
        ostraka.restore(tmp_path / "c", into={"model": model, "optimizer": optimizer})
        ostraka.restore(tmp_path / "c", as_state=True)
    assert not caught
