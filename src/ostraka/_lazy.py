"""A checkpoint opened for reading bit by bit. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from typing import Any

import numpy as np

from ostraka._box import Box
from ostraka._checkpoint import open_at, unless_replaced
from ostraka._memory import detached
from ostraka._names_given import NamesLike
from ostraka._nodes import ArrayNumber, Kept, Lost, leaves_of
from ostraka._source import Source
from ostraka._spec import LeafSpec, MeshSpec, Target, numpy_dtype, show_partition
from ostraka.errors import UnsupportedFormat, nearest_path
from ostraka.storage import PathLike


class LazyArray:
    """An array leaf of a checkpoint; indexing it reads, and verifies, just what is asked for.

    Raises Damaged for bytes that are not as written, Busy if another save has replaced the
    checkpoint since it was opened.
    """

    def __init__(self, source: Source, number: int, path: str):
        leaf = source.saved.leaves[number]
        self._source = source
        self._number = number
        self._leaf = leaf
        self.path = path
        """Its path in the whole checkpoint."""
        self.shape = leaf.shape
        """The global shape; for PRNG keys that of their key data."""
        self.ndim = len(leaf.shape)
        self.dtype = numpy_dtype(leaf.dtype)
        self.nbytes = leaf.nbytes
        """The bytes of its elements; those of less than a byte are packed."""
        self.spec = leaf.partition
        """For each dimension the mesh axes it was cut along; trailing whole ones left out."""
        self.mesh: MeshSpec | None = source.saved.meshes[leaf.mesh] if leaf.mesh >= 0 else None
        """The mesh it was saved on; None if it was in host memory."""
        self.prng = leaf.prng
        """The implementation, if this is the data of PRNG keys."""

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        """Basic indexing as in numpy: integers, slices, `...`."""
        entries = index if isinstance(index, tuple) else (index,)
        box, within = bounding_box(self._leaf, list(entries))
        with unless_replaced(self._source):
            ((_, array),) = self._source.read([Target(self._number, box)])
        array = detached(array)
        # As in numpy: integers alone give a scalar, with `...` among them a 0-d array.
        return array[(*within, ...)] if any(e is Ellipsis for e in entries) else array[within]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(f"leaf {self.path!r} is in a file: it can't be had without a copy")
        array = self[...]
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Read all of it, for whatever takes arrays by DLPack, with its options."""
        array = self[...]
        try:
            return array.__dlpack__(**options)
        except BufferError:
            # numpy does not hand over bfloat16 and its like. JAX does.
            import jax

            return jax.numpy.asarray(array).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the memory of the host

    def __len__(self) -> int:
        if not self._leaf.shape:
            raise TypeError(f"leaf {self.path!r} has no dimensions, so it has no length")
        return self._leaf.shape[0]

    def __repr__(self) -> str:
        shape = ", ".join(str(n) for n in self.shape)
        sharded = f", {show_partition(self.spec)} on {self.mesh}" if self.mesh else ""
        return f"<LazyArray {self.path!r} {self._leaf.dtype}[{shape}]{sharded}>"


