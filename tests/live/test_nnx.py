"""NNX objects anywhere in a tree: what is saved, under which names, and what comes back."""

import warnings
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
from ostraka.errors import InvalidTree, Mismatch
from places import Place


class Quantity(nnx.Variable):
    """A kind of variable of our own."""


class Adapter(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.base = nnx.Linear(4, 4, rngs=rngs)
        self.lora = nnx.LoRA(4, 2, 4, rngs=rngs)
        self.quantity = Quantity(jnp.arange(5))
        self.cache = nnx.Cache(jnp.zeros((2, 3)))
        self.seen = nnx.Intermediate((jnp.ones(2), jnp.zeros(3)))


def round_trip(path: Place, tree: Any, like: Any) -> Any:
    ostraka.save(path, tree)
    return ostraka.restore(path, like=like)


# Modules and optimizers


def test_a_module_comes_back_as_a_module(place: Place):
    model, _ = trained()
    like = make_block(1)
    before = bits(like)
    restored = round_trip(place / "c", model, like)
    assert_same(restored, model)
    assert restored.name == "block"
    assert restored is not like
    assert bits(like) == before
    model.eval()
    restored.eval()
    x = jnp.ones((3, 4))
    assert np.array_equal(restored(x), model(x))


def test_leaves_are_named_after_attributes(place: Place):
    model, optimizer = trained()
    ostraka.save(place / "c", {"model": model, "optimizer": optimizer})
    found = paths_of(place / "c")
    assert {
        "model/first/kernel",
        "model/layers/0/bias",
        "model/layers/1/kernel",
        "model/sequence/layers/0/kernel",
        "model/sequence/layers/2/kernel",
        "model/norm/mean",
        "model/table",
        "model/dropout/rngs/key",
        "model/dropout/rngs/count",
        "optimizer/step",
        "optimizer/opt_state/0/mu/layers/0/kernel",
        "optimizer/opt_state/0/count",
    } <= found
    assert not any("value" in path for path in found)


def test_model_and_optimizer_in_one_dict(place: Place):
    model, optimizer = trained()
    other = make_block(1)
    tree = {"model": model, "optimizer": optimizer, "step": 2, "note": "x"}
    like = {"model": other, "optimizer": make_optimizer(other), "step": 0, "note": ""}
    restored = round_trip(place / "c", tree, like)
    assert_same(restored["model"], model)
    assert_same(restored["optimizer"], optimizer)
    assert (restored["step"], restored["note"]) == (2, "x")
    x = jnp.full((2, 4), 3.0)
    assert train(restored["model"], restored["optimizer"], x) == train(model, optimizer, x)
    assert_same(restored["model"], model)
    assert_same(restored["optimizer"], optimizer)


def test_model_and_optimizer_in_one_object(place: Place):
    def make(seed: int) -> nnx.ModelAndOptimizer:
        return nnx.ModelAndOptimizer(make_block(seed), optax.adam(1e-2), wrt=nnx.Param)

    both = make(0)

    def loss_of(model: Any) -> jax.Array:
        return jnp.sum(model(jnp.ones((2, 4))) ** 2)

    both.update(nnx.grad(loss_of)(both.model))
    restored = round_trip(place / "c", both, make(1))
    assert_same(restored, both)
    assert "model/first/kernel" in paths_of(place / "c")
    assert int(restored.step[...]) == 1


def test_modules_deep_in_plain_containers(place: Place):
    tree = {"runs": [(make_block(0), 1), (make_block(1), 2)], "none": None}
    like = {"runs": [(make_block(2), 0), (make_block(3), 0)], "none": None}
    restored = round_trip(place / "c", tree, like)
    assert_same(restored["runs"][1][0], tree["runs"][1][0])
    assert bits(restored) == bits(tree)


# States, graph definitions, variables


def test_a_state_comes_back_as_a_state(place: Place):
    model, _ = trained()
    restored = round_trip(place / "c", nnx.state(model), nnx.state(make_block(1)))
    assert_same(restored, nnx.state(model))
    rebuilt = nnx.merge(nnx.graphdef(model), restored)
    assert_same(rebuilt, model)


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
def test_a_state_has_the_same_containers_again(place: Place, make: Any):
    """Below the top Flax has dicts in a state: other containers would not go along with it."""
    state = make()
    ostraka.save(place / "c", {"state": state})
    abstract = jax.eval_shape(lambda: state)
    for restored in (
        ostraka.restore(place / "c", like={"state": state})["state"],
        ostraka.restore(place / "c", like={"state": abstract})["state"],
        ostraka.restore(place / "c", as_state=True)["state"],
    ):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert bits(restored) == bits(state)
        assert jax.tree.map(jnp.shape, restored) == jax.tree.map(jnp.shape, state)


def test_a_state_without_a_template_is_made_of_dicts(place: Place):
    ostraka.save(place / "c", {"state": nested_state()})
    plain = ostraka.restore(place / "c")["state"]
    assert type(plain["state"]["deep"]) is dict
    assert sorted(plain["dict"]) == [3, 5]
    assert isinstance(plain["dict"][3], jax.Array)


def test_a_graph_definition_beside_a_state(place: Place):
    model, _ = trained()
    restored = round_trip(place / "c", nnx.split(model), nnx.split(make_block(1)))
    assert_same(nnx.merge(*restored), model)


def test_a_filtered_state(place: Place):
    model, _ = trained()
    params = nnx.state(model, nnx.Param)
    restored = round_trip(place / "c", params, nnx.state(make_block(1), nnx.Param))
    assert_same(restored, params)
    other = make_block(1)
    nnx.update(other, restored)
    assert bits(nnx.state(other, nnx.Param)) == bits(params)


@pytest.mark.parametrize("as_module", [True, False])
def test_module_and_state_have_the_same_leaves(place: Place, as_module: bool):
    """What was saved as the one can be restored as the other: splitting is never needed."""
    model, _ = trained()
    other = make_block(1)
    saved, like = (model, nnx.state(other)) if as_module else (nnx.state(model), other)
    restored = round_trip(place / "c", saved, like)
    assert type(restored) is type(like)
    assert bits(nnx.state(restored) if isinstance(restored, Block) else restored) == bits(
        nnx.state(model)
    )


def test_a_single_variable(place: Place):
    kernel = make_block().first.kernel
    tree = {"kernel": kernel, "own": Quantity(jnp.arange(3))}
    like = {"kernel": nnx.Param(jnp.zeros((4, 8))), "own": Quantity(jnp.zeros(3, jnp.int32))}
    restored = round_trip(place / "c", tree, like)
    assert type(restored["kernel"]) is nnx.Param
    assert type(restored["own"]) is Quantity
    assert bits(restored) == bits(tree)
    assert paths_of(place / "c") == {"kernel", "own"}


def test_a_variable_as_the_whole_tree(place: Place):
    restored = round_trip(place / "c", nnx.Param(jnp.arange(3.0)), nnx.Param(jnp.zeros(3)))
    assert type(restored) is nnx.Param
    assert np.array_equal(restored[...], [0, 1, 2])


def test_every_kind_of_variable(place: Place):
    model = Adapter(rngs=nnx.Rngs(0))
    restored = round_trip(place / "c", model, Adapter(rngs=nnx.Rngs(1)))
    assert_same(restored, model)
    assert type(restored.lora.lora_a) is nnx.LoRAParam
    assert type(restored.quantity) is Quantity
    assert type(restored.seen.get_value()) is tuple


def test_a_cache_of_decoding(place: Place):
    def make(seed: int) -> nnx.MultiHeadAttention:
        attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(seed))
        attention.init_cache((1, 5, 8))
        return attention

    attention = make(0)
    attention(jnp.ones((1, 1, 8)))
    restored = round_trip(place / "c", attention, make(1))
    assert_same(restored, attention)
    assert int(restored.cache_index[...]) == 1
    token = jnp.full((1, 1, 8), 2.0)
    assert np.array_equal(restored(token), attention(token))


