"""Leaves in pieces that fit into memory, however large they are. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from operator import add
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from ostraka import _box
from ostraka._box import Box
from ostraka._parallel import StopSignal, run_as_completed
from ostraka._source import Source
from ostraka._spec import Target, numpy_dtype

Array = np.ndarray[Any, Any]
Targets = tuple[Target, ...]
Numbers = tuple[int, ...]
"""The numbers of leaves that are worked on together, one of each source."""
OnBytes = Callable[[int], None] | None


class Addable(Protocol):
    def __add__(self, other: Self, /) -> Self: ...


Total = TypeVar("Total", bound=Addable)

PIECE_BYTES = 16 << 20
"""A piece in memory is no larger; smaller ones are read together, up to this much at a time."""
_SMALL_BYTES = 1 << 20
"""Leaves up to this size are not worth several pieces."""
_BATCHES_AT_A_TIME = 2
_ELEMENTS_AT_A_TIME = 1 << 16
"""What is worked on at a time: few enough that copies of them as float64 stay in the cache."""


def add_up(
    sources: Sequence[Source],
    leaves: Sequence[Numbers],
    measure: Callable[[Sequence[Array]], Total],
    zero: Total,
    on_bytes: OnBytes = None,
) -> dict[Numbers, Total]:
    """The sum of what `measure` gives for each of `leaves`, looked at a few elements at a time.

    Leaves that are measured together have one shape. What is in memory at one time is bounded,
    whatever there is to read. `on_bytes` is told how many bytes of arrays have been worked through
    since it was last called.
    """

    def read_and_measure(batch: list[Targets]) -> tuple[list[tuple[Targets, Total]], int]:
        columns = [
            _read_all(source, [targets[number] for targets in batch])
            for number, source in enumerate(sources)
        ]
        nbytes = sum(array.nbytes for column in columns for array in column)
        sums = [
            reduce(add, map(measure, _slices_of(arrays)), zero)
            for arrays in zip(*columns, strict=True)
        ]
        return list(zip(batch, sums, strict=True)), nbytes

    parts: dict[Numbers, dict[Box, Total]] = {numbers: {} for numbers in leaves}
    batches = _batches(sources, _targets(sources[0], parts))
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


def _targets(source: Source, leaves: Iterable[Numbers]) -> Iterator[Targets]:
    for numbers in leaves:
        for box in _pieces_of(source, numbers[0]):
            yield tuple(Target(number, box) for number in numbers)


def _pieces_of(source: Source, leaf: int) -> Iterator[Box]:
    """The boxes of a leaf: all of a small one, else parts of its cells, each one run of a file."""
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


def _batches(sources: Sequence[Source], wanted: Iterable[Targets]) -> Iterator[list[Targets]]:
    """Items together that need about `PIECE_BYTES` of each source."""
    batch: list[Targets] = []
    held = 0
    for targets in wanted:
        first = targets[0]
        dtype = numpy_dtype(sources[0].saved.leaves[first.leaf].dtype)
        nbytes = _box.count(first.box) * dtype.itemsize
        if batch and held + nbytes > PIECE_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(targets)
        held += nbytes
    if batch:
        yield batch


def _read_all(source: Source, targets: Sequence[Target]) -> list[Array]:
    found = dict(source.read(targets))
    return [found[number] for number in range(len(targets))]


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
