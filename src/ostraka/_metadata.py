"""`_METADATA`: all that it says, to bytes and back, and what it must fulfil. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from operator import attrgetter
from typing import Any, cast, get_args

from ostraka._format import (
    FORMAT,
    ID_PATTERN,
    METADATA_NAME,
    VERSION,
    FileEntry,
    decode_runs,
    digest,
    dumps,
    encode_runs,
)
from ostraka._parallel import TooDeep, with_full_stack
from ostraka._spec import (
    DTYPES,
    HOST_LOCAL,
    Layout,
    LeafKind,
    LeafSpec,
    MeshSpec,
    StoredLeaf,
    find_misfits,
)
from ostraka.errors import NotACheckpoint, UnsupportedFormat

_DIGEST_MARK = b',"digest":"'
_DIGEST_TAIL = b'"}\n'
_DIGEST_DIGITS = 32
_FILE_COLUMNS = ("device", "part", "header_bytes", "size")


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
            name: encode_runs(list(map(attrgetter(name), metadata.files))) for name in _FILE_COLUMNS
        },
        "indexes": [[p, i.size, i.digest] for p, i in sorted(metadata.indexes.items())],
        "user": metadata.user,
        **metadata.unknown,
    }
    text = dumps(body).encode()[:-1]
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
    if unknown := set(mesh.axis_types) - {"auto", "explicit", "manual"}:
        raise UnsupportedFormat(
            f"a mesh has an axis of the type {sorted(unknown)[0]!r}, which this Ostraka does not "
            "know; install a newer ostraka"
        )
    if len(ranks) != 1 or len(mesh.axis_types) not in (0, *ranks):
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
        for misfit in find_misfits(spec.path, spec.shape, mesh, spec.partition):
            raise ValueError(misfit.message)
    checked.add(kind)


def _are_counts(numbers: Iterable[Any], *, least: int = 0) -> bool:
    return all(type(number) is int and number >= least for number in numbers)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
