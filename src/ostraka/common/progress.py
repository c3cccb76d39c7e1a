"""Counts bytes from many threads, and tells a caller how far the work has come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

OnBytes = Callable[[int, int], None]
"""Receives the bytes that are done so far, and the bytes in all."""


@dataclass(slots=True)
class Count:
    """The bytes that are done, of `total`. Any thread may add to them.

    One thread at a time calls `on_bytes`.
    """

    total: int = 0
    on_bytes: OnBytes | None = None
    done: int = field(init=False, default=0)
    kept: int = field(init=False, default=0)
    """Bytes among those done that an earlier run had written already."""
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def add(self, nbytes: int, *, kept: bool = False) -> None:
        """Count more bytes as done."""
        with self._lock:
            self.done += nbytes
            if kept:
                self.kept += nbytes
            if self.on_bytes is not None:
                self.on_bytes(min(self.done, self.total), self.total)