def test_lists_dicts_and_sequences(place: Place):
    def make(seed: int) -> nnx.Module:
        rngs = nnx.Rngs(seed)
        return nnx.Dict(
            many=nnx.List([nnx.Param(jnp.full(2, float(seed))), nnx.Linear(1, 2, rngs=rngs)]),
            more=nnx.Dict({"a/b": nnx.Param(jnp.full(3, float(seed)))}),
            chain=nnx.Sequential(jax.nn.relu, nnx.Linear(2, 2, rngs=rngs), jax.nn.relu),
        )

    model = make(1)
    restored = round_trip(place / "c", model, make(2))
    assert_same(restored, model)
    assert "many/0" in paths_of(place / "c")
    assert "chain/layers/1/kernel" in paths_of(place / "c")
    plain = ostraka.restore(place / "c")
    assert list(plain["chain"]["layers"]) == [1]
    assert np.array_equal(plain["more"]["a/b"], [1, 1, 1])


def test_more_than_ten_layers_keep_their_order(place: Place):
    def make(start: int) -> nnx.List:
        return nnx.List([nnx.Param(jnp.full(2, float(start + n))) for n in range(12)])

    restored = round_trip(place / "c", make(0), make(100))
    assert [float(p[0]) for p in restored] == list(range(12))


def test_a_module_without_variables(place: Place):
    restored = round_trip(
        place / "c", {"drop": nnx.Dropout(0.5), "n": 1}, {"drop": nnx.Dropout(0.1), "n": 0}
    )
    assert type(restored["drop"]) is nnx.Dropout
    assert restored["drop"].rate == 0.1
    assert restored["n"] == 1


