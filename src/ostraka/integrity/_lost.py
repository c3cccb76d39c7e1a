"""Which blocks of shard files are lost: the part of `repair` that looks. No JAX."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ostraka import _format
from ostraka._format import Block
from ostraka._memory import Scratch
from ostraka.errors import StoreError, count_of
from ostraka.integrity._origins import Shard
from ostraka.integrity._repair_report import Tally
from ostraka.storage import FileReader, Store

_PIECE_BYTES = 2 << 20
_NO_FILE = frozenset({errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO})
"""What is said of something that has the name of a file and is none: it is replaced."""


@dataclass(frozen=True, slots=True)
class LostFile:
    """A shard file that is not as it was written."""

    device: int
    part: int
    found: str
    blocks: tuple[int, ...]
    """Their numbers; none if there is only too much of it."""

    def encode(self) -> list[Any]:
        """For another process."""
        return [self.device, self.part, self.found, _format.encode_runs(self.blocks)]

    @staticmethod
    def decode(encoded: Any) -> LostFile:
        device, part, found, blocks = encoded
        return LostFile(device, part, found, _format.decode_runs(blocks))


def find_lost(
    store: Store, shard: Shard, scratch: Scratch, tally: Tally, check: Callable[[], None]
) -> LostFile | None:
    """Compare every block of a file with its digest; None if all is as it was written."""
    entry = shard.entry
    opened = open_or_say(store, shard.name)
    if isinstance(opened, str):
        return LostFile(entry.device, entry.part, opened, tuple(range(len(shard.blocks))))
    with closing(opened) as reader:

        def is_lost(block: Block) -> bool:
            check()
            return _digest(reader, block, scratch, tally) != block.digest

        lost = tuple(number for number, block in enumerate(shard.blocks) if is_lost(block))
        if reader.size != entry.size:
            found = f"it has {reader.size:,} bytes where {entry.size:,} were written"
        elif lost:
            what = count_of(len(lost), "block")
            found = f"{what} of {len(shard.blocks):,} not as written"
        else:
            return None
    return LostFile(entry.device, entry.part, found, lost)


def open_or_say(store: Store, name: str) -> FileReader | str:
    """A file, or why there is none."""
    try:
        return store.open(name)
    except FileNotFoundError:
        return "it is missing"
    except StoreError as error:
        if error.loss is None and error.errno not in _NO_FILE:
            raise
        return error.loss or "it is not a file"


def _digest(reader: FileReader, block: Block, scratch: Scratch, tally: Tally) -> str:
    """Of what is there of a block; empty if the disk can't read it."""

    def pieces() -> Iterator[Any]:
        for at in range(block.file_start, block.file_stop, _PIECE_BYTES):
            piece = scratch.take(min(_PIECE_BYTES, block.file_stop - at))
            count = reader.read_into(at, [piece])
            tally.add(read=count)
            yield piece[:count]

    if block.file_start >= reader.size:
        return ""
    try:
        return _format.block_digest(pieces())
    except StoreError as error:
        if error.loss is None:
            raise
        return ""
