"""Read plans: which blocks of which files are read, and where their bytes go. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

from ostraka import _box, _format
from ostraka._box import Box
from ostraka._format import Block, Entry, FileEntry
from ostraka._metadata import Metadata
from ostraka._spec import DTYPES, Layout, Target, turns_of

CHUNK_BYTES = 8 << 20
"""How much is read at one time."""


class Piece(NamedTuple):
    """What one entry of a file gives to one buffer: the box that both have."""

    entry: Entry
    buffer: int
    shared: Box


@dataclass(frozen=True, slots=True)
class FileRead:
    """The pieces that one file gives, in file order."""

    file: FileEntry
    entries: tuple[Entry, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which files give what to which target."""

    targets: tuple[Target, ...]
    files: tuple[FileRead, ...]


def plan_read(metadata: Metadata, targets: Sequence[Target]) -> ReadPlan:
    """Map the wanted boxes to entries of files.

    Raises ValueError if `_METADATA` contradicts itself about the files that are needed.
    """
    wanted: dict[tuple[int, int], list[tuple[int, Box]]] = {}
    overlaps: dict[tuple[int, tuple[int, ...], Box], list[tuple[int, int, Box]]] = {}
    layouts = [_CellFinder(layout) for layout in metadata.layouts]
    for number, target in enumerate(targets):
        leaf = metadata.leaves[target.leaf]
        key = (leaf.layout, leaf.spec.shape, target.box)
        found = overlaps.get(key)
        if found is None:
            found = overlaps[key] = layouts[leaf.layout].find(leaf.spec.shape, target.box)
        if not found:
            # Nothing to read, but the file that shows the empty leaf must be there.
            wanted.setdefault((metadata.layouts[leaf.layout].owners[0], leaf.part), [])
        for device, turn, shared in found:
            wanted.setdefault((device, leaf.part + turn), []).append((number, shared))
    contents = _format.entries_by_file(
        metadata.leaves, metadata.layouts, {device for device, _ in wanted}
    )
    table = {(file.device, file.part): file for file in metadata.files}
    reads = [
        _file_read(table, contents, key, rows, targets) for key, rows in sorted(wanted.items())
    ]
    return ReadPlan(tuple(targets), tuple(reads))


class _CellFinder:
    """Finds the cells of a layout under a box, with the file each lies in."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._turns = turns_of(layout)

    def find(self, shape: tuple[int, ...], box: Box) -> list[tuple[int, int, Box]]:
        found: list[tuple[int, int, Box]] = []
        for number in _box.overlapping_cells(shape, self._layout.grid, box):
            cell = _box.cell(shape, self._layout.grid, number)
            shared = _box.intersect(cell, box) if shape else cell
            if shared is not None:
                turn = 0 if self._turns is None else int(self._turns[number])
                found.append((self._layout.owners[number], turn, shared))
        return found


def _file_read(
    table: Mapping[tuple[int, int], FileEntry],
    contents: Mapping[tuple[int, int], list[Entry]],
    key: tuple[int, int],
    rows: Iterable[tuple[int, Box]],
    targets: Sequence[Target],
) -> FileRead:
    file = table.get(key)
    entries = contents[key]
    expected = entries[-1].offset + entries[-1].nbytes
    if file is None or file.size - file.header_bytes != expected:
        name = _format.shard_name(*key)
        raise ValueError(f"the file table and the layouts disagree about {name}")
    of_leaf = {entry.leaf: entry for entry in entries}  # A file has one box of a leaf at most.
    pieces = [Piece(of_leaf[targets[number].leaf], number, shared) for number, shared in rows]
    pieces.sort(key=lambda piece: (piece.entry.offset, piece.buffer))
    return FileRead(file, tuple(entries), tuple(pieces))


class Direct(NamedTuple):
    """Bytes `[start, stop)` of a file's data, which lie in a buffer as they lie there."""

    start: int
    stop: int
    buffer: int
    buffer_start: int


