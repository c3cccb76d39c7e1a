"""What is known of a checkpoint without reading its arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ostraka._nodes import SavedStates
from ostraka._spec import LeafSpec, numpy_dtype
from ostraka.compat.orbax._engine import Item, Opened
from ostraka.compat.orbax._refuse import refuse

__getattr__ = refuse(__name__)


@dataclass
class Metadata:
    name: str = ""
    directory: Any = None


@dataclass
class ArrayMetadata(Metadata):
    shape: tuple[int, ...] = ()
    sharding: Any = None
    dtype: Any = None
    storage: Any = None


@dataclass
class ScalarMetadata(ArrayMetadata):
    pass


@dataclass
class StringMetadata(Metadata):
    pass


@dataclass
class ShardingMetadata:
    """How an array lay over the devices."""

    def to_jax_sharding(self) -> Any:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@dataclass
class SingleDeviceShardingMetadata(ShardingMetadata):
    pass


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
        return NamedSharding(mesh, PartitionSpec(*self.partition_spec))


class TreeMetadata:
    """The tree of an item with metadata for leaves: `m["params"]`, `m.tree`."""

    def __init__(self, tree: Any, custom_metadata: Any = None):
        self.tree = tree
        self.custom_metadata = custom_metadata

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.tree

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    def keys(self) -> Any:
        return self.tree.keys()

    def values(self) -> Any:
        return self.tree.values()

    def items(self) -> Any:
        return self.tree.items()

    def get(self, key: Any, default: Any = None) -> Any:
        return self.tree.get(key, default)

    def __repr__(self) -> str:
        return f"TreeMetadata(tree={self.tree!r})"


def _children_with_keys(metadata: TreeMetadata) -> tuple[list[tuple[Any, Any]], Any]:
    """The entries of the tree itself, so that leaves have the paths that they have there."""
    tree = metadata.tree
    if isinstance(tree, dict):
        known: dict[str, Any] = tree
        names = sorted(known)
        children = [(jax.tree_util.DictKey(name), known[name]) for name in names]
        return children, (names, metadata.custom_metadata)
    if isinstance(tree, list):
        several: list[Any] = tree
        children = [(jax.tree_util.SequenceKey(n), child) for n, child in enumerate(several)]
        return children, (list, metadata.custom_metadata)
    return [(jax.tree_util.GetAttrKey("tree"), tree)], (None, metadata.custom_metadata)


def _from_children(about: Any, children: Any) -> TreeMetadata:
    kind, custom = about
    if kind is None:
        return TreeMetadata(children[0], custom)
    tree = list(children) if kind is list else dict(zip(kind, children, strict=True))
    return TreeMetadata(tree, custom)


jax.tree_util.register_pytree_with_keys(TreeMetadata, _children_with_keys, _from_children)


@dataclass
class StepMetadata:
    item_handlers: Any = None
    item_metadata: Any = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    custom_metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None


@dataclass
class RootMetadata:
    internal_metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    custom_metadata: dict[str, Any] = field(default_factory=dict[str, Any])


def tree_metadata(item: Item) -> TreeMetadata:
    """What each leaf of an item is."""
    return TreeMetadata(item.tree.nested([_leaf(item, keys) for keys in item.tree.leaves]))


def _leaf(item: Item, keys: tuple[str, ...]) -> Any:
    saved = item.saved(keys)
    name = ".".join(keys)
    if isinstance(saved, LeafSpec):
        shape, dtype = tuple(saved.logical_shape), numpy_dtype(saved.dtype)
        return ArrayMetadata(name, item.path, shape, _sharding(item, saved), dtype)
    if isinstance(saved, str):
        return StringMetadata(name, item.path)
    if isinstance(saved, bool | int | float):
        return ScalarMetadata(name, item.path, (), None, np.asarray(saved).dtype)
    return Metadata(name, item.path) if isinstance(saved, SavedStates) else saved


def _sharding(item: Item, spec: LeafSpec) -> Any:
    mesh = item.mesh_of(spec)
    if mesh is None or spec.kind not in ("jax", "key"):
        return None
    if len(mesh.devices) == 1:
        return SingleDeviceShardingMetadata()
    axes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    entries = [None if not e else e[0] if len(e) == 1 else tuple(e) for e in spec.partition]
    return NamedShardingMetadata(tuple(axes.values()), tuple(axes), tuple(entries))


def step_metadata(opened: Opened, items: Any) -> StepMetadata:
    handlers: Any = opened.handlers()
    if opened.is_single:
        handlers = handlers.get("default")
    metrics = opened.metrics
    return StepMetadata(
        item_handlers=handlers or None,
        item_metadata=items,
        metrics=dict(metrics) if isinstance(metrics, dict) else {},
        custom_metadata=opened.custom,
    )
