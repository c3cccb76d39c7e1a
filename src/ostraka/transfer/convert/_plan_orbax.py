"""Plan an Orbax checkpoint: its small files and its arrays. Pure.

Orbax itself writes this form by default: an OCDBT database of zarr arrays (version 2), one tree an
item. Arrays are not compressed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from typing import Any

from ostraka.common.dtypes import numpy_dtype
from ostraka.errors import InvalidTree, headed_list, name_few
from ostraka.layout.box import Box
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec, partition_grid
from ostraka.transfer.convert.work import Work
from ostraka.tree.json_values import key_text
from ostraka.tree.nodes import ROOT, Kept, Leaf, Node, escape, join

_CHUNK_BYTES = 32 << 20
_EMPTY = {"dict": "Dict", "list": "List", "tuple": "Tuple"}
_LACKED = frozenset({"uint4", "uint2", "float8_e4m3", "float6_e2m3fn", "float6_e3m2fn"})
"""Dtypes without a name in TensorStore."""
_ARRAY_TYPES = {"jax": "jax.Array", "key": "jax.Array", "numpy": "np.ndarray"}
"""How Orbax calls the kinds of arrays. All others are scalars."""
_SEQUENCE, _OTHER = 1, 2
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class OrbaxArray:
    """An array of the database."""

    name: str
    path: str
    """The path of the leaf when it is read back."""
    item: int
    spec: LeafSpec
    chunk: tuple[int, ...]

    def chunks(self) -> Iterator[tuple[str, Box]]:
        """The key and the box of each chunk."""
        counts = [-(-size // step) for size, step in zip(self.spec.shape, self.chunk, strict=True)]
        for at in product(*map(range, counts)):
            steps = zip(at, self.chunk, self.spec.shape, strict=True)
            box = tuple((n * step, min((n + 1) * step, size)) for n, step, size in steps)
            yield f"{self.name}/{'.'.join(map(str, at)) or '0'}", box


@dataclass(frozen=True, slots=True)
class OrbaxPlan:
    """The parts of one item of a checkpoint."""

    arrays: tuple[OrbaxArray, ...]
    values: Mapping[str, bytes]
    """Other entries of the database, by key: `.zarray` files and Python numbers."""
    files: Mapping[str, bytes]
    """Small files, by name."""


def plan_orbax(work: Work) -> OrbaxPlan:
    """Plan an item for a tree. Raises InvalidTree, naming all leaves that Orbax can't hold."""
    entries = list(_entries(work.tree, ()))
    item_of = {item.path: number for number, item in enumerate(work.items)}
    _check(entries, {item.path: item.spec for item in work.items})
    meshes = work.source.saved.meshes
    arrays: list[OrbaxArray] = []
    values: dict[str, bytes] = {}
    strings: dict[str, str] = {}
    tree: dict[str, Any] = {}
    for keys, leaf, value_type in entries:
        name = _name_of(keys)
        about: dict[str, Any] = {"value_type": value_type, "skip_deserialize": False}
        if leaf.path in item_of:
            number = item_of[leaf.path]
            item = work.items[number]
            chunk = _chunk_of(item.spec, meshes, work.source.grid_of(item.number))
            path = reduce(join, (escape(text) for text, _ in keys), "") or ROOT
            arrays.append(OrbaxArray(name, path, number, item.spec, chunk))
            values[f"{name}/.zarray"] = _zarray(item.spec.dtype, item.spec.shape, chunk)
            about["value_type"] = _ARRAY_TYPES.get(item.spec.kind, "scalar")
            if _is_jax(item.spec):
                about["write_shape"] = list(chunk)
        elif leaf.value is None or isinstance(leaf.value, Kept):
            about["skip_deserialize"] = True
        elif type(leaf.value) is str:
            about["value_type"] = "string"
            strings[name] = leaf.value
        else:
            about["value_type"] = "scalar"
            dtype = {bool: "bool", int: "int64", float: "float64"}[type(leaf.value)]
            values[f"{name}/.zarray"] = _zarray(dtype, (), ())
            values[f"{name}/0"] = numpy_dtype(dtype).type(leaf.value).tobytes()
        key_metadata = [
            {"key": text, "key_type": _SEQUENCE if in_sequence else _OTHER}
            for text, in_sequence in keys
        ]
        texts = tuple(text for text, _ in keys)
        tree[str(texts)] = {"key_metadata": key_metadata, "value_metadata": about}
    document = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    sharded = [array for array in arrays if _is_jax(array.spec)]
    shardings = {
        base64.b64encode(array.name.encode()).decode(): json.dumps(_sharding(array.spec, meshes))
        for array in sharded
    }
    metadatas = [{"array_metadata": _array_metadata(array)} for array in sharded]
    files = {
        "_METADATA": _json(document),
        "_sharding": _json(shardings),
        "array_metadatas/process_0": _json({"array_metadatas": metadatas}),
    }
    if strings:
        files["_strings.json"] = _json(strings)
    return OrbaxPlan(tuple(arrays), values, files)


_Keys = tuple[tuple[str, bool], ...]
"""The keys of a leaf in Orbax's form of a tree, each with True if it is of a sequence."""


def _name_of(keys: _Keys) -> str:
    """The name of a leaf in the database."""
    return ".".join(text for text, _ in keys)


