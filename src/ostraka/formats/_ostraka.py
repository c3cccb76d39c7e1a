"""Ostraka's own format as a source. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ostraka._blocks import ShardFile
from ostraka._damage import NOT_AS_WRITTEN, damage_on_contradiction, damage_on_loss, damaged
from ostraka._document import saved_tree
from ostraka._foreign import looks_like_ours
from ostraka._format import METADATA_NAME, Entry, FileEntry, stored_range
from ostraka._metadata import Metadata, decode_metadata, metadata_is_intact, shard_contents
from ostraka._nodes import Branch, Leaf
from ostraka._plan_restore import reading_order
from ostraka._shards import Shards
from ostraka._source import OnBytes, Saved, StoredBox, StoredFile
from ostraka._spec import Target, turns_of
from ostraka.errors import NotACheckpoint
from ostraka.formats._orbax_tree import fit_to
from ostraka.storage import Store

if TYPE_CHECKING:
    import numpy as np

ORBAX_KEY = "ostraka.orbax"
"""In the metadata of what `ostraka.compat.orbax` saved: its tree is as Orbax would have it."""


class OstrakaSource:
    """A checkpoint that `ostraka.save` wrote."""

    def __init__(self, store: Store, metadata: Metadata, metadata_bytes: int):
        self.store = store
        self.metadata = metadata
        self.metadata_bytes = metadata_bytes
        self.shards = Shards(store, metadata)
        self._files_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """By layout and first part."""
        # What was saved is a part of `_METADATA`, but for leaves, which it has with their layouts.
        saved: dict[str, Any] = {f.name: getattr(metadata, f.name) for f in fields(Saved)}
        saved["leaves"] = tuple(leaf.spec for leaf in metadata.leaves)
        self.saved = Saved(**saved)

    @property
    def location(self) -> str:
        return self.store.location

    @property
    def tree(self) -> Branch | Leaf:
        return self._tree

    @cached_property
    def _tree(self) -> Branch | Leaf:
        with damage_on_contradiction(self.store):
            return saved_tree(self.metadata.tree, [leaf.path for leaf in self.saved.leaves])

    def tree_for(self, like: Branch | Leaf) -> Branch | Leaf:
        if ORBAX_KEY in self.saved.user:
            return fit_to(self._tree, like)
        return self._tree

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        from ostraka._fetch import read_boxes  # with numpy, which a look at the tree does without

        return read_boxes(self.shards, targets, on_bytes)

    def order(self) -> list[int]:
        return reading_order(self.metadata.leaves, self.metadata.layouts)

    @property
    def reads_whole_rows(self) -> bool:
        return True  # whole blocks, for their digests

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        return self.metadata.layouts[self.metadata.leaves[leaf].layout].grid

    def files_of(self, leaf: int) -> list[tuple[int, int]]:
        layout, part = self.metadata.leaves[leaf].layout, self.metadata.leaves[leaf].part
        found = self._files_of.get((layout, part))
        if found is None:
            owners, turns = (
                self.metadata.layouts[layout].owners,
                turns_of(self.metadata.layouts[layout]),
            )
            parts = [part] * len(owners) if turns is None else (part + turns).tolist()
            found = self._files_of[layout, part] = list(zip(owners, parts, strict=True))
        return found

    def boxes_of(self, leaf: int) -> list[StoredBox]:
        owners = set(self.metadata.layouts[self.metadata.leaves[leaf].layout].owners)
        with damage_on_contradiction(self.store):
            contents = shard_contents(self.metadata, owners, self.shards.allowance())
        return sorted(
            self._stored_box(file, entries, entry)
            for file, entries in contents.values()
            for entry in entries
            if entry.leaf == leaf
        )

    def _stored_box(self, file: FileEntry, entries: Sequence[Entry], entry: Entry) -> StoredBox:
        start, stop = entry.offset, entry.offset + entry.nbytes
        if file.size != file.header_bytes + entries[-1].offset + entries[-1].nbytes:
            # Where something is compressed, only the index of its process knows the places.
            start, stop, _ = stored_range(entry, ShardFile(self.shards, file, entries).blocks)
        return StoredBox(
            entry.box,
            self.shards.name_of(file),
            self.metadata.process_of[file.device],
            file.header_bytes + start,
            entry.nbytes,
            stop - start,
        )

    def files(self) -> list[StoredFile]:
        name_of, process_of = self.shards.name_of, self.metadata.process_of
        parity = () if self.metadata.parity is None else self.metadata.parity.files
        return [
            *(
                StoredFile(name_of(file), file.size, file.device, process_of[file.device])
                for file in self.metadata.files
            ),
            *(StoredFile(name_of(file), file.size, None, file.process) for file in parity),
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
    with damage_on_loss(partial(damaged, store, METADATA_NAME)):
        try:
            data = store.get(METADATA_NAME)
        except FileNotFoundError:
            return None
    if not metadata_is_intact(data):
        if not looks_like_ours(store, data):
            return None
        raise damaged(store, METADATA_NAME, NOT_AS_WRITTEN)
    try:
        with damage_on_contradiction(store):
            return OstrakaSource(store, decode_metadata(data), len(data))
    except NotACheckpoint:
        return None
