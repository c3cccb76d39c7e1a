"""A process index that was lost, made again from shard files, bit for bit.

How a file is cut into blocks follows from what it holds, so that its bytes can be digested again;
and `_METADATA` has the size and the digest of the index, which prove the result. Blocks that are
compressed are found by their own heads. No JAX.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice, product
from typing import Any, NamedTuple, cast

import numpy as np

from ostraka import _codec, _format
from ostraka._codec import element_bytes
from ostraka._format import Entry, FileDigests, FileEntry
from ostraka._metadata import Metadata
from ostraka._parallel import StopSignal, run_all
from ostraka.integrity._lost import open_or_say
from ostraka.integrity._repair_report import Tally
from ostraka.storage import FileReader, Store

Candidates = Mapping[str, Sequence[FileDigests]]
"""By the name of a file, what an index may have said of it."""

_MOST_TRIED = 4096
_IS_COMPRESSED = 1 << 31
_MOST_HEADER_BYTES = 100 << 20


def prove_index(
    metadata: Metadata, process: int, candidates: Candidates, location: str
) -> bytes | None:
    """The index of a process, if any choice of the candidates has the digest of `_METADATA`.

    `location` is where the checkpoint is: an index may name it, with the ETags of its files.
    """
    expected = metadata.indexes.get(process)
    files = [file for file in metadata.files if metadata.process_of[file.device] == process]
    choices = [candidates.get(file.name, ()) for file in files]
    if expected is None or not all(choices):
        return None
    names = [file.name for file in files]
    for chosen in islice(product(*choices), _MOST_TRIED):
        described = dict(zip(names, chosen, strict=True))
        for where in ("", location):
            data = _format.encode_index(
                metadata.id, process, described, version=metadata.version, location=where
            )
            if (len(data), _format.digest(data)) == (expected.size, expected.digest):
                return data
    return None


def find_candidates(
    stores: Sequence[Store],
    metadata: Metadata,
    files: Sequence[tuple[FileEntry, list[Entry]]],
    live: Sequence[Mapping[str, str]],
    tally: Tally,
) -> dict[str, list[FileDigests]]:
    """What an index may have said of each file, by the files that the stores have.

    `live` has the digests that a file of live values would have, one after the other, and after a
    `/` its ETag, by its name, as several processes say. The first store is the checkpoint's own.
    """
    directory = _format.shards_directory(metadata.id)
    there = {info.name: info.identity for info in stores[0].files(f"{directory}/")}

    def look(file: FileEntry, contents: list[Entry]) -> list[FileDigests]:
        found: dict[FileDigests, None] = {}
        identity = there.get(f"{directory}/{file.name}", "")
        for store in stores:
            for digests in _digest_again(store, metadata, file, contents, tally):
                found[replace(digests, identity=identity)] = None
        lengths = tuple(_format.block_lengths(file.header_bytes, contents))
        for text in (texts[file.name] for texts in live if file.name in texts):
            text, _, e_tag = text.partition("/")
            digests = tuple(text[i : i + 16] for i in range(0, len(text), 16))
            found[FileDigests(file.size, lengths, digests, identity=e_tag)] = None
        return list(found)

    threads = stores[0].parts.reads_at_once
    results = run_all(lambda pair: look(*pair), files, threads=threads, stop=StopSignal())
    names = (file.name for file, _ in files)
    return dict(zip(names, results, strict=True))


def _digest_again(
    store: Store, metadata: Metadata, file: FileEntry, contents: list[Entry], tally: Tally
) -> list[FileDigests]:
    """What an index may have said of a file that is there; nothing if it is not whole."""
    name = f"{_format.shards_directory(metadata.id)}/{file.name}"
    opened = open_or_say(store, name)
    if isinstance(opened, str):
        return []
    with closing(opened) as reader:
        if reader.size != file.size:
            return []
        shard = _Found(reader, metadata, file, contents, tally)
        found = [_digest_file(shard, asked) for asked in _asked(metadata, shard)]
        return [digests for digests in found if digests is not None]


class _Found(NamedTuple):
    """A shard file that is there."""

    reader: FileReader
    metadata: Metadata
    file: FileEntry
    contents: list[Entry]
    tally: Tally

    def read(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A range of the file; shorter if the file is."""
        data = np.empty(max(min(stop, self.file.size) - start, 0), np.uint8)
        count = self.reader.read_into(start, [data])
        self.tally.add(read=count)
        return data[:count]


def _asked(metadata: Metadata, shard: _Found) -> list[frozenset[int]]:
    """Which leaves the save was asked to compress, which decides about the blocks: guesses.

    A leaf that did not get smaller looks as if it had not been asked for.
    """
    if metadata.version < _format.COMPRESSED_VERSION:
        return [frozenset()]
    large = frozenset(
        number
        for number, leaf in enumerate(metadata.leaves)
        if leaf.spec.nbytes >= _format.LEAST_COMPRESSED_BYTES
    )
    return list(dict.fromkeys([large, _compressed_leaves(shard), frozenset[int]()]))


