"""The on-disk format: the contents of shard files, process indexes, digests. Bytes and data.

docs/reference/format.md says the same in prose. Nothing here touches a file, a device or the clock.
The contents and offsets of a shard file follow from the leaves and layouts alone. So a writer, a
reader and a planner agree without asking each other.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from typing import Any, NamedTuple

import xxhash

from ostraka.common.dtypes import DTYPES, Dtype
from ostraka.errors import printable
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.runs import decode_runs, encode_runs
from ostraka.layout.spec import Layout, LeafSpec, StoredLeaf

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
"""The largest block in a file, apart from the header. Blocks are read whole."""
MOST_COMPRESSED_BYTES = 16 << 20
"""The most data in a compressed block, so that a few bytes can't ask for any amount of memory."""
MOST_RATIO = 1 << 16
"""Largest allowed ratio of data to stored bytes. zstd takes at least 4 bytes for 128 KiB."""

DIGEST_DIGITS = 16
"""The hexadecimal digits in the digest of a block."""
ID_PATTERN = re.compile(r"[0-9a-f]{16}")
dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""A value as JSON in as few characters as can be."""

DEFAULT_CODEC = "zstd"
_OFFSET_DIGITS = 15
_NOWHERE = 10**14
"""Added to the start of a box if safetensors lacks its dtype. PyTorch's reader of sharded files
then takes the array for too large and raises. Otherwise it would return bytes as numbers."""
_FREE_BYTES = 64 << 10
_USUAL_BYTES = 1 << 10
_SLACK = 4
"""The largest allowed ratio of a header's length to its plan: readers read it whole."""
_QUOTED_OFFSETS = len(encode_basestring_ascii('{"saved_offsets":[]},:'))


def digest(data: Any) -> str:
    """The digest of a whole small file: xxh3, 128 bits, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


new_block_digest = xxhash.xxh3_64
"""A digest of a block that comes bit by bit: `update`, then `hexdigest`."""


def block_digest(buffers: Iterable[Any]) -> str:
    """The digest of one block, given in pieces: xxh3, 64 bits."""
    state = xxhash.xxh3_64()
    for piece in buffers:
        state.update(piece)
    return state.hexdigest()


def cut_digests(text: Any) -> tuple[str, ...]:
    """The digests of blocks, which follow each other in a text. Raises ValueError."""
    if type(text) is not str or len(text) % DIGEST_DIGITS:
        raise ValueError("digests are no text of 16 digits each")
    return tuple(text[i : i + DIGEST_DIGITS] for i in range(0, len(text), DIGEST_DIGITS))


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
    """One box of one leaf in a shard file. `offset` counts from the start of the data."""

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
    contents: dict[tuple[int, int], list[Entry]] = {}
    for key, boxes in sorted(unordered.items()):
        entries = contents[key] = []
        offset = 0
        for _, leaf, box, nbytes in sorted(boxes):
            entries.append(Entry(leaf, box, offset, nbytes))
            offset += nbytes
    return contents


def alignment_of(nbytes: int) -> int:
    """The largest power of two, up to a page, that divides the size of a box."""
    return min(nbytes & -nbytes, PAGE_BYTES)


def block_lengths(
    header_bytes: int, entries: Sequence[Entry], compressed: Collection[int] = ()
) -> list[int]:
    """The lengths of a file's blocks: the header, rows of a large box, or some small boxes each."""
    lengths = [header_bytes]
    gathered = 0
    for entry in entries:
        small = LEAST_COMPRESSED_BYTES if entry.leaf in compressed else GATHER_BYTES
        if gathered and (entry.nbytes >= small or gathered + entry.nbytes > BLOCK_BYTES):
            lengths.append(gathered)
            gathered = 0
        if entry.nbytes < small:
            gathered += entry.nbytes
            continue
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


# Process indexes


class Block(NamedTuple):
    """A range of a shard file that is stored, digested and read as a whole."""

    start: int
    stop: int
    """Its range in the data, which begins after the header. The header's range is below 0."""
    file_start: int
    file_stop: int
    """Its range in the file."""
    digest: str
    """The digest of the stored bytes."""
    result: str = ""
    """The digest of its data, if it is compressed."""


