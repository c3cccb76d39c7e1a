"""The on-disk format: `_METADATA`, process indexes, safetensors headers, digests. Bytes and data.

docs/format.md says the same in prose. Nothing here touches a file, a device or the clock: what a
shard file holds, and where, follows from the leaves and layouts alone, so that a writer, a reader
and a planner agree without asking each other.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from json.encoder import encode_basestring_ascii
from math import prod
from typing import Any, NamedTuple, cast, get_args

import xxhash

from ostraka import _box
from ostraka._box import Box
from ostraka._parallel import TooDeep, with_full_stack
from ostraka._spec import (
    DTYPES,
    HOST_LOCAL,
    Dtype,
    Layout,
    LeafKind,
    LeafSpec,
    MeshSpec,
    StoredLeaf,
    partition_problems,
)
from ostraka.errors import NotACheckpoint, UnsupportedFormat

METADATA_NAME = "_METADATA"
FORMAT = "ostraka"
VERSION = 1
PAGE_BYTES = 4096
BLOCK_BYTES = 4 << 20
GATHER_BYTES = 1 << 20
"""Boxes below this size share a block with their neighbours."""
MAX_HEADER_BYTES = 100_000_000
"""What the safetensors package accepts."""

ID_PATTERN = re.compile(r"[0-9a-f]{16}")
_DIGEST_MARK = b',"digest":"'
_DIGEST_TAIL = b'"}\n'
_DIGEST_DIGITS = 32
_OFFSET_DIGITS = 15
_MAX_RUN_NUMBERS = 1 << 26
_FILE_COLUMNS = ("device", "part", "header_bytes", "size")

Buffer = bytes | bytearray | memoryview


def digest(data: Any) -> str:
    """The digest of a whole small file: xxh3, 128 bits, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def block_digest(buffers: Iterable[Any]) -> str:
    """The digest of one block, given as the pieces it is made of: xxh3, 64 bits."""
    pieces = iter(buffers)
    first = next(pieces, b"")
    second = next(pieces, None)
    if second is None:
        return xxhash.xxh3_64_hexdigest(first)
    state = xxhash.xxh3_64(first)
    state.update(second)
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


def regroup(views: Iterator[Any], lengths: Iterable[int]) -> Iterator[list[Any]]:
    """A stream of byte views, cut into blocks of other lengths without copying."""
    rest: Any = next(views, b"")
    for length in lengths:
        pieces: list[Any] = []
        while length > len(rest):
            pieces.append(rest)
            length -= len(rest)
            rest = next(views)
        pieces.append(rest[:length])
        rest = rest[length:]
        yield pieces
        if not len(rest):
            rest = next(views, rest)


def shards_directory(save_id: str) -> str:
    return f"shards-{save_id}"


def is_shards_directory(name: str) -> bool:
    return name.startswith("shards-") and ID_PATTERN.fullmatch(name[len("shards-") :]) is not None


def shard_name(device: int, part: int) -> str:
    suffix = f"-{part:05d}" if part else ""
    return f"shard_{device:05d}{suffix}.safetensors"


def index_name(process: int) -> str:
    return f"process_{process:05d}.json"


# What a shard file holds


