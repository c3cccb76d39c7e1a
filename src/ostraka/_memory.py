"""Fresh memory to read into: aligned for JAX, and on huge pages while those come quickly. No JAX.

Most of what it takes to fill fresh memory is the kernel's work to provide it, page by page. Pages
of 2 MiB make that several times quicker, but only for memory that begins at a multiple of 2 MiB and
is at least that large. So buffers that are smaller are cut from arenas, and larger ones begin
there.
"""

from __future__ import annotations

import mmap
import time
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
"""JAX takes memory at multiples of this as it is, without a copy."""
LARGE_BYTES = 8 << 20
"""From this size on a buffer has memory of its own."""

_ARENA_BYTES = (256 << 10, 32 << 20)
"""The first arena, and the largest; each is twice as large as the one before."""
_HUGE_BYTES = 2 << 20
# Private, because the default would be memory that a forked process shares, and slower.
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_SMALL: int = getattr(mmap, "MADV_NOHUGEPAGE", 0)


class Supply:
    """The memory of one restore."""

    def __init__(self) -> None:
        self._arena = np.empty(0, np.uint8)
        self._arena_used = 0
        self._next_arena_bytes = _ARENA_BYTES[0]
        self._pages = HugePages()

    def allocate(self, nbytes: int) -> Array:
        """Bytes whose contents are not defined, at an address that JAX can take as it is."""
        if nbytes < _HUGE_BYTES or not _PRIVATE:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            return raw[start : start + nbytes]
        # What is asked for in excess is only addresses: nothing lies there until it is written to.
        memory = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=_PRIVATE)
        self._pages.ask_for(memory)
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % _HUGE_BYTES
        return whole[start : start + nbytes]

    def cut(self, nbytes: int) -> tuple[Array, int]:
        """An arena that has room for a buffer, and where in it; freed with the last buffer."""
        start = -(-self._arena_used // ALIGNMENT) * ALIGNMENT
        if start + nbytes > self._arena.size:
            self._arena = self.allocate(max(self._next_arena_bytes, nbytes))
            self._next_arena_bytes = min(2 * self._next_arena_bytes, _ARENA_BYTES[1])
            start = 0
        self._arena_used = start + nbytes
        return self._arena, start

    def make_ready(self, buffer: Array) -> None:
        """Have the kernel provide what is about to be filled, and see that it does so quickly."""
        self._pages.provide(buffer)


class HugePages:
    """Asks for huge pages as long as they come quicker than as many small ones.

    Where memory is in pieces, or full of files that were read, the kernel moves others' pages about
    to make a huge one, which takes longer than it saves. So every huge page is asked for by itself
    and timed, and as soon as they have cost more than they saved (and more than a bad start may),
    the rest is left to small ones.
    """

    CREDIT = 4
    """How many times the cost of small pages may be lost on huge ones."""

    def __init__(self) -> None:
        self._is_on = _HUGE is not None
        self._credit_s = 0.0
        self._advised: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def ask_for(self, memory: mmap.mmap) -> None:
        """Have huge pages in memory that was not written to yet."""
        if not self._is_on or _HUGE is None:
            return
        try:
            memory.madvise(_HUGE)
        except OSError:  # a kernel without them
            self._is_on = False
            return
        if not self._advised:
            self._credit_s = self.CREDIT * small_pages_s()
        self._advised.add(memory)

    def provide(self, buffer: Array) -> None:
        """Write to each huge page of a buffer, whose contents don't count yet."""
        if not self._is_on or not self._advised or buffer.size < _HUGE_BYTES:
            return
        most_s = self.CREDIT * small_pages_s()
        for start in range(-buffer.ctypes.data % _HUGE_BYTES, buffer.size, _HUGE_BYTES):
            began_s = time.thread_time()
            buffer[start] = 0
            saved_s = small_pages_s() - (time.thread_time() - began_s)
            self._credit_s = min(self._credit_s + saved_s, most_s)
            if self._credit_s < 0:
                self._give_up()
                return

    def _give_up(self) -> None:
        self._is_on = False
        for memory in list(self._advised):
            with suppress(OSError, ValueError):
                memory.madvise(_SMALL)


@cache
def small_pages_s() -> float:
    """How long a thread works until it has as many small pages as there are in a huge one."""
    memory = mmap.mmap(-1, _HUGE_BYTES, flags=_PRIVATE)
    with suppress(OSError):
        memory.madvise(_SMALL)
    pages = np.frombuffer(memory, np.uint8)
    began_s = time.thread_time()
    pages[:: mmap.PAGESIZE] = 0
    return time.thread_time() - began_s
