"""More scenarios: what programs of others do, found by running them against both libraries."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from orbax_scenarios import abstract, same, scenario, tree


@scenario("metadata as restore_args", "numpy arrays in like=")
def metadata_becomes_restore_args(ocp: Any, d: Path) -> None:
    """`jax.tree.map` over what `metadata` gives makes `restore_args`, as Brax does it"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", ({"mean": jnp.ones(2)}, {"kernel": jnp.zeros((2, 3))}))
    found = checkpointer.metadata(d / "a").item_metadata
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), found)
    restored = checkpointer.restore(d / "a", ocp.args.PyTreeRestore(restore_args=args), item=None)
    assert isinstance(restored, list)
    assert isinstance(restored[0]["mean"], np.ndarray)
    assert restored[1]["kernel"].shape == (2, 3)


@scenario("Transform, keys that are new", "rename=, strict=False")
def transforms_keep_new_keys(ocp: Any, d: Path) -> None:
    """with `transforms`, a key that is only in the item keeps its value there"""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    checkpointer.save(d / "a", {"a": np.arange(4), "b": np.arange(2)})
    restored = checkpointer.restore(
        d / "a",
        args=ocp.args.PyTreeRestore(
            item={"c": ..., "d": np.arange(8)},
            restore_args={"c": ocp.RestoreArgs(restore_type=np.ndarray)},
            transforms={"c": ocp.Transform(original_key="a")},
        ),
    )
    same(restored, {"c": np.arange(4), "d": np.arange(8)})


@scenario("args.Composite, an item that is None", "one dict")
def items_that_are_left_out(ocp: Any, d: Path) -> None:
    """an item that a step leaves out comes back as None"""
    with ocp.CheckpointManager(d / "m") as manager:
        both = {"state": ocp.args.StandardSave(tree()), "extra": ocp.args.JsonSave({"x": 1})}
        manager.save(0, args=ocp.args.Composite(**both))
        manager.save(1, args=ocp.args.Composite(**{**both, "extra": None}))
        manager.wait_until_finished()
        assert manager.restore(0).extra == {"x": 1}
        assert manager.restore(1).extra is None
    with ocp.CheckpointManager(d / "n", item_names=("state", "extra")) as manager:
        manager.save(0, args=ocp.args.Composite(**both))
        manager.save(1, args=ocp.args.Composite(state=both["state"]))
        manager.wait_until_finished()
        assert list(manager.restore(0)) == ["extra", "state"]
        assert list(manager.restore(1)) == ["state"]


@scenario("v1.training.Checkpointer.save_async", "manager.save(step, tree)")
def v1_skipped_save(ocp: Any, d: Path) -> None:
    """a save that the policy skips is False, and None in the background"""
    v1 = ocp.v1
    policy = v1.training.save_decision_policies.FixedIntervalPolicy(10)
    with v1.training.Checkpointer(d / "m", save_decision_policy=policy) as checkpointer:
        assert checkpointer.save(0, tree()) is True
        assert checkpointer.save(1, tree()) is False
        assert checkpointer.save_async(2, tree()) is None
        assert checkpointer.save_checkpointables_async(3, {"state": tree()}) is None
        assert checkpointer.save_async(10, tree()).result() is True


@scenario("v1.Context, options that are set later", "arguments of the calls")
def v1_context_is_changed(ocp: Any, d: Path) -> None:
    """a copy of a context is changed; inside it, it counts more than that of the checkpointer"""
    v1 = ocp.v1
    context = v1.Context()
    context.asynchronous.timeout_secs = 100
    partial = v1.Context(context)
    partial.pytree.loading.partial_load = True
    assert partial.asynchronous.timeout_secs == 100
    assert not context.pytree.loading.partial_load
    with v1.training.Checkpointer(d / "m", context=context) as checkpointer:
        checkpointer.save(1, tree())
        with partial:
            found = checkpointer.load(1, {"w": abstract()["w"]})
    same(found, {"w": tree()["w"]})


