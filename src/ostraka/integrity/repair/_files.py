"""Find the blocks that files have lost, and write such files anew. No JAX.

The lost bytes come from other copies, from parity, or from the live tree (`_live`).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ostraka.common.progress import Count
from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Damaged, OstrakaError, Problem, StoreError, count_of, describe
from ostraka.formats.buffers import Scratch
from ostraka.formats.ostraka.damage import (
    PIECE_BYTES,
    loss_of,
    matches,
    other_size,
    unmatched_blocks,
)
from ostraka.formats.ostraka.rebuild import Rebuild
from ostraka.formats.ostraka.shard_reader import ShardFile
from ostraka.formats.ostraka.shards import Shards
from ostraka.formats.ostraka.source import open_ostraka
from ostraka.integrity._report import ANOTHER_COPY, RepairedFile, RepairResult
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import Metadata, shard_contents
from ostraka.layout.parity_file import ParityFile
from ostraka.layout.shard_file import METADATA_NAME, Block, Entry, FileEntry
from ostraka.processes.operation import Operation
from ostraka.saving.place import Place
from ostraka.storage import FileReader, FileWriter, Store

if TYPE_CHECKING:
    from ostraka.integrity.repair._live import LiveOrigin

Array = np.ndarray[Any, Any]

_NO_FILE = frozenset({errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO})
"""Errors for something that has the name of a file and is none. A repair replaces it."""

PARITY = "parity"
_RANGE_BYTES = 8 << 20
"""Bytes that a thread rebuilds at a time."""


@dataclass(frozen=True, slots=True)
class RepairJob:
    """The options of a repair, on one process."""

    store: Store
    copies: Sequence[Store]
    operation: Operation
    place: Place
    dry_run: bool
    bytes_read: Count
    bytes_written: Count = field(default_factory=Count)

    @property
    def process(self) -> int:
        return self.operation.process

    def has_share(self, process: int) -> bool:
        """True if this process looks at the files that a process of the save has written."""
        return process % self.operation.count == self.operation.process

    def put(self, name: str, data: bytes) -> None:
        """Replace a small file, unless this is a dry run."""
        if not self.dry_run:
            self.store.put(name, data, check=self.place.check)
            self.bytes_written.add(len(data))

    @contextmanager
    def replacing(self, name: str, size: int) -> Generator[FileWriter | None]:
        """Replace a file atomically at the end of the block. Yields None in a dry run."""
        if self.dry_run:
            yield None
            return
        writer = self.store.create(name, size, replace=True)
        try:
            yield writer
            self.operation.check()
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        self.bytes_written.add(size)


@dataclass(frozen=True, slots=True)
class SavedShard:
    """A shard file as it was written."""

    name: str
    entry: FileEntry
    contents: Sequence[Entry]
    blocks: Sequence[Block]
    """The header, then the blocks of its data."""
    metadata: Metadata

    def within(self, number: int) -> list[Entry]:
        """The boxes with bytes in a block."""
        start, stop = self.blocks[number][:2]
        return [e for e in self.contents if e.offset < stop and e.offset + e.nbytes > max(start, 0)]

    def leaves(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """The leaves that have bytes in some blocks."""
        entries = (entry for number in numbers for entry in self.within(number))
        return tuple(dict.fromkeys(self.metadata.leaves[e.leaf].spec.path for e in entries))

    def header(self) -> bytes:
        """The header of the file, which follows from `_METADATA` and the blocks."""
        stored = {}
        if any(block.result for block in self.blocks):
            stored = {e.leaf: _format.stored_range(e, self.blocks) for e in self.contents}
        return _format.encode_header(
            self.contents,
            self.metadata.leaves,
            self.metadata.id,
            self.entry.header_bytes,
            version=self.metadata.version,
            stored=stored,
        )


class Absent(Exception):
    """An origin lacks some bytes. The text completes "ORIGIN: …"."""


class CopyOrigin:
    """Another copy of the same save, or any checkpoint with some of the same bytes."""

    def __init__(self, store: Store, metadata: Metadata, bytes_read: Count):
        self.name = store.location
        self._shards = Shards(store, metadata)
        self._bytes_read = bytes_read
        self._readers: dict[str, FileReader | None] = {}
        self._by_digest: dict[tuple[str, int], tuple[str, int]] | None = None
        self._lock = threading.Lock()

    def read(self, shard: SavedShard, number: int) -> Any:
        block = shard.blocks[number]
        nbytes = block.file_stop - block.file_start
        try:
            data = self._read(self._shards.name_of(shard.entry), block.file_start, nbytes)
            if data is not None and matches(block, [data]):
                return data
            with self._lock:
                if self._by_digest is None:
                    self._by_digest = dict(self._find_blocks())
            other = self._by_digest.get((block.digest, nbytes))
            data = None if other is None else self._read(*other, nbytes)
        except OSError as error:
            raise Absent(describe(error)) from error
        if data is None:
            raise Absent("it does not have these bytes")
        return data

    def read_index(self, process: int) -> bytes | None:
        """Read the index of a process of the same save. Returns None if it is damaged here, too."""
        with suppress(OSError, Damaged):
            data = self._shards.read_index(process)
            self._bytes_read.add(len(data))
            return data
        return None

    def close(self) -> None:
        for reader in filter(None, self._readers.values()):
            reader.close()
        self._readers.clear()

    def _read(self, name: str, start: int, nbytes: int) -> Any:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = None
                with suppress(FileNotFoundError):
                    self._readers[name] = self._shards.store.open(name)
            reader = self._readers[name]
        if reader is None or reader.size < start + nbytes:
            return None
        data = bytearray(nbytes)
        count = reader.read_into(start, [data])
        self._bytes_read.add(count)
        return data if count == nbytes else None

    def _find_blocks(self) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
        """By digest and length, the file and the offset of each block, if this is another save."""
        try:
            source = open_ostraka(self._shards.store)
            if source is None or source.metadata.id == self._shards.metadata.id:
                return
            shards = source.shards
            files = shard_contents(source.metadata, None, shards.allowance()).values()
        except (OstrakaError, ValueError):
            return
        for entry, contents in files:
            data_bytes = contents[-1].offset + contents[-1].nbytes
            with suppress(Damaged):  # Its index can't be read.
                for block in shards.digests_of(entry, data_bytes).blocks()[1:]:
                    length = block.file_stop - block.file_start
                    yield (block.digest, length), (shards.name_of(entry), block.file_start)


@dataclass(slots=True)
class _Window:
    """The part of a file that was rebuilt last. Blocks are asked for in order."""

    rebuild: Rebuild
    members: int
    start: int = 0
    stop: int = 0
    data: tuple[Array, ...] = ()


class ParityOrigin:
    """Parity, which rebuilds a lost file from the others of its group."""

    name = PARITY

    def __init__(self, shards: Shards, bytes_read: Count):
        self._shards = shards
        self._bytes_read = bytes_read
        self._windows: dict[str, _Window] = {}
        self._threads = max(2, shards.store.traits.reads_at_once // 2)

    def read(self, shard: SavedShard, number: int) -> Any:
        block = shard.blocks[number]
        window = self._windows.get(shard.name)
        if window is None:
            parities = self._shards.parities
            rebuild = self._shards.open_rebuild(shard.entry)
            if parities is None or rebuild is None:
                raise Absent("it does not cover this file")
            members = len(parities.members_of(parities.places[shard.entry.name][0]))
            window = self._windows[shard.name] = _Window(rebuild, members)
        if not window.start <= block.file_start < block.file_stop <= window.stop:
            try:
                self._move(window, shard, number)
            except Damaged as error:
                # The first is about the file itself, the others are why.
                raise Absent("; ".join(map(str, error.problems[1:] or error.problems))) from error
        at = window.start
        for piece in window.data:
            if at <= block.file_start and block.file_stop <= at + len(piece):
                return piece[block.file_start - at : block.file_stop - at]
            at += len(piece)
        raise AssertionError("a range ends inside a block")

    def close(self) -> None:
        for window in self._windows.values():
            window.rebuild.close()
        self._windows.clear()

    def _move(self, window: _Window, shard: SavedShard, number: int) -> None:
        """Rebuild some ranges of whole blocks, each in a thread."""
        ranges = list(islice(_ranges(shard.blocks[number:]), self._threads))
        data = run_all(
            lambda one: window.rebuild.read(*one),
            ranges,
            threads=self._threads,
            stop=StopSignal(),
        )
        window.start, window.stop, window.data = ranges[0][0], ranges[-1][1], tuple(data)
        self._bytes_read.add(window.members * (window.stop - window.start))


def _ranges(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    start = blocks[0].file_start
    for block in blocks:
        if block.file_stop - start >= _RANGE_BYTES or block is blocks[-1]:
            yield start, block.file_stop
            start = block.file_stop


Origin: TypeAlias = "CopyOrigin | ParityOrigin | LiveOrigin"
"""A source of lost blocks. Several threads may ask at once, each about a file of its own.

