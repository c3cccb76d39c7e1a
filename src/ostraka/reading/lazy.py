"""`ostraka.open`: read single leaves of a checkpoint, or parts of them. No JAX."""

from __future__ import annotations

from collections.abc import Iterator, KeysView, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ostraka.common.dtypes import numpy_dtype
from ostraka.errors import UnsupportedFormat, nearest_path
from ostraka.formats.buffers import detached
from ostraka.formats.source import Source
from ostraka.layout.box import Box
from ostraka.layout.spec import LeafSpec, MeshSpec, Target, show_partition
from ostraka.reading.groups import PARAMETERS, groups_of
from ostraka.reading.html import draw_array, draw_checkpoint
from ostraka.reading.locate import open_at, unless_replaced
from ostraka.reading.names.given import NamesLike
from ostraka.storage import PathLike
from ostraka.tree.nodes import ArrayNumber, Kept, UnreadableLeaf, leaves_of

if TYPE_CHECKING:
    from jax.sharding import Mesh


class LazyArray:
    """An array of a checkpoint. Indexing it reads and verifies just the elements you ask for.

    `ostraka.open(path)["model/kernel"]` returns one. It also converts to numpy (`np.asarray`) and
    exports DLPack, which read the whole array. A notebook shows its sharding and its files.

    Raises:
        Damaged: The bytes differ from those that were saved.
        Busy: Another save or program has replaced the files since they were opened.

    Example:
        >>> kernel = ostraka.open("runs/7")["model/head/kernel"]
        >>> kernel.shape, kernel[:16]
    """

    def __init__(self, source: Source, number: int, path: str):
        leaf = source.saved.leaves[number]
        self._source = source
        self._number = number
        self._leaf = leaf
        self.path = path
        """Its path in the whole checkpoint."""
        self.shape = leaf.shape
        """The global shape. PRNG keys have that of their key data."""
        self.ndim = len(leaf.shape)
        self.dtype = numpy_dtype(leaf.dtype)
        self.nbytes = leaf.nbytes
        """The bytes of its elements. Elements of less than a byte are packed."""
        self.spec = leaf.partition
        """For each dimension the mesh axes it was sharded along, without trailing empty ones."""
        self.mesh: MeshSpec | None = source.saved.meshes[leaf.mesh] if leaf.mesh >= 0 else None
        """The mesh it was saved on. None if it was in host memory."""
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
        """Read the whole array and export it by DLPack, with its options."""
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

    def _repr_html_(self) -> str:
        return draw_array(self, self._source, self._number)


