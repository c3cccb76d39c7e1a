"""Writes a shard file and compresses its blocks.

The offset of a block depends on the blocks before it. Threads compress blocks in any order, and
place them one after the other. The header has the offsets, so it comes last.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ostraka.errors import StoreError
from ostraka.layout import codec as _codec
from ostraka.layout import shard_file as _format
from ostraka.layout.codec import Codec
from ostraka.layout.shard_file import Entry, FileDigests, StoredRange
from ostraka.layout.spec import StoredLeaf
from ostraka.storage import FileWriter, Store

Array = np.ndarray[Any, Any]

_AHEAD = 8
"""The most blocks of a file to compress ahead of the next one in order."""
_SPOOL_BYTES = 16 << 20
"""The largest file to assemble in memory. Larger ones go to a temporary file."""
_PIECE_BYTES = 4 << 20


class CompressedFile:
    """A compressed shard file. Its data blocks have numbers from 1, in file order."""

    def __init__(
        self,
        entries: Sequence[Entry],
        data_lengths: list[int],
        leaves: Sequence[StoredLeaf],
        codecs: Mapping[int, Codec],
        encode_header: Callable[[Mapping[int, StoredRange]], bytes],
        create: Callable[[], FileWriter],
        check: Callable[[], None],
    ):
        self._entries = entries
        self._data_lengths = data_lengths
        self._encode_header = encode_header
        self._create = create
        self._check = check
        self._writer: FileWriter | None = None
        self._identity = ""
        count = len(data_lengths)
        self._lengths = [data_lengths[0], *[0] * (count - 1)]
        self._digests = [""] * count
        self._results = [""] * count
        self._codecs = dict(self._find_codecs(leaves, codecs))
        self._changed = threading.Condition()
        self._ready: dict[int, list[Any]] = {}
        """Compressed blocks that wait for one before them."""
        self._next, self._position = 1, data_lengths[0]
        """The number of the next block to place, and its offset in the file."""
        self._unwritten = count - 1

    def _find_codecs(
        self, leaves: Sequence[StoredLeaf], codecs: Mapping[int, Codec]
    ) -> Iterator[tuple[int, tuple[int, Codec]]]:
        """The numbers of the blocks to compress, with the bytes of an element and the codec."""
        compressed, gathered = _format.LEAST_COMPRESSED_BYTES, _format.GATHER_BYTES
        large = {  # Smaller boxes share their blocks with others.
            entry.offset: entry
            for entry in self._entries
            if entry.nbytes >= (compressed if entry.leaf in codecs else gathered)
        }
        start, entry = 0, None
        for number, length in enumerate(self._data_lengths[1:], 1):
            entry = large.get(start, entry)
            start += length
            if entry is not None and start <= entry.offset + entry.nbytes:
                codec = codecs.get(entry.leaf)
                if codec is not None:
                    dtype = leaves[entry.leaf].spec.dtype
                    yield number, (_codec.element_bytes(dtype), codec)

    def write(self, number: int, pieces: list[Array]) -> int:
        """Compress a block, and write all blocks that now have an offset.

        Returns the length of its data. The last block to be written adds the header's length.
        """
        self._wait_for_turn(number)
        stored = self._encode(number, pieces)
        self._digests[number] = _format.block_digest(stored)
        self._lengths[number] = sum(len(piece) for piece in stored)
        with self._changed:
            self._ready[number] = stored
            placed = list(self._place())
            if self._writer is None:
                self._writer = self._create()
            self._changed.notify_all()
        for offset, stored in placed:
            self._writer.write(offset, stored)
        with self._changed:
            self._unwritten -= len(placed)
            is_last = self._unwritten == 0 and bool(placed)
        if not is_last:
            return self._data_lengths[number]
        self._writer.write(0, [self._header()])
        self._identity = self._writer.finish() or ""
        self._writer = None
        return self._data_lengths[number] + self._data_lengths[0]

    def _wait_for_turn(self, number: int) -> None:
        # Blocks are given out in order: the next one to be placed is being worked on by a thread
        # that does not wait here.
        with self._changed:
            while number - self._next >= _AHEAD:
                self._check()
                self._changed.wait(0.2)

    def _encode(self, number: int, pieces: list[Array]) -> list[Any]:
        if number not in self._codecs:
            return pieces
        data = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        width, codec = self._codecs[number]
        stored = codec.encode(data, width)
        if stored is None:
            return pieces
        self._results[number] = _format.block_digest([data])
        return stored

    def _place(self) -> Iterator[tuple[int, list[Any]]]:
        while self._next in self._ready:
            yield self._position, self._ready.pop(self._next)
            self._position += self._lengths[self._next]
            self._next += 1

    def _header(self) -> bytes:
        blocks = self.digests().blocks()
        header = self._encode_header(
            {entry.leaf: _format.stored_range(entry, blocks) for entry in self._entries}
        )
        self._digests[0] = _format.block_digest([header])
        return header

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()

    def digests(self) -> FileDigests:
        return FileDigests(
            sum(self._lengths),
            tuple(self._lengths),
            tuple(self._digests),
            tuple(self._data_lengths),
            tuple(filter(None, self._results)),
            self._identity,
        )


class SpooledFile:
    """Assembles a file locally, for stores that take files in order, and sends it at the end."""

    def __init__(self, store: Store, name: str, beside: int, check: Callable[[], None]):
        self._store = store
        self._name = name
        self._beside = beside
        self._check = check
        self._file = tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES)  # noqa: SIM115
        self._size = 0

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        try:
            self._file.seek(offset)
            for piece in buffers:
                self._file.write(piece)
                offset += len(piece)
        except OSError as error:
            raise StoreError(
                f"can't put {self._store.location}/{self._name} together in the directory for "
                f"temporary files, {tempfile.gettempdir()}: {error.strerror}; have TMPDIR name one "
                "with room for it, or save without compress",
                errno=error.errno,
            ) from error
        self._size = max(self._size, offset)

    def finish(self) -> str | None:
        """Send it."""
        with self._file:
            self._file.seek(0)
            writer = self._store.create(self._name, self._size, beside=self._beside)
            try:
                for offset in range(0, self._size, _PIECE_BYTES):
                    self._check()
                    # Fresh memory for each: the writer may keep it until it is sent.
                    writer.write(offset, [self._file.read(_PIECE_BYTES)])
                return writer.finish()
            except BaseException:
                writer.abandon()
                raise

    def abandon(self) -> None:
        self._file.close()
