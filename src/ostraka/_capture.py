"""The arrays of a tree as leaf specs and handles to their bytes, and JAX's shardings as data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from ostraka import _pattern
from ostraka._document import encode_checked, encode_state
from ostraka._nodes import Leaf, Stateful, check_unique, find_shared, leaves_of
from ostraka._parallel import StopSignal, run_all
from ostraka._spec import (
    DTYPES,
    LeafKind,
    LeafSpec,
    MeshSpec,
    Partition,
    device_boxes,
    dtype_name,
    is_floating,
)
from ostraka._tree import check_savable, is_array, is_key, is_object, parse
from ostraka._values import CapturedValue, HostValue, Placement, ShardedValue, shards_of
from ostraka.errors import InvalidTree

_COPIERS = max(2, min(os.cpu_count() or 1, 16))


class Devices:
    """The run's devices in one order that all processes share; a device's place is its number."""

    def __init__(self) -> None:
        self.all: list[Any] = list(jax.devices())
        self._numbers = dict(zip(self.all, range(len(self.all)), strict=True))

    def number(self, device: Any) -> int:
        found = self._numbers.get(device)
        if found is None:
            # Of another backend than the default one, such as host memory beside accelerators.
            found = self._numbers[device] = len(self.all)
            self.all.append(device)
        return found

    @property
    def process_of(self) -> tuple[int, ...]:
        return tuple(map(attrgetter("process_index"), self.all))


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
    """Of several processes, the one whose devices alone hold a leaf; host memory is this one's."""
    states: Mapping[str, Any]
    """By path, the encoded states of this process's stateful objects."""


def hold(values: Sequence[CapturedValue]) -> None:
    """Make all values safe from what happens to the tree after this."""
    for value in values:
        if isinstance(value, ShardedValue):
            value.start_copying()
    large = [copy for value in values for copy in value.hold()]
    if large:
        run_all(lambda copy: np.copyto(*copy), large, threads=_COPIERS, stop=StopSignal())


DtypeRule = Any
"""A dtype for all floating-point arrays, or a mapping from path patterns to dtypes."""


def check_dtype_rule(rule: DtypeRule, leaves: Sequence[LeafSpec] | None = None) -> None:
    """Raise ValueError for a rule that names something else than floating-point dtypes.

    And, given the leaves, for a pattern that matches none of those that it can be about.
    """
    for found in cast("dict[str, Any]", rule).values() if isinstance(rule, dict) else [rule]:
        floating_dtype(found, "")
    if leaves is None or not isinstance(rule, dict):
        return
    paths = [leaf.path for leaf in leaves if may_cast(leaf)]
    for pattern in _pattern.unmatched(cast("dict[str, Any]", rule), paths):
        raise ValueError(f"dtype has {pattern}, which matches no floating-point array of the tree")


def may_cast(spec: LeafSpec) -> bool:
    """Whether `dtype=` may mean this leaf; scalars keep their dtype."""
    return spec.kind in ("jax", "numpy") and is_floating(spec.dtype) and bool(spec.shape)


def floating_dtype(rule: DtypeRule, path: str) -> str | None:
    """The dtype that a rule gives to a path. Raises ValueError for what is not floating-point."""
    found = _pattern.lookup(cast("dict[str, Any]", rule), path) if isinstance(rule, dict) else rule
    if found is None:
        return None
    try:
        name = found if isinstance(found, str) else np.dtype(found).name
    except TypeError as error:
        raise TypeError(f"dtype is {found!r:.80}; it must be a dtype, as bfloat16 is") from error
    if name not in DTYPES or not is_floating(name):
        raise ValueError(f"dtype is {name!r}; it must be a floating-point dtype, as bfloat16 is")
    return name


