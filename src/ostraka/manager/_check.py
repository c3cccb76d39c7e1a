"""Arguments that make no sense are refused at once, not after a night of training."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex


def check_step(step: SupportsIndex) -> int:
    try:
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(f"a step must be a whole number, not {step!r}") from error
    if number < 0:
        raise ValueError(f"a step must be 0 or more, not {number}")
    return number


def check_steps(name: str, steps: Iterable[SupportsIndex]) -> frozenset[int]:
    try:
        listed = list(steps)
    except TypeError as error:
        raise TypeError(f"{name} must be a list of steps, not {steps!r}") from error
    try:
        return frozenset(check_step(step) for step in listed)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def check_count(name: str, count: SupportsIndex | None) -> int | None:
    """A whole number of 1 or more, or None."""
    if count is None:
        return None
    try:
        number = operator.index(count)
    except TypeError:
        number = None
    if number is None or isinstance(count, bool):
        raise TypeError(f"{name} must be a whole number, not {count!r}")
    if number < 1:
        raise ValueError(f"{name} must be more than 0, not {number}")
    return number


def check_seconds(name: str, seconds: float | None) -> float | None:
    """A finite number of more than 0, or None."""
    if seconds is None:
        return None
    try:
        number = float(seconds)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(seconds, str):
        raise TypeError(f"{name} must be a number of seconds, not {seconds!r}")
    if not 0 < number < math.inf:
        bound = "less than infinity" if number > 0 else "more than 0"
        raise ValueError(f"{name} must be {bound}, not {seconds!r}")
    return number


def check_function(name: str, function: Any) -> Any:
    """Something to call, or None."""
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function, not {function!r}")
    return function
