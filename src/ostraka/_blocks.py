"""The shard files of a checkpoint, read block by block, each compared with its digest. No JAX.

All that is said about damage is said here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

from ostraka import _format
from ostraka._allowance import Allowance
from ostraka._format import METADATA_NAME, Block, Entry, FileDigests, FileEntry
from ostraka._header import is_header_too_long
from ostraka._lifetime import RenewedLock
from ostraka._metadata import Metadata
from ostraka._parallel import TooDeep, with_full_stack
from ostraka._parity_format import ParityFile
from ostraka._rebuild import Parities, Rebuild
from ostraka.errors import (
    Damaged,
    DegradedRead,
    OstrakaError,
    Problem,
    StoreError,
    TooLarge,
    UnsupportedFormat,
    headed_list,
    warn_caller,
)
from ostraka.storage import MOST_BYTES, FileReader, Store

NOT_AS_WRITTEN = "its digest is not the one that was written"
PIECE_BYTES = 8 << 20
"""What is passed on at a time."""


@contextmanager
def damage_on_loss(damaged: Callable[[str], Damaged]) -> Generator[None]:
    """Raise Damaged for bytes that the store can't give any more."""
    try:
        yield
    except FileNotFoundError as error:
        raise damaged("it is missing") from error
    except StoreError as error:
        if error.loss is None:
            raise
        raise damaged(error.loss) from error


@contextmanager
def damage_on_contradiction(store: Store) -> Generator[None]:
    """Raise Damaged where `_METADATA` contradicts itself, and say where the checkpoint is."""
    try:
        yield
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"can't read {store.location}: {error}") from error
    except OstrakaError:
        raise
    except ValueError as error:
        raise damaged(store, METADATA_NAME, f"it contradicts itself: {error}") from error


def damaged(store: Store, name: str, found: str, leaves: tuple[str, ...] = ()) -> Damaged:
    return Damaged(store.location, [Problem(name, found, leaves)])


def check_metadata_copy(store: Store, metadata: Metadata) -> None:
    """Raise Damaged if the second copy of `_METADATA` has something else in it.

    That it is missing or ends early, perhaps in zeros, is no damage: older checkpoints have none,
    and it is not synced, so that a crash of the machine may take it. Nothing but `repair` reads it.
    """
    name = f"{_format.shards_directory(metadata.id)}/{_format.METADATA_COPY}"
    try:
        found = store.get(name).rstrip(b"\0")
    except FileNotFoundError:
        return
    except StoreError as error:
        if error.loss is None:
            raise
        raise damaged(store, name, error.loss) from error
    if not store.get(METADATA_NAME).startswith(found):
        raise damaged(store, name, f"it is not the copy of {METADATA_NAME} that was written")


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

    def files_of_parity(self) -> list[ShardFile]:
        """The parity files, to be read block by block. Raises Damaged for the first that is lost.

        For each of them alone, `ShardFile(shards, file, ())`.
        """
        return (
            [] if self.parities is None else [ShardFile(self, f, ()) for f in self.parities.files]
        )

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