`read` returns the stored bytes of a block, not yet compared with its digest. It raises Absent.
"""


# The checkpoint as it was saved


class FoundMetadata(NamedTuple):
    """The location of a `_METADATA`, and the damage of the checkpoint's own."""

    copy: int
    """OWN, or the number of the other copy that has it."""
    name: str
    found: str
    """The damage of the checkpoint's own `_METADATA`, or the empty string."""
    was_committed: bool
    """True if the save is known to have been committed: its `_METADATA` begins with its id."""


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """The checkpoint as it was saved, by its `_METADATA`, and the origins of bytes it has lost."""

    found: FoundMetadata
    data: bytes
    """The bytes of `_METADATA`."""
    metadata: Metadata
    shards: Shards
    contents: Mapping[tuple[int, int], tuple[FileEntry, list[Entry]]]
    """Shard files and their boxes, by device and part."""
    copies: Sequence[CopyOrigin]
    live: LiveOrigin | None
    origins: Sequence[Origin]
    """Both, and parity if there is any. The best comes first."""

    def shard(self, device: int, part: int) -> SavedShard:
        """A shard file. Raises Damaged if its index contradicts `_METADATA`."""
        file, contents = self.contents[device, part]
        digests = self.shards.digests_of(file, contents[-1].offset + contents[-1].nbytes)
        name = self.shards.name_of(file)
        return SavedShard(name, file, contents, digests.blocks(), self.metadata)


