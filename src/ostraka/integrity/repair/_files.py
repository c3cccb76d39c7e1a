"""Find the blocks that files have lost, and write such files anew. No JAX."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from ostraka.errors import Damaged, Problem, StoreError, count_of
from ostraka.formats.buffers import Scratch
from ostraka.formats.ostraka.compare import PIECE_BYTES, matches, unmatched_blocks
from ostraka.formats.ostraka.damage import loss_of, other_size
from ostraka.formats.ostraka.shard_reader import ShardFile
from ostraka.formats.ostraka.shards import Shards
from ostraka.integrity._report import MendedFile, RepairResult
from ostraka.integrity.repair._origins import Absent, Origin, RepairJob, SavedShard
from ostraka.layout.parity_file import ParityFile
from ostraka.layout.runs import decode_runs, encode_runs
from ostraka.layout.shard_file import METADATA_NAME, Block
from ostraka.storage import FileReader, Store

_NO_FILE = frozenset({errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO})
"""Errors for something that has the name of a file and is none. A repair replaces it."""
_ADVICE = (
    "pass another copy of this save (from_=, on the command line --from), or call "
    "ostraka.repair(path, tree) in the program that has the model"
)


@dataclass(frozen=True, slots=True)
class LostFile:
    """A shard file with damage."""

    device: int
    part: int
    found: str
    blocks: tuple[int, ...]
    """The numbers of lost blocks. Empty if the file is only too long."""

    def encode(self) -> list[Any]:
        """Return it as JSON, to send it to another process."""
        return [self.device, self.part, self.found, encode_runs(self.blocks)]

    @staticmethod
    def decode(encoded: Any) -> LostFile:
        device, part, found, blocks = encoded
        return LostFile(device, part, found, decode_runs(blocks))


def find_lost(job: RepairJob, shard: SavedShard, scratch: Scratch) -> LostFile | None:
    """Compare every block of a file with its digest. Returns None if all of them match."""
    entry = shard.entry
    opened = open_or_say(job.store, shard.name)
    if isinstance(opened, str):
        return LostFile(entry.device, entry.part, opened, tuple(range(len(shard.blocks))))

    def on_read(nbytes: int) -> None:
        job.operation.check()
        job.bytes_read.add(nbytes)

    with closing(opened) as reader:
        memory = scratch.take(PIECE_BYTES)
        lost = tuple(n for n, _ in unmatched_blocks(reader, shard.blocks, memory, on_read))
        if reader.size != entry.size:
            found = other_size(reader.size, entry.size)
        elif lost:
            found = f"{count_of(len(lost), 'block')} of {len(shard.blocks):,} not as written"
        else:
            return None
    return LostFile(entry.device, entry.part, found, lost)


def open_or_say(store: Store, name: str) -> FileReader | str:
    """Open a file, or return the reason why it can't be opened."""
    try:
        return store.open(name)
    except OSError as error:
        if (loss := loss_of(error)) is None and error.errno not in _NO_FILE:
            raise
        return loss or "it is not a file"


def mend(
    job: RepairJob, origins: Sequence[Origin], shard: SavedShard, lost: LostFile
) -> RepairResult:
    """Replace a file atomically, or say why that is impossible. Until then it stays unchanged."""
    leaves, size = shard.leaves(lost.blocks), shard.entry.size
    used: dict[str, None] = {}
    missing = set(lost.blocks)
    opened = open_or_say(job.store, shard.name)
    left = nullcontext() if isinstance(opened, str) else closing(opened)
    try:
        with left as reader, job.replacing(shard.name, size) as writer:
            for number, block in enumerate(shard.blocks):
                job.operation.check()
                data = None
                if number not in missing and reader is not None:
                    data = _read_again(job, reader, block)
                if data is None:
                    data, origin = _read_from_origins(origins, shard, number)
                    used[origin] = None
                if writer is not None:
                    writer.write(block.file_start, [data])
    except Absent as error:
        return Problem(shard.name, f"{lost.found}, and can't be mended: {error}", leaves)
    by = tuple(used) or ("what is left of it",)
    return MendedFile(shard.name, lost.found, leaves, by, size, job.process)


def _read_again(job: RepairJob, reader: FileReader, block: Block) -> Any:
    """A block of the file itself, or None if it does not match any more."""
    data = bytearray(block.file_stop - block.file_start)
    with suppress(StoreError):
        job.bytes_read.add(reader.read_into(block.file_start, [data]))
    return data if matches(block, [data]) else None


def _read_from_origins(
    origins: Sequence[Origin], shard: SavedShard, number: int
) -> tuple[Any, str]:
    """The bytes of a block, compared with its digest, and the name of their origin.

    Raises Absent with the reason of each origin that could not give them.
    """
    block = shard.blocks[number]
    if number == 0 and matches(block, [data := shard.header()]):
        return data, METADATA_NAME
    reasons: list[str] = []
    for origin in origins:
        try:
            data = origin.read(shard, number)
        except Absent as error:
            reasons.append(f"{origin.name}: {error}")
            continue
        if matches(block, [data]):
            return data, origin.name
        reasons.append(f"{origin.name}: it has other bytes")
    raise Absent("; ".join(reasons) or f"nothing else has its bytes; {_ADVICE}")


# Parity files


def find_lost_parity(job: RepairJob, shards: Shards, file: ParityFile, *, is_summed: bool) -> str:
    """Compare a parity file. Returns its damage in words, or the empty string.

    If `is_summed`, its parity was used and proved just now, and is not read again.
    """
    assert shards.parities is not None
    known = range(1, 1 + shards.parities.layout_of(file).blocks) if is_summed else ()
    memory = memoryview(bytearray(PIECE_BYTES))
    try:
        parity = ShardFile(shards, file, ())
        parity.reads_left = 1
        with closing(parity), parity.opened():
            for number, block in enumerate(parity.blocks):
                if number not in known:
                    parity.check(block, memory)
                    job.bytes_read.add(block.file_stop - block.file_start)
    except Damaged as error:
        return error.problems[0].found
    return ""


def mend_parity(job: RepairJob, shards: Shards, file: ParityFile, found: str) -> RepairResult:
    """Make a parity file again from its group, which is complete, and replace it atomically."""
    assert shards.parities is not None
    name, at = shards.name_of(file), 0
    try:
        with job.replacing(name, file.size) as writer:
            assert writer is not None
            for piece in shards.parities.rebuild_parity(file):
                job.operation.check()
                writer.write(at, [piece])
                at += len(piece)
    except Damaged as error:
        why = "; ".join(map(str, error.problems))
        return Problem(name, f"{found}, and can't be mended: {why}")
    job.bytes_read.add(sum(member.size for member in shards.parities.members_of(file.group)))
    return MendedFile(name, found, (), ("its group",), file.size, job.process)
