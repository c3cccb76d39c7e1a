"""Restoring NNX: from what, into what, which parts, under which names, as which dtypes."""

from contextlib import nullcontext
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
from nnx_models import Block, Sharded, assert_same, bits, make_block, make_optimizer, trained
from ostraka.errors import Mismatch, PartialRestore


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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = trained()
    path = tmp_path_factory.mktemp("nnx") / "c"
    ostraka.save(path, {"model": model, "optimizer": optimizer})
    return path


@pytest.fixture
def saved(path: Path) -> tuple[Path, Block, nnx.Optimizer]:
    return path, *trained()


def is_on(variable: Any, mesh: Any, *spec: Any) -> bool:
    return variable[...].sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), variable.ndim)


# Abstract templates


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (1, 1)])
def test_an_abstract_model_on_any_mesh(tmp_path: Path, sizes: tuple[int, int]):
    model, optimizer = make_sharded(mesh_of(4, 2))
    ostraka.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    mesh = mesh_of(*sizes)
    with jax.set_mesh(mesh):
        like = nnx.eval_shape(make_both)
    assert isinstance(like["model"].up.get_raw_value().sharding.mesh, jax.sharding.AbstractMesh)
    restored = ostraka.restore(tmp_path / "c", like=like, mesh=mesh)
    assert_same(restored["model"], model)
    assert_same(restored["optimizer"], optimizer)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(restored)} == {mesh}
    assert is_on(restored["model"].up, mesh, "fsdp", "tp")
    assert is_on(restored["optimizer"].opt_state[0].mu["up"], mesh, "fsdp", "tp")
    graphdef, bound = nnx.get_abstract_model(lambda: Sharded(rngs=nnx.Rngs(0)), mesh)
    again = ostraka.restore(tmp_path / "c", like={"model": bound})["model"]
    assert_same(nnx.merge(graphdef, again), model)
    assert is_on(again["up"], mesh, "fsdp", "tp")


def test_specs_win_over_what_variables_say(tmp_path: Path):
    mesh = mesh_of(4, 2)
    model, _ = make_sharded(mesh)
    ostraka.save(tmp_path / "c", model)
    with jax.set_mesh(mesh):
        restored = ostraka.restore(
            tmp_path / "c", like=model, mesh=mesh, specs={"up": P("tp"), "down": P()}
        )
    assert is_on(restored.up, mesh, "tp")
    assert restored.down[...].sharding.is_fully_replicated
    assert restored.scale[...].sharding.is_fully_replicated
    assert_same(restored, model)


def test_unsharded_variables_that_name_axes_go_onto_a_mesh(tmp_path: Path):
    """A model saved from one device, whose variables say where they belong."""
    _, state = nnx.split(make_sharded(mesh_of(1, 1))[0])
    ostraka.save(tmp_path / "c", state)
    mesh = mesh_of(4, 2)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored = ostraka.restore(tmp_path / "c", like=like, mesh=mesh)
    assert is_on(restored["up"], mesh, "fsdp", "tp")
    assert bits(restored) == bits(state)


def test_logical_names_go_onto_a_mesh_by_the_rules_of_flax(tmp_path: Path):
    rules = (("embed", "fsdp"), ("mlp", "tp"))

    def variable(value: Any, **metadata: Any) -> nnx.Param:
        names = ("embed", "mlp")
        return nnx.Param(value, out_sharding=names, eager_sharding=False, **metadata)

    ostraka.save(tmp_path / "c", {"v": variable(jnp.ones((8, 4)))})
    mesh = mesh_of(4, 2)
    expected = NamedSharding(mesh, P("fsdp", "tp"))
    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with nnx.logical_axis_rules(rules):
        found = ostraka.restore(tmp_path / "c", like={"v": variable(shape)}, mesh=mesh)["v"]
    assert found[...].sharding == expected
    like = {"v": variable(shape, sharding_rules=rules)}
    found = ostraka.restore(tmp_path / "c", like=like, mesh=mesh)["v"]
    assert found[...].sharding == expected
    assert tuple(found.get_metadata()["out_sharding"]) == ("embed", "mlp")
    with pytest.raises(Mismatch, match=r"the mesh .* has no axes 'embed' and 'mlp', which 'v' is"):
        ostraka.restore(tmp_path / "c", like={"v": variable(shape)}, mesh=mesh)


# In place


def test_in_place_keeps_places(tmp_path: Path):
    model, _ = make_sharded(mesh_of(4, 2))
    ostraka.save(tmp_path / "c", model)
    mesh = mesh_of(2, 4)
    target, _ = make_sharded(mesh, seed=1)
    ostraka.restore(tmp_path / "c", into=target)
    assert is_on(target.up, mesh, "fsdp", "tp")
    assert_same(target, model)
    ostraka.restore(tmp_path / "c", into=target, mesh=mesh_of(4, 2))
    sharding: Any = target.up[...].sharding
    assert sharding.mesh.shape["fsdp"] == 4
    assert_same(target, model)


def test_in_place_restores_a_filtered_state(saved: Any):
    path, model, _ = saved
    target = make_block(1)
    params = nnx.state(target, nnx.Param)  # the model's own variables
    with pytest.warns(PartialRestore, match="left out 5 leaves .*'model/norm/mean'"):
        ostraka.restore(path, into={"model": params}, strict=False)
    assert bits(nnx.state(target, nnx.Param)) == bits(nnx.state(model, nnx.Param))


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
    state = nnx.state(target)
    state["table"] = jnp.zeros(3)
    ostraka.restore(path, into={"model": state}, only="**/norm")
    assert not np.any(np.asarray(state["table"]))
    assert bits(target.layers) == bits(make_block(1).layers)
    assert bits(target.norm) == bits(model.norm)


