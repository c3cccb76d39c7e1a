"""Read a result again, by what its own files say, and compare it with what the source had."""

from __future__ import annotations

import ast
import json
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, cast

from ostraka._checkpoint import unless_replaced
from ostraka._memory import Scratch
from ostraka._parallel import StopSignal, run_all
from ostraka._recycle import recycling
from ostraka._source import Source
from ostraka._spec import DTYPES, Target, numpy_dtype
from ostraka.errors import Damaged, Problem
from ostraka.interop._crc import join_crcs
from ostraka.interop._cut import piece_bytes, read_together
from ostraka.interop._digest_files import Readers, digest_pieces, pieces_by_run
from ostraka.interop._tensor_files import PlannedFile
from ostraka.interop._work import Digests, Piece, Tally, Work, digest_of
from ostraka.storage import Store

_THREADS = 4
_LOCAL_HEADER_BYTES = 30


class Place(NamedTuple):
    """Where a tensor lies, and what it is, as its file says."""

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]


def check_files(
    work: Work,
    digests: Digests,
    store: Store,
    places: Mapping[str, Place],
    tally: Tally,
    *,
    with_crcs: bool = False,
) -> dict[int, int]:
    """Compare all tensors with what was read from the source. Raises Damaged.

    Returns, by the number of each item, the CRC-32 of its bytes in the file, if that is wanted.
    """
    problems = _differences(work, store, places)
    if problems:
        raise Damaged(store.location, problems)
    scratch, stop = Scratch(work.memory), StopSignal()
    readers = Readers(store)

    def check(group: Sequence[Piece]) -> tuple[Piece, int, int]:
        item = work.items[group[0].item]
        place = places[item.name]
        reader = readers.reader(place.file)
        found = digest_pieces(work, group, place.start, reader, scratch, stop, with_crc=with_crcs)
        if found.digests != [digests[piece] for piece in group]:
            raise _not_as_written(store.location, place.file, item.path)
        nbytes = sum(piece_bytes(work, piece) for piece in group)
        tally.add(nbytes)
        return group[0], found.crc, nbytes

    with closing(readers):
        checked = run_all(check, pieces_by_run(work, list(digests)), threads=_THREADS, stop=stop)
    crcs: dict[int, int] = {}
    for piece, crc, nbytes in sorted(checked) if with_crcs else ():
        crcs[piece.item] = join_crcs(crcs.get(piece.item, 0), crc, nbytes)
    return crcs


def check_places(
    work: Work, store: Store, places: Mapping[str, Place], planned: Mapping[str, Place]
) -> None:
    """Compare where files say that tensors lie with where they were put. Raises Damaged."""
    problems = _differences(work, store, places)
    for name, place in planned.items():
        if not problems and places[name] != place:
            found = f"it says byte {places[name].start:,}, and the tensor is at {place.start:,}"
            problems.append(Problem(place.file, found, (name,)))
    if problems:
        raise Damaged(store.location, problems)


def _differences(work: Work, store: Store, places: Mapping[str, Place]) -> list[Problem]:
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
    number_of: Callable[[Piece], int],
    tally: Tally,
) -> None:
    """Compare pieces with those that the result has as a checkpoint. Raises Damaged."""
    stop = StopSignal()

    def check(group: Sequence[Piece]) -> None:
        targets = [Target(number_of(piece), piece.box) for piece in group]
        with recycling(work.memory), unless_replaced(found):
            for at, array in found.read(targets):
                stop.check()
                piece = group[at]
                item = work.items[piece.item]
                is_same = array.dtype == numpy_dtype(item.spec.dtype)
                if not is_same or digest_of(array) != digests[piece]:
                    raise _not_as_written(found.location, found.location, item.path)
                tally.add(array.nbytes)

    run_all(check, read_together(work, list(digests)), threads=2, stop=stop)


# What files say


def places_in(work: Work, files: Sequence[PlannedFile]) -> dict[str, Place]:
    """Where tensors lie by the plan."""
    places: dict[str, Place] = {}
    for file in files:
        for at, start in file.places.items():
            item = work.items[at]
            places[item.name] = Place(file.name, start, item.spec.dtype, item.spec.shape)
    return places


def find_in_safetensors(store: Store, names: Sequence[str]) -> dict[str, Place]:
    """The tensors in files, by what the headers say."""
    dtypes = {dtype.code: name for name, dtype in DTYPES.items() if not dtype.opaque}
    places: dict[str, Place] = {}
    for name in names:
        with closing(store.open(name)) as reader:
            read = partial(_read, reader)
            (length,) = struct.unpack("<Q", read(0, 8))
            header: dict[str, Any] = json.loads(read(8, length))
        header.pop("__metadata__", None)
        for path, about in header.items():
            start = 8 + length + about["data_offsets"][0]
            places[path] = Place(name, start, dtypes[about["dtype"]], tuple(about["shape"]))
    return places


def find_in_npz(store: Store, name: str) -> dict[str, Place]:
    """The arrays in a `.npz` file, by what Python's zipfile and their headers say."""
    with closing(store.open(name)) as reader:
        read = partial(_read, reader)
        with zipfile.ZipFile(f"{store.location}/{name}") as listed:
            entries = listed.infolist()
        places: dict[str, Place] = {}
        for entry in entries:
            local = read(entry.header_offset, _LOCAL_HEADER_BYTES)
            lengths = struct.unpack("<2H", local[-4:])
            start = entry.header_offset + _LOCAL_HEADER_BYTES + sum(lengths)
            (length,) = struct.unpack("<H", read(start + 8, 2))
            about = cast("dict[str, Any]", ast.literal_eval(read(start + 10, length).decode()))
            dtype = numpy_dtype(about["descr"]).name
            path = entry.filename.removesuffix(".npy")
            places[path] = Place(name, start + 10 + length, dtype, about["shape"])
    return places


def _read(reader: Any, start: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    return bytes(data[: reader.read_into(start, [data])])
