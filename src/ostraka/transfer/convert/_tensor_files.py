"""The layout of files of whole tensors: planned before they are written, and found in the files."""

from __future__ import annotations

import ast
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from ostraka.common.dtypes import DTYPES, numpy_dtype
from ostraka.common.threads import batches
from ostraka.formats.safetensors.files import CONFIG_FILE, resolve
from ostraka.formats.source import CONFIG, Source
from ostraka.formats.source_files import OpenedFile, changed, look_settled, refuse_changed, state_of
from ostraka.layout.shard_file import dumps
from ostraka.storage import FileReader, Store
from ostraka.transfer.convert.work import ConvertItem

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
"""The limit of Hugging Face for a file, unless a single tensor has more."""
_FORMAT: Mapping[str, str] = {"format": "pt"}
"""Metadata that the libraries of Hugging Face require in a file."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file, and the offsets of its tensors."""

    name: str
    size: int
    places: Mapping[int, int]
    """The offset of each item, by its number, in the order of the file."""
    fixed: tuple[tuple[int, bytes], ...]
    """Other bytes with their offsets: the headers."""


def plan_safetensors(
    items: Sequence[ConvertItem], *, for_hugging_face: bool, single: str | None
) -> tuple[list[PlannedFile], dict[str, bytes]]:
    """Plan the files for items, and their index by its name, if there are several.

    With `single`, all items go to one file of that name.
    """
    # Filled in order, as Hugging Face does it.
    groups = list(batches(range(len(items)), lambda at: items[at].spec.nbytes, MAX_FILE_BYTES))
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    if single is not None or len(groups) == 1:
        groups, names = [[*range(len(items))]], [single or SINGLE]
    metadata = _FORMAT if for_hugging_face else {}
    files = [
        _plan_file(name, items, group, metadata) for name, group in zip(names, groups, strict=True)
    ]
    if len(files) == 1:
        return files, {}
    weights = {items[at].name: file.name for file in files for at in file.places}
    total = sum(item.spec.nbytes for item in items)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    return files, {INDEX: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def _plan_file(
    name: str, items: Sequence[ConvertItem], numbers: Sequence[int], metadata: Mapping[str, str]
) -> PlannedFile:
    # Wide elements first, so that all begin at a multiple of their size; then by name.
    ordered = sorted(numbers, key=lambda at: (-DTYPES[items[at].spec.dtype].bits, items[at].name))
    described: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offsets: dict[int, int] = {}
    end = 0
    for at in ordered:
        spec = items[at].spec
        offsets[at] = end
        end += spec.nbytes
        described[items[at].name] = {
            "dtype": DTYPES[spec.dtype].code,
            "shape": list(spec.shape),
            "data_offsets": [offsets[at], end],
        }
    text = dumps(described).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    places = {at: len(header) + offset for at, offset in offsets.items()}
    return PlannedFile(name, len(header) + end, places, ((0, header),))


# A `.npz` file, planned before it is written: a zip of `.npy` files, stored as they are. Pure.


_VERSION = 45
"""The version of zip that has 64-bit sizes."""
_MADE_BY = 3 << 8 | _VERSION
_UTF8 = 1 << 11
_DATE, _TIME = (1 << 5) | 1, 0
"""1980-01-01, as numpy has it."""
_HUGE, _HUGE_COUNT = 0xFFFF_FFFF, 0xFFFF
_MAGIC = b"\x93NUMPY\x01\x00"


def plan_npz(name: str, items: Sequence[ConvertItem], crcs: Mapping[int, int]) -> PlannedFile:
    """Plan a file for items. Their paths are the names of the arrays.

    `crcs` has the CRC-32 of each item with its header, as far as they are known.
    """
    places: dict[int, int] = {}
    fixed: list[tuple[int, bytes]] = []
    directory = b""
    end = 0
    for number, item in enumerate(items):
        header = _array_header(item)
        local, central = _zip_headers(item, crcs.get(number, 0), len(header), end)
        fixed.append((end, local + header))
        directory += central
        places[number] = end + len(fixed[-1][1])
        end = places[number] + item.spec.nbytes
    directory += _end(len(items), len(directory), end)
    return PlannedFile(name, end + len(directory), places, (*fixed, (end, directory)))


def _array_header(item: ConvertItem) -> bytes:
    """The header of a `.npy` file, padded to a multiple of 64 bytes."""
    spec = item.spec
    shape = f"({', '.join(map(str, spec.shape))}{',' if len(spec.shape) == 1 else ''})"
    dtype = numpy_dtype(spec.dtype).str
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    length = len(_MAGIC) + 2 + len(text) + 1
    body = text + b" " * (-length % 64) + b"\n"
    return _MAGIC + struct.pack("<H", len(body)) + body


def _zip_headers(item: ConvertItem, crc: int, more: int, start: int) -> tuple[bytes, bytes]:
    """The headers of an entry: before it, and in the directory.

    The entry has `more` bytes besides those of the item.
    """
    name, size = f"{item.name}.npy".encode(), more + item.spec.nbytes
    fields = (_VERSION, _UTF8, 0, _TIME, _DATE, crc, _HUGE, _HUGE, len(name))
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    local = struct.pack("<4s5H3L2H", b"PK\x03\x04", *fields, len(extra)) + name + extra
    extra = struct.pack("<HHQQQ", 1, 24, size, size, start)
    rest = (len(extra), 0, 0, 0, 0o600 << 16, _HUGE)
    central = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", _MADE_BY, *fields, *rest)
    return local, central + name + extra


def _end(count: int, directory_bytes: int, directory_start: int) -> bytes:
    """The end of the directory with 64-bit numbers, and the usual end that refers to it."""
    end64 = struct.pack(
        "<4sQ2H2L4Q",
        *(b"PK\x06\x06", 44, _MADE_BY, _VERSION, 0, 0),
        *(count, count, directory_bytes, directory_start),
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, directory_start + directory_bytes, 1)
    counts = (min(count, _HUGE_COUNT),) * 2
    sizes = (min(directory_bytes, _HUGE), min(directory_start, _HUGE))
    return end64 + locator + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *counts, *sizes, 0)