# Tied variables


class Tied(nnx.Module):
    def __init__(self, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.head = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.output = self.embed.embedding
        self.shared = nnx.List([self.head, self.head])


def test_tied_variables_are_saved_once_and_stay_tied(place: Place):
    model = Tied()
    restored = round_trip(place / "c", model, Tied(1))
    assert paths_of(place / "c") == {"embed/embedding", "head/kernel"}
    assert restored.output is restored.embed.embedding
    assert restored.shared[0] is restored.head
    assert restored.shared[1] is restored.head
    assert_same(restored, model)


def test_tied_variables_stay_tied_in_place_and_from_abstract(place: Place):
    model = Tied()
    ostraka.save(place / "c", model)
    target = Tied(1)
    ostraka.restore(place / "c", into=target)
    assert target.output is target.embed.embedding
    assert_same(target, model)
    restored = ostraka.restore(place / "c", like=nnx.eval_shape(Tied))
    assert restored.output is restored.embed.embedding
    assert_same(restored, model)


def test_a_checkpoint_of_untied_weights_does_not_fit_tied_ones(place: Place):
    model = Tied()
    model.output = nnx.Param(jnp.zeros((8, 4)))
    ostraka.save(place / "c", model)
    with pytest.raises(Mismatch, match="'output' is in the checkpoint but not in `like`"):
        ostraka.restore(place / "c", like=Tied())


# Metadata of variables


def test_metadata_of_variables_is_kept(place: Place):
    variable = nnx.Param(
        jnp.ones((4, 2)), out_sharding=("fsdp", None), eager_sharding=False, tag="x", rank=3
    )
    ostraka.save(place / "c", {"v": variable})
    restored = ostraka.restore(place / "c", as_state=True)["v"]
    assert type(restored) is nnx.Param
    found = restored.get_metadata()
    assert found["tag"] == "x"
    assert found["rank"] == 3
    assert tuple(found["out_sharding"]) == ("fsdp", None)


def test_metadata_of_partition_specs_is_kept(place: Place):
    spec = P(("fsdp", "tp"), None)
    variable = nnx.Param(jnp.ones((4, 2)), out_sharding=spec, eager_sharding=False)
    restored = round_trip(place / "c", {"v": variable}, {"v": variable.replace(jnp.zeros((4, 2)))})
    assert restored["v"].get_metadata()["out_sharding"] == spec
    as_state = ostraka.restore(place / "c", as_state=True)["v"]
    assert P(*as_state.get_metadata()["out_sharding"]) == spec


class Scaled(nnx.Variable):
    """Reads as twice what it holds, and holds half of what is written."""

    def get_value(self, **options: Any) -> Any:
        return super().get_value(**options) * 2

    def set_value(self, value: Any, **options: Any) -> None:
        super().set_value(value / 2, **options)


def test_overloads_of_variables_do_not_change_values(place: Place):
    """What is saved and restored is the value that is held, not what is made of it."""
    ostraka.save(place / "c", {"v": Scaled(jnp.full(2, 3.0))})
    restored = ostraka.restore(place / "c", like={"v": Scaled(jnp.zeros(2))})["v"]
    assert np.array_equal(restored.get_raw_value(), [3, 3])
    target = Scaled(jnp.zeros(2))
    ostraka.restore(place / "c", into={"v": target})
    assert np.array_equal(target.get_raw_value(), [3, 3])


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_variables_that_are_references(place: Place, kind: str):
    """Flax's newer ways of holding a value are no different on disk."""

    def make(value: float) -> nnx.Param:
        return nnx.Param(jnp.full(2, value), **{kind: True})

    restored = round_trip(place / "c", {"v": make(3.0)}, {"v": make(0.0)})["v"]
    assert getattr(restored, kind)
    assert np.array_equal(restored[...], [3, 3])
    target = make(0.0)
    ostraka.restore(place / "c", into={"v": target})
    assert np.array_equal(target[...], [3, 3])
    assert np.array_equal(ostraka.restore(place / "c")["v"], [3, 3])


def test_numpy_in_variables(place: Place):
    variable = nnx.Variable(np.arange(3))
    restored = round_trip(place / "c", {"v": variable}, {"v": nnx.Variable(np.zeros(3, int))})
    assert type(restored["v"].get_raw_value()) is np.ndarray
    assert np.array_equal(restored["v"].get_raw_value(), [0, 1, 2])


# Random numbers


def test_streams_of_random_numbers_go_on(place: Place):
    rngs = nnx.Rngs(0, params=1, dropout=jax.random.key(2, impl="rbg"))
    rngs.dropout()
    rngs.params()
    like = nnx.Rngs(5, params=5, dropout=jax.random.key(5, impl="rbg"))
    restored = round_trip(place / "c", {"rngs": rngs}, {"rngs": like})["rngs"]
    assert type(restored) is nnx.Rngs
    assert bits(restored) == bits(rngs)
    for stream in ("default", "params", "dropout"):
        assert bits(restored[stream]()) == bits(rngs[stream]())


@pytest.mark.parametrize("abstract", [False, True])
def test_dropout_goes_on_bit_for_bit(place: Place, abstract: bool):
    model, optimizer = trained()
    like = nnx.eval_shape(make_block) if abstract else make_block(9)
    restored = round_trip(place / "c", model, like)
    x = jnp.ones((2, 4))
    for _ in range(3):
        assert np.array_equal(restored(x), model(x))
    assert_same(restored, model)
    assert optimizer.step[...] == 2


# Values at the time of the call


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_later_steps_do_not_reach_into_a_save(place: Place, store: str):
    path = place / "c" if store == "disk" else "memory://test_nnx/donation"
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


def test_steps_with_donation_after_a_restore_do_not_reach_into_another(place: Place):
    model, optimizer = trained()
    expected = bits(model)
    ostraka.save(place / "c", {"model": model, "optimizer": optimizer})
    first = ostraka.restore(place / "c", like={"model": make_block(1)})["model"]
    second = ostraka.restore(place / "c", like={"model": first})["model"]

    @nnx.jit(donate_argnums=0)
    def double(model: Block) -> None:
        nnx.update(model, jax.tree.map(lambda x: x * 2, nnx.state(model, nnx.Param)))

    double(first)
    assert bits(second) == expected
    assert bits(model) == expected


# Plain mistakes


def test_an_abstract_model_has_nothing_to_save(place: Place):
    with pytest.raises(InvalidTree, match=r"leaf '\S+' is abstract .* has no values to save"):
        ostraka.save(place / "c", {"model": nnx.eval_shape(make_block)})
    assert not (place / "c").exists()


def test_a_model_whose_arrays_were_donated(place: Place):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    _, state = nnx.split(model)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    with pytest.raises(InvalidTree, match="leaf 'bias' has been deleted or donated"):
        ostraka.save(place / "c", model)


def test_saving_inside_a_transform(place: Place):
    @nnx.jit
    def step(model: nnx.Linear) -> None:
        ostraka.save(place / "c", model)

    with pytest.raises(InvalidTree, match="traced value: call save outside of jit"):
        step(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_a_template_of_another_model(place: Place):
    ostraka.save(place / "c", {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))})
    with pytest.raises(Mismatch, match="for 3 reasons") as caught:
        ostraka.restore(place / "c", like={"model": nnx.LayerNorm(4, rngs=nnx.Rngs(0))})
    text = str(caught.value)
    assert "'model/scale' is not in the checkpoint" in text
    assert "'model/bias': saved with shape (3,), `like` has (4,)" in text
    assert "'model/kernel' is in the checkpoint but not in `like`" in text


