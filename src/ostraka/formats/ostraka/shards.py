"""All shard files of a checkpoint: their names, their digests, their parity. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, cast

from ostraka.common.threads import RenewedLock, TooDeep, with_full_stack
from ostraka.errors import Damaged, Problem, TooLarge
from ostraka.formats.ostraka.damage import (
    boxes_between,
    damage_on_loss,
    damaged,
    index_problem,
    other_size,
)
from ostraka.formats.ostraka.rebuild import Parities, Rebuild
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import Metadata
from ostraka.layout.parity_file import ParityFile
from ostraka.layout.runs import Allowance
from ostraka.layout.shard_file import METADATA_NAME, Entry, FileDigests, FileEntry
from ostraka.storage import MOST_BYTES, Store


class Shards:
    """All shard files of a checkpoint. Process indexes are read when they are first needed."""

    def __init__(self, store: Store, metadata: Metadata):
        self.store = store
        self.metadata = metadata
        self._directory = _format.shards_directory(metadata.id)
        self._indexes: dict[int, dict[str, FileDigests]] = {}
        self._reading = RenewedLock()

    @cached_property
    def parities(self) -> Parities | None:
        """The parity files, if it was saved with parity."""
        parity = self.metadata.parity
        return None if parity is None else Parities(self, parity)

    def path_of(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def name_of(self, file: FileEntry | ParityFile) -> str:
        return self.path_of(file.name)

    def name_of_index(self, process: int) -> str:
        return self.path_of(_format.index_name(process))

    def allowance(self) -> Allowance:
        """A limit on memory for descriptions of shard files, by the size of these files."""
        return Allowance(lambda: sum(file.size for file in self.store.files(self.path_of(""))))

    def host_of(self, process: int) -> str | None:
        """The host of a process, as the save noted it."""
        hosts: Any = self.metadata.writer.get("hosts")
        known = cast("list[Any]", hosts) if isinstance(hosts, list) else []
        host = known[process] if process < len(known) else None
        return host if isinstance(host, str) else None

    def listed_by(self, process: int) -> dict[str, FileDigests]:
        """The digests of all files in the index of a process. Raises Damaged if it is damaged."""
        with self._reading.lock:
            index = self._indexes.get(process)
            if index is None:
                index = self._indexes[process] = self._decoded(process, self.find_index(process))
        return index

    def digests_of(self, file: FileEntry | ParityFile, data_bytes: int) -> FileDigests:
        """The digests of a file with so many bytes of data. Raises Damaged if they don't fit it."""
        found = self.stored_digests(file)
        if isinstance(file, ParityFile):
            return found
        if found.data_bytes != data_bytes:
            raise self._is_other(file)
        longest = max(found.lengths[1:], default=0)
        if longest > _format.MOST_BLOCK_BYTES:
            what = f"it has a block of {longest:,} bytes in {file.name}, more than any block has"
            raise self._index_damaged(self.metadata.process_of[file.device], what)
        return found

    def stored_digests(self, file: FileEntry | ParityFile) -> FileDigests:
        """The digests of a file of any contents. Raises Damaged if they are damaged."""
        if isinstance(file, ParityFile):
            assert self.parities is not None
            return self.parities.digests_of(file)
        process = self.metadata.process_of[file.device]
        found = self.listed_by(process).get(file.name)
        if found is None or (found.size, found.lengths[:1]) != (file.size, (file.header_bytes,)):
            raise self._is_other(file)
        return found

    def provide_index(self, process: int, data: bytes) -> None:
        """Use `data`, found elsewhere, as the index of a process."""
        self._indexes[process] = self._decoded(process, data)

    def _is_other(self, file: FileEntry) -> Damaged:
        what = f"it does not describe {file.name} as {METADATA_NAME} does"
        return self._index_damaged(self.metadata.process_of[file.device], what)

    def open_rebuild(self, file: FileEntry | ParityFile) -> Rebuild | None:
        """Rebuilds lost bytes of a file. None if no parity covers it."""
        if self.parities is None or file.name not in self.parities.places:
            return None
        return Rebuild(self.parities, file)

    def read_index(self, process: int) -> bytes:
        """The index of a process, as it was written. Raises Damaged."""
        name = self.name_of_index(process)
        expected = self.metadata.indexes.get(process)
        if expected is None:
            raise damaged(self.store, METADATA_NAME, f"it has no digest of {name}")
        with damage_on_loss(partial(self._index_damaged, process)):
            try:
                data = self.store.get(name, min(expected.size, MOST_BYTES))
            except TooLarge as error:
                if expected.size > MOST_BYTES:
                    raise
                found = other_size(error.size, expected.size)
                raise self._index_damaged(process, found) from error
        if (problem := index_problem(data, expected)) is not None:
            raise self._index_damaged(process, problem)
        return data

    def find_index(self, process: int) -> bytes:
        """The index of a process, or the copy that a parity file has of it. Raises Damaged."""
        try:
            return self.read_index(process)
        except Damaged as error:
            if self.parities is None or (copy := self.parities.index_copy(process)) is None:
                raise
            self.parities.warn_of(error)
            return copy

    def _decoded(self, process: int, data: bytes) -> dict[str, FileDigests]:
        try:
            return with_full_stack(lambda: _format.decode_index(data))
        except (ValueError, TooDeep) as error:
            raise self._index_damaged(process, f"it can't be read ({error})") from error

    def _index_damaged(self, process: int, found: str) -> Damaged:
        name = self.name_of_index(process)
        problem = Problem(name, found, process=process, host=self.host_of(process))
        return Damaged(self.store.location, [problem])


def lost_in(
    shards: Shards,
    file: FileEntry | ParityFile,
    contents: Sequence[Entry],
    found: str,
    start: int,
    stop: int,
    span: tuple[int, int] | None = None,
) -> Problem:
    """The problem for `[start, stop)` of the data of a shard file, with its leaves and boxes."""
    boxes = boxes_between(shards.metadata.leaves, contents, start, stop)
    is_parity = isinstance(file, ParityFile)
    process = file.process if is_parity else shards.metadata.process_of[file.device]
    leaves = tuple(lost.leaf for lost in boxes)
    host = shards.host_of(process)
    return Problem(shards.name_of(file), found, leaves, boxes, span, process, host)
