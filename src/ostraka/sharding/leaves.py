"""The properties of an array that rules and checks need: path, shape, size, kernel. No JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from ostraka.layout.spec import Partition


@dataclass(frozen=True, slots=True)
class ShapedLeaf:
    """An array of the tree, which may be only planned: its path, and how large it is."""

    path: str
    shape: tuple[int, ...]
    """The logical shape: that of a PRNG key without its words."""
    item_bytes: int
    is_key: bool

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole leaf. PRNG keys count as 0."""
        return 0 if self.is_key else self.elements * self.item_bytes


Leaves = Sequence[ShapedLeaf]
Partitions = Mapping[str, Partition]
"""Partitions by path."""


def every_dimension(partition: Partition, rank: int) -> Partition:
    """Return the same partition with an entry for each dimension."""
    return partition + ((),) * (rank - len(partition))


def without_trailing(partition: Partition) -> Partition:
    """Return the same partition without whole dimensions at its end, as in `_METADATA`."""
    while partition and not partition[-1]:
        partition = partition[:-1]
    return partition


_KERNELS = ("kernel", "weight", "w")
_BOX = "/value"
"""The end of a path that Linen's boxes add. They name the axes of an array."""


def kernel_of(
    path: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]
) -> tuple[str, tuple[int, ...]] | None:
    """Return the kernel of a bias, and the dimensions of the kernel that the bias has.

    None if the leaf is no bias, or if no kernel beside it ends with its dimensions. If layers are
    stacked, both have a first dimension for them.
    """
    *above, name = path.removesuffix(_BOX).split("/")
    rank = len(shape)
    if name != "bias" or not rank:
        return None
    for kernel in ("/".join([*above, own]) + box for own in _KERNELS for box in ("", _BOX)):
        found = tuple(shapes.get(kernel, ()))
        for stacked in (0, 1):
            dimensions = (*range(stacked), *range(len(found) - rank + stacked, len(found)))
            if len(found) > rank and tuple(found[d] for d in dimensions) == tuple(shape):
                return kernel, dimensions
    return None


# Find the parameter that each array of an optimizer belongs to, to shard both alike.


Dimensions = tuple[int | None, ...]
"""The dimension of the parameter for each dimension of a leaf. None if it has none."""


def follow(
    leaves: Iterable[ShapedLeaf], parameters: Leaves
) -> dict[str, tuple[ShapedLeaf, Dimensions]]:
    """Match arrays with parameters by path and shape.

    Return the parameter of each array, and which of the parameter's dimensions the array has.
    A moment has the parameter's shape. A factored one, as in Adafactor, has some of its dimensions,
    and is sharded along these like the parameter. The result lacks arrays with other dimensions.
    They stay whole.
    """
    by_path = {leaf.path: leaf for leaf in parameters}
    found: dict[str, tuple[ShapedLeaf, Dimensions]] = {}
    for leaf in leaves:
        parameter = _parameter_of(leaf.path, by_path)
        if parameter is not None:
            dimensions = kept_dimensions(leaf.path, leaf.shape, parameter.shape)
            if dimensions is not None:
                found[leaf.path] = (parameter, dimensions)
    return found


def _parameter_of(path: str, parameters: Mapping[str, ShapedLeaf]) -> ShapedLeaf | None:
    """Return the parameter whose path ends last in this path, or the longest of several."""
    names = path.split("/")
    ends = range(len(names), 0, -1)
    inside = ("/".join(names[start:end]) for end in ends for start in range(end))
    return next((parameters[part] for part in inside if part in parameters), None)


def kept_dimensions(
    path: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...]
) -> Dimensions | None:
    """Return the parameter's dimensions that a leaf has. None if the shapes do not agree."""
    rank = len(parameter_shape)
    if shape == parameter_shape:
        return tuple(range(rank))
    if len(shape) == rank:
        fits = all(mine in (1, its) for mine, its in zip(shape, parameter_shape, strict=True))
        kept = [d if shape[d] == parameter_shape[d] else None for d in range(rank)]
        return tuple(kept) if fits else None
    ways = [
        dimensions
        for dimensions in combinations(range(rank), len(shape))
        if tuple(parameter_shape[d] for d in dimensions) == shape
    ]
    if not ways:
        return None
    # Of dimensions of one size optax averages the later one for `v_row`, the earlier for `v_col`.
    return ways[-1] if "v_col" in path.split("/") else ways[0]


def cut_as(partition: Partition, dimensions: Dimensions) -> Partition:
    """Return the partition of a leaf with these dimensions of a parameter."""
    return tuple(partition[d] if d is not None and d < len(partition) else () for d in dimensions)
