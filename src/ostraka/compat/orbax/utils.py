"""Small functions of `orbax.checkpoint.utils`."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._refuse import absent
from ostraka.compat.orbax._tree import is_empty, key_text
from ostraka.compat.orbax.multihost import broadcast_one_to_all as broadcast_one_to_all
from ostraka.compat.orbax.multihost import is_pathways_backend as is_pathways_backend
from ostraka.compat.orbax.multihost import is_primary_host as is_primary_host
from ostraka.compat.orbax.multihost import reached_preemption as reached_preemption
from ostraka.compat.orbax.multihost import sync_global_processes as sync_global_processes
from ostraka.compat.orbax.path import TMP_DIR_SUFFIX as TMP_DIR_SUFFIX
from ostraka.compat.orbax.path import any_checkpoint_step as any_checkpoint_step
from ostraka.compat.orbax.path import checkpoint_steps as checkpoint_steps
from ostraka.compat.orbax.path import checkpoint_steps_paths as checkpoint_steps_paths
from ostraka.compat.orbax.path import get_save_directory as get_save_directory
from ostraka.compat.orbax.path import is_checkpoint_finalized as is_checkpoint_finalized
from ostraka.compat.orbax.path import is_tmp_checkpoint as is_tmp_checkpoint
from ostraka.compat.orbax.path import step_from_checkpoint_name as step_from_checkpoint_name
from ostraka.compat.orbax.path import tmp_checkpoints as tmp_checkpoints
from ostraka.compat.orbax.tree import deserialize_tree as deserialize_tree
from ostraka.compat.orbax.tree import from_flat_dict as from_flat_dict
from ostraka.compat.orbax.tree import serialize_tree as serialize_tree
from ostraka.compat.orbax.tree import str_keypath as str_keypath
from ostraka.compat.orbax.tree import to_flat_dict as to_flat_dict
from ostraka.compat.orbax.tree import to_shape_dtype_struct as to_shape_dtype_struct


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
    sync_global_processes(name)


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

tuple_path_from_keypath = str_keypath


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
