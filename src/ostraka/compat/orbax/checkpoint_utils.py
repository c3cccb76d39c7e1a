"""`construct_restore_args`, and iterators over the checkpoints of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ostraka.compat.orbax.metadata import Metadata, ScalarMetadata, StringMetadata
from ostraka.compat.orbax.path import NameFormat, latest_step_metadata
from ostraka.compat.orbax.path import checkpoint_steps as checkpoint_steps
from ostraka.compat.orbax.type_handlers import ArrayRestoreArgs, RestoreArgs

STANDARD_ARRAY_TYPES = (int, float, np.ndarray, jax.Array)


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Return a tree of `RestoreArgs` for a tree of (abstract) arrays and numbers.

    Arrays take their shardings from `sharding_tree`, or else from `target`, and the dtypes of
    `target`. Arrays without a sharding are restored as numpy arrays.
    """
    if support_layout:
        raise NotImplementedError("construct_restore_args(support_layout=True) is not supported")

    def make(leaf: Any, sharding: Any = None) -> Any:
        args = restore_args_of(leaf, sharding, set_global_shape=set_global_shape, strict=strict)
        if isinstance(args, ArrayRestoreArgs) and args.sharding is None:
            return RestoreArgs(restore_type=np.ndarray, dtype=args.dtype)
        return args

    if sharding_tree is None:
        return jax.tree.map(make, target)
    shardings = jax.tree.leaves(sharding_tree, is_leaf=lambda x: x is None)
    leaves, structure = jax.tree.flatten(target)
    if len(shardings) != len(leaves):
        raise ValueError(f"the tree has {len(leaves)} leaves, sharding_tree {len(shardings)}")
    return structure.unflatten([make(a, s) for a, s in zip(leaves, shardings, strict=True)])


def restore_args_of(
    leaf: Any, sharding: Any = None, *, set_global_shape: bool = True, strict: bool = True
) -> Any:
    """Return the RestoreArgs of one leaf of a template."""
    if leaf is PLACEHOLDER:
        return RestoreArgs()
    if isinstance(leaf, str | StringMetadata):
        return RestoreArgs(restore_type=str)
    given: Any = leaf
    dtype: Any = getattr(leaf, "dtype", None)
    where: Any = sharding if sharding is not None else getattr(leaf, "sharding", None)
    if isinstance(leaf, ScalarMetadata):
        return RestoreArgs(restore_type=type(leaf.zero), dtype=dtype)
    if isinstance(leaf, Metadata) and dtype is None:
        return RestoreArgs()  # a custom handler has saved it
    if isinstance(leaf, np.ndarray) or (isinstance(leaf, Metadata) and where is None):
        return RestoreArgs(restore_type=np.ndarray, dtype=dtype)
    if hasattr(leaf, "value_type") or not hasattr(leaf, "shape"):
        return RestoreArgs(restore_type=type(leaf))
    if isinstance(leaf, np.generic):
        return RestoreArgs(restore_type=type(leaf).__mro__[1], dtype=dtype)
    shape = tuple(given.shape) if set_global_shape else None
    if hasattr(where, "to_jax_sharding"):
        where = where.to_jax_sharding()
    return ArrayRestoreArgs(
        dtype=dtype, sharding=where, global_shape=shape, shape=shape, strict=strict
    )


def checkpoints_iterator(
    checkpoint_dir: Any, *, min_interval_secs: float = 0, **options: Any
) -> Iterator[int]:
    """Yield the newest step, and each newer one as it appears. Steps between may be skipped.

    The iterator ends after `timeout` seconds without a new step. With `timeout_fn` it ends only
    if that returns True. Takes the other options of `wait_for_new_checkpoint` too.
    """
    until_step: int | None = None
    while True:
        with wait_for_new_checkpoint(checkpoint_dir, until_step=until_step, **options) as step:
            if step == -1:
                return
            began_s = time.monotonic()
            yield step
        until_step = step + 1
        time.sleep(max(0.0, began_s + min_interval_secs - time.monotonic()))


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: Any,
    *,
    until_step: int | None = None,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
    snapshot_dir: Any = None,
    set_immutable: bool | None = None,
    ignore_snapshot_errors: bool | None = True,
) -> Generator[int]:
    """Wait for `until_step` or a later step, and yield it. Yield -1 after `timeout` seconds.

    With `timeout_fn` it waits again unless that returns True. No snapshot is made: a step is
    complete as long as it exists.
    """
    naming = step_name_format or NameFormat(step_prefix, step_format_fixed_length)
    give_up = None if timeout is None else time.monotonic() + timeout
    step = -1
    while step == -1:
        newest = latest_step_metadata(checkpoint_dir, naming)
        left_s = seconds_to_sleep if give_up is None else give_up - time.monotonic()
        if newest is not None and (until_step is None or newest.step >= until_step):
            step = newest.step
        elif left_s > 0:
            time.sleep(min(seconds_to_sleep, left_s))
        elif timeout_fn is None or timeout_fn():
            break
        elif timeout is not None:
            give_up = time.monotonic() + timeout
    yield step


def init_step_name_format(*, step_name_format: Any = None, **options: Any) -> Any:
    return step_name_format or NameFormat(**options)


def release_snapshot(*unused: Any, **options: Any) -> None:
    """Do nothing: no snapshots are made."""


_init_step_name_format, _release_snapshot = init_step_name_format, release_snapshot
