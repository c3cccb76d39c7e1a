"""Restoring NNX: from what, into what, which parts, under which names, as which dtypes."""

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from nnx_models import (
    Block,
    Sharded,
    assert_same,
    bits,
    make_block,
    make_optimizer,
    train,
    trained,
)
from ostraka.errors import Mismatch, PartialRestore
from places import Place


def mesh_of(*sizes: int) -> Any:
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, ("fsdp", "tp"), devices=jax.devices()[:count])


def make_sharded(mesh: Any, seed: int = 0) -> tuple[Sharded, nnx.Optimizer]:
    with jax.set_mesh(mesh):
        model = nnx.jit(lambda: Sharded(rngs=nnx.Rngs(seed)))()
        return model, make_optimizer(model)


def make_both() -> dict[str, Any]:
    model = Sharded(rngs=nnx.Rngs(0))
    return {"model": model, "optimizer": make_optimizer(model)}


@pytest.fixture
def saved(place: Place) -> tuple[Place, Block, nnx.Optimizer]:
    model, optimizer = trained()
    ostraka.save(place / "c", {"model": model, "optimizer": optimizer})
    return place / "c", model, optimizer


# Abstract templates


def test_an_abstract_model_becomes_a_model(saved: Any):
    path, model, optimizer = saved

    def make() -> tuple[Block, nnx.Optimizer]:
        model = make_block(5)
        return model, make_optimizer(model)

    abstract = nnx.eval_shape(make)
    like = {"model": abstract[0], "optimizer": abstract[1]}
    restored = ostraka.restore(path, like=like)
    assert_same(restored["model"], model)
    assert_same(restored["optimizer"], optimizer)
    x = jnp.ones((2, 4))
    assert train(restored["model"], restored["optimizer"], x) == train(model, optimizer, x)


def test_an_abstract_state_becomes_a_state(saved: Any):
    path, model, _ = saved
    graphdef, abstract = nnx.split(nnx.eval_shape(make_block))
    restored = ostraka.restore(path, like={"model": abstract})["model"]
    assert type(restored) is nnx.State
    assert_same(nnx.merge(graphdef, restored), model)


def test_abstract_meshes_are_bound_to_the_real_one(place: Place):
    mesh = mesh_of(4, 2)
    model, optimizer = make_sharded(mesh)
    tree = {"model": model, "optimizer": optimizer}
    ostraka.save(place / "c", tree)
    with jax.set_mesh(mesh):
        like = nnx.eval_shape(make_both)
    assert isinstance(like["model"].up.get_raw_value().sharding.mesh, jax.sharding.AbstractMesh)
    restored = ostraka.restore(place / "c", like=like, mesh=mesh)
    assert_same(restored["model"], model)
    assert_same(restored["optimizer"], optimizer)
    for found, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True):
        assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
        assert found.sharding.mesh == mesh


def test_an_abstract_mesh_needs_a_real_one(place: Place):
    mesh = mesh_of(4, 2)
    ostraka.save(place / "c", make_sharded(mesh)[0])
    with jax.set_mesh(mesh):
        like = nnx.eval_shape(lambda: Sharded(rngs=nnx.Rngs(0)))
    with pytest.raises(Mismatch, match="abstract mesh, which has no devices: pass mesh="):
        ostraka.restore(place / "c", like=like)


@pytest.mark.parametrize("sizes", [(2, 4), (8, 1), (1, 1)])
def test_an_abstract_model_on_another_mesh(place: Place, sizes: tuple[int, int]):
    model, optimizer = make_sharded(mesh_of(4, 2))
    ostraka.save(place / "c", {"model": model, "optimizer": optimizer})
    mesh = mesh_of(*sizes)
    with jax.set_mesh(mesh):
        like = nnx.eval_shape(make_both)
    restored = ostraka.restore(place / "c", like=like, mesh=mesh)
    assert_same(restored["model"], model)
    assert_same(restored["optimizer"], optimizer)
    up = NamedSharding(mesh, P("fsdp", "tp"))
    moments = restored["optimizer"].opt_state[0].mu["up"]
    assert restored["model"].up[...].sharding.is_equivalent_to(up, 2)
    assert moments[...].sharding.is_equivalent_to(up, 2)


