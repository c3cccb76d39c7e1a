"""Huge pages for memory that is about to be filled, where the kernel has free ones. No JAX.

A huge page is mapped in one go. That saves most of the cost of fresh memory. Where none is free,
the kernel makes some: it moves other pages out of the way, which costs several times more than it
saves. So this asks for huge pages only while the kernel has plenty.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

HUGE_BYTES = 2 << 20
_SPARE_BYTES = 256 << 20
"""What is left to others: those that ask at the same time see the same free pages."""
_LOOK_S = 0.05
"""How long a look at the free pages counts."""
_SLOW_S = 0.001
"""The small pages in its place take 0.6 ms, and a free huge page 0.1 ms."""
_PAUSES = 20
"""After a slow one, none is asked for during so many times its time."""
_MOST_MAPPINGS = 8192
"""The kernel allows a process 65,530 ranges of memory, and a mapping may take three."""
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_BUDDYINFO = Path("/proc/buddyinfo")

_madvise: Any = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class _Free:
    """The bytes of huge pages that may still be asked for, as of the last look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = 0
        self._until_s = 0.0

    def has(self, nbytes: int, *, take: bool = False) -> bool:
        """True if there are so many. With `take` they count as gone."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._until_s:
                self._left, self._until_s = free_bytes() - _SPARE_BYTES, now_s + _LOOK_S
            if nbytes > self._left:
                return False
            self._left -= nbytes * take
            return True

    def pause(self, pause_s: float) -> None:
        """Have none for a while."""
        with self._lock:
            self._left, self._until_s = 0, time.monotonic() + pause_s


_free = _Free()


def free_bytes() -> int:
    """The bytes of free huge pages. 0 unless the system has programs ask for them."""
    try:
        if "[madvise]" not in (_SETTINGS / "enabled").read_text():
            return 0
        order = (int((_SETTINGS / "hpage_pmd_size").read_text()) // mmap.PAGESIZE).bit_length() - 1
        if mmap.PAGESIZE << order != HUGE_BYTES:
            return 0
        return sum(
            int(count) * mmap.PAGESIZE << at
            for zone in _BUDDYINFO.read_text().splitlines()
            for at, count in enumerate(zone.split()[4:])
            if at >= order
        )
    except (OSError, ValueError):  # Containers may hide them.
        return 0


def map_huge(nbytes: int) -> Array | None:
    """Memory that begins where a huge page does, or None if huge pages are scarce.

    It has none before `ask`. The pages before its beginning are never touched.
    """
    if _madvise is None or len(_mappings) >= _MOST_MAPPINGS or not _free.has(nbytes):
        return None
    mapping = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=_PRIVATE)
    _mappings.add(mapping)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.ctypes.data % HUGE_BYTES
    return memory[start : start + nbytes]


def ask(address: int, nbytes: int) -> None:
    """Ask for huge pages for the parts of fresh memory that fill them, if they are still free.

    The first one is mapped here and timed: a hypervisor may have to find the memory for it.
    """
    start = -(-address // HUGE_BYTES) * HUGE_BYTES
    nbytes = (address + nbytes - start) // HUGE_BYTES * HUGE_BYTES
    if nbytes <= 0 or not _free.has(nbytes, take=True):
        return
    before_s = time.thread_time()
    _advise(start, HUGE_BYTES, _MADV_HUGEPAGE)
    _advise(start, HUGE_BYTES, _MADV_POPULATE_WRITE)
    took_s = time.thread_time() - before_s
    if took_s > _SLOW_S:
        _free.pause(_PAUSES * took_s)
    elif nbytes > HUGE_BYTES:
        _advise(start + HUGE_BYTES, nbytes - HUGE_BYTES, _MADV_HUGEPAGE)


def _advise(start: int, nbytes: int, advice: int) -> None:
    _madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice)
