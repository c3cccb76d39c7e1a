"""Write a shard file anew, as a whole: what is left of it, and what was lost from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ostraka import _format
from ostraka._metadata import Metadata
from ostraka.errors import Problem, StoreError
from ostraka.integrity._lost import LostFile, open_or_say
from ostraka.integrity._origins import Absent, HeaderOrigin, Origin, Shard
from ostraka.integrity._repair_report import MendedFile, Tally
from ostraka.storage import FileReader, FileWriter, Store

_ADVICE = "call repair with the live tree, or with from_= for another copy of this save"


class Unmendable(Exception):
    """A block that no origin has; the text says of each why."""


@dataclass(frozen=True, slots=True)
class MendJob:
    """What all files are mended from and with."""

    store: Store
    metadata: Metadata
    origins: Sequence[Origin]
    process: int
    dry_run: bool
    tally: Tally
    check: Callable[[], None]
    """Raises if the repair is off, on any process."""


def mend(job: MendJob, shard: Shard, lost: LostFile) -> MendedFile | Problem:
    """Replace a file in one event, or say why it can't be. Until then it stays as it is."""
    leaves = leaves_of(job.metadata, shard, lost.blocks)
    opened = open_or_say(job.store, shard.name)
    reader = None if isinstance(opened, str) else opened
    used: dict[str, None] = {}
    try:
        _write(job, shard, lost, reader, used)
    except Unmendable as error:
        found = f"{lost.found}, and can't be mended: {error}"
        return Problem(shard.name, found, leaves)
    finally:
        if reader is not None:
            reader.close()
    origins = tuple(used) or ("what is left of it",)
    return MendedFile(shard.name, lost.found, leaves, origins, shard.entry.size, job.process)


def leaves_of(metadata: Metadata, shard: Shard, blocks: Sequence[int]) -> tuple[str, ...]:
    """The leaves that have bytes in some blocks."""
    found: dict[str, None] = {}
    for number in blocks:
        start, stop = shard.blocks[number][:2]
        for entry in shard.contents:
            if entry.offset < stop and entry.offset + entry.nbytes > max(start, 0):
                found[metadata.leaves[entry.leaf].spec.path] = None
    return tuple(found)


def _write(
    job: MendJob, shard: Shard, lost: LostFile, reader: FileReader | None, used: dict[str, None]
) -> None:
    missing = set(lost.blocks)
    size = shard.entry.size
    writer = None if job.dry_run else job.store.create(shard.name, size, replace=True)
    try:
        for number, block in enumerate(shard.blocks):
            job.check()
            data = None
            if number not in missing and reader is not None:
                data = _read_left(job, reader, shard, number)
            if data is None:
                data, origin = _from_origins(job, shard, number)
                used[origin] = None
            if writer is not None:
                writer.write(block.file_start, [data])
        _finish(job, writer, size)
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise


def _finish(job: MendJob, writer: FileWriter | None, size: int) -> None:
    job.check()
    if writer is not None:
        writer.finish()
        job.tally.add(written=size)


def _read_left(job: MendJob, reader: FileReader, shard: Shard, number: int) -> Any:
    """A block of the file itself; None if it is no longer as it was a moment ago."""
    block = shard.blocks[number]
    data = bytearray(block.file_stop - block.file_start)
    with suppress(StoreError):
        job.tally.add(read=reader.read_into(block.file_start, [data]))
    return data if _format.block_digest([data]) == block.digest else None


def _from_origins(job: MendJob, shard: Shard, number: int) -> tuple[Any, str]:
    """The bytes of a block, which have its digest, and whose they are. Raises Unmendable."""
    block = shard.blocks[number]
    reasons: list[str] = []
    for origin in [HeaderOrigin(job.metadata), *job.origins] if number == 0 else job.origins:
        try:
            data = origin.read(shard, number)
        except Absent as error:
            reasons.append(f"{origin.name}: {error}")
            continue
        if _format.block_digest([data]) == block.digest:
            return data, origin.name
        reasons.append(f"{origin.name}: it has other bytes")
    raise Unmendable("; ".join(reasons) or f"nothing else has its bytes; {_ADVICE}")
