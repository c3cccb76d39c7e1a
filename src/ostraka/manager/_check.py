"""Checks of arguments, so that bad ones raise at once and not at the first save."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

_TOO_HIGH = 1 << 63


def check_step(step: SupportsIndex) -> int:
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(f"a step must be a whole number, not {_shown(step)}") from error
    if number < 0:
        raise ValueError(f"a step must be 0 or more, not {number}")
    if number >= _TOO_HIGH:
        raise ValueError("a step must be less than 2**63")
    return number


def check_restored_step(step: SupportsIndex | None) -> int | None:
    """The step to restore; None for the newest."""
    if step is None:
        return None
    try:
        return check_step(step)
    except TypeError as error:
        hint = "leave it out for the newest, and give a tree as like= or into="
        raise TypeError(f"{error}; {hint}") from error


def check_saved_step(step: SupportsIndex) -> int:
    try:
        return check_step(step)
    except TypeError as error:
        raise TypeError(f"{error}; the step comes first, as in save(100, tree)") from error


def check_steps(name: str, steps: Iterable[SupportsIndex]) -> frozenset[int]:
    try:
        if isinstance(steps, str):
            raise TypeError("its characters are no steps")
        listed = list(steps)
    except TypeError as error:
        raise TypeError(f"{name} must be a list of steps, not {_shown(steps)}") from error
    try:
        return frozenset(check_step(step) for step in listed)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error


def _shown(value: Any) -> str:
    """A short value as it is; of a long one, such as a whole model, its type."""
    if isinstance(value, str | bytes | float | int | complex | None):
        return repr(value)[:60]
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")


def check_count(name: str, count: SupportsIndex | None) -> int | None:
    """A whole number of 1 or more, or None."""
    if count is None:
        return None
    number = _index(count)
    if number is None or isinstance(count, bool):
        raise TypeError(f"{name} must be a whole number, not {count!r}")
    if number < 1:
        raise ValueError(f"{name} must be more than 0, not {number}")
    return number


def check_backlog(backlog: SupportsIndex) -> int:
    """A whole number of 0 or more."""
    number = None if isinstance(backlog, bool) else _index(backlog)
    if number is None:
        raise TypeError(f"backlog must be a whole number of steps, not {backlog!r}")
    if number < 0:
        raise ValueError(f"backlog must be 0 or more, not {number}")
    return number


def _index(number: SupportsIndex) -> int | None:
    try:
        return operator.index(number)
    except TypeError:
        return None


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
