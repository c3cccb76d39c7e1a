"""The shard files of a checkpoint, read block by block, each compared with its digest. No JAX.

All that is said about damage is said here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from ostraka import _format
from ostraka._allowance import Allowance
from ostraka._format import METADATA_NAME, Block, Entry, FileDigests, FileEntry
from ostraka._header import is_header_too_long
from ostraka._lifetime import RenewedLock
from ostraka._metadata import Metadata
from ostraka._parallel import TooDeep, with_full_stack
from ostraka.errors import Damaged, OstrakaError, Problem, StoreError, UnsupportedFormat
from ostraka.storage import FileReader, Store

NOT_AS_WRITTEN = "its digest is not the one that was written"
PIECE_BYTES = 8 << 20
"""What is passed on at a time."""


@contextmanager
def damage_on_loss(damaged: Callable[[str], Damaged]) -> Generator[None]:
    """Raise Damaged for bytes that the store can't give any more."""
    try:
        yield
    except FileNotFoundError as error:
        raise damaged("it is missing") from error
    except StoreError as error:
        if error.loss is None:
            raise
        raise damaged(error.loss) from error


@contextmanager
def damage_on_contradiction(store: Store) -> Generator[None]:
    """Raise Damaged where `_METADATA` contradicts itself, and say where the checkpoint is."""
    try:
        yield
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"can't read {store.location}: {error}") from error
    except OstrakaError:
        raise
    except ValueError as error:
        raise damaged(store, METADATA_NAME, f"it contradicts itself: {error}") from error


def damaged(store: Store, name: str, found: str, leaves: tuple[str, ...] = ()) -> Damaged:
    return Damaged(store.location, [Problem(name, found, leaves)])


class Shards:
    """All shard files of a checkpoint. Process indexes are read when they are first needed."""

    def __init__(self, store: Store, metadata: Metadata):
        self.store = store
        self.metadata = metadata
        self._directory = _format.shards_directory(metadata.id)
        self._indexes: dict[int, dict[str, FileDigests]] = {}
        self._reading = RenewedLock()

    def name_of(self, file: FileEntry) -> str:
        return f"{self._directory}/{file.name}"

    def name_of_index(self, process: int) -> str:
        return f"{self._directory}/{_format.index_name(process)}"

    def allowance(self) -> Allowance:
        """The memory that a look at the contents of shard files may take, by what these hold."""
        return Allowance(self._held_bytes)

    def _held_bytes(self) -> int:
        return sum(file.size for file in self.store.files(f"{self._directory}/"))

    def digests_of(self, file: FileEntry, data_bytes: int) -> FileDigests:
        """The digests of a file that holds so much. Raises Damaged if its index is."""
        process = self.metadata.process_of[file.device]
        name = self.name_of_index(process)
        with self._reading.lock:
            index = self._indexes.get(process)
            if index is None:
                index = self._indexes[process] = self._decode_index(process, name)
        found = index.get(file.name)
        if (
            found is None
            or (found.size, found.lengths[:1]) != (file.size, (file.header_bytes,))
            or found.data_bytes != data_bytes
        ):
            what = f"it does not describe {file.name} as {METADATA_NAME} does"
            raise damaged(self.store, name, what)
        longest = max(found.lengths[1:], default=0)
        if longest > _format.MOST_BLOCK_BYTES:
            what = f"it has a block of {longest:,} bytes in {file.name}, more than any block has"
            raise damaged(self.store, name, what)
        return found

    def read_index(self, process: int) -> bytes:
        """The index of a process, as it was written. Raises Damaged."""
        name = self.name_of_index(process)
        expected = self.metadata.indexes.get(process)
        if expected is None:
            raise damaged(self.store, METADATA_NAME, f"it has no digest of {name}")
        with damage_on_loss(partial(damaged, self.store, name)):
            data = self.store.get(name)
        if len(data) != expected.size:
            raise damaged(self.store, name, _other_size(len(data), expected.size))
        if _format.digest(data) != expected.digest:
            raise damaged(self.store, name, NOT_AS_WRITTEN)
        return data

    def _decode_index(self, process: int, name: str) -> dict[str, FileDigests]:
        data = self.read_index(process)
        try:
            return with_full_stack(lambda: _format.decode_index(data))
        except (ValueError, TooDeep) as error:
            raise damaged(self.store, name, f"it can't be read ({error})") from error


