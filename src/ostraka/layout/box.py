"""Boxes: n-d slices of an array, half-open `(start, stop)` per dimension. Pure integers.

Dimensions are cut by one rule everywhere: part `i` of `n` elements in `k` parts is
`[n*i//k, n*(i+1)//k)`. Where `k` divides `n` the parts are equal, as JAX requires of shards, and
cutting a part again gives the same boxes as cutting finer at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]


def full(shape: Sequence[int]) -> Box:
    """The box that is all of an array."""
    return tuple((0, n) for n in shape)


def cell(shape: Sequence[int], grid: Sequence[int], index: int) -> Box:
    """The box of cell `index` (row-major) of an array cut into `grid` cells."""
    box: list[tuple[int, int]] = []
    for extent, parts in zip(reversed(shape), reversed(grid), strict=True):
        index, at = divmod(index, parts)
        box.append((extent * at // parts, extent * (at + 1) // parts))
    return tuple(reversed(box))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple([stop - start for start, stop in box])


def count(box: Box) -> int:
    """How many elements a box holds. One for a 0-d box."""
    return prod([stop - start for start, stop in box])


def intersect(a: Box, b: Box) -> Box | None:
    """The box that two boxes share, or None."""
    shared = [(max(s, t), min(u, v)) for (s, u), (t, v) in zip(a, b, strict=True)]
    for start, stop in shared:
        if start >= stop:
            return None
    return tuple(shared)


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """The index that picks `box` out of an array that holds `within`."""
    return tuple(slice(s - o, e - o) for (s, e), (o, _) in zip(box, within, strict=True))


def overlapping_cells(shape: Sequence[int], grid: Sequence[int], box: Box) -> list[int]:
    """The cells (row-major numbers, ascending) of a cut array that share elements with `box`."""
    cells = [0]
    for parts, under in zip(grid, parts_under(shape, grid, box), strict=True):
        cells = [cell * parts + part for cell in cells for part in under]
    return cells


def parts_under(shape: Sequence[int], grid: Sequence[int], box: Box) -> list[range]:
    """For each dimension of a cut array, the parts that share elements with `box`."""
    return [
        range(part_of(extent, parts, start), part_of(extent, parts, stop - 1) + 1)
        if start < stop
        else range(0)
        for extent, parts, (start, stop) in zip(shape, grid, box, strict=True)
    ]


def part_of(extent: int, parts: int, position: int) -> int:
    """The part that holds element `position`."""
    return ((position + 1) * parts - 1) // extent


def is_contiguous(box: Box, within: Box) -> bool:
    """True if `box` is one run of the row-major elements of `within`."""
    return rows_around(box, within) == box


def flat_span(box: Box, within: Box) -> tuple[int, int]:
    """From the first to one past the last row-major element of `box` inside `within`."""
    first = last = 0
    for (start, stop), (outer_start, outer_stop) in zip(box, within, strict=True):
        extent = outer_stop - outer_start
        first = first * extent + start - outer_start
        last = last * extent + stop - 1 - outer_start
    return first, last + 1


def around_span(start: int, stop: int, within: Box) -> Box:
    """The smallest box that has the row-major elements `[start, stop)` of `within` in it.

    The span must not be empty.
    """
    box: list[tuple[int, int]] = []
    row = count(within)
    for low, high in within:
        row //= high - low
        first, last = start // row, (stop - 1) // row
        box.append((low + first, low + last + 1))
        if first != last:  # It goes from the end of one row to the beginning of another.
            return (*box, *within[len(box) :])
        start, stop = start - first * row, stop - first * row
    return tuple(box)


def rows_around(box: Box, within: Box) -> Box:
    """The smallest box around `box` that is one run of the elements of `within`."""
    at = next((d for d, (start, stop) in enumerate(box) if stop - start > 1), len(box))
    return (*box[: at + 1], *within[at + 1 :])


def bands(box: Box, within: Box, max_elements: int, block_elements: int = 1) -> Iterator[Box]:
    """Cut `box` across its rows until the run around each band has at most `max_elements`.

    Where rows fill blocks of `block_elements` (of the elements of `within`) evenly, bands end where
    blocks end.
    """
    start, stop = flat_span(rows_around(box, within), within)
    if stop - start <= max_elements or count(box) <= 1:
        yield box
        return
    dimension = next(d for d, (s, e) in enumerate(box) if e - s > 1)
    low, high = box[dimension]
    row = prod(e - s for s, e in within[dimension + 1 :])
    rows_per_block = max(block_elements // row, 1) if block_elements <= max_elements else 1
    step = max(max_elements // row // rows_per_block, 1) * rows_per_block
    first_row = start // row
    while low < high:
        end = min(low + step - first_row % rows_per_block, high)
        band = (*box[:dimension], (low, end), *box[dimension + 1 :])
        yield from bands(band, within, max_elements, block_elements)
        first_row += end - low
        low = end


def runs(box: Box, shape: Sequence[int]) -> tuple[int, list[int]]:
    """How long the runs of a box are in an array, and where each begins, in elements of it."""
    if not box:
        return 1, [0]
    strides = [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    # The last dimension that is cut belongs to the run, with all that is whole below it.
    at = max((d for d, extent in enumerate(shape) if box[d] != (0, extent)), default=0)
    run = (box[at][1] - box[at][0]) * strides[at]
    offsets = [box[at][0] * strides[at]]
    for dimension in reversed(range(at)):
        start, stop = box[dimension]
        steps = [position * strides[dimension] for position in range(start, stop)]
        offsets = [step + offset for step in steps for offset in offsets]
    return run, offsets
