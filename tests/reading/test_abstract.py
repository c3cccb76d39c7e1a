"""`Checkpoint.abstract` as a template, and `Checkpoint.num_params`."""

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.errors import InvalidSharding, PartialRestore
from ostraka.sharding import make_mesh
from places import Place


class Pair(NamedTuple):
    first: Any
    second: Any


class Iterator:
    """An object with a state, as an iterator of data."""

    def __init__(self, at: int = 0):
        self.at = at

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make_tree() -> dict[str, Any]:
    mesh = make_mesh({"x": 4, "y": 2})
    tied = jax.device_put(jnp.arange(16.0).reshape(8, 2), NamedSharding(mesh, P("x", "y")))
    host = np.arange(3)
    return {
        "sharded": tied,
        "tied": [tied],
        "free": jnp.ones(3),
        "weak": jnp.asarray(2.0) * 3,
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "host": host,
        "again": (host, np.float16(1.5), np.arange(4.0)),
        "plain": {"n": 7, "f": 1.5, "s": "text", "none": None, "b": b"x", "yes": True},
        "pair": Pair(jnp.zeros(1), OrderedDict(a=1)),
        "optax": optax.adam(0.1).init({"w": jnp.ones(2)}),
        "model": nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
        "data": Iterator(5),
        "empty": {},
    }


def describe(value: Any) -> Any:
    """Everything about a leaf, to be compared."""
    if isinstance(value, jax.Array):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(value) if is_key else value)
        about = (value.committed, value.sharding, bool(value.aval.weak_type))
        return str(value.dtype), data.tolist(), *about
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.tolist()
    return type(value), value


def assert_same(one: Any, other: Any) -> None:
    leaves, structure = jax.tree.flatten(one, is_leaf=lambda x: x is None)
    others, other_structure = jax.tree.flatten(other, is_leaf=lambda x: x is None)
    assert structure == other_structure
    assert [*map(describe, leaves)] == [*map(describe, others)]


def test_as_a_template_it_gives_what_no_template_gives(place: Place):
    ostraka.save(place / "c", make_tree())
    shapes = ostraka.open(place / "c").abstract()
    restored = ostraka.restore(place / "c", like=shapes)
    assert_same(restored, ostraka.restore(place / "c"))
    assert restored["sharded"] is restored["tied"][0]
    assert restored["again"][0] is restored["host"]
    assert restored["data"] == {"at": 5}
    assert not [leaf for leaf in jax.tree.leaves(shapes) if isinstance(leaf, jax.Array)]


def test_arrays_are_shapes_and_plain_values_are_themselves(tmp_path: Path):
    ostraka.save(tmp_path / "c", make_tree())
    shapes = ostraka.open(tmp_path / "c").abstract()
    assert shapes["sharded"] == jax.ShapeDtypeStruct((8, 2), jnp.float32)
    assert shapes["sharded"].sharding is None
    assert (shapes["keys"].shape, shapes["keys"].dtype) == ((4,), make_tree()["keys"].dtype)
    assert shapes["weak"].weak_type
    assert shapes["model"] == {
        "bias": jax.ShapeDtypeStruct((3,), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32),
    }
    assert shapes["plain"] == make_tree()["plain"]
    assert type(shapes["pair"]) is Pair
    host = shapes["host"]
    assert (host.dtype, host.shape, host.strides) == (np.int64, (3,), (0,))  # it takes no memory


@pytest.mark.parametrize("sizes", [{"x": 4, "y": 2}, {"x": 2, "y": 1}, {"y": 2, "x": 2, "z": 2}])
def test_a_mesh_gives_shardings_by_the_saved_specs(tmp_path: Path, sizes: dict[str, int]):
    ostraka.save(tmp_path / "c", make_tree())
    shapes = ostraka.open(tmp_path / "c").abstract(mesh=sizes)
    mesh = make_mesh(sizes)
    assert shapes["sharded"].sharding == NamedSharding(mesh, P("x", "y"))
    assert shapes["key"].sharding == NamedSharding(mesh, P())
    restored = ostraka.restore(tmp_path / "c", like=shapes)
    assert_same(restored, ostraka.restore(tmp_path / "c", mesh=mesh))


@pytest.mark.parametrize(
    "specs",
    [
        P(),
        {"sharded": P("y"), "tied": P("y")},
        {"**/kernel": P("y"), "sharded": P("y")},
        ostraka.sharding.fsdp("x", min_size=1),
    ],
    ids=["one", "tree", "patterns", "preset"],
)
def test_specs_take_the_place_of_the_saved_ones(tmp_path: Path, specs: Any):
    ostraka.save(tmp_path / "c", make_tree())
    mesh = make_mesh({"x": 4, "y": 2})
    shapes = ostraka.open(tmp_path / "c").abstract(mesh=mesh, specs=specs)
    restored = ostraka.restore(tmp_path / "c", like=shapes)
    assert_same(restored, ostraka.restore(tmp_path / "c", mesh=mesh, specs=specs))


