"""Find the parameter that each array of an optimizer belongs to, to cut both alike. No JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ostraka._spec import Partition
from ostraka.sharding._leaf import ShapedLeaf

Dimensions = tuple[int | None, ...]
"""For each dimension of a leaf, which dimension of the parameter it is; None if none."""


@dataclass(frozen=True, slots=True)
class Followed:
    """The parameter that a leaf belongs to, and which of its dimensions the leaf has."""

    path: str
    dimensions: Dimensions


def follow(leaves: Iterable[ShapedLeaf], parameters: Sequence[ShapedLeaf]) -> dict[str, Followed]:
    """Match arrays with parameters: the path contains that of the parameter, and shapes agree.

    A moment has the parameter's shape. A factored one, as Adafactor's, has some of its dimensions,
    and is to be cut in those as the parameter is. What has other dimensions stays whole: it is not
    in the result.
    """
    by_path = {leaf.path: leaf for leaf in parameters}
    found: dict[str, Followed] = {}
    for leaf in leaves:
        parameter = _parameter_of(leaf.path, by_path)
        if parameter is not None:
            dimensions = kept_dimensions(leaf.path, leaf.shape, parameter.shape)
            if dimensions is not None:
                found[leaf.path] = Followed(parameter.path, dimensions)
    return found


def _parameter_of(path: str, parameters: Mapping[str, ShapedLeaf]) -> ShapedLeaf | None:
    """The parameter whose names come last in the path; of those the one with the most names."""
    names = path.split("/")
    for stop in range(len(names), 0, -1):
        for start in range(stop):
            found = parameters.get("/".join(names[start:stop]))
            if found is not None:
                return found
    return None


def kept_dimensions(
    path: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...]
) -> Dimensions | None:
    """Which of a parameter's dimensions a leaf has; None if the shapes do not agree."""
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
    """The partition of a leaf that has these dimensions of a parameter with this partition."""
    return tuple(partition[d] if d is not None and d < len(partition) else () for d in dimensions)
