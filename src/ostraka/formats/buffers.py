"""Memory for arrays that are being read: fresh, 64-byte aligned, mapped in one go. No JAX.

JAX takes such memory without a copy, so a returned buffer is never written again. Small buffers are
cut from larger pieces (arenas) in file order, so one read fills many of them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ostraka.common import huge_pages
from ostraka.common import memory as _recycle
from ostraka.common.dtypes import numpy_dtype
from ostraka.errors import StoreError
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.plan_read import Chunk
from ostraka.layout.spec import LeafSpec, Target

Array = np.ndarray[Any, Any]

_ALIGNMENT = 64
_FIRST_ARENA_BYTES = 64 << 10
_ARENA_BYTES = 2 << 20
"""Arenas grow to this size, so that a few small arrays don't take much."""
_ARENA_LIMIT_BYTES = 1 << 20
"""Buffers from this size on have memory of their own."""
_MAPPED_BYTES = 64 << 10
"""Mapping less than this is not worth a call."""
_ADVISED_BYTES = 4 << 20
"""From this size on numpy asks the kernel for huge pages."""


class Buffers:
    """A buffer for each target of a read."""

    def __init__(self, targets: Sequence[Target], leaves: Sequence[LeafSpec]):
        self._targets = targets
        self._leaves = leaves
        self.on_overflow: dict[str, Any] = {**np.geterr(), "call": np.geterrcall()}
        """The caller's numpy error settings for casts. Other threads don't see them."""
        self._recycled = _recycle.current()
        self._arena = np.empty(0, np.uint8)
        self._arena_used = 0
        self._kinds: dict[tuple[str, Box], tuple[tuple[int, ...], np.dtype[Any], int]] = {}
        self._made: dict[int, tuple[Array, Array, int]] = {}
        """The array, the memory that it was cut from, and its offset there."""

    def allocate(self, targets: Iterable[int]) -> None:
        """Allocate memory for targets without any, in the order of their filling."""
        for number in targets:
            if number in self._made:
                continue
            leaf, box, cast = self._targets[number]
            key = (cast or self._leaves[leaf].dtype, box)
            kind = self._kinds.get(key)
            if kind is None:  # Many leaves are of few kinds.
                dtype = numpy_dtype(key[0])
                nbytes = _box.count(box) * dtype.itemsize
                kind = self._kinds[key] = (_box.shape_of(box), dtype, nbytes)
            shape, dtype, nbytes = kind
            memory, start = self._cut(nbytes)
            self._made[number] = (np.ndarray(shape, dtype, memory, start), memory, start)

    def array(self, number: int) -> Array:
        return self._made[number][0]

    def take(self, number: int) -> Array:
        """Hand over a full buffer to the caller."""
        return self._made.pop(number)[0]

    def memory_of(self, chunk: Chunk, scratch: Callable[[int], Array]) -> list[Array]:
        """Destinations of the bytes of a chunk, in file order. Unwanted bytes go to `scratch`.

        All of its moves must fit in place, and no two may share bytes.
        """
        wanted = sum(move.stop - move.start for move in chunk.moves)
        unwanted = scratch(chunk.stop - chunk.start - wanted)
        places: list[tuple[Array, int, int]] = []
        position, skipped = chunk.start, 0
        for move in chunk.moves:
            places.append((unwanted, skipped, move.start - position))
            skipped += move.start - position
            _, memory, start = self._made[move.buffer]
            places.append((memory, start + (move.buffer_start or 0), move.stop - move.start))
            position = move.stop
        places.append((unwanted, skipped, chunk.stop - position))
        return _join(places)

    def _cut(self, nbytes: int) -> tuple[Array, int]:
        """Memory for a buffer, and the offset of the buffer in it."""
        if not 0 < nbytes < _ARENA_LIMIT_BYTES:
            return recycled_or_fresh(nbytes, self._recycled), 0
        start = -(-self._arena_used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self._arena.size:
            grown = max(2 * self._arena.size, _FIRST_ARENA_BYTES, nbytes)
            self._arena = recycled_or_fresh(min(grown, _ARENA_BYTES), self._recycled)
            if grown >= _ARENA_BYTES and self._recycled is None:
                huge_pages.ask(self._arena.ctypes.data, _ARENA_BYTES)  # It is about to be filled.
            start = 0
        self._arena_used = start + nbytes
        return self._arena, start


class CountedBuffers(Buffers):
    """Buffers that count the elements that they still lack."""

    def __init__(self, targets: Sequence[Target], leaves: Sequence[LeafSpec]):
        super().__init__(targets, leaves)
        self._missing = [_box.count(target.box) for target in targets]
        self.by_leaf: dict[int, list[int]] = {}
        """The targets of each leaf that lack elements at first."""
        for number, target in enumerate(targets):
            if self._missing[number]:
                self.by_leaf.setdefault(target.leaf, []).append(number)

    def take_empty(self) -> Iterator[tuple[int, Array]]:
        """Hand over the buffers without elements."""
        for number, missing in enumerate(self._missing):
            if missing == 0:
                self.allocate([number])
                yield number, self.take(number)

    def allocate(self, targets: Iterable[int]) -> None:
        """Allocate memory for targets of one leaf. Raises StoreError if there is none."""
        numbers = list(targets)
        try:
            super().allocate(numbers)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            spec = self._leaves[self._targets[numbers[0]].leaf]
            raise StoreError(
                f"leaf {spec.path!r} has {spec.nbytes:,} bytes, for which there is no memory; "
                "restore a part of it",
                errno=errno.ENOMEM,
            ) from error

    def copy(self, elements: Array, box: Box, targets: Iterable[int]) -> None:
        """Copy the elements of a box to targets that overlap it."""
        for number in targets:
            shared = self._shared(box, number)
            within = _box.slices(shared, self._targets[number].box)
            memory = self.array(number)[(*within, ...)]  # a view, also if 0-d
            if memory.flags.c_contiguous:
                map_pages(memory)
            with np.errstate(**self.on_overflow):
                memory[...] = elements[(*_box.slices(shared, box), ...)]

    def take_complete(self, box: Box, targets: Iterable[int]) -> Iterator[tuple[int, Array]]:
        """Note that targets have the elements of a box. Hand over those that lack no others."""
        for number in targets:
            self._missing[number] -= _box.count(self._shared(box, number))
            if self._missing[number] == 0:
                yield number, self.take(number)

    def _shared(self, box: Box, number: int) -> Box:
        found = _box.intersect(box, self._targets[number].box)
        assert found is not None
        return found


def _join(places: Iterable[tuple[Array, int, int]]) -> list[Array]:
    """Parts of memory, given as `(memory, start, nbytes)`, with adjacent parts joined."""
    joined: list[tuple[Array, int, int]] = []
    for memory, start, nbytes in places:
        if joined and joined[-1][0] is memory and joined[-1][2] == start:
            joined[-1] = (memory, joined[-1][1], start + nbytes)
        elif nbytes:
            joined.append((memory, start, start + nbytes))
    return [memory[start:stop] for memory, start, stop in joined]


_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def detached(array: Array) -> Array:
    """The array, or a copy if it shares its memory. For arrays that users may write to."""
    return array if array.nbytes >= _ARENA_LIMIT_BYTES else array.copy()


_madvise: Any = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
_MADV_POPULATE_WRITE = 23


def map_pages(memory: Array) -> None:
    """Have the kernel map fresh memory in one go instead of page by page.

    Kernels before Linux 5.14 can't, and map the pages one by one.
    """
    if _madvise is None or memory.nbytes < _MAPPED_BYTES or _recycle.is_recycled(memory):
        return
    address = memory.__array_interface__["data"][0]
    huge_pages.ask(address, memory.nbytes)
    start = address - address % mmap.PAGESIZE
    nbytes = address + memory.nbytes - start
    _madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)


