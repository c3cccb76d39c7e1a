"""Names that programs import from Orbax's private modules and that no public module has.

Most belong to Orbax's own files, which Ostraka does not write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ostraka.compat.orbax._refuse import absent

# arrays.sharding

_tree: Any = jax.tree


def construct_maximal_shardings(abstract_state: Any, devices: Sequence[Any] | None = None) -> Any:
    """Return a tree of shardings with as many parts as shapes and devices allow."""
    where = list(jax.devices() if devices is None else devices)
    return _tree.map(lambda leaf: _maximal(tuple(leaf.shape), where), abstract_state)


def _maximal(shape: tuple[int, ...], devices: Sequence[Any]) -> NamedSharding:
    left = len(devices)
    parts = [1] * len(shape)
    for dimension in sorted(range(len(shape)), key=lambda d: -shape[d]):
        if shape[dimension]:
            parts[dimension] = math.gcd(shape[dimension], left)
            left //= parts[dimension]
    axes = [f"axis_{dimension}" for dimension in range(len(shape))]
    mesh = Mesh(np.array(devices).reshape(*parts, left), (*axes, "replica"))
    spec = (axis if count > 1 else None for axis, count in zip(axes, parts, strict=True))
    return NamedSharding(mesh, PartitionSpec(*spec))


# metadata.array_metadata_store


class Store:
    """Accepted by `ArrayHandler(array_metadata_store=)`, without effect."""

    def __init__(
        self,
        path_resolver: Any = None,
        serializer: Any = None,
        primary_host: int | None = 0,
        write_timeout_secs: int = 600,
    ):
        self._primary_host = primary_host

    def set_primary_host(self, primary_host: int | None) -> None:
        self._primary_host = primary_host

    async def read(self, checkpoint_dir: Any, process_index: int | None = None) -> None:
        """Return None, as Orbax does if there are no such files."""


class Validator:
    """Accepted by `PyTreeCheckpointHandler(array_metadata_validator=)`, without effect."""


class PathResolver:
    pass


class Serializer:
    pass


validate_all_array_metadatas = absent(
    "array_metadata_store.validate_all_array_metadatas", "call ostraka.verify(path)"
)


# serialization.replica_slices


@dataclass(frozen=True)
class ReplicaSlice:
    """A shard of an array in host memory."""

    index: tuple[slice, ...]
    unsliced_data: Any
    slice_args: Any = None

    @property
    def is_on_host(self) -> bool:
        return isinstance(self.unsliced_data, np.ndarray)

    def data(self) -> Any:
        return self.unsliced_data


@dataclass(frozen=True)
class ReplicaSlices:
    """The shards of an array that this process has to save."""

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    dtype: Any
    is_on_host: bool
    replica_slices: list[ReplicaSlice]

    @property
    def nbytes(self) -> int:
        return sum(part.unsliced_data.nbytes for part in self.replica_slices)


def transfer_arrays_to_host(
    arrays: Sequence[jax.Array],
    replica_id: int | None,
    use_replica_parallel: bool = True,
    *limits: Any,
    **options: Any,
) -> Sequence[ReplicaSlices]:
    """Copy the shards of a replica to host memory.

    Ostraka's own saves do not call this, so replacing it does not change them.
    """
    return [_slices_of(array, replica_id) for array in arrays]


def _slices_of(array: jax.Array, replica_id: int | None) -> ReplicaSlices:
    shards = [
        shard
        for shard in array.addressable_shards
        if replica_id is None or shard.replica_id == replica_id
    ]
    parts = [ReplicaSlice(shard.index, np.asarray(shard.data)) for shard in shards]
    local = array.sharding.shard_shape(array.shape)
    return ReplicaSlices(array.shape, local, array.sharding, array.dtype, True, parts)
