"""What rules and checks need to know of an array, whether it exists or is only planned. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from ostraka._spec import Partition


class ShapedLeaf(Protocol):
    """An array of the tree: where it is, and how large."""

    @property
    def path(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def elements(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def is_key(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PlainLeaf:
    """An array that is only planned."""

    path: str
    shape: tuple[int, ...]
    """The logical shape: of a PRNG key without its words."""
    item_bytes: int
    is_key: bool

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole leaf; those of PRNG keys do not count."""
        return 0 if self.is_key else self.elements * self.item_bytes


def every_dimension(partition: Partition, rank: int) -> Partition:
    """The same partition with an entry for each dimension."""
    return partition + ((),) * (rank - len(partition))


def without_trailing(partition: Partition) -> Partition:
    """The same partition without whole dimensions at its end, as leaves are described."""
    while partition and not partition[-1]:
        partition = partition[:-1]
    return partition


_KERNELS = ("kernel", "weight", "w")
_BOX = "/value"
"""What Linen's boxes, which name the axes of an array, add to its path."""


def kernel_of(
    path: str, shape: Sequence[int], shapes: Mapping[str, Sequence[int]]
) -> tuple[str, tuple[int, ...]] | None:
    """The kernel that a bias is added to, and the kernel's dimensions that the bias has.

    None if the leaf is no bias, or lies beside no kernel whose last dimensions are its own. Where
    layers are stacked, both have a first dimension for them.
    """
    *above, name = path.removesuffix(_BOX).split("/")
    rank = len(shape)
    if name != "bias" or not rank:
        return None
    for kernel in ("/".join([*above, own]) + box for own in _KERNELS for box in ("", _BOX)):
        found = tuple(shapes.get(kernel, ()))
        for stacked in (0, 1):
            dimensions = (
                *range(stacked),
                *range(len(found) - rank + stacked, len(found)),
            )
            if len(found) > rank and tuple(found[d] for d in dimensions) == tuple(shape):
                return kernel, dimensions
    return None
