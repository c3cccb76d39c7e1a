"""Read arrays with TensorStore: only the chunks that are wanted, many at once. No JAX."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from ostraka import _box
from ostraka._box import Box
from ostraka._memory import Array, Buffers, map_pages
from ostraka._source import OnBytes
from ostraka._spec import LeafSpec, Target, numpy_dtype
from ostraka.errors import Damaged, OstrakaError, Problem, StoreError
from ostraka.formats._orbax_zarr import ZarrArray

if TYPE_CHECKING:
    from ostraka.formats._orbax_stores import Item

_AT_ONCE_BYTES = 128 << 20
"""So much is being read at one time; TensorStore needs about twice that for chunks on their way."""
_AT_ONCE = 512
_PIECE_BYTES = 32 << 20
_SMALL_BYTES = 1 << 20
_PIECE_CHUNKS = 4096
"""TensorStore begins all chunks of a read at once: of an array of many, not all may be given."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of an item, and where it lies."""

    item: Item
    name: str
    zarr: ZarrArray


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box that is read at once, and the targets that want elements of it."""

    leaf: int
    box: Box
    wanted: tuple[int, ...]
    nbytes: int


def read_arrays(
    arrays: Sequence[StoredArray],
    leaves: Sequence[LeafSpec],
    targets: Sequence[Target],
    on_bytes: OnBytes,
) -> Iterator[tuple[int, Array]]:
    """The number and the elements of each target, as soon as all of it is there."""
    return _Reading(arrays, leaves, targets, on_bytes).run()


def read_values(arrays: Sequence[StoredArray], paths: Sequence[str]) -> list[Any]:
    """The values of arrays without dimensions, as Python numbers."""
    leaves = [
        LeafSpec(path, "numpy", array.zarr.dtype, array.zarr.shape)
        for path, array in zip(paths, arrays, strict=True)
    ]
    targets = [Target(number, ()) for number in range(len(arrays))]
    found = dict(read_arrays(arrays, leaves, targets, lambda nbytes: None))
    return [found[number].item() for number in range(len(arrays))]


class _Reading:
    """One read. TensorStore's threads do the work; this one begins it, and hands it over."""

    def __init__(
        self,
        arrays: Sequence[StoredArray],
        leaves: Sequence[LeafSpec],
        targets: Sequence[Target],
        on_bytes: OnBytes,
    ):
        self._arrays = arrays
        self._leaves = leaves
        self._targets = targets
        self._on_bytes = on_bytes
        self._buffers = Buffers(targets, leaves)
        self._missing = [_box.count(target.box) for target in targets]
        """Of each target: the elements that are yet to come."""
        self._done: SimpleQueue[tuple[_Piece, Array | None, Any]] = SimpleQueue()
        self._under_way: dict[_Piece, Any] = {}
        self._held_bytes = 0

    def run(self) -> Iterator[tuple[int, Array]]:
        try:
            empty = [number for number, missing in enumerate(self._missing) if missing == 0]
            self._buffers.allocate(empty)
            yield from ((number, self._buffers.take(number)) for number in empty)
            for piece in self._pieces():
                while self._under_way and not self._has_room(piece):
                    yield from self._finish(*self._done.get())
                self._begin(piece)
                while not self._done.empty():
                    yield from self._finish(*self._done.get())
            while self._under_way:
                yield from self._finish(*self._done.get())
        finally:
            for future in self._under_way.values():
                future.cancel()

    def _has_room(self, piece: _Piece) -> bool:
        fits = self._held_bytes + piece.nbytes <= _AT_ONCE_BYTES
        return fits and len(self._under_way) < _AT_ONCE

    def _begin(self, piece: _Piece) -> None:
        import tensorstore as ts

        leaf = self._leaves[piece.leaf]
        array = self._arrays[piece.leaf]
        self._allocate(piece)
        shared = None
        if len(piece.wanted) == 1 and self._targets[piece.wanted[0]].dtype is None:
            number = piece.wanted[0]
            within = _box.slices(piece.box, self._targets[number].box)
            memory = self._buffers.array(number)[(*within, ...)]  # a view, also if 0-d
        else:
            memory = shared = np.empty(_box.shape_of(piece.box), numpy_dtype(leaf.dtype))
        if memory.flags.c_contiguous:
            map_pages(memory)
        try:
            opened = array.item.open_array(array)
            source = opened[tuple(slice(start, stop) for start, stop in piece.box)]
            future = ts.array(memory, copy=False).write(source).commit
        except Exception as error:
            raise self._explained(piece, error) from error
        self._held_bytes += piece.nbytes
        self._under_way[piece] = future
        future.add_done_callback(partial(_hand_over, self._done, piece, shared))

    def _allocate(self, piece: _Piece) -> None:
        try:
            self._buffers.allocate(piece.wanted)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            size = f"{self._leaves[piece.leaf].nbytes:,}"
            raise StoreError(
                f"leaf {self._leaves[piece.leaf].path!r} has {size} bytes, for which there is no "
                "memory; restore a part of it",
                errno=errno.ENOMEM,
            ) from error

    def _finish(
        self, piece: _Piece, shared: Array | None, future: Any
    ) -> Iterator[tuple[int, Array]]:
        del self._under_way[piece]
        self._held_bytes -= piece.nbytes
        try:
            future.result()
        except Exception as error:
            raise self._explained(piece, error) from error
        self._on_bytes(piece.nbytes)
        for number in piece.wanted:
            target = self._targets[number].box
            part = _box.intersect(piece.box, target)
            assert part is not None or not piece.box
            box = part or ()
            if shared is not None:
                memory = self._buffers.array(number)
                memory[_box.slices(box, target)] = shared[_box.slices(box, piece.box)]
            self._missing[number] -= _box.count(box)
            if self._missing[number] == 0:
                yield number, self._buffers.take(number)

    # What to read

    def _pieces(self) -> Iterator[_Piece]:
        by_leaf: dict[int, list[int]] = {}
        for number, target in enumerate(self._targets):
            if self._missing[number]:
                by_leaf.setdefault(target.leaf, []).append(number)
        for leaf, numbers in by_leaf.items():
            for together in self._clusters(leaf, numbers):
                box = _around([self._targets[number].box for number in together])
                yield from self._cut(leaf, box, together)

    def _clusters(self, leaf: int, numbers: Sequence[int]) -> list[list[int]]:
        """Targets that want elements of the same chunks, which are to be read once.

        All of a small leaf are read together: a read costs more than copying what it gives.
        """
        elements = sum(self._missing[number] for number in numbers)
        if elements * numpy_dtype(self._leaves[leaf].dtype).itemsize <= _SMALL_BYTES:
            return [list(numbers)]
        chunk = self._arrays[leaf].zarr.read_chunk
        clusters: list[tuple[Box, list[int]]] = []
        for number in numbers:
            chunks = _chunks_under(self._targets[number].box, chunk)
            members = [number]
            apart: list[tuple[Box, list[int]]] = []
            for box, others in clusters:
                if _box.intersect(box, chunks) is None:
                    apart.append((box, others))
                else:
                    chunks = _around([box, chunks])
                    members = others + members
            clusters = [*apart, (chunks, members)]
        return [members for _, members in clusters]

    def _cut(self, leaf: int, box: Box, numbers: Sequence[int]) -> Iterator[_Piece]:
        """Boxes that end where chunks end, until each is small and all of it is wanted."""
        parts = [
            (number, part)
            for number in numbers
            for part in [_box.intersect(box, self._targets[number].box)]
            if part is not None
        ]
        if not parts:
            return
        box = _around([part for _, part in parts])
        nbytes = _box.count(box) * numpy_dtype(self._leaves[leaf].dtype).itemsize
        chunks = _chunks_under(box, self._arrays[leaf].zarr.read_chunk)
        count = _box.count(chunks)
        is_small = nbytes <= _PIECE_BYTES and count <= _PIECE_CHUNKS
        is_wanted = sum(_box.count(part) for _, part in parts) >= _box.count(box)
        if count == 1 or (is_small and is_wanted):
            yield _Piece(leaf, box, tuple(number for number, _ in parts), nbytes)
            return
        for half in _halves(box, chunks, self._arrays[leaf].zarr.read_chunk):
            yield from self._cut(leaf, half, [number for number, _ in parts])

    def _explained(self, piece: _Piece, error: Exception) -> OstrakaError:
        array = self._arrays[piece.leaf]
        return array.item.explained(error, array.name, (self._leaves[piece.leaf].path,))


