"""Numbers about the elements of leaves, which are read in pieces that fit into memory. No JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import starmap
from math import prod
from operator import add
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from ostraka.common.dtypes import numpy_dtype
from ostraka.common.progress import OnBytes
from ostraka.common.threads import StopSignal, batches, run_as_completed
from ostraka.formats.source import Source
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.spec import Target

Array = np.ndarray[Any, Any]
Targets = tuple[Target, ...]
Numbers = tuple[int, ...]
"""The numbers of leaves that are worked on together, one of each source."""


class Addable(Protocol):
    """Results that can be added up."""

    def __add__(self, other: Self, /) -> Self: ...


Total = TypeVar("Total", bound=Addable)

Progress = Callable[[str, int], AbstractContextManager[OnBytes]]
"""Shows how many bytes of some work are done. It takes the name of the work and all its bytes."""


@contextmanager
def unseen(what: str, total_bytes: int) -> Generator[OnBytes]:
    """Show nothing."""
    yield lambda done, total: None


PIECE_BYTES = 16 << 20
"""The largest piece in memory. Smaller ones are read together, up to this size."""
_SMALL_BYTES = 1 << 20
"""Leaves up to this size are read whole."""
_BATCHES_AT_A_TIME = 2
_ELEMENTS_AT_A_TIME = 1 << 16
"""Elements measured at a time: few enough that copies of them as float64 stay in the cache."""


def add_up(
    what: str,
    sources: Sequence[Source],
    leaves: Iterable[Numbers],
    measure: Callable[..., Total],
    zero: Total,
    progress: Progress = unseen,
) -> dict[Numbers, Total]:
    """The sum of `measure` over each of `leaves`, a few elements of each source at a time.

    Leaves that are measured together have one shape. Memory use is bounded, and all bytes are
    verified. `progress` shows how far `what` has come.
    """

    def read_and_measure(batch: list[Targets]) -> tuple[list[tuple[Targets, Total]], int]:
        read = [
            dict(source.read([targets[number] for targets in batch]))
            for number, source in enumerate(sources)
        ]
        nbytes = sum(array.nbytes for column in read for array in column.values())
        sums = [
            reduce(add, starmap(measure, slices_of([column[at] for column in read])), zero)
            for at in range(len(batch))
        ]
        return list(zip(batch, sums, strict=True)), nbytes

    parts: dict[Numbers, dict[Box, Total]] = {numbers: {} for numbers in leaves}
    wanted = (
        tuple(Target(number, box) for number in numbers)
        for numbers in parts
        for box in _pieces_of(sources[0], numbers[0])
    )
    total = sum(
        source.saved.leaves[number].nbytes
        for numbers in parts
        for source, number in zip(sources, numbers, strict=True)
    )

    def nbytes_of(targets: Targets) -> int:
        leaf = sources[0].saved.leaves[targets[0].leaf]
        return _box.count(targets[0].box) * numpy_dtype(leaf.dtype).itemsize

    done = 0
    with progress(what, total) as bar:
        for _, (results, nbytes) in run_as_completed(
            read_and_measure,
            batches(wanted, nbytes_of, PIECE_BYTES),
            threads=_BATCHES_AT_A_TIME,
            stop=StopSignal(),
        ):
            for targets, part in results:
                parts[tuple(target.leaf for target in targets)][targets[0].box] = part
            done += nbytes
            bar(done, total)
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
    max_elements = PIECE_BYTES // numpy_dtype(spec.dtype).itemsize
    for cell in (_box.cell(spec.shape, grid, number) for number in range(prod(grid))):
        if _box.count(cell):
            yield from _box.bands(cell, cell, max_elements)


def slices_of(arrays: Sequence[Array]) -> Iterator[tuple[Array, ...]]:
    """Arrays of one shape, flat, some elements at a time."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _ELEMENTS_AT_A_TIME):
        yield tuple(array[start : start + _ELEMENTS_AT_A_TIME] for array in flat)


def as_numbers(values: Array) -> Array:
    """Elements of any dtype as the widest of their kind, exactly."""
    # By name, since the dtypes of ml_dtypes have kinds of their own.
    is_integer = values.dtype.name.startswith(("bool", "int", "uint"))
    widest = np.complex128 if values.dtype.kind == "c" else np.float64
    exact = np.uint64 if values.dtype == np.uint64 else np.int64
    return values.astype(exact if is_integer else widest)


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

    @property
    def is_finite(self) -> bool:
        return self.finite == self.count


def summarize(elements: Array) -> Statistics:
    """The statistics of some elements."""
    values = as_numbers(elements)
    magnitudes = np.abs(values) if values.dtype.kind == "c" else values
    numbers = magnitudes[~np.isnan(magnitudes)]
    finite = numbers[np.isfinite(numbers)]
    return Statistics(
        values.size,
        numbers.min().item() if numbers.size else None,
        numbers.max().item() if numbers.size else None,
        *_moments(finite.astype(np.float64, copy=False)),
        values.size - numbers.size,
        numbers.size - finite.size,
    )


def statistics_of(
    source: Source,
    leaves: Iterable[int],
    measure: Callable[[Array], Statistics] = summarize,
    progress: Progress = unseen,
) -> dict[int, Statistics]:
    """The statistics of some leaves, by their numbers. `measure` returns those of some elements."""
    found = add_up("reading", [source], zip(leaves), measure, Statistics(), progress)
    return {leaf: total for (leaf,), total in found.items()}


def count_not_finite(values: Array) -> Statistics:
    """The counts of NaN and infinity alone. A complex number that is both counts as NaN."""
    numbers = values if values.dtype.kind in "fc" else as_numbers(values)
    not_finite = values.size - int(np.count_nonzero(np.isfinite(numbers)))
    nan = int(np.isnan(numbers).sum()) if not_finite else 0
    return Statistics(values.size, nan=nan, infinite=not_finite - nan)


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