def test_a_bound_template_of_flax(place: Place):
    model, _ = make_sharded(mesh_of(4, 2))
    ostraka.save(place / "c", model)
    mesh = mesh_of(2, 4)
    graphdef, abstract = nnx.get_abstract_model(lambda: Sharded(rngs=nnx.Rngs(0)), mesh)
    restored = nnx.merge(graphdef, ostraka.restore(place / "c", like=abstract))
    assert_same(restored, model)
    assert restored.up[...].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)


def test_specs_win_over_what_variables_say(place: Place):
    mesh = mesh_of(4, 2)
    model, _ = make_sharded(mesh)
    ostraka.save(place / "c", model)
    with jax.set_mesh(mesh):
        restored = ostraka.restore(
            place / "c", like=model, mesh=mesh, specs={"up": P("tp"), "down": P()}
        )
    assert restored.up[...].sharding.is_equivalent_to(NamedSharding(mesh, P("tp")), 2)
    assert restored.down[...].sharding.is_fully_replicated
    assert restored.scale[...].sharding.is_fully_replicated
    assert_same(restored, model)


def test_unsharded_variables_that_name_axes_go_onto_a_mesh(place: Place):
    """A model saved from one device, whose variables say where they belong."""
    _, state = nnx.split(make_sharded(mesh_of(1, 1))[0])
    ostraka.save(place / "c", state)
    mesh = mesh_of(4, 2)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored = ostraka.restore(place / "c", like=like, mesh=mesh)
    assert restored["up"][...].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)
    assert bits(restored) == bits(state)


def test_logical_names_go_onto_a_mesh_by_the_rules_of_flax(place: Place):
    rules = (("embed", "fsdp"), ("mlp", "tp"))

    def variable(value: Any, **metadata: Any) -> nnx.Param:
        names = ("embed", "mlp")
        return nnx.Param(value, out_sharding=names, eager_sharding=False, **metadata)

    ostraka.save(place / "c", {"v": variable(jnp.ones((8, 4)))})
    mesh = mesh_of(4, 2)
    expected = NamedSharding(mesh, P("fsdp", "tp"))
    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with nnx.logical_axis_rules(rules):
        found = ostraka.restore(place / "c", like={"v": variable(shape)}, mesh=mesh)["v"]
    assert found[...].sharding == expected
    like = {"v": variable(shape, sharding_rules=rules)}
    found = ostraka.restore(place / "c", like=like, mesh=mesh)["v"]
    assert found[...].sharding == expected
    assert tuple(found.get_metadata()["out_sharding"]) == ("embed", "mlp")
    with pytest.raises(Mismatch, match=r"leaf 'v', dimension 0: the mesh .* has no axis 'embed'"):
        ostraka.restore(place / "c", like={"v": variable(shape)}, mesh=mesh)


def test_a_mesh_that_does_not_fit(place: Place):
    model, _ = make_sharded(mesh_of(4, 2))
    ostraka.save(place / "c", model)
    other = jax.make_mesh((8,), ("data",))
    with pytest.raises(Mismatch, match=r"leaf 'up', dimension 0: the mesh \(data=8\) has no axis"):
        ostraka.restore(place / "c", like=model, mesh=other)
    odd = mesh_of(1, 3)
    with pytest.raises(Mismatch, match="dimension 1: 64 elements do not divide into 3 parts along"):
        ostraka.restore(place / "c", like=model, mesh=odd)


# In place


def test_in_place_keeps_every_object(saved: Any):
    path, model, optimizer = saved
    target = make_block(1)
    other = make_optimizer(target)
    kernel, layers, moments = target.first.kernel, target.layers, other.opt_state[0].mu
    result = ostraka.restore(path, into={"model": target, "optimizer": other})
    assert result["model"] is target
    assert result["optimizer"] is other
    assert target.first.kernel is kernel is target.tied
    assert target.layers is layers
    assert other.opt_state[0].mu["first"]["kernel"] is moments["first"]["kernel"]
    assert_same(target, model)
    assert_same(other, optimizer)
    x = jnp.ones((2, 4))
    assert train(target, other, x) == train(model, optimizer, x)


def test_in_place_frees_the_old_arrays(saved: Any):
    path, _, _ = saved
    target = make_block(1)
    old = [weakref.ref(array) for array in jax.tree.leaves(target)]
    assert len(old) > 10
    count = len(jax.live_arrays())
    ostraka.restore(path, into={"model": target})
    gc.collect()
    assert [ref for ref in old if ref() is not None] == []
    assert len(jax.live_arrays()) <= count