@scenario("v1.options.ArrayOptions.Saving", "ostraka.save(dtype=)")
def v1_dtypes_by_leaf(ocp: Any, d: Path) -> None:
    """`storage_options` casts what is saved, for all leaves or as a function of path and leaf"""
    v1 = ocp.v1
    saving = v1.options.ArrayOptions.Saving
    state = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    context = v1.Context()
    context.array.saving.storage_options = saving.StorageOptions(dtype=jnp.bfloat16)
    with context:
        v1.save(d / "all", state)
    assert {leaf.dtype for leaf in jax.tree.leaves(v1.load(d / "all"))} == {jnp.dtype("bfloat16")}

    def choose(path: Any, leaf: Any) -> Any:
        return saving.StorageOptions(dtype=jnp.float16) if leaf.ndim == 1 else None

    context = v1.Context()
    context.array.saving.scoped_storage_options_creator = choose
    with context:
        v1.save(d / "some", state)
    found = v1.load(d / "some")
    assert (found["w"].dtype, found["b"].dtype) == (jnp.float32, jnp.float16)


@scenario("v1.metadata, arrays.to_shape_dtype_struct", "ostraka.open(path)")
def v1_metadata(ocp: Any, d: Path) -> None:
    """what `metadata` gives is what is to be loaded; arrays become shapes"""
    v1 = ocp.v1
    v1.save(d / "a", {"w": jnp.ones((2, 3))})
    found = v1.metadata(d / "a")
    assert found.metadata["w"].shape == (2, 3)
    same(v1.load(d / "a", found), {"w": jnp.ones((2, 3))})
    outline = v1.arrays.to_shape_dtype_struct(jnp.ones((2, 3)))
    assert (outline.shape, outline.dtype) == ((2, 3), jnp.float32)
    assert ocp.arrays.to_shape_dtype_struct(jnp.ones(2)).shape == (2,)


@scenario("experimental.v1, pathways, path.atomicity", "import ostraka")
def more_import_forms(ocp: Any, d: Path) -> None:
    """modules that programs import and hardly use"""
    assert importlib.import_module(f"{ocp.__name__}.experimental.v1").load is ocp.v1.load
    impl = ocp.pathways.CheckpointingImpl
    assert impl.from_options(use_persistence_array_handler=False) is impl.NO_DISPATCHER
    atomicity = ocp.path.atomicity
    options = ocp.CheckpointManagerOptions(temporary_path_class=atomicity.CommitFileTemporaryPath)
    with ocp.CheckpointManager(d / "m", options=options) as manager:
        assert manager.save(1, args=ocp.args.StandardSave(tree()))
    assert ocp.__version__ == "0.12.8"


@scenario("utils.fully_replicated_host_local_array_to_global_array", "not needed")
def host_local_arrays(ocp: Any, d: Path) -> None:
    """an array that each device has becomes one over all devices"""
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("x",))
    local = jax.device_put(jnp.arange(3.0), jax.sharding.NamedSharding(mesh, jax.P()))
    found = ocp.utils.fully_replicated_host_local_array_to_global_array(local)
    assert found.sharding.device_set == set(jax.devices())
    np.testing.assert_array_equal(found, np.arange(3.0))


def same_key(found: Any, key: Any) -> bool:
    return found.dtype == key.dtype and bool((found == key).all())


@scenario("PRNG keys in a template", "the key in the tree")
def prng_keys_in_a_template(ocp: Any, d: Path) -> None:
    """templates have keys, abstract keys, or the shape of their numbers; numpy gets the numbers"""
    key = jax.random.key(3)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(d / "a", {"k": key, "w": jnp.ones(1)})
    checkpointer.wait_until_finished()
    outline = jax.ShapeDtypeStruct(
        (), key.dtype, sharding=jax.sharding.NamedSharding(one_device(), jax.P())
    )
    for like in (
        jax.random.key(0),
        jax.ShapeDtypeStruct((), key.dtype),
        outline,
        jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=where),
    ):
        found = checkpointer.restore(d / "a", {"k": like, "w": jnp.zeros(1)})
        assert same_key(found["k"], key)
    with pytest.raises(ValueError, match="key|scalar"):
        checkpointer.restore(d / "a", {"k": 1.5, "w": jnp.zeros(1)})

    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "b", {"k": key})
    args = ocp.checkpoint_utils.construct_restore_args({"k": jax.random.key(0)})
    found = checkpointer.restore(d / "b", item={"k": jax.random.key(0)}, restore_args=args)
    assert same_key(found["k"], key)
    numbers = {"k": ocp.RestoreArgs(restore_type=np.ndarray)}
    found = checkpointer.restore(d / "b", restore_args=numbers)["k"]
    assert isinstance(found, np.ndarray)
    assert found.tolist() == jax.random.key_data(key).tolist()


def one_device() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))


