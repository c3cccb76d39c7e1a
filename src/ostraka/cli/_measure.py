"""Numbers about the elements of leaves, which are read in pieces that fit into memory. No JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import add
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from ostraka.common.dtypes import numpy_dtype
from ostraka.common.threads import StopSignal, run_as_completed
from ostraka.formats.source import Source
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.spec import Target

Array = np.ndarray[Any, Any]
Targets = tuple[Target, ...]
Numbers = tuple[int, ...]
"""The numbers of leaves that are worked on together, one of each source."""
OnBytes = Callable[[int], None] | None


class Addable(Protocol):
    """Results that can be added up."""

    def __add__(self, other: Self, /) -> Self: ...


Total = TypeVar("Total", bound=Addable)

PIECE_BYTES = 16 << 20
"""The largest piece in memory. Smaller ones are read together, up to this size."""
_SMALL_BYTES = 1 << 20
"""Leaves up to this size are read whole."""
_BATCHES_AT_A_TIME = 2
_ELEMENTS_AT_A_TIME = 1 << 16
"""Elements measured at a time: few enough that copies of them as float64 stay in the cache."""


def add_up(
    sources: Sequence[Source],
    leaves: Sequence[Numbers],
    measure: Callable[[Sequence[Array]], Total],
    zero: Total,
    on_bytes: OnBytes = None,
) -> dict[Numbers, Total]:
    """The sum of `measure` over each of `leaves`, a few elements at a time.

    Leaves that are measured together have one shape. Memory use is bounded, and all bytes are
    verified. `on_bytes` receives the number of bytes since its last call.
    """

    def read_and_measure(batch: list[Targets]) -> tuple[list[tuple[Targets, Total]], int]:
        read = [
            dict(source.read([targets[number] for targets in batch]))
            for number, source in enumerate(sources)
        ]
        nbytes = sum(array.nbytes for column in read for array in column.values())
        sums = [
            reduce(add, map(measure, _slices_of([column[at] for column in read])), zero)
            for at in range(len(batch))
        ]
        return list(zip(batch, sums, strict=True)), nbytes

    parts: dict[Numbers, dict[Box, Total]] = {numbers: {} for numbers in leaves}
    wanted = (
        tuple(Target(number, box) for number in numbers)
        for numbers in parts
        for box in _pieces_of(sources[0], numbers[0])
    )
    batches = _batches(sources[0], wanted)
    stop = StopSignal()
    for _, (results, nbytes) in run_as_completed(
        read_and_measure, batches, threads=_BATCHES_AT_A_TIME, stop=stop
    ):
        for targets, part in results:
            parts[tuple(target.leaf for target in targets)][targets[0].box] = part
        if on_bytes is not None:
            on_bytes(nbytes)
    # Batches end in any order. Added in the order of boxes, the last digits are always the same.
    return {
        numbers: reduce(add, (found[box] for box in sorted(found)), zero)
        for numbers, found in parts.items()
    }


def _pieces_of(source: Source, leaf: int) -> Iterator[Box]:
    """The boxes to read of a leaf: all of a small one, else parts of its cells."""
    spec = source.saved.leaves[leaf]
    is_small = spec.nbytes <= _SMALL_BYTES
    grid = (1,) * len(spec.shape) if is_small else source.grid_of(leaf)
    itemsize = numpy_dtype(spec.dtype).itemsize
    max_elements = max(PIECE_BYTES // itemsize, 1)
    for number in range(prod(grid)):
        yield from _cut(_box.cell(spec.shape, grid, number), max_elements)


def _cut(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box into runs of its row-major elements."""
    elements = _box.count(box)
    if elements == 0:
        return
    if elements <= max_elements:
        yield box
        return
    dimension = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dimension]
    step = max(max_elements // (elements // (stop - start)), 1)
    for low in range(start, stop, step):
        slab = (*box[:dimension], (low, min(low + step, stop)), *box[dimension + 1 :])
        yield from _cut(slab, max_elements)


def _batches(source: Source, wanted: Iterable[Targets]) -> Iterator[list[Targets]]:
    """Targets in groups that need about `PIECE_BYTES` of each source."""
    batch: list[Targets] = []
    held = 0
    for targets in wanted:
        dtype = numpy_dtype(source.saved.leaves[targets[0].leaf].dtype)
        nbytes = _box.count(targets[0].box) * dtype.itemsize
        if batch and held + nbytes > PIECE_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(targets)
        held += nbytes
    if batch:
        yield batch


def _slices_of(arrays: Sequence[Array]) -> Iterator[tuple[Array, ...]]:
    """Arrays of one shape, flat, some elements at a time."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _ELEMENTS_AT_A_TIME):
        yield tuple(array[start : start + _ELEMENTS_AT_A_TIME] for array in flat)


def as_numbers(values: Array) -> Array:
    """Elements of any dtype as the widest of their kind, exactly."""
    if values.dtype.kind in "biu":
        return values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)
    if values.dtype.kind == "c":
        return values.astype(np.complex128)
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    # The dtypes of ml_dtypes have kinds of their own.
    is_integer = values.dtype.name.startswith(("int", "uint"))
    return values.astype(np.int64 if is_integer else np.float64)


# Least, most, mean and the like


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of many numbers, or of the magnitudes of complex ones.

    `least` and `most` leave out NaN, `mean` and `std` leave out infinities too. They are None if no
    number is left.
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
        least = [part.least for part in (self, other) if part.least is not None]
        most = [part.most for part in (self, other) if part.most is not None]
        return Statistics(
            self.count + other.count,
            min(least, default=None),
            max(most, default=None),
            *_join_moments(self, other),
            self.nan + other.nan,
            self.infinite + other.infinite,
        )

    @property
    def finite(self) -> int:
        return self.count - self.nan - self.infinite


def statistics_of(
    source: Source, leaves: Iterable[int], *, on_bytes: OnBytes = None
) -> dict[int, Statistics]:
    """The statistics of some leaves, by their numbers."""
    found = add_up([source], [(leaf,) for leaf in leaves], _summarize, Statistics(), on_bytes)
    return {leaf: total for (leaf,), total in found.items()}


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Counts of elements that are not finite. A complex number that is both counts as NaN."""

    nan: int = 0
    infinite: int = 0

    def __add__(self, other: NotFinite) -> NotFinite:
        return NotFinite(self.nan + other.nan, self.infinite + other.infinite)

    def __bool__(self) -> bool:
        return bool(self.nan or self.infinite)


def may_be_not_finite(dtype: str) -> bool:
    """True if arrays of this dtype can hold NaN or infinity."""
    return dtype.startswith(("float", "bfloat", "complex"))


def count_not_finite(
    source: Source, leaves: Iterable[int], *, on_bytes: OnBytes = None
) -> dict[int, NotFinite]:
    """The number of elements of some leaves that are NaN or infinite."""
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
    return Statistics(
        values.size,
        float(numbers.min()) if numbers.size else None,
        float(numbers.max()) if numbers.size else None,
        *_moments(finite),
        values.size - numbers.size,
        numbers.size - finite.size,
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