def test_the_class_instead_of_a_model(place: Place):
    ostraka.save(place / "c", {"model": nnx.Linear(2, 3, rngs=nnx.Rngs(0))})
    with pytest.raises(InvalidTree, match="the class Linear itself at 'model', not an instance"):
        ostraka.restore(place / "c", like={"model": nnx.Linear})


def test_a_model_in_the_place_of_its_optimizer(place: Place):
    model, optimizer = trained()
    ostraka.save(place / "c", {"model": model, "optimizer": optimizer})
    with pytest.raises(Mismatch, match=r"'optimizer/first' \(2 leaves\) is not in the checkpoint"):
        ostraka.restore(place / "c", like={"optimizer": model})


def test_another_optimizer(place: Place):
    model, optimizer = trained()
    ostraka.save(place / "c", {"optimizer": optimizer})
    like = nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    with pytest.raises(Mismatch, match=r"'optimizer/opt_state/0/trace' \(12 leaves\) is not in"):
        ostraka.restore(place / "c", like={"optimizer": like})


def test_sharded_variables_come_back_as_they_lie(place: Place):
    mesh = jax.make_mesh((8,), ("x",))
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    sharding = NamedSharding(mesh, P("x", None))
    model.kernel.set_value(jax.device_put(model.kernel.get_value(), sharding))
    restored = round_trip(place / "c", model, model)
    assert restored.kernel.get_value().sharding.is_equivalent_to(sharding, 2)
    assert_same(restored, model)


def test_no_warning_is_given(place: Place):
    """None of Flax's deprecations, either: pytest would hide nothing, but users' logs might."""
    model, optimizer = trained()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ostraka.save(place / "c", {"model": model, "optimizer": optimizer})
        ostraka.restore(place / "c", like={"model": model, "optimizer": optimizer})
        ostraka.restore(place / "c", into={"model": model, "optimizer": optimizer})
        ostraka.restore(place / "c", as_state=True)
    assert not caught
