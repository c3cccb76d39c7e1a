"""Files of whole tensors: planned, then written from a source, in bounded memory.

In a file system several threads write pieces of all files, in any order. A bucket takes a file from
its first byte to its last, so there several files are written at the same time.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

from ostraka.common.dtypes import DTYPES, numpy_dtype, to_bytes
from ostraka.common.threads import ByteBudget, StopSignal, batches, run_all
from ostraka.errors import store_error
from ostraka.formats.safetensors.files import CONFIG_FILE, resolve
from ostraka.formats.source import CONFIG, Source
from ostraka.formats.source_files import OpenedFile, changed, look_settled, refuse_changed, state_of
from ostraka.layout import box as _box
from ostraka.layout import shard_file
from ostraka.layout.shard_file import dumps
from ostraka.storage import FileReader, LocalStore, Store
from ostraka.storage.file import LocalWriter
from ostraka.transfer.convert._read_back import READ_BYTES, check_headers
from ostraka.transfer.convert._workplace import create_or_keep, is_written
from ostraka.transfer.convert.work import (
    ConvertItem,
    Digests,
    ItemBox,
    Work,
    bands_of,
    is_contiguous,
    offset_of,
    piece_bytes,
    read_together,
    slabs_of,
)

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
    metadata = _FORMAT if for_hugging_face else {}
    if single is not None:
        return [_plan_file(single, items, range(len(items)), metadata)], {}
    # Filled in order, as Hugging Face does it.
    groups = list(batches(range(len(items)), lambda at: items[at].spec.nbytes, MAX_FILE_BYTES))
    if len(groups) == 1:
        return [_plan_file(SINGLE, items, groups[0], metadata)], {}
    names = [
        f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    files = [
        _plan_file(name, items, group, metadata) for name, group in zip(names, groups, strict=True)
    ]
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


# Writing

_WRITE_BYTES = 2 << 20
"""Bytes to write at a time. More takes longer on ext4."""
_RUNS = 1024
"""Runs to write between two checks for a stop."""
_HELD_BYTES = 192 << 20
"""Bytes of arrays in memory at one time."""
_THREADS = 4


# In a file system


@contextmanager
def _writing_to(store: Store, files: Sequence[PlannedFile]) -> Generator[Mapping[str, LocalWriter]]:
    """Open files for writing. They keep their bytes.

    At the end, their headers are written, and they are durable.
    """
    writers: dict[str, LocalWriter] = {}
    try:
        for file in files:
            path = os.path.join(store.location, file.name)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            try:
                opened = os.open(path, flags, 0o666)
            except OSError as error:
                raise store_error("create", path, error) from error
            writers[file.name] = LocalWriter(opened, path, file.size)
        yield writers
        for file in files:
            for start, data in file.fixed:
                writers[file.name].write(start, [data])
        run_all(LocalWriter.finish, list(writers.values()), threads=_THREADS, stop=StopSignal())
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        raise


def write_in_directory(work: Work, files: Sequence[PlannedFile], store: LocalStore) -> Digests:
    """Write all files. Boxes that an interrupted conversion has written are kept.

    Returns the digests of the source. The files are durable, but their names are not.
    """
    file_of = {piece: file for file in files for at in file.places for piece in slabs_of(work, at)}
    there = {info.name for info in store.files("")}
    digests: dict[ItemBox, str] = {}
    budget, stop, opened = ByteBudget(_HELD_BYTES), StopSignal(), ExitStack()

    @cache
    def reader_of(name: str) -> FileReader:
        return opened.enter_context(closing(store.open(name)))

    def write(writers: Mapping[str, LocalWriter], group: list[ItemBox]) -> None:
        with budget.hold(sum(piece_bytes(work, piece) for piece in group), stop.check):
            for piece, array in work.read(group):
                stop.check()
                file, data = file_of[piece], to_bytes(array)
                starts, run_bytes = _runs_of(work, piece, file, len(data))
                if file.name in there and all(
                    is_written(reader_of(file.name), start, data[at * run_bytes :][:run_bytes])
                    for at, start in enumerate(starts)
                ):
                    work.kept.add(len(data))
                else:
                    _write_runs(writers[file.name], starts, data, run_bytes, stop)
                digests[piece] = shard_file.block_digest([data])
                work.progress.add(len(data))

    order = {number: at for at, number in enumerate(work.source.order())}
    pieces = sorted(file_of, key=lambda piece: (order[work.items[piece.item].number], piece))
    with opened, _writing_to(store, files) as writers:
        groups = read_together(work, pieces)
        run_all(partial(write, writers), groups, threads=_THREADS, stop=stop)
    store.sync("")
    return {piece: digests[piece] for piece in file_of}


def _runs_of(
    work: Work, piece: ItemBox, file: PlannedFile, nbytes: int
) -> tuple[Sequence[int], int]:
    """The offsets of the runs of a box in its file, and the bytes of each run."""
    spec, start = work.items[piece.item].spec, file.places[piece.item]
    if is_contiguous(work, piece):
        start += offset_of(work, piece)
        return range(start, start + nbytes, _WRITE_BYTES), _WRITE_BYTES
    run, offsets = _box.runs(piece.box, spec.shape)
    itemsize = numpy_dtype(spec.dtype).itemsize
    return [start + offset * itemsize for offset in offsets], run * itemsize


def _write_runs(
    writer: LocalWriter, starts: Sequence[int], data: Any, run_bytes: int, stop: StopSignal
) -> None:
    if run_bytes == _WRITE_BYTES:
        for number, start in enumerate(starts):
            stop.check()
            writer.write(start, [data[number * run_bytes :][:run_bytes]])
        return
    for at in range(0, len(starts), _RUNS):
        stop.check()
        writer.write_runs(starts[at : at + _RUNS], data[at * run_bytes :], run_bytes)


def write_headers(files: Sequence[PlannedFile], store: Store) -> None:
    """Write the headers of files again, and read them back. Raises Damaged."""
    with _writing_to(store, files):
        pass
    for file in files:
        check_headers(store, file.name, file.fixed)


# In a bucket


def write_in_order(work: Work, files: Sequence[PlannedFile], store: Store, notes: str) -> Digests:
    """Write all files, each from its first byte to its last. Finished ones are kept.

    `notes` is the directory in the store for the size and the identity of each finished file.
    """
    stop, budget = StopSignal(), ByteBudget(_HELD_BYTES)
    threads = store.traits.at_once
    digests: dict[ItemBox, str] = {}

    def write(file: PlannedFile) -> None:
        writer = create_or_keep(
            store, file.name, file.size, beside=min(threads, len(files)), on_kept=work.kept.add
        )
        try:
            for start, data in file.fixed:
                writer.write(start, [data])
            pieces = [piece for at in file.places for piece in bands_of(work, at)]
            for group in read_together(work, pieces):
                nbytes = sum(piece_bytes(work, piece) for piece in group)
                with budget.hold(nbytes, stop.check):
                    found = dict(work.read(group))
                    for piece in group:
                        data = to_bytes(found.pop(piece))
                        digests[piece] = shard_file.block_digest([data])
                        start = file.places[piece.item] + offset_of(work, piece)
                        for at in range(0, len(data), READ_BYTES):
                            writer.write(start + at, [data[at : at + READ_BYTES]])
                        work.progress.add(len(data))
        except BaseException:
            writer.abandon()
            raise
        note = json.dumps([file.size, writer.finish() or ""])
        store.put(f"{notes}/{file.name}.json", note.encode())

    run_all(write, files, threads=threads, stop=stop)
    return digests


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
