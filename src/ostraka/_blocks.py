"""The shard files of a checkpoint, read block by block, each compared with its digest. No JAX.

All that is said about damage to shard files and process indexes is said here.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from ostraka import _format
from ostraka._format import Block, Entry, FileDigests, FileEntry
from ostraka._metadata import Metadata
from ostraka._parallel import RenewedLock, with_full_stack
from ostraka.errors import Damaged, Problem, StoreError
from ostraka.storage import FileReader, Store


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

    def digests_of(self, file: FileEntry) -> FileDigests:
        """The digests of a file. Raises Damaged if the index that has them is."""
        process = self.metadata.process_of[file.device]
        with self._reading.lock:
            index = self._indexes.get(process)
            if index is None:
                index = self._indexes[process] = self._read_index(process)
        found = index.get(file.name)
        if found is None or found.size != file.size or found.lengths[:1] != (file.header_bytes,):
            raise self.damaged(
                self._index_name(process),
                f"it does not describe {file.name} as {_format.METADATA_NAME} does",
            )
        return found

    def damaged(self, name: str, found: str, leaves: tuple[str, ...] = ()) -> Damaged:
        return Damaged(self.store.location, [Problem(name, found, leaves)])

    def _index_name(self, process: int) -> str:
        return f"{self._directory}/{_format.index_name(process)}"

    def _read_index(self, process: int) -> dict[str, FileDigests]:
        name = self._index_name(process)
        expected = self.metadata.indexes.get(process)
        if expected is None:
            raise self.damaged(_format.METADATA_NAME, f"it has no digest of {name}")
        try:
            data = self.store.get(name)
        except FileNotFoundError as error:
            raise self.damaged(name, "it is missing") from error
        except StoreError as error:
            if error.loss is None:
                raise
            raise self.damaged(name, error.loss) from error
        if len(data) != expected.size:
            raise self.damaged(name, _other_size(len(data), expected.size))
        if _format.digest(data) != expected.digest:
            raise self.damaged(name, "its digest is not the one that was written")
        try:
            return with_full_stack(lambda: _format.decode_index(data))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self.damaged(name, f"it can't be read ({error})") from error


class ShardFile:
    """One shard file. Several threads may read it; every byte is checked before it is handed out.

    Every method raises Damaged for bytes that are missing or not as written, and names the leaves
    that they belong to.
    """

    def __init__(self, shards: Shards, entry: FileEntry, contents: Sequence[Entry]):
        self.entry = entry
        self.name = shards.name_of(entry)
        self.reads_left = 0
        """How many times it will be opened; after the last of them it is closed."""
        self._digests = shards.digests_of(entry)
        self._shards = shards
        self._contents = contents
        self._reader: FileReader | None = None
        self._lock = threading.Lock()
        self._is_header_checked = False

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of its data."""
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
                self.read_header()
                self._is_header_checked = True

    def read_header(self) -> bytearray:
        """The header, compared with its digest."""
        header = bytearray(self.entry.header_bytes)
        self._fill(0, len(header), [header], ())
        if _format.block_digest([header]) != self._digests.digests[0]:
            raise self.damaged("its header is not as it was written")
        return header

    def read(self, first: int, last: int, buffers: Sequence[Any]) -> int:
        """Fill `buffers` with the data of the blocks from `first` to before `last`.

        Returns how many bytes of the file that took.
        """
        blocks = self.blocks[first:last]
        start, stop = blocks[0].file_start, blocks[-1].file_stop
        self._fill(start, stop, buffers, blocks)
        lengths = [block.stop - block.start for block in blocks]
        for block, pieces in zip(blocks, _format.regroup(iter(buffers), lengths), strict=True):
            self._compare(block, pieces)
        return stop - start

    def check(self, block: Block, scratch: Sequence[memoryview]) -> None:
        """Compare a block with its digest, and keep nothing of it.

        It is read in pieces that fit into the two parts of `scratch`, whatever its length.
        """
        size = len(scratch[0])

        def pieces() -> Iterator[memoryview]:
            # By turns, because a digest may take the second piece before it is done with the first.
            for number, at in enumerate(range(block.file_start, block.file_stop, size)):
                piece = scratch[number % 2][: block.file_stop - at]
                self._fill(at, at + len(piece), [piece], (block,))
                yield piece

        self._compare(block, pieces())

    def damaged(self, found: str, start: int = 0, stop: int = 0) -> Damaged:
        """The error for `[start, stop)` of its data; an empty range is in no leaf."""
        leaves = _format.paths_between(self._shards.metadata.leaves, self._contents, start, stop)
        return self._shards.damaged(self.name, found, leaves)

    def _open(self) -> FileReader:
        size, header = self.entry.size, self.entry.header_bytes
        try:
            reader = self._shards.store.open(self.name)
        except FileNotFoundError as error:
            raise self.damaged("it is missing", 0, size) from error
        if reader.size != size:
            reader.close()
            lost = min(reader.size, size - 1) - header
            raise self.damaged(_other_size(reader.size, size), lost, size - header)
        return reader

    def _fill(self, start: int, stop: int, buffers: Sequence[Any], blocks: Sequence[Block]) -> None:
        """Read a range of the file, which is that of `blocks` or a part of it."""
        assert self._reader is not None
        within = (blocks[0].start, blocks[-1].stop) if blocks else (0, 0)
        try:
            count = self._reader.read_into(start, buffers)
        except StoreError as error:
            if error.loss is None:
                raise
            raise self.damaged(error.loss, *within) from error
        if count != stop - start:
            lost = next((b.start for b in blocks if b.file_stop > start + count), within[0])
            raise self.damaged(f"it ends at byte {start + count:,}", lost, within[1])

    def _compare(self, block: Block, pieces: Any) -> None:
        if _format.block_digest(pieces) != block.digest:
            found = (
                f"bytes {block.file_start:,} to {block.file_stop:,} are not as they were written"
            )
            raise self.damaged(found, block.start, block.stop)


def _other_size(found: int, written: int) -> str:
    return f"it has {found:,} bytes where {written:,} were written"