class StoredRange(NamedTuple):
    """The stored bytes of a box in a file, counted from the start of the stored data."""

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
    """Uncompressed length of each block. Empty if nothing is compressed."""
    results: tuple[str, ...] = ()
    """The digest of the data of each compressed block, in order."""
    identity: str = ""
    """The store's identity of the file when it was written, or empty if it has none."""
    place: str = ""
    """The digest of the location that `identity` holds for, if it is known."""

    @property
    def data_bytes(self) -> int:
        return sum((self.data_lengths or self.lengths)[1:])

    def blocks(self) -> list[Block]:
        """The header and the blocks of the data, stored one after the other."""
        in_file = pairwise(accumulate(self.lengths, initial=0))
        data_lengths = self.data_lengths or self.lengths
        in_data = pairwise(accumulate(data_lengths, initial=-self.lengths[0]))
        following = iter(self.results)
        pairs = zip(data_lengths, self.lengths, strict=True)
        results = ["" if length == stored else next(following) for length, stored in pairs]
        rows = zip(in_data, in_file, self.digests, results, strict=True)
        return [Block(*data, *file, digest, result) for data, file, digest, result in rows]


def stored_range(entry: Entry, blocks: Sequence[Block]) -> StoredRange:
    """The range of a box in a file with these blocks, header included."""
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


def encode_index(
    save_id: str,
    process: int,
    files: Mapping[str, FileDigests],
    *,
    version: int = VERSION,
    location: str = "",
) -> bytes:
    """The index of a process. The identities of its files hold for `location` alone.

    Without a location the index has no identities.
    """
    head: dict[str, Any] = {
        "format": f"{FORMAT}-index",
        "version": version,
        "id": save_id,
        "process": process,
    }
    has_identities = location and any(map(attrgetter("identity"), files.values()))
    if has_identities:
        head["place"] = digest(location.encode())
    described: dict[str, dict[str, Any]] = {}
    for name, file in files.items():
        about = described[name] = {
            "size": file.size,
            "blocks": encode_runs(file.lengths),
            "digests": "".join(file.digests),
        }
        if file.results:
            about |= {"data": encode_runs(file.data_lengths), "results": "".join(file.results)}
        if has_identities:
            about["e_tag"] = file.identity
    return dumps({**head, "files": described}).encode()


def decode_index(data: bytes) -> dict[str, FileDigests]:
    """The digests of each file by name. Raises ValueError if the index contradicts itself."""
    try:
        body: dict[str, Any] = json.loads(data)
        place = str(body.get("place", ""))
        described: dict[str, Any] = dict(body["files"])
        return {
            name: _decode_digests(name if name.isprintable() else printable(name), file, place)
            for name, file in described.items()
        }
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"a field is missing or malformed ({error})") from error


def _decode_digests(name: str, file: Mapping[str, Any], place: str) -> FileDigests:
    lengths, digests = _decode_blocks(name, file["blocks"], file["digests"])
    if sum(lengths) != file["size"] or min(lengths, default=1) <= 0:
        raise ValueError(f"the blocks of {name} do not add up to its size")
    about = FileDigests(
        sum(lengths), lengths, digests, identity=str(file.get("e_tag", "")), place=place
    )
    if "data" not in file:
        return about
    data_lengths, _ = _decode_blocks(name, file["data"], file["digests"])
    results = cut_digests(file["results"])
    pairs = list(zip(lengths, data_lengths, strict=True))
    compressed = [length for stored, length in pairs if stored != length]
    fit = all(stored <= length for stored, length in pairs) and data_lengths[:1] == lengths[:1]
    if not fit or len(results) != len(compressed):
        raise ValueError(f"the compressed blocks of {name} do not fit what is stored of them")
    if max(compressed, default=0) > MOST_COMPRESSED_BYTES:
        raise ValueError(f"{name} has a compressed block of {max(compressed):,} bytes")
    return replace(about, data_lengths=data_lengths, results=results)


