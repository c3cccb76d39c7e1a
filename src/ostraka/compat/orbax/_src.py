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


@dataclass
class Store:
    """Accepted by `ArrayHandler(array_metadata_store=)`, without effect."""

    path_resolver: Any = None
    serializer: Any = None
    primary_host: int | None = 0
    write_timeout_secs: int = 600


class Validator:
    """Accepted by `PyTreeCheckpointHandler(array_metadata_validator=)`, without effect."""


class PathResolver:
    """Accepted by `Store`, without effect."""


class Serializer:
    """Accepted by `Store`, without effect."""


validate_all_array_metadatas = absent(
    "array_metadata_store.validate_all_array_metadatas", "call ostraka.verify(path)"
)


# serialization.replica_slices: Ostraka's saves do not call these, so replacing them changes nothing

_BY_HAND = "it is for writing Orbax's files by hand; jax.device_get copies arrays"
ReplicaSlice = absent("replica_slices.ReplicaSlice", _BY_HAND)
ReplicaSlices = absent("replica_slices.ReplicaSlices", _BY_HAND)
transfer_arrays_to_host = absent("replica_slices.transfer_arrays_to_host", _BY_HAND)
