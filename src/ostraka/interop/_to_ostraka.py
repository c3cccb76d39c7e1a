"""Write a checkpoint of ours from a source: a save that can go on after it was killed.

The id of the save, and with it the name of its directory, follows from the source and the options.
Beside each shard file that is finished lies what its index will say of it; a later conversion keeps
the files whose every block is as that says. After the commit these notes are removed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import accumulate
from typing import Any

from ostraka import _box, _format
from ostraka._box import Box
from ostraka._capture import Captured
from ostraka._codec import CompressRule
from ostraka._format import FileDigests, FileEntry
from ostraka._memory import Scratch
from ostraka._parallel import StopSignal, run_all
from ostraka._plan_write import MAX_FILE_BYTES
from ostraka._save import Save
from ostraka.errors import PathInTheWay
from ostraka.formats import open_source
from ostraka.formats._ostraka import open_ostraka
from ostraka.interop._cut import band_bytes, slab_grid
from ostraka.interop._digest_files import digest_range
from ostraka.interop._read_back import check_source
from ostraka.interop._streamed import StreamedValue
from ostraka.interop._work import Array, Piece, Tally, Work, digest_of
from ostraka.storage import Store

_NOTE = ".finished"
_SMALL_BYTES = 1 << 20
_AHEAD_BYTES = 64 << 20


def write_ostraka(
    work: Work, target: Store, save_id: str, *, compress: CompressRule, tally: Tally
) -> bool:
    """Save what is to be converted, and read it back; returns False if it was there already.

    Raises PathInTheWay if another checkpoint is there.
    """
    if _is_there(target, save_id):
        _remove_notes(target, save_id)
        return False
    tree, leaves, items = work.document()
    reader = _Reader(work, items, tally)
    values: list[Any] = [_Value(work, item, partial(reader.read, item)) for item in items]
    saved = work.source.saved
    process_of = (0,) * len(saved.process_of)  # One process writes the shards of all devices.
    captured = Captured(tree, leaves, values, saved.meshes, process_of, {}, {})
    journal = _Notes(save_id, tally)
    grids = {
        number: grid
        for number, item in enumerate(items)
        for grid in [slab_grid(work, item)]
        if grid is not None
    }
    saving = Save(
        target,
        None,
        compress,
        0,
        dict(saved.user),
        MAX_FILE_BYTES,
        None,
        journal=journal,
        grids=grids,
    )
    saving.run(lambda: captured)
    _remove_notes(target, save_id)
    number_of = {item: number for number, item in enumerate(items)}
    check_source(
        work, reader.digests, open_source(target), lambda piece: number_of[piece.item], tally
    )
    return True


class _Value(StreamedValue):
    def __init__(self, work: Work, item: int, work_out: Callable[[Box], Array]):
        super().__init__(work.items[item].spec.shape, work_out)
        self.band_bytes = band_bytes(work, item)


class _Reader:
    """Reads boxes of items, and keeps their digests; small items once, and all together."""

    def __init__(self, work: Work, items: Sequence[int], tally: Tally):
        self.digests: dict[Piece, str] = {}
        self._work = work
        self._tally = tally
        sizes = {item: work.items[item].spec.nbytes for item in items}
        small = [item for item in items if sizes[item] < _SMALL_BYTES]
        sums = accumulate(sizes[item] for item in small)
        self._small = [
            Piece(item, _box.full(work.items[item].spec.shape))
            for item, total in zip(small, sums, strict=True)
            if total <= _AHEAD_BYTES
        ]
        self._are_small = frozenset(piece.item for piece in self._small)
        self._ahead: dict[int, Array] | None = None
        self._lock = threading.Lock()

    def read(self, item: int, box: Box) -> Array:
        if item in self._are_small:
            whole = _box.full(self._work.items[item].spec.shape)
            array = self._read_ahead()[item][_box.slices(box, whole)]
        else:
            ((_, array),) = self._work.read([Piece(item, box)])
        digest = digest_of(array)
        with self._lock:
            self.digests[Piece(item, box)] = digest
        self._tally.add(array.nbytes)
        return array

    def _read_ahead(self) -> dict[int, Array]:
        with self._lock:
            if self._ahead is None:
                self._ahead = {piece.item: array for piece, array in self._work.read(self._small)}
            return self._ahead


def _is_there(target: Store, save_id: str) -> bool:
    found = open_ostraka(target)
    if found is None:
        return False
    if found.saved.id != save_id:
        raise PathInTheWay(
            f"{target.location} has another checkpoint, which is not replaced; remove it, or give "
            "another path"
        )
    return True


def _remove_notes(target: Store, save_id: str) -> None:
    with suppress(OSError):
        for file in target.files(f"{_format.shards_directory(save_id)}/"):
            if file.name.endswith(_NOTE):
                target.delete(file.name)


class _Notes:
    """What is noted of finished files: the part of an index that is about each."""

    def __init__(self, save_id: str, tally: Tally):
        self.save_id = save_id
        self._tally = tally
        self._directory = _format.shards_directory(save_id)

    def note(self, store: Store, name: str, digests: FileDigests) -> None:
        # With the place: an identity holds for it alone.
        data = _format.encode_index(self.save_id, 0, {name: digests}, location=store.location)
        path = f"{self._directory}/{name}{_NOTE}"
        store.delete(path)
        store.put(path, data, durable=False)

    def find_finished(self, store: Store, files: Sequence[FileEntry]) -> Mapping[str, FileDigests]:
        there = {file.name for file in store.files(f"{self._directory}/")}
        scratch, stop = Scratch(), StopSignal()

        def find(file: FileEntry) -> FileDigests | None:
            return self._find(store, file.name, scratch, stop) if file.name in noted else None

        noted = {file.name for file in files if f"{self._directory}/{file.name}{_NOTE}" in there}
        found = run_all(find, files, threads=store.parts.reads_at_once, stop=stop)
        finished = {
            file.name: digests
            for file, digests in zip(files, found, strict=True)
            if digests is not None
        }
        kept = {f"{self._directory}/{name}{end}" for name in finished for end in ("", _NOTE)}
        for name in there - kept:
            store.delete(name)
        self._tally.add(sum(digests.data_bytes for digests in finished.values()), kept=True)
        return finished

    def _find(
        self, store: Store, name: str, scratch: Scratch, stop: StopSignal
    ) -> FileDigests | None:
        """What was noted of a file, if it is that, byte for byte."""
        path = f"{self._directory}/{name}"
        try:
            digests = _format.decode_index(store.get(path + _NOTE))[name]
            with closing(store.open(path)) as reader:
                if reader.size != digests.size:
                    return None
                for block in digests.blocks():
                    stop.check()
                    nbytes = block.file_stop - block.file_start
                    if (
                        digest_range(reader, block.file_start, nbytes, scratch, stop)
                        != block.digest
                    ):
                        return None
        except (OSError, ValueError, KeyError):
            return None
        store.sync(path)  # Its writer may have been killed before it was.
        return digests
