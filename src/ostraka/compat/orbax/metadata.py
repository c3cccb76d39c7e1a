"""Metadata of a checkpoint, its items and their leaves. No arrays are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jax
import numpy as np

from ostraka.common.dtypes import numpy_dtype
from ostraka.compat.orbax._engine import Item, OpenCheckpoint
from ostraka.compat.orbax._names import absent
from ostraka.layout.spec import LeafSpec
from ostraka.tree.nodes import SavedStates


@dataclass
class Metadata:
    name: str = ""
    directory: Any = None


@dataclass
class ValueMetadataEntry:
    """The kind of a leaf in Orbax's `_METADATA`. Ostraka's checkpoints have none."""

    value_type: str
    skip_deserialize: bool = False
    write_shape: tuple[int, ...] | None = None


@dataclass
class ArrayMetadata(Metadata):
    shape: tuple[int, ...] = ()
    sharding: Any = None
    dtype: Any = None
    storage: Any = None


class ScalarMetadata(ArrayMetadata):
    @property
    def zero(self) -> Any:
        """A number of the same type."""
        return {"b": False, "f": 0.0, "c": 0j}.get(self.dtype.kind, 0)


class StringMetadata(Metadata):
    """Metadata of a text."""


@dataclass
class ShardingMetadata:
    """The saved sharding of an array."""

    def to_jax_sharding(self) -> Any:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])


class SingleDeviceShardingMetadata(ShardingMetadata):
    """The sharding of an array on one device."""


@dataclass
class NamedShardingMetadata(ShardingMetadata):
    shape: tuple[int, ...] = ()
    axis_names: tuple[str, ...] = ()
    partition_spec: tuple[Any, ...] = ()

    def to_jax_sharding(self) -> Any:
        count = int(np.prod(self.shape))
        if count > len(jax.devices()):
            raise ValueError(
                f"the array was on a mesh of {count} devices, and {len(jax.devices())} are here"
            )
        devices = np.array(jax.devices()[:count]).reshape(self.shape)
        mesh = jax.sharding.Mesh(devices, self.axis_names)
        return jax.sharding.NamedSharding(mesh, jax.P(*self.partition_spec))


@dataclass(eq=False)
class TreeMetadata:
    """The tree of an item with metadata for leaves: `m["params"]`, `m.tree`, `m.items()`."""

    tree: Any
    custom_metadata: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in ("keys", "values", "items", "get"):
            return getattr(self.tree, name)
        raise AttributeError(f"TreeMetadata has no {name!r}")

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)


def _children_with_keys(metadata: TreeMetadata) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the entries of the tree itself, so that leaves keep their paths."""
    tree = metadata.tree
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda n: n is not tree)
    children = [(path[0] if path else jax.tree_util.GetAttrKey("tree"), x) for path, x in found]
    return children, (structure, metadata.custom_metadata)


def _from_children(about: Any, children: Any) -> TreeMetadata:
    structure, custom_metadata = about
    return TreeMetadata(jax.tree_util.tree_unflatten(structure, children), custom_metadata)


jax.tree_util.register_pytree_with_keys(TreeMetadata, _children_with_keys, _from_children)


@dataclass
class StepMetadata:
    item_handlers: Any = None
    item_metadata: Any = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    performance_metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class RootMetadata:
    internal_metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    custom_metadata: dict[str, Any] = field(default_factory=dict[str, Any])


def tree_metadata(item: Item) -> TreeMetadata:
    """Return the metadata of each leaf of an item."""
    return TreeMetadata(item.tree.nested([_leaf(item, keys) for keys in item.tree.leaves]))


def _leaf(item: Item, keys: tuple[str, ...]) -> Any:
    saved = item.saved(keys)
    name = ".".join(keys)
    if isinstance(saved, LeafSpec):
        # Orbax describes PRNG keys by their numbers.
        shape, dtype = tuple(saved.own_shape), numpy_dtype(saved.dtype)
        return ArrayMetadata(name, item.path, shape, _sharding(item, saved), dtype)
    if isinstance(saved, str):
        return StringMetadata(name, item.path)
    if isinstance(saved, bool | int | float):
        # An integer of any size has no dtype of its own in numpy.
        dtype = np.asarray(saved).dtype
        return ScalarMetadata(name, item.path, (), None, np.dtype(int) if dtype == "O" else dtype)
    return Metadata(name, item.path) if isinstance(saved, SavedStates) else saved


def _sharding(item: Item, spec: LeafSpec) -> Any:
    if spec.mesh < 0 or spec.kind not in ("jax", "key"):
        return None
    mesh = item.source.saved.meshes[spec.mesh]
    if len(mesh.devices) == 1:
        return SingleDeviceShardingMetadata()
    axes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    entries = [None if not e else e[0] if len(e) == 1 else tuple(e) for e in spec.partition]
    return NamedShardingMetadata(tuple(axes.values()), tuple(axes), tuple(entries))


def step_metadata(opened: OpenCheckpoint, items: Any) -> StepMetadata:
    handlers: Any = opened.handlers()
    if opened.is_single:
        handlers = handlers.get("default")
    metrics = opened.metrics
    saved: Any = opened.source.saved.writer.get("time")
    committed_ns = int(datetime.fromisoformat(saved).timestamp() * 1e9) if saved else None
    return StepMetadata(
        item_handlers=handlers or None,
        item_metadata=items,
        metrics=dict(metrics) if isinstance(metrics, dict) else {},
        commit_timestamp_nsecs=committed_ns,
        custom_metadata=opened.custom,
    )


def get_step_metadata(path: Any) -> StepMetadata:
    """Return the metadata of a step without its items. Raises ValueError if it does not exist."""
    try:
        opened = OpenCheckpoint(path)
    except FileNotFoundError as error:
        raise ValueError(f"Step metadata not found: there is no checkpoint at {path}") from error
    return step_metadata(opened, None)


MetadataStore = absent("metadata.MetadataStore", "call metadata.get_step_metadata(path)")
metadata_store = absent("metadata.metadata_store", "call metadata.get_step_metadata(path)")
StorageMetadata = absent("metadata.StorageMetadata", "Ostraka has no chunks; see ostraka.open")
