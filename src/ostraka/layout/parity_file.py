"""Parity files: names, headers, and their field in `_METADATA`, as docs/reference/format.md. Pure.

A parity file is a safetensors file of bytes: the parity of its group, copies of some process
indexes, and last the digests of everything before. `_METADATA` has the digest of these digests. So
`_METADATA` and the file itself are enough to check it, or to recover a lost index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any

from ostraka.layout import shard_file as _format
from ostraka.layout.runs import decode_runs, encode_runs
from ostraka.layout.shard_file import (
    BLOCK_BYTES,
    DIGEST_DIGITS,
    PAGE_BYTES,
    FileDigests,
    FileEntry,
    cut_digests,
    dumps,
)

_LONGEST_NUMBER = 10**15
_MOST_MEMBERS = 255
_MOST_COUNT = 2
_COLUMNS = ("process", "header_bytes", "size")


@dataclass(frozen=True, slots=True)
class ParityFile:
    """A parity file: its group and number, its writer, and its size."""

    group: int
    number: int
    """0 for the XOR of the members, 1 for the other sum."""
    process: int
    header_bytes: int
    size: int
    digest: str
    """The digest of the digests at its end."""

    @property
    def name(self) -> str:
        return parity_name(self.group, self.number)


@dataclass(frozen=True, slots=True)
class Parity:
    """The parity field of `_METADATA`."""

    count: int
    """The number of parity files of each group."""
    groups: tuple[tuple[int, ...], ...]
    """The members of each: rows of the file table."""
    files: tuple[ParityFile, ...]
    """`count` of each group, in the order of the groups."""

    def files_of(self, group: int) -> tuple[ParityFile, ...]:
        return self.files[group * self.count : (group + 1) * self.count]


def parity_name(group: int, number: int) -> str:
    suffix = f"-{number:05d}" if number else ""
    return f"parity_{group:05d}{suffix}.safetensors"


@dataclass(frozen=True, slots=True)
class ParityLayout:
    """The layout that all parity files of one group share."""

    header_bytes: int
    parity_bytes: int
    """As many as the longest member has."""
    indexes: tuple[tuple[int, int], ...]
    """The processes whose indexes are here, and their sizes."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of a file's blocks, up to where the digests begin."""
        whole, rest = divmod(self.parity_bytes, BLOCK_BYTES)
        blocks = [self.header_bytes, *[BLOCK_BYTES] * whole, *([rest] if rest else [])]
        return tuple(blocks + [size for _, size in self.indexes])

    @property
    def blocks(self) -> int:
        """The number of blocks of parity."""
        return -(-self.parity_bytes // BLOCK_BYTES)

    @property
    def table_bytes(self) -> int:
        return (1 + self.blocks + len(self.indexes)) * DIGEST_DIGITS

    @property
    def size(self) -> int:
        indexes = sum(size for _, size in self.indexes)
        return self.header_bytes + self.parity_bytes + indexes + self.table_bytes

    def index_range(self, process: int) -> tuple[int, int]:
        """Where the copy of a process's index lies in the file."""
        at = self.header_bytes + self.parity_bytes
        for number, size in self.indexes:
            if number == process:
                return at, at + size
            at += size
        raise KeyError(process)

    def digests(self, table: bytes, digest: str) -> FileDigests:
        """A file's blocks, with the digests at its end and their own digest."""
        found = cut_digests(table.decode("ascii", errors="replace"))
        return FileDigests(self.size, (*self.lengths, self.table_bytes), (*found, digest))


def layouts_of(
    groups: Sequence[Sequence[int]],
    files: Sequence[FileEntry],
    process_of: Sequence[int],
    index_bytes: Mapping[int, int],
) -> list[ParityLayout]:
    """The layout of each group's parity files.

    The first group with a file of a process has the copies of its index.
    """
    seen: set[int] = set()
    layouts: list[ParityLayout] = []
    for members in groups:
        writers = sorted({process_of[files[row].device] for row in members} - seen)
        seen.update(writers)
        indexes = tuple((p, index_bytes[p]) for p in writers if p in index_bytes)
        header = header_bytes_of([files[row].name for row in members], [p for p, _ in indexes])
        layouts.append(
            ParityLayout(header, max((files[row].size for row in members), default=0), indexes)
        )
    return layouts


# Headers


def header_bytes_of(members: Sequence[str], indexes: Sequence[int]) -> int:
    """The room for a header, for sizes of any length."""
    most = _LONGEST_NUMBER
    layout = ParityLayout(most, most, tuple((process, most) for process in indexes))
    text = _header_json(most, _MOST_COUNT, [(name, most) for name in members], layout, "0" * 16, 1)
    return -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES


def encode_parity_header(
    file: tuple[int, int],
    members: Sequence[FileEntry],
    layout: ParityLayout,
    save_id: str,
    *,
    version: int,
) -> bytes:
    """The first bytes of the parity file `(group, number)`."""
    named = [(member.name, member.size) for member in members]
    text = _header_json(*file, named, layout, save_id, version)
    room = layout.header_bytes - 8
    if len(text) > room:
        raise AssertionError(f"header of {len(text)} bytes exceeds its plan of {room}")
    return room.to_bytes(8, "little") + text.ljust(room)


def _header_json(
    group: int,
    number: int,
    members: Sequence[tuple[str, int]],
    layout: ParityLayout,
    save_id: str,
    version: int,
) -> bytes:
    about = {
        "ostraka": str(version),
        "ostraka_id": save_id,
        "ostraka_parity": dumps({"group": group, "number": number, "members": members}),
    }
    names = ["parity", *(_format.index_name(process) for process, _ in layout.indexes), "digests"]
    sizes = [layout.parity_bytes, *(size for _, size in layout.indexes), layout.table_bytes]
    tensors = {
        name: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for name, (start, stop) in zip(names, pairwise(accumulate(sizes, initial=0)), strict=True)
    }
    return dumps({"__metadata__": about, **tensors}).encode()


# In `_METADATA`


def encode_parity(parity: Parity) -> dict[str, Any]:
    columns = {
        name: encode_runs([getattr(file, name) for file in parity.files]) for name in _COLUMNS
    }
    return {
        "count": parity.count,
        "members": encode_runs([row for members in parity.groups for row in members]),
        "lengths": encode_runs([len(members) for members in parity.groups]),
        **columns,
        "digests": "".join(file.digest for file in parity.files),
    }


def decode_parity(body: Mapping[str, Any]) -> Parity:
    """Raises ValueError, KeyError or TypeError if it is malformed."""
    count, digests = body["count"], cut_digests(body["digests"])
    rows, lengths = decode_runs(body["members"]), decode_runs(body["lengths"])
    if type(count) is not int or not 1 <= count <= _MOST_COUNT:
        raise ValueError(f"a group has {count!r} parity files")
    if any(not 1 <= length <= _MOST_MEMBERS for length in lengths):
        raise ValueError("a group of parity has an impossible number of members")
    if sum(lengths) != len(rows):
        raise ValueError("the groups of parity have other members than were listed")
    groups = tuple(rows[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0)))
    columns = [decode_runs(body[name]) for name in _COLUMNS]
    places = product(range(len(groups)), range(count))
    files: Any = zip(places, *columns, digests, strict=True)
    return Parity(count, groups, tuple(ParityFile(*place, *about) for place, *about in files))


def check_parity_table(
    parity: Parity,
    files: Sequence[FileEntry],
    process_of: Sequence[int],
    index_bytes: Mapping[int, int],
) -> None:
    """Raise ValueError if it contradicts the file table or the sizes of the indexes."""
    rows = [row for members in parity.groups for row in members]
    if len(set(rows)) < len(rows) or any(not 0 <= row < len(files) for row in rows):
        raise ValueError("a group of parity names a shard file that is not there, or one twice")
    layouts = layouts_of(parity.groups, files, process_of, index_bytes)
    for file in parity.files:
        layout = replace(layouts[file.group], header_bytes=file.header_bytes)
        if file.header_bytes <= 8 or file.size != layout.size:
            raise ValueError(f"{file.name} does not have the size that its group needs")
        if file.process < 0 or len(file.digest) != DIGEST_DIGITS:
            raise ValueError(f"{file.name} has no process or no digest")