class Checkpoint(Mapping[str, Any]):
    """The leaves of a checkpoint by path: arrays as LazyArray, other values as they are.

    An array that the tree had at several places is there under each of its paths. Functions, which
    only a template has, are not there.

    A name above leaves gives those below it, by the rest of their paths, as a Checkpoint again.
    Iterating goes over the leaves. All that is read is of one save: once another one has replaced
    it, arrays raise Busy, and the checkpoint must be opened again.

    >>> checkpoint["model/head/kernel"].shape
    >>> list(checkpoint["model"])
    """

    def __init__(self, source: Source, within: str = ""):
        self._source = source
        self.path = source.location
        """Where it is; of a directory of steps that was opened, the step that was found."""
        self.within = within
        """The path of the part that this is; empty for all of it."""
        self.metadata = source.saved.user
        """What was given as `metadata` when it was saved."""
        self.writer = source.saved.writer
        """What wrote it, and when."""
        above = f"{within}/" if within else ""
        self._leaves = {
            leaf.path.removeprefix(above): leaf.value
            for leaf in leaves_of(source.tree)
            if leaf.path.startswith(above) and not isinstance(leaf.value, Kept)
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, each counted once however many paths it has."""
        numbers = {v.number for v in self._leaves.values() if isinstance(v, ArrayNumber)}
        return sum(self._source.saved.leaves[number].nbytes for number in numbers)

    def __getitem__(self, path: str) -> Any:
        if path in self._leaves:
            value = self._leaves[path]
            if isinstance(value, ArrayNumber):
                return LazyArray(self._source, value.number, self._whole(path))
            if isinstance(value, Lost):
                raise UnsupportedFormat(
                    f"leaf {self._whole(path)!r} of {self.path} can't be read: {value.why}"
                )
            return value
        name = path.rstrip("/") if isinstance(path, str) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
        if name and any(leaf.startswith(f"{name}/") for leaf in self._leaves):
            return Checkpoint(self._source, self._whole(name))
        raise KeyError(self._no_leaf(path))

    def keys(self) -> KeysView[str]:
        return self._leaves.keys()  # which, printed, shows them

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        part = f" {self.within!r}" if self.within else ""
        return f"<Checkpoint {self.path}{part}: {len(self)} leaves, {self.nbytes:,} bytes>"

    def _whole(self, path: str) -> str:
        return f"{self.within}/{path}" if self.within else path

    def _no_leaf(self, path: Any) -> str:
        where = f"{self.within!r} of {self.path}" if self.within else self.path
        if not isinstance(path, str):
            first = next(iter(self._leaves), "model/kernel")
            return f"leaves of {where} have paths that are text, such as {first!r}, not {path!r}"
        return f"{where} has no leaf {path!r}{nearest_path(path, list(self._leaves))}"


def open_checkpoint(path: PathLike, *, names: NamesLike | None = None) -> Checkpoint:
    """Open a checkpoint without reading any array.

    `path` may also be a directory of steps, for the newest of them, or `runs/7` for step 7 of
    `runs`; the checkpoint's `path` tells which it was. Safetensors files, single or as Hugging Face
    publishes them, are opened, too; with `names`, as for `restore`, they have the paths and shapes
    of a model's leaves.

    >>> checkpoint = ostraka.open("runs/7")
    >>> checkpoint["params/embedding"][:16]
    """
    return Checkpoint(open_at(path, names))


def bounding_box(leaf: LeafSpec, entries: list[Any]) -> tuple[Box, tuple[Any, ...]]:
    """The box to read for an index, and the index of the wanted elements inside that box."""
    given = [entry for entry in entries if entry is not Ellipsis]
    if len(entries) - len(given) > 1:
        raise IndexError("an index can have only one '...'")
    rank = len(leaf.shape)
    if len(given) > rank:
        raise IndexError(f"leaf {leaf.path!r} has {rank} dimensions, not {len(given)}")
    at = next((n for n, entry in enumerate(entries) if entry is Ellipsis), len(given))
    given[at:at] = [slice(None)] * (rank - len(given))
    box: list[tuple[int, int]] = []
    within: list[Any] = []
    for dimension, (entry, extent) in enumerate(zip(given, leaf.shape, strict=True)):
        picked = _picked(leaf.path, dimension, extent, entry)
        if isinstance(picked, int):
            box.append((picked, picked + 1))
            within.append(0)
        else:
            # By its ends alone: a dimension may have more elements than could be counted through.
            first, last = sorted((picked[0], picked[-1])) if picked else (0, -1)
            box.append((first, last + 1))
            within.append(slice(None, None, picked.step))
    return tuple(box), tuple(within)


def _picked(path: str, dimension: int, extent: int, entry: Any) -> int | range:
    """The elements that an index picks of a dimension."""
    if not isinstance(entry, slice | int | np.integer) or isinstance(entry, bool):
        raise IndexError(
            f"leaf {path!r} can be indexed with integers, slices and '...', not {entry!r}"
        )
    try:
        return range(extent)[entry]
    except IndexError as error:
        raise IndexError(
            f"leaf {path!r}: index {entry} is out of range for dimension {dimension} of {extent} "
            "elements"
        ) from error
