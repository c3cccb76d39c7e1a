"""Boxes against numpy: an index array has the row-major number of every element."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraka.layout import box as _box

some = settings(max_examples=60)


@st.composite
def box_in(draw, shape, *, empty=False):
    box = []
    for extent in shape:
        start = draw(st.integers(0, extent if empty else extent - 1))
        stop = draw(st.integers(start if empty else start + 1, extent))
        box.append((start, stop))
    return tuple(box)


@st.composite
def shapes(draw, *, min_extent=1, max_rank=4):
    return tuple(draw(st.lists(st.integers(min_extent, 7), max_size=max_rank)))


@st.composite
def grids(draw, rank):
    return tuple(draw(st.lists(st.integers(1, 9), min_size=rank, max_size=rank)))


def cut(extent, parts, index):
    """Part `index` of `extent` elements cut in `parts`."""
    return _box.cell((extent,), (parts,), index)[0]


def numbered(shape):
    return np.arange(int(np.prod(shape))).reshape(shape)


def pick(array, box):
    return array[(*(slice(start, stop) for start, stop in box), ...)]


def local(box, within):
    """A box seen from inside another one."""
    return tuple((s - o, e - o) for (s, e), (o, _) in zip(box, within, strict=True))


@given(extent=st.integers(0, 300), parts=st.integers(1, 40))
def test_parts_follow_each_other_without_gap_or_overlap(extent, parts):
    cuts = [cut(extent, parts, i) for i in range(parts)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == extent
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    sizes = [stop - start for start, stop in cuts]
    assert max(sizes) - min(sizes) <= 1


@given(extent=st.integers(0, 200), parts=st.integers(1, 12), finer=st.integers(1, 12))
def test_cutting_finer_keeps_the_coarse_cuts(extent, parts, finer):
    for part in range(parts):
        start, stop = cut(extent, parts, part)
        pieces = [cut(extent, parts * finer, part * finer + i) for i in range(finer)]
        assert (pieces[0][0], pieces[-1][1]) == (start, stop)


@given(extent=st.integers(1, 300), parts=st.integers(1, 400))
def test_part_of_is_the_inverse_of_cut(extent, parts):
    for position in range(extent):
        start, stop = cut(extent, parts, _box.part_of(extent, parts, position))
        assert start <= position < stop


@some
@given(st.data())
def test_cells_tile_an_array(data):
    shape = data.draw(shapes(min_extent=0))
    grid = data.draw(grids(len(shape)))
    seen = np.zeros(shape, np.int64)
    for number in range(int(np.prod(grid))):
        pick(seen, _box.cell(shape, grid, number))[...] += 1
    assert (seen == 1).all()


@some
@given(st.data())
def test_count_and_shape_are_those_of_the_slice(data):
    shape = data.draw(shapes(min_extent=0))
    box = data.draw(box_in(shape, empty=True))
    picked = pick(numbered(shape), box)
    assert _box.shape_of(box) == picked.shape
    assert _box.count(box) == picked.size


@some
@given(st.data())
def test_intersect_is_what_both_slices_have(data):
    shape = data.draw(shapes())
    a, b = data.draw(box_in(shape)), data.draw(box_in(shape))
    array = numbered(shape)
    shared = _box.intersect(a, b)
    common = np.intersect1d(pick(array, a), pick(array, b))
    assert shared == _box.intersect(b, a)
    if shared is None:
        assert common.size == 0
    else:
        np.testing.assert_array_equal(np.sort(pick(array, shared), axis=None), common)


def test_empty_boxes_share_nothing():
    assert _box.intersect(((2, 2),), ((0, 4),)) is None
    assert _box.intersect(((0, 2), (0, 4)), ((2, 4), (0, 4))) is None


@some
@given(st.data())
def test_slices_index_an_array_that_holds_a_part(data):
    shape = data.draw(shapes())
    within = data.draw(box_in(shape))
    inner = data.draw(box_in(_box.shape_of(within)))
    box = tuple((s + o, e + o) for (s, e), (o, _) in zip(inner, within, strict=True))
    array = numbered(shape)
    held = pick(array, within)
    np.testing.assert_array_equal(held[(*_box.slices(box, within), ...)], pick(array, box))


@some
@given(st.data())
def test_overlapping_cells_are_those_that_share_elements(data):
    shape = data.draw(shapes())
    grid = data.draw(grids(len(shape)))
    box = data.draw(box_in(shape, empty=True))
    found = _box.overlapping_cells(shape, grid, box)
    every = range(int(np.prod(grid)))
    sharing = [
        number
        for number in every
        if _box.intersect(_box.cell(shape, grid, number), box) is not None
    ]
    if shape:
        # A cell without elements may lie between others; it is of no use and does no harm.
        assert [n for n in found if _box.count(_box.cell(shape, grid, n))] == sharing
        assert found == sorted(set(found))
    else:
        assert found == [0]


def test_cells_of_a_large_grid_are_found_without_looking_at_all():
    shape, grid = (1 << 40, 1 << 40), (1 << 30, 1 << 30)
    side = 1 << 10
    box = ((5 * side, 7 * side), (3 * side + 1, 4 * side + 1))
    found = _box.overlapping_cells(shape, grid, box)
    assert found == [(row << 30) + column for row in (5, 6) for column in (3, 4)]


@some
@given(st.data())
def test_contiguous_means_one_run_of_numbers(data):
    shape = data.draw(shapes())
    box = data.draw(box_in(shape))
    numbers = pick(numbered(shape), box).reshape(-1)
    one_run = bool((np.diff(numbers) == 1).all())
    assert _box.is_contiguous(box, _box.full(shape)) == one_run


@some
@given(st.data())
def test_flat_span_reaches_from_the_first_to_the_last_element(data):
    shape = data.draw(shapes())
    within = data.draw(box_in(shape))
    inner = data.draw(box_in(_box.shape_of(within)))
    box = tuple((s + o, e + o) for (s, e), (o, _) in zip(inner, within, strict=True))
    numbers = pick(numbered(_box.shape_of(within)), local(box, within)).reshape(-1)
    assert _box.flat_span(box, within) == (numbers[0], numbers[-1] + 1)


@some
@given(st.data())
def test_rows_around_is_the_smallest_run_that_holds_the_box(data):
    shape = data.draw(shapes())
    whole = _box.full(shape)
    box = data.draw(box_in(shape))
    rows = _box.rows_around(box, whole)
    assert _box.is_contiguous(rows, whole)
    assert _box.intersect(rows, box) == box
    if _box.is_contiguous(box, whole):
        assert rows == box
    # Smallest: no box with a narrower dimension is both contiguous and around.
    for dimension, (start, stop) in enumerate(rows):
        for narrower in ((start + 1, stop), (start, stop - 1)):
            other = (*rows[:dimension], narrower, *rows[dimension + 1 :])
            around = _box.intersect(other, box) == box
            assert not (around and _box.is_contiguous(other, whole))


@some
@given(st.data())
def test_bands_tile_the_box_and_their_runs_are_short(data):
    shape = data.draw(shapes())
    whole = _box.full(shape)
    box = data.draw(box_in(shape))
    limit = data.draw(st.integers(1, 200))
    block = data.draw(st.integers(1, 300))
    bands = list(_box.bands(box, whole, limit, block))
    seen = np.zeros(shape, np.int64)
    for band in bands:
        pick(seen, band)[...] += 1
        start, stop = _box.flat_span(_box.rows_around(band, whole), whole)
        assert stop - start <= limit
    assert (pick(seen, box) == 1).all()
    assert seen.sum() == _box.count(box)
    starts = [_box.flat_span(band, whole)[0] for band in bands]
    assert starts == sorted(starts)


def test_bands_of_two_elements_are_cut_too():
    whole = ((0, 1), (0, 2))
    assert list(_box.bands(whole, whole, 1)) == [((0, 1), (0, 1)), ((0, 1), (1, 2))]


def test_bands_end_where_blocks_of_rows_end():
    box, whole = ((128, 256), (3, 9)), ((0, 1024), (0, 16))
    bands = list(_box.bands(box, whole, 45 * 16, 21 * 16))
    assert [band[0] for band in bands] == [(128, 168), (168, 210), (210, 252), (252, 256)]
    assert {band[1] for band in bands} == {(3, 9)}


@given(st.data())
def test_around_span_is_the_smallest_box_around_a_run_of_elements(data):
    shape = data.draw(shapes())
    within = data.draw(box_in(shape))
    count = _box.count(within)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    inside = np.argwhere(
        (numbered(_box.shape_of(within)) >= start) & (numbered(_box.shape_of(within)) < stop)
    )
    offsets = [low for low, _ in within]
    low = (inside.min(0) + offsets).tolist() if shape else []
    high = (inside.max(0) + offsets + 1).tolist() if shape else []
    assert _box.around_span(start, stop, within) == tuple(zip(low, high, strict=True))
