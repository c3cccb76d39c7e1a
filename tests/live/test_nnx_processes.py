"""A model and its optimizer, saved under FSDP by 4 processes and restored on other meshes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

import ostraka
from nnx_models import ADAM, Block
from ostraka import sharding
from ostraka.testing import run_processes

FSDP = sharding.fsdp("data", min_size=16)
BOTH = sharding.tensor_parallel("model", column=["0"], row=["1", "2"]) | FSDP


def mesh_of(**sizes: int) -> Mesh:
    types = (AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


def make_state(mesh: Mesh, rules: Any, seed: int) -> dict[str, Any]:
    """A model, and an optimizer whose moments are not zero."""
    model, optimizer = sharding.init(lambda: Block(rngs=nnx.Rngs(seed)), mesh, rules, ADAM)
    if seed == 0:
        step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


@nnx.jit
def step(model: Block, optimizer: nnx.Optimizer) -> None:
    """Compiled as one: of several processes all run the same programs in the same order."""
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))


def local_bits(tree: Any) -> dict[str, list[tuple[str, str, bytes]]]:
    """What this process holds of each leaf: dtype, index and bytes of every shard."""
    found: dict[str, list[tuple[str, str, bytes]]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        shards = {
            (str(leaf.dtype), _show(shard.index, leaf.shape), np.asarray(shard.data).tobytes())
            for shard in leaf.addressable_shards
        }
        found[jax.tree_util.keystr(path)] = sorted(shards)
    return found


def _show(index: Any, shape: tuple[int, ...]) -> str:
    return str([part.indices(size)[:2] for part, size in zip(index, shape, strict=True)])


def whole(held: list[dict[str, Any]], like: Any) -> dict[str, bytes]:
    """The bytes of every leaf, put together from what the processes hold."""
    leaves = jax.tree_util.tree_flatten_with_path(like)[0]
    found: dict[str, bytes] = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        shape = jax.random.key_data(leaf).shape if key else leaf.shape
        array = None
        for part in held:
            for dtype, index, data in part[name]:
                if array is None:
                    array = np.full(shape, 7, dtype)
                bounds = tuple(slice(*pair) for pair in eval(index))
                box = np.empty(array[bounds].shape, dtype)
                array[bounds] = np.frombuffer(data, dtype).reshape(box.shape)
        assert array is not None
        found[name] = array.tobytes()
    return found


def save_fsdp(path: str) -> Any:
    state = make_state(mesh_of(data=8), FSDP, 0)
    kernel = state["model"].layers[0].kernel[...]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    ostraka.save(path, state)
    return local_bits(state)


def restore_both(path: str, sizes: dict[str, int]) -> Any:
    rules = BOTH if "model" in sizes else FSDP
    state = make_state(mesh_of(**sizes), rules, 1)
    places = [leaf.sharding for leaf in jax.tree.leaves(state)]
    ostraka.restore(path, into=state)
    for leaf, place in zip(jax.tree.leaves(state), places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    return local_bits(state)


def test_restore_in_two_processes(tmp_path: Path):
    """And in one, on other meshes and on one device."""
    path = str(tmp_path / "c")
    like = make_state(mesh_of(data=1), FSDP, 1)
    results = run_processes(save_fsdp, path, processes=4, devices_per_process=2)
    expected = whole([result.value for result in results], like)
    for sizes in ({"data": 2, "model": 4}, {"data": 1}):
        assert whole([restore_both(path, sizes)], like) == expected, sizes
    results = run_processes(
        restore_both, path, {"data": 2, "model": 4}, processes=2, devices_per_process=4
    )
    assert whole([result.value for result in results], like) == expected
    # On one device, without a mesh.
    abstract = nnx.eval_shape(lambda: Block(rngs=nnx.Rngs(1)))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    restored = ostraka.restore(path, like={"model": abstract}, specs=device)
    assert restored["model"].layers[0].kernel[...].devices() == {jax.devices()[3]}
    found = whole([local_bits(restored)], {"model": like["model"]})
    assert found == {name: data for name, data in expected.items() if name in found}
    assert len(found) > 10
