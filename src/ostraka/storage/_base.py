"""The verbs that a checkpoint needs of its place: a directory, a bucket or memory.

Names are relative, with `/` between directories. A missing name raises FileNotFoundError. Any other
refusal raises `errors.StoreError` with a sentence that names the file.

Write a class with the verbs of `Store` to keep checkpoints in a store of your own.
`ostraka.testing.StoreTests` checks each promise of this module. All names that such a class needs
are in `ostraka.storage`, and its errors are in `ostraka.errors`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, Final, Protocol, runtime_checkable

from ostraka.layout.shard_file import METADATA_NAME


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as a store lists it."""

    name: str
    size: int
    changed_s: float
    """When it was last written, by the store's own clock: compare it only with other files of the
    same store."""
    version: Any
    """Two looks at a file give equal versions if, and only if, nobody replaced it between them."""
    identity: str = ""
    """The ETag in a bucket, as `FileWriter.finish` returns it. Empty elsewhere."""
    changed_ns: int = 0
    """When anything of it last changed: its bytes, name, links or permissions. No program can set
    this time. 0 where only the bytes have a time."""


USUAL_WRITERS = max(4, min(os.cpu_count() or 1, 16))
"""Where writing is mostly the work of this machine's cores."""


USUAL_READERS = max(2, min(os.cpu_count() or 1, 16))


@dataclass(frozen=True, slots=True)
class Traits:
    """How a store likes to be used."""

    at_once: int = USUAL_WRITERS
    """How many threads of one process may write at the same time."""
    in_any_order: bool = True
    """True if a file may be written in any order. Else it is written from start to end."""
    reads_at_once: int = USUAL_READERS
    """How many threads of one process should read at the same time."""
    look_every_s: float = 0.1
    """How long to wait before looking again for a change that is expected."""
    touch_every_s: float = 0.0
    """How long the store wants a file to be left alone before it is changed again."""
    deletes_fence: bool = True
    """True if a `put` or a `delete` fails once its temporary file is deleted, or if nobody else can
    write between a `check` and its event. Set it to False for a store that can do neither. A
    takeover then empties the marker of the earlier writer first: see `Store.touch`."""
    is_remote: bool = False
    """True if reading takes time or money that the network between processes does not."""


class FileWriter(Protocol):
    """A new file, written in the order that the store's `traits` allow."""

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        """Put the bytes of `buffers`, one after the other, at `offset`.

        A store that wants files in order may keep the buffers until the file is finished.
        """

    def finish(self) -> str | None:
        """Make the file's bytes durable and close it.

        Returns the file's `identity` until somebody writes it again. None if the store has none.
        """
        ...

    def abandon(self) -> None:
        """Close the file, which may be half-written or absent then."""


class FileReader(Protocol):
    """An open file."""

    size: int

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        """Fill `buffers` with the bytes from `offset` on. Returns how many bytes there were."""
        ...

    def close(self) -> None: ...


class PlaceLock(Protocol):
    """A lock on a place, which ends with its process."""

    scope: str
    """16 hex digits. Locks of the same scope exclude each other. Two machines have two scopes."""

    def is_in_place(self) -> bool:
        """Return True if the place that is locked is still the one of that name."""
        ...

    def release(self) -> None:
        """Unlock. A second call does nothing."""


MOST_BYTES = 1 << 30
"""The largest small file, if nothing else is known of it. The `_METADATA` of a model with
405 billion parameters on 16,384 devices has 1.2 MiB, and one of a million leaves some 200 MiB."""


ANYTHING: Final = object()
"""For `put`: replace whatever is there."""


