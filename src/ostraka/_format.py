"""The on-disk format: what shard files hold, process indexes, digests. Bytes and data.

docs/format.md says the same in prose. Nothing here touches a file, a device or the clock: what a
shard file holds, and where, follows from the leaves and layouts alone, so that a writer, a reader
and a planner agree without asking each other.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import xxhash

from ostraka import _box
from ostraka._box import Box
from ostraka._runs import count_runs, decode_runs, encode_runs
from ostraka._spec import DTYPES, Layout, StoredLeaf
from ostraka.errors import LostBox, printable

METADATA_NAME = "_METADATA"
METADATA_COPY = "metadata.json"
"""In the shards directory: the same bytes once more, for `repair`. Nothing else reads it."""
FORMAT = "ostraka"
VERSION = 1
COMPRESSED_VERSION = 2
"""The version of a checkpoint in which blocks may be compressed."""
VERSIONS = (VERSION, COMPRESSED_VERSION)
PAGE_BYTES = 4096
BLOCK_BYTES = 4 << 20
GATHER_BYTES = 1 << 20
"""Boxes below this size share a block with their neighbours."""
LEAST_COMPRESSED_BYTES = 64 << 10
"""Boxes below this size are not compressed."""
MOST_BLOCK_BYTES = 16 << 20
"""What a block may take in a file, its header apart: it is read whole for a few bytes of it."""
MOST_COMPRESSED_BYTES = 16 << 20
"""What a compressed block may hold, so that a few bytes can't ask for any amount of memory."""
MOST_RATIO = 1 << 16
"""Of what is compressed to what is stored of it. zstd takes 4 bytes at least for 128 KiB."""

DIGEST_DIGITS = 16
"""Of the digest of a block."""
ID_PATTERN = re.compile(r"[0-9a-f]{16}")


