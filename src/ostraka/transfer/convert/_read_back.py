"""Read a result back by its own headers, and compare it with the source."""

from __future__ import annotations

import ast
import json
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from ostraka.common.dtypes import DTYPES, numpy_dtype
from ostraka.common.memory import recycling
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Damaged, Problem
from ostraka.formats.buffers import Scratch
from ostraka.formats.source import Source
from ostraka.layout import box as _box
from ostraka.layout import shard_file
from ostraka.layout.spec import Target
from ostraka.reading.locate import unless_replaced
from ostraka.storage import FileReader, Store
from ostraka.transfer.convert.work import (
    Digests,
    ItemBox,
    Work,
    digest_of,
    is_contiguous,
    offset_of,
    piece_bytes,
    read_together,
)

# Digests of what files of tensors have, each byte of which is read once.

READ_BYTES = 8 << 20
ReadRange = Callable[[int, int], Any]
"""Reads a number of bytes from an offset of a file, fewer if it ends before."""


class Readers:
    """Open files of a store, each opened once, for any thread."""

    def __init__(self, store: Store):
        self._store = store
        self._opened: dict[str, FileReader] = {}
        self._lock = threading.Lock()

    def reader(self, name: str) -> FileReader:
        with self._lock:
            if name not in self._opened:
                self._opened[name] = self._store.open(name)
            return self._opened[name]

    def close(self) -> None:
        for reader in self._opened.values():
            reader.close()


def _groups(work: Work, pieces: Iterable[ItemBox], by_item: bool) -> Iterator[list[ItemBox]]:
    """Group boxes to digest together: all boxes of an item, or those of them that share rows."""
    together: dict[int, list[ItemBox]] = {}
    for piece in pieces:
        if by_item or not is_contiguous(work, piece):
            together.setdefault(piece.item, []).append(piece)
        else:
            yield [piece]
    yield from together.values()


def _digest_bands(
    work: Work, pieces: Sequence[ItemBox], start: int, read: ReadRange, crc: int | None
) -> tuple[list[str], int | None]:
    """Digest contiguous boxes of an item in a file, and continue a CRC-32 with their bytes.

    The item begins at `start`. A truncated file gives other digests.
    """
    digests: list[str] = []
    for piece in pieces:
        state, nbytes = shard_file.new_block_digest(), piece_bytes(work, piece)
        begin = start + offset_of(work, piece)
        for at in range(begin, begin + nbytes, READ_BYTES):
            part = read(at, min(READ_BYTES, begin + nbytes - at))
            state.update(part)
            crc = None if crc is None else zlib.crc32(part, crc)
        digests.append(state.hexdigest())
    return digests, crc


def _digest_slabs(
    work: Work, pieces: Sequence[ItemBox], start: int, read: ReadRange, crc: int | None
) -> tuple[list[str], int | None]:
    """As `_digest_bands`, for boxes that share rows. Each row is read once."""
    spec = work.items[pieces[0].item].spec
    dtype, whole = numpy_dtype(spec.dtype), _box.full(spec.shape)
    states = [shard_file.new_block_digest() for _ in pieces]
    for band in _box.bands(whole, whole, READ_BYTES // dtype.itemsize):
        shared = [_box.intersect(band, piece.box) for piece in pieces]
        if not any(shared):
            continue
        first, last = _box.flat_span(band, whole)
        nbytes = (last - first) * dtype.itemsize
        memory = read(start + first * dtype.itemsize, nbytes)
        if memory.size != nbytes:
            return [shard_file.block_digest([])] * len(pieces), crc
        crc = None if crc is None else zlib.crc32(memory, crc)
        rows = memory.reshape(*_box.shape_of(band), dtype.itemsize)
        for state, part in zip(states, shared, strict=True):
            if part is not None:
                of_piece: Any = np.ascontiguousarray(rows[_box.slices(part, band)])
                state.update(of_piece)
    return [state.hexdigest() for state in states], crc


_THREADS = 4
_LOCAL_HEADER_BYTES = 30


class TensorPlace(NamedTuple):
    """The file, offset, dtype and shape of a tensor."""

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]


