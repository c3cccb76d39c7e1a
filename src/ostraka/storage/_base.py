"""The verbs that a checkpoint needs of the place where it lives: a directory, a bucket, memory.

Names are relative, with `/` between directories. A missing name raises FileNotFoundError; any other
refusal raises `errors.StoreError`, a sentence with the name in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, Final, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as a store lists it."""

    name: str
    size: int
    changed_s: float
    """When it was last written, by the store's own clock: compare it only with other files of the
    same store."""
    version: Any
    """Equal for two looks at a file if, and only if, other bytes have not replaced it between
    them."""
    identity: str = ""
    """In a bucket the object's ETag, as `FileWriter.finish` gives it; empty elsewhere."""


USUAL_WRITERS = max(4, min(os.cpu_count() or 1, 16))
"""Where writing is mostly the work of this machine's cores."""


USUAL_READERS = max(2, min(os.cpu_count() or 1, 16))


@dataclass(frozen=True, slots=True)
class Parts:
    """How a store likes to be used."""

    at_once: int = USUAL_WRITERS
    """How many threads of one process may write at the same time."""
    size_bytes: int = 0
    """A thread writes at least this much of a file, in order, before another goes on after it; 0 if
    the store does not care."""
    in_any_order: bool = True
    """Whether a file may be written in any order; else from its first byte to its last."""
    reads_at_once: int = USUAL_READERS
    """How many threads of one process should read at the same time."""
    look_every_s: float = 0.1
    """How long to wait before looking again for a change that is expected."""
    deletes_fence: bool = True
    """Whether a `put` fails if what it needs is deleted before it is done: see `_leftovers`."""
    is_remote: bool = False
    """Whether reading takes time or money that the network between processes does not."""


class FileWriter(Protocol):
    """A new file, written in the order that the store's `parts` allow."""

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        """Put the bytes of `buffers`, one after the other, at `offset`.

        A store that wants files in order may keep the buffers until the file is finished.
        """
        ...

    def finish(self) -> str | None:
        """Make the file's bytes durable and close it.

        Returns the `identity` that looks at the file will give while nobody writes it again; None
        where the store has none.
        """
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


class PlaceLock(Protocol):
    """A lock on a place, which ends with its process."""

    scope: str
    """16 hex digits. Locks of the same scope exclude each other; those of two machines may not."""

    def is_in_place(self) -> bool:
        """Whether the place that is locked is still the one of that name."""
        ...

    def release(self) -> None:
        """Unlock; again is as good as once."""
        ...


MOST_BYTES = 1 << 30
"""What a small file may have, if nothing else is known of it. The `_METADATA` of a model with
405 billion parameters on 16,384 devices has 1.2 MiB, and one of a million leaves some 200 MiB."""


class _Anything:
    """The type of ANYTHING alone."""


ANYTHING: Final = _Anything()
"""For `put`: replace whatever is there."""


@runtime_checkable
class Store(Protocol):
    """One place: a directory, a prefix in a bucket, a part of a dictionary. `str` of it is
    `location`.

    One writer at a time is the business of `storage.Claim`, which works by files in the place.
    """

    location: str
    """What to call this place in messages."""
    parts: Parts

    def at(self, name: str) -> Store:
        """The store of a place below this one."""
        ...

    def prepare(self) -> bool:
        """Make the place itself exist; returns whether it was not there before."""
        ...

    def exists(self) -> bool:
        """Whether the place is there, be it empty."""
        ...

    def remove_if_empty(self) -> None:
        """Undo `prepare`, if nothing is in this place."""
        ...

    def lock(self) -> PlaceLock | None:
        """Lock the place; None where there are no locks. Raises `errors.Busy` if it is locked.

        The lock of a process that died is over at once. Nobody relies on locks alone: they may hold
        on one machine only, as on some network file systems.
        """
        ...

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        """All bytes of a small file; raises `errors.TooLarge`, and reads nothing, if it has more.

        What is no file at all (a link, a pipe, a device) raises `errors.Unreadable`, here and in
        `open`, and is neither followed nor waited for.
        """
        ...

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], None] | None = None,
        durable: bool = True,
    ) -> None:
        """Write a small file as one atomic, durable event.

        Without `durable` it is a new file that nothing depends on: neither atomic nor synced, so
        that it costs next to nothing, and a crash of the machine may take some or all of it.

        `replaces` is the `version` of what may be replaced, None if nothing may be: else raises
        `errors.Busy`. `check` is called when all is ready but for the event itself, and may raise.

        None is atomic everywhere. A version is compared just before the file is replaced; on a
        directory two writers may fall between the two, unless they hold a Claim: who takes a claim
        over first deletes the temporary files (`is_temporary`) of writers before it, whose `put`
        then raises Busy.

        Raises `errors.NotDurable` if the file is there, but may not survive a power failure, and
        `errors.OutcomeUnknown` if it can't be told whether it is there.
        """
        ...

    def touch(self, name: str, *, create: bool) -> None:
        """Set the time of a file to now, by the store's clock; durable only by chance.

        With `create` the file is made, empty, and must not be there. Else it must be there.
        """
        ...

    def create(self, name: str, size: int, *, beside: int = 1, replace: bool = False) -> FileWriter:
        """Begin a new file; its directory comes into being with it.

        With `replace` it appears when it is finished, in one atomic and durable event, in the place
        of what is there under its name; until then that stays as it is, and so it does if the
        writer dies. What a dead one leaves is temporary by its name (`is_temporary`).
        Where `parts` allow any order, `size` is only the most that is written, and the file ends
        where its last byte was written; elsewhere it is exact.
        `beside` is how many files this process writes at the same time, this one among them.
        """
        ...

    def open(self, name: str, first_bytes: int = 0) -> FileReader:
        """Open a file for reading.

        `first_bytes` is how many from its beginning will be read first. A store where each request
        takes time brings them with the request that opens the file.
        """
        ...

    def look(self, name: str) -> FileInfo | None:
        """A file's size, time and version; None if it is not there."""
        ...

    def list(self) -> list[str]:
        """The names directly in this place, directories without their contents; sorted. Empty if
        the place is not there."""
        ...

    def files(self, prefix: str) -> list[FileInfo]:
        """All files, at any depth, whose names begin with `prefix`; sorted by name."""
        ...

    def is_link(self, name: str) -> bool:
        """Whether what lies under this name is elsewhere, and not to be changed from here."""
        ...

    def sync(self, directory: str) -> None:
        """Make the names in a directory as durable as their files; given a file, its bytes."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file, or a directory with all in it; nothing if there is none."""
        ...

    def discard_uploads(self) -> None:
        """Remove what the writers of dead processes have sent to this place, and no list shows."""
        ...


def is_temporary(name: str, of: str) -> bool:
    """Whether a name is that of the file `of` while it is being put."""
    return name.startswith(f"{of}.") and name.endswith(".tmp")


def byte_views(buffers: Sequence[Any]) -> list[memoryview]:
    """Buffers of any shape as flat bytes; empty ones are left out."""
    views = filter(attrgetter("nbytes"), map(memoryview, buffers))
    return list(map(methodcaller("cast", "B"), views))
