"""How two checkpoints differ: structure, shapes, dtypes, shardings, values. No JAX.

Arrays are compared piece by piece, in bounded memory. NaN equals NaN, and -0.0 equals 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ostraka.cli._measure import Array, OnBytes, add_up, as_numbers
from ostraka.cli._output import shown_value
from ostraka.cli._tree import sharding_of
from ostraka.formats.source import Source
from ostraka.tree.nodes import ArrayNumber, Branch, Kept, Leaf, UnreadableLeaf, leaves_of
from ostraka.tree.patterns import Patterns, matches

Aspect = Literal["kind", "shape", "dtype", "same_as", "sharding", "value"]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the elements of two arrays are apart.

    `changed` counts the elements that differ by more than the tolerance. `nan` of them are NaN in
    one array only. `largest` and `total` are of the absolute differences of all others.
    """

    elements: int = 0
    changed: int = 0
    nan: int = 0
    largest: float = 0.0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """The mean absolute difference of the elements that could be compared."""
        compared = self.elements - self.nan
        return self.total / compared if compared else 0.0

    def __add__(self, other: Distance) -> Distance:
        return Distance(
            self.elements + other.elements,
            self.changed + other.changed,
            self.nan + other.nan,
            max(self.largest, other.largest),
            self.total + other.total,
        )


@dataclass(frozen=True, slots=True)
class LeafComparison:
    """One leaf in two checkpoints. None stands for a checkpoint without it."""

    path: str
    a: LeafDescription | None
    b: LeafDescription | None
    differs: tuple[Aspect, ...] = ()
    distance: Distance | None = None
    """None if the elements were not compared: not asked for, values, other shapes."""

    @property
    def same(self) -> bool:
        return not self.differs and self.a is not None and self.b is not None


@dataclass(frozen=True, slots=True)
class LeafDescription:
    """A leaf of one checkpoint: an array, or a value in `_METADATA`."""

    kind: str
    """The kind of array, or the type of a value."""
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    sharding: str | None = None
    value: str | None = None
    same_as: str | None = None
    """The first path of an array that has several."""


