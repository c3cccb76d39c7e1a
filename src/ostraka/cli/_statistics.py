"""Least, most, mean and the like of leaves, read piece by piece. No JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostraka._source import Source
from ostraka.cli._stream import Array, OnBytes, add_up, as_numbers


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of many numbers.

    `least` and `most` leave out NaN, `mean` and `std` infinities too; all are None where no number
    is left. Of complex numbers, they are those of the magnitudes.
    """

    count: int = 0
    least: float | int | None = None
    most: float | int | None = None
    mean: float | None = None
    std: float | None = None
    nan: int = 0
    infinite: int = 0

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both together."""
        mean, std = _join_moments(self, other)
        return Statistics(
            count=self.count + other.count,
            least=_pick(min, self.least, other.least),
            most=_pick(max, self.most, other.most),
            mean=mean,
            std=std,
            nan=self.nan + other.nan,
            infinite=self.infinite + other.infinite,
        )

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.infinite


def statistics_of(
    source: Source, leaves: Iterable[int], *, on_bytes: OnBytes = None
) -> dict[int, Statistics]:
    """The statistics of some leaves, by their numbers; everything that is read is verified."""
    found = add_up([source], [(leaf,) for leaf in leaves], _summarize, Statistics(), on_bytes)
    return {leaf: total for (leaf,), total in found.items()}


@dataclass(frozen=True, slots=True)
class NotFinite:
    """How many elements are not finite; one that is both, as a complex number can be, is NaN."""

    nan: int = 0
    infinite: int = 0

    def __add__(self, other: NotFinite) -> NotFinite:
        return NotFinite(self.nan + other.nan, self.infinite + other.infinite)

    def __bool__(self) -> bool:
        return bool(self.nan or self.infinite)


def may_be_not_finite(dtype: str) -> bool:
    """Whether arrays of a dtype can hold NaN or infinity."""
    return dtype.startswith(("float", "bfloat", "complex"))


def count_not_finite(
    source: Source, leaves: Iterable[int], *, on_bytes: OnBytes = None
) -> dict[int, NotFinite]:
    """How many elements of some leaves are NaN or infinite; everything that is read is verified."""
    found = add_up([source], [(leaf,) for leaf in leaves], _count_not_finite, NotFinite(), on_bytes)
    return {leaf: total for (leaf,), total in found.items()}


def _count_not_finite(arrays: Sequence[Array]) -> NotFinite:
    (values,) = arrays
    numbers = values if values.dtype.kind in "fc" else as_numbers(values)
    finite = np.isfinite(numbers)
    if finite.all():
        return NotFinite()
    nan = int(np.isnan(numbers).sum())
    return NotFinite(nan, int((~finite).sum()) - nan)


def _summarize(arrays: Sequence[Array]) -> Statistics:
    values = as_numbers(arrays[0])
    if values.dtype.kind in "iu":
        return Statistics(
            values.size, int(values.min()), int(values.max()), *_moments(values.astype(np.float64))
        )
    magnitudes = np.abs(values) if values.dtype.kind == "c" else values
    numbers = magnitudes[~np.isnan(magnitudes)]
    finite = numbers[np.isfinite(numbers)]
    mean, std = _moments(finite)
    return Statistics(
        count=values.size,
        least=float(numbers.min()) if numbers.size else None,
        most=float(numbers.max()) if numbers.size else None,
        mean=mean,
        std=std,
        nan=values.size - numbers.size,
        infinite=numbers.size - finite.size,
    )


def _moments(values: Array) -> tuple[float | None, float | None]:
    if not values.size:
        return None, None
    # Numbers near the largest overflow here to infinity, which is shown.
    with np.errstate(over="ignore", invalid="ignore"):
        return float(values.mean()), float(values.std())


def _join_moments(a: Statistics, b: Statistics) -> tuple[float | None, float | None]:
    """Mean and standard deviation of two parts together (Chan, Golub, LeVeque)."""
    if a.mean is None or a.std is None:
        return b.mean, b.std
    if b.mean is None or b.std is None:
        return a.mean, a.std
    count = a.finite + b.finite
    distance = b.mean - a.mean
    mean = a.mean + distance * (b.finite / count)
    spread = (
        a.std * a.std * (a.finite / count)
        + b.std * b.std * (b.finite / count)
        + distance * distance * (a.finite / count) * (b.finite / count)
    )
    return mean, math.sqrt(spread)


def _pick(choose: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else choose(a, b)
