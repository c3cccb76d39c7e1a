"""The arrays of a tree as leaf specs and handles to their bytes, and JAX's shardings as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from ostraka import _box, _format, _pattern
from ostraka._box import Box
from ostraka._document import Branch, Leaf, Stateful, check_unique, encode_state, leaves_of
from ostraka._spec import (
    DTYPES,
    HOST_LOCAL,
    LeafKind,
    LeafSpec,
    MeshSpec,
    Partition,
    device_boxes,
    numpy_dtype,
)
from ostraka._tree import check_savable, is_array, is_key, parse
from ostraka.errors import InvalidTree


class Devices:
    """The run's devices in one order that all processes share; a device's place is its number."""

    def __init__(self) -> None:
        self.all: list[Any] = list(jax.devices())
        self._numbers = {device: number for number, device in enumerate(self.all)}

    def number(self, device: Any) -> int:
        found = self._numbers.get(device)
        if found is None:
            # Of another backend than the default one, such as host memory beside accelerators.
            found = self._numbers[device] = len(self.all)
            self.all.append(device)
        return found

    @property
    def process_of(self) -> tuple[int, ...]:
        return tuple(device.process_index for device in self.all)


class Value(Protocol):
    """A leaf's bytes, as far as this process holds them."""

    in_host_memory: bool
    """Whether reading costs no memory, because it gives views."""

    def read(self, device: int, box: Box) -> np.ndarray[Any, Any]:
        """The elements of a box that `device` holds; a view where that can be."""
        ...


class HostValue:
    """A value in host memory: any box can be had, whatever the device."""

    in_host_memory = True

    def __init__(self, array: np.ndarray[Any, Any]):
        self.array = array

    def read(self, device: int, box: Box) -> np.ndarray[Any, Any]:
        return self.array[_box.slices(box, _box.full(self.array.shape))]


class ProcessValue:
    """This process's own value of a leaf that every process has one of."""

    in_host_memory = True

    def __init__(self, array: np.ndarray[Any, Any]):
        self._array = array

    def read(self, device: int, box: Box) -> np.ndarray[Any, Any]:
        within = _box.slices(box[1:], _box.full(self._array.shape))
        return self._array[within][np.newaxis]


class CastValue:
    """A value that is saved as another dtype."""

    in_host_memory = False

    def __init__(self, value: Value, dtype: str):
        self._value = value
        self._dtype = numpy_dtype(dtype)

    def read(self, device: int, box: Box) -> np.ndarray[Any, Any]:
        return self._value.read(device, box).astype(self._dtype)


class ShardedValue:
    """A jax.Array: each local device gives what lies in its own shard."""

    def __init__(self, array: jax.Array, index_of: dict[int, int], boxes: dict[int, Box]):
        self._array = array
        self._index_of = index_of
        self._boxes = boxes
        packed = DTYPES[array.dtype.name].packed
        self.in_host_memory = array.platform() == "cpu" and not packed

    def read(self, device: int, box: Box) -> np.ndarray[Any, Any]:
        data = self._array.addressable_data(self._index_of[device])
        shard = np.asarray(data) if self.in_host_memory else _host_copy(data)
        held = self._boxes[device]
        return shard if box == held else shard[_box.slices(box, held)]

    def whole(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._array)


def _host_copy(array: Any) -> np.ndarray[Any, Any]:
    """A copy that is gone when its user is done with it.

    `np.asarray` makes JAX keep the copy for as long as the array lives: a save would leave a copy
    of the whole state behind in host memory.
    """
    copy = getattr(array, "_single_device_array_to_np_array_did_copy", None)
    return np.asarray(array) if copy is None else copy()[0]


