"""Fingerprints of leaves as data, and when two of them count as the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = float | int | str | None


@dataclass(frozen=True, slots=True)
class Mark:
    """The fingerprint of one leaf."""

    dtype: str
    """Its dtype, `key` for PRNG keys, `state` for objects with a state, or a Python type."""
    shape: tuple[int, ...]
    bits: str
    """The exact part."""
    numbers: tuple[float, ...] = ()
    """The sum of magnitudes, then projections."""
    value: Value = None
    """The value of a single number, for messages."""

    @property
    def is_zero(self) -> bool:
        return bool(self.numbers) and self.numbers[0] == 0

    def to_json(self) -> list[Any]:
        numbers = [float(f"{n:.8g}") if math.isfinite(n) else repr(n) for n in self.numbers]
        return [self.dtype, list(self.shape), self.bits, numbers, self.value]


def mark_from_json(found: Any) -> Mark:
    """Raises ValueError, TypeError or KeyError for anything else than a mark."""
    dtype, shape, bits, numbers, value = found
    return Mark(
        str(dtype), tuple(map(int, shape)), str(bits), tuple(float(n) for n in numbers), value
    )


def are_same(then: Mark, now: Mark, rtol: float | None, floor: float = 0) -> bool:
    """True if two fingerprints have the same bits, or with `rtol`, about the same numbers.

    The distance is relative to elements of at least the magnitude `floor`.
    """
    if then.dtype != now.dtype or then.shape != now.shape:
        is_number = isinstance(then.value, int | float) and isinstance(now.value, int | float)
        return is_number and then.value == now.value  # such as 3 and an array of it
    if then.bits == now.bits:
        return True
    if rtol is None or ("float" not in then.dtype and "complex" not in then.dtype):
        return False
    return distance(then, now, floor) <= rtol


def distance(then: Mark, now: Mark, floor: float = 0) -> float:
    """How far two leaves are apart, relative to their norm. Infinite if it can't be told."""
    if len(then.numbers) < 3 or len(now.numbers) < 3 or then.shape != now.shape:
        return math.inf
    if not all(map(math.isfinite, (*then.numbers, *now.numbers))):
        return 0.0 if repr(then.numbers) == repr(now.numbers) else math.inf
    size = max(math.prod(then.shape), 1)
    largest = max(then.numbers[0], now.numbers[0], floor * size)
    if largest == 0:
        return 0.0
    root = math.sqrt(size)
    projections = [*map(abs, (*then.numbers[1:], *now.numbers[1:]))]
    norm = max(largest / root, *projections)
    apart = [abs(a - b) / norm for a, b in zip(then.numbers[1:], now.numbers[1:], strict=True)]
    return max(abs(then.numbers[0] - now.numbers[0]) / largest, *apart)


def are_comparable(*marks: Mark) -> bool:
    """True if all have finite numbers, and the same dtype and shape."""
    return all(
        one.dtype == marks[0].dtype and one.shape == marks[0].shape and len(one.numbers) > 2
        for one in marks
    ) and all(math.isfinite(number) for one in marks for number in one.numbers)


def squared_distance(then: Mark, now: Mark) -> float:
    """An estimate of the squared distance of two leaves, from their projections."""
    if then.shape != now.shape:
        return math.inf
    pairs = zip(then.numbers[1:], now.numbers[1:], strict=False)
    return sum((a - b) ** 2 for a, b in pairs) / 2


Table = Mapping[str, Mark]
"""Fingerprints by path."""
