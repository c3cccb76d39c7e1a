"""Orbax's v1: functions over paths, `training.Checkpointer`, `Context`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ostraka.compat.orbax import multihost as multihost
from ostraka.compat.orbax._engine import About, Opened, as_json, write
from ostraka.compat.orbax._leaves import PLACEHOLDER as PLACEHOLDER
from ostraka.compat.orbax._place import is_finished, remove, store_at
from ostraka.compat.orbax._refuse import refuse
from ostraka.compat.orbax.metadata import tree_metadata
from ostraka.compat.orbax.v1 import errors as errors
from ostraka.compat.orbax.v1 import options as options
from ostraka.compat.orbax.v1._context import Context as Context
from ostraka.compat.orbax.v1._context import active_context
from ostraka.compat.orbax.v1._items import StatefulCheckpointable as StatefulCheckpointable
from ostraka.compat.orbax.v1._items import payloads_of as _payloads_of
from ostraka.compat.orbax.v1._items import read_checkpointable as _read
from ostraka.compat.orbax.v1._safetensors import load_tensors as _load_tensors
from ostraka.compat.orbax.v1._safetensors import open_tensors as _open_tensors
from ostraka.compat.orbax.v1._safetensors import tensors_metadata as _tensors_metadata
from ostraka.errors import OstrakaError

_refused = refuse(__name__)
_STATE = "state"
_AUTO = "AUTO"


def __getattr__(name: str) -> Any:
    if name in ("training", "path", "arrays"):
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    return _refused(name)


class AsyncResponse:
    """Something that goes on in the background; `result()` waits for it."""

    def __init__(self, wait: Callable[[float | None], Any]):
        self._wait = wait
        self._result: list[Any] = []
        self._lock = threading.Lock()

    def result(self, timeout: float | None = None) -> Any:
        with self._lock:
            if not self._result:
                self._result.append(self._wait(timeout))
            return self._result[0]


@dataclass
class CheckpointMetadata:
    """What a checkpoint holds: `metadata` is a tree, or a dict of them."""

    metadata: Any = None
    custom_metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: Any = None
    path: Any = None
    step: int | None = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None


PyTreeMetadata = CheckpointMetadata


def save(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = _STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Save a tree. Raises ValueError if something is there, unless `overwrite`."""
    named = {checkpointable_name: state}
    save_checkpointables(path, named, overwrite=overwrite, custom_metadata=custom_metadata)