@dataclass(slots=True)
class Captured:
    """A tree's leaves as data, with their values."""

    tree: Branch | Leaf
    leaves: list[LeafSpec]
    values: list[Value]
    meshes: list[MeshSpec]
    process_of: tuple[int, ...]
    sole_process: dict[int, int] = field(default_factory=dict[int, int])
    """Of several processes, the one whose devices alone hold a leaf; host memory is this one's."""

    def number_meshes(self) -> None:
        """Number the meshes in the order in which leaves use them, dropping those that none does.

        What was on this process alone may have been on a mesh of its own, which the other processes
        don't have.
        """
        numbers = {HOST_LOCAL: HOST_LOCAL}
        for leaf in self.leaves:
            numbers.setdefault(leaf.mesh, len(numbers) - 1)
        self.leaves = [replace(leaf, mesh=numbers[leaf.mesh]) for leaf in self.leaves]
        self.meshes = [self.meshes[old] for old in numbers if old != HOST_LOCAL]

    states: dict[str, Any] = field(default_factory=dict[str, Any])
    """By path, the encoded states of this process's stateful objects."""

    def save_as(self, dtype: DtypeRule) -> None:
        """Have floating-point arrays written as another dtype; scalars and others stay as they are.

        To be called when it is settled where each leaf lies.
        """
        for number, leaf in enumerate(self.leaves):
            wanted = floating_dtype(dtype, leaf.path)
            if wanted is None or wanted == leaf.dtype or not leaf.shape:
                continue
            if leaf.kind in ("jax", "numpy") and is_floating(leaf.dtype):
                self.values[number] = CastValue(self.values[number], wanted)
                self.leaves[number] = replace(leaf, dtype=wanted, cast_from=leaf.dtype)


DtypeRule = Any
"""A dtype for all floating-point arrays, or a mapping from path patterns to dtypes."""


def check_dtype_rule(rule: DtypeRule) -> None:
    """Raise ValueError for a rule that names something else than floating-point dtypes."""
    for found in cast("dict[str, Any]", rule).values() if isinstance(rule, dict) else [rule]:
        floating_dtype(found, "")


def floating_dtype(rule: DtypeRule, path: str) -> str | None:
    """The dtype that a rule gives to a path. Raises ValueError for what is not floating-point."""
    found = _pattern.lookup(cast("dict[str, Any]", rule), path) if isinstance(rule, dict) else rule
    if found is None:
        return None
    name = found if isinstance(found, str) else np.dtype(found).name
    if name not in DTYPES or not is_floating(name):
        raise ValueError(f"dtype is {name!r}; it must be a floating-point dtype, as bfloat16 is")
    return name


def is_floating(name: str) -> bool:
    return name.startswith(("float", "bfloat")) and not DTYPES[name].packed


def capture(tree: Any) -> Captured:
    """Take a tree apart. Raises InvalidTree, naming the leaf, for what can't be saved."""
    return _Capture(Devices()).run(tree)


