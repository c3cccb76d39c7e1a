"""What `repair` found and did, as plain data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ostraka._units import human_bytes
from ostraka.errors import Problem, count_of, name_few

OnBytes = Callable[[int, int], None]
"""Told of progress: the bytes that have been read so far, and those that there are in all."""


class Tally:
    """Bytes that were read and written; any thread may add to it."""

    def __init__(self, on_bytes: OnBytes | None = None) -> None:
        self.read = 0
        self.written = 0
        self.expected = 0
        """How many bytes will be read, if nothing is to be mended."""
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def add(self, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.read += read
            self.written += written
            if self._on_bytes is not None:
                self._on_bytes(min(self.read, self.expected), self.expected)


@dataclass(frozen=True, slots=True)
class MendedFile:
    """A file that was lost or damaged, and is whole again."""

    file: str
    found: str
    """What was wrong with it."""
    leaves: tuple[str, ...]
    """Of which bytes were lost."""
    origins: tuple[str, ...]
    """Where these bytes are from."""
    nbytes: int
    """Its size: a file is written as a whole."""
    process: int

    def __str__(self) -> str:
        leaves = f" (leaf {name_few(self.leaves)})" if self.leaves else ""
        return f"{self.file}{leaves}: {self.found}; from {', '.join(self.origins)}"


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `repair` did, or with `dry_run` would do."""

    path: str
    dry_run: bool
    mended: tuple[MendedFile, ...]
    problems: tuple[Problem, ...]
    """What could not be mended, and why."""
    notes: tuple[str, ...]
    """What else there is to know."""
    bytes_read: int
    bytes_written: int
    time_s: float

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged any more, or with `dry_run` would be."""
        return not self.problems

    def __str__(self) -> str:
        if not self.mended and self.ok:
            done = "nothing to mend"
        else:
            verb = "would be mended" if self.dry_run else "mended"
            done = f"{count_of(len(self.mended), 'file')} {verb}"
        if self.problems:
            done += f", {count_of(len(self.problems), 'problem')} left"
        read, written = human_bytes(self.bytes_read), human_bytes(self.bytes_written)
        head = f"{self.path}: {done} ({read} read, {written} written, {self.time_s:.2f} s)"
        return "\n".join([head, *(f"  {line}" for line in self.lines())])

    def lines(self) -> list[str]:
        """One for each file, problem and note."""
        return [*map(str, self.mended), *(f"left: {p}" for p in self.problems), *self.notes]

    def describe(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {**asdict(self), "ok": self.ok}


def encode_mended(files: Sequence[MendedFile]) -> list[Any]:
    """For another process."""
    return [[f.file, f.found, f.leaves, f.origins, f.nbytes, f.process] for f in files]


def decode_mended(encoded: Sequence[Any]) -> list[MendedFile]:
    return [
        MendedFile(file, found, tuple(leaves), tuple(origins), nbytes, process)
        for file, found, leaves, origins, nbytes, process in encoded
    ]
