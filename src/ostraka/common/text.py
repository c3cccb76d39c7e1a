"""Shapes and values as text for people, as the command and notebooks show them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

_MOST_DIGITS = 4000
"""Python refuses to write more in decimal."""


def shorten(text: str, width: int) -> str:
    """The beginning of a text that is longer than `width`."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def show_shape(shape: Sequence[int]) -> str:
    """A shape as `2 × 3`, or `()`."""
    return " × ".join(map(str, shape)) or "()"


def show_value(value: Any) -> str:
    """The repr of a value, with integers too long for Python in hexadecimal."""
    if is_long(value):
        return hex(value)
    try:
        return repr(value)
    except ValueError:  # A container of such integers.
        return type(value).__name__


def is_long(value: Any) -> TypeGuard[int]:
    """True for an integer that Python may not write in decimal."""
    return type(value) is int and value.bit_length() > 3 * _MOST_DIGITS


def json_number(value: Any) -> Any:
    """A number for JSON. NaN and infinity, which JSON lacks, and long integers become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return hex(value) if is_long(value) else value
