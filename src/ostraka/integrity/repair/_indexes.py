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
from ostraka.formats.ostraka.damage import index_problem
from ostraka.formats.ostraka.shards import Shards
from ostraka.integrity.repair._files import open_or_say
from ostraka.integrity.repair._origins import PARITY, CopyOrigin, Live, RepairJob
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
    live: Sequence[Mapping[str, str]],
) -> tuple[bytes, str] | None:
    """Get a lost index back, with the name of its origin. Returns None if nothing has it.

    `live` has what `live_digests` gave on each process.
    """
    expected = shards.metadata.indexes[process]
    for copy in copies:
        if (data := copy.read_index(process, expected)) is not None:
            return data, copy.name
    if shards.parities is not None:
        data = shards.parities.index_copy(process)
        if data is not None:
            return data, PARITY
    if shards.metadata.version >= _format.COMPRESSED_VERSION:
        return None
    candidates = _find_candidates(job, shards.metadata, files, live)
    data = _prove_index(shards.metadata, process, candidates, job.store.location)
    return None if data is None else (data, "its shards")


def live_digests(live: Live | None, files: Contents, *, is_remote: bool) -> dict[str, str]:
    """By the name of each file that the live tree holds whole, its digests, a `/` and its ETag."""
    if live is None:
        return {}
    found: dict[str, str] = {}
    for file, contents in files:
        digests = live.digest_file(file, contents, with_e_tag=is_remote)
        if digests is not None:
            found[file.name] = f"{''.join(digests.digests)}/{digests.identity}"
    return found


def _prove_index(
    metadata: Metadata,
    process: int,
    candidates: Mapping[str, Sequence[FileDigests]],
    location: str,
) -> bytes | None:
    """The index of a process, if any choice of candidates has the digest in `_METADATA`.

    `candidates` has the possible digests of each file. An index may have `location` in it, the
    place of the checkpoint, with the ETags of its files.
    """
    expected = metadata.indexes[process]
    files = [file for file in metadata.files if metadata.process_of[file.device] == process]
    names = [file.name for file in files]
    choices = [candidates.get(name, ()) for name in names]
    for chosen in islice(product(*choices), _MOST_TRIED):
        described = dict(zip(names, chosen, strict=True))
        for where in ("", location):
            data = _format.encode_index(
                metadata.id, process, described, version=metadata.version, location=where
            )
            if index_problem(data, expected) is None:
                return data
    return None


def _find_candidates(
    job: RepairJob, metadata: Metadata, files: Contents, live: Sequence[Mapping[str, str]]
) -> dict[str, list[FileDigests]]:
    """By the name of each file, what the index may have had: its digests here, there and live."""
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
        for text in (texts[file.name] for texts in live if file.name in texts):
            text, _, e_tag = text.partition("/")
            digests = tuple(text[i : i + 16] for i in range(0, len(text), 16))
            found[FileDigests(file.size, lengths, digests, identity=e_tag)] = None
        return list(found)

    threads = job.store.traits.reads_at_once
    results = run_all(lambda pair: look(*pair), files, threads=threads, stop=StopSignal())
    return dict(zip((file.name for file, _ in files), results, strict=True))


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
