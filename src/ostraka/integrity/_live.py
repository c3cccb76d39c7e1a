"""The live tree as an origin of lost bytes: what this process's devices and memory hold.

That the values are still those of the save is proved by the digests that the save has written: a
block that has another one is refused. With JAX.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ostraka import _box, _codec, _format, _header, _pack
from ostraka._box import Box
from ostraka._capture import Captured
from ostraka._codec import Zstd, element_bytes
from ostraka._format import Entry, FileDigests, FileEntry
from ostraka._metadata import Metadata
from ostraka._spec import DTYPES, LeafSpec, numpy_dtype
from ostraka._values import CapturedValue, HostValue, ShardedValue, flat_bytes
from ostraka.errors import name_few
from ostraka.integrity._e_tag import usual_e_tag
from ostraka.integrity._origins import Absent, Shard

Array = np.ndarray[Any, Any]

TRAINED_ON = (
    "the live values are not those of this save: the model has trained on since, or is another one"
)
_LEVELS = (None, 3, 1, 2, *range(4, 23))
"""Of zstd; a checkpoint does not say with which it was compressed."""


class LiveOrigin:
    """The boxes that this process holds of a tree that was saved."""

    name = "the live tree"

    def __init__(self, captured: Captured, metadata: Metadata, process: int, count: int):
        self._metadata = metadata
        self._process = process
        self._count = count
        live = zip(captured.leaves, captured.values, strict=True)
        self._live = {spec.path: (spec, value) for spec, value in live}
        self._boxes: dict[str, tuple[Entry, Array]] = {}
        """By file, the box that was read last: its blocks are asked for in order."""
        self._levels: dict[int, int | None] = {}
        """By leaf, the level with which it was compressed, once known."""
        self._lock = threading.Lock()

    def read(self, shard: Shard, number: int) -> Any:
        block = shard.blocks[number]
        if number == 0:
            raise Absent("it has no headers")
        pieces = [
            self._bytes_of(shard.name, entry)[
                max(block.start - entry.offset, 0) : block.stop - entry.offset
            ]
            for entry in _within(shard, number)
        ]
        data = pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces)
        expected = block.result or block.digest
        if _format.block_digest([data]) != expected:
            leaves = [self._spec(entry).path for entry in _within(shard, number)]
            raise Absent(f"{TRAINED_ON} (leaf {name_few(leaves, 8)})")
        return self._compress(shard, number, data) if block.result else data

    def covered_bytes(self, shard: Shard, numbers: Sequence[int]) -> int:
        """How much of some blocks this process could give."""
        total = 0
        for number in numbers:
            block = shard.blocks[number]
            if number and all(self._reason(entry) is None for entry in _within(shard, number)):
                total += block.stop - block.start
        return total

    def digest_file(
        self, file: FileEntry, contents: Sequence[Entry], *, with_e_tag: bool
    ) -> FileDigests | None:
        """What an index would say of a file that held the live values; None if it can't be told."""
        metadata = self._metadata
        if metadata.version >= _format.COMPRESSED_VERSION or any(map(self._reason, contents)):
            return None
        header = _header.encode_header(contents, metadata.leaves, metadata.id, file.header_bytes)
        lengths = _format.block_lengths(file.header_bytes, contents)

        def views() -> Iterator[Array]:
            yield np.frombuffer(header, np.uint8)
            for entry in contents:
                if entry.nbytes:
                    yield self._bytes_of(file.name, entry)

        digests = [_format.block_digest(pieces) for pieces in _format.regroup(views(), lengths)]
        e_tag = usual_e_tag(views(), file.size) if with_e_tag else ""
        return FileDigests(file.size, tuple(lengths), tuple(digests), identity=e_tag)

    def close(self) -> None:
        self._boxes.clear()

    def _spec(self, entry: Entry) -> LeafSpec:
        return self._metadata.leaves[entry.leaf].spec

    def _bytes_of(self, file: str, entry: Entry) -> Array:
        """The bytes of a box as a file has them. Raises Absent."""
        found = self._boxes.get(file)
        if found is not None and found[0] == entry:
            return found[1]
        if (reason := self._reason(entry)) is not None:
            raise Absent(reason)
        spec = self._spec(entry)
        array = _gather(self._live[spec.path][1], self._own_box(entry))
        if array.dtype != numpy_dtype(spec.dtype):
            array = array.astype(numpy_dtype(spec.dtype))
        if DTYPES[spec.dtype].packed:
            array = _pack.pack(array)
        read = flat_bytes(array)
        if read.nbytes != entry.nbytes:
            raise Absent(f"leaf {spec.path!r} gives {read.nbytes:,} bytes, not {entry.nbytes:,}")
        self._boxes[file] = (entry, read)
        return read

    def _own_box(self, entry: Entry) -> Box:
        """A box as this process's value has it, without the dimension for processes."""
        return entry.box[1:] if self._spec(entry).per_process else entry.box

    def _reason(self, entry: Entry) -> str | None:
        """Why the tree can't give a box; None if it can."""
        saved = self._spec(entry)
        where = f"leaf {saved.path!r}"
        if saved.path not in self._live:
            return f"{where} is not in it"
        spec, value = self._live[saved.path]
        if spec.shape != saved.own_shape:
            return f"{where} has the shape {spec.shape}, and {saved.own_shape} was saved"
        if spec.dtype not in (saved.dtype, saved.cast_from):
            return f"{where} is {spec.dtype}, and {saved.cast_from or saved.dtype} was saved"
        if saved.per_process and entry.box[0] != (self._process, self._process + 1):
            return f"{where} is that of process {entry.box[0][0]}, and this is {self._process}"
        if not _covers(value, self._own_box(entry)):
            return (
                f"{where} is placed in another way than when it was saved, and no process holds "
                f"all of {_show(entry.box)}: place it as it was, or replicate it, before the repair"
            )
        return None

    def _compress(self, shard: Shard, number: int, data: Array) -> bytes:
        """What is stored of a block whose data this is. Raises Absent."""
        (entry,) = _within(shard, number)
        width = element_bytes(self._spec(entry).dtype)
        with self._lock:
            known = entry.leaf in self._levels
            levels = [self._levels[entry.leaf]] if known else _LEVELS
        for level in levels:
            pieces = _codec.encode(data, width, Zstd(level))
            if pieces and _format.block_digest(pieces) == shard.blocks[number].digest:
                self._levels[entry.leaf] = level
                return b"".join(bytes(piece) for piece in pieces)
        raise Absent(
            f"the values of leaf {self._spec(entry).path!r} are right, and this zstandard "
            "compresses them in another way than the one that saved them: install that version"
        )