# What files say

_LOCAL_HEADER_BYTES = 30


class TensorPlace(NamedTuple):
    """The file, offset, dtype and shape of a tensor."""

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]
    crc: int | None = None
    """The CRC-32 of the header before its bytes, if the file has checksums."""


def find_in_safetensors(store: Store, names: Iterable[str]) -> dict[str, TensorPlace]:
    """The tensors in the headers of files."""
    dtypes = {dtype.code: name for name, dtype in DTYPES.items() if not dtype.opaque}
    places: dict[str, TensorPlace] = {}
    for name in names:
        with closing(store.open(name)) as reader:
            read = partial(_read, reader)
            (length,) = struct.unpack("<Q", read(0, 8))
            header: dict[str, Any] = json.loads(read(8, length))
        header.pop("__metadata__", None)
        for path, about in header.items():
            start = 8 + length + about["data_offsets"][0]
            places[path] = TensorPlace(name, start, dtypes[about["dtype"]], tuple(about["shape"]))
    return places


def find_in_npz(store: Store, name: str) -> dict[str, TensorPlace]:
    """The arrays in a `.npz` file, by Python's zipfile and their headers."""
    with closing(store.open(name)) as reader:
        read = partial(_read, reader)
        with zipfile.ZipFile(f"{store.location}/{name}") as listed:
            entries = listed.infolist()
        places: dict[str, TensorPlace] = {}
        for entry in entries:
            local = read(entry.header_offset, _LOCAL_HEADER_BYTES)
            lengths = struct.unpack("<2H", local[-4:])
            start = entry.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)
            (length,) = struct.unpack("<H", read(start + 8, 2))
            about = cast("dict[str, Any]", ast.literal_eval(read(start + 10, length).decode()))
            dtype = numpy_dtype(about["descr"]).name
            path = entry.filename.removesuffix(".npy")
            crc = zlib.crc32(read(start, 10 + length))
            places[path] = TensorPlace(name, start + 10 + length, dtype, about["shape"], crc)
    return places


def _read(reader: FileReader, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    return bytes(data[: reader.read_into(start, [data])])


# What lies beside the weights of a Hugging Face model, and goes along with them.


_MOST_BYTES = 256 << 20
_BESIDE = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|special_tokens_map"
    r"|added_tokens|chat_template|tokenizer|tokenizer_config|vocab)\.json"
    r"|chat_template\.jinja|merges\.txt|vocab\.txt|[\w.-]+\.(model|tiktoken)"
    r"|(README|LICENSE|NOTICE)(\.\w+)?"
)


def copy_beside(source: Source, target: Store) -> None:
    """Copy the configuration, the tokenizer and similar files, if the source has them.

    The configuration comes from the metadata of the source, which has its config.json or the one of
    the caller. An Ostraka checkpoint keeps the one of the Hugging Face model that it was converted
    from. Raises SourceChanged if the files may belong to another model.
    """
    names = list(filter(_BESIDE.fullmatch, source.store.list()))
    opened: list[OpenedFile] = []
    found: dict[str, bytes] = {}
    for name in names:
        place, stored_as = resolve(source.store, name)
        opened.append(OpenedFile(place, stored_as, state_of(look_settled(place, stored_as))))
        found[name] = place.get(stored_as, _MOST_BYTES)
    refuse_changed(opened)
    if names and not source.is_current():
        # The weights were read before.
        raise changed(source.store, names[0])
    config = source.saved.user.get(CONFIG)
    if isinstance(config, dict):
        own: Any = None
        with suppress(ValueError, RecursionError):
            own = json.loads(found.get(CONFIG_FILE, b""))
        if own != config:
            found[CONFIG_FILE] = (json.dumps(config, indent=2) + "\n").encode()
    for name, data in found.items():
        target.put(name, data)


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read a config.json, given as the path of the file or its directory, or as a dict.

    Raises ValueError, with the reason, if it is none.
    """
    if isinstance(config, Mapping):
        found: Any = dict(config)
        where = "config="
    else:
        where = os.fspath(config)
        path = os.path.join(where, CONFIG_FILE) if os.path.isdir(where) else where
        try:
            with open(path, "rb") as file:
                found = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"config={where!r} can't be read as a config.json: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is no config.json: it has no JSON object at its top")
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} can't be written as JSON: {error}") from error
    return cast("dict[str, Any]", found)