def _header(shard: _Found) -> dict[str, Any]:
    if shard.file.header_bytes > _MOST_HEADER_BYTES:
        return {}
    try:
        loaded = json.loads(bytes(shard.read(8, shard.file.header_bytes)))
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", loaded) if isinstance(loaded, dict) else {}


def _stored_ranges(shard: _Found) -> dict[int, tuple[int, int]]:
    """By leaf, where the header says that its box is stored."""
    header, ranges = _header(shard), dict[int, tuple[int, int]]()
    for entry in shard.contents:
        try:
            described = header[shard.metadata.leaves[entry.leaf].spec.path]
            start, stop = described["data_offsets"]
            if 0 <= start <= stop <= shard.file.size:
                ranges[entry.leaf] = (int(start), int(stop))
        except (TypeError, KeyError, ValueError):
            continue
    return ranges


def _compressed_leaves(shard: _Found) -> frozenset[int]:
    ranges = _stored_ranges(shard)
    return frozenset(
        e.leaf
        for e in shard.contents
        if e.leaf in ranges and ranges[e.leaf][1] - ranges[e.leaf][0] < e.nbytes
    )


def _digest_file(shard: _Found, asked: Collection[int]) -> FileDigests | None:
    """The digests of a file whose leaves `asked` were to be compressed; None if it can't be so."""
    data_lengths = _format.block_lengths(shard.file.header_bytes, shard.contents, asked)
    stored = data_lengths
    if sum(data_lengths) != shard.file.size:
        found = _stored_lengths(shard, data_lengths, asked)
        if found is None:
            return None
        stored = found
    if sum(stored) != shard.file.size:
        return None
    digests: list[str] = []
    results: list[str] = []
    start = 0
    for length, data_length in zip(stored, data_lengths, strict=True):
        block = shard.read(start, start + length)
        start += length
        digests.append(_format.block_digest([block]))
        if length != data_length:
            data = np.empty(data_length, np.uint8)
            try:
                _codec.decode(block, data)
            except _codec.Undecodable:
                return None
            results.append(_format.block_digest([data]))
    if not results:
        return FileDigests(shard.file.size, tuple(stored), tuple(digests))
    return FileDigests(
        shard.file.size, tuple(stored), tuple(digests), tuple(data_lengths), tuple(results)
    )


def _stored_lengths(
    shard: _Found, data_lengths: Sequence[int], asked: Collection[int]
) -> list[int] | None:
    """How long each block is in the file, where boxes are compressed."""
    ranges = _stored_ranges(shard)
    own = {e.offset: e for e in shard.contents if _format.has_own_blocks(e, asked)}
    stored = [data_lengths[0]]
    start, position, number = 0, shard.file.header_bytes, 1
    while number < len(data_lengths):
        entry = own.get(start)
        lengths = [data_lengths[number]]
        if entry is not None:
            while sum(lengths) < entry.nbytes:
                lengths.append(data_lengths[number + len(lengths)])
        number += len(lengths)
        start += sum(lengths)
        found: Sequence[int] | None = lengths
        if entry is not None and entry.leaf in asked and entry.leaf in ranges:
            low, high = ranges[entry.leaf]
            width = element_bytes(shard.metadata.leaves[entry.leaf].spec.dtype)
            found = _split(shard, lengths, position, position + high - low, width)
        if found is None:
            return None
        stored += found
        position += sum(found)
    return stored


def _split(
    shard: _Found, lengths: Sequence[int], start: int, stop: int, width: int
) -> Sequence[int] | None:
    """How long each block of one box is, that together fill a range of the file."""
    if sum(lengths) == stop - start:
        return lengths  # What is compressed is shorter.
    found: list[int] = []
    tries: list[Iterator[int]] = []
    position = start
    while True:
        if len(tries) == len(found) and len(found) < len(lengths):
            tries.append(_possible(shard, position, lengths[len(found)], width))
        if len(found) == len(lengths):
            if position == stop:
                return found
        else:
            following = next(tries[-1], None)
            if following is not None:
                if position + following <= stop:
                    found.append(following)
                    position += following
                continue
            tries.pop()
        if not found:
            return None
        position -= found.pop()


def _possible(shard: _Found, position: int, length: int, width: int) -> Iterator[int]:
    """How long a block at a position may be: what its head says, or as it is."""
    head_bytes = 1 + 4 * width
    head = shard.read(position, position + head_bytes)
    if len(head) == head_bytes and head[0] == width and length % width == 0:
        groups = struct.unpack(f"<{width}I", head[1:].tobytes())
        total = head_bytes + sum(group & ~_IS_COMPRESSED for group in groups)
        if total < length:
            yield total
    yield length
