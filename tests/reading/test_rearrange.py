"""Boxes of one arrangement, found in another."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka.layout import box
from ostraka.reading.names.rearrange import Rearrangement, Taken, rearranged, restored


@dataclass
class Made:
    form: Rearrangement
    options: dict[str, Any]
    wide: tuple[int, ...]
    """After the transposition and the split."""

    def by_numpy(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The same with numpy's own means."""
        axes = self.options["axes"]
        wide = (array if axes is None else array.transpose(axes)).reshape(self.wide)
        taken = self.options["taken"]
        if taken is not None:
            wide = wide[(slice(None),) * taken.axis + (slice(taken.start, taken.stop),)]
        return wide.reshape(self.form.shape_after)


@st.composite
def rearrangements(draw: st.DrawFn) -> Made:
    """Any order of axes, then some split, then one cut, then some merged."""
    rank = draw(st.integers(0, 4))
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    axes = draw(st.permutations(range(rank))) if draw(st.booleans()) else None
    order = list(range(rank)) if axes is None else axes
    split: dict[int, list[int]] = {}
    wide: list[int] = []
    for position, axis in enumerate(order):
        if draw(st.integers(0, 2)):
            wide.append(shape[axis])
            continue
        sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
        shape[axis] = int(np.prod(sizes))
        split[position] = sizes_or_open(draw, sizes)
        wide += sizes
    taken = draw(ranges_of(wide)) if wide and draw(st.booleans()) else None
    left = list(wide)
    if taken is not None:
        left[taken.axis : taken.axis + 1] = [] if taken.is_dropped else [taken.stop - taken.start]
    merge: dict[int, list[int]] = {}
    if len(left) > 1 and draw(st.booleans()):
        axis = draw(st.integers(0, len(left) - 2))
        count = draw(st.integers(2, min(3, len(left) - axis)))
        merge[axis] = sizes_or_open(draw, left[axis : axis + count])
    options = {"axes": axes, "split": split or None, "merge": merge or None, "taken": taken}
    return Made(rearranged(tuple(shape), **options), options, tuple(wide))


def sizes_or_open(draw: st.DrawFn, sizes: list[int]) -> list[int]:
    """The same with -1 for one of them, or none."""
    left_open = draw(st.integers(-1, len(sizes) - 1))
    return [-1 if number == left_open else size for number, size in enumerate(sizes)]


@st.composite
def ranges_of(draw: st.DrawFn, wide: list[int]) -> Taken:
    axis = draw(st.integers(0, len(wide) - 1))
    start = draw(st.integers(0, wide[axis] - 1))
    if draw(st.booleans()):
        return Taken(axis, start, start + 1, is_dropped=True)
    return Taken(axis, start, draw(st.integers(start + 1, wide[axis])), is_dropped=False)


def applied(form: Rearrangement, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """All of it, as one piece."""
    (piece,) = form.pieces(box.full(form.shape_after), 1 << 30)
    memory = np.empty(form.shape_after, array.dtype)
    form.place(piece, array[tuple(slice(*span) for span in piece.before)], memory)
    return memory


@given(rearrangements(), st.data())
def test_any_box_is_found_in_the_other_arrangement(made: Made, data: st.DataObject):
    form = made.form
    array = np.arange(int(np.prod(form.shape_before))).reshape(form.shape_before)
    whole = made.by_numpy(array)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in whole.shape]
    wanted = tuple((start, stop) for start, stop in ends)
    found = np.full(box.shape_of(wanted), -1)
    most, shortest = data.draw(st.integers(1, 30)), data.draw(st.sampled_from([0, 2, 5, 1000]))
    elements = 0
    for larger in form.pieces(wanted, shortest):
        for piece in form.cut(larger, most, shortest):
            assert box.count(piece.before) <= most
            assert shortest or box.count(piece.before) == box.count(piece.factors)
            elements += box.count(piece.factors)
            part = array[tuple(slice(*span) for span in piece.before)]
            form.place(piece, part, found[(*box.slices(piece.after, wanted), ...)])
    assert elements == found.size
    assert (found == whole[tuple(slice(*span) for span in wanted)]).all()


