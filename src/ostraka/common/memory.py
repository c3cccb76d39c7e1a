"""Memory that is used again once nobody holds it: fresh pages cost more than filling them. No JAX.

Whoever reads a large checkpoint piece by piece, and lets go of each piece, reads under `recycling`.
Reads return arrays as before: memory is used again only when its last array is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

Array = np.ndarray[Any, Any]

LEAST_BYTES = 1 << 20
"""The smallest piece that is recycled."""
_STEP_BYTES = 1 << 20
_SLACK = 4
"""A piece is reused for data of at least 3/4 of its size."""
_FLAGS = sum(getattr(mmap, f"MAP_{name}", 0) for name in ("PRIVATE", "ANONYMOUS", "POPULATE"))
"""Private, since by default a forked process would share the memory, and mapped at once."""


class Recycled:
    """Pieces of memory for reuse, at most `idle_bytes` of them idle."""

    def __init__(self, idle_bytes: int):
        self._limit = idle_bytes
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        """The piece that was used last comes last: it is partly in the cache."""
        self._returned: deque[mmap.mmap] = deque()
        """Written to without the lock: memory may be let go of at any place in any thread."""

    def take(self, nbytes: int) -> Array:
        """Uninitialized memory at the beginning of a page."""
        with self._lock:
            while self._returned:
                self._idle.append(self._returned.popleft())
            memory = self._find(nbytes)
        if memory is None:
            size = -(-nbytes // _STEP_BYTES) * _STEP_BYTES
            memory = mmap.mmap(-1, size, flags=_FLAGS) if _FLAGS else mmap.mmap(-1, size)
        # numpy keeps this for as long as any array has a part of the memory.
        holder: Any = (ctypes.c_char * len(memory)).from_buffer(memory)
        weakref.finalize(holder, self._returned.append, memory).atexit = False
        return np.frombuffer(holder, np.uint8)[:nbytes]

    def _find(self, nbytes: int) -> mmap.mmap | None:
        for at in reversed(range(len(self._idle))):
            size = len(self._idle[at])
            if nbytes <= size <= nbytes + max(nbytes // _SLACK, _STEP_BYTES):
                return self._idle.pop(at)
        held = sum(map(len, self._idle))
        while self._idle and held + nbytes > self._limit:  # It is about to be more by so much.
            held -= len(self._idle.pop(0))
        return None


def is_recycled(array: Array) -> bool:
    """True if an array is in recycled memory, whose pages are mapped already."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = cast("Any", base).base
    return isinstance(base, ctypes.Array)


_using = threading.local()


def current() -> Recycled | None:
    """The recycled memory of the calling thread, or None."""
    return getattr(_using, "memory", None)


@contextmanager
def recycling(memory: Recycled) -> Generator[None]:
    """Let reads that this thread begins take their memory from `memory`."""
    before = current()
    _using.memory = memory
    try:
        yield
    finally:
        _using.memory = before


def trim() -> None:
    """Give memory that was freed back to the system, where the C library keeps it (glibc)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
