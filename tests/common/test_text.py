"""Shapes and values as text."""

import pytest

from ostraka.common.text import shorten, show_shape, show_value


def test_shapes_and_short_texts():
    assert [show_shape(shape) for shape in ((2, 3), (7,), ())] == ["2 × 3", "7", "()"]
    assert [shorten(text, 4) for text in ("four", "fives")] == ["four", "fiv…"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\n", "'a\\n'"),
        (10**3000, "1" + "0" * 3000),
        (1 << 20_000, "0x1" + "0" * 5000),
        ([1 << 20_000], "list"),
    ],
    ids=["text", "integer", "long integer", "list of a long integer"],
)
def test_values_are_shown_as_python_prints_them_if_it_can(value: object, shown: str):
    assert show_value(value) == shown
