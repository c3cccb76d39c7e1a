"""Ostraka's own format as a source. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ostraka import _format, _metadata
from ostraka._blocks import Shards
from ostraka._document import saved_tree
from ostraka._foreign import looks_like_ours
from ostraka._metadata import Metadata
from ostraka._nodes import Branch, Leaf
from ostraka._plan_restore import reading_order
from ostraka._source import OnBytes, Saved, StoredBox, StoredFile
from ostraka._spec import Target
from ostraka.errors import Damaged, NotACheckpoint, Problem, StoreError, UnsupportedFormat
from ostraka.storage import Store

if TYPE_CHECKING:
    import numpy as np


class OstrakaSource:
    """A checkpoint that `ostraka.save` wrote."""

    def __init__(self, store: Store, metadata: Metadata, metadata_bytes: int):
        self.store = store
        self.metadata = metadata
        self.metadata_bytes = metadata_bytes
        self.shards = Shards(store, metadata)
        self.saved = Saved(
            metadata.id,
            metadata.tree,
            tuple(leaf.spec for leaf in metadata.leaves),
            metadata.meshes,
            metadata.process_of,
            metadata.user,
            metadata.writer,
        )

    @property
    def location(self) -> str:
        return self.store.location

    @property
    def tree(self) -> Branch | Leaf:
        return self._tree

    @cached_property
    def _tree(self) -> Branch | Leaf:
        paths = [leaf.spec.path for leaf in self.metadata.leaves]
        try:
            return saved_tree(self.metadata.tree, paths)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"can't read {self.location}: {error}") from error
        except ValueError as error:
            raise _contradiction(self.store, error) from error

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        from ostraka._fetch import read_boxes  # with numpy, which a look at the tree does without

        return read_boxes(self.shards, targets, on_bytes)

    def order(self) -> list[int]:
        return reading_order(self.metadata.leaves, self.metadata.layouts)

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        return self.metadata.layouts[self.metadata.leaves[leaf].layout].grid

    def boxes_of(self, leaf: int) -> list[StoredBox]:
        metadata = self.metadata
        owners = set(metadata.layouts[metadata.leaves[leaf].layout].owners)
        files = {(file.device, file.part): file for file in metadata.files}
        contents = _format.entries_by_file(metadata.leaves, metadata.layouts, owners)
        found = [
            StoredBox(
                entry.box,
                self.shards.name_of(files[key]),
                metadata.process_of[key[0]],
                files[key].header_bytes + entry.offset,
                entry.nbytes,
            )
            for key, entries in contents.items()
            for entry in entries
            if entry.leaf == leaf and key in files
        ]
        return sorted(found)

    def files(self) -> list[StoredFile]:
        return [
            StoredFile(
                self.shards.name_of(file),
                file.size,
                file.device,
                self.metadata.process_of[file.device],
            )
            for file in self.metadata.files
        ]

    def is_current(self) -> bool:
        try:
            found = open_ostraka(self.store)
        except (OSError, ValueError):
            return False
        return found is not None and found.metadata.id == self.metadata.id


def open_ostraka(store: Store) -> OstrakaSource | None:
    """Open the checkpoint in a store; None if there is none, or `_METADATA` is not ours.

    Raises UnsupportedFormat or Damaged.
    """
    try:
        data = store.get(_format.METADATA_NAME)
    except FileNotFoundError:
        return None
    except StoreError as error:
        if error.loss is None:
            raise
        raise _damaged(store, error.loss) from error
    if not _metadata.metadata_is_intact(data):
        if not looks_like_ours(store, data):
            return None
        raise _damaged(store, "its digest is not the one that was written")
    try:
        return OstrakaSource(store, _metadata.decode_metadata(data), len(data))
    except NotACheckpoint:
        return None
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"can't read {store.location}: {error}") from error
    except ValueError as error:
        raise _contradiction(store, error) from error


def _damaged(store: Store, found: str) -> Damaged:
    return Damaged(store.location, [Problem(_format.METADATA_NAME, found)])


def _contradiction(store: Store, error: ValueError) -> Damaged:
    return _damaged(store, f"it contradicts itself: {error}")