@runtime_checkable
class Store(Protocol):
    """One place: a directory, a prefix in a bucket, a part of a dictionary. `str` of it is
    `location`.

    A verb may be called by several threads, and by several processes for one place. Each sees at
    once what another has done. No name leads out of the place: one with `..` names nothing, or
    raises `errors.StoreError`.

    One writer at a time is the business of `storage.Claim`, which works by files in the place.
    """

    location: str
    """The name of this place in messages. Begin it with a scheme of your own, as `memory://` does,
    and end that of `at(name)` with `/name`. If equal locations always are the same place, add an
    attribute `is_named = True`: `copy` and `convert` then refuse a target inside their source."""
    traits: Traits

    def at(self, name: str) -> Store:
        """The store of a place below this one."""
        ...

    def prepare(self) -> bool:
        """Make the place itself. Returns True if it was not there before."""
        ...

    def exists(self) -> bool:
        """Return True if the place is there, be it empty."""
        ...

    def remove_if_empty(self) -> None:
        """Undo `prepare`, if nothing is in this place."""

    def lock(self) -> PlaceLock | None:
        """Lock the place. Returns None without locks, raises `errors.Busy` if it is locked.

        The lock of a process that died is over at once. Nobody relies on locks alone: they may hold
        on one machine only, as on some network file systems.
        """
        ...

    def get(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return all bytes of a small file. A larger one raises `errors.TooLarge` unread.

        A link, a pipe or a device raises `errors.Unreadable`, here and in `open`. They are neither
        followed nor waited for.
        """
        ...

    def put(
        self,
        name: str,
        data: bytes,
        *,
        replaces: Any = ANYTHING,
        check: Callable[[], Any] | None = None,
        durable: bool = True,
    ) -> None:
        """Write a small file as one atomic, durable event.

        Without `durable` it is a new file that nothing depends on. It is neither atomic nor synced
        and costs next to nothing. A crash of the machine may take some or all of it.

        `replaces` is the `version` of what may be replaced, None if nothing may be: else raises
        `errors.Busy`. `check` is called when all is ready but for the event itself. It may raise,
        and may use the store.

        None is atomic everywhere. A version is compared just before the file is replaced. In a
        directory two writers may fall between the two, unless they hold a Claim. Whoever takes over
        a claim first deletes the temporary files (`is_temporary`) of earlier writers. Their `put`
        raises Busy then.

        Raises `errors.NotDurable` if the file is there, but may not survive a power failure, and
        `errors.OutcomeUnknown` if it can't be told whether it is there.
        """

    def touch(self, name: str, *, create: bool, note: bytes = b"") -> float | None:
        """Set the time of a file to now, by the store's clock. It may not survive a crash.

        With `create` the file is made. If it exists, raises `errors.StoreError`. Else the file must
        exist: raises FileNotFoundError. `note` is the start of the file, if the store can write it.
        Each call must give the same.

        Without `traits.deletes_fence`, a touched file has at least one byte, and an empty file
        counts as missing: so a conditional `put` of no bytes ends a marker.

        Returns the time before, if the store refuses a deletion after a time (see `delete`). Else
        None.
        """
        ...

    def create(self, name: str, size: int, *, beside: int = 1, replace: bool = False) -> FileWriter:
        """Begin a new file, and make its directory if needed.

        With `replace` the file replaces the old one when it is finished, in one atomic and durable
        event. If the writer dies, the old one stays. Its remains have a temporary name
        (`is_temporary`).
        Where `traits` allow any order, `size` is an upper bound, and the file ends with the last
        byte written. Elsewhere it is exact.
        `beside` is the number of files that this process writes at the same time.
        """
        ...

    def open(self, name: str, first_bytes: int = 0) -> FileReader:
        """Open a file for reading.

        `first_bytes` is how many from its beginning will be read first. A store where each request
        takes time brings them with the request that opens the file.
        """
        ...

    def look(self, name: str) -> FileInfo | None:
        """Return a file's size, time and version, or None if it is not there."""
        ...

    def list(self) -> list[str]:
        """Return the sorted names directly in this place. Empty if the place is not there."""
        ...

    def files(self, prefix: str) -> list[FileInfo]:
        """Return all files at any depth whose names begin with `prefix`, sorted by name."""
        ...

    def is_link(self, name: str) -> bool:
        """Return True for a link: the file is elsewhere, and must not be changed from here."""
        ...

    def sync(self, directory: str) -> None:
        """Make the names in a directory as durable as their files, or the bytes of a file."""

    def delete(
        self, name: str, *, version: Any = ANYTHING, check: Callable[[], Any] | None = None
    ) -> None:
        """Remove a file, or a directory with all in it. Do nothing if there is none.

        With a `version` only the file that has it is removed: else raises `errors.Busy`.

        `check` is called when all is ready but for the removal, and may raise. Where
        `traits.deletes_fence`, a fence begins with it: whoever then deletes the temporary files of
        this place (`is_fence`) either finds the name gone, or makes this raise `errors.Busy`. In a
        bucket it returns a time of the store's clock, and nothing is deleted after that time.
        """

    def delete_link(self, name: str) -> None:
        """Remove a link; raises `errors.StoreError` if a file or a directory is in its place."""

    def discard_uploads(self) -> None:
        """Remove what the writers of dead processes have sent to this place, and no list shows."""


def is_temporary(name: str, of: str) -> bool:
    """Return True if a name is that of the file `of` while it is being put."""
    return name.startswith(f"{of}.") and name.endswith(".tmp")


def is_fence(name: str) -> bool:
    """Return True if a `put` of `_METADATA` or a checked `delete` fails without this name."""
    return is_temporary(name, METADATA_NAME)


def byte_views(buffers: Sequence[Any]) -> list[memoryview]:
    """Return buffers of any shape as flat bytes, without the empty ones."""
    views = filter(attrgetter("nbytes"), map(memoryview, buffers))
    return list(map(methodcaller("cast", "B"), views))
