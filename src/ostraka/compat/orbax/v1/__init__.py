"""Orbax's v1: functions over paths, `training.Checkpointer`, `Context`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ostraka.compat.orbax import multihost as multihost
from ostraka.compat.orbax._engine import OpenCheckpoint, remove, write
from ostraka.compat.orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ostraka.compat.orbax.future import AsyncResponse as AsyncResponse
from ostraka.compat.orbax.v1 import _items as items_lib
from ostraka.compat.orbax.v1 import errors as errors
from ostraka.compat.orbax.v1 import handlers as handlers
from ostraka.compat.orbax.v1 import options as options
from ostraka.compat.orbax.v1 import training as training
from ostraka.compat.orbax.v1._items import AUTO, STATE
from ostraka.compat.orbax.v1._items import CheckpointMetadata as CheckpointMetadata
from ostraka.compat.orbax.v1.options import CheckpointLayout, active_context
from ostraka.compat.orbax.v1.options import Context as Context
from ostraka.formats import has_finished_checkpoint
from ostraka.storage import open_store

Checkpointable, AbstractCheckpointable = handlers.Checkpointable, handlers.AbstractCheckpointable
CheckpointableHandler = handlers.CheckpointableHandler
StatefulCheckpointable = handlers.StatefulCheckpointable
PyTreeMetadata = CheckpointMetadata


def save(path: Any, state: Any, *, checkpointable_name: str = STATE, **options: Any) -> None:
    """Save a tree. Raises ValueError if the path exists, unless `overwrite`.

    Takes the options of `save_checkpointables`.
    """
    _write(path, {checkpointable_name: state}, **options)


def save_async(
    path: Any, state: Any, *, checkpointable_name: str = STATE, **options: Any
) -> AsyncResponse:
    """Copy the values of a tree, then save them in the background."""
    return save_checkpointables_async(path, {checkpointable_name: state}, **options)


def save_checkpointables(path: Any, checkpointables: Mapping[str, Any], **options: Any) -> None:
    """Save several trees and objects by name, atomically.

    Takes `overwrite=False` and `custom_metadata=None`.
    """
    _write(path, checkpointables, **options)


def save_checkpointables_async(
    path: Any, checkpointables: Mapping[str, Any], **options: Any
) -> AsyncResponse:
    return AsyncResponse(_write(path, checkpointables, background=True, **options).wait)


def _write(
    path: Any,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
    background: bool = False,
) -> Any:
    _refuse_safetensors("saving")
    payloads = items_lib.payloads_of(checkpointables)
    custom = custom_metadata
    return write(path, payloads, custom=custom, force=overwrite, background=background)


def load(path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = AUTO) -> Any:
    """Load the tree at a path as saved, or like an abstract tree."""
    if _is_safetensors(path):
        return items_lib.load_tensors(path, items_lib.tree_wanted(abstract_state))
    return items_lib.load_tree(_open(path), abstract_state, checkpointable_name)


def load_async(path: Any, abstract_state: Any = None, **options: Any) -> AsyncResponse:
    return AsyncResponse(lambda _: load(path, abstract_state, **options))


def load_checkpointables(path: Any, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Load the checkpointables that are asked for, or all."""
    _refuse_safetensors("load_checkpointables")
    return items_lib.load_items(_open(path), abstract_checkpointables)


def load_checkpointables_async(path: Any, abstract_checkpointables: Any = None) -> AsyncResponse:
    return AsyncResponse(lambda _: load_checkpointables(path, abstract_checkpointables))


def pytree_metadata(path: Any, checkpointable_name: str | None = AUTO) -> CheckpointMetadata:
    """Return the shapes, dtypes and shardings of a tree."""
    if _is_safetensors(path):
        found = items_lib.open_tensors(path)
        custom = dict(found.source.saved.user)
        return CheckpointMetadata(items_lib.tensors_metadata(found), custom, path=found.path)
    return items_lib.tree_of(_open(path), checkpointable_name)


metadata = pytree_metadata


def checkpointables_metadata(path: Any) -> CheckpointMetadata:
    _refuse_safetensors("checkpointables_metadata")
    return items_lib.items_of(_open(path))


def is_orbax_checkpoint(path: Any) -> bool:
    """True if there is a checkpoint that can be loaded, whether Orbax or Ostraka wrote it."""
    return has_finished_checkpoint(open_store(path))


def delete(path: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> None:
    """Delete the checkpoint at a path."""
    if checkpointable_name is not None:
        raise NotImplementedError(
            "delete(checkpointable_name=) is not supported: what is saved together stays together"
        )
    if missing_ok and not is_orbax_checkpoint(path):
        return
    _open(path)
    remove(open_store(path))


def delete_async(path: Any, **options: Any) -> AsyncResponse:
    """Delete the checkpoint at a path before this returns."""
    delete(path, **options)
    return AsyncResponse(lambda _: None)


save_pytree, save_pytree_async = save, save_async
load_pytree, load_pytree_async = load, load_async


def _is_safetensors(path: Any) -> bool:
    layout = active_context().layout
    is_auto = layout is CheckpointLayout.AUTO
    return layout is CheckpointLayout.SAFETENSORS or (is_auto and not is_orbax_checkpoint(path))


def _refuse_safetensors(what: str) -> None:
    if active_context().layout is CheckpointLayout.SAFETENSORS:
        raise NotImplementedError(
            f"{what} is not supported with CheckpointLayout.SAFETENSORS, which is for load and "
            "metadata; ostraka.convert writes safetensors files"
        )


def _open(path: Any) -> OpenCheckpoint:
    try:
        return OpenCheckpoint(path)
    except FileNotFoundError as error:
        raise errors.InvalidLayoutError(f"there is no checkpoint at {path}") from error
