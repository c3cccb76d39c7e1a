"""The on-disk format: `_METADATA`, process indexes, safetensors headers, digests. Bytes and data.

docs/format.md says the same in prose. Nothing here touches a file, a device or the clock: what a
shard file holds, and where, follows from the leaves and layouts alone, so that a writer, a reader
and a planner agree without asking each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

import xxhash

from ostraka import _box
from ostraka._box import Box
from ostraka._spec import DTYPES, Dtype, Layout, LeafSpec, StoredLeaf

METADATA_NAME = "_METADATA"
FORMAT = "ostraka"
VERSION = 1
PAGE_BYTES = 4096
BLOCK_BYTES = 4 << 20
GATHER_BYTES = 1 << 20
"""Boxes below this size share a block with their neighbours."""

ID_PATTERN = re.compile(r"[0-9a-f]{16}")
_OFFSET_DIGITS = 15
_QUOTED_OFFSETS = len(encode_basestring_ascii('{"saved_offsets":[]},:'))
_MAX_RUN_NUMBERS = 1 << 26


def digest(data: Any) -> str:
    """The digest of a whole small file: xxh3, 128 bits, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def block_digest(buffers: Iterable[Any]) -> str:
    """The digest of one block, given as the pieces it is made of: xxh3, 64 bits."""
    state = xxhash.xxh3_64()
    for piece in buffers:
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
    unordered: dict[tuple[int, int], list[tuple[int, int, Box, int]]] = {}
    for (layout, part, shape, bits), numbers in kinds.items():
        for device, cells in owners[layout]:
            for turn, cell in enumerate(cells):
                box = _box.cell(shape, layouts[layout].grid, cell)
                nbytes = (_box.count(box) * bits + 7) // 8
                order = -alignment_of(nbytes)
                file = unordered.setdefault((device, part + turn), [])
                file += [(order, number, box, nbytes) for number in numbers]
    return {key: _with_offsets(sorted(boxes)) for key, boxes in sorted(unordered.items())}


def alignment_of(nbytes: int) -> int:
    """The largest power of two, up to a page, that divides the size of a box."""
    return min(nbytes & -nbytes, PAGE_BYTES)


def _with_offsets(boxes: Iterable[tuple[int, int, Box, int]]) -> list[Entry]:
    entries: list[Entry] = []
    offset = 0
    for _, leaf, box, nbytes in boxes:
        entries.append(Entry(leaf, box, offset, nbytes))
        offset += nbytes
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


