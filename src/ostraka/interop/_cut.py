"""How items are cut into the pieces that are read, written and noted at once. Pure.

Where the rows of an item follow each other in the source, a piece is a band of rows. Where they lie
scattered, as those of a transposed array do, every band would have all of the source read: there
a piece is a slab, which is one band of the source, and a part of every row of the item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ostraka import _box
from ostraka._spec import DTYPES, HOST_LOCAL, LeafSpec, numpy_dtype
from ostraka.interop._work import Piece, Work

BAND_BYTES = 16 << 20
"""What is read at once of an array whose rows lie in order."""
SLAB_BYTES = 96 << 20
"""What is read at once of others."""
_TOGETHER_BYTES = 16 << 20
"""Small arrays share blocks of files, and are read together: so much of them."""
_LEAST_RUN_BYTES = 2 << 10
"""Shorter runs of a file cost more to write one by one than it costs to read the source again."""


def slab_grid(work: Work, number: int) -> tuple[int, ...] | None:
    """Into how many parts each dimension of an item is cut, if its rows lie scattered; else None.

    A part has at most `SLAB_BYTES`, unless a single element of that dimension has more.
    """
    item = work.items[number]
    shape, grid = item.spec.shape, work.source.grid_of(item.number)
    if item.spec.mesh != HOST_LOCAL or DTYPES[item.spec.dtype].packed or len(grid) != len(shape):
        return None
    first = next((dimension for dimension, n in enumerate(shape) if n > 1), 0)
    cut = [dimension for dimension, parts in enumerate(grid) if parts > 1]
    if not cut or cut[-1] <= first:
        return None
    missing = -(-prod(shape) * _element_bytes(item.spec) // SLAB_BYTES)
    found = [1] * len(shape)
    for dimension in cut:
        most = shape[dimension] if dimension == cut[-1] else grid[dimension]
        found[dimension] = max(min(missing, most), 1)
        missing = -(-missing // found[dimension])
    return tuple(found)


def band_bytes(work: Work, number: int) -> int:
    """How much of an item is read at once."""
    return BAND_BYTES if slab_grid(work, number) is None else SLAB_BYTES


def bands_of(work: Work, number: int) -> list[Piece]:
    """An item as boxes that follow each other in the order of its elements."""
    spec = work.items[number].spec
    whole = _box.full(spec.shape)
    most = band_bytes(work, number) // _element_bytes(spec)
    bands = _box.bands(whole, whole, most) if _box.count(whole) else [whole]
    return [Piece(number, band) for band in bands]


def slabs_of(work: Work, number: int) -> list[Piece]:
    """An item as bands, or as slabs if its rows lie scattered in the source."""
    grid, spec = slab_grid(work, number), work.items[number].spec
    if grid is None or not spec.nbytes:
        return bands_of(work, number)
    slabs = [_box.cell(spec.shape, grid, at) for at in range(prod(grid))]
    run, _ = _box.runs(slabs[0], spec.shape)
    if run * numpy_dtype(spec.dtype).itemsize < _LEAST_RUN_BYTES and len(slabs) > 1:
        return bands_of(work, number)
    return [Piece(number, slab) for slab in slabs]


def _element_bytes(spec: LeafSpec) -> int:
    """Of an element as it is read or as it is written, whichever is more."""
    return max(numpy_dtype(dtype).itemsize for dtype in (spec.dtype, spec.cast_from or spec.dtype))


def piece_bytes(work: Work, piece: Piece) -> int:
    return DTYPES[work.items[piece.item].spec.dtype].nbytes(_box.count(piece.box))


def offset_of(work: Work, piece: Piece) -> int:
    """Where a piece begins in the bytes of its item."""
    spec = work.items[piece.item].spec
    if not _box.count(piece.box):
        return 0
    start, _ = _box.flat_span(piece.box, _box.full(spec.shape))
    return start * DTYPES[spec.dtype].bits // 8


def is_contiguous(work: Work, piece: Piece) -> bool:
    """Whether the bytes of a piece follow each other in those of its item."""
    whole = _box.full(work.items[piece.item].spec.shape)
    return not _box.count(piece.box) or _box.is_contiguous(piece.box, whole)


def read_together(work: Work, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces in groups, each of which is read at once; small ones together."""
    group: list[Piece] = []
    group_bytes = 0
    for piece in pieces:
        nbytes = _box.count(piece.box) * numpy_dtype(work.items[piece.item].spec.dtype).itemsize
        if group and group_bytes + nbytes > _TOGETHER_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(piece)
        group_bytes += nbytes
    if group:
        yield group
