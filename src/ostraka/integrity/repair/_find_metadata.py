"""Find the `_METADATA` of a checkpoint, or a copy of it. No JAX.

If it is lost or damaged, the shards have a copy of it, and so have other copies of the same save.
A checkpoint that lost its `_METADATA` looks the same as a save that died just before its commit.
Both have all other files. So `repair` commits it only if every byte is proved to be right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ostraka.errors import NotACheckpoint, OstrakaError, PathInTheWay, StoreError
from ostraka.formats.ostraka.damage import NOT_AS_WRITTEN, damage_on_contradiction, damaged
from ostraka.formats.unknown import looks_like_ours, not_a_checkpoint
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import Metadata, decode_metadata, metadata_is_intact
from ostraka.layout.shard_file import METADATA_COPY, METADATA_NAME
from ostraka.saving.place import id_in
from ostraka.storage import Store

OWN = -1
"""Stands for the checkpoint itself, in place of the number of a copy."""


class FoundMetadata(NamedTuple):
    """The location of a `_METADATA`, and the damage of the checkpoint's own."""

    copy: int
    """OWN, or the number of the other copy that has it."""
    name: str
    found: str
    """The damage of the checkpoint's own `_METADATA`, or the empty string."""
    was_committed: bool
    """True if the save is known to have been committed: its `_METADATA` begins with its id."""


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
    of_id: dict[str, FoundMetadata] = {}
    for copy, name, metadata in _candidates(store, copies, sorted(ids)):
        if metadata.id in ({wanted} if wanted else ids):
            candidate = FoundMetadata(copy, name, found, wanted == metadata.id)
            of_id.setdefault(metadata.id, candidate)
    if not of_id:
        what = f"{found}, and no copy of it was found; give one with from_="
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


def _candidates(
    store: Store, copies: Sequence[Store], ids: Sequence[str]
) -> Iterator[tuple[int, str, Metadata]]:
    """Every readable `_METADATA`, that of the checkpoint's own shards first."""
    for save_id in ids:
        name = f"{_format.shards_directory(save_id)}/{METADATA_COPY}"
        metadata = _read(store, name)
        if metadata is not None and metadata.id == save_id:
            yield OWN, name, metadata
    for number, copy in enumerate(copies):
        for name in (METADATA_NAME, *(f"shards-{save_id}/{METADATA_COPY}" for save_id in ids)):
            metadata = _read(copy, name)
            if metadata is not None:
                yield number, name, metadata


def _read(store: Store, name: str) -> Metadata | None:
    try:
        data = store.get(name)
        return decode_metadata(data) if metadata_is_intact(data) else None
    except (OSError, OstrakaError, ValueError):
        return None
