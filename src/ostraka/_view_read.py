"""Read the leaves of a view: pieces of its source, rearranged into their places. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ostraka import _box, _recycle
from ostraka._memory import Array, Buffers, Scratch, map_pages
from ostraka._parallel import StopSignal, run_as_completed
from ostraka._source import OnBytes, Source
from ostraka._spec import LeafSpec, Target
from ostraka.storage import USUAL_READERS

if TYPE_CHECKING:
    from ostraka._view import SourcePiece

PIECE_BYTES = 8 << 20
"""What is rearranged at one time; some of these are held besides what is read."""

_ALIASED_BYTES, _LINE_BYTES, _WORTH_BYTES = 512, 64, 256 << 10


def read_pieces(
    source: Source,
    leaves: Sequence[LeafSpec],
    targets: Sequence[Target],
    pieces_of: Callable[[Target, int], Iterator[SourcePiece]],
    on_bytes: OnBytes | None,
) -> Iterator[tuple[int, Array]]:
    """The number and the elements of each target, as soon as all of it is there."""
    return _Reading(source, leaves, targets, pieces_of).run(on_bytes)


class _Reading:
    def __init__(
        self,
        source: Source,
        leaves: Sequence[LeafSpec],
        targets: Sequence[Target],
        pieces_of: Callable[[Target, int], Iterator[SourcePiece]],
    ):
        self._source = source
        self._targets = targets
        self._buffers = Buffers(targets, leaves)
        self._scratch = Scratch(_recycle.current())
        self._pieces: list[tuple[int, SourcePiece]] = []
        """The target of each, and what it is."""
        self._missing = [0] * len(targets)
        """Of each target: the pieces that are yet to come."""
        for number, target in enumerate(targets):
            for piece in pieces_of(target, PIECE_BYTES):
                self._pieces.append((number, piece))
                self._missing[number] += 1

    def run(self, on_bytes: OnBytes | None) -> Iterator[tuple[int, Array]]:
        empty = [number for number, missing in enumerate(self._missing) if missing == 0]
        self._buffers.allocate(empty)
        yield from ((number, self._buffers.take(number)) for number in empty)
        wanted = [piece.wanted for _, piece in self._pieces]
        reads = self._source.read(wanted, on_bytes=on_bytes)
        # Copying with other strides costs as much as reading, and needs cores, not the interpreter.
        for _, (number, array) in run_as_completed(
            lambda read: self._put(*read),
            self._prepared(reads),
            threads=USUAL_READERS,
            stop=StopSignal(),
        ):
            self._missing[number] -= 1
            if self._missing[number] == 0:
                yield number, self._buffers.take(number) if array is None else array

    def _prepared(self, reads: Iterator[tuple[int, Array]]) -> Iterator[tuple[int, Array]]:
        """What is read, with memory for it: made here, by one thread."""
        for at, array in reads:
            number, piece = self._pieces[at]
            if piece.form is not None:
                self._buffers.allocate([number])
            yield at, array

    def _put(self, at: int, array: Array) -> tuple[int, Array | None]:
        number, piece = self._pieces[at]
        if piece.form is None or piece.piece is None:
            return number, array
        within = _box.slices(piece.box, self._targets[number].box)
        memory = self._buffers.array(number)[(*within, ...)]  # a view, also if 0-d
        if memory.flags.c_contiguous and piece.piece.fill == piece.piece.factors:
            map_pages(memory)
        apart = _with_rows_apart(array, self._scratch)
        piece.form.place(piece.piece, apart, memory)
        return number, None


def _with_rows_apart(array: Array, scratch: Scratch) -> Array:
    """The same elements, the rows of which do not begin a multiple of 512 bytes apart.

    What is transposed is read by columns. With such rows, all elements of a column would have to
    share a few lines of a cache: to copy them first takes less than half of the time.
    """
    row_bytes = array.nbytes // array.shape[0] if array.ndim > 1 and array.nbytes else 0
    if row_bytes % _ALIASED_BYTES or array.nbytes < _WORTH_BYTES or row_bytes == array.nbytes:
        return array
    rows, stride = array.shape[0], row_bytes + _LINE_BYTES
    memory = scratch.take(rows * stride)
    padded = memory.reshape(rows, stride)[:, :row_bytes]
    padded[...] = array.reshape(rows, -1).view(np.uint8)
    return padded.view(array.dtype).reshape(array.shape)
