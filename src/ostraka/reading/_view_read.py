"""Read the leaves of a view: pieces of its source, rearranged into their places. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ostraka.common import memory as _recycle
from ostraka.common.threads import StopSignal, run_as_completed
from ostraka.formats.buffers import Array, Buffers, Scratch, map_pages
from ostraka.formats.source import OnBytes, Source
from ostraka.layout import box as _box
from ostraka.layout.spec import LeafSpec, Target
from ostraka.storage import USUAL_READERS

if TYPE_CHECKING:
    from ostraka.reading.view import SourcePiece

PIECE_BYTES = 8 << 20
"""The size of a piece. Some pieces are in memory besides the result."""

_ALIASED_BYTES, _LINE_BYTES, _WORTH_BYTES = 512, 64, 256 << 10


def read_pieces(
    source: Source,
    leaves: Sequence[LeafSpec],
    targets: Sequence[Target],
    pieces: Sequence[Sequence[SourcePiece]],
    on_bytes: OnBytes | None,
) -> Iterator[tuple[int, Array]]:
    """The number and the elements of each target, as soon as all its pieces are in place."""
    buffers = Buffers(targets, leaves)
    scratch = Scratch(_recycle.current())
    numbered = [(number, piece) for number, listed in enumerate(pieces) for piece in listed]
    missing = [len(listed) for listed in pieces]
    empty = [number for number, count in enumerate(missing) if count == 0]
    buffers.allocate(empty)
    yield from ((number, buffers.take(number)) for number in empty)

    def prepare(reads: Iterator[tuple[int, Array]]) -> Iterator[tuple[int, Array]]:
        # One thread allocates the memory.
        for at, array in reads:
            number, piece = numbered[at]
            if piece.form is not None:
                buffers.allocate([number])
            yield at, array

    def put(read: tuple[int, Array]) -> tuple[int, Array | None]:
        at, array = read
        number, piece = numbered[at]
        if piece.form is None or piece.moved is None:
            return number, array
        within = _box.slices(piece.box, targets[number].box)
        memory = buffers.array(number)[(*within, ...)]  # a view, also if 0-d
        if memory.flags.c_contiguous and piece.moved.fill == piece.moved.factors:
            map_pages(memory)
        piece.form.place(piece.moved, _with_rows_apart(array, scratch), memory)
        return number, None

    reads = source.read([piece.wanted for _, piece in numbered], on_bytes=on_bytes)
    # Copying with other strides costs as much as reading, and needs cores, not the interpreter.
    for _, (number, array) in run_as_completed(
        put, prepare(reads), threads=USUAL_READERS, stop=StopSignal()
    ):
        missing[number] -= 1
        if missing[number] == 0:
            yield number, buffers.take(number) if array is None else array


def _with_rows_apart(array: Array, scratch: Scratch) -> Array:
    """The same elements with rows that do not begin a multiple of 512 bytes apart.

    A transposition reads by columns. With such rows, all elements of a column would share a few
    lines of a cache. Copying them first takes less than half of the time.
    """
    row_bytes = array.nbytes // array.shape[0] if array.ndim > 1 and array.nbytes else 0
    if row_bytes % _ALIASED_BYTES or array.nbytes < _WORTH_BYTES or row_bytes == array.nbytes:
        return array
    rows, stride = array.shape[0], row_bytes + _LINE_BYTES
    memory = scratch.take(rows * stride)
    padded = memory.reshape(rows, stride)[:, :row_bytes]
    padded[...] = array.reshape(rows, -1).view(np.uint8)
    return padded.view(array.dtype).reshape(array.shape)
