"""Writes parity files, from views of the written blocks or from files that it reads back.

Parity covers the stored bytes of shard files. If one process has all members of a group in memory,
byte for byte, this sums their blocks during the write. Otherwise it reads them back once all
processes have written, and compares them with their digests. Reading back needs only the store. XLA
collectives would get in the way of the training step that runs beside a save.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import numpy as np

from ostraka.common.threads import StopSignal, run_all
from ostraka.errors import Damaged, StoreError
from ostraka.formats.buffers import Scratch, aligned
from ostraka.formats.ostraka.rebuild import sum_up
from ostraka.formats.ostraka.shards import Shards
from ostraka.layout import parity_code
from ostraka.layout import shard_file as _format
from ostraka.layout.parity_file import (
    Parity,
    ParityFile,
    ParityLayout,
    encode_parity_header,
    layouts_of,
    parity_name,
)
from ostraka.layout.plan_parity import GROUPS_AT_ONCE, plan_parity, planned_digests
from ostraka.layout.plan_write import WritePlan
from ostraka.layout.shard_file import BLOCK_BYTES, FileEntry, encode_index
from ostraka.live.values import HostValue
from ostraka.processes.operation import Operation
from ostraka.saving._write import ShardWriter, WriteJob, WrittenFiles, metadata_of
from ostraka.saving.limit import HostLimit
from ostraka.storage import FileWriter, Store

Array = np.ndarray[Any, Any]

_HELD_BYTES = 1 << 20
"""The largest value to copy, of those that the program may change: parity reads it twice."""


@dataclass(frozen=True, slots=True)
class _Target:
    """The parity files of one group, with their store and layout."""

    store: Store
    save_id: str
    version: int
    group: int
    members: Sequence[FileEntry]
    layout: ParityLayout
    beside: int


class _Writing:
    """Writes one parity file."""

    def __init__(self, target: _Target, number: int, process: int):
        self._target = target
        self._number = number
        self._process = process
        self._digests = [""] * (1 + target.layout.blocks)
        self._writer: FileWriter | None = None
        self._lock = threading.Lock()

    def write(self, block: int, data: Array) -> None:
        """Digest a block of parity and put it in its place."""
        self._digests[1 + block] = _format.block_digest([data])
        layout = self._target.layout
        self._open().write(layout.header_bytes + block * BLOCK_BYTES, [data])

    def finish(self, indexes: Mapping[int, bytes]) -> ParityFile:
        """Write the copies of indexes and the digests. Returns the file's entry in `_METADATA`."""
        target, layout = self._target, self._target.layout
        copies = [indexes[process] for process, _ in layout.indexes]
        digests = [*self._digests, *(_format.block_digest([copy]) for copy in copies)]
        table = "".join(digests).encode()
        writer = self._open()
        writer.write(layout.header_bytes + layout.parity_bytes, [b"".join([*copies, table])])
        writer.finish()
        self._writer = None
        digest = _format.block_digest([table])
        header_bytes, size = layout.header_bytes, layout.size
        return ParityFile(target.group, self._number, self._process, header_bytes, size, digest)

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.abandon()

    def _open(self) -> FileWriter:
        with self._lock:
            if self._writer is None:
                target = self._target
                name = parity_name(target.group, self._number)
                self._writer = target.store.create(
                    f"{_format.shards_directory(target.save_id)}/{name}",
                    target.layout.size,
                    beside=target.beside,
                )
                header = encode_parity_header(
                    (target.group, self._number),
                    target.members,
                    target.layout,
                    target.save_id,
                    version=target.version,
                )
                self._digests[0] = _format.block_digest([header])
                self._writer.write(0, [header])
            return self._writer


class GroupOfViews:
    """Writes the parity files of a group from views: this process has all members in memory."""

    def __init__(
        self, target: _Target, count: int, streams: Sequence[Callable[[], Iterator[Array]]]
    ):
        self._files = [_Writing(target, number, 0) for number in range(count)]
        self._streams = streams
        self._sizes = [member.size for member in target.members]
        self._parity_bytes = target.layout.parity_bytes
        # A writer in order may keep what it was given until it has sent it; others take it at once.
        self._take_memory = (
            [Scratch().take for _ in range(count)]
            if target.store.traits.in_any_order
            else [aligned] * count
        )

    def blocks(self) -> Iterator[tuple[int, list[list[Array]]]]:
        """Each block of parity: its number, and the pieces of each member to sum up."""
        cut = [
            _format.regroup(stream(), [min(BLOCK_BYTES, n - at) for at in range(0, n, BLOCK_BYTES)])
            for stream, n in zip(self._streams, self._sizes, strict=True)
        ]
        return enumerate(map(list, zip_longest(*cut, fillvalue=[])))

    def write(self, number: int, pieces: list[list[Array]]) -> int:
        """Write the sum of a block of all members. Returns 0: no shard file has these bytes."""
        length = min(BLOCK_BYTES, self._parity_bytes - number * BLOCK_BYTES)
        sums = [take(length) for take in self._take_memory]
        parity_code.encode(pieces, sums)
        for file, data in zip(self._files, sums, strict=True):
            file.write(number, data)
        return 0

    def finish(self, index: bytes) -> list[ParityFile]:
        """Write the rest of the files, with a copy of this process's index."""
        return [file.finish({0: index}) for file in self._files]

    def abandon(self) -> None:
        for file in self._files:
            file.abandon()


