"""Odds and ends that code takes from `orbax.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

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
    import jax

    return is_empty(node) or jax.tree_util.all_leaves([node])


def sync_global_devices(name: str) -> None:
    sync_global_processes(name)
