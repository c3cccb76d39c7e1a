"""A checkpoint that is there: its `_METADATA` and process indexes, read and checked. No JAX."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

from ostraka import _format, _metadata
from ostraka._document import Branch, Leaf, saved_tree
from ostraka._foreign import foreign_metadata, is_committed, names_in, nothing_there
from ostraka._format import FileDigests, FileEntry
from ostraka._lifetime import RenewedLock
from ostraka._metadata import Metadata
from ostraka._parallel import with_full_stack
from ostraka._step_names import names_of_step, steps_among
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    Problem,
    StoreError,
    UnsupportedFormat,
)
from ostraka.storage import LocalStore, PathLike, Store, open_store

Result = TypeVar("Result")

_ATTEMPTS = 10
"""So many times at most, if saves replace what is being read."""


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
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"can't read {self.location}: {error}") from error
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

    @contextmanager
    def unless_replaced(self) -> Generator[None]:
        """Files that are missing because a save has replaced the checkpoint are not damage."""
        try:
            yield
        except Damaged as error:
            if self.is_still_there():
                raise
            try:
                load(self.store)
            except CheckpointNotFound:
                raise CheckpointNotFound(
                    f"{self.location} was removed since it was opened; open another"
                ) from error
            raise Busy(
                f"{self.location} was replaced by another save since it was opened; open it again"
            ) from error

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


def locate(path: PathLike) -> Store:
    """Where the checkpoint is that a reader means by a path.

    That is the path itself, if there is a checkpoint or any other directory. A directory of steps
    stands for the newest of its committed steps; `runs/7`, where there is nothing of that name, for
    step 7 of `runs`, whatever its directory is called. Never used by a save.
    """
    store = open_store(path)
    if not isinstance(store, LocalStore):
        return store
    place = store.location
    if not os.path.lexists(place):
        root, name = os.path.split(place)
        return _first_committed(root, [names_of_step(name, names_in(root))]) or store
    if is_committed(place):
        return store
    names = names_in(place)
    if any(map(_format.is_shards_directory, names)):
        return store
    return _first_committed(place, reversed(steps_among(names).values())) or store


def _first_committed(root: str, steps: Iterable[Sequence[str]]) -> LocalStore | None:
    paths = (os.path.join(root, name) for names in steps for name in names)
    return next((LocalStore(path) for path in paths if is_committed(path)), None)


def load_at(path: PathLike) -> Source:
    """Open the checkpoint that a path means, as `locate` says.

    Raises CheckpointNotFound, NotACheckpoint, UnsupportedFormat or Damaged, each a sentence.
    """
    for _ in range(_ATTEMPTS):
        store = locate(path)
        try:
            return load(store)
        except CheckpointNotFound:
            # Of a run that keeps few steps, the newest may have been deleted since it was found.
            if locate(path).location == store.location:
                raise
    raise _overwritten([open_store(path).location])


def read_whole(paths: Sequence[PathLike], work: Callable[[Sequence[Source]], Result]) -> Result:
    """What `work` makes of the checkpoints at some paths, also while saves replace them.

    If the files of one are gone because it was replaced, all are opened again and `work` begins
    again: it must not have shown anything before it has read all. Raises Busy if it never ends.
    """
    for _ in range(_ATTEMPTS):
        sources = [load_at(path) for path in paths]
        try:
            return work(sources)
        except Damaged:
            if all(source.is_still_there() for source in sources):
                raise
    raise _overwritten([open_store(path).location for path in paths])


def _overwritten(locations: Sequence[str]) -> Busy:
    return Busy(
        f"{' or '.join(dict.fromkeys(locations))} was overwritten {_ATTEMPTS} times while it was "
        "being read; wait for the saves to end"
    )


def load(store: Store) -> Source:
    """Open the checkpoint in a store.

    Raises CheckpointNotFound, NotACheckpoint, UnsupportedFormat or Damaged, each a sentence.
    """
    try:
        data = store.get(_format.METADATA_NAME)
    except FileNotFoundError as error:
        raise nothing_there(store) from error
    except StoreError as error:
        if error.loss is None:
            raise
        raise Damaged(store.location, [Problem(_format.METADATA_NAME, error.loss)]) from error
    if not _metadata.metadata_is_intact(data):
        if not looks_like_ours(store, data):
            raise foreign_metadata(store)
        raise Damaged(
            store.location,
            [Problem(_format.METADATA_NAME, "its digest is not the one that was written")],
        )
    try:
        return Source(store, _metadata.decode_metadata(data), len(data))
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