class Entry(NamedTuple):
    """One box of one leaf in a shard file; `offset` counts from the start of the data."""

    leaf: int
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A shard file: who wrote it and how big it is."""

    device: int
    part: int
    header_bytes: int
    size: int

    @property
    def name(self) -> str:
        return shard_name(self.device, self.part)


def entries_by_file(
    leaves: Sequence[StoredLeaf], layouts: Sequence[Layout], devices: Iterable[int] | None = None
) -> dict[tuple[int, int], list[Entry]]:
    """The entries of each file `(device, part)`, in file order, for some or all devices.

    Boxes whose size is a multiple of a larger power of two (up to a page) come first, ties in leaf
    order: without any padding, each box then starts at a multiple of its own alignment.
    """
    wanted = None if devices is None else set(devices)
    owners = [list(layout.cells_by_owner(wanted).items()) for layout in layouts]
    # A model has few kinds of leaves and many of each: what follows from layout, part, shape and
    # size of an element is worked out once for each kind.
    kinds: dict[tuple[int, int, tuple[int, ...], int], list[int]] = {}
    for number, leaf in enumerate(leaves):
        key = (leaf.layout, leaf.part, leaf.spec.shape, DTYPES[leaf.spec.dtype].bits)
        kinds.setdefault(key, []).append(number)
    unordered: dict[tuple[int, int], list[tuple[int, int, _Placed]]] = {}
    for (layout, part, shape, bits), numbers in kinds.items():
        for place in _placed_boxes(shape, layouts[layout].grid, owners[layout], bits):
            file = unordered.setdefault((place.device, part + place.turn), [])
            order = place.order
            file += [(order, number, place) for number in numbers]
    return {key: _with_offsets(unordered[key]) for key in sorted(unordered)}


class _Placed(NamedTuple):
    """A box of one kind of leaf: the device and part it goes to, and what decides its order."""

    device: int
    turn: int
    order: int
    box: Box
    nbytes: int


def _placed_boxes(
    shape: tuple[int, ...], grid: tuple[int, ...], owners: list[tuple[int, list[int]]], bits: int
) -> list[_Placed]:
    placed: list[_Placed] = []
    for device, cells in owners:
        for turn, number in enumerate(cells):
            box = _box.cell(shape, grid, number)
            nbytes = (_box.count(box) * bits + 7) // 8
            placed.append(_Placed(device, turn, -min(nbytes & -nbytes, PAGE_BYTES), box, nbytes))
    return placed


def _with_offsets(unordered: list[tuple[int, int, _Placed]]) -> list[Entry]:
    entries: list[Entry] = []
    offset = 0
    for _, leaf, place in sorted(unordered):
        entries.append(Entry(leaf, place.box, offset, place.nbytes))
        offset += place.nbytes
    return entries


def block_lengths(header_bytes: int, entries: Sequence[Entry]) -> list[int]:
    """How a file is cut into digested blocks: the header, rows of a large box, some small boxes."""
    lengths = [header_bytes]
    gathered = 0
    for entry in entries:
        if entry.nbytes < GATHER_BYTES:
            if gathered + entry.nbytes > BLOCK_BYTES:
                lengths.append(gathered)
                gathered = 0
            gathered += entry.nbytes
            continue
        if gathered:
            lengths.append(gathered)
            gathered = 0
        block = block_bytes(entry)
        whole, rest = divmod(entry.nbytes, block)
        lengths += [block] * whole + ([rest] if rest else [])
    return [*lengths, gathered] if gathered else lengths


def block_bytes(entry: Entry) -> int:
    """The block size for a large box: whole rows, so that a band of rows is a run of blocks."""
    row = entry.nbytes
    for extent in _box.shape_of(entry.box):
        if row <= BLOCK_BYTES:
            return BLOCK_BYTES // row * row
        row = max(row // extent, 1)
    return BLOCK_BYTES


def paths_between(
    leaves: Sequence[StoredLeaf], entries: Iterable[Entry], start: int, stop: int
) -> tuple[str, ...]:
    """The leaves that have bytes in `[start, stop)` of a file's data."""
    return tuple(
        leaves[entry.leaf].spec.path
        for entry in entries
        if entry.offset < stop and entry.offset + entry.nbytes > start
    )


# Safetensors headers