class Strided(NamedTuple):
    """Bytes `[start, stop)` of a file's data; `shared` is copied out of them row by row.

    The bytes are those of `box`, in row-major order.
    """

    start: int
    stop: int
    buffer: int
    box: Box
    shared: Box


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole neighbouring blocks `[first_block, last_block)` of a file, read in one go.

    Together they hold `[start, stop)` of the file's data.
    """

    start: int
    stop: int
    first_block: int
    last_block: int
    direct: tuple[Direct, ...]
    strided: tuple[Strided, ...]


def plan_chunks(
    read: FileRead,
    blocks: Sequence[Block],
    metadata: Metadata,
    targets: Sequence[Target],
    *,
    chunk_bytes: int,
) -> list[Chunk]:
    """Cut what a file gives into chunks of whole blocks; blocks that nobody wants are skipped.

    A block is read once, except where strided pieces of a box whose rows are longer than a chunk
    meet in it.
    """
    starts = [block.start for block in blocks]
    starts.append(blocks[-1].stop if blocks else 0)
    chunks: list[Chunk] = []
    pending: list[Direct | Strided] = []
    first = last = 0
    moves = _moves(read, metadata, targets, starts, chunk_bytes)
    for move in sorted(moves, key=itemgetter(0)):  # by where they start
        if pending and move.stop <= starts[last]:
            pending.append(move)
            continue
        low = bisect_right(starts, move.start) - 1
        high = bisect_right(starts, move.stop - 1)
        if pending:
            joined = starts[max(high, last)] - starts[first]
            grows = high > last and joined > chunk_bytes
            if low > last or (grows and (low >= last or joined > 2 * chunk_bytes)):
                chunks.append(_chunk(starts, first, last, pending))
                pending = []
        if not pending:
            first, last = low, high
        pending.append(move)
        last = max(last, high)
    if pending:
        chunks.append(_chunk(starts, first, last, pending))
    return chunks


def _chunk(starts: list[int], first: int, last: int, moves: list[Direct | Strided]) -> Chunk:
    direct: list[Direct] = []
    strided: list[Strided] = []
    for move in moves:
        direct.append(move) if isinstance(move, Direct) else strided.append(move)
    return Chunk(starts[first], starts[last], first, last, tuple(direct), tuple(strided))


def _moves(
    read: FileRead,
    metadata: Metadata,
    targets: Sequence[Target],
    block_starts: list[int],
    chunk_bytes: int,
) -> Iterator[Direct | Strided]:
    """The pieces of a file as byte moves no larger than a chunk, where that can be."""
    for piece in read.pieces:
        entry = piece.entry
        if entry.nbytes == 0:
            continue
        base = entry.offset
        dtype = DTYPES[metadata.leaves[entry.leaf].spec.dtype]
        target = targets[piece.buffer].box
        if entry.box == target and entry.nbytes <= chunk_bytes and dtype.bits >= 8:
            yield Direct(base, base + entry.nbytes, piece.buffer, 0)
            continue
        if dtype.packed:
            yield Strided(base, base + entry.nbytes, piece.buffer, entry.box, piece.shared)
            continue
        size = dtype.bits // 8
        if _box.is_contiguous(piece.shared, entry.box) and _box.is_contiguous(piece.shared, target):
            start, stop = _box.flat_span(piece.shared, entry.box)
            placed = _box.flat_start(piece.shared, target) * size
            yield from _split_direct(
                Direct(base + start * size, base + stop * size, piece.buffer, placed),
                block_starts,
                chunk_bytes,
            )
            continue
        block = _format.block_bytes(entry) // size
        for band in _box.bands(piece.shared, entry.box, max(chunk_bytes // size, 1), block):
            outer = _box.rows_around(band, entry.box)
            start, stop = _box.flat_span(outer, entry.box)
            yield Strided(base + start * size, base + stop * size, piece.buffer, outer, band)


def _split_direct(move: Direct, starts: list[int], chunk_bytes: int) -> Iterator[Direct]:
    """Split a long move at block boundaries, so that several threads can share it.

    What it has of the first and the last block, if not all, becomes a move of its own: a block that
    two targets share is then small enough to be read once for both.
    """
    cuts = [move.start, move.stop]
    if move.stop - move.start > _format.BLOCK_BYTES:
        first = bisect_left(starts, move.start)
        last = bisect_right(starts, move.stop) - 1
        if first < last:
            cuts = [move.start, starts[first]]
            for before, boundary in pairwise(starts[first : last + 1]):
                if boundary - cuts[-1] > chunk_bytes and before > cuts[-1]:
                    cuts.append(before)
            cuts += [starts[last], move.stop]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield Direct(start, stop, move.buffer, move.buffer_start + start - move.start)