def _tensor_shape(dtype: Dtype, box: Box, nbytes: int) -> tuple[list[int], list[int]]:
    """The shape that the file shows, and where that begins in the whole array.

    Dtypes that safetensors lacks are shown as bytes.
    """
    if dtype.packed:
        return [nbytes], [0]
    shape = list(_box.shape_of(box))
    starts = [start for start, _ in box]
    if dtype.opaque and dtype.bits > 8:
        return [*shape, dtype.bits // 8], [*starts, 0]
    return shape, starts


def header_capacity(leaf: LeafSpec) -> int:
    """An upper bound for what one box of this leaf adds to a header, the same for every box.

    Headers are padded anyway; a bound that does not depend on the digits of each offset lets file
    sizes be planned for thousands of devices at once.
    """
    dtype = DTYPES[leaf.dtype]
    key = encode_basestring_ascii(leaf.path)
    quoted = len(encode_basestring_ascii(key))
    digits = sum(map(len, map(str, leaf.shape))) + len(leaf.shape) + 3
    if dtype.packed:
        digits = _OFFSET_DIGITS
    tensor = len(key) + len('{"dtype":"","shape":[],"data_offsets":[,]},:')
    tensor += len(dtype.code) + digits + 2 * _OFFSET_DIGITS
    sharding = quoted + _QUOTED_OFFSETS + digits
    named = quoted + len(encode_basestring_ascii('"",:')) + len(leaf.dtype) if dtype.opaque else 0
    return tensor + sharding + named


def header_bytes_for(capacity: Any) -> Any:
    """The size of a header (length prefix and padding included) whose leaves need `capacity`.

    Takes an integer or an array of them.
    """
    return -(-(_header_frame_bytes() + capacity) // PAGE_BYTES) * PAGE_BYTES


@cache
def _header_frame_bytes() -> int:
    return 8 + len(_header_json([], [], "0" * 16))


def encode_header(
    entries: Sequence[Entry], leaves: Sequence[StoredLeaf], save_id: str, header_bytes: int
) -> bytes:
    """The first `header_bytes` of a shard file."""
    text = _header_json(entries, leaves, save_id)
    if 8 + len(text) > header_bytes:
        raise AssertionError(f"header of {8 + len(text)} bytes exceeds its plan of {header_bytes}")
    return (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)


def _header_json(entries: Sequence[Entry], leaves: Sequence[StoredLeaf], save_id: str) -> bytes:
    """What a header says. Written entry by entry: making one large object of it all is slow."""
    tensors: list[str] = []
    offsets: list[str] = []
    opaque: dict[str, str] = {}
    shown: dict[tuple[str, Box], tuple[str, str]] = {}
    for leaf, box, offset, nbytes in entries:
        spec = leaves[leaf].spec
        dtype = DTYPES[spec.dtype]
        texts = shown.get((spec.dtype, box))
        if texts is None:
            shape, starts = _tensor_shape(dtype, box, nbytes)
            texts = shown[spec.dtype, box] = (dumps(shape), dumps(starts))
        key = encode_basestring_ascii(spec.path)
        tensors.append(
            f'{key}:{{"dtype":"{dtype.code}","shape":{texts[0]},'
            f'"data_offsets":[{offset},{offset + nbytes}]}}'
        )
        offsets.append(f'{key}:{{"saved_offsets":{texts[1]}}}')
        if dtype.opaque:
            opaque[spec.path] = dtype.name
    about = {
        "ostraka": str(VERSION),
        "ostraka_id": save_id,
        "ostraka_dtypes": dumps(opaque),
        "DCP_SHARDING_INFO": f"{{{','.join(offsets)}}}",
    }
    return ("{" + ",".join([f'"__metadata__":{dumps(about)}', *tensors]) + "}").encode()


# Process indexes


class Block(NamedTuple):
    """A range of a shard file that is stored, digested and read as a whole."""

    start: int
    stop: int
    """Its range in the data, which begins after the header: that of the header is below 0."""
    file_start: int
    file_stop: int
    """Its range in the file."""
    digest: str


@dataclass(frozen=True, slots=True)
class FileDigests:
    """A file as its process index describes it: the header, then the blocks of its data."""

    size: int
    lengths: tuple[int, ...]
    digests: tuple[str, ...]

    def blocks(self) -> list[Block]:
        """The header and the blocks of the data: stored as they are, one after the other."""
        header_bytes = self.lengths[0]
        ends = pairwise(accumulate(self.lengths, initial=0))
        return [
            Block(start - header_bytes, stop - header_bytes, start, stop, digest)
            for (start, stop), digest in zip(ends, self.digests, strict=True)
        ]


def planned_digests(file: FileEntry, entries: Sequence[Entry]) -> FileDigests:
    """A file that is yet to be written; its digests only have the right length."""
    lengths = block_lengths(file.header_bytes, entries)
    return FileDigests(file.size, tuple(lengths), ("0" * 16,) * len(lengths))


def encode_index(save_id: str, process: int, files: Mapping[str, FileDigests]) -> bytes:
    return dumps(
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
        adds_up = sum(lengths) == file["size"] and min(lengths, default=1) > 0
        if not adds_up or len(digests) != len(lengths):
            raise ValueError(f"the blocks of {name} do not add up to its size")
        files[name] = FileDigests(file["size"], lengths, digests)
    return files


# Small things


def encode_runs(numbers: Sequence[int]) -> list[list[int]]:
    """Integers as arithmetic runs `[start, step, count]`; device orders and sizes become tiny."""
    runs: list[list[int]] = []
    for number in numbers:
        start, step, length = runs[-1] if runs else (0, 0, 0)
        if length == 1:
            runs[-1] = [start, number - start, 2]
        elif length and number == start + step * length:
            runs[-1][2] += 1
        elif length == 2 and step:
            # Two numbers alone are no run yet: let the second begin one of its own.
            runs[-1:] = [[start, 0, 1], [start + step, number - start - step, 2]]
        else:
            runs.append([number, 0, 1])
    return runs


def decode_runs(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    if not all(type(n) is int for run in runs for n in run) or any(run[2] < 1 for run in runs):
        raise ValueError("a list of numbers has something else in it")
    if sum(length for _, _, length in runs) > _MAX_RUN_NUMBERS:
        raise ValueError("a list of numbers is longer than any checkpoint needs")
    return tuple(start + step * i for start, step, length in runs for i in range(length))


dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""A value as JSON in as few characters as can be."""
