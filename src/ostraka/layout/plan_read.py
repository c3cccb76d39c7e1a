"""Read plans: which blocks of which files are read, and where their bytes go. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from ostraka.common.dtypes import DTYPES, Dtype
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.metadata import Metadata, entry_bytes, shard_contents
from ostraka.layout.runs import Allowance
from ostraka.layout.shard_file import Block, Entry, FileEntry
from ostraka.layout.spec import Layout, Target, turns_of

CHUNK_BYTES = 8 << 20
"""How much is read at one time."""


class ReadPiece(NamedTuple):
    """The part of one entry of a file that goes to one buffer."""

    entry: Entry
    dtype: Dtype
    buffer: int
    target: Box
    """The box of the buffer."""
    shared: Box


@dataclass(frozen=True, slots=True)
class FileRead:
    """The pieces that one file gives, in file order."""

    file: FileEntry
    entries: tuple[Entry, ...]
    pieces: tuple[ReadPiece, ...]


def plan_read(
    metadata: Metadata, targets: Sequence[Target], allowance: Allowance | None = None
) -> list[FileRead]:
    """Map the wanted boxes to entries of files.

    Raises ValueError if `_METADATA` contradicts itself about the files that are needed, or if that
    would be more than the allowance.
    """
    wanted: dict[tuple[int, int], list[tuple[int, Target, Box]]] = {}
    overlaps: dict[tuple[int, tuple[int, ...], Box], list[tuple[int, int, Box]]] = {}
    turns: dict[int, Any] = {}
    for number, target in enumerate(targets):
        leaf = metadata.leaves[target.leaf]
        layout = metadata.layouts[leaf.layout]
        key = (leaf.layout, leaf.spec.shape, target.box)
        found = overlaps.get(key)
        if allowance is not None:
            shape, grid = leaf.spec.shape, layout.grid
            under = _box.parts_under(shape, grid, target.box) if found is None else [found]
            allowance.take(prod(map(len, under)) * entry_bytes(len(target.box)))
        if found is None:
            if leaf.layout not in turns:
                turns[leaf.layout] = turns_of(layout)
            found = _cells_under(target.box, leaf.spec.shape, layout, turns[leaf.layout])
            overlaps[key] = found
        if not found:
            # Nothing to read, but the file that shows the empty leaf must be there.
            wanted.setdefault((layout.owners[0], leaf.part), [])
        for device, turn, shared in found:
            wanted.setdefault((device, leaf.part + turn), []).append((number, target, shared))
    contents = shard_contents(metadata, {device for device, _ in wanted}, allowance)
    reads: list[FileRead] = []
    for key, rows in sorted(wanted.items()):
        file, entries = contents[key]
        of_leaf = {entry.leaf: entry for entry in entries}  # A file has one box of a leaf at most.
        pieces = [
            ReadPiece(of_leaf[leaf], DTYPES[metadata.leaves[leaf].spec.dtype], number, box, shared)
            for number, (leaf, box, _), shared in rows
        ]
        pieces.sort(key=lambda piece: piece.entry.offset)
        reads.append(FileRead(file, tuple(entries), tuple(pieces)))
    return reads


def _cells_under(
    box: Box, shape: tuple[int, ...], layout: Layout, turns: Any
) -> list[tuple[int, int, Box]]:
    """The cells of a layout under a box: device, turn, and what both have."""
    found: list[tuple[int, int, Box]] = []
    for number in _box.overlapping_cells(shape, layout.grid, box):
        shared = _box.intersect(_box.cell(shape, layout.grid, number), box)
        if shared is not None:
            turn = 0 if turns is None else int(turns[number])
            found.append((layout.owners[number], turn, shared))
    return found


class Move(NamedTuple):
    """Bytes `[start, stop)` of a file's data, which are those of `box`. `shared` goes to a buffer.

    Where `shared` is all of `box` and lies in the buffer as in the file, `buffer_start` says at
    which byte. Else it is None, and the rows of `shared` are copied out of `box`.
    """

    start: int
    stop: int
    buffer: int
    buffer_start: int | None
    box: Box
    shared: Box


class Chunk(NamedTuple):
    """Whole neighbouring blocks `[first_block, last_block)` of a file, read in one go.

    Together they hold `[start, stop)` of the file's data.
    """

    start: int
    stop: int
    first_block: int
    last_block: int
    moves: list[Move]


def plan_chunks(pieces: Sequence[ReadPiece], blocks: Sequence[Block]) -> list[Chunk]:
    """Cut what a file gives into chunks of whole blocks. Blocks that nobody wants are skipped.

    A block is read once, unless what is wanted of it reaches so far into its neighbours that a
    chunk would grow to more than twice its size.
    """
    starts = [block.start for block in blocks] + [block.stop for block in blocks[-1:]]
    chunks: list[Chunk] = []
    for move in sorted(_moves(pieces, starts), key=itemgetter(0)):
        last = chunks[-1] if chunks else None
        if last is not None and move.stop <= last.stop:
            last.moves.append(move)
            continue
        low = bisect_right(starts, move.start) - 1
        high = bisect_right(starts, move.stop - 1)
        if last is not None and low <= last.last_block:
            joined = starts[high] - last.start
            if joined <= (2 * CHUNK_BYTES if low < last.last_block else CHUNK_BYTES):
                last.moves.append(move)
                chunks[-1] = last._replace(stop=starts[high], last_block=high)
                continue
        chunks.append(Chunk(starts[low], starts[high], low, high, [move]))
    return chunks


def _moves(pieces: Sequence[ReadPiece], block_starts: Sequence[int]) -> Iterator[Move]:
    """The pieces of a file as moves no larger than a chunk, where that can be."""
    for (_, box, base, nbytes), dtype, buffer, target, shared in pieces:
        if dtype.packed:
            yield Move(base, base + nbytes, buffer, None, box, shared)
        elif box == target and nbytes <= CHUNK_BYTES:  # Most are, and this is quick.
            yield Move(base, base + nbytes, buffer, 0, target, target)
        else:
            size = dtype.bits // 8
            block = bisect_right(block_starts, base)
            block_bytes = block_starts[block] - block_starts[block - 1]
            for band in _box.bands(shared, box, CHUNK_BYTES // size, block_bytes // size):
                rows = _box.rows_around(band, box)
                start, stop = _box.flat_span(rows, box)
                as_is = rows == band and _box.is_contiguous(band, target)
                at = _box.flat_span(band, target)[0] * size if as_is else None
                yield Move(base + start * size, base + stop * size, buffer, at, rows, band)