def _within(shard: Shard, number: int) -> list[Entry]:
    """The boxes that have bytes in a block."""
    block = shard.blocks[number]
    return [
        entry
        for entry in shard.contents
        if entry.offset < block.stop and entry.offset + entry.nbytes > block.start
    ]


def _shares(value: ShardedValue, box: Box) -> Iterator[tuple[Box, int]]:
    """What this process's devices hold of a box; no two of these overlap."""
    for held, device in value.held_boxes().items():
        shared = _box.intersect(held, box)
        if shared is not None:
            yield shared, device


def _covers(value: CapturedValue, box: Box) -> bool:
    if isinstance(value, HostValue) or _box.count(box) == 0:
        return True
    return sum(_box.count(shared) for shared, _ in _shares(value, box)) == _box.count(box)


def _gather(value: CapturedValue, box: Box) -> Array:
    """The elements of a box that this process holds all of; a view where that can be."""
    if isinstance(value, HostValue):
        return value.read(0, box)
    shares = list(_shares(value, box))
    if len(shares) == 1:
        return value.read(shares[0][1], box)
    gathered: Array | None = None
    for shared, device in shares:
        part = value.read(device, shared)
        if gathered is None:
            gathered = np.empty(_box.shape_of(box), part.dtype)
        gathered[_box.slices(shared, box)] = part
    return np.empty(_box.shape_of(box), np.uint8) if gathered is None else gathered


def _show(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