class Checkpoint(Mapping[str, Any]):
    """The leaves of a checkpoint by path: arrays as LazyArray, other values unchanged.

    An array that the tree had at several paths has each of them. Functions are missing: only a
    template has them.

    A name above leaves returns those below it, by the rest of their paths, as a Checkpoint again.
    Iterating goes over the leaves. All reads belong to one save: once its files have been replaced,
    arrays raise Busy, and you must open the checkpoint again.

    A notebook shows the checkpoint as a folded tree, without reading any array.

    Raises:
        KeyError: There is no leaf with this path. The message names the nearest one.
        UnsupportedFormat: The leaf can't be read.

    Example:
        >>> checkpoint = ostraka.open("runs/7")
        >>> checkpoint["model/head/kernel"].shape
        >>> list(checkpoint["model"])
    """

    def __init__(self, source: Source, within: str = ""):
        self._source = source
        self.path = source.location
        """Its location. For a run directory, the location of the step that was found."""
        self.within = within
        """The path of this part. Empty for the whole checkpoint."""
        self.metadata = source.saved.user
        """The `metadata` of the save."""
        self.writer = source.saved.writer
        """The versions that wrote it, and the time."""
        above = f"{within}/" if within else ""
        self._leaves = {
            leaf.path.removeprefix(above): leaf.value
            for leaf in leaves_of(source.tree)
            if leaf.path.startswith(above) and not isinstance(leaf.value, Kept)
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, each counted once however many paths it has."""
        return sum(self._source.saved.leaves[number].nbytes for number in self._numbers())

    @property
    def num_params(self) -> int:
        """The number of parameters, each counted once however many paths it has.

        If the checkpoint has `nnx.Param`s, those are the parameters. Else all floating-point arrays
        are that do not belong to an optimizer.
        """
        groups = groups_of(self._source)
        counted = [number for number in self._numbers() if groups.get(number) == PARAMETERS]
        return sum(prod(self._source.saved.leaves[number].shape) for number in counted)

    def abstract(self, *, mesh: Mesh | Mapping[str, int] | None = None, specs: Any = None) -> Any:
        """Return the tree with shapes in place of arrays, without reading any array.

        JAX arrays and PRNG keys are `jax.ShapeDtypeStruct`. Plain values are the saved values.
        numpy arrays are templates of zeros that take no memory. Modules are dicts, and functions
        are missing, as in `ostraka.restore(path)`. With the result as `like`, `restore` returns the
        same as without a template.

        Args:
            mesh: A mesh for the shardings of JAX arrays, with the saved specs. Axis sizes such as
                `{"data": 4}` make a mesh. Without `mesh` and `specs` there are no shardings.
            specs: Specs in place of the saved ones, as in `ostraka.restore`.

        Returns:
            The tree, or its part if this is a part of a checkpoint.

        Raises:
            InvalidSharding: The specs do not fit the mesh.
            UnsupportedFormat: A leaf can't be read.

        Example:
            >>> checkpoint = ostraka.open("runs/7")
            >>> shapes = checkpoint.abstract(mesh={"data": 8})
            >>> state = ostraka.restore("runs/7", like=shapes)
        """
        from ostraka.reading._abstract import abstract_state

        return abstract_state(self._source, self.within, mesh, specs)

    def __getitem__(self, path: str) -> Any:
        if path in self._leaves:
            value = self._leaves[path]
            if isinstance(value, ArrayNumber):
                return LazyArray(self._source, value.number, self._whole(path))
            if isinstance(value, UnreadableLeaf):
                raise UnsupportedFormat(
                    f"leaf {self._whole(path)!r} of {self.path} can't be read: {value.why}"
                )
            return value
        where = f"{self.within!r} of {self.path}" if self.within else self.path
        if not isinstance(path, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            first = next(iter(self._leaves), "model/kernel")
            raise KeyError(
                f"leaves of {where} have paths that are text, such as {first!r}, not {path!r}"
            )
        name = path.rstrip("/")
        if name and any(leaf.startswith(f"{name}/") for leaf in self._leaves):
            return Checkpoint(self._source, self._whole(name))
        raise KeyError(f"{where} has no leaf {path!r}{nearest_path(path, list(self._leaves))}")

    def keys(self) -> KeysView[str]:
        return self._leaves.keys()  # which, printed, shows them

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __repr__(self) -> str:
        part = f" {self.within!r}" if self.within else ""
        return f"<Checkpoint {self.path}{part}: {len(self)} leaves, {self.nbytes:,} bytes>"

    def _repr_html_(self) -> str:
        return draw_checkpoint(self, self._source, self._leaves)

    def _numbers(self) -> set[int]:
        """The numbers of its arrays."""
        return {v.number for v in self._leaves.values() if isinstance(v, ArrayNumber)}

    def _whole(self, path: str) -> str:
        return f"{self.within}/{path}" if self.within else path


def open_checkpoint(path: PathLike, *, names: NamesLike | None = None) -> Checkpoint:
    """Open a checkpoint without reading any array.

    Args:
        path: A checkpoint, a run directory for its newest step, or `runs/7` for step 7 of `runs`.
            Safetensors files, single or as a Hugging Face directory, are opened, too.
        names: Names for the tensors of safetensors files, as in `restore`. The leaves then have the
            paths and shapes of a model.

    Returns:
        The leaves by path. `Checkpoint.path` is the location that was found.

    Raises:
        CheckpointNotFound: There is no checkpoint at this path.
        NotACheckpoint: The directory holds something else.
        UnsupportedFormat: A newer version has written it.
        Damaged: Its metadata can't be read.
        Mismatch: `names` do not fit the tensors.

    Example:
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
        if not isinstance(entry, slice | int | np.integer) or isinstance(entry, bool):
            raise IndexError(
                f"leaf {leaf.path!r} can be indexed with integers, slices and '...', not {entry!r}"
            )
        try:
            picked = range(extent)[entry]
        except IndexError as error:
            raise IndexError(
                f"leaf {leaf.path!r}: index {entry} is out of range for dimension {dimension} of "
                f"{extent} elements"
            ) from error
        if isinstance(picked, int):
            box.append((picked, picked + 1))
            within.append(0)
        else:
            # By its ends alone: a dimension may have more elements than could be counted through.
            first, last = sorted((picked[0], picked[-1])) if picked else (0, -1)
            box.append((first, last + 1))
            within.append(slice(None, None, picked.step))
    return tuple(box), tuple(within)
