"""Have the files of a source without checksums changed, and do all hosts have the same ones?

A store tells the version of a file. On a disk it is the inode, the size and the times of the last
changes, in a bucket the ETag. A source notes the version before it reads the first byte of a file,
and compares it after the last one. If both are equal, all bytes in between are of that version. No
JAX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import xxhash

from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import SourceChanged
from ostraka.storage import FileInfo, Store

TICK_NS = 20_000_000
"""A file system may give the same time to two changes within this interval."""
_LOOKS = 10
_BLOCK_BYTES = 4 << 10
_BLOCKS = 64
"""Most blocks of a file that hosts compare: 256 KiB."""
_FEW_BLOCKS = 16
"""The same where each block costs a request."""

Sampling = Literal["by version", "blocks", "few blocks"]
"""How to compare files: by ETags where all see one bucket, else by blocks of bytes."""


class OpenedFile(NamedTuple):
    """A file, and its state when the source was opened."""

    store: Store
    stored_as: str
    """Its name in the store."""
    state: Any
    """The state, from `state_of`."""


def state_of(file: FileInfo | None) -> Any:
    """A value that changes with the file, or None if it is gone."""
    return None if file is None else file.identity or (file.version, file.changed_ns)


def states_of(files: Iterable[FileInfo]) -> dict[str, Any]:
    """The states of many files, by name."""
    return {file.name: state_of(file) for file in files}


def look_settled(store: Store, name: str) -> FileInfo | None:
    """Look at a file that is about to be opened. Raises SourceChanged if it is being written."""
    found = settled(store, lambda: [file for file in [store.look(name)] if file is not None])
    return next(iter(found), None)


def settled(store: Store, look: Callable[[], Sequence[FileInfo]]) -> Sequence[FileInfo]:
    """Look at files until none has just changed. Another change in the same tick would not show."""
    name = ""
    for _ in range(_LOOKS):
        found = look()
        if not found:
            return found
        newest = max(found, key=attrgetter("changed_ns"))
        name, age_ns = newest.name, time.time_ns() - newest.changed_ns
        if not 0 <= age_ns < TICK_NS:
            return found
        time.sleep((TICK_NS - age_ns) / 1e9)
    raise SourceChanged(
        f"{store.location}/{name} is being written; wait until that has ended, and open it again"
    )


def refuse_changed(files: Iterable[OpenedFile]) -> None:
    """Raise SourceChanged if one of the files has changed since it was opened."""

    def check(file: OpenedFile) -> None:
        if state_of(file.store.look(file.stored_as)) != file.state:
            raise changed(file.store, file.stored_as)

    listed = list({(id(file.store), file.stored_as): file for file in files}.values())
    if listed:
        threads = listed[0].store.traits.reads_at_once
        run_all(check, listed, threads=threads, stop=StopSignal())


def changed(store: Store, name: str) -> SourceChanged:
    return SourceChanged(
        f"{store.location}/{name} has changed since it was opened: another program has replaced, "
        "rewritten or removed it; wait until that has ended, and open it again"
    )


def digest_of_states(states: Iterable[tuple[str, Any]]) -> str:
    """One text for the names and states of many files."""
    return xxhash.xxh3_128_hexdigest(repr(sorted(states, key=lambda one: one[0])).encode())


def sample(file: OpenedFile, size: int, parts: Sequence[tuple[int, int]], how: Sampling) -> str:
    """A digest of blocks of a file, to compare it with that of another host or copy.

    A small file is read whole. In a large one, half of the blocks lie at equal distances. The
    others lie in the middle of the largest of `parts`, which are starts and sizes.
    """
    if how == "by version" and file.store.traits.is_remote:
        return str(file.state)
    digest = xxhash.xxh3_128()
    with closing(file.store.open(file.stored_as)) as reader:
        for start, nbytes in _blocks(size, parts, _FEW_BLOCKS if how == "few blocks" else _BLOCKS):
            block = bytearray(nbytes)
            digest.update(block[: reader.read_into(start, [block])])
    return digest.hexdigest()


def _blocks(size: int, parts: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    if size <= _BLOCKS * _BLOCK_BYTES:
        return [(0, size)]
    half = count // 2
    last = size - _BLOCK_BYTES
    spread = [at * last // (half - 1) for at in range(half)]
    largest = sorted(parts, key=lambda part: (-part[1], part[0]))[:half]
    middles = [min(start + nbytes // 2, last) for start, nbytes in largest]
    return [(start, _BLOCK_BYTES) for start in sorted({*spread, *middles})]
