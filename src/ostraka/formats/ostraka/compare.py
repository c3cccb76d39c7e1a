"""Does a file match its digests? No JAX.

Three ways to ask: `matches` for a block in memory, `unmatched_blocks` for blocks of an open file,
and `Comparison` for bytes that pass by in order on their way elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ostraka.formats.ostraka.damage import (
    NOT_AS_WRITTEN,
    BytesLost,
    ends_at,
    loss_of,
    not_as_written,
    other_size,
)
from ostraka.layout import shard_file
from ostraka.layout.metadata import IndexEntry
from ostraka.layout.shard_file import Block
from ostraka.storage import FileReader

PIECE_BYTES = 2 << 20
"""Bytes to read at a time, however long a block is. Larger pieces have the processor wait for the
disk, smaller ones have the disk wait for the interpreter."""


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
        try:
            if not matches(block, pieces(block)):
                yield number, not_as_written(block)
        except BytesLost as error:
            yield number, str(error)
        except OSError as error:
            loss = loss_of(error)
            if loss is None:
                raise
            yield number, loss


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
