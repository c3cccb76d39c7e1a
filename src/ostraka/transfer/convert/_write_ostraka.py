"""Write an Ostraka checkpoint from a source: a save that can be resumed after it was killed.

The id of the save, and with it the name of its directory, follows from the source and the options.
So a second call finds the shard files of the first one, and keeps those that hold the right bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ostraka.common.progress import Count
from ostraka.errors import Damaged, PathInTheWay, SourceChanged
from ostraka.formats import open_source
from ostraka.formats.ostraka.source import open_ostraka
from ostraka.layout import shard_file as _format
from ostraka.layout.box import Box
from ostraka.layout.codec import CompressRule
from ostraka.layout.plan_write import MAX_FILE_BYTES
from ostraka.saving.place import find_temporaries
from ostraka.saving.save import SaveOptions
from ostraka.storage import FileWriter, Store
from ostraka.transfer._streamed import BoxReader, StreamedValue, save_streamed
from ostraka.transfer.convert._workplace import create_or_keep, log_start_over
from ostraka.transfer.convert.work import Array, ItemBox, Work, check_source, digest_of
from ostraka.tree.json_tree import encode
from ostraka.tree.nodes import find_shared


def write_ostraka(work: Work, target: Store, save_id: str, *, compress: CompressRule) -> None:
    """Save the converted tree and read it back, unless the target has it already.

    Raises PathInTheWay if the target has another checkpoint.
    """
    found = open_ostraka(target)
    if found is not None:
        if found.saved.id != save_id:
            raise PathInTheWay(
                f"{target.location} has another checkpoint, which is not replaced; remove it, or "
                "give another path"
            )
        return
    own = _format.shards_directory(save_id)
    if any(_format.is_shards_directory(name) and name != own for name in target.list()):
        log_start_over(target.location)  # The save removes them.
    tree, items = _describe_tree(work)
    store = _ResumedStore(target, own, work.kept)
    digests: dict[ItemBox, str] = {}
    reader = BoxReader(
        lambda boxes: dict(work.read([ItemBox(*numbered) for numbered in boxes])),
        {item: work.items[item].spec for item in items},
    )

    def read(item: int, box: Box) -> Array:
        try:
            array = reader.read(item, box)
        except (Damaged, SourceChanged):
            store.keeps_shards = False  # They can't become a checkpoint.
            raise
        digests[ItemBox(item, box)] = digest_of(array)
        work.progress.add(array.nbytes)
        return array

    values = [
        StreamedValue(work.items[item].spec.shape, partial(read, item), work.band_bytes(item))
        for item in items
    ]
    grids = {number: work.slab_grid(item) for number, item in enumerate(items)}
    saved = work.source.saved
    options = SaveOptions(
        compress=compress,
        metadata=dict(saved.user),
        max_file_bytes=MAX_FILE_BYTES,
        save_id=save_id,
        grids={number: grid for number, grid in grids.items() if grid is not None},
    )
    leaves = tuple(work.items[item].spec for item in items)
    save_streamed(store, replace(saved, tree=tree, leaves=leaves), values, options)
    for name in find_temporaries(target, own):
        target.delete(name)
    numbers = {item: number for number, item in enumerate(items)}
    check_source(work, digests, open_source(target), numbers)


def _describe_tree(work: Work) -> tuple[Any, list[int]]:
    """The tree in the form of `_METADATA`, and the item of each of its arrays."""
    first: dict[int, int] = {}
    """Items by the numbers of their arrays in the source."""
    for at, item in enumerate(work.items):
        first.setdefault(item.number, at)
    saved = work.source.saved
    if work.tree is work.source.tree and len(first) == len(saved.leaves):
        return saved.tree, [first[number] for number in range(len(first))]
    new = {number: at for at, number in enumerate(first)}
    numbers = {item.path: new[item.number] for item in work.items}
    shared = find_shared(work.tree, lambda value: False).variables
    return encode(work.tree, numbers, shared), list(first.values())


class _ResumedStore:
    """The target as a save sees it: the shards of an interrupted conversion are kept.

    They stay after an error, too, unless the error is one of the source.
    """

    def __init__(self, store: Store, directory: str, kept: Count):
        self.location, self.traits = store.location, store.traits
        self.at, self.prepare, self.exists = store.at, store.prepare, store.exists
        self.remove_if_empty, self.lock, self.touch = store.remove_if_empty, store.lock, store.touch
        self.get, self.open, self.look, self.files = store.get, store.open, store.look, store.files
        self.list, self.discard_uploads = store.list, store.discard_uploads
        self.is_link, self.delete_link, self.sync = store.is_link, store.delete_link, store.sync
        self.keeps_shards = True
        self._store = store
        self._directory = directory
        self._kept = kept

    def __str__(self) -> str:
        return self.location

    def create(self, name: str, size: int, *, beside: int = 1, replace: bool = False) -> FileWriter:
        if replace:
            return self._store.create(name, size, beside=beside, replace=True)
        return create_or_keep(self._store, name, size, beside=beside, on_kept=self._kept.add)

    def put(self, name: str, data: bytes, **options: Any) -> None:
        if name == _format.METADATA_NAME:
            options["replaces"] = None  # No other checkpoint is replaced.
        elif not options.get("durable", True):
            self._store.delete(name)
        self._store.put(name, data, **options)

    def delete(self, name: str, **options: Any) -> None:
        if name != self._directory or not self.keeps_shards:
            self._store.delete(name, **options)
