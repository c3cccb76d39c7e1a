"""Boxes of one arrangement, found in another."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka import _box
from ostraka._rearrange import Rearrangement, rearranged, restored


@st.composite
def rearrangements(draw: st.DrawFn) -> tuple[Rearrangement, dict[str, Any]]:
    """Any order of axes, then some split, or some merged."""
    rank = draw(st.integers(0, 4))
    factors = [draw(st.integers(1, 4)) for _ in range(rank)]
    axes = draw(st.permutations(range(rank)))
    options: dict[str, Any] = {"axes": axes if draw(st.booleans()) else None}
    order = axes if options["axes"] is not None else list(range(rank))
    shape = list(factors)
    kind = draw(st.sampled_from(["none", "split", "merge"]))
    if kind == "split" and rank:
        axis = draw(st.integers(0, rank - 1))
        sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
        shape[order[axis]] = int(np.prod(sizes))
        open_one = draw(st.integers(0, len(sizes) - 1))
        given = [-1 if n == open_one and draw(st.booleans()) else s for n, s in enumerate(sizes)]
        options["split"] = {axis: given}
    elif kind == "merge" and rank > 1:
        axis = draw(st.integers(0, rank - 2))
        options["merge"] = {axis: [shape[order[axis]], shape[order[axis + 1]]]}
    return rearranged(tuple(shape), **options), options


@given(rearrangements(), st.data())
def test_any_box_is_found_in_the_other_arrangement(
    made: tuple[Rearrangement, dict[str, Any]], data: st.DataObject
):
    form, _ = made
    array = np.arange(int(np.prod(form.shape_before))).reshape(form.shape_before)
    whole = form.apply(array, _box.full(form.factors))
    assert whole.shape == form.shape_after
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in whole.shape]
    wanted = tuple((start, stop) for start, stop in ends)
    found = np.full(_box.shape_of(wanted), -1)
    most = data.draw(st.integers(1, 30))
    for larger in form.pieces(wanted):
        for piece in form.cut(larger, most):
            assert _box.count(piece.before) <= most
            part = array[tuple(slice(*span) for span in piece.before)]
            place = found[(*_box.slices(piece.after, wanted), ...)]
            assert (place == -1).all()
            place[...] = form.apply(part, piece.factors)
    assert (found == whole[tuple(slice(*span) for span in wanted)]).all()


@given(rearrangements())
def test_and_back(made: tuple[Rearrangement, dict[str, Any]]):
    form, options = made
    array = np.arange(int(np.prod(form.shape_before))).reshape(form.shape_before)
    whole = form.apply(array, _box.full(form.factors))
    assert (form.inverse().apply(whole, _box.full(form.factors)) == array).all()
    again = restored(form.shape_after, **options)
    assert (again.shape_before, again.shape_after) == (form.shape_before, form.shape_after)


def test_a_kernel_of_attention_and_numpy():
    """(heads * size, in) to (in, heads, size): transposed, then split."""
    form = rearranged((6, 5), (1, 0), split={1: [2, 3]})
    array = np.arange(30).reshape(6, 5)
    turned = form.apply(array, _box.full(form.factors))
    assert (turned == array.T.reshape(5, 2, 3)).all()


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
    ],
)
def test_what_does_not_fit_is_said(arguments: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        rearranged(*arguments)
