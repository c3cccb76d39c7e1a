"""The process indexes of a checkpoint: which of them are lost, and how to get them back. No JAX.

An index comes from a copy of the save or from parity. Else it is made again from the shard files,
bit for bit. The contents of a file determine its blocks, so that they can be digested again. The
size and the digest of the index in `_METADATA` prove the result. An index of compressed files can't
be made again: nothing else has the lengths of the stored blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice, product
from typing import Any

from ostraka.common.progress import Count
from ostraka.common.threads import StopSignal, run_all
from ostraka.formats.ostraka.compare import index_problem
from ostraka.formats.ostraka.shards import Shards
from ostraka.integrity.repair._files import open_or_say
from ostraka.integrity.repair._origins import PARITY, CopyOrigin, RepairJob
from ostraka.layout import index as _index
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import Metadata
from ostraka.layout.shard_file import Entry, FileDigests, FileEntry, regroup
from ostraka.storage import Store
from ostraka.storage.requests import PART_BYTES, part_bytes_of

Contents = Sequence[tuple[FileEntry, list[Entry]]]
"""Shard files and their boxes."""

_MOST_TRIED = 4096


def find_index(
    job: RepairJob,
    shards: Shards,
    copies: Sequence[CopyOrigin],
    process: int,
    files: Contents,
    live: Sequence[Mapping[str, str | None]],
) -> tuple[bytes, str] | None:
    """Get a lost index back, with the name of its origin. Returns None if nothing has it.

    `files` are in the order of the index. `live` has, for each process, the digests of the live
    values by file.
    """
    metadata = shards.metadata
    expected = metadata.indexes[process]
    for copy in copies:
        if (data := copy.read_index(process, expected)) is not None:
            return data, copy.name
    if shards.parities is not None and (data := shards.parities.index_copy(process)) is not None:
        return data, PARITY
    if metadata.version >= _format.COMPRESSED_VERSION:
        return None
    names = [file.name for file, _ in files]
    choices = _find_candidates(job, metadata, files, live)
    for chosen in islice(product(*choices), _MOST_TRIED):
        described = dict(zip(names, chosen, strict=True))
        # An index may have the place of the checkpoint in it, with the ETags of its files.
        for where in ("", job.store.location):
            data = _index.encode_index(
                metadata.id, process, described, version=metadata.version, location=where
            )
            if index_problem(data, expected) is None:
                return data, "its shards"
    return None


def _find_candidates(
    job: RepairJob, metadata: Metadata, files: Contents, live: Sequence[Mapping[str, str | None]]
) -> list[list[FileDigests]]:
    """For each file, what the index may have had: its digests here, there and live."""
    directory = _format.shards_directory(metadata.id)
    there = {info.name: info.identity for info in job.store.files(f"{directory}/")}

    def look(file: FileEntry, contents: list[Entry]) -> list[FileDigests]:
        found: dict[FileDigests, None] = {}
        path = f"{directory}/{file.name}"
        lengths = tuple(_format.block_lengths(file.header_bytes, contents))
        for store in (job.store, *job.copies):
            digests = _digest_again(store, path, file.size, lengths, job.bytes_read)
            if digests is not None:
                found[replace(digests, identity=there.get(path, ""))] = None
        for given in filter(None, (texts.get(file.name) for texts in live)):
            text, _, e_tag = given.partition("/")
            digests = tuple(text[i : i + 16] for i in range(0, len(text), 16))
            found[FileDigests(file.size, lengths, digests, identity=e_tag)] = None
        return list(found)

    threads = job.store.traits.reads_at_once
    return run_all(lambda pair: look(*pair), files, threads=threads, stop=StopSignal())


def _digest_again(
    store: Store, name: str, size: int, lengths: tuple[int, ...], bytes_read: Count
) -> FileDigests | None:
    """Digest a file again. Returns None if it is missing or has another size."""
    opened = open_or_say(store, name)
    if isinstance(opened, str):
        return None
    digests: list[str] = []
    with closing(opened) as reader:
        if reader.size != size or sum(lengths) != size:
            return None
        start = 0
        for length in lengths:
            block = bytearray(length)
            bytes_read.add(reader.read_into(start, [block]))
            digests.append(_format.block_digest([block]))
            start += length
    return FileDigests(size, lengths, tuple(digests))


def usual_e_tag(views: Iterator[Any], size: int) -> str:
    """The ETag that Amazon S3, and most other stores, give to a file of `size` bytes.

    `ObjectStore` writes a file at once or in parts.
    """
    part = size if size <= PART_BYTES else part_bytes_of(size)
    lengths = [min(part, size - start) for start in range(0, size, part)]
    digests: list[bytes] = []
    for pieces in regroup(views, lengths):
        state = hashlib.md5(usedforsecurity=False)
        for piece in pieces:
            state.update(piece)
        digests.append(state.digest())
    if size <= PART_BYTES:
        return digests[0].hex()
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False)
    return f"{whole.hexdigest()}-{len(digests)}"
