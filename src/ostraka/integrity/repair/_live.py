"""The live tree as an origin of lost bytes, as far as this process holds it. With JAX.

The digests of the save prove that the values have not changed since. Other values are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ostraka.common.dtypes import numpy_dtype, to_bytes
from ostraka.errors import RepairFailed, name_few
from ostraka.integrity._report import RepairReport
from ostraka.integrity.repair._descriptions import usual_e_tag
from ostraka.integrity.repair._files import Absent, SavedShard
from ostraka.layout import box as _box
from ostraka.layout import shard_file as _format
from ostraka.layout.box import Box
from ostraka.layout.codec import CODECS, Codec, element_bytes
from ostraka.layout.metadata import Metadata
from ostraka.layout.shard_file import Entry, FileEntry
from ostraka.layout.spec import LeafSpec
from ostraka.live.values import CapturedValue, HostValue, ShardedValue
from ostraka.processes.operation import Operation, ProcessFailed, refuse_different_paths
from ostraka.saving.background import wait_for_background
from ostraka.saving.capture import Captured, capture

Array = np.ndarray[Any, Any]

TRAINED_ON = (
    "the live values are not those of this save: the model has trained on since, or is another one"
)
_CODECS = [codec(level) for codec in CODECS.values() for level in (None, *codec.levels)]
"""The codecs to try, since a checkpoint does not record its level."""


class LiveOrigin:
    """The boxes of a saved tree that this process holds."""

    name = "the live tree"

    def __init__(self, captured: Captured, metadata: Metadata, process: int):
        self._metadata = metadata
        self._process = process
        live = zip(captured.leaves, captured.values, strict=True)
        self._live = {spec.path: (spec, value) for spec, value in live}
        self._boxes: dict[str, tuple[Entry, Array]] = {}
        """By file, the box that was read last. Blocks are asked for in order."""
        self._codecs: dict[int, Codec] = {}
        """By leaf, its level of compression, once known."""
        self._lock = threading.Lock()

    def read(self, shard: SavedShard, number: int) -> Any:
        block = shard.blocks[number]
        if number == 0:
            raise Absent("it has no headers")
        pieces = [
            self._bytes_of(shard.name, entry)[
                max(block.start - entry.offset, 0) : block.stop - entry.offset
            ]
            for entry in shard.within(number)
        ]
        data = pieces[0].copy() if len(pieces) == 1 else np.concatenate(pieces)
        if _format.block_digest([data]) != (block.result or block.digest):
            raise Absent(f"{TRAINED_ON} (leaf {name_few(shard.leaves([number]), 8)})")
        return self._compress(shard, number, data) if block.result else data

    def covered_bytes(self, shard: SavedShard, numbers: Sequence[int]) -> int:
        """The number of bytes of some blocks that this process holds."""
        held = [n for n in numbers if n and not any(map(self._reason, shard.within(n)))]
        return sum(shard.blocks[n].stop - shard.blocks[n].start for n in held)

    def digest_file(
        self, file: FileEntry, contents: Sequence[Entry], *, with_e_tag: bool
    ) -> str | None:
        """The digests of a file with the live values, a `/` and its ETag.

        Returns None if some of the values are elsewhere.
        """
        metadata = self._metadata
        if metadata.version >= _format.COMPRESSED_VERSION or any(map(self._reason, contents)):
            return None
        header = _format.encode_header(contents, metadata.leaves, metadata.id, file.header_bytes)
        lengths = _format.block_lengths(file.header_bytes, contents)

        def views() -> Iterator[Array]:
            yield np.frombuffer(header, np.uint8)
            for entry in contents:
                if entry.nbytes:
                    yield self._bytes_of(file.name, entry)

        digests = [_format.block_digest(pieces) for pieces in _format.regroup(views(), lengths)]
        return f"{''.join(digests)}/{usual_e_tag(views(), file.size) if with_e_tag else ''}"

    def close(self) -> None:
        self._boxes.clear()

    def _spec(self, entry: Entry) -> LeafSpec:
        return self._metadata.leaves[entry.leaf].spec

    def _bytes_of(self, file: str, entry: Entry) -> Array:
        """The bytes of a box as a file stores them. Raises Absent."""
        found = self._boxes.get(file)
        if found is not None and found[0] == entry:
            return found[1]
        if (reason := self._reason(entry)) is not None:
            raise Absent(reason)
        spec = self._spec(entry)
        array = _gather(self._live[spec.path][1], self._own_box(entry))
        if array.dtype != numpy_dtype(spec.dtype):
            array = array.astype(numpy_dtype(spec.dtype))
        read = to_bytes(array)
        if read.nbytes != entry.nbytes:
            raise Absent(f"leaf {spec.path!r} gives {read.nbytes:,} bytes, not {entry.nbytes:,}")
        self._boxes[file] = (entry, read)
        return read

    def _own_box(self, entry: Entry) -> Box:
        """A box of this process's own value, without the dimension for processes."""
        return entry.box[1:] if self._spec(entry).per_process else entry.box

    def _reason(self, entry: Entry) -> str | None:
        """The reason why this process lacks a box, or None if it holds it."""
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
            ranges = ", ".join(f"{start}:{stop}" for start, stop in entry.box)
            return (
                f"{where} is placed in another way than when it was saved, and no process holds "
                f"all of [{ranges}]: place it as it was, or replicate it, before the repair"
            )
        return None

    def _compress(self, shard: SavedShard, number: int, data: Array) -> bytes:
        """Compress the data of a block to its stored bytes. Raises Absent."""
        (entry,) = shard.within(number)
        width = element_bytes(self._spec(entry).dtype)
        with self._lock:
            known = self._codecs.get(entry.leaf)
        for codec in _CODECS if known is None else (known,):
            pieces = codec.encode(data, width)
            if pieces and _format.block_digest(pieces) == shard.blocks[number].digest:
                self._codecs[entry.leaf] = codec
                return b"".join(bytes(piece) for piece in pieces)
        raise Absent(
            f"the values of leaf {self._spec(entry).path!r} are right, and this zstandard "
            "compresses them in another way than the one that saved them: install that version"
        )


def _shares(value: ShardedValue, box: Box) -> Iterator[tuple[Box, int]]:
    """The disjoint parts of a box on this process's devices."""
    for held, device in value.held_boxes().items():
        shared = _box.intersect(held, box)
        if shared is not None:
            yield shared, device


def _covers(value: CapturedValue, box: Box) -> bool:
    if isinstance(value, HostValue) or _box.count(box) == 0:
        return True
    return sum(_box.count(shared) for shared, _ in _shares(value, box)) == _box.count(box)


def _gather(value: CapturedValue, box: Box) -> Array:
    """The elements of a box that this process holds, as a view if possible."""
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


# A repair from the live tree, by all processes of a run. With JAX.


Run = Callable[[Operation, Callable[[Metadata], LiveOrigin]], RepairReport]


def repair_together(location: str, tree: Any, run: Run) -> RepairReport:
    """`run` the stages on every process, each with what it holds of the tree.

    Raises RepairFailed on all processes if one of them fails; that one raises its own error.
    """
    wait_for_background()
    operation = Operation(f"repair of {location}", own_errors=True)
    try:
        with operation:
            operation.exchange("path", location, partial(refuse_different_paths, "repairs"))
            captured = capture(tree)
            return run(operation, lambda saved: LiveOrigin(captured, saved, operation.process))
    except ProcessFailed as failure:
        operation.wait_until_left()  # Before another may have the place.
        raise RepairFailed(location, failure.process, failure.reason) from failure.__cause__
