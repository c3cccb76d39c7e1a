"""More scenarios: what programs of others do, found by running them against both libraries."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
