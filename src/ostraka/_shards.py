"""All shard files of a checkpoint: their names, their digests, their parity. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, cast

from ostraka import _format
from ostraka._allowance import Allowance
from ostraka._damage import NOT_AS_WRITTEN, damage_on_loss, damaged, other_size
from ostraka._format import METADATA_NAME, Entry, FileDigests, FileEntry
from ostraka._lifetime import RenewedLock
from ostraka._metadata import Metadata
from ostraka._parallel import TooDeep, with_full_stack
from ostraka._parity_format import ParityFile
from ostraka._rebuild import Parities, Rebuild
from ostraka.errors import (
    Damaged,
    DegradedRead,
    Problem,
    TooLarge,
    headed_list,
    warn_caller,
)
from ostraka.storage import MOST_BYTES, Store


class Shards:
    """All shard files of a checkpoint. Process indexes are read when they are first needed."""

    def __init__(self, store: Store, metadata: Metadata):
        self.store = store
        self.metadata = metadata
        self._directory = _format.shards_directory(metadata.id)
        self._indexes: dict[int, dict[str, FileDigests]] = {}
        self._reading = RenewedLock()
        self._warning = RenewedLock()
        self.has_warned = False
        """Whether it has been said that it is read by its parity; that is said once."""

    @cached_property
    def parities(self) -> Parities | None:
        """What can bring lost files back, if it was saved with parity."""
        parity = self.metadata.parity
        return None if parity is None else Parities(self, parity)

    def path_of(self, name: str) -> str:
        return f"{self._directory}/{name}"

    def name_of(self, file: FileEntry | ParityFile) -> str:
        return f"{self._directory}/{file.name}"

    def name_of_index(self, process: int) -> str:
        return f"{self._directory}/{_format.index_name(process)}"

    def allowance(self) -> Allowance:
        """The memory that a look at the contents of shard files may take, by what these hold."""
        return Allowance(self._held_bytes)

    def _held_bytes(self) -> int:
        return sum(file.size for file in self.store.files(f"{self._directory}/"))

    def host_of(self, process: int) -> str | None:
        """The host of a process, as the save noted it."""
        hosts: Any = self.metadata.writer.get("hosts")
        if not isinstance(hosts, list) or process >= len(cast(list[Any], hosts)):
            return None
        host = cast(list[Any], hosts)[process]
        return host if isinstance(host, str) else None

    def listed_by(self, process: int) -> dict[str, FileDigests]:
        """All files that the index of a process describes. Raises Damaged if the index is."""
        with self._reading.lock:
            index = self._indexes.get(process)
            if index is None:
                index = self._indexes[process] = self._decode_index(process)
        return index

    def digests_of(self, file: FileEntry | ParityFile, data_bytes: int) -> FileDigests:
        """The digests of a file that holds so much. Raises Damaged if its index is."""
        if isinstance(file, ParityFile):
            assert self.parities is not None
            return self.parities.digests_of(file)
        found = self.stored_digests(file)
        if found.data_bytes != data_bytes:
            raise self._is_other(file)
        longest = max(found.lengths[1:], default=0)
        if longest > _format.MOST_BLOCK_BYTES:
            what = f"it has a block of {longest:,} bytes in {file.name}, more than any block has"
            raise self._index_damaged(self.metadata.process_of[file.device], what)
        return found

    def stored_digests(self, file: FileEntry) -> FileDigests:
        """The digests of a shard file, whatever it holds. Raises Damaged if its index is."""
        process = self.metadata.process_of[file.device]
        found = self.listed_by(process).get(file.name)
        if found is None or (found.size, found.lengths[:1]) != (file.size, (file.header_bytes,)):
            raise self._is_other(file)
        return found

    def provide_index(self, process: int, data: bytes) -> None:
        """Take the index of a process from elsewhere: the bytes that were written."""
        self._indexes[process] = self._decoded(process, data)

    def _is_other(self, file: FileEntry) -> Damaged:
        what = f"it does not describe {file.name} as {METADATA_NAME} does"
        return self._index_damaged(self.metadata.process_of[file.device], what)

    def rebuild(self, file: FileEntry, start: int, stop: int) -> Any:
        """Bytes `[start, stop)` of a shard file as it was stored, from the others of its group.

        A numpy array of uint8. They are compared with the digests of the file; if its index is
        lost, and every copy of it, all that they are made of is compared instead. Raises Damaged,
        naming what else is lost, if parity can't do it.
        """
        rebuild = self.open_rebuild(file)
        if rebuild is None:
            raise damaged(self.store, self.name_of(file), "no parity was saved for it")
        try:
            return rebuild.read(start, stop)
        finally:
            rebuild.close()

    def open_rebuild(self, file: FileEntry | ParityFile) -> Rebuild | None:
        """As `rebuild`, for many ranges of one file; None if it has no parity."""
        if isinstance(file, ParityFile) or self.parities is None or not self.parities.covers(file):
            return None
        return Rebuild(self, self.parities, file)

    def warn_of(self, found: Damaged) -> None:
        """Say, once, that this checkpoint is read by its parity, and what is damaged."""
        with self._warning.lock:
            if self.has_warned or not self._is_there():
                return
            self.has_warned = True
        problems = dict.fromkeys(found.problems)
        there = {file.name: file.size for file in self.store.files(f"{self._directory}/")}
        named = {problem.file for problem in problems}
        for file in self.metadata.files:
            name = self.name_of(file)
            if name not in named and there.get(name) != file.size:
                found_size = there.get(name)
                what = "it is missing" if found_size is None else other_size(found_size, file.size)
                problems[Problem(name, what)] = None
        where = self.store.location
        head = f"checkpoint {where} is read with the help of its parity"
        head += f" (`ostraka repair {where}` mends it)"
        warn_caller(DegradedRead(headed_list(head, list(map(str, problems)))))

    def _is_there(self) -> bool:
        """Whether no other save has replaced this checkpoint, whose files are gone then."""
        try:
            head = self.store.get(METADATA_NAME)[:200]
        except OSError:
            return False
        return self.metadata.id.encode() in head

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
        if len(data) != expected.size:
            raise self._index_damaged(process, other_size(len(data), expected.size))
        if _format.digest(data) != expected.digest:
            raise self._index_damaged(process, NOT_AS_WRITTEN)
        return data

    def find_index(self, process: int) -> bytes:
        """The index of a process, or the copy that a parity file has of it. Raises Damaged."""
        try:
            return self.read_index(process)
        except Damaged as error:
            known = process in self.metadata.indexes and self.parities is not None
            copy = self.parities.index_copy(process) if known and self.parities else None
            if copy is None:
                raise
            self.warn_of(error)
            return copy

    def _decode_index(self, process: int) -> dict[str, FileDigests]:
        return self._decoded(process, self.find_index(process))

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
    """What is wrong with `[start, stop)` of the data of a shard file, with all that lies there."""
    boxes = _format.boxes_between(shards.metadata.leaves, contents, start, stop)
    is_parity = isinstance(file, ParityFile)
    process = file.process if is_parity else shards.metadata.process_of[file.device]
    return Problem(
        shards.name_of(file),
        found,
        tuple(lost.leaf for lost in boxes),
        boxes,
        span,
        process,
        shards.host_of(process),
    )
