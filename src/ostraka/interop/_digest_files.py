"""Digests of what files of tensors have, each byte of which is read once."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ostraka import _box, _format
from ostraka._memory import Scratch
from ostraka._parallel import StopSignal
from ostraka._spec import numpy_dtype
from ostraka.interop._cut import is_contiguous, offset_of, piece_bytes
from ostraka.interop._work import Piece, Work
from ostraka.storage import FileReader, Store

READ_BYTES = 8 << 20


class Found(NamedTuple):
    """What was read of pieces of an item."""

    digests: list[str]
    crc: int
    """The CRC-32 of all that was read, in the order of the file; 0 if nobody wants it."""


class Readers:
    """Files of a place, each opened once, for any thread."""

    def __init__(self, store: Store):
        self._store = store
        self._opened: dict[str, FileReader] = {}
        self._lock = threading.Lock()

    def reader(self, name: str) -> FileReader:
        with self._lock:
            if name not in self._opened:
                self._opened[name] = self._store.open(name)
            return self._opened[name]

    def close(self) -> None:
        for reader in self._opened.values():
            reader.close()


def pieces_by_run(work: Work, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that are to be digested together: those of an item that share rows; others alone."""
    sharing: dict[int, list[Piece]] = {}
    for piece in pieces:
        if is_contiguous(work, piece):
            yield [piece]
        else:
            sharing.setdefault(piece.item, []).append(piece)
    yield from sharing.values()


def digest_pieces(
    work: Work,
    pieces: Sequence[Piece],
    start: int,
    reader: FileReader,
    scratch: Scratch,
    stop: StopSignal,
    *,
    with_crc: bool = False,
) -> Found:
    """The digests of pieces that belong together, of an item that begins at `start` of a file.

    If the file ends too early they are those of something else.
    """
    if is_contiguous(work, pieces[0]):
        (piece,) = pieces
        start += offset_of(work, piece)
        parts = _in_order(reader, start, piece_bytes(work, piece), scratch, stop)
        state, crc = _format.new_block_digest(), 0
        for part in parts:
            state.update(part)
            crc = zlib.crc32(part, crc) if with_crc else 0
        return Found([state.hexdigest()], crc)
    return _digest_slabs(work, pieces, start, reader, scratch, stop, with_crc)


def digest_range(
    reader: FileReader, start: int, nbytes: int, scratch: Scratch, stop: StopSignal
) -> str:
    """The digest of a part of a file; of less, if it ends before."""
    return _format.block_digest(_in_order(reader, start, nbytes, scratch, stop))


def _in_order(
    reader: FileReader, start: int, nbytes: int, scratch: Scratch, stop: StopSignal
) -> Iterator[Any]:
    for at in range(start, start + nbytes, READ_BYTES):
        stop.check()
        part = scratch.take(min(READ_BYTES, start + nbytes - at))
        yield part[: reader.read_into(at, [part])]


def _digest_slabs(
    work: Work,
    pieces: Sequence[Piece],
    start: int,
    reader: FileReader,
    scratch: Scratch,
    stop: StopSignal,
    with_crc: bool,
) -> Found:
    """Of parts of the same rows: each row is read once, and of each piece a part is digested."""
    spec = work.items[pieces[0].item].spec
    dtype, whole = numpy_dtype(spec.dtype), _box.full(spec.shape)
    states = [_format.new_block_digest() for _ in pieces]
    crc = 0
    for band in _box.bands(whole, whole, READ_BYTES // dtype.itemsize):
        shared = [_box.intersect(band, piece.box) for piece in pieces]
        if not any(shared):
            continue
        stop.check()
        first, last = _box.flat_span(band, whole)
        memory: Any = scratch.take((last - first) * dtype.itemsize)
        if reader.read_into(start + first * dtype.itemsize, [memory]) != memory.size:
            return Found([_format.block_digest([])] * len(pieces), 0)
        crc = zlib.crc32(memory, crc) if with_crc else 0
        rows = memory.reshape(*_box.shape_of(band), dtype.itemsize)
        for state, part in zip(states, shared, strict=True):
            if part is not None:
                of_piece: Any = np.ascontiguousarray(rows[_box.slices(part, band)])
                state.update(of_piece)
    return Found([state.hexdigest() for state in states], crc)
