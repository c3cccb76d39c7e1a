"""A `.npz` file, planned before it is written: a zip of `.npy` files, stored as they are. Pure.

All lengths are known beforehand, so that its arrays can be written in any order; what depends on
their checksums is written last. Every entry has 64-bit sizes, as numpy writes them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial

from ostraka._spec import numpy_dtype
from ostraka.interop._tensor_files import Patches, PlannedFile
from ostraka.interop._work import Item

_VERSION = 45
"""The version of zip that has 64-bit sizes."""
_MADE_BY = 3 << 8 | _VERSION
_UTF8 = 1 << 11
_DATE, _TIME = (1 << 5) | 1, 0
"""1980-01-01, as numpy has it."""
_HUGE, _HUGE_COUNT = 0xFFFF_FFFF, 0xFFFF
_MAGIC = b"\x93NUMPY\x01\x00"


def plan_npz(name: str, items: Sequence[Item]) -> PlannedFile:
    """The file for items, whose paths are the names of the arrays."""
    places: dict[int, int] = {}
    headers: dict[int, tuple[int, bytes]] = {}
    """By item: where its entry begins, and the header of its array."""
    end = 0
    for number, item in enumerate(items):
        local = len(_local_header(item, 0, 0))
        header = _array_header(item)
        headers[number] = (end, header)
        places[number] = end + local + len(header)
        end = places[number] + item.spec.nbytes
    fixed = tuple((places[at] - len(header), header) for at, (_, header) in headers.items())
    directory = sum(len(_central_header(item, 0, 0, 0)) for item in items)
    finish = partial(_finish, items, headers, end)
    return PlannedFile(name, end + directory + len(_end(0, 0, 0)), places, fixed, finish)


def _finish(
    items: Sequence[Item],
    headers: Mapping[int, tuple[int, bytes]],
    end: int,
    crcs: Mapping[int, int],
) -> Patches:
    """The headers of the entries, and the directory at the end."""
    from zlib import crc32

    from ostraka.interop._crc import join_crcs

    patches: Patches = []
    directory: list[bytes] = []
    for number, item in enumerate(items):
        start, header = headers[number]
        size = len(header) + item.spec.nbytes
        crc = join_crcs(crc32(header), crcs[number], item.spec.nbytes)
        patches.append((start, _local_header(item, crc, size)))
        directory.append(_central_header(item, crc, size, start))
    listed = b"".join(directory)
    return [*patches, (end, listed + _end(len(items), len(listed), end))]


def _array_header(item: Item) -> bytes:
    """The beginning of a `.npy` file, filled up to a multiple of 64 bytes."""
    spec = item.spec
    shape = f"({', '.join(map(str, spec.shape))}{',' if len(spec.shape) == 1 else ''})"
    dtype = numpy_dtype(spec.dtype).str
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    length = len(_MAGIC) + 2 + len(text) + 1
    body = text + b" " * (-length % 64) + b"\n"
    return _MAGIC + struct.pack("<H", len(body)) + body


def _local_header(item: Item, crc: int, size: int) -> bytes:
    name = _name(item)
    extra = struct.pack("<HHQQ", 1, 16, size, size)
    fields = (b"PK\x03\x04", _VERSION, _UTF8, 0, _TIME, _DATE, crc, _HUGE, _HUGE)
    return struct.pack("<4s5H3L2H", *fields, len(name), len(extra)) + name + extra


def _central_header(item: Item, crc: int, size: int, start: int) -> bytes:
    name = _name(item)
    extra = struct.pack("<HHQQQ", 1, 24, size, size, start)
    fields = (b"PK\x01\x02", _MADE_BY, _VERSION, _UTF8, 0, _TIME, _DATE, crc, _HUGE, _HUGE)
    rest = (len(name), len(extra), 0, 0, 0, 0o600 << 16, _HUGE)
    return struct.pack("<4s6H3L5H2L", *fields, *rest) + name + extra


def _end(count: int, directory_bytes: int, directory_start: int) -> bytes:
    """The end of the directory, with 64-bit numbers, and the usual one that refers to it."""
    end64 = struct.pack(
        "<4sQ2H2L4Q",
        *(b"PK\x06\x06", 44, _MADE_BY, _VERSION, 0, 0),
        *(count, count, directory_bytes, directory_start),
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, directory_start + directory_bytes, 1)
    counts = (min(count, _HUGE_COUNT),) * 2
    sizes = (min(directory_bytes, _HUGE), min(directory_start, _HUGE))
    return end64 + locator + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *counts, *sizes, 0)


def _name(item: Item) -> bytes:
    return f"{item.name}.npy".encode()
