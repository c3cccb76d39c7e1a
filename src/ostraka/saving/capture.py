"""The first stage of a save: take a live tree apart into leaf specs and handles to bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np
from jax._src.core import trace_state_clean
from jax.sharding import SingleDeviceSharding

from ostraka.common.dtypes import DTYPES
from ostraka.common.threads import StopSignal, run_all
from ostraka.layout.spec import LeafKind, LeafSpec, MeshSpec, Partition, device_boxes
from ostraka.live import shardings as _shardings
from ostraka.live import values as _values
from ostraka.live.parse import is_array, is_key, is_object, parse
from ostraka.live.values import CapturedValue, HostValue, Placement, ShardedValue, shards_of
from ostraka.tree.json_tree import encode_checked, encode_state
from ostraka.tree.json_values import mro_lookup
from ostraka.tree.nodes import Kept, Leaf, Stateful, check_unique, find_shared, leaves_of

if TYPE_CHECKING:
    from ostraka.saving.replicas import ReplicaCheck

COPIERS = max(2, min(os.cpu_count() or 1, 16))


@dataclass(frozen=True, slots=True)
class Captured:
    """A tree's leaves as data, with their values, as this process has them."""

    tree: Any
    """The tree as `_METADATA` has it, but for the states of stateful objects."""
    leaves: Sequence[LeafSpec]
    values: list[CapturedValue]
    """In the order of the leaves. Emptied when the save has ended."""
    meshes: Sequence[MeshSpec]
    process_of: tuple[int, ...]
    sole_process: Mapping[int, int]
    """By leaf, the only process that holds it. Leaves in host memory belong to this process."""
    states: Mapping[str, Any]
    """By path, the encoded states of this process's stateful objects."""
    joins: Mapping[str, Callable[[Sequence[Any]], Any]] = field(default_factory=dict[str, Any])
    """By path, what makes one state of those of all processes, for objects that can."""
    replicas: ReplicaCheck | None = None
    """Compares the replicas before the commit, if the save is to."""


def hold(values: Sequence[CapturedValue]) -> None:
    """Make all values safe from later changes of the tree."""
    for value in values:
        if isinstance(value, ShardedValue):
            value.start_copying()
    large = [copy for value in values for copy in value.hold()]
    if large:
        run_all(lambda copy: np.copyto(*copy), large, threads=COPIERS, stop=StopSignal())


def capture(tree: Any, *, may_be_empty: bool = False) -> Captured:
    """Take a tree apart.

    Raises InvalidTree for a leaf of another type, and names it. A tree without any value raises it
    too, unless it `may_be_empty`.
    """
    parsed = parse(tree)
    leaves = list(leaves_of(parsed))
    if not trace_state_clean():
        _values.refuse_inside_jit("save", leaves)
    check_unique(leaves)
    shared = find_shared(parsed, is_object)
    described = _Described(_shardings.Devices(), {}, {})
    specs: list[LeafSpec] = []
    values: list[CapturedValue] = []
    numbers: dict[str, int] = {}
    sole: dict[int, int] = {}
    states: dict[str, Any] = {}
    joins: dict[str, Any] = {}
    several = jax.process_count() > 1
    has_functions = False
    for leaf in leaves:
        _values.check_savable(leaf)
        if leaf.path in shared.arrays:
            continue
        if isinstance(leaf.value, Stateful):
            owner = leaf.value.owner
            states[leaf.path] = encode_state(leaf.path, owner.get_state())
            if callable(mro_lookup(type(owner), "join_states")):
                joins[leaf.path] = owner.join_states
        is_jax = isinstance(leaf.value, jax.Array)
        if not is_jax and not is_array(leaf.value):
            has_functions |= isinstance(leaf.value, Kept)
            continue
        number = numbers[leaf.path] = len(specs)
        spec, value = _jax_array(leaf, described) if is_jax else _host_array(leaf)
        process = _sole_process(leaf.value) if several else None
        if process is not None:
            sole[number] = process
        specs.append(spec)
        values.append(value)
    if has_functions:
        _values.refuse_functions(parsed)
    if not specs and not may_be_empty:
        _values.refuse_empty(parsed)
    numbers |= {path: numbers[first] for path, first in shared.arrays.items() if first in numbers}
    encoded = encode_checked(parsed, leaves, numbers, shared.variables)
    meshes, process_of = list(described.meshes), described.devices.process_of
    return Captured(encoded, specs, values, meshes, process_of, sole, states, joins)


_Kind = tuple[str, int, Partition, bool, str | None, Placement]
"""Dtype, mesh, partition, True if on one device, memory and placement.

All arrays of one sharding, shape and dtype share them.
"""


class _Described(NamedTuple):
    """The devices, and the meshes and kinds of arrays so far."""

    devices: _shardings.Devices
    meshes: dict[MeshSpec, int]
    kinds: dict[Any, _Kind]


def _jax_array(leaf: Leaf, described: _Described) -> tuple[LeafSpec, CapturedValue]:
    array = cast(jax.Array, leaf.value)
    kind: LeafKind = "jax"
    prng = None
    if is_key(array):
        kind, prng = "key", _shardings.generator_name(leaf.path, array.dtype)
        array = jax.random.key_data(array)
    shape = array.shape
    key = (array.sharding, shape, array.dtype)
    found = described.kinds.get(key)
    if found is None:
        found = described.kinds[key] = _describe(leaf.path, array, described)
    dtype, mesh, partition, is_on_one, memory, placement = found
    is_free, weak = is_on_one and not array.committed, array.weak_type
    spec = LeafSpec(  # Without keywords, which would cost a fifth of a leaf's time.
        leaf.path, kind, dtype, shape, mesh, partition, prng, None, False, is_free, weak, memory
    )
    return spec, ShardedValue(array, placement)


def _describe(path: str, array: jax.Array, described: _Described) -> _Kind:
    sharding, (all_devices, meshes) = array.sharding, described[:2]
    dtype = _shardings.savable_dtype(path, array.dtype)
    mesh, partition = _shardings.describe_sharding(path, sharding, all_devices)
    process = jax.process_index()
    here = [n for n in mesh.devices if all_devices.all[n].process_index == process]
    devices = [all_devices.all[number] for number in here]
    if [shard.device for shard in shards_of(array, devices)] != devices:
        raise RuntimeError(f"JAX lists the shards of leaf {path!r} not in the mesh's order")
    placement = Placement(
        array.shape,
        devices,
        {number: index for index, number in enumerate(here)},
        device_boxes(array.shape, mesh, partition),
        gives_views=array.platform() == "cpu" and not DTYPES[dtype].packed,
    )
    number = meshes.setdefault(mesh, len(meshes))
    is_on_one = isinstance(sharding, SingleDeviceSharding)
    return dtype, number, partition, is_on_one, _shardings.memory_kind(sharding), placement


def _host_array(leaf: Leaf) -> tuple[LeafSpec, CapturedValue]:
    kind: LeafKind = "numpy" if isinstance(leaf.value, np.ndarray) else "scalar"
    array = np.asarray(leaf.value)
    dtype = _shardings.savable_dtype(leaf.path, array.dtype)
    native = np.asarray(array, dtype=array.dtype.newbyteorder("<"))
    return LeafSpec(leaf.path, kind, dtype, array.shape), HostValue(native, may_change=True)


def _sole_process(value: Any) -> int | None:
    """The only process that holds a leaf, on its devices or in its memory. None if several do."""
    if not isinstance(value, jax.Array):
        return jax.process_index()
    processes = {device.process_index for device in value.sharding.device_set}
    return processes.pop() if len(processes) == 1 else None