@scenario("construct_restore_args, no shardings", "numpy arrays in like=")
def restore_args_without_shardings(ocp: Any, d: Path) -> None:
    """abstract arrays without a sharding come back as numpy arrays, of their dtype"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"w": jnp.ones((2, 3)), "b": np.ones(2), "n": 3})
    like = {
        "w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
        "b": jax.ShapeDtypeStruct((2,), jnp.float32),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
    }
    args = ocp.checkpoint_utils.construct_restore_args(like)
    assert {a.restore_type for a in args.values()} == {np.ndarray}
    assert not any(isinstance(a, ocp.ArrayRestoreArgs) for a in args.values())
    found = checkpointer.restore(d / "a", item=like, restore_args=args)
    assert all(isinstance(a, np.ndarray) for a in found.values())
    assert {name: a.dtype for name, a in found.items()} == {n: a.dtype for n, a in like.items()}


@scenario("ArrayRestoreArgs(sharding=), item=", "shardings in like=")
def item_completes_restore_args(ocp: Any, d: Path) -> None:
    """what ArrayRestoreArgs leave open, dtype and shape, is that of the item"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"w": jnp.ones((2, 3))})
    where = jax.sharding.NamedSharding(one_device(), jax.P())
    args = {"w": ocp.ArrayRestoreArgs(sharding=where)}
    like = {"w": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}
    found = checkpointer.restore(d / "a", item=like, restore_args=args)["w"]
    assert (found.dtype, found.sharding) == (jnp.bfloat16, where)
    for other in (jax.ShapeDtypeStruct((2, 4), jnp.float32), jnp.ones((2, 4)), np.ones((2, 4))):
        with pytest.raises(ValueError, match="not compatible with the stored"):
            checkpointer.restore(d / "a", item={"w": other}, restore_args=args)
    wide = {"w": ocp.ArrayRestoreArgs(sharding=where, dtype=np.float64)}
    assert checkpointer.restore(d / "a", restore_args=wide)["w"].dtype == jnp.float32
    number = {"w": ocp.RestoreArgs(restore_type=int)}
    with pytest.raises(ValueError, match="int|scalar|size 1"):
        checkpointer.restore(d / "a", restore_args=number)


