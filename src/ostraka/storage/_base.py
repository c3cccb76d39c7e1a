"""The few verbs that a checkpoint needs of the place where it lives.

Names are relative, with `/` between directories. A missing name raises FileNotFoundError; any other
refusal raises `errors.StoreError`, a sentence with the name in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class FileWriter(Protocol):
    """A new file of a known size, written in any order."""

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        """Put the bytes of `buffers`, one after the other, at `offset`."""
        ...

    def finish(self) -> None:
        """Make the file's bytes durable and close it."""
        ...

    def abandon(self) -> None:
        """Close without any promise; the file may be half-written or absent."""
        ...


class FileReader(Protocol):
    """An open file."""

    size: int

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        """Fill `buffers` with the bytes from `offset` on; returns how many there were."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """One checkpoint's place: a directory, a prefix in a bucket, a dictionary."""

    location: str
    """What to call this place in messages."""

    def prepare(self) -> bool:
        """Make the place itself exist; returns whether it was not there before."""
        ...

    def remove_if_empty(self) -> None:
        """Undo `prepare`, if nothing is in this place."""
        ...

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the place for one writer; raises `errors.Busy` while another holds it.

        The hold of a process that died is over. Stores that can't tell hold nothing.
        """
        ...

    def get(self, name: str) -> bytes: ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file as one atomic, durable event, replacing what was there."""
        ...

    def create(self, name: str, size: int) -> FileWriter:
        """Begin a new file; its directory comes into being with it."""
        ...

    def open(self, name: str) -> FileReader: ...

    def list(self) -> list[str] | None:
        """The names directly in this place (directories without their contents), None if it is not
        there."""
        ...

    def settle(self, directory: str) -> None:
        """Make the names in a directory as durable as their files."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file, or a directory with all in it; nothing if there is none."""
        ...


def byte_views(buffers: Sequence[Any]) -> list[memoryview]:
    """Buffers of any shape as flat bytes; empty ones are left out."""
    return [view.cast("B") for buffer in buffers if (view := memoryview(buffer)).nbytes]
