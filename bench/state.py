"""The state as JAX arrays: meshes, placement, templates, and whether two states are the same."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.data import Size, make_rows

Tree: TypeAlias = dict[str, jax.Array]
Template: TypeAlias = dict[str, jax.ShapeDtypeStruct]


def row_sharding() -> NamedSharding:
    """Dimension 0 over all devices: how every state is saved."""
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))


def grid_sharding() -> NamedSharding:
    """Dimensions 0 and 1 over a mesh of 4 x 2 devices."""
    return NamedSharding(_grid(np.array(jax.devices()).reshape(4, 2)), PartitionSpec("x", "y"))


def transposed_sharding() -> NamedSharding:
    """Dimensions 0 and 1 over a mesh of 2 x 4 devices, laid out in the other order."""
    return NamedSharding(_grid(np.array(jax.devices()).reshape(4, 2).T), PartitionSpec("x", "y"))


def _grid(devices: np.ndarray) -> Mesh:
    return Mesh(devices, ("x", "y"))


def make_tree(size: Size) -> Tree:
    """The state, its rows over all devices; each process makes only the rows it holds."""
    sharding = row_sharding()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        leaves = pool.map(lambda i: _make_leaf(size, i, sharding), range(size.leaves))
        return dict(zip(size.names, leaves, strict=True))


def _make_leaf(size: Size, leaf: int, sharding: NamedSharding) -> jax.Array:
    def rows(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return make_rows(size, leaf, index[0].start or 0, index[0].stop or size.rows)

    array = jax.make_array_from_callback((size.rows, size.columns), sharding, rows)
    return jax.block_until_ready(array)


def reshard(tree: Tree, sharding: NamedSharding) -> Tree:
    """The same values placed by `sharding`, by way of the host: no contender has a part in it."""
    return {name: jax.device_put(np.asarray(leaf), sharding) for name, leaf in tree.items()}


def template(tree: Tree) -> Template:
    """Shapes, dtypes and shardings of a tree, without its values."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in tree.items()
    }


def check_same(got: Tree, want: Tree, what: str) -> None:
    """Raise unless the trees agree bit for bit, shard by shard, on the same devices."""
    if list(got) != list(want):
        raise AssertionError(f"{what}: other leaves came back than were saved")
    for name in want:
        if not _same_leaf(got[name], want[name]):
            raise AssertionError(f"{what}: {name} came back different")


def _same_leaf(got: jax.Array, want: jax.Array) -> bool:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    if not got.sharding.is_equivalent_to(want.sharding, want.ndim):
        return False
    mine = {shard.device: shard.data for shard in got.addressable_shards}
    return all(
        np.array_equal(_bits(mine[shard.device]), _bits(shard.data))
        for shard in want.addressable_shards
    )


def _bits(array: jax.Array) -> np.ndarray:
    return np.asarray(array).view(np.uint32)
