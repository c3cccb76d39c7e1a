"""What can be saved can be restored: what could not come back is refused before it is written."""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, struct
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka import Manager
from ostraka.errors import InvalidTree, Mismatch, PartialRestore
from programs import run_quietly


def round_trips(path: Path, tree: Any) -> list[Any]:
    ostraka.save(path, tree)
    assert ostraka.verify(path).ok
    return [ostraka.restore(path), ostraka.restore(path, like=tree)]


# Statics


@struct.dataclass
class Settings:
    weight: Any
    other: Any = struct.field(pytree_node=False, default=None)


def test_a_static_that_can_not_be_written_is_kept_by_the_template(tmp_path: Path):
    statics = {"f": len, "o": object(), "class": jnp.float32, "set": {1}, "lambda": lambda: 1}
    tree = {name: Settings(jnp.ones(2), other=static) for name, static in statics.items()}
    plain, like = round_trips(tmp_path / "c", tree)
    for name, static in statics.items():
        assert like[name].other is static
        assert list(plain[name]) == ["weight"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A dataclass with a constructor of its own, as every module of Equinox is."""

    weight: jax.Array
    bias: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    def __init__(self, size: int, *, key: Any):
        raise AssertionError("a restore must not call this")


def put_together(size: int, parts: Any) -> Layer:
    made = object.__new__(Layer)
    for name, value in (("weight", parts[0]), ("bias", parts[1]), ("size", size)):
        object.__setattr__(made, name, value)
    return made


def take_apart(layer: Layer) -> Any:
    key = jax.tree_util.GetAttrKey
    return [(key("weight"), layer.weight), (key("bias"), layer.bias)], layer.size


jax.tree_util.register_pytree_with_keys(Layer, take_apart, put_together)


def make_layer(size: int) -> Layer:
    return put_together(size, [jnp.ones(size), jnp.zeros(size)])


def test_constructors_are_not_called(tmp_path: Path):
    for restored in round_trips(tmp_path / "c", {"layer": make_layer(3)}):
        assert type(restored["layer"]) is Layer
        assert restored["layer"].size == 3
        assert restored["layer"].weight.tolist() == [1, 1, 1]
    elsewhere = """
import sys
import ostraka
print(sorted(ostraka.restore(sys.argv[1] + "/c")["layer"]))
"""
    assert run_quietly(elsewhere, tmp_path) == "['bias', 'weight']\n"


# Functions and structure


def make_model() -> None:
    pass


def train(model: Any) -> None:
    pass


class Activated(nnx.Module):
    def __init__(self, activation: Any):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.activation = activation


@jax.tree_util.register_pytree_with_keys_class
class Block:
    """As a module of Equinox is: arrays and functions are its leaves."""

    def __init__(self, weight: Any, activation: Any):
        self.weight, self.activation = weight, activation

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        return [(key("weight"), self.weight), (key("activation"), self.activation)], None

    @classmethod
    def tree_unflatten(cls, _: Any, parts: Any) -> "Block":
        return cls(*parts)


def test_functions_of_a_class_are_left_to_the_template(tmp_path: Path):
    nested = {"inner": [jnp.zeros(1), jax.jit(jnp.sin)]}
    tree = {"block": Block(jnp.ones(2), jax.nn.relu), "more": Block(nested, make_model)}
    ostraka.save(tmp_path / "c", tree)
    assert ostraka.verify(tmp_path / "c").ok
    for restored in (
        ostraka.restore(tmp_path / "c", like=tree),
        ostraka.restore(tmp_path / "c", into=tree),
    ):
        assert restored["block"].activation is jax.nn.relu
        assert restored["more"].activation is make_model
        assert restored["more"].weight["inner"][1] is nested["inner"][1]
    with pytest.warns(PartialRestore, match=r"left out 3 leaves whose value is a function \('bl"):
        restored = ostraka.restore(tmp_path / "c")
    assert set(restored["block"]) == {"weight"}
    with pytest.raises(
        Mismatch, match=r"'block/activation': the checkpoint has the function .*rel"
    ):
        ostraka.restore(tmp_path / "c", like={**tree, "block": Block(jnp.ones(2), 3)})


def test_structures_that_hold_functions_are_saved(tmp_path: Path):
    tree = {
        "train state": TrainState.create(apply_fn=train, params=jnp.ones(2), tx=optax.adam(1e-3)),
        "injected": optax.inject_hyperparams(optax.adam)(1e-3).init(jnp.ones(2)),
        "partial": jax.tree_util.Partial(train, jnp.ones(2)),
        "module": Activated(jax.nn.relu),
        "optimizer": nnx.Optimizer(Activated(make_model), optax.adam(1e-3), wrt=nnx.Param),
        "split": nnx.split(Activated(make_model)),
        "struct": Settings({"f": make_model}, other=make_model),
    }
    ostraka.save(tmp_path / "c", tree)
    restored = ostraka.restore(tmp_path / "c", like=tree)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)


# A slip: a function in place of its result, nothing in place of a model


FUNCTIONS: dict[str, tuple[Any, str]] = {
    "none": (lambda: make_model, r"the function make_model \(did you mean make_model\(\)\?\); lea"),
    "some": (lambda: train, r"the function train \(did you mean train\(…\)\?\)"),
    "jit": (lambda: jax.jit(train), r"the function train \(did you mean train\(…\)\?\)"),
    "partial": (lambda: partial(train, 1), r"a partial of the function train \(did you mean train"),
    "lambda": (lambda: lambda: 1, r"a lambda \(did you mean its result\?\)"),
    "method": (lambda: nn.Dense(3).init, r"the function init \(did you mean init\(…\)\?\)"),
    "linen": (
        lambda: nn.Dense(3),
        r"a Dense, which holds no values \(did you mean its \.init\(…\)",
    ),
    "optax": (
        lambda: optax.adamw(1e-3),
        r"a named tuple of functions, Gradient\w+ \(did you mean tx.init",
    ),
    "chain": (
        lambda: optax.chain(optax.clip(1.0), optax.adam(1e-3)),
        r"a named tuple .* tx.init\(",
    ),
    "mock": (Mock, r"a unittest.mock.Mock, which can be called"),
}


def test_functions_in_place_of_their_results_are_refused(tmp_path: Path):
    with Manager(tmp_path / "run", asynchronous=False) as manager:
        for make, message in FUNCTIONS.values():
            tree = {"w": np.ones(1), "m": [make()]}
            for save in (
                partial(ostraka.save, tmp_path / "c"),
                partial(ostraka.save_async, tmp_path / "c"),
                partial(manager.save, 1),
                ostraka.plan,
            ):
                with pytest.raises(
                    InvalidTree, match=f"functions can't be saved: 'm/0' is {message}"
                ):
                    save(tree)
        assert manager.steps() == []
    assert not (tmp_path / "c").exists()


def test_functions_that_are_refused_are_listed(tmp_path: Path):
    def refused(tree: Any) -> str:
        with pytest.raises(InvalidTree, match="functions can't be saved: ") as caught:
            ostraka.save(tmp_path / "c", tree)
        return str(caught.value).removeprefix("functions can't be saved: ")

    assert refused(make_model).startswith("'.' is the function make_model (did you mean")
    assert refused(FrozenDict(f=make_model)).startswith("'f' is the function make_model")
    several = refused([train, len, optax.sgd(1e-3), make_model, optax.sgd(1e-3)])
    assert [part.split(" is ")[0] for part in several.split("?), ")] == ["'0'", "'1'", "'2'"]
    assert several.endswith(
        "(did you mean tx.init(params)?) and 2 more; leave functions out of the tree"
    )


class Bare(nnx.Module):
    pass


NOTHING: dict[str, Any] = {
    "the tree is None; did you forget to return the state": lambda: None,
    "the tree is empty; was it made before the model": dict,
    "the tree is empty; .* or by a filter": list,
    "the tree holds only None and empty containers, as at 'model'": lambda: {"model": {}},
    "only None and empty containers, as at 'a/0'": lambda: {"a": [None], "b": ()},
    "the tree is empty": Bare,
    "only None and empty containers, as at 'm'": lambda: {"m": Bare()},
    "the tree is empty;": lambda: nnx.state(Activated(len), nnx.BatchStat),
    "the tree is a flax.*GraphDef alone; did you mean its state": lambda: nnx.split(Bare())[0],
}


def test_a_tree_without_values_is_refused(tmp_path: Path):
    with Manager(tmp_path / "run", asynchronous=False) as manager:
        for message, make in NOTHING.items():
            for save in (
                partial(ostraka.save, tmp_path / "c"),
                partial(ostraka.save_async, tmp_path / "c"),
                partial(manager.save, 1),
                partial(manager.save, 1, force=True),
            ):
                with pytest.raises(InvalidTree, match=f"there is nothing to save: .*{message}"):
                    save(make())
        assert manager.steps() == []
    assert not (tmp_path / "c").exists()


EMPTY: dict[str, Any] = {
    "array": {"model": {}, "more": [None, ()], "w": np.ones(1)},
    "number": {"model": {}, "step": 0},
    "text": {"model": {}, "name": ""},
    "EmptyState": {"opt": (optax.EmptyState(), optax.EmptyState())},
    "static": Settings(None),
    "root": 0,
}


def test_empty_branches_are_kept_beside_a_value(tmp_path: Path):
    for name, tree in EMPTY.items():
        for restored in round_trips(tmp_path / name, tree):
            assert jax.tree.structure(restored) == jax.tree.structure(tree), name


# At the edges


def test_a_tree_as_deep_as_can_be_is_read_from_a_deep_stack(tmp_path: Path):
    tree: Any = jnp.ones(1)
    for _ in range(199):
        tree = {"k": tree}
    ostraka.save(tmp_path / "c", tree)

    def at_depth(depth: int) -> Any:
        return ostraka.open(tmp_path / "c") if depth == 0 else at_depth(depth - 1)

    assert len(at_depth(sys.getrecursionlimit() - 500)) == 1


# In place


class WithTuple(nnx.Module):
    def __init__(self, value: float):
        self.kernel = nnx.Param(jnp.full(2, value))
        self.table = nnx.data((jnp.full(2, value),))


def test_into_refuses_before_it_changes_anything(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"a": nnx.Param(jnp.zeros(2)), "m": WithTuple(0.0)})
    first, module = nnx.Param(jnp.ones(2)), WithTuple(1.0)
    with pytest.raises(InvalidTree, match="into= can't change the object at 'm' in place"):
        ostraka.restore(tmp_path / "c", into={"a": first, "m": module})
    assert first[...].tolist() == [1, 1]
    assert module.kernel[...].tolist() == [1, 1]
    restored = ostraka.restore(tmp_path / "c", like={"m": module})["m"]
    assert restored.table[0].tolist() == [0, 0]


# What a template asks for beyond shape, dtype and sharding


def test_a_layout_is_restored_as_the_template_has_it(tmp_path: Path):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    layout = Format(Layout(major_to_minor=(1, 0)), NamedSharding(mesh, P("a", "b")))
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    ostraka.save(tmp_path / "c", {"w": jnp.asarray(values)})
    abstract = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=layout)
    array = jax.device_put(jnp.zeros((8, 4)), layout)
    ways: list[Any] = [
        ostraka.restore(tmp_path / "c", like={"w": abstract})["w"],
        ostraka.restore(tmp_path / "c", like={"w": array})["w"],
        ostraka.restore(tmp_path / "c", into={"w": nnx.Param(array)})["w"].get_value(),
    ]
    for found in ways:
        assert found.format.layout.major_to_minor == (1, 0)
        assert found.sharding.is_equivalent_to(array.sharding, 2)
        np.testing.assert_array_equal(found, values)
        ostraka.save(tmp_path / "again", {"w": found})
        np.testing.assert_array_equal(ostraka.restore(tmp_path / "again")["w"], values)