class Tables(nnx.Module):
    def __init__(self, start: int):
        self.kept = nnx.data(np.arange(3) + start)
        self.taken = nnx.data(np.arange(3) + start)
        self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(start))


def test_in_place_changes_only_what_was_asked_for_and_is_there(tmp_path: Path):
    ostraka.save(tmp_path / "c", Tables(0))
    ostraka.save(tmp_path / "part", {"layer": Tables(0).layer})
    cases: list[tuple[str, Any, int, int]] = [
        ("c", {"only": "taken"}, 0, 10),
        ("c", {"only": "layer/**"}, 10, 0),
        ("part", {"strict": False}, 10, 0),
    ]
    for path, options, taken, layer in cases:
        target = Tables(10)
        with (
            pytest.warns(PartialRestore, match="kept 2 leaves .* does not have .'kept', 'taken'.")
            if path == "part"
            else nullcontext()
        ):
            ostraka.restore(tmp_path / path, into=target, **options)
        assert np.array_equal(target.kept, np.arange(3) + 10), options
        assert np.array_equal(target.taken, np.arange(3) + taken), options
        assert bits(target.layer) == bits(Tables(layer).layer), options


# Parts


def test_only_some_leaves_of_a_module(saved: Any):
    path, model, _ = saved
    like = make_block(1)
    restored = ostraka.restore(path, like={"model": like}, only=["model/layers/**", "**/mean"])
    expected = nnx.clone(like)
    nnx.update(expected.layers, nnx.state(model.layers))
    expected.norm.mean.set_value(model.norm.mean.get_value())
    assert_same(restored["model"], expected)


def test_leaves_that_are_new_can_be_left_out(tmp_path: Path):
    """A base without adapters goes into a model that has some."""
    ostraka.save(tmp_path / "c", {"model": nnx.Linear(4, 2, rngs=nnx.Rngs(0))})
    model = nnx.LoRALinear(4, 2, lora_rank=1, rngs=nnx.Rngs(1))
    adapter = bits(model.lora.lora_a)
    ostraka.restore(tmp_path / "c", into={"model": model}, only="!model/lora")
    assert_same(model.kernel, nnx.Linear(4, 2, rngs=nnx.Rngs(0)).kernel)
    assert bits(model.lora.lora_a) == adapter


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


def test_some_leaves_as_states(saved: Any):
    path, model, _ = saved
    restored = ostraka.restore(path, as_state=True, only="model/layers/**")
    target = make_block(1)
    nnx.update(target, restored["model"])
    assert bits(target.layers) == bits(model.layers)


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


def test_layers_that_change_places(tmp_path: Path):
    model = make_block()
    ostraka.save(tmp_path / "c", model)
    swap = {"layers/0": "layers/1", "layers/1": "layers/0"}
    restored = ostraka.restore(tmp_path / "c", like=make_block(1), rename=swap)
    assert bits(restored.layers[0]) == bits(model.layers[1])
    assert bits(restored.layers[1]) == bits(model.layers[0])


# Other dtypes


def dtypes_of(tree: Any) -> dict[str, str]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): str(leaf.dtype) for path, leaf in pairs}


def as_bfloat16(array: Any) -> Any:
    floating = jnp.issubdtype(array.dtype, jnp.floating) and array.shape
    return array.astype(jnp.bfloat16) if floating else array


def test_saving_as_another_dtype(tmp_path: Path):
    model, optimizer = trained()
    tree = {"model": model, "optimizer": optimizer, "lr": 0.1, "scale": jnp.float32(0.1)}
    ostraka.save(tmp_path / "c", tree, dtype="bfloat16")
    assert model.first.kernel[...].dtype == jnp.float32
    state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    expected = jax.tree.map(as_bfloat16, state)
    restored = ostraka.restore(tmp_path / "c", as_state=True)
    assert (restored.pop("lr"), float(restored.pop("scale"))) == (0.1, np.float32(0.1))
    assert bits(restored) == bits(expected)
    optimizer_types = dtypes_of(restored["optimizer"])
    assert {kind for path, kind in optimizer_types.items() if "mu" in path} == {"bfloat16"}
    assert optimizer_types["['step'].value"] in ("uint32", "int32")
    # The cast is recorded.
    match = r"saved as bfloat16 \(cast from float32 by the save\), `like` has float32: .* to cast"
    with pytest.raises(Mismatch, match=match):
        ostraka.restore(tmp_path / "c", like={"model": make_block(1)})
    restored = ostraka.restore(tmp_path / "c", like={"model": make_block(1)}, dtype="like")
    expected = jax.tree.map(
        lambda x: as_bfloat16(x).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        nnx.state(model),
    )
    assert bits(nnx.state(restored["model"])) == bits(expected)


def test_dtypes_by_path(tmp_path: Path):
    model, optimizer = trained()
    tree = {"model": model, "optimizer": optimizer}
    ostraka.save(tmp_path / "c", tree, dtype={"model/norm/**": None, "model/**": "bfloat16"})
    restored = ostraka.restore(tmp_path / "c", as_state=True)
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


def test_integers_are_no_target(tmp_path: Path):
    with pytest.raises(ValueError, match="dtype is 'int8'; it must be a floating-point dtype"):
        ostraka.save(tmp_path / "c", {"x": jnp.ones(2)}, dtype="int8")
    assert not (tmp_path / "c").exists()
