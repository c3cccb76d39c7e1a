"""Where the bytes of a lost block may come from: a small protocol, so that origins combine.

Each block is asked for by itself, of one origin after the other, and whoever asks compares what it
is given with the digest: a file may be mended from several origins. No JAX.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ostraka import _format, _header
from ostraka._format import METADATA_NAME, Block, Entry, FileEntry
from ostraka._metadata import IndexEntry, Metadata, shard_contents
from ostraka._shards import Shards
from ostraka.errors import Damaged, OstrakaError, describe
from ostraka.formats._ostraka import OstrakaSource, open_ostraka
from ostraka.integrity._repair_report import Tally
from ostraka.storage import FileReader, Store


class Absent(Exception):
    """An origin does not have what it was asked for; the text says why, as a part of a sentence."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard file as it was written."""

    name: str
    entry: FileEntry
    contents: Sequence[Entry]
    blocks: Sequence[Block]
    """The header, then those of its data."""


class Origin(Protocol):
    """Something that may have the bytes of lost blocks. Several threads may ask at once, each
    about a file of its own."""

    name: str
    """What to call it in a report."""

    def read(self, shard: Shard, number: int) -> Any:
        """What is stored of a block, probably. Raises Absent."""
        ...

    def close(self) -> None: ...


class HeaderOrigin:
    """Headers, which follow from `_METADATA` and the blocks. It is asked for nothing else."""

    name = METADATA_NAME

    def __init__(self, metadata: Metadata):
        self._metadata = metadata

    def read(self, shard: Shard, number: int) -> bytes:
        stored = {}
        if any(block.result for block in shard.blocks):
            stored = {e.leaf: _format.stored_range(e, shard.blocks) for e in shard.contents}
        metadata = self._metadata
        return _header.encode_header(
            shard.contents,
            metadata.leaves,
            metadata.id,
            shard.entry.header_bytes,
            version=metadata.version,
            stored=stored,
        )

    def close(self) -> None:
        pass


class CopyOrigin:
    """Another copy of the same save, or any checkpoint of ours that has some of the same bytes."""

    def __init__(self, store: Store, metadata: Metadata, tally: Tally):
        self.store = store
        self.name = store.location
        self._directory = _format.shards_directory(metadata.id)
        self._save_id = metadata.id
        self._tally = tally
        self._readers: dict[str, FileReader | None] = {}
        self._by_digest: dict[tuple[str, int], tuple[str, int]] | None = None
        self._lock = threading.Lock()

    def read(self, shard: Shard, number: int) -> Any:
        block = shard.blocks[number]
        nbytes = block.file_stop - block.file_start
        try:
            name = f"{self._directory}/{shard.entry.name}"
            data = self._read(name, block.file_start, nbytes)
            if data is not None and _format.block_digest([data]) == block.digest:
                return data
            other = self._blocks().get((block.digest, nbytes))
            data = None if other is None else self._read(*other, nbytes)
        except OSError as error:
            raise Absent(describe(error)) from error
        if data is None:
            raise Absent("it does not have these bytes")
        return data

    def read_index(self, process: int, expected: IndexEntry) -> bytes | None:
        """The index of a process of the same save, if it is as it was written."""
        with suppress(OSError):
            data = self.store.get(f"{self._directory}/{_format.index_name(process)}")
            self._tally.add(read=len(data))
            if (len(data), _format.digest(data)) == (expected.size, expected.digest):
                return data
        return None

    def close(self) -> None:
        for reader in self._readers.values():
            if reader is not None:
                reader.close()
        self._readers.clear()

    def _read(self, name: str, start: int, nbytes: int) -> Any:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = open_if_there(self.store, name)
            reader = self._readers[name]
        if reader is None or reader.size < start + nbytes:
            return None
        data = bytearray(nbytes)
        count = reader.read_into(start, [data])
        self._tally.add(read=count)
        return data if count == nbytes else None

    def _blocks(self) -> dict[tuple[str, int], tuple[str, int]]:
        """By digest and length, where a block lies in a checkpoint of another id."""
        with self._lock:
            if self._by_digest is None:
                self._by_digest = dict(self._find_blocks())
            return self._by_digest

    def _find_blocks(self) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
        try:
            source = open_ostraka(self.store)
        except OstrakaError:
            return
        if source is None or source.metadata.id == self._save_id:
            return
        for name, blocks in _all_blocks(source):
            for block in blocks[1:]:
                length = block.file_stop - block.file_start
                yield (block.digest, length), (name, block.file_start)


def _all_blocks(source: OstrakaSource) -> Iterator[tuple[str, list[Block]]]:
    """Of each file whose index can be read, its name and its blocks."""
    shards = Shards(source.store, source.metadata)
    try:
        files = shard_contents(source.metadata, None, shards.allowance()).values()
    except ValueError:
        return
    for entry, contents in files:
        data_bytes = contents[-1].offset + contents[-1].nbytes
        with suppress(Damaged):
            yield shards.name_of(entry), shards.digests_of(entry, data_bytes).blocks()


def open_if_there(store: Store, name: str) -> FileReader | None:
    try:
        return store.open(name)
    except FileNotFoundError:
        return None
