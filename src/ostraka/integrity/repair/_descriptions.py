"""`_METADATA` and process indexes, which describe a checkpoint: how to get them back. No JAX.

If `_METADATA` is lost or damaged, the shards have a copy of it, and so have other copies of the
save. A checkpoint that lost its `_METADATA` looks the same as a save that died just before its
commit. Both have all other files. So `repair` commits it only if every byte is proved to be right.

An index comes from a copy of the save or from parity. Else it is made again from the shard files,
bit for bit. The contents of a file determine its blocks, so that they can be digested again. The
size and the digest of the index in `_METADATA` prove the result. An index of compressed files can't
be made again: nothing else has the lengths of the stored blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate, islice, pairwise, product
from typing import Any

from ostraka.common.progress import Count
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import NotACheckpoint, OstrakaError, PathInTheWay, StoreError
from ostraka.formats.ostraka.damage import (
    NOT_AS_WRITTEN,
    damage_on_contradiction,
    damaged,
    index_problem,
)
from ostraka.formats.unknown import looks_like_ours, not_a_checkpoint
from ostraka.integrity.repair._files import (
    PARITY,
    FoundMetadata,
    RepairJob,
    SavedFiles,
    open_or_say,
)
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import Metadata, decode_metadata, metadata_is_intact
from ostraka.layout.shard_file import (
    METADATA_COPY,
    METADATA_NAME,
    Entry,
    FileDigests,
    FileEntry,
    regroup,
)
from ostraka.saving.place import id_in
from ostraka.storage import FileReader, Store
from ostraka.storage.requests import PART_BYTES, part_bytes_of

OWN = -1
"""Stands for the checkpoint itself, in place of the number of a copy."""


def find_metadata(store: Store, copies: Sequence[Store]) -> FoundMetadata:
    """Find the `_METADATA` of the save in `store`, there or in a copy.

    Raises CheckpointNotFound or NotACheckpoint if no save was there, PathInTheWay if several saves
    were, and Damaged if no copy was found.
    """
    data, found = _look(store)
    if not found:
        return FoundMetadata(OWN, METADATA_NAME, "", True)
    names = store.list()
    wanted = id_in(data) if data else None
    ids = {name.partition("-")[2] for name in names if _format.is_shards_directory(name)}
    if not ids and wanted is None:
        raise not_a_checkpoint(store) if data is None else damaged(store, METADATA_NAME, found)
    own = [f"{_format.shards_directory(save_id)}/{METADATA_COPY}" for save_id in sorted(ids)]
    candidates = [(OWN, store, name) for name in own]
    for number, copy in enumerate(copies):
        candidates += [(number, copy, name) for name in (METADATA_NAME, *own)]
    of_id: dict[str, FoundMetadata] = {}
    for number, place, name in candidates:
        metadata = _read(place, name)
        if metadata is None or metadata.id not in ({wanted} if wanted else ids):
            continue
        if number != OWN or name.startswith(f"{_format.shards_directory(metadata.id)}/"):
            candidate = FoundMetadata(number, name, found, wanted == metadata.id)
            of_id.setdefault(metadata.id, candidate)
    if not of_id:
        what = f"{found}, and no copy of it was found; give one with sources="
        raise damaged(store, METADATA_NAME, what)
    if len(of_id) > 1:
        raise PathInTheWay(
            f"{store.location} has no {METADATA_NAME}, and the shards of {len(of_id)} saves "
            f"({', '.join(map(_format.shards_directory, sorted(of_id)))}); remove those that are "
            "not to be the checkpoint"
        )
    return next(iter(of_id.values()))


def _look(store: Store) -> tuple[bytes | None, str]:
    """The bytes of a checkpoint's `_METADATA`, and their damage in words."""
    try:
        data = store.get(METADATA_NAME)
    except FileNotFoundError:
        return None, "it is missing"
    except StoreError as error:
        if error.loss is None:
            raise
        return b"", error.loss
    if not metadata_is_intact(data):
        if not looks_like_ours(store, data):
            raise not_a_checkpoint(store)
        return data, NOT_AS_WRITTEN
    try:
        with damage_on_contradiction(store):
            decode_metadata(data)
    except NotACheckpoint as error:
        raise not_a_checkpoint(store) from error
    return data, ""


def _read(store: Store, name: str) -> Metadata | None:
    try:
        data = store.get(name)
        return decode_metadata(data) if metadata_is_intact(data) else None
    except (OSError, OstrakaError, ValueError):
        return None


# Process indexes

Contents = Sequence[tuple[FileEntry, list[Entry]]]
"""Shard files and their boxes."""
LiveDigests = Sequence[Mapping[str, str | None]]
"""For each process, the digests of the live values by file."""

_MOST_TRIED = 4096


def find_index(
    job: RepairJob, saved: SavedFiles, process: int, files: Contents, live: LiveDigests
) -> tuple[bytes, str] | None:
    """Get a lost index back, with the name of its origin. Returns None if nothing has it.

    `files` are in the order of the index.
    """
    metadata, parities = saved.metadata, saved.shards.parities
    for copy in saved.copies:
        if (data := copy.read_index(process)) is not None:
            return data, copy.name
    if parities is not None and (data := parities.index_copy(process)) is not None:
        return data, PARITY
    if metadata.version >= _format.COMPRESSED_VERSION:
        return None
    names = [file.name for file, _ in files]
    choices = _find_candidates(job, metadata, files, live)
    for chosen in islice(product(*choices), _MOST_TRIED):
        described = dict(zip(names, chosen, strict=True))
        # An index may have the place of the checkpoint in it, with the ETags of its files.
        for where in ("", job.store.location):
            data = _format.encode_index(
                metadata.id, process, described, version=metadata.version, location=where
            )
            if index_problem(data, metadata.indexes[process]) is None:
                return data, "its shards"
    return None


def _find_candidates(
    job: RepairJob, metadata: Metadata, files: Contents, live: LiveDigests
) -> list[list[FileDigests]]:
    """For each file, what the index may have had: its digests here, there and live."""
    directory = _format.shards_directory(metadata.id)
    there = {info.name: info.identity for info in job.store.files(f"{directory}/")}

    def look(file: FileEntry, contents: list[Entry]) -> list[FileDigests]:
        found: dict[FileDigests, None] = {}
        path = f"{directory}/{file.name}"
        lengths = tuple(_format.block_lengths(file.header_bytes, contents))
        for store in (job.store, *job.copies):
            opened = open_or_say(store, path)
            if isinstance(opened, str):
                continue
            with closing(opened) as reader:
                if reader.size == file.size == sum(lengths):
                    digests = tuple(_digest_blocks(reader, lengths, job.bytes_read))
                    e_tag = there.get(path, "")
                    found[FileDigests(file.size, lengths, digests, identity=e_tag)] = None
        for given in filter(None, (texts.get(file.name) for texts in live)):
            text, _, e_tag = given.partition("/")
            digests = tuple(text[i : i + 16] for i in range(0, len(text), 16))
            found[FileDigests(file.size, lengths, digests, identity=e_tag)] = None
        return list(found)

    threads = job.store.traits.reads_at_once
    return run_all(lambda pair: look(*pair), files, threads=threads, stop=StopSignal())


def _digest_blocks(reader: FileReader, lengths: Sequence[int], bytes_read: Count) -> Iterator[str]:
    for start, stop in pairwise(accumulate(lengths, initial=0)):
        block = bytearray(stop - start)
        bytes_read.add(reader.read_into(start, [block]))
        yield _format.block_digest([block])


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
