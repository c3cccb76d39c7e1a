"""Memory for arrays that are being read: fresh, 64-byte aligned, mapped in one go. No JAX.

JAX takes such memory as it is, without a copy, so a buffer that was handed out is never written
again. Small buffers are cut from larger pieces (arenas) in the order in which their bytes lie in
the files, so that one read fills many of them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ostraka import _box
from ostraka._plan_read import Chunk
from ostraka._spec import LeafSpec, Target, numpy_dtype

Array = np.ndarray[Any, Any]

_ALIGNMENT = 64
_FIRST_ARENA_BYTES = 64 << 10
_ARENA_BYTES = 2 << 20
"""Arenas grow to this size, so that a few small arrays don't take much."""
_ARENA_LIMIT_BYTES = 1 << 20
"""Buffers from this size on have memory of their own."""
_MAPPED_BYTES = 64 << 10
"""Less is not worth asking for."""
_ADVISED_BYTES = 4 << 20
"""From this size on numpy asks the kernel for huge pages."""


_Kind = tuple[tuple[int, ...], np.dtype[Any], int]
"""Shape, dtype, bytes."""


class Buffers:
    """A buffer for each target of a read."""

    def __init__(self, targets: Sequence[Target], leaves: Sequence[LeafSpec]):
        self._targets = targets
        self._leaves = leaves
        self._arena = np.empty(0, np.uint8)
        self._arena_used = 0
        self._kinds: dict[tuple[str, _box.Box], _Kind] = {}
        self._places: dict[int, tuple[Array, int]] = {}
        """Small buffers: the arena that each was cut from, and where."""
        self.arrays: list[Array] = [_EMPTY] * len(targets)

    def allocate(self, targets: Iterable[int]) -> None:
        """Make memory for targets that have none yet, in the order in which they will be filled."""
        arrays = self.arrays
        for number in targets:
            if arrays[number] is not _EMPTY:
                continue
            leaf, box = self._targets[number]
            key = (self._leaves[leaf].dtype, box)
            shape, dtype, nbytes = self._kinds.get(key) or self._kind(key)
            if 0 < nbytes < _ARENA_LIMIT_BYTES:
                place = self._places[number] = self._cut(nbytes)
                arrays[number] = np.ndarray(shape, dtype, *place)
            else:
                arrays[number] = np.ndarray(shape, dtype, aligned(nbytes))

    def _kind(self, key: tuple[str, _box.Box]) -> _Kind:
        """What all boxes of one dtype and place have in common: many leaves are of few kinds."""
        dtype, box = numpy_dtype(key[0]), key[1]
        nbytes = _box.count(box) * dtype.itemsize
        found = self._kinds[key] = (_box.shape_of(box), dtype, nbytes)
        return found

    def take(self, number: int) -> Array:
        """A buffer that is full. It is the caller's now."""
        array = self.arrays[number]
        self.arrays[number] = _EMPTY
        self._places.pop(number, None)
        return array

    def _cut(self, nbytes: int) -> tuple[Array, int]:
        start = -(-self._arena_used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > self._arena.size:
            grown = max(2 * self._arena.size, _FIRST_ARENA_BYTES, nbytes)
            self._arena = aligned(min(grown, _ARENA_BYTES))
            start = 0
        self._arena_used = start + nbytes
        return self._arena, start

    def flat(self, number: int) -> Array:
        """The bytes of a buffer."""
        return self.arrays[number].reshape(-1).view(np.uint8)

    def runs(self, chunk: Chunk) -> list[tuple[int, int, Array]]:
        """The chunk's moves as `(start, stop, memory)`, neighbours in file and memory joined."""
        runs: list[tuple[int, int, Array]] = []
        joined: tuple[Array, int] | None = None
        for move in chunk.direct:
            size = move.stop - move.start
            place = self._places.get(move.buffer)
            if place is None:
                flat = self.flat(move.buffer)
                memory = flat[move.buffer_start : move.buffer_start + size]
                runs.append((move.start, move.stop, memory))
                joined = None
                continue
            arena, base = place
            begin = base + move.buffer_start
            if joined and joined[0] is arena and joined[1] == begin and runs[-1][1] == move.start:
                start, _, memory = runs[-1]
                runs[-1] = (start, move.stop, arena[begin - memory.size : begin + size])
            else:
                runs.append((move.start, move.stop, arena[begin : begin + size]))
            joined = (arena, begin + size)
        return runs


_EMPTY = np.empty(0, np.uint8)
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def detached(array: Array) -> Array:
    """An array that shares its memory with no other; for those that users may write to."""
    return array if array.nbytes >= _ARENA_LIMIT_BYTES else array.copy()


def _find_madvise() -> Any:
    try:
        function = ctypes.CDLL(None, use_errno=True).madvise
    except (AttributeError, OSError):  # pragma: no cover
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


_madvise = _find_madvise() if sys.platform == "linux" else None
_MADV_POPULATE_WRITE = 23


def map_pages(memory: Array) -> None:
    """Have the kernel map fresh memory in one go, and not page by page as it is filled.

    Only faster: where the kernel does not know how (before Linux 5.14), the pages come one by one.
    """
    if _madvise is not None and memory.nbytes >= _MAPPED_BYTES:
        address = memory.__array_interface__["data"][0]
        start = address - address % mmap.PAGESIZE
        _madvise(start, address + memory.nbytes - start, _MADV_POPULATE_WRITE)


def aligned(nbytes: int) -> Array:
    """Fresh memory at an address that JAX can take as it is."""
    if nbytes >= _ADVISED_BYTES and _PRIVATE:
        # Whether huge pages are good for memory that is written once is for the system to say:
        # where they must be made first, by compaction or by a hypervisor, asking for them makes a
        # restore several times slower.
        # Private, because the default would be memory that a forked process shares, and slower.
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=_PRIVATE), np.uint8)
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]
