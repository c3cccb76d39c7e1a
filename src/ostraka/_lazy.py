"""A checkpoint opened for reading bit by bit. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ostraka._box import Box
from ostraka._checkpoint import Source, load
from ostraka._document import ArrayNumber, leaves_of
from ostraka._fetch import fetch
from ostraka._plan import Target
from ostraka._spec import LeafSpec, MeshSpec, numpy_dtype, show_partition
from ostraka.errors import nearest
from ostraka.storage import PathLike, open_store


class LazyArray:
    """An array leaf of a checkpoint; indexing it reads, and verifies, just what is asked for."""

    def __init__(self, source: Source, number: int):
        self._source = source
        self._number = number
        self._leaf: LeafSpec = source.metadata.leaves[number].spec

    @property
    def path(self) -> str:
        return self._leaf.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape; for PRNG keys that of their key data."""
        return self._leaf.shape

    @property
    def ndim(self) -> int:
        return len(self._leaf.shape)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return numpy_dtype(self._leaf.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements; those of less than a byte are packed."""
        return self._leaf.nbytes

    @property
    def spec(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension the mesh axes it was cut along; trailing whole ones left out."""
        return self._leaf.partition

    @property
    def mesh(self) -> MeshSpec | None:
        """The mesh it was saved on; None if it was in host memory."""
        return self._source.metadata.meshes[self._leaf.mesh] if self._leaf.mesh >= 0 else None

    @property
    def prng(self) -> str | None:
        """The implementation, if this is the data of PRNG keys."""
        return self._leaf.prng

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        """Basic indexing as in numpy: integers, slices, `...`."""
        entries = index if isinstance(index, tuple) else (index,)
        box, within = bounding_box(self._leaf, list(entries))
        (array,) = fetch(self._source, [Target(self._number, box)])
        # As in numpy: integers alone give a scalar, with `...` among them a 0-d array.
        return array[(*within, ...)] if any(e is Ellipsis for e in entries) else array[within]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(f"leaf {self.path!r} is in a file: it can't be had without a copy")
        array = self[...]
        return array if dtype is None else array.astype(dtype)

    def __len__(self) -> int:
        if not self._leaf.shape:
            raise TypeError(f"leaf {self.path!r} has no dimensions, so it has no length")
        return self._leaf.shape[0]

    def __repr__(self) -> str:
        shape = ", ".join(str(n) for n in self.shape)
        sharded = f", {show_partition(self.spec)} on {self.mesh}" if self.mesh else ""
        return f"<LazyArray {self.path!r} {self._leaf.dtype}[{shape}]{sharded}>"


class Checkpoint(Mapping[str, Any]):
    """The leaves of a checkpoint by path: arrays as LazyArray, other values as they are."""

    def __init__(self, source: Source):
        self._source = source
        self._leaves = {leaf.path: leaf.value for leaf in leaves_of(source.tree)}

    @property
    def path(self) -> str:
        return self._source.location

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was given as `metadata` when it was saved."""
        return self._source.metadata.user

    @property
    def writer(self) -> Mapping[str, Any]:
        """What wrote it, and when."""
        return self._source.metadata.writer

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(leaf.spec.nbytes for leaf in self._source.metadata.leaves)

    def __getitem__(self, path: str) -> Any:
        if path not in self._leaves:
            raise KeyError(f"{self.path} has no leaf {path!r}{nearest(path, list(self._leaves))}")
        value = self._leaves[path]
        return LazyArray(self._source, value.number) if isinstance(value, ArrayNumber) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {len(self)} leaves, {self.nbytes:,} bytes>"


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Open a checkpoint without reading any array.

    >>> checkpoint = ostraka.open("runs/7")
    >>> checkpoint["params/embedding"][:16]
    """
    return Checkpoint(load(open_store(path)))


def bounding_box(leaf: LeafSpec, entries: list[Any]) -> tuple[Box, tuple[Any, ...]]:
    """The box to read for an index, and the index of the wanted elements inside that box."""
    if sum(entry is Ellipsis for entry in entries) > 1:
        raise IndexError("an index can have only one '...'")
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
    entries[at : at + 1] = [slice(None)] * (len(leaf.shape) - len(entries) + 1)
    if len(entries) != len(leaf.shape):
        raise IndexError(f"leaf {leaf.path!r} has {len(leaf.shape)} dimensions, not {len(entries)}")
    box: list[tuple[int, int]] = []
    within: list[Any] = []
    for dimension, (entry, extent) in enumerate(zip(entries, leaf.shape, strict=True)):
        if isinstance(entry, slice):
            start, stop, step = entry.indices(extent)
            picked = range(start, stop, step)
            low, high = (min(picked), max(picked) + 1) if picked else (0, 0)
            box.append((low, high))
            within.append(slice(None, None, step))
        elif isinstance(entry, int | np.integer) and not isinstance(entry, bool):
            position = int(entry) + (extent if entry < 0 else 0)
            if not 0 <= position < extent:
                raise IndexError(
                    f"leaf {leaf.path!r}: index {entry} is out of range for dimension {dimension} "
                    f"of {extent} elements"
                )
            box.append((position, position + 1))
            within.append(0)
        else:
            raise IndexError(
                f"leaf {leaf.path!r} can be indexed with integers, slices and '...', not {entry!r}"
            )
    return tuple(box), tuple(within)
