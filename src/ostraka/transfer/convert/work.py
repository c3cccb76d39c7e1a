"""The work of a conversion: the selected leaves of a source, and their form in the target."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ostraka.common.dtypes import DTYPES, numpy_dtype, to_bytes
from ostraka.common.memory import Recycled, recycling
from ostraka.common.progress import Count
from ostraka.common.threads import StopSignal, batches, run_all
from ostraka.errors import Damaged, InvalidTree, Problem, name_few
from ostraka.formats.source import Source
from ostraka.layout import box as _box
from ostraka.layout import shard_file
from ostraka.layout.box import Box
from ostraka.layout.casts import DtypeRule, cast_leaf, check_dtype_rule
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, Target
from ostraka.reading.locate import unless_replaced
from ostraka.tree import patterns as _pattern
from ostraka.tree.nodes import ArrayNumber, Kept, Leaf, Node, UnreadableLeaf, leaves_of, prune
from ostraka.tree.patterns import Patterns

Array = np.ndarray[Any, Any]

_ONE_BY_ONE_BYTES = 24 << 20
_IDLE_BYTES = 112 << 20
"""Bytes of memory that wait to be used again."""
BAND_BYTES = 16 << 20
"""Bytes of an array in row-major order to read at once."""
SLAB_BYTES = 96 << 20
"""Bytes of any other array to read at once."""
_TOGETHER_BYTES = 16 << 20
"""Bytes of small arrays to read together, since they share blocks of files."""
_LEAST_RUN_BYTES = 2 << 10
"""Shorter runs cost more to write one by one than reading the source again."""
RESERVED = "__metadata__"
"""The name in safetensors headers that is no tensor."""


class ConvertItem(NamedTuple):
    """An array under a path of the target. Other paths may have the same array."""

    path: str
    number: int
    """The number of the array in the source."""
    spec: LeafSpec
    """The array in the target."""
    name: str
    """Its name in a file of tensors: the key if the tree is a flat dict, else its path."""


class ItemBox(NamedTuple):
    """A box of an item. Boxes are read and written at once."""

    item: int
    box: Box


@dataclass(frozen=True, slots=True)
class Work:
    """A source and the items to convert."""

    source: Source
    tree: Node
    items: tuple[ConvertItem, ...]
    memory: Recycled = field(default_factory=lambda: Recycled(_IDLE_BYTES), compare=False)
    """Memory for the boxes that are read."""
    one_by_one: threading.Lock = field(default_factory=threading.Lock, compare=False)
    """Held while a large box is read."""

    progress: Count = field(default_factory=Count, compare=False)
    """Bytes written, and bytes read back."""
    kept: Count = field(default_factory=Count, compare=False)
    """Bytes that an interrupted conversion had written already."""

    @property
    def nbytes(self) -> int:
        return sum(item.spec.nbytes for item in self.items)

    @property
    def other_leaves(self) -> list[Leaf]:
        """Leaves with other values than arrays: numbers, strings, states of iterators.

        None and values that no checkpoint stores are left out.
        """
        return [
            leaf
            for leaf in leaves_of(self.tree)
            if leaf.value is not None and not isinstance(leaf.value, ArrayNumber | Kept)
        ]

    def read(self, pieces: Sequence[ItemBox]) -> Iterator[tuple[ItemBox, Array]]:
        """Read boxes in the target's dtype, in the order in which they arrive."""
        targets = [Target(self.items[piece.item].number, piece.box) for piece in pieces]
        with recycling(self.memory), unless_replaced(self.source):
            found = self.source.read(targets)
            if self.nbytes_of(pieces) > _ONE_BY_ONE_BYTES:
                # To read an array takes memory besides its own, as to transpose it does.
                with self.one_by_one:
                    found = iter(list(found))
            for at, array in found:
                dtype = numpy_dtype(self.items[pieces[at].item].spec.dtype)
                yield pieces[at], array if array.dtype == dtype else array.astype(dtype)

    # How items are cut into boxes that are read and written at once.

    def slab_grid(self, number: int) -> tuple[int, ...] | None:
        """The grid of slabs of an item with scattered rows, else None.

        A slab has at most `SLAB_BYTES`, unless a single element of its dimension has more.
        """
        item = self.items[number]
        shape, grid = item.spec.shape, self.source.grid_of(item.number)
        if (
            item.spec.mesh != HOST_LOCAL
            or DTYPES[item.spec.dtype].packed
            or len(grid) != len(shape)
        ):
            return None
        first = next((dimension for dimension, n in enumerate(shape) if n > 1), 0)
        cut = [dimension for dimension, parts in enumerate(grid) if parts > 1]
        if not cut or cut[-1] <= first:
            return None
        missing = -(-prod(shape) * _element_bytes(item.spec) // SLAB_BYTES)
        found = [1] * len(shape)
        for dimension in cut:
            most = shape[dimension] if dimension == cut[-1] else grid[dimension]
            found[dimension] = max(min(missing, most), 1)
            missing = -(-missing // found[dimension])
        return tuple(found)

    def band_bytes(self, number: int) -> int:
        """The bytes of an item to read at once."""
        return BAND_BYTES if self.slab_grid(number) is None else SLAB_BYTES

    def bands_of(self, number: int) -> list[ItemBox]:
        """The bands of an item, in the order of its elements."""
        spec = self.items[number].spec
        whole = _box.full(spec.shape)
        most = self.band_bytes(number) // _element_bytes(spec)
        return [ItemBox(number, band) for band in _box.bands(whole, whole, most)]

    def slabs_of(self, number: int) -> list[ItemBox]:
        """The bands of an item, or its slabs if its rows are scattered in the source."""
        grid, spec = self.slab_grid(number), self.items[number].spec
        if grid is None or not spec.nbytes:
            return self.bands_of(number)
        slabs = [_box.cell(spec.shape, grid, at) for at in range(prod(grid))]
        run, _ = _box.runs(slabs[0], spec.shape)
        if run * numpy_dtype(spec.dtype).itemsize < _LEAST_RUN_BYTES and len(slabs) > 1:
            return self.bands_of(number)
        return [ItemBox(number, slab) for slab in slabs]

    def nbytes_of(self, pieces: Sequence[ItemBox]) -> int:
        """The bytes of boxes in the target."""
        specs = [(self.items[item].spec, _box.count(box)) for item, box in pieces]
        return sum(DTYPES[spec.dtype].nbytes(count) for spec, count in specs)

    def offset_of(self, piece: ItemBox) -> int:
        """The offset of a box in the bytes of its item."""
        spec = self.items[piece.item].spec
        start, _ = _box.flat_span(piece.box, _box.full(spec.shape))
        return start * DTYPES[spec.dtype].bits // 8

    def is_contiguous(self, piece: ItemBox) -> bool:
        """True if the bytes of a box are contiguous in its item."""
        whole = _box.full(self.items[piece.item].spec.shape)
        return _box.is_contiguous(piece.box, whole)

    def together(
        self, pieces: Sequence[ItemBox], most_bytes: int | None = None
    ) -> Iterator[list[ItemBox]]:
        """Group boxes to read at once, small ones together."""

        def memory_of(piece: ItemBox) -> int:
            return _box.count(piece.box) * numpy_dtype(self.items[piece.item].spec.dtype).itemsize

        return batches(pieces, memory_of, most_bytes or _TOGETHER_BYTES)


def _element_bytes(spec: LeafSpec) -> int:
    """Bytes of an element in the source or in the target, whichever is more."""
    return max(numpy_dtype(dtype).itemsize for dtype in (spec.dtype, spec.cast_from or spec.dtype))


def choose(source: Source, *, only: Patterns | None, dtype: DtypeRule) -> Work:
    """Select the leaves of a source to convert, and their dtypes.

    Raises ValueError for a pattern without a match, InvalidTree for unreadable leaves.
    """
    tree: Node | None = source.tree
    if only is not None:
        paths = [leaf.path for leaf in leaves_of(source.tree)]
        _pattern.refuse_unmatched("only", only, paths, f"leaf of {source.location}")
        tree = prune(source.tree, lambda leaf: _pattern.selects(only, leaf.path))
    if tree is None:
        raise ValueError(f"only={only!r} leaves out every leaf of {source.location}")
    leaves = list(leaves_of(tree))
    lost = [leaf for leaf in leaves if isinstance(leaf.value, UnreadableLeaf)]
    if lost:
        raise InvalidTree(
            f"{name_few([leaf.path for leaf in lost])} of {source.location} can't be read: "
            f"{lost[0].value.why}; leave it out with only"
        )
    names, specs = keys_of(tree), source.saved.leaves
    items = [
        ConvertItem(leaf.path, array.number, specs[array.number], names.get(leaf.path, leaf.path))
        for leaf in leaves
        if isinstance(array := leaf.value, ArrayNumber)
    ]
    if dtype is not None:
        check_dtype_rule(dtype, [item.spec for item in items])
        items = [item._replace(spec=cast_leaf(item.spec, dtype)) for item in items]
    return Work(source, tree, tuple(items))


def keys_of(tree: Node) -> dict[str, str]:
    """By path, the keys of a flat dict of strings. Empty for any other tree."""
    if isinstance(tree, Leaf) or tree.kind != "dict":
        return {}
    pairs = list(zip(tree.keys, tree.children, strict=True))
    if not all(type(key) is str and isinstance(child, Leaf) for key, child in pairs):
        return {}
    return {child.path: key for key, child in pairs if key != RESERVED}


def digest_of(array: Array) -> str:
    return shard_file.block_digest([to_bytes(array)])


Digests = Mapping[ItemBox, str]
"""Digests of the boxes that were read from the source."""


# Reading back


def not_as_written(location: str, file: str, *paths: str) -> Damaged:
    found = "what was read back is not what was written; convert again, and check the disk"
    return Damaged(location, [Problem(file, found, paths)])


def check_source(work: Work, digests: Digests, found: Source, numbers: Mapping[int, int]) -> None:
    """Compare boxes with those of the result, read as a checkpoint. Raises Damaged.

    `numbers` has the number of the array of each item.
    """
    stop = StopSignal()

    def check(group: Sequence[ItemBox]) -> None:
        targets = [Target(numbers[piece.item], piece.box) for piece in group]
        with recycling(work.memory), unless_replaced(found):
            for at, array in found.read(targets):
                stop.check()
                piece = group[at]
                item = work.items[piece.item]
                is_same = array.dtype == numpy_dtype(item.spec.dtype)
                if not is_same or digest_of(array) != digests[piece]:
                    raise not_as_written(found.location, found.location, item.path)
                work.progress.add(array.nbytes)

    run_all(check, work.together(list(digests)), threads=2, stop=stop)
