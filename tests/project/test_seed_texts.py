"""Five texts on sharded checkpoints of Flax models, and the test of each thing that they say.

What they do with Orbax is done here with Ostraka, and corrected where Flax and JAX have moved on
since: data/seed_texts.txt leads from a snippet, claim or pitfall to its test.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from nnx_models import Sharded, assert_same, bits
from ostraka import exercises, sharding
from ostraka.errors import Damaged, InvalidSharding, Mismatch

TESTS = Path(__file__).parents[1]
ADAM = optax.adam(1e-3)


def test_the_table_leads_to_tests():
    table = (TESTS / "data" / "seed_texts.txt").read_text("utf-8")
    targets = re.findall(r"^.* -> (.*)$", table, re.MULTILINE)
    assert len(targets) > 50
    tests = {file.name: file for file in TESTS.rglob("test_*.py")}
    for target in targets:
        file, _, name = target.rpartition("::")
        if target.endswith(".py"):
            file, name = target, ""
        text = tests[file or Path(__file__).name].read_text("utf-8")
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), target


def mesh_of(**sizes: int) -> Mesh:
    types = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


def pick_spec(leaf: Any) -> P:
    return P(None, "model") if leaf.ndim == 2 else P("model")


def make_linear() -> nnx.Linear:
    return nnx.Linear(16, 8, rngs=nnx.Rngs(0))


def make_sharded(count: int = 8) -> nnx.Linear:
    return sharding.place(make_linear(), mesh_of(model=count), pick_spec)


# NNX Orbax Sharded Save; Distributed Checkpoint (Sharding Math)


def test_a_sharded_state_on_disk(tmp_path: Path):
    """A file for each shard, with its part of every leaf. One that is lost is named."""
    state = nnx.state(make_sharded())
    ostraka.save(tmp_path / "c", state)
    opened = ostraka.open(tmp_path / "c")
    assert opened["kernel"].spec == ((), ("model",))
    restored = ostraka.restore(tmp_path / "c")
    assert restored["kernel"].sharding.spec == P(None, "model")
    assert bits(restored) == bits({k: v.get_value() for k, v in state.items()})
    assert json.loads((tmp_path / "c" / "_METADATA").read_text("utf-8"))
    files = sorted((tmp_path / "c").glob("shards-*/*.safetensors"))
    assert [file.name for file in files] == [f"shard_{n:05d}.safetensors" for n in range(8)]
    for file in files:
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert (header["kernel"]["shape"], header["bias"]["shape"]) == ([16, 1], [1])
    files[3].unlink()
    with pytest.raises(Damaged, match=r"shard_00003\.safetensors \(leaf 'kernel', 'bias'\)"):
        ostraka.restore(tmp_path / "c")
    with pytest.raises(Damaged, match=r"shard_00003\.safetensors"):
        ostraka.verify(tmp_path / "c")
    assert np.array_equal(opened["bias"][:3], [0, 0, 0])


def test_restore_with_a_tree_of_shardings(tmp_path: Path):
    """And on twice as many devices."""
    model = make_sharded(4)
    ostraka.save(tmp_path / "c", model)
    mesh = mesh_of(data=2, model=4)
    graphdef, state = nnx.split(model)
    targets = jax.tree.map(lambda x: NamedSharding(mesh, pick_spec(x)), state)
    loaded = ostraka.restore(tmp_path / "c", like=state, specs=targets)
    restored = nnx.merge(graphdef, loaded)
    assert_same(restored, model)
    assert restored.kernel[...].sharding == NamedSharding(mesh, P(None, "model"))
    twice = ostraka.restore(tmp_path / "c", like=model, mesh=mesh_of(model=8))
    assert twice.kernel[...].addressable_shards[0].data.shape == (16, 1)
    assert_same(twice, model)


def test_shardings_that_do_not_fit(tmp_path: Path):
    """There is no padding: JAX has only equal shards, and says so, as we do before reading."""
    model = make_sharded()
    mesh = mesh_of(model=3)
    with pytest.raises(ValueError, match="should evenly divide the shape"):
        jax.device_put(model.kernel[...], NamedSharding(mesh, P(None, "model")))
    ostraka.save(tmp_path / "c", model)
    kernel = {"kernel": P(None, "model")}
    uneven = "leaf 'kernel', dimension 1: 8 elements do not divide into 3 parts along model"
    with pytest.raises(Mismatch, match=uneven):
        ostraka.restore(tmp_path / "c", like=model, mesh=mesh, specs=kernel)
    with pytest.raises(Mismatch, match=r"the mesh \(data=8\) has no axis 'model', which 'bias'"):
        ostraka.restore(tmp_path / "c", mesh=mesh_of(data=8))
    with pytest.raises(Mismatch, match="specs has 'kernels', which is no leaf"):
        ostraka.restore(tmp_path / "c", mesh=mesh_of(data=8), specs={"kernels": P("data")})


def test_parameters_put_on_a_mesh(tmp_path: Path):
    place = NamedSharding(mesh_of(model=8), P("model", None))
    params = {"Dense_0": {"kernel": jnp.ones((16, 8))}, "Dense_1": {"kernel": jnp.ones((8, 2))}}
    sharded = jax.tree.map(lambda x: jax.device_put(x, place), params)
    ostraka.save(tmp_path / "c", sharded)
    restored = ostraka.restore(tmp_path / "c", like=sharded)
    assert restored["Dense_0"]["kernel"].sharding == place
    assert bits(restored) == bits(params)
    # That one spec for all breaks at a bias is no mystery: it has one dimension.
    with pytest.raises(InvalidSharding, match="bias"):
        sharding.place({"bias": jnp.ones(8)}, mesh_of(model=8), P("model", None))


# Checkpointing Flax NNX Models with Orbax


class SimpleLinear(nnx.Module):
    def __init__(self, din: int, dout: int, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(jax.random.uniform(rngs.params(), (din, dout)))
        self.bias = nnx.Param(jnp.zeros((dout,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight + self.bias


def make_simple(seed: int = 0) -> SimpleLinear:
    return SimpleLinear(din=10, dout=5, rngs=nnx.Rngs(seed))


@pytest.mark.parametrize("saved", ["module", "state"])
def test_modules_states_and_templates(tmp_path: Path, saved: str):
    """Neither splitting nor merging is needed, and both work. `.value` is `[...]` today."""
    model = make_simple()
    graphdef, state = nnx.split(model)
    ostraka.save(tmp_path / "c", model if saved == "module" else state)
    x = jnp.ones((1, 10))
    for like in (make_simple(1), nnx.eval_shape(make_simple)):
        restored = ostraka.restore(tmp_path / "c", like=like)
        assert_same(restored, model)
        assert np.array_equal(restored(x), model(x))
        loaded = ostraka.restore(tmp_path / "c", like=nnx.state(like))
        assert_same(nnx.merge(graphdef, loaded), model)
        nnx.update(existing := make_simple(1), loaded)
        assert_same(existing, model)
    ostraka.restore(tmp_path / "c", into=(other := make_simple(2)))
    assert_same(other, model)


def make_both(seed: int = 0) -> dict[str, Any]:
    model = make_simple(seed)
    return {"model": model, "optimizer": nnx.Optimizer(model, ADAM, wrt=nnx.Param)}


def make_trained() -> dict[str, Any]:
    tree = make_both()
    grads = jax.tree.map(jnp.ones_like, nnx.state(tree["model"]))
    tree["optimizer"].update(tree["model"], grads)
    return tree


def test_model_and_optimizer_together(tmp_path: Path):
    """`nnx.Optimizer` has no model today. Its step is an array, and good as a step of a run.

    Rngs are made inside of what is traced; from outside Flax refuses.
    """
    tree = make_trained()
    assert not hasattr(tree["optimizer"], "model")
    with ostraka.Manager(tmp_path) as manager:
        manager.save(tree["optimizer"].step[...], tree)
        manager.wait()
        assert manager.latest() == 1
        into = make_both(2)
        manager.restore(into=into)
    for like in (make_both(1), nnx.eval_shape(make_both)):
        restored = ostraka.restore(tmp_path, like=like)
        assert int(restored["optimizer"].step[...]) == 1
        assert bits(restored) == bits(into) == bits(tree)
    rngs = nnx.Rngs(0)
    with pytest.raises(TraceContextError, match="trace level"):
        nnx.eval_shape(lambda: SimpleLinear(10, 5, rngs=rngs))


def test_annotated_variables(tmp_path: Path):
    """`with_metadata(init, sharding=…)` and `with_partitioning` are `out_sharding` today.

    No jit, no constraint: an abstract model under the mesh knows its specs. A tree of named
    shardings says where things go, and `like` what they are.
    """
    mesh, other = mesh_of(fsdp=4, tp=2), mesh_of(fsdp=2, tp=4)
    model = sharding.init(lambda: Sharded(rngs=nnx.Rngs(0)), mesh)

    @nnx.jit
    def create_sharded_model() -> Sharded:
        return Sharded(rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh):  # `with mesh:` is not enough today
        by_hand = create_sharded_model()
        abstract = nnx.eval_shape(lambda: Sharded(rngs=nnx.Rngs(0)))
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", None))
        extra = nnx.Param(init(jax.random.key(0), (8, 4)))
    for found in (model, by_hand):
        assert found.up[...].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)
        assert found.up[...].addressable_shards[0].data.shape == (4, 32)
    assert np.allclose(model.up[...], by_hand.up[...], rtol=1e-5)
    ostraka.save(tmp_path / "c", {"model": model, "extra": extra})
    restored = ostraka.restore(tmp_path / "c", as_state=True)
    assert P(*restored["model"]["up"].get_metadata()["out_sharding"]) == P("fsdp", "tp")
    assert P(*restored["extra"].get_metadata()["out_sharding"]) == P("fsdp", None)
    assert restored["extra"][...].sharding.is_equivalent_to(extra[...].sharding, 2)
    again = ostraka.restore(tmp_path / "c", like={"model": abstract}, mesh=mesh)["model"]
    assert_same(again, model)
    assert again.up[...].sharding == NamedSharding(mesh, P("fsdp", "tp"))
    targets = {"model": nnx.get_named_sharding(nnx.state(model), other)}
    moved = ostraka.restore(tmp_path / "c", like={"model": model}, specs=targets)["model"]
    assert_same(moved, model)
    assert moved.down[...].sharding == NamedSharding(other, P("tp", "fsdp"))


def test_other_data_beside_arrays(tmp_path: Path):
    tree = {"state": nnx.state(make_simple()), "run": {"lr": 3e-4, "tags": ["a", None], "epoch": 3}}
    ostraka.save(tmp_path / "c", tree, metadata={"git": "abc"})
    assert ostraka.restore(tmp_path / "c", only="run/**") == {"run": tree["run"]}
    assert ostraka.open(tmp_path / "c").metadata == {"git": "abc"}


# NNX State Sharding


def test_pick_spec(tmp_path: Path):
    """Splitting is not needed. Specs that disagree give no broken result, but a costly one."""
    mesh = mesh_of(model=4)
    model = make_linear()
    graphdef, state = nnx.split(model)
    specs = jax.tree.map(pick_spec, state)
    sharded = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), state, specs)
    by_hand = nnx.merge(graphdef, sharded)
    made = sharding.spec_tree(model, pick_spec)
    assert bits(made) == bits(sharding.spec_tree(state, pick_spec))
    assert len(jax.tree.leaves(made)) == 2
    assert float(exercises.state_to_sharded_layout(0.0, jnp.ones((2, 4)), 3.0)[0]) == 2.0
    found: Any
    for found in (by_hand, sharding.place(model, mesh, made)):
        assert found.kernel[...].sharding == NamedSharding(mesh, P(None, "model"))
        assert found.bias[...].sharding == NamedSharding(mesh, P("model"))
        ostraka.save(tmp_path / "c", found)
        assert_same(ostraka.restore(tmp_path / "c", like=found), model)
    disagree = {"kernel": P(None, "model"), "bias": P()}
    (finding,) = sharding.check(model, mesh, disagree)
    assert (finding.severity, finding.path) == ("warning", "bias")
    x = jnp.ones((2, 16))
    assert np.allclose(sharding.place(model, mesh, disagree)(x), model(x), rtol=1e-5)
