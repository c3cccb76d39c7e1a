"""Read a shard file block by block, and compare each block with its digest. No JAX."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from ostraka.errors import Damaged
from ostraka.formats.ostraka.damage import (
    block_bytes,
    damage_on_loss,
    damaged,
    ends_at,
    matches,
    not_as_written,
    other_size,
    unmatched_blocks,
)
from ostraka.formats.ostraka.rebuild import Rebuild
from ostraka.formats.ostraka.shards import Shards, lost_in
from ostraka.layout import shard_file as _format
from ostraka.layout.parity_file import ParityFile
from ostraka.layout.shard_file import METADATA_NAME, PAGE_BYTES, Block, Entry, FileEntry
from ostraka.storage import FileReader


class ShardFile:
    """One shard file, for several threads. It checks every byte before returning it.

    Every method raises Damaged for missing or corrupt bytes, and names their leaves. If the file
    has parity, `read`, `check_header` and `read_stored` rebuild lost bytes with a warning. `check`
    never does.
    """

    def __init__(self, shards: Shards, entry: FileEntry | ParityFile, contents: Sequence[Entry]):
        self.entry = entry
        self.reads_left = 0
        """How many times it will be opened. It is closed after the last time."""
        self.first_bytes = 0
        """Bytes at its beginning that will be read first."""
        self._contents = contents
        data_bytes = contents[-1].offset + contents[-1].nbytes if contents else 0
        self._shards = shards
        self.name = shards.name_of(entry)
        if contents and entry.header_bytes > PAGE_BYTES:
            specs = [shards.metadata.leaves[found.leaf].spec for found in contents]
            if _format.is_header_too_long(entry.header_bytes, specs):
                what = f"it says that the header of {entry.name} has {entry.header_bytes:,} bytes"
                raise damaged(shards.store, METADATA_NAME, f"{what}, more than its boxes can need")
        self.digests = shards.digests_of(entry, data_bytes)
        self._reader: FileReader | None = None
        self._lost: Damaged | None = None
        """Why it can't be opened, if it can be rebuilt."""
        self._rebuild: Rebuild | None = None
        self._lock = threading.Lock()

    @cached_property
    def blocks(self) -> list[Block]:
        """The header, then the blocks of its data."""
        return self.digests.blocks()

    @contextmanager
    def opened(self) -> Generator[None]:
        """Have the file open, with its size checked. Closed after the last of `reads_left`."""
        with self._lock:
            if self._reader is None and self._lost is None:
                try:
                    self._reader = self._open()
                except Damaged as error:
                    self._rebuild = self._shards.open_rebuild(self.entry)
                    if self._rebuild is None:
                        raise
                    self._lost = error
        yield
        with self._lock:
            self.reads_left -= 1
            if self.reads_left == 0:
                self.close()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._rebuild is not None:
            self._rebuild.close()

    def _rebuilt(self, start: int, stop: int, lost: Damaged) -> Any:
        """A lost range of whole blocks, from parity if the file has it. Raises Damaged."""
        with self._lock:
            self._rebuild = self._rebuild or self._shards.open_rebuild(self.entry)
        if self._rebuild is None:
            raise lost
        return self._rebuild.substitute(start, stop, lost)

    def check_header(self) -> None:
        """Compare the header with its digest."""
        self.read_stored(self.blocks[:1], memoryview(bytearray(self.entry.header_bytes)))

    def read(
        self, first: int, last: int, buffers: Sequence[Any], take_memory: Callable[[int], Any]
    ) -> int:
        """Fill `buffers` with the data of the blocks from `first` to before `last`.

        `take_memory` returns memory for stored bytes of compressed blocks. Returns the number of
        bytes read from the file.
        """
        blocks = self.blocks[first:last]
        start, stop = blocks[0].file_start, blocks[-1].file_stop
        lengths = [block.stop - block.start for block in blocks]
        places = list(zip(blocks, _format.regroup(iter(buffers), lengths), strict=True))
        try:
            if not any(block.result for block in blocks):
                self.fill(start, stop, buffers, blocks)
                for block, pieces in places:
                    self.compare(block, pieces)
                return stop - start
            stored = take_memory(stop - start)
            self.fill(start, stop, [stored], blocks)
            self._unpack(places, stored)
        except Damaged as error:
            self._unpack(places, self._rebuilt(start, stop, error))
        return stop - start

    def _unpack(self, places: Sequence[tuple[Block, Sequence[Any]]], stored: Any) -> None:
        """Compare the stored bytes of adjacent blocks, and fill their pieces with the data."""
        import numpy as np  # only here: a look at the tree does without

        first = places[0][0].file_start
        for block, pieces in places:
            data = stored[block.file_start - first : block.file_stop - first]
            self.compare(block, [data])
            if block.result:
                size = block.stop - block.start
                result = pieces[0] if len(pieces) == 1 else np.empty(size, np.uint8)
                self._decode(block, data, result)
                data = result
            start = 0
            for piece in pieces if data is not pieces[0] else ():
                piece[:] = data[start : start + len(piece)]
                start += len(piece)

    def _decode(self, block: Block, stored: Any, data: Any) -> None:
        """Decompress a block, and compare the result with its digest."""
        from ostraka.layout import codec

        what = block_bytes(block)
        try:
            codec.decode(stored, data)
        except codec.Undecodable as error:
            raise self._block_damaged(f"{what} can't be decompressed: {error}", block) from error
        if _format.block_digest([data]) != block.result:
            raise self._block_damaged(f"{what} do not decompress to what was saved", block)

    def check(self, block: Block, scratch: memoryview) -> None:
        """Compare a block with its digest, and discard its bytes.

        Blocks that are not compressed are read in pieces that fit into `scratch`.
        """
        if block.result:
            import numpy as np

            stored = np.empty(block.file_stop - block.file_start, np.uint8)
            self.fill(block.file_start, block.file_stop, [stored], [block])
            self._unpack([(block, [np.empty(block.stop - block.start, np.uint8)])], stored)
            return
        for _, found in unmatched_blocks(self._open_reader(), [block], scratch):
            raise self._block_damaged(found, block)

    def read_stored(self, blocks: Sequence[Block], memory: Any) -> Any:
        """The stored bytes of adjacent blocks, in `memory` unless they are rebuilt."""
        start, stop = blocks[0].file_start, blocks[-1].file_stop
        try:
            self.fill(start, stop, [memory], blocks)
            for block in blocks:
                self.compare(block, [memory[block.file_start - start : block.file_stop - start]])
        except Damaged as error:
            return self._rebuilt(start, stop, error)
        return memory

    def damaged(
        self, found: str, start: int = 0, stop: int = 0, span: tuple[int, int] | None = None
    ) -> Damaged:
        """The error for `[start, stop)` of its data. An empty range is in no leaf.

        `span` is the affected range of the file, or None for all of it.
        """
        problem = lost_in(self._shards, self.entry, self._contents, found, start, stop, span)
        return Damaged(self._shards.store.location, [problem])

    def _open(self) -> FileReader:
        size, end = self.entry.size, self.blocks[-1].stop
        with damage_on_loss(lambda found: self.damaged(found, 0, end)):
            reader = self._shards.store.open(self.name, self.first_bytes)
        found = reader.size
        if found == size:
            return reader
        reader.close()
        if found > size:  # All bytes of all leaves are there.
            raise self.damaged(other_size(found, size), span=(size, found))
        lost = next(block for block in self.blocks if block.file_stop > found)
        at = lost.start if lost.result else lost.stop - (lost.file_stop - found)
        raise self.damaged(other_size(found, size), at, end, (found, size))

    def _open_reader(self) -> FileReader:
        """The reader that `opened` has made. Raises Damaged if the file can't be opened."""
        if self._lost is not None:
            raise Damaged(self._lost.path, self._lost.problems)
        assert self._reader is not None
        return self._reader

    def fill(self, start: int, stop: int, buffers: Sequence[Any], blocks: Sequence[Block]) -> None:
        """Read a range of the file inside `blocks`."""
        first, last = blocks[0].start, blocks[-1].stop
        with damage_on_loss(lambda found: self.damaged(found, first, last, (start, stop))):
            end = start + self._open_reader().read_into(start, buffers)
        if end != stop:
            lost = next(block.start for block in blocks if block.file_stop > end)
            raise self.damaged(ends_at(end), lost, last, (end, stop))

    def _block_damaged(self, found: str, block: Block) -> Damaged:
        return self.damaged(found, block.start, block.stop, (block.file_start, block.file_stop))

    def compare(self, block: Block, pieces: Any) -> None:
        """Raise Damaged if stored bytes of a block, given in pieces, don't match its digest."""
        if not matches(block, pieces):
            raise self._block_damaged(not_as_written(block), block)
