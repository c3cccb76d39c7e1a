"""Read a result back by its own headers, and compare it with the source."""

from __future__ import annotations

import ast
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
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
    piece_bytes,
    read_together,
)

# Files of tensors, each byte of which is read once.

READ_BYTES = 8 << 20
_THREADS = 4
_LOCAL_HEADER_BYTES = 30


class TensorPlace(NamedTuple):
    """The file, offset, dtype and shape of a tensor."""

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]
    crc: int | None = None
    """The CRC-32 of the header before its bytes, if the file has checksums."""


def check_files(
    work: Work, digests: Digests, store: Store, places: Mapping[str, TensorPlace]
) -> dict[int, int]:
    """Compare all tensors with the digests of the source. Raises Damaged.

    Returns the CRC-32 of each item with its header, if the files have checksums.
    """
    problems = _differences(work, store, places)
    if problems:
        raise Damaged(store.location, problems)
    scratch, stop, opened = Scratch(work.memory), StopSignal(), ExitStack()

    @cache
    def reader_of(name: str) -> FileReader:
        return opened.enter_context(closing(store.open(name)))

    def check(group: Sequence[ItemBox]) -> tuple[int, int]:
        number = group[0].item
        item = work.items[number]
        place, dtype, whole = (
            places[item.name],
            numpy_dtype(item.spec.dtype),
            _box.full(item.spec.shape),
        )
        crc = place.crc
        # Boxes that share rows are digested together, others one after the other.
        is_by_rows = not is_contiguous(work, group[0])
        for together in [group] if is_by_rows else [[piece] for piece in group]:
            states = [shard_file.new_block_digest() for _ in together]
            area = whole if is_by_rows else together[0].box
            for band in _box.bands(area, whole, READ_BYTES // dtype.itemsize):
                stop.check()
                first, last = _box.flat_span(band, whole)
                memory: Any = scratch.take((last - first) * dtype.itemsize)
                start = place.start + first * dtype.itemsize
                if reader_of(place.file).read_into(start, [memory]) != memory.size:
                    raise _not_as_written(store.location, place.file, item.path)
                crc = None if crc is None else zlib.crc32(memory, crc)
                rows = memory.reshape(*_box.shape_of(band), dtype.itemsize)
                for state, piece in zip(states, together, strict=True):
                    part = _box.intersect(band, piece.box)
                    if part is not None:
                        of_piece: Any = np.ascontiguousarray(rows[_box.slices(part, band)])
                        state.update(of_piece)
            if [state.hexdigest() for state in states] != [digests[piece] for piece in together]:
                raise _not_as_written(store.location, place.file, item.path)
        work.progress.add(sum(piece_bytes(work, piece) for piece in group))
        return number, crc or 0

    with opened:
        return dict(run_all(check, _groups(work, digests, places), threads=_THREADS, stop=stop))


def _groups(
    work: Work, pieces: Iterable[ItemBox], places: Mapping[str, TensorPlace]
) -> Iterator[list[ItemBox]]:
    """Group boxes to check together: those that share rows, or a checksum."""
    together: dict[int, list[ItemBox]] = {}
    for piece in pieces:
        has_checksum = places[work.items[piece.item].name].crc is not None
        if has_checksum or not is_contiguous(work, piece):
            together.setdefault(piece.item, []).append(piece)
        else:
            yield [piece]
    yield from together.values()


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


def _not_as_written(location: str, file: str, *paths: str) -> Damaged:
    found = "what was read back is not what was written; convert again, and check the disk"
    return Damaged(location, [Problem(file, found, paths)])


def check_headers(store: Store, name: str, headers: Iterable[tuple[int, bytes]]) -> None:
    """Compare the headers of a file, given with their offsets. Raises Damaged."""
    with closing(store.open(name)) as reader:
        if any(_read(reader, start, len(data)) != data for start, data in headers):
            raise _not_as_written(store.location, name)


def check_source(work: Work, digests: Digests, found: Source, numbers: Mapping[int, int]) -> None:
    """Compare boxes with those of the result, read as a checkpoint. Raises Damaged.

    `numbers` has the number of the array of each item.
    """
    stop = StopSignal()

    def check(group: Sequence[ItemBox]) -> None:
        targets = [Target(numbers[piece.item], piece.box) for piece in group]
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
            crc = zlib.crc32(read(start, 10 + length))
            places[path] = TensorPlace(name, start + 10 + length, dtype, about["shape"], crc)
    return places


def _read(reader: FileReader, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    return bytes(data[: reader.read_into(start, [data])])