# Shard files


@dataclass(frozen=True, slots=True)
class LostFile:
    """A shard file with damage."""

    device: int
    part: int
    found: str
    blocks: tuple[int, ...]
    """The numbers of lost blocks. Empty if the file is only too long."""


def find_lost(job: RepairJob, shard: SavedShard, scratch: Scratch) -> LostFile | None:
    """Compare every block of a file with its digest. Returns None if all of them match."""
    entry = shard.entry
    opened = open_or_say(job.store, shard.name)
    if isinstance(opened, str):
        return LostFile(entry.device, entry.part, opened, tuple(range(len(shard.blocks))))

    def on_read(nbytes: int) -> None:
        job.operation.check()
        job.bytes_read.add(nbytes)

    with closing(opened) as reader:
        memory = scratch.take(PIECE_BYTES)
        lost = tuple(n for n, _ in unmatched_blocks(reader, shard.blocks, memory, on_read))
        if reader.size != entry.size:
            found = other_size(reader.size, entry.size)
        elif lost:
            found = f"{count_of(len(lost), 'block')} of {len(shard.blocks):,} not as written"
        else:
            return None
    return LostFile(entry.device, entry.part, found, lost)


def open_or_say(store: Store, name: str) -> FileReader | str:
    """Open a file, or return the reason why it can't be opened."""
    try:
        return store.open(name)
    except OSError as error:
        if (loss := loss_of(error)) is None and error.errno not in _NO_FILE:
            raise
        return loss or "it is not a file"


