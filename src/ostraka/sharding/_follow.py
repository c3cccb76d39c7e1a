"""Where an optimizer's arrays lie: with the parameters that they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

from jax.sharding import PartitionSpec

from ostraka._spec import Partition
from ostraka.sharding._data import ArrayLeaf, from_partition, partition_of


def follow(
    leaves: Iterable[ArrayLeaf],
    parameters: Sequence[ArrayLeaf],
    specs: Mapping[str, PartitionSpec],
) -> dict[str, PartitionSpec]:
    """The specs of arrays whose paths contain the path of a parameter, as far as shapes agree.

    A moment has the parameter's shape and gets its spec. A factored one, as Adafactor's, has some
    of the dimensions, and is cut in those as the parameter is. What has other dimensions stays
    whole: it is not in the result.
    """
    by_path = {leaf.path: leaf for leaf in parameters}
    found: dict[str, PartitionSpec] = {}
    for leaf in leaves:
        parameter = _parameter_of(leaf.path, by_path)
        if parameter is None:
            continue
        spec = specs[parameter.path]
        if parameter.shape == leaf.shape:
            found[leaf.path] = spec
            continue
        partition = partition_of(parameter.path, spec, len(parameter.shape))
        kept = _kept_dimensions(leaf, parameter.shape)
        if kept is not None:
            found[leaf.path] = from_partition(_cut_as(partition, kept))
    return found


def _parameter_of(path: str, parameters: Mapping[str, ArrayLeaf]) -> ArrayLeaf | None:
    """The parameter whose names come last in the path; of those the one with the most names."""
    names = path.split("/")
    for stop in range(len(names), 0, -1):
        for start in range(stop):
            found = parameters.get("/".join(names[start:stop]))
            if found is not None:
                return found
    return None


def _kept_dimensions(leaf: ArrayLeaf, shape: Sequence[int]) -> tuple[int | None, ...] | None:
    """For each dimension of a leaf the parameter's that it is; None in place of one that is gone.

    None if it has none of them for sure.
    """
    rank = len(shape)
    if len(leaf.shape) == rank:
        fits = all(mine in (1, its) for mine, its in zip(leaf.shape, shape, strict=True))
        kept = [d if leaf.shape[d] == shape[d] else None for d in range(rank)]
        return tuple(kept) if fits else None
    ways = [
        dimensions
        for dimensions in combinations(range(rank), len(leaf.shape))
        if tuple(shape[d] for d in dimensions) == leaf.shape
    ]
    if not ways:
        return None
    # Of dimensions of one size optax averages the later one for `v_row`, the earlier for `v_col`.
    return ways[-1] if "v_col" in leaf.path.split("/") else ways[0]


def _cut_as(partition: Partition, dimensions: Sequence[int | None]) -> Partition:
    return tuple(() if d is None else partition[d] for d in dimensions)
