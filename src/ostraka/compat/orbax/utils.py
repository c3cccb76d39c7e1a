"""Odds and ends that code takes from `orbax.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax._tree import is_empty
from ostraka.compat.orbax.multihost import broadcast_one_to_all as broadcast_one_to_all
from ostraka.compat.orbax.multihost import is_primary_host as is_primary_host
from ostraka.compat.orbax.multihost import reached_preemption as reached_preemption
from ostraka.compat.orbax.multihost import sync_global_processes as sync_global_processes
from ostraka.compat.orbax.path.step import TMP_DIR_SUFFIX as TMP_DIR_SUFFIX
from ostraka.compat.orbax.path.step import any_checkpoint_step as any_checkpoint_step
from ostraka.compat.orbax.path.step import checkpoint_steps as checkpoint_steps
from ostraka.compat.orbax.path.step import checkpoint_steps_paths as checkpoint_steps_paths
from ostraka.compat.orbax.path.step import get_save_directory as get_save_directory
from ostraka.compat.orbax.path.step import is_checkpoint_finalized as is_checkpoint_finalized
from ostraka.compat.orbax.path.step import is_tmp_checkpoint as is_tmp_checkpoint
from ostraka.compat.orbax.path.step import step_from_checkpoint_name as step_from_checkpoint_name
from ostraka.compat.orbax.path.step import tmp_checkpoints as tmp_checkpoints
from ostraka.compat.orbax.tree import deserialize_tree as deserialize_tree
from ostraka.compat.orbax.tree import from_flat_dict as from_flat_dict
from ostraka.compat.orbax.tree import serialize_tree as serialize_tree
from ostraka.compat.orbax.tree import to_flat_dict as to_flat_dict
from ostraka.compat.orbax.tree import to_shape_dtype_struct as to_shape_dtype_struct

__getattr__ = refuse(__name__)


def is_scalar(value: Any) -> bool:
    return isinstance(value, int | float | np.number)


def is_empty_node(node: Any) -> bool:
    return is_empty(node)


def is_empty_or_leaf(node: Any) -> bool:
    return is_empty(node) or jax.tree_util.all_leaves([node])


def fully_replicated_host_local_array_to_global_array(arr: jax.Array) -> jax.Array:
    """An array that each process has as a whole on its devices, as one over all devices.

    With a leading dimension of devices, as `jax.pmap` makes it, that is taken away.
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
    """For Orbax's own statistics; ours are in the log, and given to `on_record`."""


def sync_global_devices(name: str) -> None:
    sync_global_processes(name)
