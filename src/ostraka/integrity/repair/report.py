"""The report of `repair`, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ostraka.common.units import human_bytes
from ostraka.errors import Problem, count_of, name_few


@dataclass(frozen=True, slots=True)
class MendedFile:
    """A file that was lost or damaged, and is complete again.

    Attributes:
        file: The name of the file.
        found: The damage.
        leaves: The leaves that had lost bytes.
        origins: The origins of the bytes that replaced them.
        nbytes: The size of the file, which is written as a whole.
        process: The process that wrote it.
    """

    file: str
    found: str
    leaves: tuple[str, ...]
    origins: tuple[str, ...]
    nbytes: int
    process: int

    def __str__(self) -> str:
        leaves = f" (leaf {name_few(self.leaves)})" if self.leaves else ""
        return f"{self.file}{leaves}: {self.found}; from {', '.join(self.origins)}"


RepairResult = MendedFile | Problem
"""A lost file that was mended, or the reason why it could not be."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of `repair`. With `dry_run`, it has what `repair` would do.

    Attributes:
        path: The location of the checkpoint.
        dry_run: True if nothing was written.
        mended: Files that were repaired.
        problems: Damage that could not be repaired, and the reasons.
        notes: Other remarks.
        bytes_read: Bytes that all processes read.
        bytes_written: Bytes that all processes wrote.
        time_s: Duration in seconds.
    """

    path: str
    dry_run: bool
    mended: tuple[MendedFile, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    time_s: float

    @property
    def ok(self) -> bool:
        """True if no damage is left, or with `dry_run` would be left."""
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
        """One line for each file, problem and note."""
        return [*map(str, self.mended), *(f"left: {p}" for p in self.problems), *self.notes]

    def describe(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {**asdict(self), "ok": self.ok}


def decode_mended(encoded: Sequence[Any]) -> list[MendedFile]:
    """Return the files that other processes sent as JSON."""
    return [
        MendedFile(file, found, tuple(leaves), tuple(origins), nbytes, process)
        for file, found, leaves, origins, nbytes, process in encoded
    ]