def repair_shard(
    job: RepairJob, origins: Sequence[Origin], shard: SavedShard, lost: LostFile
) -> RepairResult:
    """Replace a file atomically, or say why that is impossible. Until then it stays unchanged."""
    leaves, size = shard.leaves(lost.blocks), shard.entry.size
    used: dict[str, None] = {}
    missing = set(lost.blocks)
    opened = open_or_say(job.store, shard.name)
    left = nullcontext() if isinstance(opened, str) else closing(opened)
    try:
        with left as reader, job.replacing(shard.name, size) as writer:
            for number, block in enumerate(shard.blocks):
                job.operation.check()
                data = None
                if number not in missing and reader is not None:
                    data = _read_again(job, reader, block)
                if data is None:
                    data, origin = _read_from_origins(origins, shard, number)
                    used[origin] = None
                if writer is not None:
                    writer.write(block.file_start, [data])
    except Absent as error:
        return Problem(shard.name, f"{lost.found}, and can't be repaired: {error}", leaves)
    by = tuple(used) or ("what is left of it",)
    return RepairedFile(shard.name, lost.found, leaves, by, size, job.process)


def _read_again(job: RepairJob, reader: FileReader, block: Block) -> Any:
    """A block of the file itself, or None if it does not match any more."""
    data = bytearray(block.file_stop - block.file_start)
    with suppress(StoreError):
        job.bytes_read.add(reader.read_into(block.file_start, [data]))
    return data if matches(block, [data]) else None


def _read_from_origins(
    origins: Sequence[Origin], shard: SavedShard, number: int
) -> tuple[Any, str]:
    """The bytes of a block, compared with its digest, and the name of their origin.

    Raises Absent with the reason of each origin that could not give them.
    """
    block = shard.blocks[number]
    if number == 0 and matches(block, [data := shard.header()]):
        return data, METADATA_NAME
    reasons: list[str] = []
    for origin in origins:
        try:
            data = origin.read(shard, number)
        except Absent as error:
            reasons.append(f"{origin.name}: {error}")
            continue
        if matches(block, [data]):
            return data, origin.name
        reasons.append(f"{origin.name}: it has other bytes")
    live = "call ostraka.repair(path, tree) in the program that has the model"
    raise Absent("; ".join(reasons) or f"nothing else has its bytes; {ANOTHER_COPY}, or {live}")


# Parity files


def find_lost_parity(job: RepairJob, shards: Shards, file: ParityFile, *, is_summed: bool) -> str:
    """Compare a parity file. Returns its damage in words, or the empty string.

    If `is_summed`, its parity was used and proved just now, and is not read again.
    """
    assert shards.parities is not None
    known = range(1, 1 + shards.parities.layout_of(file).blocks) if is_summed else ()
    memory = memoryview(bytearray(PIECE_BYTES))
    try:
        parity = ShardFile(shards, file, ())
        parity.reads_left = 1
        with closing(parity), parity.opened():
            for number, block in enumerate(parity.blocks):
                if number not in known:
                    parity.check(block, memory)
                    job.bytes_read.add(block.file_stop - block.file_start)
    except Damaged as error:
        return error.problems[0].found
    return ""


def repair_parity(job: RepairJob, shards: Shards, file: ParityFile, found: str) -> RepairResult:
    """Make a parity file again from its group, which is complete, and replace it atomically."""
    assert shards.parities is not None
    name, at = shards.name_of(file), 0
    try:
        with job.replacing(name, file.size) as writer:
            assert writer is not None
            for piece in shards.parities.rebuild_parity(file):
                job.operation.check()
                writer.write(at, [piece])
                at += len(piece)
    except Damaged as error:
        why = "; ".join(map(str, error.problems))
        return Problem(name, f"{found}, and can't be repaired: {why}")
    job.bytes_read.add(sum(member.size for member in shards.parities.members_of(file.group)))
    return RepairedFile(name, found, (), ("its group",), file.size, job.process)