def tensor_shape(dtype: Dtype, box: Box, nbytes: int) -> list[int]:
    """The shape that the file shows: bytes for dtypes that safetensors lacks."""
    if dtype.packed:
        return [nbytes]
    shape = list(_box.shape_of(box))
    return [*shape, dtype.bits // 8] if dtype.opaque and dtype.bits > 8 else shape


def tensor_offsets(dtype: Dtype, box: Box) -> list[int]:
    """Where the shown tensor lies in the whole one."""
    if dtype.packed:
        return [0]
    starts = [start for start, _ in box]
    return [*starts, 0] if dtype.opaque and dtype.bits > 8 else starts


def header_capacity(leaf: LeafSpec) -> int:
    """An upper bound for what one box of this leaf adds to a header, the same for every box.

    Headers are padded anyway; a bound that does not depend on the digits of each offset lets file
    sizes be planned for thousands of devices at once.
    """
    dtype = DTYPES[leaf.dtype]
    key = encode_basestring_ascii(leaf.path)
    quoted = len(encode_basestring_ascii(key))
    digits = sum(len(str(n)) + 1 for n in leaf.shape) + 3
    if dtype.packed:
        digits = _OFFSET_DIGITS
    tensor = len(key) + len('{"dtype":"","shape":[],"data_offsets":[,]},:')
    tensor += len(dtype.code) + digits + 2 * _OFFSET_DIGITS
    sharding = quoted + len(encode_basestring_ascii('{"saved_offsets":[]},:')) + digits
    named = quoted + len(encode_basestring_ascii('"",:')) + len(leaf.dtype) if dtype.opaque else 0
    return tensor + sharding + named


def header_bytes_for(capacity: Any) -> Any:
    """The size of a header (length prefix and padding included) whose leaves need `capacity`.

    Takes an integer or an array of them.
    """
    return -(-(_header_frame_bytes() + capacity) // PAGE_BYTES) * PAGE_BYTES


@cache
def _header_frame_bytes() -> int:
    return 8 + len(_header_json([], [], {}, "0" * 16))


def encode_header(
    entries: Sequence[Entry], leaves: Sequence[StoredLeaf], save_id: str, header_bytes: int
) -> bytes:
    """The first `header_bytes` of a shard file."""
    tensors: list[str] = []
    offsets: list[str] = []
    opaque: dict[str, str] = {}
    shown: dict[tuple[str, Box], tuple[str, str]] = {}
    for leaf, box, offset, nbytes in entries:
        spec = leaves[leaf].spec
        dtype = DTYPES[spec.dtype]
        texts = shown.get((spec.dtype, box))
        if texts is None:
            shape = _dumps(tensor_shape(dtype, box, nbytes))
            texts = shown[spec.dtype, box] = (shape, _dumps(tensor_offsets(dtype, box)))
        key = encode_basestring_ascii(spec.path)
        tensors.append(
            f'{key}:{{"dtype":"{dtype.code}","shape":{texts[0]},'
            f'"data_offsets":[{offset},{offset + nbytes}]}}'
        )
        offsets.append(f'{key}:{{"saved_offsets":{texts[1]}}}')
        if dtype.opaque:
            opaque[spec.path] = dtype.name
    text = _header_json(tensors, offsets, opaque, save_id)
    if 8 + len(text) > header_bytes:
        raise AssertionError(f"header of {8 + len(text)} bytes exceeds its plan of {header_bytes}")
    return (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)


def _header_json(
    tensors: Sequence[str], offsets: Sequence[str], opaque: Mapping[str, str], save_id: str
) -> bytes:
    """A header's JSON, from entries that are JSON already: building it all at once is slow."""
    about = _dumps(
        {
            "ostraka": str(VERSION),
            "ostraka_id": save_id,
            "ostraka_dtypes": _dumps(opaque),
            "DCP_SHARDING_INFO": f"{{{','.join(offsets)}}}",
        }
    )
    return ("{" + ",".join([f'"__metadata__":{about}', *tensors]) + "}").encode()


def decode_header(data: Any) -> tuple[str, dict[str, Any]]:
    """The save's id and the tensors of a header as it lies in the file."""
    text = json.loads(bytes(data[8:]))
    about = text.pop("__metadata__")
    return about["ostraka_id"], text


# Process indexes


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digested blocks of one file, in order."""

    size: int
    lengths: tuple[int, ...]
    digests: tuple[str, ...]


def encode_index(save_id: str, process: int, files: Mapping[str, FileDigests]) -> bytes:
    return _dumps(
        {
            "format": f"{FORMAT}-index",
            "version": VERSION,
            "id": save_id,
            "process": process,
            "files": {
                name: {
                    "size": file.size,
                    "blocks": encode_runs(file.lengths),
                    "digests": "".join(file.digests),
                }
                for name, file in files.items()
            },
        }
    ).encode()


def decode_index(data: bytes) -> dict[str, FileDigests]:
    files: dict[str, FileDigests] = {}
    for name, file in dict(json.loads(data)["files"]).items():
        text = str(file["digests"])
        lengths = decode_runs(file["blocks"])
        digests = tuple(text[i : i + 16] for i in range(0, len(text), 16))
        if len(digests) != len(lengths) or sum(lengths) != file["size"]:
            raise ValueError(f"the blocks of {name} do not add up to its size")
        files[name] = FileDigests(file["size"], lengths, digests)
    return files


# _METADATA


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """What `_METADATA` knows of a process index."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Metadata:
    """All of `_METADATA`."""

    id: str
    writer: Mapping[str, Any]
    process_of: tuple[int, ...]
    """The process of each device number."""
    tree: Any
    meshes: tuple[MeshSpec, ...]
    layouts: tuple[Layout, ...]
    leaves: tuple[StoredLeaf, ...]
    files: tuple[FileEntry, ...]
    indexes: Mapping[int, IndexEntry]
    """By process; a process that wrote nothing has none."""
    user: Mapping[str, Any]
    unknown: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields that a newer writer added; kept as they are."""

    @property
    def process_count(self) -> int:
        return max(self.process_of, default=0) + 1


_KNOWN_FIELDS = {f.name for f in fields(Metadata)} | {"format", "version", "digest"}


def encode_metadata(metadata: Metadata) -> bytes:
    body = {
        "format": FORMAT,
        "version": VERSION,
        "id": metadata.id,
        "writer": metadata.writer,
        "process_of": encode_runs(metadata.process_of),
        "tree": metadata.tree,
        "meshes": [
            {
                "axes": m.axis_names,
                "shape": m.axis_sizes,
                "devices": encode_runs(m.devices),
                "types": m.axis_types,
            }
            for m in metadata.meshes
        ],
        "layouts": [
            {"grid": layout.grid, "owners": encode_runs(layout.owners)}
            for layout in metadata.layouts
        ],
        "leaves": [_encode_leaf(leaf) for leaf in metadata.leaves],
        "files": {
            name: encode_runs([getattr(f, name) for f in metadata.files]) for name in _FILE_COLUMNS
        },
        "indexes": [[p, i.size, i.digest] for p, i in sorted(metadata.indexes.items())],
        "user": metadata.user,
        **metadata.unknown,
    }
    text = _dumps(body).encode()[:-1]
    return text + _DIGEST_MARK + digest(text).encode() + _DIGEST_TAIL


def metadata_is_intact(data: bytes) -> bool:
    """Whether the digest at the end of `_METADATA` is that of what stands before it."""
    tail = len(_DIGEST_MARK) + _DIGEST_DIGITS + len(_DIGEST_TAIL)
    text = data[:-tail]
    return data[-tail:] == _DIGEST_MARK + digest(text).encode() + _DIGEST_TAIL


def decode_metadata(data: bytes) -> Metadata:
    """Read `_METADATA`, whose digest the caller has checked.

    Raises NotACheckpoint if it is none of ours, UnsupportedFormat if it is from a newer version,
    ValueError if it contradicts itself.
    """
    body = _loads_ours(data)
    try:
        metadata = Metadata(
            id=body["id"],
            writer=dict(body["writer"]),
            process_of=decode_runs(body["process_of"]),
            tree=body["tree"],
            meshes=tuple(_decode_mesh(mesh) for mesh in body["meshes"]),
            layouts=tuple(
                Layout(tuple(entry["grid"]), decode_runs(entry["owners"]))
                for entry in body["layouts"]
            ),
            leaves=tuple(_decode_leaf(leaf) for leaf in body["leaves"]),
            files=_decode_files(body["files"]),
            indexes={p: IndexEntry(size, text) for p, size, text in body["indexes"]},
            user=dict(body["user"]),
            unknown={key: value for key, value in body.items() if key not in _KNOWN_FIELDS},
        )
        check_metadata(metadata)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"a field is missing or malformed ({error})") from error
    return metadata


def _loads_ours(data: bytes) -> dict[str, Any]:
    try:
        loaded = with_full_stack(lambda: json.loads(data))
    except TooDeep as error:
        raise UnsupportedFormat(
            f"its {METADATA_NAME} is nested too deeply for Python's recursion limit, which is "
            f"{sys.getrecursionlimit():,}; raise it with sys.setrecursionlimit"
        ) from error
    except ValueError as error:
        raise NotACheckpoint(f"its {METADATA_NAME} is not JSON") from error
    body = cast(dict[str, Any], loaded) if isinstance(loaded, dict) else {}
    if body.get("format") != FORMAT:
        raise NotACheckpoint(f"its {METADATA_NAME} was not written by Ostraka")
    if body.get("version") != VERSION:
        raise UnsupportedFormat(
            f"it is in format version {body.get('version')!r} and this Ostraka reads version "
            f"{VERSION}; install a newer ostraka"
        )
    return body


_FLAGS = ("per_process", "uncommitted", "weak")


def _encode_leaf(leaf: StoredLeaf) -> dict[str, Any]:
    spec = leaf.spec
    entry: dict[str, Any] = {
        "path": spec.path,
        "kind": spec.kind,
        "dtype": spec.dtype,
        "shape": spec.shape,
        "layout": leaf.layout,
    }
    if leaf.part:
        entry["part"] = leaf.part
    if spec.mesh >= 0:
        entry["mesh"] = spec.mesh
        entry["spec"] = spec.partition
    if spec.prng is not None:
        entry["prng"] = spec.prng
    if spec.cast_from is not None:
        entry["cast_from"] = spec.cast_from
    for flag in _FLAGS:
        if getattr(spec, flag):
            entry[flag] = True
    if spec.memory is not None:
        entry["memory"] = spec.memory
    return entry


def _decode_leaf(entry: dict[str, Any]) -> StoredLeaf:
    spec = LeafSpec(
        path=entry["path"],
        kind=entry["kind"],
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        mesh=entry.get("mesh", -1),
        partition=tuple(tuple(axes) for axes in entry.get("spec", ())),
        prng=entry.get("prng"),
        cast_from=entry.get("cast_from"),
        memory=entry.get("memory"),
        **{flag: True for flag in _FLAGS if entry.get(flag)},
    )
    return StoredLeaf(spec, entry["layout"], entry.get("part", 0))


def _decode_mesh(entry: dict[str, Any]) -> MeshSpec:
    return MeshSpec(
        axis_names=tuple(entry["axes"]),
        axis_sizes=tuple(entry["shape"]),
        devices=decode_runs(entry["devices"]),
        axis_types=tuple(entry.get("types", ())),
    )


def _decode_files(columns: dict[str, Any]) -> tuple[FileEntry, ...]:
    decoded = [decode_runs(columns[name]) for name in _FILE_COLUMNS]
    return tuple(FileEntry(*row) for row in zip(*decoded, strict=True))


# What `_METADATA` must fulfil, whoever wrote it


def check_metadata(metadata: Metadata) -> None:
    """Raise ValueError if `_METADATA` contradicts itself, so that what follows can rely on it.

    A digest is no signature: anybody can write a `_METADATA` that has the right one.
    """
    if ID_PATTERN.fullmatch(metadata.id) is None:
        raise ValueError(f"the id {metadata.id!r} is not 16 hexadecimal digits")
    devices = range(len(metadata.process_of))
    if not all(0 <= process < 1 << 24 for process in metadata.process_of):
        raise ValueError("a device has no process")
    for mesh in metadata.meshes:
        _check_mesh(mesh, devices)
    for layout in metadata.layouts:
        if not _are_counts(layout.grid, least=1) or prod(layout.grid) != len(layout.owners):
            raise ValueError(f"a layout of grid {layout.grid} has {len(layout.owners)} cells")
        if not all(owner in devices for owner in layout.owners):
            raise ValueError("a layout names a device that is not there")
    for file in metadata.files:
        if file.device not in devices or not 8 < file.header_bytes <= file.size or file.part < 0:
            raise ValueError(f"the file table has an impossible entry for {file.name}")
    for process, index in metadata.indexes.items():
        if not _are_counts((process, index.size)) or not isinstance(index.digest, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError("the table of process indexes is malformed")
    checked: set[Any] = set()
    for leaf in metadata.leaves:
        _check_leaf(leaf, metadata, checked)
    if len({leaf.spec.path for leaf in metadata.leaves}) != len(metadata.leaves):
        raise ValueError("two leaves have the same path")


def _check_mesh(mesh: MeshSpec, devices: range) -> None:
    if not _are_texts((*mesh.axis_names, *mesh.axis_types)) or not _are_counts(mesh.axis_sizes):
        raise ValueError("a mesh has axes that are not named, or not of a size")
    ranks = {len(mesh.axis_names), len(mesh.axis_sizes), len(set(mesh.axis_names))}
    types = set(mesh.axis_types) <= {"auto", "explicit", "manual"}
    if len(ranks) != 1 or len(mesh.axis_types) not in (0, *ranks) or not types:
        raise ValueError(f"the axes of the mesh {mesh.axis_names} don't fit each other")
    distinct = set(mesh.devices)
    if prod(mesh.axis_sizes) != len(distinct) or len(distinct) != len(mesh.devices):
        raise ValueError(f"the mesh {mesh} has {len(distinct)} devices")
    if not all(device in devices for device in mesh.devices):
        raise ValueError(f"the mesh {mesh} has a device that is not there")


def _check_leaf(leaf: StoredLeaf, metadata: Metadata, checked: set[Any]) -> None:
    spec = leaf.spec
    if not _are_texts((spec.path, spec.kind, spec.dtype)):
        raise ValueError("a leaf has no path, kind or dtype")
    if not _are_counts((leaf.part, leaf.layout, spec.mesh - HOST_LOCAL, *spec.shape)):
        raise ValueError(f"leaf {spec.path!r} has numbers that are none")
    placed = (leaf.layout, spec.mesh, spec.partition, spec.memory)
    kind = (spec.kind, spec.dtype, spec.shape, spec.prng, *placed)
    if kind in checked:
        return
    if spec.dtype not in DTYPES or spec.kind not in get_args(LeafKind):
        raise UnsupportedFormat(
            f"leaf {spec.path!r} is a {spec.kind!r} array of {spec.dtype!r}, which this Ostraka "
            "does not know; install a newer ostraka"
        )
    is_key = spec.kind == "key"
    if is_key and (not isinstance(spec.prng, str) or spec.dtype != "uint32" or not spec.shape):
        raise ValueError(f"leaf {spec.path!r} is no PRNG key")
    if not _are_texts([] if spec.memory is None else [spec.memory]):
        raise ValueError(f"leaf {spec.path!r} is in a memory that has no name")
    if leaf.layout >= len(metadata.layouts) or spec.mesh >= len(metadata.meshes):
        raise ValueError(f"leaf {spec.path!r} has no layout or no mesh")
    if len(metadata.layouts[leaf.layout].grid) != len(spec.shape):
        raise ValueError(f"leaf {spec.path!r} has another rank than its layout")
    if spec.per_process and not spec.shape:
        raise ValueError(f"leaf {spec.path!r} has no dimension for its processes")
    if spec.mesh != HOST_LOCAL:
        mesh = metadata.meshes[spec.mesh]
        for problem in partition_problems(spec.path, spec.shape, spec.partition, mesh):
            raise ValueError(problem)
    checked.add(kind)


def _are_counts(numbers: Iterable[Any], *, least: int = 0) -> bool:
    return all(type(number) is int and number >= least for number in numbers)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


# Small things


def encode_runs(numbers: Sequence[int]) -> list[list[int]]:
    """Integers as arithmetic runs `[start, step, count]`; device orders and sizes become tiny."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs:
            start, step, length = runs[-1]
            if length == 1:
                runs[-1] = [start, number - start, 2]
                continue
            if number == start + step * length:
                runs[-1][2] += 1
                continue
            if length == 2 and step:
                # Two numbers alone are no run yet: let the second begin one of its own.
                runs[-1] = [start, 0, 1]
                runs.append([start + step, number - start - step, 2])
                continue
        runs.append([number, 0, 1])
    return runs


def decode_runs(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    if not all(type(n) is int for run in runs for n in run):
        raise ValueError("a list of numbers has something else in it")
    if any(length < 1 for _, _, length in runs):
        raise ValueError("a list of numbers has a run of no numbers")
    if sum(length for _, _, length in runs) > _MAX_RUN_NUMBERS:
        raise ValueError("a list of numbers is longer than any checkpoint needs")
    return tuple(start + step * i for start, step, length in runs for i in range(length))


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
