"""Trees, leaves and specs of callers, converted to plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ostraka._capture import spec_entries
from ostraka._nodes import Branch, Leaf, check_unique, leaves_of
from ostraka._spec import Partition
from ostraka._tree import is_array, is_key, parse
from ostraka.errors import InvalidSharding
from ostraka.sharding._leaf import every_dimension


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """A leaf that has a shape."""

    path: str
    shape: tuple[int, ...]
    value: Any
    named: Any
    """The PartitionSpec that its NNX variable names, or None."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def is_key(self) -> bool:
        return is_key(self.value)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole leaf; those of PRNG keys do not count."""
        return 0 if self.is_key else self.elements * self.value.dtype.itemsize


def parse_state(tree: Any) -> Branch | Leaf:
    """Parse a tree; modules become their `nnx.State`, as in a tree of specs."""
    parsed = _states(parse(tree))
    check_unique(list(leaves_of(parsed)))
    return parsed


def _states(node: Branch | Leaf) -> Branch | Leaf:
    if isinstance(node, Leaf):
        return node
    if node.kind == "nnx":
        return _states(node.children[0])
    children = tuple(_states(child) for child in node.children)
    return replace(node, children=children)


def has_shape(value: Any) -> bool:
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct | Tracer)


def array_leaves(parsed: Branch | Leaf) -> Iterator[ArrayLeaf]:
    for leaf in leaves_of(parsed):
        if has_shape(leaf.value):
            yield ArrayLeaf(leaf.path, tuple(leaf.value.shape), leaf.value, leaf.spec)


def to_spec(path: str, given: Any) -> PartitionSpec:
    """What a rule or a spec tree says of a leaf. Raises InvalidSharding for anything else."""
    if given is None:
        return PartitionSpec()
    if isinstance(given, PartitionSpec):
        return given
    if isinstance(given, NamedSharding):
        return given.spec
    if isinstance(given, tuple | list):
        return PartitionSpec(*given)
    raise InvalidSharding(
        f"leaf {path!r} is given a {type(given).__name__} as its spec; it must be a PartitionSpec, "
        "or None for a leaf that is whole on every device"
    )


def partition_of(path: str, spec: Any, rank: int) -> Partition:
    """A spec as data, with an entry for every dimension."""
    return every_dimension(spec_entries(path, spec), rank)


def from_partition(partition: Partition) -> PartitionSpec:
    if not any(partition):
        return PartitionSpec()
    return PartitionSpec(
        *(None if not axes else axes[0] if len(axes) == 1 else axes for axes in partition)
    )
