"""More scenarios: what programs of others do, found by running them against both libraries."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file

from orbax_scenarios import abstract, same, saved, saved_standard, scenario, tree


@scenario("v1.Context, v1.options", "arguments of the calls")
def v1_context(ocp: Any, d: Path) -> None:
    """options for the calls inside; changes a copy, which overrides the checkpointer's"""
    v1 = ocp.v1
    context = v1.Context()
    context.asynchronous.timeout_secs = 100
    partial = v1.Context(context)
    partial.pytree.loading.partial_load = True
    assert partial.asynchronous.timeout_secs == 100
    assert not context.pytree.loading.partial_load
    loading = v1.options.PyTreeOptions(loading=v1.options.PyTreeOptions.Loading(partial_load=True))
    with v1.training.Checkpointer(d / "m", context=context) as checkpointer:
        checkpointer.save(1, tree())
        for other in (partial, v1.Context(pytree_options=loading)):
            with other:
                found = checkpointer.load(1, {"w": abstract()["w"]})
            same(found, {"w": tree()["w"]})
    assert context.deletion.gcs_deletion_options.todelete_full_path is None
    gcs = v1.options.DeletionOptions.GcsDeletionOptions(todelete_full_path="trash")
    context = v1.Context(deletion_options=v1.options.DeletionOptions(gcs_deletion_options=gcs))
    assert v1.Context(context).deletion.gcs_deletion_options.todelete_full_path == "trash"


@scenario("v1.options.ArrayOptions.Saving", "ostraka.save(dtype=)")
def v1_dtypes_by_leaf(ocp: Any, d: Path) -> None:
    """`storage_options` casts saved leaves, all or by a function of path and leaf"""
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


@scenario("utils.fully_replicated_host_local_array_to_global_array", "not needed")
def host_local_arrays(ocp: Any, d: Path) -> None:
    """an array that every device holds becomes one array over all devices"""
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("x",))
    local = jax.device_put(jnp.arange(3.0), jax.sharding.NamedSharding(mesh, jax.P()))
    found = ocp.utils.fully_replicated_host_local_array_to_global_array(local)
    assert found.sharding.device_set == set(jax.devices())
    np.testing.assert_array_equal(found, np.arange(3.0))


def same_key(found: Any, key: Any) -> None:
    assert found.dtype == key.dtype
    assert (found == key).all()


@scenario("PRNG keys", "the key in the tree")
def prng_keys_in_a_template(ocp: Any, d: Path) -> None:
    """templates have keys, abstract keys or key data; NumPy receives key data"""
    key = jax.random.key(3)
    checkpointer = saved_standard(ocp, d / "a", {"k": key, "w": jnp.ones(1)})
    here = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), PartitionSpec())
    single = SingleDeviceSharding(jax.devices()[0])
    for like in (
        jax.random.key(0),
        jax.ShapeDtypeStruct((), key.dtype),
        jax.ShapeDtypeStruct((), key.dtype, sharding=here),
        jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=single),
    ):
        same_key(checkpointer.restore(d / "a", {"k": like, "w": jnp.zeros(1)})["k"], key)
    with pytest.raises(ValueError, match="key|scalar"):
        checkpointer.restore(d / "a", {"k": 1.5, "w": jnp.zeros(1)})

    checkpointer = saved(ocp, d / "b", {"k": key})
    same_key(checkpointer.restore(d / "b")["k"], key)
    args = ocp.checkpoint_utils.construct_restore_args({"k": jax.random.key(0)})
    found = checkpointer.restore(d / "b", item={"k": jax.random.key(0)}, restore_args=args)
    same_key(found["k"], key)
    numbers = {"k": ocp.RestoreArgs(restore_type=np.ndarray)}
    found = checkpointer.restore(d / "b", restore_args=numbers)["k"]
    same(found, np.asarray(jax.random.key_data(key)))


@scenario("v1.options.CheckpointLayout.SAFETENSORS", "ostraka.restore(path)")
def v1_safetensors(ocp: Any, d: Path) -> None:
    """a safetensors file or directory as a flat dict; sharded as in MaxText"""
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