def _hand_over(
    done: SimpleQueue[tuple[_Piece, Array | None, Any]],
    piece: _Piece,
    shared: Array | None,
    future: Any,
) -> None:
    done.put((piece, shared, future))


def _around(boxes: Sequence[Box]) -> Box:
    """The smallest box around all."""
    return tuple(
        (min(start for start, _ in spans), max(stop for _, stop in spans))
        for spans in zip(*boxes, strict=True)
    )


def _chunks_under(box: Box, chunk: Sequence[int]) -> Box:
    """The numbers of the chunks that a box lies in."""
    spans = zip(box, chunk, strict=True)
    return tuple((start // size, (stop - 1) // size + 1) for (start, stop), size in spans)


def _halves(box: Box, chunks: Box, chunk: Sequence[int]) -> tuple[Box, Box]:
    """A box cut where chunks meet, across the first dimension that has most of them."""
    counts = [stop - start for start, stop in chunks]
    dimension = counts.index(max(counts))
    first, last = chunks[dimension]
    middle = (first + last) // 2 * chunk[dimension]
    start, stop = box[dimension]
    before, after = box[:dimension], box[dimension + 1 :]
    return (*before, (start, middle), *after), (*before, (middle, stop), *after)


def explained(error: Exception, location: str, name: str, leaves: tuple[str, ...]) -> OstrakaError:
    """What TensorStore says, as an error of ours."""
    text = " ".join(str(error).split())
    refused = next((number for word, number in _REFUSALS.items() if word in text), None)
    if refused is not None:
        message = f"can't read {location}/{name}: {os.strerror(refused)}"
        return StoreError(message, errno=refused, filename=f"{location}/{name}")
    found = "it is missing" if "NOT_FOUND" in text else f"it can't be read ({text[:200]})"
    return Damaged(location, [Problem(name, found, leaves)])


_REFUSALS: Mapping[str, int] = {
    "PERMISSION_DENIED": errno.EACCES,
    "UNAUTHENTICATED": errno.EACCES,
    "UNAVAILABLE": errno.EAGAIN,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "RESOURCE_EXHAUSTED": errno.ENOMEM,
}
