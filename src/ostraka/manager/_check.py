"""Arguments that make no sense."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def check_step(step: SupportsIndex) -> int:
    try:
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(f"a step must be a whole number, not {step!r}") from error
    if number < 0:
        raise ValueError(f"a step must be 0 or more, not {number}")
    return number


def check_positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{name} must be more than 0, not {number!r}")