def check_files(
    work: Work,
    digests: Digests,
    store: Store,
    places: Mapping[str, TensorPlace],
    crc_starts: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Compare all tensors with the digests of the source. Raises Damaged.

    `crc_starts` has the CRC-32 of the header before each item. With it, returns the CRC-32 of each
    item with its header.
    """
    problems = _differences(work, store, places)
    if problems:
        raise Damaged(store.location, problems)
    scratch, stop = Scratch(work.memory), StopSignal()
    readers = Readers(store)

    def check(group: Sequence[ItemBox]) -> tuple[int, int]:
        number = group[0].item
        item = work.items[number]
        place = places[item.name]
        reader = readers.reader(place.file)
        digest = _digest_bands if is_contiguous(work, group[0]) else _digest_slabs
        crc = None if crc_starts is None else crc_starts[number]

        def read(start: int, nbytes: int) -> Any:
            stop.check()
            memory = scratch.take(nbytes)
            return memory[: reader.read_into(start, [memory])]

        found, crc = digest(work, group, place.start, read, crc)
        if found != [digests[piece] for piece in group]:
            raise _not_as_written(store.location, place.file, item.path)
        work.progress.add(sum(piece_bytes(work, piece) for piece in group))
        return number, crc or 0

    groups = _groups(work, digests, crc_starts is not None)
    with closing(readers):
        return dict(run_all(check, groups, threads=_THREADS, stop=stop))


def check_places(
    work: Work, store: Store, places: Mapping[str, TensorPlace], planned: Mapping[str, TensorPlace]
) -> None:
    """Compare the offsets of tensors in headers with the planned ones. Raises Damaged."""
    problems = _differences(work, store, places)
    for name, place in planned.items():
        if not problems and places[name] != place:
            found = f"it says byte {places[name].start:,}, and the tensor is at {place.start:,}"
            problems.append(Problem(place.file, found, (name,)))
    if problems:
        raise Damaged(store.location, problems)


def _differences(work: Work, store: Store, places: Mapping[str, TensorPlace]) -> list[Problem]:
    problems: list[Problem] = []
    wanted = {item.name: item.spec for item in work.items}
    for path in wanted.keys() ^ places.keys():
        what = "is not in it" if path in wanted else "is in it, and was not converted"
        problems.append(Problem(store.location, f"the tensor {path!r} {what}"))
    for path in wanted.keys() & places.keys():
        place, spec = places[path], wanted[path]
        if (place.dtype, place.shape) != (spec.dtype, spec.shape):
            found = f"it is {place.dtype} {place.shape}, not {spec.dtype} {spec.shape}"
            problems.append(Problem(place.file, found, (path,)))
    return problems


def _not_as_written(location: str, file: str, path: str) -> Damaged:
    found = "what was read back is not what was written; convert again, and check the disk"
    return Damaged(location, [Problem(file, found, (path,))])


def check_source(
    work: Work,
    digests: Digests,
    found: Source,
    number_of: Callable[[ItemBox], int],
) -> None:
    """Compare boxes with those of the result, read as a checkpoint. Raises Damaged."""
    stop = StopSignal()

    def check(group: Sequence[ItemBox]) -> None:
        targets = [Target(number_of(piece), piece.box) for piece in group]
        with recycling(work.memory), unless_replaced(found):
            for at, array in found.read(targets):
                stop.check()
                piece = group[at]
                item = work.items[piece.item]
                is_same = array.dtype == numpy_dtype(item.spec.dtype)
                if not is_same or digest_of(array) != digests[piece]:
                    raise _not_as_written(found.location, found.location, item.path)
                work.progress.add(array.nbytes)

    run_all(check, read_together(work, list(digests)), threads=2, stop=stop)


# What files say


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
            places[path] = TensorPlace(name, start + 10 + length, dtype, about["shape"])
    return places


def _read(reader: Any, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    return bytes(data[: reader.read_into(start, [data])])