class _Capture:
    def __init__(self, devices: Devices):
        self._devices = devices
        self._meshes: dict[MeshSpec, int] = {}
        self._shardings: dict[Any, tuple[int, Partition, dict[int, int]]] = {}
        self._boxes: dict[tuple[int, Partition, tuple[int, ...]], dict[int, Box]] = {}
        self._several = jax.process_count() > 1
        self._me = jax.process_index()

    def run(self, tree: Any) -> Captured:
        parsed = parse(tree)
        leaves = list(leaves_of(parsed))
        check_unique(leaves)
        specs: list[LeafSpec] = []
        values: list[Value] = []
        sole: dict[int, int] = {}
        states: dict[str, Any] = {}
        for leaf in leaves:
            check_savable(leaf)
            if isinstance(leaf.value, Stateful):
                states[leaf.path] = encode_state(leaf.path, leaf.value.owner.get_state())
            if not is_array(leaf.value):
                continue
            spec, value = self._array(leaf)
            process = self._sole_process(leaf.value) if self._several else None
            if process is not None:
                sole[len(specs)] = process
            specs.append(spec)
            values.append(value)
        return Captured(
            parsed, specs, values, list(self._meshes), self._devices.process_of, sole, states
        )

    def _array(self, leaf: Leaf) -> tuple[LeafSpec, Value]:
        if isinstance(leaf.value, jax.Array):
            return self._jax_array(leaf)
        kind: LeafKind = "numpy" if isinstance(leaf.value, np.ndarray) else "scalar"
        array = np.asarray(leaf.value)
        check_dtype(leaf.path, array.dtype)
        native = np.asarray(array, dtype=array.dtype.newbyteorder("<"))
        spec = LeafSpec(leaf.path, kind, array.dtype.name, array.shape)
        return spec, HostValue(native)

    def _jax_array(self, leaf: Leaf) -> tuple[LeafSpec, Value]:
        array = cast(jax.Array, leaf.value)
        kind: LeafKind = "jax"
        prng = None
        if is_key(array):
            kind, prng = "key", str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
        check_dtype(leaf.path, array.dtype)
        mesh, partition, index_of = self._sharding(leaf.path, array)
        spec = LeafSpec(leaf.path, kind, array.dtype.name, array.shape, mesh, partition, prng)
        key = (mesh, partition, array.shape)
        boxes = self._boxes.get(key)
        if boxes is None:
            mesh_spec = list(self._meshes)[mesh]
            boxes = device_boxes(array.shape, mesh_spec, partition)
            self._boxes[key] = {d: boxes[d] for d in index_of}
            boxes = self._boxes[key]
        return spec, ShardedValue(array, index_of, boxes)

    def _sharding(self, path: str, array: jax.Array) -> tuple[int, Partition, dict[int, int]]:
        known = self._shardings.get(array.sharding)
        if known is not None:
            return known
        mesh, partition = describe_sharding(path, array.sharding, self._devices)
        number = self._meshes.setdefault(mesh, len(self._meshes))
        index_of = {
            self._devices.number(shard.device): index
            for index, shard in enumerate(array.addressable_shards)
        }
        known = self._shardings[array.sharding] = (number, partition, index_of)
        return known

    def _sole_process(self, value: Any) -> int | None:
        if not isinstance(value, jax.Array):
            return self._me
        processes = {device.process_index for device in value.sharding.device_set}
        return processes.pop() if len(processes) == 1 else None


def flat_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of an array in row-major order; a view if it is contiguous."""
    contiguous = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    return contiguous.reshape(-1).view(np.uint8)


def check_dtype(path: str, dtype: Any) -> None:
    if dtype.name not in DTYPES:
        raise InvalidTree(
            f"leaf {path!r} has the dtype {dtype}, which can't be saved; only numbers, booleans "
            "and PRNG keys can"
        )


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


# Several processes: leaves that live on one process alone


def host_digests(captured: Captured, process: int) -> dict[int, str]:
    """The digest of each leaf that this process holds alone."""
    return {
        number: _format.digest(flat_bytes(_whole(captured.values[number])))
        for number, owner in captured.sole_process.items()
        if owner == process
    }


def make_common(captured: Captured, numbers: Sequence[int]) -> None:
    """Leaves that every process holds alike: any of them may write any part."""
    for number in numbers:
        leaf = captured.leaves[number]
        captured.leaves[number] = replace(leaf, mesh=HOST_LOCAL, partition=())
        captured.values[number] = HostValue(_whole(captured.values[number]))


def make_per_process(captured: Captured, numbers: Sequence[int], process_count: int) -> None:
    """Leaves of which every process holds its own: one array with the process as dimension 0."""
    for number in numbers:
        leaf = captured.leaves[number]
        captured.leaves[number] = replace(
            leaf,
            mesh=HOST_LOCAL,
            partition=(),
            shape=(process_count, *leaf.shape),
            per_process=True,
        )
        captured.values[number] = ProcessValue(_whole(captured.values[number]))


def _whole(value: Value) -> np.ndarray[Any, Any]:
    if isinstance(value, ShardedValue):
        return value.whole()
    return cast(HostValue, value).array
