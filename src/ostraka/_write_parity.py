"""Parity files: summed up from views of what is written, or from files that are read back.

Parity is over shard files as they are stored. Where one process has all members of a group in
memory, and they lie there as they do in the files, their blocks are summed up while they are being
written. Else they are read back once all processes have written, and compared with their digests:
that needs nothing but the store, while collectives of XLA would get into the way of the training
step beside which a save runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from ostraka import _format, _parity
from ostraka._columns import sum_up
from ostraka._coordinate import Operation
from ostraka._format import BLOCK_BYTES, FileEntry, decode_runs, encode_runs
from ostraka._memory import Scratch, aligned
from ostraka._metadata import IndexEntry, Metadata
from ostraka._parallel import StopSignal, run_all
from ostraka._parity_format import (
    ParityFile,
    ParityLayout,
    encode_parity_header,
    layouts_of,
    parity_name,
)
from ostraka._plan_parity import ParityPlan
from ostraka._plan_write import WritePlan
from ostraka._shards import Shards
from ostraka.errors import Damaged, StoreError
from ostraka.storage import FileWriter, Store

Array = np.ndarray[Any, Any]

_GROUPS_AT_ONCE = 3
"""Each holds a block of all its members, and of its sums, in memory."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What the parity files of one group are."""

    store: Store
    save_id: str
    version: int
    group: int
    members: Sequence[FileEntry]
    layout: ParityLayout
    beside: int


class _Writing:
    """One parity file that is being written."""

    def __init__(self, target: _Target, number: int, process: int):
        self._target = target
        self._number = number
        self._process = process
        layout = target.layout
        self._digests = [""] * (1 + layout.blocks)
        self._writer: FileWriter | None = None
        self._lock = threading.Lock()

    def write(self, block: int, data: Array) -> None:
        """Digest a block of parity and put it in its place."""
        self._digests[1 + block] = _format.block_digest([data])
        layout = self._target.layout
        self._open().write(layout.header_bytes + block * BLOCK_BYTES, [data])

    def finish(self, indexes: Mapping[int, bytes]) -> ParityFile:
        """Write what comes after the parity; returns what `_METADATA` says of the file."""
        target, layout = self._target, self._target.layout
        copies = [indexes[process] for process, _ in layout.indexes]
        digests = [*self._digests, *(_format.block_digest([copy]) for copy in copies)]
        table = "".join(digests).encode()
        writer = self._open()
        end = b"".join([*copies, table])
        writer.write(layout.header_bytes + layout.parity_bytes, [end])
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
    """The parity files of a group, all members of which are in this process's memory."""

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
            if target.store.parts.in_any_order
            else [aligned] * count
        )

    def blocks(self) -> Iterator[tuple[int, list[list[Array]]]]:
        """Each block of parity: its number, and the pieces of each member that it sums up."""
        cut = [
            _format.regroup(stream(), _lengths(size))
            for stream, size in zip(self._streams, self._sizes, strict=True)
        ]
        return enumerate(map(list, zip_longest(*cut, fillvalue=[])))

    def write(self, number: int, members: list[list[Array]]) -> int:
        """Sum a block up and write it; returns 0, as nothing of a shard has been written."""
        length = min(BLOCK_BYTES, self._parity_bytes - number * BLOCK_BYTES)
        sums = [take(length) for take in self._take_memory]
        _parity.encode(members, sums)
        for file, data in zip(self._files, sums, strict=True):
            file.write(number, data)
        return 0

    def finish(self, index: bytes) -> list[ParityFile]:
        """Write the rest of the files, with a copy of this process's index."""
        return [file.finish({0: index}) for file in self._files]

    def abandon(self) -> None:
        for file in self._files:
            file.abandon()


def _lengths(size: int) -> Iterator[int]:
    for start in range(0, size, BLOCK_BYTES):
        yield min(BLOCK_BYTES, size - start)


def groups_of_views(
    store: Store,
    save_id: str,
    plan: WritePlan,
    parity: ParityPlan,
    index_bytes: Mapping[int, int],
    streams: Sequence[Callable[[], Iterator[Array]] | None],
) -> list[GroupOfViews]:
    """The groups all of whose members can be streamed; `streams` are in the order of the files."""
    targets = _targets(store, save_id, plan, parity, plan.files, index_bytes)
    found: list[GroupOfViews] = []
    for target, group in zip(targets, parity.groups, strict=True):
        of_group = [stream for row in group.members if (stream := streams[row]) is not None]
        if len(of_group) == len(group.members):
            found.append(GroupOfViews(target, parity.count, of_group))
    return found