def test_in_place_keeps_places(place: Place):
    model, _ = make_sharded(mesh_of(4, 2))
    ostraka.save(place / "c", model)
    mesh = mesh_of(2, 4)
    target, _ = make_sharded(mesh, seed=1)
    ostraka.restore(place / "c", into=target)
    assert target.up[...].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)
    assert_same(target, model)
    ostraka.restore(place / "c", into=target, mesh=mesh_of(4, 2))
    sharding: Any = target.up[...].sharding
    assert sharding.mesh.shape["fsdp"] == 4
    assert_same(target, model)


def test_in_place_fills_an_abstract_model(saved: Any):
    path, model, _ = saved
    target = nnx.eval_shape(make_block)
    ostraka.restore(path, into={"model": target})
    assert_same(target, model)


def test_in_place_restores_a_state_and_a_variable(saved: Any):
    path, model, _ = saved
    target = make_block(1)
    params = nnx.state(target, nnx.Param)  # the model's own variables
    with pytest.warns(
        PartialRestore, match="left out 5 leaves of the checkpoint .*'model/norm/mean'"
    ) as seen:
        ostraka.restore(path, into={"model": params}, strict=False)
    assert seen[0].filename == __file__
    assert bits(nnx.state(target, nnx.Param)) == bits(nnx.state(model, nnx.Param))
    variable = nnx.Param(jnp.zeros((4, 8)))
    ostraka.save(path, {"kernel": model.first.kernel})
    ostraka.restore(path, into={"kernel": variable})
    assert bits(variable) == bits(model.first.kernel)


def test_in_place_restores_a_state_with_plain_arrays(saved: Any):
    """The state gets all of it; the model that it was taken from, its variables."""
    path, model, _ = saved
    target = make_block(1)
    target.table = nnx.data(jnp.zeros(3))
    state = nnx.state(target)
    kernel = target.first.kernel
    assert ostraka.restore(path, into={"model": state})["model"] is state
    assert_same(state, nnx.state(model))
    assert state["first"]["kernel"] is kernel is target.first.kernel
    assert bits(nnx.state(target, nnx.Param)) == bits(nnx.state(model, nnx.Param))
    assert not np.any(target.table)
    nnx.update(target, state)
    assert_same(target, model)


def test_in_place_restores_some_of_a_state_with_plain_arrays(saved: Any):
    path, model, _ = saved
    target = make_block(1)
    target.table = nnx.data(jnp.zeros(3))
    state = nnx.state(target)
    ostraka.restore(path, into={"model": state}, only="**/norm")
    assert not np.any(np.asarray(state["table"]))
    assert bits(target.layers) == bits(make_block(1).layers)
    assert bits(target.norm) == bits(model.norm)


def test_in_place_with_iterators_of_data(place: Place):
    class Position:
        def __init__(self, at: int):
            self.at = at

        def get_state(self) -> dict[str, int]:
            return {"at": self.at}

        def set_state(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    model = make_block()
    ostraka.save(place / "c", {"model": model, "data": Position(7)})
    target = {"model": make_block(1), "data": Position(0)}
    ostraka.restore(place / "c", into=target)
    assert target["data"].at == 7
    assert_same(target["model"], model)


def test_in_place_changes_nothing_if_it_does_not_fit(saved: Any):
    path, _, _ = saved
    target = Block(16, rngs=nnx.Rngs(1))
    before = bits(target)
    with pytest.raises(Mismatch, match=r"'model/first/kernel': saved with shape \(4, 8\)"):
        ostraka.restore(path, into={"model": target})
    assert bits(target) == before


def test_in_place_or_like_a_template_not_both(place: Place):
    ostraka.save(place / "c", {"x": jnp.ones(2)})
    with pytest.raises(ValueError, match="give like= or into=, not both"):
        ostraka.restore(place / "c", into={"x": 1}, like={"x": 1})  # type: ignore[call-overload]


class Tables(nnx.Module):
    def __init__(self, start: int):
        self.kept = nnx.data(np.arange(3) + start)
        self.taken = nnx.data(np.arange(3) + start)
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(start))


@pytest.mark.parametrize("only", ["taken", "layer/**"])
def test_in_place_restores_only_what_was_asked_for(place: Place, only: str):
    ostraka.save(place / "c", Tables(0))
    target = Tables(10)
    ostraka.restore(place / "c", into=target, only=only)
    taken, layer = (0, 10) if only == "taken" else (10, 0)
    assert np.array_equal(target.kept, np.arange(3) + 10)
    assert np.array_equal(target.taken, np.arange(3) + taken)
    assert bits(target.layer) == bits(Tables(layer).layer)