def _entries(node: Node, keys: _Keys) -> Iterator[tuple[_Keys, Leaf, str]]:
    """The leaves of a tree in Orbax's form, and its empty containers as leaves of their kind."""
    if isinstance(node, Leaf):
        yield keys, node, "None"
    elif node.kind == "nnx":
        yield from _entries(node.children[0], keys)
    elif node.kind == "variable":
        yield from _entries(node.children[0], (*keys, ("value", False)))
    elif not node.children:
        yield keys, Leaf(node.path, None), _EMPTY.get(node.kind, "None")
    else:
        is_sequence = node.kind in ("list", "tuple")
        names = range(len(node.children)) if is_sequence else node.keys
        for name, child in zip(names, node.children, strict=True):
            yield from _entries(child, (*keys, (key_text(name), is_sequence)))


def _check(entries: Sequence[tuple[_Keys, Leaf, str]], specs: Mapping[str, LeafSpec]) -> None:
    """Raise InvalidTree for leaves that Orbax can't hold."""
    reasons: list[str] = []
    by_name: dict[str, list[str]] = {}
    for keys, leaf, _ in entries:
        if leaf.value is not None and not isinstance(leaf.value, Kept):
            by_name.setdefault(_name_of(keys), []).append(leaf.path)
            why = _refusals(leaf.value, specs.get(leaf.path))
            reasons += [f"{leaf.path!r} {reason}" for reason in why]
    reasons += [
        f"{name_few(paths)}: Orbax has one place for them, {name!r}, and would lose all but one"
        for name, paths in by_name.items()
        if len(paths) > 1
    ]
    if "" in by_name:
        reasons.append(f"{name_few(by_name[''])} would have no name: put it under a key")
    if not by_name:
        reasons.append("there is no leaf at all")
    if reasons:
        head = "Orbax can't hold what is to be converted; leave it out with only, or rename it"
        raise InvalidTree(headed_list(head, reasons))


def _refusals(value: Any, spec: LeafSpec | None) -> Iterator[str]:
    if spec is not None:
        if 0 in spec.shape:
            yield f"is empty, of the shape {spec.shape}"
        if spec.dtype in _LACKED:
            yield f"has the dtype {spec.dtype}"
        if spec.per_process:
            yield "has a value for each process"
    elif type(value) is int and value not in _INT64:
        yield "is an integer of more than 64 bits"
    elif type(value) not in (bool, int, float, str):
        yield f"is a value of the type {type(value).__name__}"
    elif type(value) is str and _SURROGATE.search(value):
        yield "is text that is no Unicode"


def _is_jax(spec: LeafSpec) -> bool:
    return _ARRAY_TYPES.get(spec.kind) == "jax.Array"


# Arrays


def _chunk_of(spec: LeafSpec, meshes: Sequence[MeshSpec], grid: Sequence[int]) -> tuple[int, ...]:
    """The chunk shape of an array: its shard, split again if it is large, evenly if possible.

    An array without a sharding is split first along the dimensions in which the source splits it,
    by its `grid`. A transposed array is split by its columns, the rows of a file.
    """
    chunk = list(spec.shape)
    order = list(range(len(chunk)))
    if spec.mesh == HOST_LOCAL:
        order.sort(key=lambda dimension: -grid[dimension])
    elif spec.kind != "key":
        grid = partition_grid(meshes[spec.mesh], spec.partition, len(chunk))
        chunk = [size // parts for size, parts in zip(chunk, grid, strict=True)]
    item_bytes = numpy_dtype(spec.dtype).itemsize
    for dimension in order:
        size = chunk[dimension]
        parts = -(-prod(chunk) * item_bytes // _CHUNK_BYTES)
        if parts <= 1:
            break
        even = (n for n in range(parts, min(2 * parts, size) + 1) if size % n == 0)
        found = next(even, None)
        chunk[dimension] = max(-(-size // parts), 1) if found is None else size // found
    return tuple(chunk)


def _zarray(dtype: str, shape: Sequence[int], chunk: Sequence[int]) -> bytes:
    found = numpy_dtype(dtype)
    # What numpy itself does not know is called by its name.
    text = found.str if found.str[1] in "biufc" and found.isbuiltin == 1 else dtype
    about = {
        "chunks": list(chunk),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": text,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return _json(about)


def _array_metadata(array: OrbaxArray) -> dict[str, Any]:
    prng = array.spec.prng
    return {
        "param_name": array.name,
        "write_shape": list(array.chunk),
        "chunk_shape": list(array.chunk),
        "ext_metadata": None if prng is None else {"random_key_impl": prng},
    }


def _sharding(spec: LeafSpec, meshes: Sequence[MeshSpec]) -> dict[str, Any]:
    mesh = MeshSpec((), (), (0,)) if spec.mesh == HOST_LOCAL else meshes[spec.mesh]
    memory = {} if spec.memory is None else {"memory_kind": spec.memory}
    if not mesh.axis_names:
        device = f"cpu:{mesh.devices[0]}"
        return {"sharding_type": "SingleDeviceSharding", "device_str": device, **memory}
    types = mesh.axis_types or ("auto",) * len(mesh.axis_names)
    return {
        "sharding_type": "NamedSharding",
        "shape": list(mesh.axis_sizes),
        "axis_names": list(mesh.axis_names),
        "axis_types": [f"AxisType.{kind.capitalize()}" for kind in types],
        "partition_spec": [axes[0] if len(axes) == 1 else axes or None for axes in spec.partition],
        "device_mesh": {"mesh": _nested(mesh.devices, mesh.axis_sizes)},
        **memory,
    }


def _nested(devices: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """The ids of devices in nested lists, one level for each axis of the mesh."""
    if len(sizes) == 1:
        return [{"id": device} for device in devices]
    step = len(devices) // sizes[0]
    return [_nested(devices[at : at + step], sizes[1:]) for at in range(0, len(devices), step)]


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