@given(rearrangements(), st.data())
def test_what_is_no_part_is_not_filled(made: Made, data: st.DataObject):
    """Back to an array of which a part alone is held: just that part of any box is found."""
    form = made.form.inverse()
    array = np.arange(int(np.prod(made.form.shape_before))).reshape(made.form.shape_before)
    part = made.by_numpy(array)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in array.shape]
    wanted = tuple((start, stop) for start, stop in ends)
    found = np.full(box.shape_of(wanted), -1)
    for larger in form.pieces(wanted):
        for piece in form.cut(larger, data.draw(st.integers(1, 30))):
            read = part[tuple(slice(*span) for span in piece.before)]
            form.place(piece, read, found[(*box.slices(piece.after, wanted), ...)])
    within = array[tuple(slice(*span) for span in wanted)]
    assert (found == np.where(np.isin(within, part), within, -1)).all()
    places = [piece.before for piece in form.pieces(wanted)]
    assert sum(map(box.count, places)) == (found >= 0).sum()
    there = [part[tuple(slice(*span) for span in place)].ravel() for place in places]
    assert sorted(np.concatenate([*there, []])) == sorted(found[found >= 0])


@given(rearrangements())
def test_and_back(made: Made):
    extent = 0 if made.options["taken"] is None else made.wide[made.options["taken"].axis]
    again = restored(made.form.shape_after, **made.options, extent=extent)
    assert again == made.form
    assert again.inverse().inverse() == made.form


def test_a_kernel_of_attention_and_numpy():
    """(heads * size, in) to (in, heads, size): transposed, then split."""
    form = rearranged((6, 5), (1, 0), split={1: [2, 3]})
    array = np.arange(30).reshape(6, 5)
    assert (applied(form, array) == array.T.reshape(5, 2, 3)).all()


def test_the_keys_of_a_fused_tensor():
    """(heads * 3 * size, in), heads outermost: rows of each head, read as such or all together."""
    form = rearranged((24, 5), (1, 0), {1: [2, 3, 4]}, None, Taken(2, 1, 2, is_dropped=True))
    array = np.arange(120).reshape(24, 5)
    assert form.shape_after == (5, 2, 4)
    first, second = form.pieces(((0, 5), (0, 2), (0, 4)), 20)
    assert (first.before, second.before) == (((4, 8), (0, 5)), ((16, 20), (0, 5)))
    (both,) = form.pieces(((0, 5), (0, 2), (0, 4)), 21)
    assert both.before == ((0, 24), (0, 5))
    assert (applied(form, array) == array.T.reshape(5, 2, 3, 4)[:, :, 1]).all()


def test_row_ranges_stay_row_ranges():
    """The outputs of a kernel are rows of the tensor: those that a device has are one range."""
    (piece,) = rearranged((64, 16), (1, 0)).pieces(((0, 16), (32, 48)))
    assert piece.before == ((32, 48), (0, 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 3), (0, 0)), "has 2 axes, which can't be put in the order [0, 0]"),
        (((2, 3), (0,)), "has 2 axes, which can't be put in the order [0]"),
        (((6,), None, {0: [4, -1]}), "has 6 elements along axis 0, which can't be split into"),
        (((6,), None, {0: [2, 2]}), "has 6 elements along axis 0, which can't be split into"),
        (((6,), None, {1: [2, 3]}), "has 1 axes, of which number 1 can't be split"),
        (((6, 2), None, None, {0: [3, 2]}), "has axes of [6, 2], which are not those of [3, 2]"),
        (((6, 2), None, None, {0: [6, 2, 1]}), "has axes of [6, 2], which are not those of"),
        (((6, 2), None, None, {2: [6, 2]}), "becomes one of 2 axes, of which none is number 2"),
        (((6,), None, None, None, Taken(1, 0, 1, False)), "becomes one of 1 axes, of which none"),
    ],
)
def test_what_does_not_fit_is_said(arguments: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        rearranged(*arguments)