@scenario("StandardRestore, numpy and numbers", "numpy arrays in like=")
def abstract_arrays_for_numpy(ocp: Any, d: Path) -> None:
    """what was no JAX array comes back as numpy, if the template does not say where it goes"""
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(d / "a", {"b": np.ones(2), "n": 3, "w": jnp.ones(2)})
    checkpointer.wait_until_finished()
    like = {
        "b": jax.ShapeDtypeStruct((2,), jnp.float32),
        "n": jax.ShapeDtypeStruct((), jnp.int32),
        "w": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    found = checkpointer.restore(d / "a", like)
    assert [isinstance(found[name], np.ndarray) for name in "bnw"] == [True, True, False]
    assert [found[name].dtype for name in "bnw"] == [jnp.float32, jnp.int32, jnp.float32]


@scenario("v1.options.CheckpointLayout.SAFETENSORS", "ostraka.restore(path)")
def v1_safetensors(ocp: Any, d: Path) -> None:
    """a safetensors file, or a directory of them, as a flat dict; sharded as MaxText does it"""
    v1 = ocp.v1
    saved = {"a.w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.arange(3)}
    (d / "hf").mkdir()
    save_file(saved, d / "hf" / "model.safetensors")
    layouts = v1.options.CheckpointLayout
    for layout in (layouts.SAFETENSORS, layouts.AUTO):
        with v1.Context(checkpoint_layout=layout):
            for path in (d / "hf", d / "hf" / "model.safetensors"):
                found = v1.load(path)
                assert all(isinstance(value, np.ndarray) for value in found.values())
                same(found, saved)
    with v1.Context(checkpoint_layout=layouts.SAFETENSORS):
        outline = v1.metadata(d / "hf").metadata
        assert {k: (v.shape, v.dtype) for k, v in outline.items()} == {
            k: (v.shape, v.dtype) for k, v in saved.items()
        }
        module = importlib.import_module(f"{ocp.__name__}._src.arrays.sharding")
        places = module.construct_maximal_shardings({"a.w": outline["a.w"]})
        like = {"a.w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=places["a.w"])}
        found = v1.load(d / "hf", like)["a.w"]
        assert (found.dtype, found.sharding) == (jnp.bfloat16, places["a.w"])
        assert len({str(shard.index) for shard in found.addressable_shards}) == len(jax.devices())
        np.testing.assert_array_equal(found.astype(np.float32), saved["a.w"])
        with pytest.raises(KeyError, match="no such"):
            v1.load(d / "hf", {"no such": like["a.w"]})
        with pytest.raises(ValueError, match="flat dict"):
            v1.load(d / "hf", {"a": like})
        with pytest.raises(v1.errors.InvalidLayoutError, match=str(d)):
            v1.load(d / "nothing")
        for call in (v1.load_checkpointables, v1.checkpointables_metadata):
            with pytest.raises(NotImplementedError, match="metadata|load"):
                call(d / "hf")
        with pytest.raises(NotImplementedError, match="[Ss]aving"):
            v1.save(d / "new", {"a": np.ones(2)})
    assert not (d / "new").exists()


@scenario("_src, experimental.emergency", "import ostraka")
def private_modules(ocp: Any, d: Path) -> None:
    """private modules that MaxText, Tunix and Gemma import are there"""

    def module(name: str) -> Any:
        return importlib.import_module(f"{ocp.__name__}.{name}")

    policies = module("_src.checkpoint_managers.save_decision_policy")
    options = ocp.CheckpointManagerOptions(
        save_decision_policy=policies.FixedIntervalPolicy(2),
        preservation_policy=module("_src.checkpoint_managers.preservation_policy").LatestN(1),
    )
    with ocp.CheckpointManager(d / "m", options=options) as manager:
        for step in range(5):
            manager.save(step, args=ocp.args.StandardSave(tree()))
        manager.wait_until_finished()
        assert manager.all_steps() == [4]
        assert ocp.args.Composite(a=1)._items == {"a": 1}
        for name in ("checkpoint_manager", "replicator_checkpoint_manager"):
            emergency = module(f"experimental.emergency.{name}")
            kind = "ReplicatorCheckpointManager" if "repl" in name else "CheckpointManager"
            assert not isinstance(manager, getattr(emergency, kind))
    assert module("_src.path.step").build_step_path(d, ocp.path.step.standard_name_format(), 7)
    assert module("_src.multihost.multihost").process_index() == 0
    handlers = module("_src.serialization.jax_array_handlers")
    assert handlers.ArrayHandler is ocp.type_handlers.ArrayHandler
    assert module("_src.metadata.value").ArrayMetadata
    assert module("_src.handlers.json_checkpoint_handler").JsonCheckpointHandler


@scenario("partial_restore=, v1's partial_load", "only=, strict=False")
def partial_trees_that_differ(ocp: Any, d: Path) -> None:
    """a leaf where a tree was saved, and the other way round, raises TypeError"""
    checkpointer = ocp.PyTreeCheckpointer()
    checkpointer.save(d / "a", {"x": jnp.ones(2), "y": {"z": jnp.ones(2)}})
    leaf = jax.ShapeDtypeStruct((2,), jnp.float32)
    for like in ({"x": leaf, "y": leaf}, {"x": {"a": leaf}}):
        args = ocp.args.PyTreeRestore(like, partial_restore=True)
        with pytest.raises(TypeError, match="Type mismatch at"):
            checkpointer.restore(d / "a", args=args)
    args = ocp.args.PyTreeRestore({"y": {"z": leaf}, "new": leaf}, partial_restore=True)
    found = checkpointer.restore(d / "a", args=args)
    assert found["new"] is leaf
    same(found["y"], {"z": jnp.ones(2)})


@scenario("v1.load_checkpointables, trees that differ", "ostraka.restore: Mismatch")
def v1_checkpointables_that_differ(ocp: Any, d: Path) -> None:
    """a template that does not fit raises KeyError, which Tunix catches; `load` ValueError"""
    v1 = ocp.v1
    v1.save_checkpointables(d / "a", {"m": {"x": jnp.ones(2)}})
    leaf = jax.ShapeDtypeStruct((2,), jnp.float32)
    other = jax.ShapeDtypeStruct((3,), jnp.float32)
    for like in ({"x": leaf, "y": leaf}, {}, {"x": {"z": leaf}}, [leaf], {"x": other}):
        with pytest.raises(KeyError, match="checkpointable"):
            v1.load_checkpointables(d / "a", {"m": like})
    with pytest.raises(KeyError, match="not found"):
        v1.load_checkpointables(d / "a", {"no such": {"x": leaf}})
    with pytest.raises(ValueError, match="do not match"):
        v1.load(d / "a", {"x": leaf, "y": leaf}, checkpointable_name="m")
