"""Damage is bytes that are lost or corrupt: how to find it, and the sentences about it. No JAX.

Each sentence completes "FILE: …". `Problem.found` and the text of `BytesLost` are such sentences.

Three ways to compare a file with its digests: `matches` for a block in memory, `unmatched_blocks`
for blocks of an open file, and `Comparison` for bytes that pass by in order on their way elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ostraka.common.dtypes import DTYPES
from ostraka.errors import Damaged, LostBox, OstrakaError, Problem, StoreError, UnsupportedFormat
from ostraka.layout import box as _box
from ostraka.layout import shard_file
from ostraka.layout.metadata import IndexEntry, Metadata
from ostraka.layout.shard_file import METADATA_NAME, Block, Entry
from ostraka.layout.spec import StoredLeaf
from ostraka.storage import FileReader, Store

MISSING = "it is missing"
NOT_AS_WRITTEN = "its digest is not the one that was written"
NOT_THE_COPY = f"it is not the copy of {METADATA_NAME} that was written"
PIECE_BYTES = 2 << 20
"""Bytes to read at a time, however long a block is. Larger pieces have the processor wait for the
disk, smaller ones have the disk wait for the interpreter."""


def other_size(found: int, written: int) -> str:
    return f"it has {found:,} bytes where {written:,} were written"


def ends_at(byte: int) -> str:
    return f"it ends at byte {byte:,}"


def block_bytes(block: Block) -> str:
    """The bytes of a block in words, for a sentence about them."""
    return f"bytes {block.file_start:,} to {block.file_stop:,}"


def not_as_written(block: Block) -> str:
    if block.file_start == 0:
        return "its header is not as it was written"
    return f"{block_bytes(block)} are not as they were written"


def loss_of(error: OSError) -> str | None:
    """The sentence for a file or bytes that the store has lost, or None for other errors."""
    if isinstance(error, FileNotFoundError):
        return MISSING
    return error.loss if isinstance(error, StoreError) else None


class BytesLost(Exception):
    """Bytes of a file can't be read, or don't match their digests. The text says why."""


def damaged(store: Store, name: str, found: str, leaves: tuple[str, ...] = ()) -> Damaged:
    """The error for one file of the checkpoint in a store."""
    return Damaged(store.location, [Problem(name, found, leaves)])


@contextmanager
def damage_on_loss(error_for: Callable[[str], Exception]) -> Generator[None]:
    """Raise `error_for(sentence)` for bytes that the store has lost."""
    try:
        yield
    except OSError as error:
        loss = loss_of(error)
        if loss is None:
            raise
        raise error_for(loss) from error


@contextmanager
def damage_on_contradiction(store: Store) -> Generator[None]:
    """Raise Damaged where `_METADATA` contradicts itself, and name the checkpoint in any error."""
    try:
        yield
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"can't read {store.location}: {error}") from error
    except OstrakaError:
        raise
    except ValueError as error:
        raise damaged(store, METADATA_NAME, f"it contradicts itself: {error}") from error


def check_metadata_copy(store: Store, metadata: Metadata) -> None:
    """Raise Damaged if the second copy of `_METADATA` has other bytes.

    A missing copy is no damage, since older checkpoints have none. Nor is one that ends early,
    perhaps in zeros: the copy is not synced, so a crash may truncate it. Only `repair` reads it.
    """
    name = f"{shard_file.shards_directory(metadata.id)}/{shard_file.METADATA_COPY}"
    with damage_on_loss(lambda found: damaged(store, name, found)):
        try:
            found = store.get(name).rstrip(b"\0")
        except FileNotFoundError:
            return
    if not store.get(METADATA_NAME).startswith(found):
        raise damaged(store, name, NOT_THE_COPY)


def boxes_between(
    leaves: Sequence[StoredLeaf], entries: Iterable[Entry], start: int, stop: int
) -> tuple[LostBox, ...]:
    """The part of each leaf in `[start, stop)` of a file's data."""
    found: list[LostBox] = []
    for leaf, box, offset, nbytes in entries:
        first, last = max(start, offset) - offset, min(stop, offset + nbytes) - offset
        if first >= last:
            continue
        spec = leaves[leaf].spec
        bits = DTYPES[spec.dtype].bits
        last_element = min(-(-last * 8 // bits), _box.count(box))
        lost = _box.around_span(first * 8 // bits, last_element, box)
        found.append(LostBox(spec.path, lost, spec.shape))
    return tuple(found)


# Comparing with digests


def matches(block: Block, pieces: Iterable[Any]) -> bool:
    """True if the stored bytes of a block, given in pieces, have its digest."""
    return shard_file.block_digest(pieces) == block.digest


def unmatched_blocks(
    reader: FileReader,
    blocks: Sequence[Block],
    memory: Any,
    on_read: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[tuple[int, str]]:
    """The number of each block that does not match its digest, with a sentence about it.

    Blocks are read into `memory`, in pieces of at most its length. `on_read` receives the number of
    bytes of each piece, and may raise to stop. Lost bytes, and bytes past the end of the
    file, don't match. Other errors of the store are raised.
    """

    def pieces(block: Block) -> Iterator[Any]:
        for at in range(block.file_start, block.file_stop, len(memory)):
            piece = memory[: block.file_stop - at]
            count = reader.read_into(at, [piece])
            on_read(count)
            if count < len(piece):
                raise BytesLost(ends_at(at + count))
            yield piece

    for number, block in enumerate(blocks):
        found = not_as_written(block)
        try:
            with damage_on_loss(BytesLost):
                if matches(block, pieces(block)):
                    continue
        except BytesLost as error:
            found = str(error)
        yield number, found


class Comparison:
    """Compares blocks with their digests while the bytes of their file pass by, in order."""

    def __init__(self, blocks: Iterable[Block]):
        self._blocks = iter(blocks)
        self._block = next(self._blocks, None)
        self._state = shard_file.new_block_digest()

    def add(self, at: int, piece: Any) -> None:
        """Take the bytes from offset `at` of the file on.

        Raises BytesLost if a block that ends in them does not match.
        """
        stop = at + len(piece)
        while (block := self._block) is not None and block.file_start < stop:
            self._state.update(piece[max(block.file_start - at, 0) : block.file_stop - at].data)
            if block.file_stop > stop:
                return
            if self._state.hexdigest() != block.digest:
                raise BytesLost(not_as_written(block))
            self._state = shard_file.new_block_digest()
            self._block = next(self._blocks, None)


def index_problem(data: bytes, expected: IndexEntry) -> str | None:
    """The sentence for a process index that differs from `expected`, or None if it matches."""
    if len(data) != expected.size:
        return other_size(len(data), expected.size)
    return None if shard_file.digest(data) == expected.digest else NOT_AS_WRITTEN