def test_in_place_keeps_what_the_checkpoint_lacks(place: Place):
    ostraka.save(place / "c", {"layer": nnx.Linear(2, 2, rngs=nnx.Rngs(0))})
    target = Tables(10)
    with pytest.warns(PartialRestore, match="kept 2 leaves .* does not have .'kept', 'taken'."):
        ostraka.restore(place / "c", into=target, strict=False)
    assert np.array_equal(target.kept, np.arange(3) + 10)
    assert np.array_equal(target.taken, np.arange(3) + 10)
    assert bits(target.layer) == bits(Tables(0).layer)


PEAK = """
import json, re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from flax import nnx
import ostraka

path, how, layers, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def memory(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def make(value):
    return nnx.List([nnx.Param(jnp.full((size,), value + n, jnp.float32)) for n in range(layers)])

model = make(0.0)
ostraka.save(path, model)
small = nnx.List([nnx.Param(jnp.zeros(4))])
ostraka.save(path + "-small", small)  # what a first call loads is not what is measured
ostraka.restore(path + "-small", into=small)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = memory("VmRSS")
other = ostraka.restore(path, **{how: model})
print(json.dumps(memory("VmHWM") - before))
"""


def test_in_place_never_holds_two_models(tmp_path: Path):
    """The peak of memory: what a restore adds to the model itself, in a process of its own."""
    layers, size = 32, 1 << 20  # 128 MiB in all
    state_bytes = layers * size * 4

    def run(how: str) -> str:
        command = [sys.executable, "-c", PEAK, str(tmp_path / "c"), how, str(layers), str(size)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert json.loads(run("into")) < 0.6 * state_bytes
    assert json.loads(run("like")) > 0.9 * state_bytes


# Parts


def test_one_of_several_things(saved: Any):
    path, model, optimizer = saved
    assert_same(ostraka.restore(path, like={"model": make_block(1)})["model"], model)
    like = make_optimizer(make_block(1))
    assert_same(ostraka.restore(path, like={"optimizer": like})["optimizer"], optimizer)


def test_only_some_leaves_of_a_module(saved: Any):
    path, model, _ = saved
    like = make_block(1)
    restored = ostraka.restore(path, like={"model": like}, only=["model/layers/**", "**/mean"])
    expected = nnx.clone(like)
    nnx.update(expected.layers, nnx.state(model.layers))
    expected.norm.mean.set_value(model.norm.mean.get_value())
    assert_same(restored["model"], expected)


def test_leaves_that_are_new_can_be_left_out(place: Place):
    """A base without adapters goes into a model that has some."""
    ostraka.save(place / "c", {"model": nnx.Linear(4, 2, rngs=nnx.Rngs(0))})
    model = nnx.LoRALinear(4, 2, lora_rank=1, rngs=nnx.Rngs(1))
    adapter = bits(model.lora.lora_a)
    ostraka.restore(place / "c", into={"model": model}, only="!model/lora")
    assert_same(model.kernel, nnx.Linear(4, 2, rngs=nnx.Rngs(0)).kernel)
    assert bits(model.lora.lora_a) == adapter
    with pytest.raises(
        Mismatch, match=r"only='!model/lore' matches.*\(did you mean 'model/lora'\?\)"
    ):
        ostraka.restore(place / "c", into={"model": model}, only="!model/lore")
    with pytest.raises(Mismatch, match="only='model/lora' matches no leaf of the checkpoint"):
        ostraka.restore(place / "c", into={"model": model}, only="model/lora")


def test_only_some_leaves_without_a_template(saved: Any):
    path, model, _ = saved
    restored = ostraka.restore(path, only="model/layers/*/kernel")
    assert list(restored) == ["model"]
    assert list(restored["model"]) == ["layers"]
    assert list(restored["model"]["layers"]) == [0, 1]
    found = restored["model"]["layers"][1]
    assert list(found) == ["kernel"]
    assert np.array_equal(found["kernel"], model.layers[1].kernel[...])


def test_only_parameters_of_a_state_that_has_more(saved: Any):
    """The state of a filter is a part of a model's: ask for it with strict=False, or by name."""
    path, model, _ = saved
    like = {"model": nnx.state(make_block(1), nnx.Param)}
    with pytest.raises(Mismatch, match="'model/norm/mean' is in the checkpoint but not in `like`"):
        ostraka.restore(path, like=like)
    with pytest.warns(PartialRestore, match="left out 5 leaves of .*'model/norm/mean'"):
        restored = ostraka.restore(path, like=like, strict=False)
    assert bits(restored["model"]) == bits(nnx.state(model, nnx.Param))


# No template


def test_without_a_template_there_are_plain_containers(saved: Any):
    path, model, optimizer = saved
    restored = ostraka.restore(path)
    assert restored.keys() == {"model", "optimizer"}
    assert list(restored["model"]["sequence"]["layers"]) == [0, 2]
    assert all(type(key) is int for key in restored["model"]["layers"])
    found = restored["optimizer"]["opt_state"][0]["mu"]["first"]["kernel"]
    assert np.array_equal(found, optimizer.opt_state[0].mu["first"]["kernel"][...])
    key = restored["model"]["dropout"]["rngs"]["key"]
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    target = make_block(1)
    nnx.update(target, nnx.State(restored["model"]))
    assert_same(target, model)


def test_states_on_request(saved: Any):
    path, model, optimizer = saved
    restored = ostraka.restore(path, as_state=True)
    assert type(restored["model"]) is nnx.State
    assert type(restored["model"]["norm"]["mean"]) is nnx.BatchStat
    assert type(restored["model"]["dropout"]["rngs"]["key"]) is nnx.RngKey
    assert_same(nnx.merge(nnx.graphdef(model), restored["model"]), model)
    assert_same(nnx.merge(nnx.graphdef(optimizer), restored["optimizer"]), optimizer)


def test_states_are_for_restores_without_a_template(saved: Any):
    path, model, _ = saved
    with pytest.raises(ValueError, match="as_state"):
        ostraka.restore(path, like={"model": model}, as_state=True)


def test_some_leaves_as_states(saved: Any):
    path, model, _ = saved
    restored = ostraka.restore(path, as_state=True, only="model/layers/**")
    target = make_block(1)
    nnx.update(target, restored["model"])
    assert bits(target.layers) == bits(model.layers)


# Not everything there


class Grown(Block):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)