class Scratch(threading.local):
    """Reused memory, one piece a thread. Fresh pages cost more than filling them."""

    def __init__(self, recycled: _recycle.Recycled | None = None) -> None:
        self._held = np.empty(0, np.uint8)
        self._recycled = recycled

    def take(self, nbytes: int) -> Array:
        """Memory that is valid until the thread asks again."""
        if self._held.size < nbytes:
            self._held = recycled_or_fresh(nbytes, self._recycled)
        return self._held[:nbytes]


def recycled_or_fresh(nbytes: int, recycled: _recycle.Recycled | None) -> Array:
    """Memory like that of `aligned`. Large pieces come from `recycled`, if given."""
    if recycled is None or nbytes < _recycle.LEAST_BYTES:
        return aligned(nbytes)
    return recycled.take(nbytes)


def aligned(nbytes: int) -> Array:
    """Fresh memory, aligned so that JAX takes it without a copy."""
    if nbytes >= huge_pages.HUGE_BYTES:
        memory = huge_pages.map_huge(nbytes)
        if memory is not None:
            return memory
    if nbytes >= _ADVISED_BYTES and _PRIVATE:
        # numpy would ask for huge pages even where the kernel has to make them first: a restore is
        # several times slower then.
        # Private, because the default would be memory that a forked process shares, and slower.
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=_PRIVATE), np.uint8)
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]
