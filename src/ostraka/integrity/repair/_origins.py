"""A repair's options, and the origins of the bytes that a checkpoint has lost. No JAX."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ostraka.common.progress import Count
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Damaged, OstrakaError, describe
from ostraka.formats.ostraka.compare import index_problem, matches
from ostraka.formats.ostraka.rebuild import Rebuild
from ostraka.formats.ostraka.shards import Shards
from ostraka.formats.ostraka.source import open_ostraka
from ostraka.layout import header
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import IndexEntry, Metadata, shard_contents
from ostraka.layout.shard_file import Block, Entry, FileEntry
from ostraka.processes.operation import Operation
from ostraka.saving.place import Place
from ostraka.storage import FileReader, FileWriter, Store

if TYPE_CHECKING:
    from ostraka.integrity.repair._live import LiveOrigin

Array = np.ndarray[Any, Any]

PARITY = "parity"
_RANGE_BYTES = 8 << 20
"""Bytes that a thread rebuilds at a time."""


@dataclass(frozen=True, slots=True)
class RepairJob:
    """The options of a repair, on one process."""

    store: Store
    copies: Sequence[Store]
    operation: Operation
    place: Place
    dry_run: bool
    bytes_read: Count
    bytes_written: Count = field(default_factory=Count)

    @property
    def process(self) -> int:
        return self.operation.process

    def has_share(self, process: int) -> bool:
        """True if this process looks at the files that a process of the save has written."""
        return process % self.operation.count == self.operation.process

    def put(self, name: str, data: bytes) -> None:
        """Replace a small file, unless this is a dry run."""
        if not self.dry_run:
            self.store.put(name, data, check=self.place.check)
            self.bytes_written.add(len(data))

    @contextmanager
    def replacing(self, name: str, size: int) -> Generator[FileWriter | None]:
        """Replace a file atomically at the end of the block. Yields None in a dry run."""
        if self.dry_run:
            yield None
            return
        writer = self.store.create(name, size, replace=True)
        try:
            yield writer
            self.operation.check()
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        self.bytes_written.add(size)


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A shard file as it was written."""

    name: str
    entry: FileEntry
    contents: Sequence[Entry]
    blocks: Sequence[Block]
    """The header, then the blocks of its data."""
    metadata: Metadata

    def within(self, number: int) -> list[Entry]:
        """The boxes with bytes in a block."""
        start, stop = self.blocks[number][:2]
        return [e for e in self.contents if e.offset < stop and e.offset + e.nbytes > max(start, 0)]

    def leaves(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """The leaves that have bytes in some blocks."""
        entries = (entry for number in numbers for entry in self.within(number))
        return tuple(dict.fromkeys(self.metadata.leaves[e.leaf].spec.path for e in entries))

    def header(self) -> bytes:
        """The header of the file, which follows from `_METADATA` and the blocks."""
        stored = {}
        if any(block.result for block in self.blocks):
            stored = {e.leaf: _format.stored_range(e, self.blocks) for e in self.contents}
        return header.encode_header(
            self.contents,
            self.metadata.leaves,
            self.metadata.id,
            self.entry.header_bytes,
            version=self.metadata.version,
            stored=stored,
        )


class Absent(Exception):
    """An origin lacks some bytes. The text completes "ORIGIN: …"."""


class CopyOrigin:
    """Another copy of the same save, or any checkpoint with some of the same bytes."""

    def __init__(self, store: Store, metadata: Metadata, bytes_read: Count):
        self.store = store
        self.name = store.location
        self._directory = _format.shards_directory(metadata.id)
        self._save_id = metadata.id
        self._bytes_read = bytes_read
        self._readers: dict[str, FileReader | None] = {}
        self._by_digest: dict[tuple[str, int], tuple[str, int]] | None = None
        self._lock = threading.Lock()

    def read(self, shard: SavedShard, number: int) -> Any:
        block = shard.blocks[number]
        nbytes = block.file_stop - block.file_start
        try:
            name = f"{self._directory}/{shard.entry.name}"
            data = self._read(name, block.file_start, nbytes)
            if data is not None and matches(block, [data]):
                return data
            with self._lock:
                if self._by_digest is None:
                    self._by_digest = dict(self._find_blocks())
            other = self._by_digest.get((block.digest, nbytes))
            data = None if other is None else self._read(*other, nbytes)
        except OSError as error:
            raise Absent(describe(error)) from error
        if data is None:
            raise Absent("it does not have these bytes")
        return data

    def read_index(self, process: int, expected: IndexEntry) -> bytes | None:
        """Read the index of a process of the same save. Returns None if it is damaged here, too."""
        with suppress(OSError):
            data = self.store.get(f"{self._directory}/{_format.index_name(process)}")
            self._bytes_read.add(len(data))
            if index_problem(data, expected) is None:
                return data
        return None

    def close(self) -> None:
        for reader in filter(None, self._readers.values()):
            reader.close()
        self._readers.clear()

    def _read(self, name: str, start: int, nbytes: int) -> Any:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = None
                with suppress(FileNotFoundError):
                    self._readers[name] = self.store.open(name)
            reader = self._readers[name]
        if reader is None or reader.size < start + nbytes:
            return None
        data = bytearray(nbytes)
        count = reader.read_into(start, [data])
        self._bytes_read.add(count)
        return data if count == nbytes else None

    def _find_blocks(self) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
        """By digest and length, the file and the offset of each block, if this is another save."""
        try:
            source = open_ostraka(self.store)
            if source is None or source.metadata.id == self._save_id:
                return
            shards = source.shards
            files = shard_contents(source.metadata, None, shards.allowance()).values()
        except (OstrakaError, ValueError):
            return
        for entry, contents in files:
            data_bytes = contents[-1].offset + contents[-1].nbytes
            with suppress(Damaged):  # Its index can't be read.
                for block in shards.digests_of(entry, data_bytes).blocks()[1:]:
                    length = block.file_stop - block.file_start
                    yield (block.digest, length), (shards.name_of(entry), block.file_start)


@dataclass(slots=True)
class _Window:
    """The part of a file that was rebuilt last. Blocks are asked for in order."""

    rebuild: Rebuild
    members: int
    start: int = 0
    stop: int = 0
    data: tuple[Array, ...] = ()


class ParityOrigin:
    """Parity, which rebuilds a lost file from the others of its group."""

    name = PARITY

    def __init__(self, shards: Shards, bytes_read: Count):
        self._shards = shards
        self._bytes_read = bytes_read
        self._windows: dict[str, _Window] = {}
        self._threads = max(2, shards.store.traits.reads_at_once // 2)

    def read(self, shard: SavedShard, number: int) -> Any:
        block = shard.blocks[number]
        window = self._open(shard)
        if not window.start <= block.file_start < block.file_stop <= window.stop:
            try:
                self._move(window, shard, number)
            except Damaged as error:
                # The first is about the file itself, the others are why.
                raise Absent("; ".join(map(str, error.problems[1:] or error.problems))) from error
        at = window.start
        for piece in window.data:
            if at <= block.file_start and block.file_stop <= at + len(piece):
                return piece[block.file_start - at : block.file_stop - at]
            at += len(piece)
        raise AssertionError("a range ends inside a block")

    def close(self) -> None:
        for window in self._windows.values():
            window.rebuild.close()
        self._windows.clear()

    def _open(self, shard: SavedShard) -> _Window:
        found = self._windows.get(shard.name)
        if found is None:
            parities = self._shards.parities
            if parities is None or not parities.covers(shard.entry):
                raise Absent("it does not cover this file")
            rebuild = parities.open_rebuild(shard.entry)
            members = len(parities.members_of(parities.place_of(shard.entry)[0]))
            found = self._windows[shard.name] = _Window(rebuild, members)
        return found

    def _move(self, window: _Window, shard: SavedShard, number: int) -> None:
        """Rebuild some ranges of whole blocks, each in a thread."""
        ranges = list(islice(_ranges(shard.blocks[number:]), self._threads))
        data = run_all(
            lambda one: window.rebuild.read(*one),
            ranges,
            threads=self._threads,
            stop=StopSignal(),
        )
        window.start, window.stop, window.data = ranges[0][0], ranges[-1][1], tuple(data)
        self._bytes_read.add(window.members * (window.stop - window.start))


def _ranges(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    start = blocks[0].file_start
    for block in blocks:
        if block.file_stop - start >= _RANGE_BYTES or block is blocks[-1]:
            yield start, block.file_stop
            start = block.file_stop


Origin: TypeAlias = "CopyOrigin | ParityOrigin | LiveOrigin"
"""A source of lost blocks. Several threads may ask at once, each about a file of its own.

`read` returns the stored bytes of a block, not yet compared with its digest. It raises Absent.
"""