@dataclass(frozen=True, slots=True)
class TreeComparison:
    """All leaves of two checkpoints, in tree order, and containers of different kinds."""

    leaves: tuple[LeafComparison, ...]
    containers: tuple[tuple[str, str, str], ...]
    """The path of each container that differs, and its kind in either checkpoint."""

    @property
    def same(self) -> bool:
        return not self.containers and all(leaf.same for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Which differences count."""

    patterns: Patterns = ()
    """Patterns of the leaves to compare. Without any, all leaves are compared."""
    rtol: float = 0.0
    atol: float = 0.0
    """Elements are alike if `|a - b| <= atol + rtol * |b|`, as in numpy."""
    values: bool = True
    """True to read and compare the elements of arrays."""
    shardings: bool = True


def compare(
    a: Source, b: Source, options: CompareOptions, *, on_bytes: OnBytes = None
) -> TreeComparison:
    """Compare two checkpoints, leaf by leaf, and verify all bytes on the way."""
    in_a, in_b = _values_by_path(a, options), _values_by_path(b, options)
    pairs = _comparable_arrays(a, b, options)

    def measure(arrays: Sequence[Array]) -> Distance:
        return _measure(arrays[0], arrays[1], options)

    distances = add_up([a, b], sorted({*pairs.values()}), measure, Distance(), on_bytes)
    leaves: list[LeafComparison] = []
    for path in in_a | in_b:
        one = _describe(a, path, in_a[path]) if path in in_a else None
        other = _describe(b, path, in_b[path]) if path in in_b else None
        distance = distances[pairs[path]] if path in pairs else None
        differs = tuple(_aspects(one, other, distance, options))
        leaves.append(LeafComparison(path, one, other, differs, distance))
    return TreeComparison(tuple(leaves), () if options.patterns else tuple(_containers(a, b)))


def bytes_to_read(a: Source, b: Source, options: CompareOptions) -> int:
    """The bytes of all arrays that `compare` would read."""
    pairs = {*_comparable_arrays(a, b, options).values()}
    return sum(a.saved.leaves[one].nbytes + b.saved.leaves[other].nbytes for one, other in pairs)


def _values_by_path(source: Source, options: CompareOptions) -> dict[str, Any]:
    return {
        leaf.path: leaf.value
        for leaf in leaves_of(source.tree)
        if not options.patterns or matches(options.patterns, leaf.path)
    }


def _comparable_arrays(a: Source, b: Source, options: CompareOptions) -> dict[str, tuple[int, int]]:
    """The numbers of two arrays of one shape by path, if elements are compared."""
    if not options.values:
        return {}
    in_a, in_b = _values_by_path(a, options), _values_by_path(b, options)
    pairs: dict[str, tuple[int, int]] = {}
    for path, one in in_a.items():
        other = in_b.get(path)
        if (
            isinstance(one, ArrayNumber)
            and isinstance(other, ArrayNumber)
            and a.saved.leaves[one.number].shape == b.saved.leaves[other.number].shape
        ):
            pairs[path] = (one.number, other.number)
    return pairs


# What is said of a leaf


def _describe(source: Source, path: str, value: Any) -> LeafDescription:
    if isinstance(value, Kept):
        return LeafDescription("kept", value=value.name)
    if isinstance(value, UnreadableLeaf):  # which is equal to nothing
        return LeafDescription("lost", value=f"in {source.location}: {value.why}")
    if not isinstance(value, ArrayNumber):
        return LeafDescription(type(value).__name__, value=shown_value(value))
    leaf = source.saved.leaves[value.number]
    return LeafDescription(
        kind=f"key<{leaf.prng}>" if leaf.kind == "key" else leaf.kind,
        dtype=leaf.dtype,
        shape=leaf.shape,
        sharding=sharding_of(source.saved, leaf, with_mesh=True),
        same_as=None if leaf.path == path else leaf.path,
    )


def _aspects(
    a: LeafDescription | None,
    b: LeafDescription | None,
    distance: Distance | None,
    options: CompareOptions,
) -> Iterator[Aspect]:
    if a is None or b is None:
        return
    for aspect in ("kind", "shape", "dtype", "same_as"):
        if getattr(a, aspect) != getattr(b, aspect):
            yield aspect
    if options.shardings and a.sharding != b.sharding:
        yield "sharding"
    if a.value != b.value or (distance is not None and distance.changed):
        yield "value"


# Elements


def _measure(a: Array, b: Array, options: CompareOptions) -> Distance:
    # Most arrays pass this quick test.
    if a.dtype == b.dtype and bool((a.view(np.uint8) == b.view(np.uint8)).all()):
        return Distance(a.size)
    a, b = as_numbers(a), as_numbers(b)
    unequal = a != b
    if not unequal.any():
        return Distance(a.size)
    elements = a.size
    a, b = a[unequal], b[unequal]
    nan = 0
    # What overflows here becomes an infinity, and is reported as one.
    with np.errstate(over="ignore", invalid="ignore"):
        if a.dtype.kind in "iu" and a.dtype == b.dtype:
            # The difference of two integers may need a bit more than they have.
            apart = np.where(a > b, a - b, b - a).view(np.uint64).astype(np.float64)
            size = np.abs(b.astype(np.float64))
        else:
            kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
            a, b = a.astype(kind), b.astype(kind)
            nan = int((np.isnan(a) != np.isnan(b)).sum())
            comparable = ~(np.isnan(a) | np.isnan(b))
            apart, size = np.abs(a - b)[comparable], np.abs(b)[comparable]
        # An infinity is not near anything but itself, whatever the tolerance.
        near = (apart <= options.atol + options.rtol * size) & np.isfinite(apart)
        total = float(apart.sum())
    return Distance(elements, nan + int((~near).sum()), nan, float(apart.max(initial=0.0)), total)


# Containers


def _containers(a: Source, b: Source) -> Iterator[tuple[str, str, str]]:
    """Containers of different kinds, and empty ones that only one checkpoint has."""
    in_a, in_b = dict(_walk(a.tree)), dict(_walk(b.tree))
    for path in in_a | in_b:
        one, is_empty = in_a.get(path, ("", False))
        other, is_empty_too = in_b.get(path, ("", False))
        if one != other and ((one and other) or is_empty or is_empty_too):
            yield path or ".", one or "not there", other or "not there"


def _walk(node: Branch | Leaf) -> Iterator[tuple[str, tuple[str, bool]]]:
    if isinstance(node, Leaf):
        return
    path = node.path
    kinds = [_name_kind(node)]
    while node.kind in ("nnx", "variable") and node.children:
        # A wrapper around one item, at the same path.
        (item,) = node.children
        if isinstance(item, Leaf):
            yield path, (" of ".join(kinds), False)
            return
        node = item
        kinds.append(_name_kind(node))
    yield path, (" of ".join(kinds), not node.children)
    for child in node.children:
        yield from _walk(child)


def _name_kind(node: Branch) -> str:
    """The name of a container: `dict`, `tuple`, `namedtuple ScaleByAdamState`."""
    return node.kind if node.cls is None else f"{node.kind} {node.cls[1]}"