class ParityCompanion:
    """The parity files of one process, as a companion of its shards."""

    name = "parity"

    def __init__(
        self, count: int, plan: WritePlan, hosts: Sequence[int], limit: HostLimit | None = None
    ):
        self._plan = plan
        self._limit = limit
        self._parity = plan_parity(plan.files, plan.process_of, hosts, count=count)
        self._groups: Sequence[GroupOfViews] = ()
        """The groups to sum up during the write."""

    def take_blocks(self, job: WriteJob, shards: Sequence[ShardWriter]) -> Sequence[GroupOfViews]:
        """The groups to sum up from views of the shards.

        `finish` reads the other groups back: those of several processes, and those with copied,
        compressed or changing values.
        """
        if job.operation.count > 1 or self._plan.codecs:
            return ()
        unfit = set(job.copied)
        for number, value in enumerate(job.values):
            # JAX arrays change only if they share memory with others, and are written to there
            # during the save. Parity can't repair such files then: its results are compared with
            # digests.
            if isinstance(value, HostValue) and value.may_change:
                if value.whole().nbytes <= _HELD_BYTES:
                    value.hold()
                if value.may_change:
                    unfit.add(number)
        planned = {s.name: planned_digests(s.file, s.entries) for s in shards}
        index_bytes = len(encode_index(job.save_id, 0, planned))
        streams = [
            shard.stream if unfit.isdisjoint(map(attrgetter("leaf"), shard.entries)) else None
            for shard in shards
        ]
        groups: list[GroupOfViews] = []
        targets = self._targets(job.store, job.save_id, self._plan.files, {0: index_bytes})
        for target, group in zip(targets, self._parity.groups, strict=True):
            of_group = [stream for row in group.members if (stream := streams[row]) is not None]
            if len(of_group) == len(group.members):
                groups.append(GroupOfViews(target, self._parity.count, of_group))
        self._groups = groups
        return groups

    def finish(
        self, operation: Operation, store: Store, save_id: str, written: WrittenFiles
    ) -> Sequence[ParityFile]:
        """Write the parity files of this process, and return them all.

        This reads the remaining groups back, once all processes have written their shards. Raises
        StoreError if a shard file comes back changed or not at all.
        """
        try:
            done = [file for group in self._groups for file in group.finish(written.index_data)]
        except BaseException:
            for group in self._groups:
                group.abandon()
            raise
        parity = self._parity
        if operation.count == 1 and len(done) == parity.count * len(parity.groups):
            return done
        shards = self._exchange(operation, store, save_id, written)
        index_bytes = {process: entry.size for process, entry in shards.metadata.indexes.items()}
        targets = self._targets(store, save_id, shards.metadata.files, index_bytes)
        finished = {(file.group, file.number) for file in done}
        mine: list[tuple[_Target, list[int]]] = []
        for target, group in zip(targets, parity.groups, strict=True):
            own = [n for n, writer in enumerate(group.writers) if writer == operation.process]
            if numbers := [number for number in own if (target.group, number) not in finished]:
                mine.append((target, numbers))
        at_once = GROUPS_AT_ONCE
        if self._limit is not None:
            members = max((len(target.members) for target, _ in mine), default=0)
            at_once = self._limit.threads(at_once, (members + parity.count) * BLOCK_BYTES)
        try:
            read_back = run_all(
                lambda task: _read_back(operation, shards, *task),
                mine,
                threads=at_once,
                stop=StopSignal(),
            )
        except Damaged as error:
            raise StoreError(
                f"can't read back what was written to {store.location}, to make parity of it "
                f"({error.problems[0]}): all processes must save to one shared file system"
            ) from error
        return [*done, *(file for files in read_back for file in files)]

    def describe(self, rows: Sequence[Sequence[Any]]) -> Parity:
        """The parity of `_METADATA`, from the fields of all parity files."""
        files = sorted((ParityFile(*row) for row in rows), key=attrgetter("group", "number"))
        groups = tuple(group.members for group in self._parity.groups)
        return Parity(self._parity.count, groups, tuple(files))

    def _exchange(
        self, operation: Operation, store: Store, save_id: str, written: WrittenFiles
    ) -> Shards:
        """Wait until all have written, and return all shard files with their real sizes."""
        mine = written.report(self._plan)
        reports = operation.exchange("parity", mine, lambda posted: posted)
        metadata = metadata_of(self._plan, save_id, reports, writer={}, tree=None, user={})
        return Shards(store, metadata)

    def _targets(
        self,
        store: Store,
        save_id: str,
        files: Sequence[FileEntry],
        index_bytes: Mapping[int, int],
    ) -> list[_Target]:
        groups = [group.members for group in self._parity.groups]
        layouts = layouts_of(groups, files, self._plan.process_of, index_bytes)
        beside = max(min(len(files), store.traits.at_once), 1)
        version = self._plan.version
        return [
            _Target(store, save_id, version, group, [files[row] for row in members], layout, beside)
            for group, (members, layout) in enumerate(zip(groups, layouts, strict=True))
        ]


def _read_back(
    operation: Operation, shards: Shards, target: _Target, numbers: Sequence[int]
) -> list[ParityFile]:
    """Write some parity files of one group from its members in the store."""
    files = {number: _Writing(target, number, operation.process) for number in numbers}
    keeps = not target.store.traits.in_any_order
    sums = sum_up(shards, target.members, max(numbers) + 1, operation.check, may_be_kept=keeps)
    try:
        for block, data in enumerate(sums):
            for number, file in files.items():
                file.write(block, data[number])
        indexes = {process: shards.read_index(process) for process, _ in target.layout.indexes}
        return [file.finish(indexes) for file in files.values()]
    except BaseException:
        for file in files.values():
            file.abandon()
        raise