class ShardFile:
    """One shard file. Several threads may read it; every byte is checked before it is handed out.

    Every method raises Damaged for bytes that are missing or not as written, and names the leaves
    that they belong to.
    """

    def __init__(self, shards: Shards, entry: FileEntry, contents: Sequence[Entry]):
        self.entry = entry
        self.reads_left = 0
        """How many times it will be opened; after the last of them it is closed."""
        self._contents = contents
        data_bytes = contents[-1].offset + contents[-1].nbytes if contents else 0
        self._shards = shards
        self.name = shards.name_of(entry)
        leaves = shards.metadata.leaves
        if is_header_too_long(entry.header_bytes, [leaves[found.leaf].spec for found in contents]):
            what = f"it says that the header of {entry.name} has {entry.header_bytes:,} bytes, more"
            raise damaged(shards.store, METADATA_NAME, f"{what} than its boxes can need")
        self._digests = shards.digests_of(entry, data_bytes)
        self._reader: FileReader | None = None
        self._lock = threading.Lock()
        self._is_header_checked = False

    @cached_property
    def blocks(self) -> list[Block]:
        """The header, then the blocks of its data."""
        return self._digests.blocks()

    @contextmanager
    def opened(self) -> Generator[None]:
        """Have it open, of the right size; closed when the last of `reads_left` is done."""
        with self._lock:
            if self._reader is None:
                self._reader = self._open()
        yield
        with self._lock:
            self.reads_left -= 1
            if self.reads_left == 0:
                self.close()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def check_header(self) -> None:
        """Compare the header with its digest, once."""
        with self._lock:
            if not self._is_header_checked:
                header = bytearray(self.entry.header_bytes)
                self._fill(0, len(header), [header], self.blocks[:1])
                self._compare(self.blocks[0], [header])
                self._is_header_checked = True

    def read(
        self, first: int, last: int, buffers: Sequence[Any], take_memory: Callable[[int], Any]
    ) -> int:
        """Fill `buffers` with the data of the blocks from `first` to before `last`.

        `take_memory` gives memory for what is stored of compressed blocks. Returns how many bytes
        of the file that took.
        """
        blocks = self.blocks[first:last]
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
            raise self.damaged(found, block.start, block.stop) from error
        if _format.block_digest([data]) != block.result:
            found += " do not decompress to what was saved"
            raise self.damaged(found, block.start, block.stop)

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
            memory = read(start, stop)
            for block in run:
                self._compare(block, [memory[block.file_start - start : block.file_stop - start]])
            write(start, memory)

    def damaged(self, found: str, start: int = 0, stop: int = 0) -> Damaged:
        """The error for `[start, stop)` of its data; an empty range is in no leaf."""
        leaves = _format.paths_between(self._shards.metadata.leaves, self._contents, start, stop)
        return damaged(self._shards.store, self.name, found, leaves)

    def _open(self) -> FileReader:
        size, end = self.entry.size, self.blocks[-1].stop
        with damage_on_loss(lambda found: self.damaged(found, 0, end)):
            reader = self._shards.store.open(self.name)
        if reader.size != size:
            reader.close()
            first = min(reader.size, size - 1)
            lost = next(block for block in self.blocks if block.file_stop > first)
            at = lost.start if lost.result else lost.stop - (lost.file_stop - first)
            raise self.damaged(_other_size(reader.size, size), at, end)
        return reader

    def _fill(self, start: int, stop: int, buffers: Sequence[Any], blocks: Sequence[Block]) -> None:
        """Read a range of the file, which is that of `blocks` or a part of it."""
        assert self._reader is not None
        first, last = blocks[0].start, blocks[-1].stop
        with damage_on_loss(lambda found: self.damaged(found, first, last)):
            count = self._reader.read_into(start, buffers)
        if count != stop - start:
            lost = next((b.start for b in blocks if b.file_stop > start + count), first)
            raise self.damaged(f"it ends at byte {start + count:,}", lost, last)

    def _compare(self, block: Block, pieces: Any) -> None:
        if _format.block_digest(pieces) != block.digest:
            what = f"bytes {block.file_start:,} to {block.file_stop:,} are not as they were"
            if block.file_start == 0:
                what = "its header is not as it was"
            raise self.damaged(f"{what} written", block.start, block.stop)


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


def _other_size(found: int, written: int) -> str:
    return f"it has {found:,} bytes where {written:,} were written"