def save_async(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = _STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse:
    """As `save`, in the background once the values are safe."""
    named = {checkpointable_name: state}
    return save_checkpointables_async(
        path, named, overwrite=overwrite, custom_metadata=custom_metadata
    )


def save_checkpointables(
    path: Any,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Save several trees and objects by name, in one atomic event."""
    _refuse_safetensors("saving")
    about = About(as_json(custom_metadata or {}, "custom_metadata"))
    write(path, _payloads_of(checkpointables, active_context()), about, force=overwrite)


def save_checkpointables_async(
    path: Any,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse:
    _refuse_safetensors("saving")
    about = About(as_json(custom_metadata or {}, "custom_metadata"))
    payloads = _payloads_of(checkpointables, active_context())
    handle = write(path, payloads, about, force=overwrite, background=True)
    assert handle is not None
    return AsyncResponse(handle.wait)


def load(path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = _AUTO) -> Any:
    """The tree at a path, as saved or as an abstract tree says."""
    if _is_safetensors(path):
        given = abstract_state.metadata if _is_found(abstract_state) else abstract_state
        return _load_tensors(path, given)
    return load_tree(_open(path), abstract_state, checkpointable_name, active_context())


def load_async(
    path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = _AUTO
) -> AsyncResponse:
    name = checkpointable_name
    return AsyncResponse(lambda _: load(path, abstract_state, checkpointable_name=name))


def load_checkpointables(path: Any, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Those that are asked for, or all."""
    _refuse_safetensors("load_checkpointables")
    return load_items(_open(path), abstract_checkpointables, active_context())


def load_checkpointables_async(path: Any, abstract_checkpointables: Any = None) -> AsyncResponse:
    return AsyncResponse(lambda _: load_checkpointables(path, abstract_checkpointables))


def pytree_metadata(path: Any, *, checkpointable_name: str | None = _AUTO) -> CheckpointMetadata:
    """The shapes, dtypes and shardings of a tree."""
    if _is_safetensors(path):
        found = _open_tensors(path)
        return CheckpointMetadata(_tensors_metadata(found.item), found.custom, path=found.path)
    return tree_of(_open(path), checkpointable_name)


metadata = pytree_metadata


def checkpointables_metadata(path: Any) -> CheckpointMetadata:
    _refuse_safetensors("checkpointables_metadata")
    return items_of(_open(path))


def is_orbax_checkpoint(path: Any) -> bool:
    """Whether there is a checkpoint that can be loaded: of Orbax's, or of ours."""
    return is_finished(store_at(path))


def delete(path: Any) -> None:
    """Delete the checkpoint at a path."""
    _open(path)
    remove(store_at(path))


def delete_async(path: Any) -> AsyncResponse:
    """As `delete`; it has been done when this returns."""
    delete(path)
    return AsyncResponse(lambda _: None)


save_pytree, save_pytree_async = save, save_async
load_pytree, load_pytree_async = load, load_async


# Over opened checkpoints, for `training` too


def _is_safetensors(path: Any) -> bool:
    context = active_context()
    return context.is_safetensors or (context.is_auto and not is_finished(store_at(path)))


def _refuse_safetensors(what: str) -> None:
    if active_context().is_safetensors:
        raise NotImplementedError(
            f"{what} is not supported with CheckpointLayout.SAFETENSORS, which is for load and "
            "metadata; ostraka.convert writes safetensors files"
        )


def _open(path: Any) -> Opened:
    try:
        return Opened(path)
    except FileNotFoundError as error:
        raise errors.InvalidLayoutError(f"there is no checkpoint at {path}") from error


def load_tree(opened: Opened, abstract: Any, name: str | None, context: Context) -> Any:
    wanted = getattr(abstract, "metadata", abstract) if _is_found(abstract) else abstract
    return _read(opened.item(_name(opened, name)), wanted, context)


def load_items(opened: Opened, abstract: Any, context: Context) -> dict[str, Any]:
    asked = abstract.metadata if _is_found(abstract) else abstract
    wanted: dict[str, Any] = dict(asked) if asked else dict.fromkeys(opened.items())
    return {name: _load_item(opened, name, given, context) for name, given in wanted.items()}


def _load_item(opened: Opened, name: str, given: Any, context: Context) -> Any:
    item = opened.item(name)
    try:
        return _read(item, given, context)
    except OstrakaError:
        raise
    except (ValueError, TypeError) as error:
        message = f"can't load checkpointable {name!r} of {opened.path} as asked for: {error}"
        raise errors.NoEntryError(message) from error


def tree_of(opened: Opened, name: str | None) -> CheckpointMetadata:
    found = tree_metadata(opened.item(_name(opened, name))).tree
    return CheckpointMetadata(found, opened.custom, opened.metrics, opened.path)


def items_of(opened: Opened) -> CheckpointMetadata:
    found = {
        name: None if kind == "files" else tree_metadata(opened.item(name)).tree
        for name, kind in opened.items().items()
    }
    return CheckpointMetadata(found, opened.custom, opened.metrics, opened.path)


def _is_found(value: Any) -> bool:
    return isinstance(value, CheckpointMetadata)


def _name(opened: Opened, name: str | None) -> str | None:
    """Which item a tree is: that of the name, or the one that is a tree."""
    if name is None or opened.is_single:
        return None
    there = opened.items()
    if name != _AUTO or _STATE in there:
        return _STATE if name == _AUTO else name
    trees = [known for known, kind in there.items() if kind == "pytree"]
    if len(trees) != 1:
        raise ValueError(f"{opened.path} has {list(there)}; say which with checkpointable_name=")
    return trees[0]
