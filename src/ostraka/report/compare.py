"""How two checkpoints differ: structure, shapes, dtypes, shardings and values. No JAX.

Arrays are compared piece by piece in bounded memory. NaN equals NaN, and -0.0 equals 0.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ostraka.common.dtypes import is_inexact
from ostraka.common.text import show_value
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.source import Source
from ostraka.reading.locate import open_at
from ostraka.reading.show import show_sharding
from ostraka.report.measure import Array, Numbers, Progress, add_up, as_numbers, unseen
from ostraka.storage import PathLike
from ostraka.tree.nodes import ArrayNumber, Branch, Kept, Leaf, UnreadableLeaf, leaves_of
from ostraka.tree.patterns import Patterns, matches

_ASPECTS = ("kind", "shape", "dtype", "same_as", "sharding", "value")


def open_named(path: PathLike, names: Any) -> Source:
    """Open a checkpoint. Only safetensors files have names that are not paths."""
    source = open_at(path)
    is_renamed = names is not None and isinstance(source, SafetensorsSource)
    return open_at(path, names) if is_renamed else source


@dataclass(frozen=True, slots=True)
class Distance:
    """How far the elements of two arrays are apart.

    `changed` counts the elements that differ by more than the tolerance. `nan` of them are NaN in
    one array only. `largest` and `total` are of the absolute differences of all others. `scale` is
    the sum of the absolute values of b where it differs.
    """

    elements: int = 0
    changed: int = 0
    nan: int = 0
    largest: float = 0.0
    total: float = 0.0
    scale: float = field(default=0.0, compare=False)

    @property
    def relative(self) -> float:
        """The sum of the absolute differences, by that of the values that differ."""
        if not self.total:
            return 0.0
        return self.total / self.scale if self.scale and self.total < math.inf else math.inf

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
            self.scale + other.scale,
        )


@dataclass(frozen=True, slots=True)
class Norms:
    """How large two floating-point arrays and their difference are, by sums of squares in float64.

    Equal elements differ by 0, also if both are NaN, or the same infinity. Otherwise NaN and
    infinity make a sum NaN or infinite.
    """

    squares_a: float = 0.0
    squares_b: float = 0.0
    squares_delta: float = 0.0
    nan_a: int = 0
    nan_b: int = 0
    infinite_a: int = 0
    infinite_b: int = 0

    def __add__(self, other: Norms) -> Norms:
        return Norms(
            self.squares_a + other.squares_a,
            self.squares_b + other.squares_b,
            self.squares_delta + other.squares_delta,
            self.nan_a + other.nan_a,
            self.nan_b + other.nan_b,
            self.infinite_a + other.infinite_a,
            self.infinite_b + other.infinite_b,
        )

    @property
    def a(self) -> float:
        return math.sqrt(self.squares_a)

    @property
    def b(self) -> float:
        return math.sqrt(self.squares_b)

    @property
    def delta(self) -> float:
        return math.sqrt(self.squares_delta)

    @property
    def relative(self) -> float:
        """`delta / a`. Infinity if a is all zero and b is not, and 0 if both are equal."""
        if not self.squares_delta:
            return 0.0
        return self.delta / self.a if self.squares_a else math.inf


@dataclass(frozen=True, slots=True)
class _Measures:
    """The distance of two arrays, and their norms if they are floating-point and asked for."""

    distance: Distance = Distance()
    norms: Norms | None = None

    def __add__(self, other: _Measures) -> _Measures:
        norms = [one.norms for one in (self, other) if one.norms is not None]
        return _Measures(self.distance + other.distance, sum(norms, Norms()) if norms else None)


@dataclass(frozen=True, slots=True)
class LeafComparison:
    """One leaf in two checkpoints. None stands for a checkpoint without it."""

    path: str
    a: LeafDescription | None
    b: LeafDescription | None
    differs: tuple[str, ...] = ()
    """The fields of `LeafDescription` that differ."""
    distance: Distance | None = None
    """None if the elements were not compared: not asked for, values, other shapes."""
    norms: Norms | None = None
    """None if they were not asked for, and for integers, keys and all without a distance."""

    @property
    def state(self) -> str:
        if self.a is None or self.b is None:
            return "only in a" if self.b is None else "only in b"
        return "different" if self.differs else "the same"

    @property
    def same(self) -> bool:
        return self.state == "the same"


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
    nbytes: int = 0

    @property
    def is_plain_array(self) -> bool:
        return self.shape is not None and not self.kind.startswith("key")

    @property
    def has_norms(self) -> bool:
        return self.is_plain_array and self.dtype is not None and is_inexact(self.dtype)


@dataclass(frozen=True, slots=True)
class TreeComparison:
    """All leaves of two checkpoints, in tree order, and containers of different kinds."""

    a: str
    b: str
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
    structure: bool = False
    """True to compare names, shapes and dtypes only, and the types of values."""
    ignore_sharding: bool = False
    norms: bool = False
    """True to measure the norms of floating-point arrays as well."""


def compare(
    a: Source, b: Source, options: CompareOptions, progress: Progress = unseen
) -> TreeComparison:
    """Compare two checkpoints, leaf by leaf, and verify all bytes on the way."""
    in_a, in_b = _values_by_path(a, options), _values_by_path(b, options)
    pairs = {
        path: (one.number, other.number)
        for path, one in in_a.items()
        if not options.structure
        and isinstance(one, ArrayNumber)
        and isinstance(other := in_b.get(path), ArrayNumber)
        and a.saved.leaves[one.number].shape == b.saved.leaves[other.number].shape
    }
    measure = partial(_measure_both, options)
    numbers = sorted({*pairs.values()})
    measures = add_up("comparing", [a, b], numbers, measure, _Measures(), progress)
    leaves: list[LeafComparison] = []
    for path in in_a | in_b:
        one = _describe(a, path, in_a[path]) if path in in_a else None
        other = _describe(b, path, in_b[path]) if path in in_b else None
        found = measures[pairs[path]] if path in pairs else None
        distance = None if found is None else found.distance
        has_norms = one and other and one.has_norms and other.has_norms
        norms = found.norms or Norms() if found and options.norms and has_norms else None
        unequal = {
            aspect
            for aspect in _ASPECTS
            if one and other and getattr(one, aspect) != getattr(other, aspect)
        }
        if distance is not None and distance.changed:
            unequal.add("value")
        if options.ignore_sharding:
            unequal.discard("sharding")
        if options.structure and one and other:
            unequal -= {"sharding", "value", "same_as"}
            if one.is_plain_array and other.is_plain_array:
                unequal.discard("kind")  # the library that the array belongs to
        differs = tuple(aspect for aspect in _ASPECTS if aspect in unequal)
        leaves.append(LeafComparison(path, one, other, differs, distance, norms))
    is_partial = bool(options.patterns) or options.structure
    containers = () if is_partial else tuple(_containers(a, b))
    return TreeComparison(a.location, b.location, tuple(leaves), containers)


def _values_by_path(source: Source, options: CompareOptions) -> dict[str, Any]:
    return {
        leaf.path: leaf.value
        for leaf in leaves_of(source.tree)
        if not options.patterns or matches(options.patterns, leaf.path)
    }


# What is said of a leaf


def _describe(source: Source, path: str, value: Any) -> LeafDescription:
    if isinstance(value, Kept):
        return LeafDescription("kept", value=value.name)
    if isinstance(value, UnreadableLeaf):  # which is equal to nothing
        return LeafDescription("lost", value=f"in {source.location}: {value.why}")
    if not isinstance(value, ArrayNumber):
        return LeafDescription(type(value).__name__, value=show_value(value))
    leaf = source.saved.leaves[value.number]
    return LeafDescription(
        kind=f"key<{leaf.prng}>" if leaf.kind == "key" else leaf.kind,
        dtype=leaf.dtype,
        shape=leaf.shape,
        sharding=show_sharding(leaf, source.saved.meshes, with_mesh=True),
        same_as=None if leaf.path == path else leaf.path,
        nbytes=leaf.nbytes if leaf.path == path else 0,
    )


# Elements


def measure_norms(
    a: Source, b: Source, leaves: Iterable[Numbers], progress: Progress = unseen
) -> dict[Numbers, Norms]:
    """The norms of some leaves, by their numbers in a and b. Each pair has one shape."""
    return add_up("comparing", [a, b], leaves, _measure_norms, Norms(), progress)


def _measure_both(options: CompareOptions, a: Array, b: Array) -> _Measures:
    are_numbers = is_inexact(a.dtype.name) and is_inexact(b.dtype.name)
    norms = _measure_norms(a, b) if options.norms and are_numbers else None
    return _Measures(_measure(options, a, b), norms)


def _measure_norms(a: Array, b: Array) -> Norms:
    is_same = a.dtype == b.dtype and bool((a.view(np.uint8) == b.view(np.uint8)).all())
    a = as_numbers(a)
    b = a if is_same else as_numbers(b)
    # What overflows here becomes an infinity, and is reported as one.
    with np.errstate(over="ignore", invalid="ignore"):
        squares_a = _sum_of_squares(a)
        squares_b = squares_a if is_same else _sum_of_squares(b)
        if math.isfinite(squares_a) and math.isfinite(squares_b):
            return Norms(squares_a, squares_b, 0.0 if is_same else _sum_of_squares(b - a))
        nan_a, nan_b = np.isnan(a), np.isnan(b)
        differs = (a != b) & ~(nan_a & nan_b)
        return Norms(
            squares_a,
            squares_b,
            _sum_of_squares((b - a)[differs]),
            int(nan_a.sum()),
            int(nan_b.sum()),
            int(np.isinf(a).sum()),
            int(np.isinf(b).sum()),
        )


def _sum_of_squares(values: Array) -> float:
    # Not by a dot product: for that numpy starts threads, which compete with the others.
    return float(np.square(np.abs(values)).sum())


def _measure(options: CompareOptions, a: Array, b: Array) -> Distance:
    # Most arrays pass this quick test.
    if a.dtype == b.dtype and bool((a.view(np.uint8) == b.view(np.uint8)).all()):
        return Distance(a.size)
    a, b = as_numbers(a), as_numbers(b)
    unequal = a != b
    if not unequal.any():
        return Distance(a.size)
    elements = a.size
    if not unequal.all():
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
            apart, size = np.abs(a - b), np.abs(b)
            if np.isnan(apart).any():  # also for equal infinities, which are none of these
                nan = int((np.isnan(a) != np.isnan(b)).sum())
                comparable = ~(np.isnan(a) | np.isnan(b))
                apart, size = apart[comparable], size[comparable]
        # An infinity is not near anything but itself, whatever the tolerance.
        near = (apart <= options.atol + options.rtol * size) & np.isfinite(apart)
        total, scale = float(apart.sum()), float(size.sum())
    largest = float(apart.max(initial=0.0))
    return Distance(elements, nan + int((~near).sum()), nan, largest, total, scale)


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
