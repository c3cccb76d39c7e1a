"""A checkpoint that is there: its `_METADATA` and process indexes, read and checked. No JAX."""

from __future__ import annotations

import os
from functools import cached_property

from ostraka import _format
from ostraka._document import Branch, Leaf, saved_tree
from ostraka._format import FileDigests, FileEntry, Metadata
from ostraka._parallel import RenewedLock, with_full_stack
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    Problem,
    StoreError,
    UnsupportedFormat,
)
from ostraka.storage import LocalStore, Store


class Source:
    """An opened checkpoint; process indexes are read when one of their files is asked for."""

    def __init__(self, store: Store, metadata: Metadata, metadata_bytes: int):
        self.store = store
        self.metadata = metadata
        self.metadata_bytes = metadata_bytes
        self._directory = _format.shards_directory(metadata.id)
        self._indexes: dict[int, dict[str, FileDigests]] = {}
        self._reading = RenewedLock()

    @property
    def location(self) -> str:
        return self.store.location

    @cached_property
    def tree(self) -> Branch | Leaf:
        """The tree that was saved; array leaves hold their number."""
        paths = [leaf.spec.path for leaf in self.metadata.leaves]
        try:
            return saved_tree(self.metadata.tree, paths)
        except ValueError as error:
            raise self.damaged(_format.METADATA_NAME, f"it contradicts itself: {error}") from error

    def name_of(self, file: FileEntry) -> str:
        return f"{self._directory}/{file.name}"

    def digests_of(self, file: FileEntry) -> FileDigests:
        """The digested blocks of a file. Raises Damaged if the index that has them is."""
        process = self.metadata.process_of[file.device]
        with self._reading.lock:
            index = self._indexes.get(process)
            if index is None:
                index = self._indexes[process] = self._read_index(process)
        found = index.get(file.name)
        if found is None or found.size != file.size or found.lengths[:1] != (file.header_bytes,):
            raise self.damaged(
                self.index_name(process),
                f"it does not describe {file.name} as {_format.METADATA_NAME} does",
            )
        return found

    def index_name(self, process: int) -> str:
        return f"{self._directory}/{_format.index_name(process)}"

    def damaged(self, name: str, found: str, leaves: tuple[str, ...] = ()) -> Damaged:
        return Damaged(self.location, [Problem(name, found, leaves)])

    def is_still_there(self) -> bool:
        """Whether the checkpoint at this place is still the one that was opened."""
        try:
            return load(self.store).metadata.id == self.metadata.id
        except (OSError, ValueError):
            return False

    def _read_index(self, process: int) -> dict[str, FileDigests]:
        name = self.index_name(process)
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
            raise self.damaged(
                name, f"it has {len(data):,} bytes where {expected.size:,} were written"
            )
        if _format.digest(data) != expected.digest:
            raise self.damaged(name, "its digest is not the one that was written")
        try:
            return with_full_stack(lambda: _format.decode_index(data))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise self.damaged(name, f"it can't be read ({error})") from error


def load(store: Store) -> Source:
    """Open the checkpoint in a store.

    Raises CheckpointNotFound, NotACheckpoint, UnsupportedFormat or Damaged, each a sentence.
    """
    try:
        data = store.get(_format.METADATA_NAME)
    except FileNotFoundError as error:
        raise _nothing_there(store) from error
    except StoreError as error:
        if error.loss is None:
            raise
        raise Damaged(store.location, [Problem(_format.METADATA_NAME, error.loss)]) from error
    if not _format.metadata_is_intact(data):
        if not looks_like_ours(store, data):
            raise NotACheckpoint(
                f"{store.location} is not an Ostraka checkpoint: its {_format.METADATA_NAME} was "
                "written by something else"
            )
        raise Damaged(
            store.location,
            [Problem(_format.METADATA_NAME, "its digest is not the one that was written")],
        )
    try:
        return Source(store, _format.decode_metadata(data), len(data))
    except (NotACheckpoint, UnsupportedFormat) as error:
        raise type(error)(f"can't read {store.location}: {error}") from error
    except ValueError as error:
        raise Damaged(
            store.location, [Problem(_format.METADATA_NAME, f"it contradicts itself: {error}")]
        ) from error


def looks_like_ours(store: Store, data: bytes) -> bool:
    """Whether a `_METADATA` that can't be read was probably written by a save."""
    named = any(_format.is_shards_directory(name) for name in store.list() or [])
    return named or data.startswith(b'{"format":"ostraka"')


def _nothing_there(store: Store) -> CheckpointNotFound | NotACheckpoint:
    where = store.location
    names = store.list()
    if names is None:
        if isinstance(store, LocalStore) and os.path.exists(where):
            return NotACheckpoint(f"{where} is a file, not a checkpoint directory")
        return CheckpointNotFound(f"there is no checkpoint at {where}: there is no such directory")
    if any(_format.is_shards_directory(name) for name in names):
        return CheckpointNotFound(
            f"there is no checkpoint at {where}: a save to it never finished, or its "
            f"{_format.METADATA_NAME} is lost"
        )
    return CheckpointNotFound(
        f"there is no checkpoint at {where}: the directory has no {_format.METADATA_NAME}"
        f"{_suggest_below(store, names)}"
    )


def _suggest_below(store: Store, names: list[str]) -> str:
    def has_metadata(name: str) -> bool:
        try:
            store.get(f"{name}/{_format.METADATA_NAME}")
        except OSError:
            return False
        return True

    found = [name for name in names[:100] if has_metadata(name)]
    return f"; did you mean {store.location}/{found[-1]}?" if found else ""
