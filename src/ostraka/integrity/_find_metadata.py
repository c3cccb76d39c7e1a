"""Which `_METADATA` a checkpoint has, or had. No JAX.

If it is lost or damaged there is the copy among the shards, and other copies of the same save. A
place whose `_METADATA` is gone can't be told from one that a save died in just before its commit:
both have all that a checkpoint needs. So nothing here makes one by itself; `repair` does, when it
is asked to, for a save of which every byte is proved to be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ostraka import _format
from ostraka._damage import NOT_AS_WRITTEN, damage_on_contradiction, damaged
from ostraka._foreign import looks_like_ours, not_a_checkpoint
from ostraka._format import METADATA_COPY, METADATA_NAME
from ostraka._leftovers import id_in
from ostraka._metadata import Metadata, decode_metadata, metadata_is_intact
from ostraka.errors import NotACheckpoint, OstrakaError, PathInTheWay, StoreError
from ostraka.storage import Store

OWN = -1
"""Instead of the number of a copy: the checkpoint itself."""
NOWHERE = -2
"""No copy is left."""


@dataclass(frozen=True, slots=True)
class FoundMetadata:
    """Where a `_METADATA` was found, and what is wrong with the one of the checkpoint."""

    copy: int
    """OWN, NOWHERE, or the number of the other copy that has it."""
    name: str
    found: str
    """What is wrong with the checkpoint's own; empty if it is whole."""
    was_committed: bool
    """Whether it is known that the save was: a `_METADATA` with its id is there."""


def find_metadata(store: Store, copies: Sequence[Store], *, required: bool) -> FoundMetadata:
    """Find it.

    Raises CheckpointNotFound and others for what is no checkpoint, PathInTheWay if there are those
    of several saves, and if it is `required` and there is none Damaged.
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
    if not of_id and not required:
        return FoundMetadata(NOWHERE, "the headers of its shards", found, False)
    if not of_id:
        advice = "rebuild_tree=True makes one from the headers of the shards, as far as they tell"
        what = f"{found}, and no copy of it was found; give one with from_=, or {advice}"
        raise damaged(store, METADATA_NAME, what)
    if len(of_id) > 1:
        raise PathInTheWay(
            f"{store.location} has no {METADATA_NAME}, and the shards of {len(of_id)} saves "
            f"({', '.join(map(_format.shards_directory, sorted(of_id)))}); remove those that are "
            "not to be the checkpoint"
        )
    return next(iter(of_id.values()))


def load_metadata(store: Store, copies: Sequence[Store], where: FoundMetadata) -> bytes:
    """The bytes of a `_METADATA` that was found."""
    return (store if where.copy == OWN else copies[where.copy]).get(where.name)


def _look(store: Store) -> tuple[bytes | None, str]:
    """What a checkpoint has as `_METADATA`, and what is wrong with it."""
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
    """Every `_METADATA` that can be read, in the checkpoint's own shards first."""
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
