"""Memory that is used again once nobody holds it: fresh pages cost more than filling them. No JAX.

Whoever reads a large checkpoint piece by piece, and lets go of each piece, reads under `recycling`.
What is read is handed out as before: memory is used again only when its last array is gone.
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
"""Less is not worth keeping."""
_STEP_BYTES = 1 << 20
_SLACK = 4
"""Memory serves for what needs no less than 3/4 of it."""
_FLAGS = (
    getattr(mmap, "MAP_PRIVATE", 0)
    | getattr(mmap, "MAP_ANONYMOUS", 0)
    | getattr(mmap, "MAP_POPULATE", 0)
)
"""Private, because the default would be memory that a forked process shares; mapped at once."""


class Recycled:
    """Pieces of memory, of which at most `idle_bytes` wait for their next use."""

    def __init__(self, idle_bytes: int):
        self._limit = idle_bytes
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        """The one that was used last comes last: some of it is in a cache still."""
        self._returned: deque[mmap.mmap] = deque()
        """Written to without the lock: memory may be let go of at any place in any thread."""

    def take(self, nbytes: int) -> Array:
        """Memory at the beginning of a page, with anything in it."""
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
    """Whether an array lies in such memory, whose pages are mapped already."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = cast("Any", base).base
    return isinstance(base, ctypes.Array)


_using = threading.local()


def current() -> Recycled | None:
    """What the calling thread recycles, or None: all memory is fresh then."""
    return getattr(_using, "memory", None)


@contextmanager
def recycling(memory: Recycled) -> Generator[None]:
    """Have the reads that this thread begins take their memory from there."""
    before = current()
    _using.memory = memory
    try:
        yield
    finally:
        _using.memory = before
