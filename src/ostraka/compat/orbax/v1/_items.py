"""Checkpointables of v1: trees, objects that save and load themselves, safetensors files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ostraka.common.dtypes import numpy_dtype
from ostraka.compat.orbax import metadata as metadata_lib
from ostraka.compat.orbax._engine import Item, OpenCheckpoint, Payload, as_json
from ostraka.compat.orbax._files import as_path, await_result, empty_directory, pack
from ostraka.compat.orbax._pytree import pytree_payload, read_as_saved, read_standard
from ostraka.compat.orbax.handlers import files_of
from ostraka.compat.orbax.v1 import errors
from ostraka.compat.orbax.v1 import handlers as handlers_lib
from ostraka.compat.orbax.v1.options import Context, active_context
from ostraka.errors import NotACheckpoint, OstrakaError
from ostraka.formats.safetensors.source import open_safetensors
from ostraka.storage import open_store

STATE = "state"
AUTO = "AUTO"
"""The name of a checkpointable that stands for `state`, or for the only tree there is."""


class _Directory:
    """The directory that `save` of an object receives. It exists already."""

    def __init__(self, path: Any):
        self.path = path

    async def await_creation(self) -> Any:
        return self.path

    def __truediv__(self, name: Any) -> _Directory:
        return _Directory(self.path / name)

    def __fspath__(self) -> str:
        return str(self.path)


def _is_stateful(value: Any) -> bool:
    return not isinstance(value, type) and isinstance(value, handlers_lib.StatefulCheckpointable)


def payloads_of(named: Mapping[str, Any], default: Context | None = None) -> dict[str, Payload]:
    """Return checkpointables ready for the engine. `default` is for callers without a context."""
    context = active_context(default)
    return {name: _payload_of(name, value, context) for name, value in named.items()}


def _payload_of(name: str, value: Any, context: Context) -> Payload:
    handler = context.checkpointables_options.registry.for_save(name, value)
    if handler is not None and not isinstance(handler, handlers_lib.BuiltInHandler):
        return _files_payload(lambda to: handler.save(to, value), handlers_lib.typestr(handler))
    if _is_stateful(value):
        return _files_payload(value.save, "stateful")
    if isinstance(handler, handlers_lib.JsonHandler) or _is_for_json_alone(value):
        return Payload("json", as_json(value, f"the checkpointable {name!r}"), "json")
    return pytree_payload(value, context.save_args(value), "pytree")


def _files_payload(save: Callable[[Any], Any], by: str) -> Payload:
    with empty_directory() as directory:
        await_result(save(_Directory(directory)))
        return Payload("files", pack(directory, by), by)


def _is_for_json_alone(value: Any) -> bool:
    """True for JSON that is no tree: keys of several types can't be ordered."""
    if not handlers_lib.is_json(value):
        return False
    try:
        jax.tree.structure(value)
    except ValueError:
        return True
    return False


class AbstractArray(metadata_lib.Metadata):
    """Metadata of an array in v1. `sharding` is a JAX sharding, so its devices must exist."""

    def __init__(self, found: metadata_lib.ArrayMetadata):
        super().__init__(found.name, found.directory)
        self.shape, self.dtype = found.shape, found.dtype
        self.sharding_metadata, self.storage_metadata = found.sharding, found.storage

    @property
    def sharding(self) -> Any:
        saved = self.sharding_metadata
        return None if saved is None else saved.to_jax_sharding()

    def __repr__(self) -> str:
        where = self.sharding_metadata
        return f"ArrayMetadata(shape={self.shape}, dtype={self.dtype}, sharding_metadata={where})"


def _abstract_tree(item: Item) -> Any:
    """Return an item with abstract arrays, numbers as 0, and strings as "string"."""

    def describe(found: Any) -> Any:
        if isinstance(found, metadata_lib.ScalarMetadata):
            return found.zero
        if isinstance(found, metadata_lib.ArrayMetadata):
            return AbstractArray(found)
        return "string" if isinstance(found, metadata_lib.StringMetadata) else found

    return jax.tree.map(describe, metadata_lib.tree_metadata(item).tree)


# Over opened checkpoints


@dataclass
class CheckpointMetadata:
    """Metadata of a checkpoint. `metadata` is a tree, or a dict of trees."""

    metadata: Any = None
    custom_metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: Any = None
    path: Any = None
    step: int | None = None
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None


def tree_wanted(abstract: Any) -> Any:
    """Return the tree of a `CheckpointMetadata`, and anything else unchanged."""
    return abstract.metadata if isinstance(abstract, CheckpointMetadata) else abstract


def load_tree(
    opened: OpenCheckpoint, abstract: Any, name: str | None, default: Context | None = None
) -> Any:
    return _read(opened, _name(opened, name), tree_wanted(abstract), active_context(default))