def test_shardings_among_the_specs(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"a": jnp.ones(8), "b": jnp.ones(8)})
    own = NamedSharding(make_mesh({"z": 2}), P("z"))
    shapes = ostraka.open(tmp_path / "c").abstract(mesh={"x": 4}, specs={"a": own})
    assert shapes["a"].sharding == own
    assert shapes["b"].sharding.mesh.axis_names == ("x",)


def test_specs_that_do_not_fit(tmp_path: Path):
    ostraka.save(tmp_path / "c", make_tree())
    checkpoint = ostraka.open(tmp_path / "c")
    with pytest.raises(InvalidSharding, match=r"the mesh \(data=8\) has no axis 'x'.*pass specs="):
        checkpoint.abstract(mesh={"data": 8})
    with pytest.raises(InvalidSharding, match="'free', dimension 0: 3 elements do not divide"):
        checkpoint.abstract(mesh={"x": 4, "y": 2}, specs={"free": P("x")})
    with pytest.raises(InvalidSharding, match="'fre'"):
        checkpoint.abstract(mesh={"x": 4, "y": 2}, specs={"fre": P("x")})
    with pytest.raises(InvalidSharding, match="the mesh has no devices"):
        checkpoint.abstract(specs=P())


def test_a_part(tmp_path: Path):
    ostraka.save(tmp_path / "c", make_tree())
    checkpoint = ostraka.open(tmp_path / "c")
    model = checkpoint["model"].abstract(mesh={"x": 8}, specs={"kernel": P(None)})
    assert model["kernel"].shape == (2, 3)
    restored = ostraka.restore(tmp_path / "c", like={"model": model})
    assert np.array_equal(restored["model"]["kernel"], make_tree()["model"].kernel[...])
    assert checkpoint["optax/0/mu"].abstract() == {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}


def test_functions_are_left_out(tmp_path: Path):
    @jax.tree_util.register_pytree_with_keys_class
    class Block:
        def __init__(self, weight: Any, activation: Any):
            self.weight, self.activation = weight, activation

        def tree_flatten_with_keys(self) -> Any:
            keys = jax.tree_util.GetAttrKey("weight"), jax.tree_util.GetAttrKey("activation")
            return tuple(zip(keys, (self.weight, self.activation), strict=True)), None

        @classmethod
        def tree_unflatten(cls, _: Any, parts: Any) -> "Block":
            return cls(*parts)

    ostraka.save(tmp_path / "c", {"block": Block(jnp.ones(2), jax.nn.relu), "n": 1})
    shapes = ostraka.open(tmp_path / "c").abstract()
    assert shapes == {"block": {"weight": jax.ShapeDtypeStruct((2,), jnp.float32)}, "n": 1}
    with pytest.warns(PartialRestore, match="whose value is a function"):
        expected = ostraka.restore(tmp_path / "c")
    assert_same(ostraka.restore(tmp_path / "c", like=shapes), expected)


def test_a_single_array_and_a_file_of_tensors(tmp_path: Path):
    ostraka.save(tmp_path / "c", jnp.ones(3))
    assert ostraka.open(tmp_path / "c").abstract() == jax.ShapeDtypeStruct((3,), jnp.float32)
    ostraka.save(tmp_path / "t", {"a": {"b": jnp.ones(3)}})
    ostraka.convert(tmp_path / "t", tmp_path / "t.safetensors", to="safetensors")
    shapes = ostraka.open(tmp_path / "t.safetensors").abstract()
    restored = ostraka.restore(tmp_path / "t.safetensors", like=shapes)
    assert_same(restored, ostraka.restore(tmp_path / "t.safetensors"))


# Counting


def test_parameters_are_counted_once_and_without_optimizers(tmp_path: Path):
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    tree = {"model": model, "optimizer": optimizer, "ema": nnx.state(model, nnx.Param)}
    ostraka.save(tmp_path / "nnx", tree)
    checkpoint = ostraka.open(tmp_path / "nnx")
    expected = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert expected == 4 * 8 + 8 + 8 + 8  # not the running mean and variance
    assert checkpoint.num_params == expected
    assert checkpoint["model"].num_params == expected
    assert checkpoint["optimizer"].num_params == 0


def test_floating_point_arrays_are_parameters_without_variables(tmp_path: Path):
    params = {"w": jnp.ones((3, 5)), "b": jnp.ones(5, jnp.bfloat16)}
    state = {
        "params": params,
        "opt_state": optax.adam(0.1).init(params),
        "step": jnp.zeros((), int),
    }
    ostraka.save(tmp_path / "c", {**state, "key": jax.random.key(0), "host": np.ones(2)})
    checkpoint = ostraka.open(tmp_path / "c")
    assert checkpoint.num_params == 15 + 5 + 2
    assert checkpoint["params"].num_params == 20
    assert type(checkpoint.num_params) is int


def test_counting_needs_no_jax(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"w": jnp.ones((3, 5))})
    program = (
        "import sys, ostraka\n"
        f"print(ostraka.open({str(tmp_path / 'c')!r}).num_params, 'jax' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ["15", "False"]