class ShardFile:
    """One shard file. Several threads may read it; every byte is checked before it is handed out.

    Every method raises Damaged for bytes that are missing or not as written, and names the leaves
    that they belong to. If the file has parity, `read`, `check_header` and `pass_on` take from that
    what is lost, with a warning; `check` never does.
    """

    def __init__(self, shards: Shards, entry: FileEntry | ParityFile, contents: Sequence[Entry]):
        self.entry = entry
        self.reads_left = 0
        """How many times it will be opened; after the last of them it is closed."""
        self._contents = contents
        data_bytes = contents[-1].offset + contents[-1].nbytes if contents else 0
        self._shards = shards
        self.name = shards.name_of(entry)
        leaves = shards.metadata.leaves
        specs = [leaves[found.leaf].spec for found in contents]
        if contents and is_header_too_long(entry.header_bytes, specs):
            what = f"it says that the header of {entry.name} has {entry.header_bytes:,} bytes, more"
            raise damaged(shards.store, METADATA_NAME, f"{what} than its boxes can need")
        self.digests = shards.digests_of(entry, data_bytes)
        self._reader: FileReader | None = None
        self._lost: Damaged | None = None
        """Why it can't be opened, if all of it can be rebuilt."""
        self._rebuild: Rebuild | None = None
        self._rebuilding = threading.Lock()
        self._lock = threading.Lock()
        self._is_header_checked = False

    @cached_property
    def blocks(self) -> list[Block]:
        """The header, then the blocks of its data."""
        return self.digests.blocks()

    @contextmanager
    def opened(self) -> Generator[None]:
        """Have it open, of the right size; closed when the last of `reads_left` is done."""
        with self._lock:
            if self._reader is None and self._lost is None:
                try:
                    self._reader = self._open()
                except Damaged as error:
                    if not self._has_parity:
                        raise
                    self._lost = error
        yield
        with self._lock:
            self.reads_left -= 1
            if self.reads_left == 0:
                self.close()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._rebuild is not None:
            self._rebuild.close()

    @cached_property
    def _has_parity(self) -> bool:
        parities, entry = self._shards.parities, self.entry
        return parities is not None and isinstance(entry, FileEntry) and parities.covers(entry)

    def _rebuilt(self, start: int, stop: int, lost: Damaged) -> Any:
        """The range of whole blocks, which are lost, from parity. Raises Damaged."""
        if not self._has_parity:
            raise lost
        with self._rebuilding:
            self._rebuild = self._rebuild or self._shards.open_rebuild(self.entry)
        assert self._rebuild is not None
        try:
            found = self._rebuild.read(start, stop)
        except Damaged as more:
            raise Damaged(lost.path, [*lost.problems, *more.problems]) from more
        self._shards.warn_of(lost)
        return found

    def check_header(self) -> None:
        """Compare the header with its digest, once."""
        with self._lock:
            if not self._is_header_checked:
                header = bytearray(self.entry.header_bytes)
                try:
                    self._fill(0, len(header), [header], self.blocks[:1])
                    self._compare(self.blocks[0], [header])
                except Damaged as error:
                    self._rebuilt(0, len(header), error)
                self._is_header_checked = True

    def read(
        self, first: int, last: int, buffers: Sequence[Any], take_memory: Callable[[int], Any]
    ) -> int:
        """Fill `buffers` with the data of the blocks from `first` to before `last`.

        `take_memory` gives memory for what is stored of compressed blocks. Returns how many bytes
        of the file that took.
        """
        blocks = self.blocks[first:last]
        try:
            return self._read(blocks, buffers, take_memory)
        except Damaged as error:
            start, stop = blocks[0].file_start, blocks[-1].file_stop
            stored = self._rebuilt(start, stop, error)
            lengths = [block.stop - block.start for block in blocks]
            places = zip(blocks, _format.regroup(iter(buffers), lengths), strict=True)
            for block, pieces in places:
                of_block = stored[block.file_start - start : block.file_stop - start]
                self._unpack(block, of_block, pieces)
            return stop - start

    def _read(
        self, blocks: Sequence[Block], buffers: Sequence[Any], take_memory: Callable[[int], Any]
    ) -> int:
        start, stop = blocks[0].file_start, blocks[-1].file_stop
        lengths = [block.stop - block.start for block in blocks]
        places = zip(blocks, _format.regroup(iter(buffers), lengths), strict=True)
        if not any(block.result for block in blocks):
            self._fill(start, stop, buffers, blocks)
            for block, pieces in places:
                self._compare(block, pieces)
            return stop - start
        stored = take_memory(stop - start)
        self._fill(start, stop, [stored], blocks)
        for block, pieces in places:
            self._unpack(block, stored[block.file_start - start : block.file_stop - start], pieces)
        return stop - start

    def _unpack(self, block: Block, stored: Any, pieces: Sequence[Any]) -> None:
        """Compare what is stored of a block, and fill `pieces` with its data."""
        import numpy as np  # only here: a look at the tree does without

        self._compare(block, [stored])
        data = stored
        if block.result:
            data = pieces[0] if len(pieces) == 1 else np.empty(block.stop - block.start, np.uint8)
            self._decode(block, stored, data)
        if data is pieces[0]:
            return
        start = 0
        for piece in pieces:
            piece[:] = data[start : start + len(piece)]
            start += len(piece)

    def _decode(self, block: Block, stored: Any, data: Any) -> None:
        """Decompress a block, and compare the result with its digest."""
        from ostraka import _codec

        found = f"bytes {block.file_start:,} to {block.file_stop:,}"
        try:
            _codec.decode(stored, data)
        except _codec.Undecodable as error:
            found += f" can't be decompressed: {error}"
            raise self._block_damaged(found, block) from error
        if _format.block_digest([data]) != block.result:
            found += " do not decompress to what was saved"
            raise self._block_damaged(found, block)

    def check(self, block: Block, scratch: memoryview) -> None:
        """Compare a block with its digest, and keep nothing of it.

        It is read in pieces that fit into `scratch`, whatever its length, unless it is compressed.
        """
        if block.result:
            import numpy as np

            stored = np.empty(block.file_stop - block.file_start, np.uint8)
            self._fill(block.file_start, block.file_stop, [stored], [block])
            self._unpack(block, stored, [np.empty(block.stop - block.start, np.uint8)])
            return

        def pieces() -> Iterator[memoryview]:
            for at in range(block.file_start, block.file_stop, len(scratch)):
                piece = scratch[: block.file_stop - at]
                self._fill(at, at + len(piece), [piece], [block])
                yield piece

        self._compare(block, pieces())

    def pass_on(
        self,
        blocks: Sequence[Block],
        take_memory: Callable[[int], Any],
        write: Callable[[int, Any], None],
    ) -> None:
        """Give the bytes of adjacent blocks, as the file has them, to `write` with their offsets.

        They are compared with their digests first; only a block of more than `PIECE_BYTES`, which
        comes in pieces, after its last one. `take_memory` gives the memory for a piece.
        """

        def read(start: int, stop: int) -> Any:
            memory = take_memory(stop - start)
            self._fill(start, stop, [memory], run)
            return memory

        def pieces(start: int, stop: int) -> Iterator[Any]:
            for at in range(start, stop, PIECE_BYTES):
                piece = read(at, min(at + PIECE_BYTES, stop))
                write(at, piece)
                yield piece

        for run in _runs(blocks):
            start, stop = run[0].file_start, run[-1].file_stop
            if stop - start > PIECE_BYTES:
                self._compare(run[0], pieces(start, stop))
                continue
            try:
                memory = read(start, stop)
                for block in run:
                    stored = memory[block.file_start - start : block.file_stop - start]
                    self._compare(block, [stored])
            except Damaged as error:
                memory = self._rebuilt(start, stop, error)
            write(start, memory)

    def damaged(
        self, found: str, start: int = 0, stop: int = 0, span: tuple[int, int] | None = None
    ) -> Damaged:
        """The error for `[start, stop)` of its data; an empty range is in no leaf.

        `span` are the bytes of the file, if not all of it is meant.
        """
        problem = lost_in(self._shards, self.entry, self._contents, found, start, stop, span)
        return Damaged(self._shards.store.location, [problem])

    def _open(self) -> FileReader:
        size, end = self.entry.size, self.blocks[-1].stop
        with damage_on_loss(lambda found: self.damaged(found, 0, end)):
            reader = self._shards.store.open(self.name)
        if reader.size != size:
            reader.close()
            if reader.size > size:  # All bytes of all leaves are there.
                raise self.damaged(other_size(reader.size, size), span=(size, reader.size))
            first = reader.size
            lost = next(block for block in self.blocks if block.file_stop > first)
            at = lost.start if lost.result else lost.stop - (lost.file_stop - first)
            raise self.damaged(other_size(reader.size, size), at, end, (first, size))
        return reader

    def _fill(self, start: int, stop: int, buffers: Sequence[Any], blocks: Sequence[Block]) -> None:
        """Read a range of the file, which is that of `blocks` or a part of it."""
        if self._lost is not None:
            raise Damaged(self._lost.path, self._lost.problems)
        assert self._reader is not None
        first, last = blocks[0].start, blocks[-1].stop
        with damage_on_loss(lambda found: self.damaged(found, first, last, (start, stop))):
            count = self._reader.read_into(start, buffers)
        if count != stop - start:
            lost = next((b.start for b in blocks if b.file_stop > start + count), first)
            span = (start + count, stop)
            raise self.damaged(f"it ends at byte {start + count:,}", lost, last, span)

    def _block_damaged(self, found: str, block: Block) -> Damaged:
        return self.damaged(found, block.start, block.stop, (block.file_start, block.file_stop))

    def _compare(self, block: Block, pieces: Any) -> None:
        if _format.block_digest(pieces) != block.digest:
            what = f"bytes {block.file_start:,} to {block.file_stop:,} are not as they were"
            if block.file_start == 0:
                what = "its header is not as it was"
            raise self._block_damaged(f"{what} written", block)


def _runs(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Adjacent blocks of at most `PIECE_BYTES` together; what is larger comes alone."""
    run: list[Block] = []
    for block in blocks:
        if run and block.file_stop - run[0].file_start > PIECE_BYTES:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def other_size(found: int, written: int) -> str:
    return f"it has {found:,} bytes where {written:,} were written"