def load_items(
    opened: OpenCheckpoint, abstract: Any, default: Context | None = None
) -> dict[str, Any]:
    """Load the checkpointables that are asked for, or all."""
    asked, context = tree_wanted(abstract), active_context(default)
    found: dict[str, Any] = {}
    for name, given in (asked or dict.fromkeys(opened.items())).items():
        try:
            found[name] = _read(opened, name, given, context)
        except OstrakaError:
            raise
        except (ValueError, TypeError) as error:
            message = f"can't load checkpointable {name!r} of {opened.path} as asked for: {error}"
            raise errors.NoEntryError(message) from error
    return found


def _read(opened: OpenCheckpoint, name: str | None, abstract: Any, context: Context) -> Any:
    """Load a checkpointable as saved, like an abstract tree, or into an object with `load`."""
    item = opened.item(name)
    if item.kind == "files":
        handler = _handler_of(opened, name, context)
        if handler is not None:
            with files_of(item) as directory:
                return await_result(handler.load(directory, abstract))
    if abstract is not None and _is_stateful(abstract):
        with files_of(item) as directory:
            await_result(abstract.load(directory))
        return abstract
    if item.kind == "files":
        raise ValueError(
            f"{item.path} was saved by an object with save() and load(), or by a handler of "
            "yours; give one to load into, or register the handler"
        )
    if abstract is None or item.kind == "json":
        return read_as_saved(item)
    is_strict = not context.array_options.loading.enable_padding_and_truncation
    is_partial = bool(context.pytree_options.loading.partial_load)
    return read_standard(item, abstract, partial=is_partial, strict=is_strict)


def _handler_of(opened: OpenCheckpoint, name: str | None, context: Context) -> Any:
    """Return the custom handler that loads a checkpointable, or None if there is none."""
    handler: Any = context.checkpointables_options.registry.for_load(
        name, opened.handlers().get(name or "")
    )
    return None if isinstance(handler, handlers_lib.BuiltInHandler) else handler


def tree_of(opened: OpenCheckpoint, name: str | None) -> CheckpointMetadata:
    found = _abstract_tree(opened.item(_name(opened, name)))
    return CheckpointMetadata(found, opened.custom, opened.metrics, opened.path)


def items_of(opened: OpenCheckpoint) -> CheckpointMetadata:
    found = {name: _abstract_item(opened, name, kind) for name, kind in opened.items().items()}
    return CheckpointMetadata(found, opened.custom, opened.metrics, opened.path)


def _abstract_item(opened: OpenCheckpoint, name: str, kind: str) -> Any:
    """Return the metadata of a checkpointable: of a tree, or by its handler. None for others."""
    item = opened.item(name)
    if kind != "files":
        return None if kind == "json" else _abstract_tree(item)
    handler = _handler_of(opened, name, active_context())
    if not hasattr(handler, "metadata"):
        return None
    with files_of(item) as directory:
        return await_result(handler.metadata(directory))


def _name(opened: OpenCheckpoint, name: str | None) -> str | None:
    """Return the name of the tree that is asked for. None stands for the only item."""
    if name is None or opened.is_single:
        return None
    there = opened.items()
    if name != AUTO or STATE in there:
        return STATE if name == AUTO else name
    trees = [known for known, kind in there.items() if kind == "pytree"]
    if len(trees) != 1:
        raise ValueError(f"{opened.path} has {list(there)}; say which with checkpointable_name=")
    return trees[0]


# Safetensors files: one, or a directory of them, as a flat dict


def open_tensors(path: Any) -> Item:
    """Open the safetensors files at a path. Raises InvalidLayoutError if there are none."""
    try:
        source = open_safetensors(open_store(path))
    except NotACheckpoint:
        source = None
    if source is None:
        raise errors.InvalidLayoutError(
            f"{path} has no safetensors files: give the path of one, or of a directory of them"
        )
    return Item(source, None, as_path(path), "pytree")


def load_tensors(path: Any, abstract: Any) -> dict[str, Any]:
    """Load tensors as numpy arrays, or those in `abstract` as JAX arrays.

    An abstract array without a sharding is loaded on all devices. Raises KeyError for a name that
    does not exist, ValueError for another shape.
    """
    item = open_tensors(path)
    saved = tensors_metadata(item)
    if abstract is None:
        like = {n: np.broadcast_to(np.zeros((), s.dtype), s.shape) for n, s in saved.items()}
        return read_standard(item, like)
    is_flat = isinstance(abstract, Mapping) and jax.tree_util.all_leaves(abstract.values())
    if not is_flat:
        raise ValueError("the tree must be a flat dict: the name of each tensor, and its shape")
    lost = sorted(abstract.keys() - saved.keys())
    if lost:
        raise KeyError(f"Tensor {lost[0]!r} not found in {path}.")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    wanted = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or everywhere
        )
        for name, leaf in abstract.items()
    }
    return read_standard(item, wanted, partial=True)


def tensors_metadata(item: Item) -> dict[str, jax.ShapeDtypeStruct]:
    specs = {keys[0]: item.saved(keys) for keys in item.tree.leaves}
    return {n: jax.ShapeDtypeStruct(s.shape, numpy_dtype(s.dtype)) for n, s in specs.items()}