def write_parity(
    operation: Operation,
    store: Store,
    save_id: str,
    plan: WritePlan,
    parity: ParityPlan,
    index: IndexEntry | None,
    sizes: Sequence[int],
    done: Sequence[ParityFile],
) -> tuple[ParityFile, ...]:
    """Write the parity files of this process that are not `done`, once all have written theirs.

    `index` and `sizes` are those of this process's own shard files. Returns all parity files that
    it has written. Raises StoreError if what was written can't be read back as it was.
    """
    if operation.count == 1 and len(done) == parity.count * len(parity.groups):
        return tuple(done)
    shards = _exchange(operation, store, save_id, plan, index, sizes)
    index_bytes = {process: entry.size for process, entry in shards.metadata.indexes.items()}
    targets = _targets(store, save_id, plan, parity, shards.metadata.files, index_bytes)
    finished = {(file.group, file.number) for file in done}
    mine: list[tuple[_Target, list[int]]] = []
    for target, group in zip(targets, parity.groups, strict=True):
        numbers = [
            number
            for number, writer in enumerate(group.writers)
            if writer == operation.process and (target.group, number) not in finished
        ]
        if numbers:
            mine.append((target, numbers))
    try:
        written = run_all(
            lambda task: _read_back(operation, shards, *task),
            mine,
            threads=_GROUPS_AT_ONCE,
            stop=StopSignal(),
        )
    except Damaged as error:
        raise StoreError(
            f"can't read back what was written to {store.location}, to make parity of it "
            f"({error.problems[0]}): all processes must save to one shared file system"
        ) from error
    return (*done, *(file for files in written for file in files))


def _exchange(
    operation: Operation,
    store: Store,
    save_id: str,
    plan: WritePlan,
    index: IndexEntry | None,
    sizes: Sequence[int],
) -> Shards:
    """Wait until all have written; the shard files of all, with their real sizes."""

    def decide(posted: list[Any]) -> dict[str, Any]:
        indexes = [[p, *of["index"]] for p, of in enumerate(posted) if of["index"]]
        return {"indexes": indexes, "sizes": [of["sizes"] for of in posted]}

    mine = {
        "index": None if index is None else [index.size, index.digest],
        "sizes": encode_runs(sizes) if plan.compressed else [],
    }
    answer = operation.exchange("parity", mine, decide)
    files = with_sizes(plan, answer["sizes"]) if plan.compressed else plan.files
    metadata = Metadata(
        id=save_id,
        writer={},
        process_of=plan.process_of,
        tree=None,
        meshes=plan.meshes,
        layouts=plan.layouts,
        leaves=plan.leaves,
        files=files,
        indexes={process: IndexEntry(*entry) for process, *entry in answer["indexes"]},
        user={},
        version=plan.version,
    )
    return Shards(store, metadata)


def with_sizes(plan: WritePlan, sizes_by_process: Sequence[Any]) -> tuple[FileEntry, ...]:
    """The files, with what was stored where that is known only when they are written."""
    sizes = [iter(decode_runs(sizes)) for sizes in sizes_by_process]
    return tuple(
        replace(file, size=next(sizes[plan.process_of[file.device]])) for file in plan.files
    )


def _read_back(
    operation: Operation, shards: Shards, target: _Target, numbers: Sequence[int]
) -> list[ParityFile]:
    """Write some parity files of one group from what was written of its members."""
    files = {number: _Writing(target, number, operation.process) for number in numbers}
    keeps = not target.store.parts.in_any_order
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


def _targets(
    store: Store,
    save_id: str,
    plan: WritePlan,
    parity: ParityPlan,
    files: Sequence[FileEntry],
    index_bytes: Mapping[int, int],
) -> list[_Target]:
    groups = [group.members for group in parity.groups]
    layouts = layouts_of(groups, files, plan.process_of, index_bytes)
    beside = max(min(len(files), store.parts.at_once), 1)
    return [
        _Target(
            store, save_id, plan.version, number, [files[row] for row in members], layout, beside
        )
        for number, (members, layout) in enumerate(zip(groups, layouts, strict=True))
    ]