def test_a_model_that_has_grown(saved: Any):
    path, model, _ = saved
    like = Grown(rngs=nnx.Rngs(1))
    with pytest.raises(Mismatch, match=r"'model/head' \(2 leaves\) is not in the checkpoint"):
        ostraka.restore(path, like={"model": like})
    with pytest.warns(
        PartialRestore, match="kept 2 leaves that the checkpoint does not have .'model/head/bias'"
    ) as caught:
        restored = ostraka.restore(path, like={"model": like}, strict=False)["model"]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert bits(restored.head) == bits(like.head)
    assert bits(restored.layers) == bits(model.layers)
    abstract = nnx.eval_shape(lambda: Grown(rngs=nnx.Rngs(1)))
    with pytest.raises(
        Mismatch, match="'model/head/bias': it is not in .* no value to keep for it"
    ):
        ostraka.restore(path, like={"model": abstract}, strict=False)


def test_a_model_that_has_shrunk(place: Place):
    model = Grown(rngs=nnx.Rngs(0))
    ostraka.save(place / "c", model)
    with pytest.raises(Mismatch, match=r"'head' \(2 leaves\) is in the checkpoint but not"):
        ostraka.restore(place / "c", like=make_block(1))
    with pytest.warns(PartialRestore, match="left out 2 leaves of the checkpoint .'head/bias'"):
        restored = ostraka.restore(place / "c", like=make_block(1), strict=False)
    assert bits(restored.layers) == bits(model.layers)


def test_strict_false_tolerates_no_other_dtype(saved: Any):
    path, _, _ = saved
    like = nnx.state(make_block(1))
    other = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, like)
    with pytest.raises(Mismatch, match="saved as float32, `like` has bfloat16"):
        ostraka.restore(path, like={"model": other}, strict=False)


# Other names


class Moved(nnx.Module):
    def __init__(self, block: Block):
        self.net = nnx.Dict(trunk=block)


def test_layers_that_have_moved(saved: Any):
    path, model, _ = saved
    like = {"agent": Moved(make_block(1))}
    restored = ostraka.restore(
        path, like=like, only="agent/**", rename={"model": "agent/net/trunk"}
    )
    assert_same(restored["agent"].net.trunk, model)
    ostraka.restore(path, into=like, only="agent/**", rename={"model": "agent/net/trunk"})
    assert_same(like["agent"].net.trunk, model)