def capture(tree: Any) -> Captured:
    """Take a tree apart. Raises InvalidTree, naming the leaf, for what can't be saved."""
    return _Capture().run(tree)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What all arrays of one sharding, shape and dtype have in common."""

    dtype: str
    mesh: int
    partition: Partition
    is_on_one: bool
    memory: str | None
    placement: Placement


class _Capture:
    def __init__(self) -> None:
        self._devices = Devices()
        self._meshes: dict[MeshSpec, int] = {}
        self._kinds: dict[Any, _Kind] = {}
        self._several = jax.process_count() > 1
        self._process = jax.process_index()

    def run(self, tree: Any) -> Captured:
        parsed = parse(tree)
        leaves = list(leaves_of(parsed))
        check_unique(leaves)
        shared = find_shared(parsed, is_object)
        specs: list[LeafSpec] = []
        values: list[CapturedValue] = []
        numbers: dict[str, int] = {}
        sole: dict[int, int] = {}
        states: dict[str, Any] = {}
        for leaf in leaves:
            check_savable(leaf)
            if leaf.path in shared.arrays:
                continue
            if isinstance(leaf.value, Stateful):
                states[leaf.path] = encode_state(leaf.path, leaf.value.owner.get_state())
            is_jax = isinstance(leaf.value, jax.Array)
            if not is_jax and not is_array(leaf.value):
                continue
            number = numbers[leaf.path] = len(specs)
            spec, value = self._jax_array(leaf) if is_jax else _host_array(leaf)
            process = _sole_process(leaf.value) if self._several else None
            if process is not None:
                sole[number] = process
            specs.append(spec)
            values.append(value)
        for path, first in shared.arrays.items():
            if first in numbers:
                numbers[path] = numbers[first]
        encoded = encode_checked(parsed, leaves, numbers, shared.variables)
        return Captured(
            encoded, specs, values, list(self._meshes), self._devices.process_of, sole, states
        )

    def _jax_array(self, leaf: Leaf) -> tuple[LeafSpec, CapturedValue]:
        array = cast(jax.Array, leaf.value)
        kind: LeafKind = "jax"
        prng = None
        if is_key(array):
            kind, prng = "key", str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
        shape = array.shape
        key = (array.sharding, shape, array.dtype)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = self._describe(leaf.path, array)
        spec = LeafSpec(  # Without keywords, which would cost a fifth of a leaf's time.
            leaf.path,
            kind,
            found.dtype,
            shape,
            found.mesh,
            found.partition,
            prng,
            None,
            False,
            found.is_on_one and not array.committed,
            array.weak_type,
            found.memory,
        )
        return spec, ShardedValue(array, found.placement)

    def _describe(self, path: str, array: jax.Array) -> _Kind:
        sharding = array.sharding
        dtype = savable_dtype(path, array.dtype)
        mesh, partition = describe_sharding(path, sharding, self._devices)
        here = [n for n in mesh.devices if self._devices.all[n].process_index == self._process]
        devices = [self._devices.all[number] for number in here]
        if [shard.device for shard in shards_of(array, devices)] != devices:
            raise RuntimeError(f"JAX lists the shards of leaf {path!r} not in the mesh's order")
        return _Kind(
            dtype,
            self._meshes.setdefault(mesh, len(self._meshes)),
            partition,
            isinstance(sharding, SingleDeviceSharding),
            memory_kind(sharding),
            Placement(
                array.shape,
                devices,
                {number: index for index, number in enumerate(here)},
                device_boxes(array.shape, mesh, partition),
                gives_views=array.platform() == "cpu" and not DTYPES[dtype].packed,
            ),
        )


def _host_array(leaf: Leaf) -> tuple[LeafSpec, CapturedValue]:
    kind: LeafKind = "numpy" if isinstance(leaf.value, np.ndarray) else "scalar"
    array = np.asarray(leaf.value)
    dtype = savable_dtype(leaf.path, array.dtype)
    native = np.asarray(array, dtype=array.dtype.newbyteorder("<"))
    return LeafSpec(leaf.path, kind, dtype, array.shape), HostValue(native, may_change=True)


def _sole_process(value: Any) -> int | None:
    """The process whose devices, or whose memory, alone hold a leaf."""
    if not isinstance(value, jax.Array):
        return jax.process_index()
    processes = {device.process_index for device in value.sharding.device_set}
    return processes.pop() if len(processes) == 1 else None


def memory_kind(sharding: Any) -> str | None:
    """The kind of memory that a sharding names, if it is not the default one of its devices."""
    found = sharding.memory_kind
    if found is None:
        return None
    device = next(iter(sharding.device_set))
    return None if found == device.default_memory().kind else found


def savable_dtype(path: str, dtype: Any) -> str:
    """The name of a dtype. Raises InvalidTree if a leaf can't be saved for it."""
    name = dtype_name(dtype)
    if name not in DTYPES:
        raise InvalidTree(
            f"leaf {path!r} has the dtype {dtype}, which can't be saved; only numbers, booleans "
            "and PRNG keys can"
        )
    return name


def describe_sharding(path: str, sharding: Any, devices: Devices) -> tuple[MeshSpec, Partition]:
    """A JAX sharding as data."""
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return MeshSpec((), (), (devices.number(device),)), ()
    if not isinstance(sharding, NamedSharding):
        raise InvalidTree(
            f"leaf {path!r} has a {type(sharding).__name__}; only NamedSharding and "
            "SingleDeviceSharding can be saved: put it on a mesh with jax.device_put first"
        )
    for name in sharding.mesh.axis_names:
        if not isinstance(name, str):
            raise InvalidTree(
                f"leaf {path!r} is on a mesh with the axis {name!r}; to be saved, axes must have "
                "names that are text"
            )
    if getattr(sharding.spec, "unreduced", None) or getattr(sharding.spec, "reduced", None):
        raise InvalidTree(
            f"leaf {path!r} has the spec {sharding.spec}, of which only parts of a sum are there: "
            "reduce it first"
        )
    return describe_mesh(sharding.mesh, devices), describe_spec(path, sharding.spec)


def describe_mesh(mesh: Any, devices: Devices) -> MeshSpec:
    types = tuple(axis_type.name.lower() for axis_type in mesh.axis_types)
    return MeshSpec(
        axis_names=tuple(str(name) for name in mesh.axis_names),
        axis_sizes=tuple(mesh.shape[name] for name in mesh.axis_names),
        devices=tuple(devices.number(device) for device in mesh.devices.flat),
        axis_types=() if set(types) <= {"auto"} else types,
    )


def describe_spec(path: str, spec: Any) -> Partition:
    """A PartitionSpec as data, without trailing whole dimensions."""
    entries = list(spec_entries(path, spec))
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def spec_entries(path: str, spec: Any) -> Partition:
    """A PartitionSpec as data, just as long as it is."""
    entries: list[tuple[str, ...]] = []
    for axes in spec:
        if axes is None:
            entries.append(())
        elif isinstance(axes, str):
            entries.append((axes,))
        elif isinstance(axes, tuple):
            entries.append(tuple(str(axis) for axis in cast("tuple[Any, ...]", axes)))
        else:
            raise InvalidTree(
                f"leaf {path!r} has the spec {spec}, which leaves a dimension open ({axes})"
            )
    return tuple(entries)
