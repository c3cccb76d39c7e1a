"""Ostraka's own format as a source. No JAX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ostraka.errors import NotACheckpoint
from ostraka.formats.ostraka.damage import (
    NOT_AS_WRITTEN,
    damage_on_contradiction,
    damage_on_loss,
    damaged,
)
from ostraka.formats.ostraka.shards import Shards
from ostraka.formats.source import OnBytes, Saved, StoredBox, StoredFile
from ostraka.formats.source_files import Sampling
from ostraka.formats.unknown import looks_like_ours
from ostraka.layout.metadata import Metadata, decode_metadata, metadata_is_intact, shard_contents
from ostraka.layout.shard_file import METADATA_NAME, Entry, FileEntry, alignment_of, stored_range
from ostraka.layout.spec import Target, largest_cell_bytes, turns_of
from ostraka.storage import Store
from ostraka.tree.json_tree import saved_tree
from ostraka.tree.nodes import Branch, Leaf, Node

if TYPE_CHECKING:
    import numpy as np


class OstrakaSource:
    """A checkpoint that `ostraka.save` wrote."""

    reads_whole_rows = True  # whole blocks, for their digests
    version = ""  # Its id differs between any two saves, and its blocks have digests.

    def __init__(self, store: Store, metadata: Metadata, metadata_bytes: int):
        self.store = store
        self.location = store.location
        self.metadata = metadata
        self.metadata_bytes = metadata_bytes
        self.shards = Shards(store, metadata)
        self.fit: Callable[[Node, Node], Node] | None = None
        """Fits the tree to a template, if the save left out its containers."""
        self._files_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Answers of `files_of`, by layout and first part."""
        m, leaves = metadata, tuple(leaf.spec for leaf in metadata.leaves)
        self.saved = Saved(m.id, m.tree, leaves, m.meshes, m.process_of, m.user, m.writer)

    @property
    def tree(self) -> Branch | Leaf:
        return self._tree

    @cached_property
    def _tree(self) -> Branch | Leaf:
        with damage_on_contradiction(self.store):
            return saved_tree(self.metadata.tree, [leaf.path for leaf in self.saved.leaves])

    def tree_for(self, like: Branch | Leaf) -> Branch | Leaf:
        return self.tree if self.fit is None else self.fit(self.tree, like)

    def read(
        self, targets: Sequence[Target], *, on_bytes: OnBytes | None = None
    ) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        # Imports numpy, which a look at the tree does without.
        from ostraka.formats.ostraka._fetch import BoxReader

        return BoxReader(self.shards, targets, on_bytes or (lambda nbytes: None)).run()

    def order(self) -> list[int]:
        """Leaves by their offset in a file. Files are read side by side from their beginnings.

        In a file, boxes of a larger alignment come first.
        """
        leaves, sizes = self.metadata.leaves, dict[object, int]()
        in_file: list[tuple[int, int, int]] = []
        for number, leaf in enumerate(leaves):
            key = (leaf.layout, leaf.spec.shape, leaf.spec.dtype)
            nbytes = sizes.get(key)
            if nbytes is None:
                nbytes = sizes[key] = largest_cell_bytes(leaf.spec, self.grid_of(number))
            in_file.append((-alignment_of(nbytes), number, nbytes))
        offsets: list[tuple[int, int]] = []
        ends: Counter[int] = Counter()
        """The end of each part so far."""
        for _, number, nbytes in sorted(in_file):
            offsets.append((ends[leaves[number].part], number))
            ends[leaves[number].part] += nbytes
        return [number for _, number in sorted(offsets)]

    def grid_of(self, leaf: int) -> tuple[int, ...]:
        return self.metadata.layouts[self.metadata.leaves[leaf].layout].grid

    def files_of(self, leaf: int) -> list[tuple[int, int]]:
        layout, part = self.metadata.leaves[leaf].layout, self.metadata.leaves[leaf].part
        found = self._files_of.get((layout, part))
        if found is None:
            owners = self.metadata.layouts[layout].owners
            turns = turns_of(self.metadata.layouts[layout])
            parts = [part] * len(owners) if turns is None else (part + turns).tolist()
            found = self._files_of[layout, part] = list(zip(owners, parts, strict=True))
        return found

    def boxes_of(self, leaf: int) -> list[StoredBox]:
        owners = set(self.metadata.layouts[self.metadata.leaves[leaf].layout].owners)
        return self.boxes_on({leaf}, owners).get(leaf, [])

    def boxes_on(
        self, leaves: Collection[int], devices: Collection[int]
    ) -> dict[int, list[StoredBox]]:
        """The boxes of some leaves that some devices wrote, by the number of the leaf."""
        with damage_on_contradiction(self.store):
            contents = shard_contents(self.metadata, devices, self.shards.allowance())
        found: dict[int, list[StoredBox]] = {}
        for file, entries in contents.values():
            data_bytes = entries[-1].offset + entries[-1].nbytes
            for entry in entries:
                if entry.leaf in leaves:
                    box = self._stored_box(file, entry, data_bytes)
                    found.setdefault(entry.leaf, []).append(box)
        return {leaf: sorted(boxes) for leaf, boxes in found.items()}

    def _stored_box(self, file: FileEntry, entry: Entry, data_bytes: int) -> StoredBox:
        start, stop = entry.offset, entry.offset + entry.nbytes
        if file.size != file.header_bytes + data_bytes:
            # Some boxes are stored in other sizes. Only the index of its process knows the places.
            blocks = self.shards.digests_of(file, data_bytes).blocks()
            start, stop, _ = stored_range(entry, blocks)
        name, process = self.shards.name_of(file), self.metadata.process_of[file.device]
        at = file.header_bytes + start
        return StoredBox(entry.box, name, process, at, entry.nbytes, stop - start)

    def files(self) -> list[StoredFile]:
        found = [
            StoredFile(self.shards.name_of(f), f.size, f.device, self.metadata.process_of[f.device])
            for f in self.metadata.files
        ]
        if self.metadata.parity is not None:
            for f in self.metadata.parity.files:
                found.append(StoredFile(self.shards.name_of(f), f.size, None, f.process))
        return found

    def is_current(self) -> bool:
        with suppress(OSError, ValueError):
            found = open_ostraka(self.store)
            return found is not None and found.saved.id == self.saved.id
        return False

    def samples(self, how: Sampling = "by version") -> list[tuple[str, str]]:
        return []


def open_ostraka(store: Store) -> OstrakaSource | None:
    """Open the checkpoint in a store. Returns None if Ostraka has not written one there.

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
