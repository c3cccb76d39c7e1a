"""A shard file, read block by block, each compared with its digest. No JAX."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from ostraka import _format
from ostraka._damage import damage_on_loss, damaged, other_size
from ostraka._format import METADATA_NAME, Block, Entry, FileEntry
from ostraka._header import is_header_too_long
from ostraka._parity_format import ParityFile
from ostraka._rebuild import Rebuild
from ostraka._shards import Shards, lost_in
from ostraka.errors import Damaged
from ostraka.storage import FileReader

PIECE_BYTES = 8 << 20
"""What is passed on at a time."""


class ShardFile:
    """One shard file. Several threads may read it; every byte is checked before it is handed out.

    Every method raises Damaged for bytes that are missing or not as written, and names the leaves
    that they belong to. If the file has parity, `read`, `check_header` and `pass_on` take from that
    what is lost, with a warning; `check` never does.
    """

    def __init__(self, shards: Shards, entry: FileEntry | ParityFile, contents: Sequence[Entry]):
        self.entry = entry
        self.reads_left = 0
        """How many times it will be opened; after the last of them it is closed."""
        self.first_bytes = 0
        """How many bytes from its beginning will be read first."""
        self._contents = contents
        data_bytes = contents[-1].offset + contents[-1].nbytes if contents else 0
        self._shards = shards
        self.name = shards.name_of(entry)
        leaves = shards.metadata.leaves
        specs = [leaves[found.leaf].spec for found in contents]
        if contents and is_header_too_long(entry.header_bytes, specs):
            what = f"it says that the header of {entry.name} has {entry.header_bytes:,} bytes, more"
            raise damaged(shards.store, METADATA_NAME, f"{what} than its boxes can need")
        self.digests = shards.digests_of(entry, data_bytes)
        self._reader: FileReader | None = None
        self._lost: Damaged | None = None
        """Why it can't be opened, if all of it can be rebuilt."""
        self._rebuild: Rebuild | None = None
        self._rebuilding = threading.Lock()
        self._lock = threading.Lock()

    @cached_property
    def blocks(self) -> list[Block]:
        """The header, then the blocks of its data."""
        return self.digests.blocks()

    @contextmanager
    def opened(self) -> Generator[None]:
        """Have it open, of the right size; closed when the last of `reads_left` is done."""
        with self._lock:
            if self._reader is None and self._lost is None:
                try:
                    self._reader = self._open()
                except Damaged as error:
                    if not self._has_parity:
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

    @cached_property
    def _has_parity(self) -> bool:
        parities, entry = self._shards.parities, self.entry
        return parities is not None and isinstance(entry, FileEntry) and parities.covers(entry)

    def _rebuilt(self, start: int, stop: int, lost: Damaged) -> Any:
        """The range of whole blocks, which are lost, from parity. Raises Damaged."""
        if not self._has_parity:
            raise lost
        with self._rebuilding:
            self._rebuild = self._rebuild or self._shards.open_rebuild(self.entry)
        assert self._rebuild is not None
        try:
            found = self._rebuild.read(start, stop)
        except Damaged as more:
            raise Damaged(lost.path, [*lost.problems, *more.problems]) from more
        self._shards.warn_of(lost)
        return found

    def check_header(self) -> None:
        """Compare the header with its digest."""
        header = bytearray(self.entry.header_bytes)
        try:
            self._fill(0, len(header), [header], self.blocks[:1])
            self._compare(self.blocks[0], [header])
        except Damaged as error:
            self._rebuilt(0, len(header), error)

    def read(
        self, first: int, last: int, buffers: Sequence[Any], take_memory: Callable[[int], Any]
    ) -> int:
        """Fill `buffers` with the data of the blocks from `first` to before `last`.

        `take_memory` gives memory for what is stored of compressed blocks. Returns how many bytes
        of the file that took.
        """
        blocks = self.blocks[first:last]
        try:
            return self._read(blocks, buffers, take_memory)
        except Damaged as error:
            start, stop = blocks[0].file_start, blocks[-1].file_stop
            stored = self._rebuilt(start, stop, error)
            lengths = [block.stop - block.start for block in blocks]
            places = zip(blocks, _format.regroup(iter(buffers), lengths), strict=True)
            for block, pieces in places:
                of_block = stored[block.file_start - start : block.file_stop - start]
                self._unpack(block, of_block, pieces)
            return stop - start

    def _read(
        self, blocks: Sequence[Block], buffers: Sequence[Any], take_memory: Callable[[int], Any]
    ) -> int:
        start, stop = blocks[0].file_start, blocks[-1].file_stop
        lengths = [block.stop - block.start for block in blocks]
        places = zip(blocks, _format.regroup(iter(buffers), lengths), strict=True)
        if not any(block.result for block in blocks):
            self._fill(start, stop, buffers, blocks)
            for block, pieces in places:
                self._compare(block, pieces)
            return stop - start
        stored = take_memory(stop - start)
        self._fill(start, stop, [stored], blocks)
        for block, pieces in places:
            self._unpack(block, stored[block.file_start - start : block.file_stop - start], pieces)
        return stop - start

    def _unpack(self, block: Block, stored: Any, pieces: Sequence[Any]) -> None:
        """Compare what is stored of a block, and fill `pieces` with its data."""
        import numpy as np  # only here: a look at the tree does without

        self._compare(block, [stored])
        data = stored
        if block.result:
            data = pieces[0] if len(pieces) == 1 else np.empty(block.stop - block.start, np.uint8)
            self._decode(block, stored, data)
        if data is pieces[0]:
            return
        start = 0
        for piece in pieces:
            piece[:] = data[start : start + len(piece)]
            start += len(piece)

    def _decode(self, block: Block, stored: Any, data: Any) -> None:
        """Decompress a block, and compare the result with its digest."""
        from ostraka import _codec

        found = f"bytes {block.file_start:,} to {block.file_stop:,}"
        try:
            _codec.decode(stored, data)
        except _codec.Undecodable as error:
            found += f" can't be decompressed: {error}"
            raise self._block_damaged(found, block) from error
        if _format.block_digest([data]) != block.result:
            found += " do not decompress to what was saved"
            raise self._block_damaged(found, block)

    def check(self, block: Block, scratch: memoryview) -> None:
        """Compare a block with its digest, and keep nothing of it.

        It is read in pieces that fit into `scratch`, whatever its length, unless it is compressed.
        """
        if block.result:
            import numpy as np

            stored = np.empty(block.file_stop - block.file_start, np.uint8)
            self._fill(block.file_start, block.file_stop, [stored], [block])
            self._unpack(block, stored, [np.empty(block.stop - block.start, np.uint8)])
            return

        def pieces() -> Iterator[memoryview]:
            for at in range(block.file_start, block.file_stop, len(scratch)):
                piece = scratch[: block.file_stop - at]
                self._fill(at, at + len(piece), [piece], [block])
                yield piece

        self._compare(block, pieces())

    def pass_on(
        self,
        blocks: Sequence[Block],
        take_memory: Callable[[int], Any],
        write: Callable[[int, Any], None],
    ) -> None:
        """Give the bytes of adjacent blocks, as the file has them, to `write` with their offsets.

        They are compared with their digests first; only a block of more than `PIECE_BYTES`, which
        comes in pieces, after its last one. `take_memory` gives the memory for a piece.
        """

        def read(start: int, stop: int) -> Any:
            memory = take_memory(stop - start)
            self._fill(start, stop, [memory], run)
            return memory

        def pieces(start: int, stop: int) -> Iterator[Any]:
            for at in range(start, stop, PIECE_BYTES):
                piece = read(at, min(at + PIECE_BYTES, stop))
                write(at, piece)
                yield piece

        for run in _runs(blocks):
            start, stop = run[0].file_start, run[-1].file_stop
            if stop - start > PIECE_BYTES:
                self._compare(run[0], pieces(start, stop))
                continue
            try:
                memory = read(start, stop)
                for block in run:
                    stored = memory[block.file_start - start : block.file_stop - start]
                    self._compare(block, [stored])
            except Damaged as error:
                memory = self._rebuilt(start, stop, error)
            write(start, memory)

    def damaged(
        self, found: str, start: int = 0, stop: int = 0, span: tuple[int, int] | None = None
    ) -> Damaged:
        """The error for `[start, stop)` of its data; an empty range is in no leaf.

        `span` are the bytes of the file, if not all of it is meant.
        """
        problem = lost_in(self._shards, self.entry, self._contents, found, start, stop, span)
        return Damaged(self._shards.store.location, [problem])

    def _open(self) -> FileReader:
        size, end = self.entry.size, self.blocks[-1].stop
        with damage_on_loss(lambda found: self.damaged(found, 0, end)):
            reader = self._shards.store.open(self.name, self.first_bytes)
        if reader.size != size:
            reader.close()
            if reader.size > size:  # All bytes of all leaves are there.
                raise self.damaged(other_size(reader.size, size), span=(size, reader.size))
            first = reader.size
            lost = next(block for block in self.blocks if block.file_stop > first)
            at = lost.start if lost.result else lost.stop - (lost.file_stop - first)
            raise self.damaged(other_size(reader.size, size), at, end, (first, size))
        return reader

    def _fill(self, start: int, stop: int, buffers: Sequence[Any], blocks: Sequence[Block]) -> None:
        """Read a range of the file, which is that of `blocks` or a part of it."""
        if self._lost is not None:
            raise Damaged(self._lost.path, self._lost.problems)
        assert self._reader is not None
        first, last = blocks[0].start, blocks[-1].stop
        with damage_on_loss(lambda found: self.damaged(found, first, last, (start, stop))):
            count = self._reader.read_into(start, buffers)
        if count != stop - start:
            lost = next((b.start for b in blocks if b.file_stop > start + count), first)
            span = (start + count, stop)
            raise self.damaged(f"it ends at byte {start + count:,}", lost, last, span)

    def _block_damaged(self, found: str, block: Block) -> Damaged:
        return self.damaged(found, block.start, block.stop, (block.file_start, block.file_stop))

    def _compare(self, block: Block, pieces: Any) -> None:
        if _format.block_digest(pieces) != block.digest:
            what = f"bytes {block.file_start:,} to {block.file_stop:,} are not as they were"
            if block.file_start == 0:
                what = "its header is not as it was"
            raise self._block_damaged(f"{what} written", block)


def _runs(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Adjacent blocks of at most `PIECE_BYTES` together; what is larger comes alone."""
    run: list[Block] = []
    for block in blocks:
        if run and block.file_stop - run[0].file_start > PIECE_BYTES:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
