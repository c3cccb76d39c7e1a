"""Checks of arguments, so that bad ones raise at once and not at the first save."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, Literal, SupportsIndex

_TOO_HIGH = 1 << 63


def check_number(
    name: str, given: SupportsIndex, *, least: int, kind: str = "a whole number", hint: str = ""
) -> int:
    """Return a whole number of at least `least`, which is 0 or 1."""
    try:
        if isinstance(given, bool):
            raise TypeError
        number = operator.index(given)
    except TypeError as error:
        raise TypeError(f"{name} must be {kind}, not {_shown(given)}{hint}") from error
    if number < least:
        raise ValueError(f"{name} must be {'more than 0' if least else '0 or more'}, not {number}")
    return number


def check_step(step: SupportsIndex, hint: str = "") -> int:
    """Return the number of a step. `hint` follows the error message."""
    number = check_number("a step", step, least=0, hint=hint)
    if number >= _TOO_HIGH:
        raise ValueError("a step must be less than 2**63")
    return number


def check_steps(name: str, steps: Iterable[SupportsIndex]) -> frozenset[int]:
    """Return the numbers of a list of steps."""
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


def check_count(name: str, count: SupportsIndex | None) -> int | None:
    """Return a whole number of 1 or more, or None."""
    return None if count is None else check_number(name, count, least=1)


def check_seconds(name: str, seconds: float | None) -> float | None:
    """Return a finite number of more than 0, or None."""
    if seconds is None:
        return None
    try:
        if isinstance(seconds, str):
            raise TypeError
        number = float(seconds)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number of seconds, not {seconds!r}") from error
    if not 0 < number < math.inf:
        bound = "less than infinity" if number > 0 else "more than 0"
        raise ValueError(f"{name} must be {bound}, not {seconds!r}")
    return number


def check_share(name: str, share: float) -> float:
    """Return a number between 0 and 1."""
    given: Any = share
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1:
        raise ValueError(f"{name} is {_shown(share)}; it must be more than 0 and less than 1")
    return float(share)


def check_function(name: str, function: Any) -> Any:
    """Return a function, or None."""
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function, not {function!r}")
    return function


def check_on_preemption(given: Any) -> Literal["exit", "continue"] | None:
    """Return what `save` does after it has saved a step because of SIGTERM.

    None means that the manager does not watch for SIGTERM.
    """
    if given in ("exit", "continue"):
        return given
    if isinstance(given, bool):
        return "exit" if given else None
    raise ValueError(
        f'on_preemption is {_shown(given)}; it must be "exit", "continue", or False to leave '
        "SIGTERM alone"
    )


def check_on_interrupt(given: Any, on_preemption: str | None) -> bool:
    """Return True if Ctrl-C saves a step before it ends the loop."""
    if given not in ("raise", "save"):
        raise ValueError(f'on_interrupt is {_shown(given)}; it must be "raise" or "save"')
    if given == "save" and on_preemption is None:
        raise ValueError(
            'on_interrupt="save" saves as on preemption, and on_preemption is False; leave that out'
        )
    return given == "save"


def _shown(value: Any) -> str:
    """Return the repr of a short value, or the type of a long one, such as a whole model."""
    if isinstance(value, str | bytes | float | int | complex | None):
        return repr(value)[:60]
    kind = type(value)
    return f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")
