"""`construct_restore_args`, and iterators over the checkpoints of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ostraka.compat.orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.path.step import checkpoint_steps, latest_and_path
from ostraka.compat.orbax.type_handlers import ArrayRestoreArgs, RestoreArgs

__getattr__ = refuse(__name__)

_LOOK_EVERY_S = 1.0


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """A tree of `RestoreArgs` for a tree of (abstract) arrays and numbers.

    Arrays go where `sharding_tree`, or else `target` itself, says, cast to its dtype. Those of
    which neither says anything come back as numpy arrays.
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
    """Of one leaf of a template."""
    if leaf is PLACEHOLDER or isinstance(leaf, str):
        return RestoreArgs(restore_type=None if leaf is PLACEHOLDER else str)
    if hasattr(leaf, "value_type") or not hasattr(leaf, "shape"):
        return RestoreArgs(restore_type=type(leaf))
    if isinstance(leaf, np.ndarray):
        return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    if isinstance(leaf, np.number):
        return RestoreArgs(restore_type=type(leaf).__mro__[1], dtype=leaf.dtype)
    where = sharding if sharding is not None else getattr(leaf, "sharding", None)
    shape = tuple(leaf.shape) if set_global_shape else None
    return ArrayRestoreArgs(
        dtype=leaf.dtype,
        sharding=_as_sharding(where),
        global_shape=shape,
        shape=shape,
        strict=strict,
    )


def _as_sharding(given: Any) -> Any:
    if hasattr(given, "to_jax_sharding"):
        return given.to_jax_sharding()
    return given


def checkpoints_iterator(
    checkpoint_dir: Any,
    *,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
) -> Iterator[int]:
    """The newest step, and each newer one as it appears; those between are skipped.

    After `timeout` seconds without a new one it ends; with `timeout_fn` only if that is true.
    """
    last: int | None = None
    while True:
        found = _wait(
            checkpoint_dir, last, timeout, step_prefix, step_format_fixed_length, step_name_format
        )
        if found is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        began_s = time.monotonic()
        last = found
        yield found
        left_s = began_s + min_interval_secs - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


def wait_for_new_checkpoint(
    checkpoint_dir: Any,
    *,
    until_step: int = 0,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    step_prefix: str | None = None,
    step_format_fixed_length: int | None = None,
    step_name_format: Any = None,
) -> int:
    """Wait for a step that is `until_step` or later, and return it; -1 after `timeout` seconds."""
    found = _wait(
        checkpoint_dir,
        until_step - 1,
        timeout,
        step_prefix,
        step_format_fixed_length,
        step_name_format,
        seconds_to_sleep,
    )
    if found is None and timeout_fn is not None and not timeout_fn():
        return wait_for_new_checkpoint(
            checkpoint_dir,
            until_step=until_step,
            seconds_to_sleep=seconds_to_sleep,
            timeout=timeout,
            timeout_fn=timeout_fn,
            step_prefix=step_prefix,
            step_format_fixed_length=step_format_fixed_length,
            step_name_format=step_name_format,
        )
    return -1 if found is None else found


def _wait(
    directory: Any,
    last: int | None,
    timeout: float | None,
    prefix: str | None,
    length: int | None,
    name_format: Any,
    look_every_s: float = _LOOK_EVERY_S,
) -> int | None:
    give_up = None if timeout is None else time.monotonic() + timeout
    while True:
        newest = latest_and_path(directory, prefix, length, name_format)
        if newest is not None and (last is None or newest > last):
            return newest
        left_s = look_every_s if give_up is None else give_up - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(look_every_s, left_s))


__all__ = [
    "PLACEHOLDER",
    "checkpoint_steps",
    "checkpoints_iterator",
    "construct_restore_args",
    "wait_for_new_checkpoint",
]