def digest(data: Any) -> str:
    """The digest of a whole small file: xxh3, 128 bits, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


new_block_digest = xxhash.xxh3_64
"""A digest of a block that comes bit by bit: `update`, then `hexdigest`."""


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


def has_own_blocks(entry: Entry, compressed: Collection[int] = ()) -> bool:
    """Whether a box shares its blocks with no other; `compressed` are the leaves to compress."""
    is_compressed = entry.leaf in compressed
    return entry.nbytes >= (LEAST_COMPRESSED_BYTES if is_compressed else GATHER_BYTES)


def block_lengths(
    header_bytes: int, entries: Sequence[Entry], compressed: Collection[int] = ()
) -> list[int]:
    """How a file is cut into digested blocks: the header, rows of a large box, some small boxes."""
    lengths = [header_bytes]
    gathered = 0
    for entry in entries:
        # As `has_own_blocks`, which would be called for every leaf of a save.
        if entry.nbytes < (LEAST_COMPRESSED_BYTES if entry.leaf in compressed else GATHER_BYTES):
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


def boxes_between(
    leaves: Sequence[StoredLeaf], entries: Iterable[Entry], start: int, stop: int
) -> tuple[LostBox, ...]:
    """What of each leaf lies in `[start, stop)` of a file's data."""
    found: list[LostBox] = []
    for leaf, box, offset, nbytes in entries:
        first, last = max(start, offset) - offset, min(stop, offset + nbytes) - offset
        if first >= last:
            continue
        spec = leaves[leaf].spec
        bits = DTYPES[spec.dtype].bits
        last_element = min(-(-last * 8 // bits), _box.count(box))
        lost = _box.around_span(first * 8 // bits, last_element, box)
        found.append(LostBox(spec.path, lost, spec.shape))
    return tuple(found)


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
    """Of what is stored."""
    result: str = ""
    """Of its data, if it is compressed."""


class StoredRange(NamedTuple):
    """Where a box lies in a file, counted from the start of the data as it is stored."""

    start: int
    stop: int
    is_compressed: bool


@dataclass(frozen=True, slots=True)
class FileDigests:
    """A file as its process index describes it: the header, then the blocks of its data."""

    size: int
    lengths: tuple[int, ...]
    digests: tuple[str, ...]
    data_lengths: tuple[int, ...] = ()
    """If blocks are compressed: of the data in each, which of those is longer than `lengths`."""
    results: tuple[str, ...] = ()
    """The digest of the data of each compressed block, in order."""
    identity: str = ""
    """What the store called the file when it was written; empty if it has no names for that."""
    place: str = ""
    """The digest of the location that `identity` holds for, if it is known."""

    @property
    def data_bytes(self) -> int:
        return sum((self.data_lengths or self.lengths)[1:])

    def blocks(self) -> list[Block]:
        """The header and the blocks of the data, stored one after the other."""
        header_bytes = self.lengths[0]
        in_file = pairwise(accumulate(self.lengths, initial=0))
        data_lengths = self.data_lengths or self.lengths
        in_data = pairwise(accumulate(data_lengths, initial=-header_bytes))
        following = iter(self.results)
        pairs = zip(data_lengths, self.lengths, strict=True)
        results = ["" if length == stored else next(following) for length, stored in pairs]
        return [
            Block(*data, *file, digest, result)
            for data, file, digest, result in zip(
                in_data, in_file, self.digests, results, strict=True
            )
        ]


def stored_range(entry: Entry, blocks: Sequence[Block]) -> StoredRange:
    """Where a box lies in a file; the blocks are the file's own, header included."""
    header_bytes = blocks[0].file_stop
    if entry.nbytes == 0:
        end = blocks[-1].file_stop - header_bytes
        return StoredRange(end, end, is_compressed=False)
    stop = entry.offset + entry.nbytes
    first = bisect_right(blocks, entry.offset, key=attrgetter("start")) - 1
    last = bisect_right(blocks, stop - 1, key=attrgetter("start"))
    of_box = blocks[first:last]
    # A compressed block holds nothing but its box; others may hold several boxes.
    lead = 0 if of_box[0].result else entry.offset - of_box[0].start
    rest = 0 if of_box[-1].result else of_box[-1].stop - stop
    return StoredRange(
        of_box[0].file_start + lead - header_bytes,
        of_box[-1].file_stop - rest - header_bytes,
        any(block.result for block in of_box),
    )


def planned_digests(file: FileEntry, entries: Sequence[Entry]) -> FileDigests:
    """A file that is yet to be written; its digests only have the right length."""
    lengths = tuple(block_lengths(file.header_bytes, entries))
    return FileDigests(file.size, lengths, ("0" * 16,) * len(lengths))


def encode_index(
    save_id: str,
    process: int,
    files: Mapping[str, FileDigests],
    *,
    version: int = VERSION,
    location: str = "",
) -> bytes:
    """The index of a process; `location` is where the identities of its files hold.

    Without one they are left out.
    """
    head: dict[str, Any] = {
        "format": f"{FORMAT}-index",
        "version": version,
        "id": save_id,
        "process": process,
    }
    described = {name: _encode_digests(file) for name, file in files.items()}
    if location and any(map(attrgetter("identity"), files.values())):
        head["place"] = digest(location.encode())
        for name, file in files.items():
            described[name]["e_tag"] = file.identity
    return dumps({**head, "files": described}).encode()


def _encode_digests(file: FileDigests) -> dict[str, Any]:
    described: dict[str, Any] = {
        "size": file.size,
        "blocks": encode_runs(file.lengths),
        "digests": "".join(file.digests),
    }
    if file.results:
        described["data"] = encode_runs(file.data_lengths)
        described["results"] = "".join(file.results)
    return described


def decode_index(data: bytes) -> dict[str, FileDigests]:
    """Raises ValueError if it contradicts itself."""
    try:
        body: dict[str, Any] = json.loads(data)
        place = str(body.get("place", ""))
        described: dict[str, Any] = dict(body["files"])
        return {
            name: _decode_digests(printable(name), file, place) for name, file in described.items()
        }
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"a field is missing or malformed ({error})") from error


def _decode_digests(name: str, file: Mapping[str, Any], place: str) -> FileDigests:
    lengths, digests = _decode_blocks(name, file["blocks"], file["digests"])
    if sum(lengths) != file["size"] or min(lengths, default=1) <= 0:
        raise ValueError(f"the blocks of {name} do not add up to its size")
    known = (str(file.get("e_tag", "")), place)
    if "data" not in file:
        return FileDigests(sum(lengths), lengths, digests, (), (), *known)
    data_lengths, _ = _decode_blocks(name, file["data"], file["digests"])
    results = _cut_digests(file["results"])
    pairs = list(zip(lengths, data_lengths, strict=True))
    compressed = [length for stored, length in pairs if stored != length]
    fit = all(stored <= length for stored, length in pairs) and data_lengths[:1] == lengths[:1]
    if not fit or len(results) != len(compressed):
        raise ValueError(f"the compressed blocks of {name} do not fit what is stored of them")
    if max(compressed, default=0) > MOST_COMPRESSED_BYTES:
        raise ValueError(f"{name} has a compressed block of {max(compressed):,} bytes")
    return FileDigests(sum(lengths), lengths, digests, data_lengths, results, *known)


def _decode_blocks(name: str, runs: Any, digests: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Lengths of blocks, of which there are as many as digests: a few bytes don't become more."""
    if count_runs(runs) != len(digests) // DIGEST_DIGITS:
        raise ValueError(f"the blocks of {name} do not fit: they are not as many as their digests")
    return decode_runs(runs), _cut_digests(digests)


def _cut_digests(text: Any) -> tuple[str, ...]:
    if type(text) is not str or len(text) % DIGEST_DIGITS:
        raise ValueError("digests are no text of 16 digits each")
    return tuple(text[i : i + DIGEST_DIGITS] for i in range(0, len(text), DIGEST_DIGITS))


# Small things


dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""A value as JSON in as few characters as can be."""
