"""The values of arrays for people: least, most, mean, NaN, a histogram, the first elements. No JAX.

A small array is read once, together with others. A large one is read twice, piece by piece: for
the least and the most value, then for the histogram between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from ostraka.common.text import json_number
from ostraka.common.threads import batches
from ostraka.errors import Damaged
from ostraka.formats.source import Source
from ostraka.layout import box as _box
from ostraka.layout.spec import Target
from ostraka.report.measure import (
    PIECE_BYTES,
    Array,
    Progress,
    Statistics,
    add_up,
    as_numbers,
    slices_of,
    summarize,
    unseen,
)
from ostraka.report.schema import LeafValues

_BINS = 40
_SHOWN = 8
"""Elements shown along each of the last two dimensions."""
_EXACT = 1 << 53
"""Larger integers are no exact numbers in JavaScript."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Statistics, the number of zeros, and the bounds of the finite values."""

    statistics: Statistics = field(default_factory=Statistics)
    zero: int = 0
    low: float = math.inf
    high: float = -math.inf
    is_integer: bool = True

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.statistics + other.statistics,
            self.zero + other.zero,
            min(self.low, other.low),
            max(self.high, other.high),
            self.is_integer and other.is_integer,
        )


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many values are in each bin."""

    counts: tuple[int, ...] = ()

    def __add__(self, other: _Counts) -> _Counts:
        if not self.counts:
            return other
        return _Counts(tuple(map(add, self.counts, other.counts)) if other.counts else self.counts)


@dataclass(frozen=True, slots=True)
class _Bins:
    """Equal bins between two numbers."""

    low: float
    high: float
    number: int

    def count(self, elements: Array) -> _Counts:
        finite = _finite(as_numbers(elements)).astype(np.float64, copy=False)
        # Halves, since the distance of the largest numbers would be infinite.
        low, high = self.low / 2, self.high / 2
        share = (finite / 2 - low) / (high - low)
        at = np.clip((share * self.number).astype(np.int64), 0, self.number - 1)
        return _Counts(tuple(np.bincount(at, minlength=self.number).tolist()))


def values_of(
    source: Source, leaves: Iterable[int], progress: Progress = unseen
) -> dict[int, LeafValues]:
    """The values of some leaves, by their numbers. All bytes are verified.

    A leaf that can't be read has the reason as its `problem`.
    """
    found: dict[int, LeafValues] = {}
    wanted = list(leaves)
    specs = source.saved.leaves
    small = [number for number in wanted if specs[number].nbytes <= PIECE_BYTES]
    total, done = sum(specs[number].nbytes for number in wanted), 0
    with progress("reading values", total) as bar:
        for batch in batches(small, lambda number: specs[number].nbytes, PIECE_BYTES):
            found |= _values_of_small(source, batch)
            done += sum(specs[number].nbytes for number in batch)
            bar(done, total)
        for number in wanted:
            if number not in found:
                found[number] = _values_of_large(source, number)
                done += specs[number].nbytes
                bar(done, total)
    return found


def _values_of_small(source: Source, batch: Sequence[int]) -> dict[int, LeafValues]:
    targets = [Target(number, _box.full(source.saved.leaves[number].shape)) for number in batch]
    try:
        arrays = dict(source.read(targets))
    except (Damaged, OSError) as error:
        lost = _named_in(error, source, batch) or (batch if len(batch) == 1 else [])
        found = {number: _unreadable(error) for number in lost}
        rest = [number for number in batch if number not in found]
        for part in [rest] if lost and rest else [[number] for number in rest]:
            found |= _values_of_small(source, part)
        return found

    def measured(number: int, array: Array) -> LeafValues:
        def total(measure: Callable[[Array], Any], zero: Any) -> Any:
            return reduce(add, (measure(*piece) for piece in slices_of([array])), zero)

        return _describe(source, number, total, array[_index_of_slice(array.shape)])

    return {number: measured(number, arrays[at]) for at, number in enumerate(batch)}


def _named_in(error: Exception, source: Source, batch: Sequence[int]) -> list[int]:
    """The leaves that an error names as damaged."""
    if not isinstance(error, Damaged):
        return []
    paths = {path for problem in error.problems for path in problem.leaves}
    return [number for number in batch if source.saved.leaves[number].path in paths]


def _values_of_large(source: Source, number: int) -> LeafValues:
    def total(measure: Callable[[Array], Any], zero: Any) -> Any:
        return add_up("reading", [source], [(number,)], measure, zero)[(number,)]

    shape = source.saved.leaves[number].shape
    box = tuple(
        (0, min(extent, (index.stop if isinstance(index, slice) else 1)))
        for extent, index in zip(shape, _index_of_slice(shape), strict=True)
    )
    try:
        ((_, first),) = source.read([Target(number, box)])
        return _describe(source, number, total, first[_index_of_slice(shape)])
    except (Damaged, OSError) as error:
        return _unreadable(error)


def _describe(
    source: Source, number: int, total: Callable[[Callable[[Array], Any], Any], Any], first: Array
) -> LeafValues:
    sums: _Sums = total(_measure, _Sums())
    found = sums.statistics
    bins, counts = _bins_of(sums), _Counts()
    if bins is not None:
        counts = total(bins.count, _Counts())
    norm = None
    if found.mean is not None and found.std is not None:
        norm = math.hypot(found.mean, found.std) * math.sqrt(found.finite)
    return LeafValues(
        count=found.count,
        least=json_number(found.least),
        most=json_number(found.most),
        mean=json_number(found.mean),
        std=json_number(found.std),
        norm=json_number(norm),
        nan=found.nan,
        infinite=found.infinite,
        zero=sums.zero,
        histogram=None
        if bins is None
        else {"low": bins.low, "high": bins.high, "counts": list(counts.counts)},
        slice=_describe_slice(source.saved.leaves[number].shape, first),
        problem=None,
    )


def _measure(elements: Array) -> _Sums:
    values = as_numbers(elements)
    zero, finite = values.size - int(np.count_nonzero(values)), _finite(values)
    if not finite.size:
        return _Sums(summarize(elements), zero)
    low, high = float(finite.min()), float(finite.max())
    return _Sums(summarize(elements), zero, low, high, values.dtype.kind in "iu")


def _finite(values: Array) -> Array:
    """The finite numbers, or magnitudes of complex ones."""
    numbers = np.abs(values) if values.dtype.kind == "c" else values
    return numbers[np.isfinite(numbers)]


def _bins_of(sums: _Sums) -> _Bins | None:
    """Bins between the least and the most finite value. A few integers get a bin each."""
    if not sums.statistics.finite:
        return None
    low, high = sums.low, sums.high
    if sums.is_integer and high - low < _BINS:
        return _Bins(low - 0.5, high + 0.5, int(high - low) + 1)
    if low == high:
        apart = abs(low) * 0.05 or 0.5
        return _Bins(low - apart, low + apart, 1)
    return _Bins(low, high, _BINS)


def _index_of_slice(shape: Sequence[int]) -> tuple[Any, ...]:
    """The index of the first elements: some of the last two dimensions, at the first of others."""
    above = max(len(shape) - 2, 0)
    return (*(0,) * above, *(slice(0, min(extent, _SHOWN)) for extent in shape[above:]))


def _describe_slice(shape: Sequence[int], first: Array) -> dict[str, Any]:
    entries = [
        f":{entry.stop}" if isinstance(entry, slice) else "0" for entry in _index_of_slice(shape)
    ]
    return {
        "index": f"[{', '.join(entries)}]" if entries else "[()]",
        "shape": list(first.shape),
        "values": _nested(
            first.tolist() if first.dtype.kind in "bc" else as_numbers(first).tolist()
        ),
    }


def _nested(value: Any) -> Any:
    """Numbers, or lists of them, for JSON: floats with six digits, as people read them."""
    if isinstance(value, list):
        return [_nested(one) for one in value]
    if isinstance(value, complex):
        return f"{value:.6g}"
    if isinstance(value, float):
        return json_number(float(f"{value:.6g}"))
    return str(value) if isinstance(value, int) and abs(value) > _EXACT else value


def _unreadable(error: Exception) -> LeafValues:
    return LeafValues(
        count=0,
        least=None,
        most=None,
        mean=None,
        std=None,
        norm=None,
        nan=0,
        infinite=0,
        zero=0,
        histogram=None,
        slice=None,
        problem=str(error),
    )