def _decode_blocks(name: str, runs: Any, digests: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Lengths and digests of blocks. Compares their numbers first, so the memory has a bound."""
    if sum([length for _, _, length in runs]) != len(digests) // DIGEST_DIGITS:
        raise ValueError(f"the blocks of {name} do not fit: they are not as many as their digests")
    return decode_runs(runs), cut_digests(digests)


# Headers


def _tensor_shape(dtype: Dtype, box: Box, nbytes: int) -> tuple[list[int], list[int]]:
    """The shape in the header, and its start in the whole array.

    Dtypes that safetensors lacks appear as bytes.
    """
    if dtype.packed:
        return [nbytes], [_NOWHERE]
    shape = list(_box.shape_of(box))
    starts = [start for start, _ in box]
    if not dtype.opaque:
        return shape, starts
    if dtype.bits > 8:
        shape, starts = [*shape, dtype.bits // 8], [*starts, 0]
    return shape, [start + _NOWHERE for start in starts[:1]] + starts[1:]


def real_starts(shown: Sequence[int]) -> list[int]:
    """The start of a box from its header. Older checkpoints have nothing added."""
    starts = list(shown)
    if starts and starts[0] >= _NOWHERE:
        starts[0] -= _NOWHERE
    return starts


def header_capacity(leaf: LeafSpec, codec: str = "") -> int:
    """An upper bound for the bytes of one box of this leaf in a header, the same for every box.

    `codec` is the name of its codec. Headers have padding anyway, and a bound that ignores the
    digits of each offset allows to plan file sizes for thousands of devices at once.
    """
    dtype = DTYPES[leaf.dtype]
    key = encode_basestring_ascii(leaf.path)
    quoted = len(encode_basestring_ascii(key))
    shape_digits = sum(map(len, map(str, leaf.shape))) + len(leaf.shape) + 3
    digits = shape_digits + _OFFSET_DIGITS * (dtype.opaque or bool(codec))
    tensor = len(key) + len('{"dtype":"","shape":[],"data_offsets":[,]},:')
    tensor += len(dtype.code) + digits + 2 * _OFFSET_DIGITS
    sharding = quoted + _QUOTED_OFFSETS + digits
    named = quoted + len(encode_basestring_ascii('"",:')) + len(leaf.dtype) if dtype.opaque else 0
    if codec:
        # The length of what is stored, and what it really is.
        about = {"codec": codec, "dtype": leaf.dtype, "shape": [], "saved_offsets": []}
        named += _OFFSET_DIGITS + quoted + len(encode_basestring_ascii(f"{dumps(about)},:"))
        named += 2 * shape_digits + len('"ostraka_codecs":"{}",')
    return tensor + sharding + named


def header_bytes_for(capacity: Any) -> Any:
    """The size of a header (length prefix and padding included) whose leaves need `capacity`.

    Takes an integer or an array of them.
    """
    return -(-(_header_frame_bytes() + capacity) // PAGE_BYTES) * PAGE_BYTES


def is_header_too_long(header_bytes: int, leaves: Sequence[LeafSpec]) -> bool:
    """True if a header is far longer than one box of each of these leaves can need."""
    beyond = header_bytes - _FREE_BYTES
    if beyond <= _USUAL_BYTES * len(leaves):  # Most are, and this is quick.
        return False
    return beyond > _SLACK * sum(header_capacity(leaf, DEFAULT_CODEC) for leaf in leaves)


@cache
def _header_frame_bytes() -> int:
    return len(encode_header([], [], "0" * 16, PAGE_BYTES).rstrip())


def encode_header(
    entries: Sequence[Entry],
    leaves: Sequence[StoredLeaf],
    save_id: str,
    header_bytes: int,
    *,
    version: int = VERSION,
    stored: Mapping[int, StoredRange] | None = None,
    codecs: Mapping[int, str] | None = None,
) -> bytes:
    """The first `header_bytes` of a shard file.

    For compressed boxes `stored` has their ranges by leaf, and `codecs` their codecs if not zstd.
    """
    # Written entry by entry: making one large object of it all is slow.
    tensors: list[str] = []
    offsets: list[str] = []
    opaque: dict[str, str] = {}
    compressed: dict[str, Any] = {}
    shown: dict[tuple[str, Box], tuple[str, str]] = {}
    for leaf, box, offset, nbytes in entries:
        spec = leaves[leaf].spec
        dtype = DTYPES[spec.dtype]
        texts = shown.get((spec.dtype, box))
        if texts is None:
            shape, starts = _tensor_shape(dtype, box, nbytes)
            texts = shown[spec.dtype, box] = (dumps(shape), dumps(starts))
        code, stop = dtype.code, offset + nbytes
        if stored:
            offset, stop, is_compressed = stored[leaf]
            if is_compressed:
                # What the box really is, whose stored bytes the header shows.
                compressed[spec.path] = {
                    "codec": (codecs or {}).get(leaf, DEFAULT_CODEC),
                    "dtype": spec.dtype,
                    "shape": _box.shape_of(box),
                    "saved_offsets": [start for start, _ in box],
                }
                code, texts = "U8", (f"[{stop - offset}]", f"[{_NOWHERE}]")
        key = encode_basestring_ascii(spec.path)
        tensors.append(
            f'{key}:{{"dtype":"{code}","shape":{texts[0]},"data_offsets":[{offset},{stop}]}}'
        )
        offsets.append(f'{key}:{{"saved_offsets":{texts[1]}}}')
        if dtype.opaque and spec.path not in compressed:
            opaque[spec.path] = dtype.name
    about = {
        "ostraka": str(version),
        "ostraka_id": save_id,
        "ostraka_dtypes": dumps(opaque),
        "DCP_SHARDING_INFO": f"{{{','.join(offsets)}}}",
    }
    if compressed:
        about["ostraka_codecs"] = dumps(compressed)
    text = ("{" + ",".join([f'"__metadata__":{dumps(about)}', *tensors]) + "}").encode()
    if 8 + len(text) > header_bytes:
        raise AssertionError(f"header of {8 + len(text)} bytes exceeds its plan of {header_bytes}")
    return (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)