def test_layers_that_change_places(place: Place):
    model = make_block()
    ostraka.save(place / "c", model)
    swap = {"layers/0": "layers/1", "layers/1": "layers/0"}
    restored = ostraka.restore(place / "c", like=make_block(1), rename=swap)
    assert bits(restored.layers[0]) == bits(model.layers[1])
    assert bits(restored.layers[1]) == bits(model.layers[0])


def test_rename_of_what_is_not_there(saved: Any):
    path, model, _ = saved
    with pytest.raises(Mismatch, match="rename has 'model/lair', which is not in the checkpoint"):
        ostraka.restore(path, like={"model": model}, rename={"model/lair": "model/first"})


def test_rename_onto_what_is_there(place: Place):
    ostraka.save(place / "c", {"a": jnp.zeros(2), "b": jnp.ones(2)})
    with pytest.raises(Mismatch, match="'b'"):
        ostraka.restore(place / "c", like={"b": jnp.zeros(2)}, rename={"a": "b"})


def test_rename_without_a_template(saved: Any):
    """It says how `like` calls things."""
    path, _, _ = saved
    with pytest.raises(ValueError, match="rename"):
        ostraka.restore(path, rename={"model": "net"})


# Other dtypes


def dtypes_of(tree: Any) -> dict[str, str]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): str(leaf.dtype) for path, leaf in pairs}


def as_bfloat16(array: Any) -> Any:
    floating = jnp.issubdtype(array.dtype, jnp.floating) and array.shape
    return array.astype(jnp.bfloat16) if floating else array


def test_saving_as_another_dtype(place: Place):
    model, optimizer = trained()
    tree = {"model": model, "optimizer": optimizer, "lr": 0.1, "scale": jnp.float32(0.1)}
    ostraka.save(place / "c", tree, dtype="bfloat16")
    assert model.first.kernel[...].dtype == jnp.float32
    state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    expected = jax.tree.map(as_bfloat16, state)
    restored = ostraka.restore(place / "c", as_state=True)
    assert (restored.pop("lr"), float(restored.pop("scale"))) == (0.1, np.float32(0.1))
    assert bits(restored) == bits(expected)
    optimizer_types = dtypes_of(restored["optimizer"])
    assert {kind for path, kind in optimizer_types.items() if "mu" in path} == {"bfloat16"}
    assert optimizer_types["['step'].value"] in ("uint32", "int32")


def test_the_cast_is_recorded(place: Place):
    model, _ = trained()
    ostraka.save(place / "c", {"model": model}, dtype="bfloat16")
    match = r"saved as bfloat16 \(cast from float32 by the save\), `like` has float32: .* to cast"
    with pytest.raises(Mismatch, match=match):
        ostraka.restore(place / "c", like={"model": make_block(1)})
    restored = ostraka.restore(place / "c", like={"model": make_block(1)}, dtype="like")
    expected = jax.tree.map(
        lambda x: as_bfloat16(x).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        nnx.state(model),
    )
    assert bits(nnx.state(restored["model"])) == bits(expected)


def test_dtypes_by_path(place: Place):
    model, optimizer = trained()
    tree = {"model": model, "optimizer": optimizer}
    ostraka.save(place / "c", tree, dtype={"model/norm/**": None, "model/**": "bfloat16"})
    restored = ostraka.restore(place / "c", as_state=True)
    assert restored["model"]["first"]["kernel"][...].dtype == jnp.bfloat16
    assert restored["model"]["norm"]["mean"][...].dtype == jnp.float32
    assert bits(restored["optimizer"]) == bits(nnx.state(optimizer))


def test_restoring_as_another_dtype(saved: Any):
    path, model, optimizer = saved
    restored = ostraka.restore(path, as_state=True, dtype="bfloat16")
    state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    assert bits(restored) == bits(jax.tree.map(as_bfloat16, state))
    some = ostraka.restore(path, as_state=True, dtype={"model/**": "float16"})
    assert some["model"]["first"]["kernel"][...].dtype == jnp.float16
    assert bits(some["optimizer"]) == bits(nnx.state(optimizer))
    like = {"model": nnx.state(make_block(1))}
    like = jax.tree.map(as_bfloat16, like)
    assert bits(ostraka.restore(path, like=like, dtype="like")["model"]) == bits(
        jax.tree.map(as_bfloat16, nnx.state(model))
    )


def test_integers_are_no_target(place: Place):
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be a floating-point dtype"):
        ostraka.save(place / "c", {"x": jnp.ones(2)}, dtype="int8")
    assert not (place / "c").exists()
