"""`_METADATA`: its fields, to bytes and back, and the checks of its contents. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from operator import attrgetter
from typing import Any, cast, get_args

from ostraka.common.dtypes import DTYPES
from ostraka.common.threads import TooDeep, with_full_stack
from ostraka.errors import NotACheckpoint, UnsupportedFormat, printable
from ostraka.layout import shard_file as _format
from ostraka.layout.parity_file import Parity, check_parity_table, decode_parity, encode_parity
from ostraka.layout.runs import Allowance, decode_runs, encode_runs
from ostraka.layout.shard_file import METADATA_NAME, Entry, FileEntry, digest
from ostraka.layout.spec import (
    HOST_LOCAL,
    Layout,
    LeafKind,
    LeafSpec,
    MeshSpec,
    StoredLeaf,
    iter_misfits,
)

_FILE_COLUMNS = ("device", "part", "header_bytes", "size")
_MOST_DIMENSIONS = 64
"""The limit of numpy, for arrays and for meshes."""
_MOST_BITS = 8 * ((1 << 63) - 1)
"""The limit of numpy for the size of an array."""
_MOST_PROCESSES = 1 << 20
_MOST_TEXT = 500
"""The most characters of a malformed value in a message."""
# What is made of a device number, of a file and of a box, beside the number itself; by measuring.
_BYTES_OF_DEVICE = 128
_BYTES_OF_FILE = 256
_BYTES_OF_ENTRY = 256
_BYTES_OF_RANGE = 128


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The size and digest of a process index."""

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
    """By process, for those that wrote anything."""
    user: Mapping[str, Any]
    parity: Parity | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields that a newer writer added, unchanged."""
    version: int = _format.VERSION

    @property
    def process_count(self) -> int:
        return max(self.process_of, default=0) + 1

    def file_sizes(self) -> dict[str, int]:
        """The size of every file by its path, without `_METADATA` and its copy."""
        directory = _format.shards_directory(self.id)
        parity = () if self.parity is None else self.parity.files
        sizes = {f"{directory}/{file.name}": file.size for file in (*self.files, *parity)}
        for process, index in self.indexes.items():
            sizes[f"{directory}/{_format.index_name(process)}"] = index.size
        return sizes


def shard_contents(
    metadata: Metadata,
    devices: Collection[int] | None = None,
    allowance: Allowance | None = None,
) -> dict[tuple[int, int], tuple[FileEntry, list[Entry]]]:
    """Each file `(device, part)` with its entries, in file order, for some or all devices.

    Raises ValueError if the file table does not match the layouts, or if the entries would exceed
    the allowance.
    """
    if allowance is not None:
        take_entries(metadata, devices, allowance)
    contents = _format.entries_by_file(metadata.leaves, metadata.layouts, devices)
    files = {
        (file.device, file.part): file
        for file in metadata.files
        if devices is None or file.device in devices
    }
    may_be_less = metadata.version >= _format.COMPRESSED_VERSION
    for key in sorted(contents.keys() | files.keys()):
        stored_bytes = files[key].size - files[key].header_bytes if key in files else -1
        data_bytes = contents[key][-1].offset + contents[key][-1].nbytes if key in contents else -2
        if stored_bytes != data_bytes and not (may_be_less and 0 <= stored_bytes < data_bytes):
            raise ValueError(
                f"the file table and the layouts disagree about {_format.shard_name(*key)}"
            )
    return {key: (files[key], entries) for key, entries in contents.items()}


def entry_bytes(rank: int) -> int:
    """The memory for one box of a leaf, to count it before it is taken."""
    return _BYTES_OF_ENTRY + _BYTES_OF_RANGE * rank


def take_entries(metadata: Metadata, devices: Collection[int] | None, allowance: Allowance) -> None:
    """Count the memory for the entries of all files of some or all devices. Raises ValueError."""
    cells = [
        len(layout.owners) if devices is None else sum(map(devices.__contains__, layout.owners))
        for layout in metadata.layouts
    ]
    for leaf in metadata.leaves:
        allowance.take(cells[leaf.layout] * entry_bytes(len(leaf.spec.shape)))


_KNOWN_FIELDS = {f.name for f in fields(Metadata)} | {"format", "version", "digest"}


def encode_metadata(metadata: Metadata) -> bytes:
    body = {
        "format": _format.FORMAT,
        "version": metadata.version,
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
            name: encode_runs(list(map(attrgetter(name), metadata.files))) for name in _FILE_COLUMNS
        },
        "indexes": [[p, i.size, i.digest] for p, i in sorted(metadata.indexes.items())],
        "user": metadata.user,
        **metadata.unknown,
    }
    if metadata.parity is not None:
        body["parity"] = encode_parity(metadata.parity)
    text = _format.dumps(body).encode()[:-1]
    return text + _seal(text)


def metadata_is_intact(data: bytes) -> bool:
    """True if the digest at the end of `_METADATA` matches the text before it."""
    text = data[: -len(_seal(b""))]
    return data == text + _seal(text)


def _seal(text: bytes) -> bytes:
    """The end of `_METADATA`: the digest of all before it."""
    return b',"digest":"%b"}\n' % digest(text).encode()


def decode_metadata(data: bytes) -> Metadata:
    """Read `_METADATA`, whose digest the caller has checked.

    Raises NotACheckpoint if another program wrote it, UnsupportedFormat if it is from a newer
    version, ValueError if it contradicts itself.
    """
    body = _loads_ours(data)
    allowance = Allowance(len(data))
    try:
        for name in ("writer", "user"):
            _require(isinstance(body[name], dict), f"{name} is no object")
        metadata = Metadata(
            id=body["id"],
            writer=body["writer"],
            process_of=decode_runs(body["process_of"], allowance, _BYTES_OF_DEVICE),
            tree=body["tree"],
            meshes=tuple(_decode_mesh(mesh, allowance) for mesh in body["meshes"]),
            layouts=tuple(
                Layout(tuple(entry["grid"]), decode_runs(entry["owners"], allowance))
                for entry in body["layouts"]
            ),
            leaves=tuple(_decode_leaf(leaf) for leaf in body["leaves"]),
            files=_decode_files(body["files"], allowance),
            indexes={p: IndexEntry(size, text) for p, size, text in body["indexes"]},
            user=body["user"],
            parity=decode_parity(body["parity"]) if "parity" in body else None,
            unknown={key: value for key, value in body.items() if key not in _KNOWN_FIELDS},
            version=body["version"],
        )
        check_metadata(metadata)
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"a field is missing or malformed ({_shown(error)})") from error
    return metadata


def _loads_ours(data: bytes) -> dict[str, Any]:
    try:
        loaded = with_full_stack(lambda: json.loads(data, parse_constant=_refuse_constant))
    except (ValueError, TooDeep) as error:
        raise NotACheckpoint(f"its {METADATA_NAME} is not JSON") from error
    body = cast(dict[str, Any], loaded) if isinstance(loaded, dict) else {}
    if body.get("format") != _format.FORMAT:
        raise NotACheckpoint(f"its {METADATA_NAME} was not written by Ostraka")
    version = body.get("version")
    if type(version) is not int or version not in _format.VERSIONS:
        stated = hex(version) if type(version) is int and version > 1 << 63 else version
        stated = stated if isinstance(stated, int | str) else "that is no number"
        raise UnsupportedFormat(
            f"it is in format version {_shown(stated)} and this Ostraka reads versions up "
            f"to {_format.VERSIONS[-1]}; install a newer ostraka"
        )
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


_REQUIRED = ("path", "kind", "dtype", "shape")
_OPTIONAL = ("prng", "cast_from", "per_process", "uncommitted", "weak", "memory")
"""Fields of a leaf that are absent where they are None or False."""


def _encode_leaf(leaf: StoredLeaf) -> dict[str, Any]:
    spec = leaf.spec
    entry: dict[str, Any] = {name: getattr(spec, name) for name in _REQUIRED}
    entry |= {"layout": leaf.layout} | ({"part": leaf.part} if leaf.part else {})
    entry |= {"mesh": spec.mesh, "spec": spec.partition} if spec.mesh >= 0 else {}
    return entry | {name: value for name in _OPTIONAL if (value := getattr(spec, name))}


def _decode_leaf(entry: dict[str, Any]) -> StoredLeaf:
    about: dict[str, Any] = {name: entry[name] for name in _REQUIRED}
    about |= {"shape": tuple(entry["shape"])}
    about |= {name: entry[name] for name in _OPTIONAL if entry.get(name)}
    mesh, partition = entry.get("mesh", HOST_LOCAL), tuple(map(tuple, entry.get("spec", ())))
    spec = LeafSpec(**about, mesh=mesh, partition=partition)
    return StoredLeaf(spec, entry["layout"], entry.get("part", 0))


def _decode_mesh(entry: dict[str, Any], allowance: Allowance) -> MeshSpec:
    devices, types = decode_runs(entry["devices"], allowance), tuple(entry.get("types", ()))
    return MeshSpec(tuple(entry["axes"]), tuple(entry["shape"]), devices, types)


def _decode_files(columns: dict[str, Any], allowance: Allowance) -> tuple[FileEntry, ...]:
    each = _BYTES_OF_FILE // len(_FILE_COLUMNS)
    decoded = [decode_runs(columns[name], allowance, each) for name in _FILE_COLUMNS]
    return tuple(FileEntry(*row) for row in zip(*decoded, strict=True))


# What `_METADATA` must fulfil, whoever wrote it


def check_metadata(metadata: Metadata) -> None:
    """Raise ValueError if `_METADATA` contradicts itself. Readers rely on this.

    A digest is no signature: anybody can write a `_METADATA` with the right digest.
    """
    devices = set(range(len(metadata.process_of)))
    is_id = _format.ID_PATTERN.fullmatch(metadata.id) is not None
    _require(is_id, f"the id {metadata.id!r} is not 16 hexadecimal digits")
    fits = all(0 <= process < _MOST_PROCESSES for process in metadata.process_of)
    _require(fits, "a device has no process")
    processes = metadata.process_count
    for mesh in metadata.meshes:
        _check_mesh(mesh, devices)
    for grid, owners in ((layout.grid, layout.owners) for layout in metadata.layouts):
        is_grid = _are_counts(grid, least=1) and prod(grid) == len(owners)
        _require(is_grid, f"a layout of grid {grid} has {len(owners)} cells")
        _require(devices.issuperset(owners), "a layout names a device that is not there")
    for file in metadata.files:
        fits = 8 < file.header_bytes <= file.size and file.device in devices and file.part >= 0
        _require(fits, f"the file table has an impossible entry for {file.name}")
    files = {(file.device, file.part) for file in metadata.files}
    _require(len(files) == len(metadata.files), "the file table has a file twice")
    for process, index in metadata.indexes.items():
        fits = _are_counts((process, index.size)) and process < processes
        fits = fits and _are_texts([index.digest])
        _require(fits, "the table of process indexes is malformed")
    if metadata.parity is not None:
        sizes = {process: index.size for process, index in metadata.indexes.items()}
        check_parity_table(metadata.parity, metadata.files, metadata.process_of, sizes)
    checked: set[Any] = set()
    for leaf in metadata.leaves:
        _check_leaf(leaf, metadata, processes, checked)
    paths = {leaf.spec.path for leaf in metadata.leaves}
    _require(len(paths) == len(metadata.leaves), "two leaves have the same path")
    held = sum(file.size - file.header_bytes for file in metadata.files)
    most = held if metadata.version == _format.VERSION else held * _format.MOST_RATIO
    said = sum(leaf.spec.nbytes for leaf in metadata.leaves)
    _require(said <= most, f"its leaves have {said:,} bytes, its files hold {held:,}")


def _check_mesh(mesh: MeshSpec, devices: set[int]) -> None:
    names, sizes, types = mesh.axis_names, mesh.axis_sizes, mesh.axis_types
    _require(_are_texts((*names, *types)), "the axes of a mesh must have names and types")
    if unknown := set(types) - {"auto", "explicit", "manual"}:
        raise _unknown(f"a mesh has an axis of the type {sorted(unknown)[0]!r}")
    fits = _are_counts(sizes, least=1) and len(set(names)) == len(names) == len(sizes)
    fits = fits and len(types) in (0, len(names)) and len(names) <= _MOST_DIMENSIONS
    _require(fits, f"the axes of the mesh {names} don't fit each other")
    distinct = set(mesh.devices)
    fits = prod(sizes) == len(distinct) == len(mesh.devices)
    _require(fits, f"the mesh {mesh} has {len(distinct)} devices")
    _require(distinct <= devices, f"the mesh {mesh} has a device that is not there")


_kind_of = attrgetter(*(f.name for f in fields(LeafSpec) if f.name != "path"))
"""All fields of a leaf but its path. With its layout, they are its kind: one check covers all."""


def _check_leaf(leaf: StoredLeaf, metadata: Metadata, processes: int, checked: set[Any]) -> None:
    spec = leaf.spec
    where = f"leaf {spec.path!r}"
    _require(_are_texts((spec.path, spec.kind, spec.dtype)), f"{where} has no path, kind or dtype")
    numbers = (leaf.part, leaf.layout, spec.mesh - HOST_LOCAL, *spec.shape)
    _require(
        _are_counts(numbers), f"{where}: part, layout, mesh and shape must be non-negative integers"
    )
    kind = (leaf.layout, *_kind_of(spec))
    if kind in checked:
        return
    if spec.dtype not in DTYPES or spec.kind not in get_args(LeafKind):
        raise _unknown(f"{where} is a {spec.kind!r} array of {spec.dtype!r}")
    rank = len(spec.shape)
    elements = prod(max(extent, 1) for extent in spec.shape)
    is_array = rank <= _MOST_DIMENSIONS and elements * DTYPES[spec.dtype].bits <= _MOST_BITS
    _require(is_array, f"{where} is larger than any array")
    is_key = isinstance(spec.prng, str) and spec.dtype == "uint32"
    is_key = is_key and rank >= (2 if spec.per_process else 1)
    _require(is_key or spec.kind != "key", f"{where} is no PRNG key")
    _require(spec.kind == "key" or spec.prng is None, f"{where} has a generator and is no key")
    _require(_are_texts([spec.memory or ""]), f"{where} is in a memory that has no name")
    _require(_are_texts([spec.cast_from or ""]), f"{where} was cast from what has no name")
    are_flags = {type(flag) for flag in (spec.per_process, spec.uncommitted, spec.weak)} == {bool}
    _require(are_flags, f"{where} has a flag that is neither true nor false")
    has_processes = spec.mesh == HOST_LOCAL and spec.shape[:1] == (processes,)
    _require(
        has_processes or not spec.per_process,
        f"{where} has no dimension for its processes, of which are {processes}",
    )
    has_place = leaf.layout < len(metadata.layouts) and spec.mesh < len(metadata.meshes)
    _require(has_place, f"{where} has no layout or no mesh")
    is_cut = rank == len(metadata.layouts[leaf.layout].grid)
    _require(is_cut, f"{where} has another rank than its layout")
    if spec.mesh == HOST_LOCAL:
        _require(not spec.partition, f"{where} has a spec and no mesh")
    else:
        mesh = metadata.meshes[spec.mesh]
        for misfit in iter_misfits(spec.path, spec.logical_shape, mesh, spec.partition):
            _require(False, misfit.message)
    checked.add(kind)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(_shown(otherwise))


def _shown(text: object) -> str:
    """Text of a checkpoint for a message: no control characters, and no more than a line."""
    return printable(str(text)[:_MOST_TEXT])


def _unknown(what: str) -> UnsupportedFormat:
    what = _shown(what)
    return UnsupportedFormat(f"{what}, which this Ostraka does not know; install a newer ostraka")


def _are_counts(numbers: Iterable[Any], *, least: int = 0) -> bool:
    found = list(numbers)
    if not {*map(type, found)} <= {int}:
        return False
    return not found or (least <= min(found) and max(found) < 1 << 63)


def _are_texts(values: Iterable[Any]) -> bool:
    return {*map(type, values)} <= {str}
