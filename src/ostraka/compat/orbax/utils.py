"""Small functions of `orbax.checkpoint.utils`, which has those of three other modules too."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax import multihost, path, tree
from ostraka.compat.orbax._names import absent, refuse
from ostraka.compat.orbax.tree import is_empty, key_text

__getattr__ = refuse(__name__, multihost, path, tree)


def is_scalar(x: Any) -> bool:
    return isinstance(x, int | float | np.number)


is_empty_node = is_empty


def is_empty_or_leaf(x: Any) -> bool:
    return is_empty(x) or jax.tree_util.all_leaves([x])


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """Turn an array that each process has whole on its devices into one over all devices.

    A leading dimension of devices, as `jax.pmap` makes it, is dropped.
    """
    shards = sorted(arr.addressable_shards, key=lambda shard: shard.device.id)
    parts: list[Any] = [shard.data for shard in shards]
    if parts[0].shape != arr.shape:
        parts = [part[0] for part in parts]
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    return jax.make_array_from_single_device_arrays(
        parts[0].shape, jax.sharding.NamedSharding(mesh, jax.P()), parts
    )


def record_saved_duration(checkpoint_start_time: float) -> None:
    """Do nothing: it is for Orbax's own statistics."""


def sync_global_devices(name: str) -> None:
    multihost.sync_global_processes(name)


# Placeholders of leaves in trees of Orbax's older format

_LEAF_PREFIXES = ("PLACEHOLDER://", "AGGREGATED://")


def leaf_placeholder(name: str) -> str:
    return f"{_LEAF_PREFIXES[0]}{name}"


def leaf_is_placeholder(leaf: Any) -> bool:
    return isinstance(leaf, str) and leaf.startswith(_LEAF_PREFIXES)


def name_from_leaf_placeholder(placeholder: str) -> str:
    """Return the name after the prefix. Raises ValueError for another string."""
    if not leaf_is_placeholder(placeholder):
        raise ValueError(f"{placeholder!r} does not begin with {' or '.join(_LEAF_PREFIXES)}")
    return placeholder.partition("://")[2]


def all_leaves_are_placeholders(tree: Any) -> bool:
    return all(map(leaf_is_placeholder, jax.tree.leaves(tree)))


# Keys of JAX's paths

tuple_path_from_keypath = tree.str_keypath


def is_sequence_key(key: Any) -> bool:
    return isinstance(key, jax.tree_util.SequenceKey | jax.tree_util.FlattenedIndexKey)


def is_dict_key(key: Any) -> bool:
    return isinstance(key, jax.tree_util.DictKey | jax.tree_util.GetAttrKey)


def get_key_name(key: Any) -> int | str:
    """Return the name or the number of a key."""
    if not is_sequence_key(key) and not is_dict_key(key):
        raise ValueError(f"{key!r} is no key of a path, but {type(key)}")
    return key.idx if isinstance(key, jax.tree_util.SequenceKey) else key_text(key)


def is_gcs_path(path: Any) -> bool:
    return os.fspath(path).startswith("gs:/")  # pathlib folds the second slash


pytree_structure = absent(
    "utils.pytree_structure", "call metadata(path) of a checkpointer, or ostraka.open(path)"
)
