"""Shard files, copied in parallel and compared with their digests on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

from ostraka import _format
from ostraka._blocks import PIECE_BYTES, ShardFile
from ostraka._damage import damage_on_contradiction
from ostraka._format import Block
from ostraka._memory import Scratch, aligned
from ostraka._metadata import shard_contents
from ostraka._parallel import StopSignal, run_all
from ostraka._parity_format import ParityFile
from ostraka.formats._ostraka import OstrakaSource
from ostraka.storage import FileReader, FileWriter, Parts, Store

_TASK_BYTES = 32 << 20
"""What a thread takes at a time, where several may write a file."""

_WRITE_BYTES = 2 << 20
"""What is written at a time: 8 MiB at a time took two to four times as long on ext4."""


class Tally:
    """How many bytes were copied, and how many were there already; any thread may add to it.

    `on_done` is told the sum, by one thread at a time.
    """

    def __init__(self, on_done: Callable[[int], None]):
        self.copied = 0
        self.skipped = 0
        self._on_done = on_done
        self._lock = threading.Lock()

    def add(self, *, copied: int = 0, skipped: int = 0) -> None:
        with self._lock:
            self.copied += copied
            self.skipped += skipped
            self._on_done(self.copied + self.skipped)


def copy_files(
    source: OstrakaSource,
    target: Store,
    devices: Collection[int],
    parity: Sequence[ParityFile],
    tally: Tally,
) -> None:
    """Have all shard files of some devices of `source`, and some parity files, in `target`.

    Each is durable. Files that an earlier copy left, and that are whole, stay as they are; others
    are replaced. Raises Damaged, about the source alone.
    """
    with damage_on_contradiction(source.store):
        contents = shard_contents(source.metadata, devices, source.shards.allowance())
    directory = _format.shards_directory(source.metadata.id)
    there = {file.name: file.size for file in target.files(f"{directory}/")}
    files = [ShardFile(source.shards, *file) for file in contents.values()]
    files += [ShardFile(source.shards, file, ()) for file in parity]
    candidates = [file for file in files if there.get(file.name) == file.entry.size]
    stop, scratch = StopSignal(), Scratch()
    is_whole = run_all(
        lambda file: _is_whole(target, file, scratch, stop),
        candidates,
        threads=target.parts.reads_at_once,
        stop=stop,
    )
    whole = {file.name for file, good in zip(candidates, is_whole, strict=True) if good}
    tally.add(skipped=sum(file.entry.size for file in files if file.name in whole))
    missing = [file for file in files if file.name not in whole]
    for file in missing:
        if file.name in there:
            target.delete(file.name)
    _copy_all(missing, source.store.parts, target, tally)


def _copy_all(files: Sequence[ShardFile], read: Parts, target: Store, tally: Tally) -> None:
    parts = target.parts
    # Where a file is written in order, each thread has one of its own, and what waits to be sent.
    threads = max(parts.at_once, read.reads_at_once) if parts.in_any_order else parts.at_once
    # A writer in order may keep what it was given until it has sent it; others take it at once.
    take_memory = Scratch().take if parts.in_any_order else aligned
    copies = [_Copy(file, target, min(len(files), threads), take_memory, tally) for file in files]
    stop = StopSignal()
    try:
        run_all(
            lambda task: task[0].copy(task[1], stop),
            (task for copy in copies for task in copy.tasks()),
            threads=threads,
            stop=stop,
        )
    finally:
        for copy in copies:
            copy.close()


class _Copy:
    """A file that is being copied: made for its first bytes, finished after its last ones."""

    def __init__(
        self,
        file: ShardFile,
        target: Store,
        beside: int,
        take_memory: Callable[[int], Any],
        tally: Tally,
    ):
        self._file = file
        self._target = target
        self._beside = beside
        self._take_memory = take_memory
        self._tally = tally
        self._tasks_left = 0
        self._writer: FileWriter | None = None
        self._lock = threading.Lock()

    def tasks(self) -> Sequence[tuple[_Copy, list[Block]]]:
        """Adjacent blocks, each group for any thread; all of them, if the store wants order."""
        parts = self._target.parts
        size = max(_TASK_BYTES, parts.size_bytes) if parts.in_any_order else self._file.entry.size
        groups = groupby(self._file.blocks, lambda block: block.file_start // size)
        tasks = [(self, list(blocks)) for _, blocks in groups]
        self._tasks_left = self._file.reads_left = len(tasks)
        return tasks

    def copy(self, blocks: Sequence[Block], stop: StopSignal) -> None:
        def write(offset: int, data: Any) -> None:
            for start in range(0, len(data), _WRITE_BYTES):
                stop.check()
                part = data[start : start + _WRITE_BYTES]
                self._open().write(offset + start, [part])
                self._tally.add(copied=len(part))

        with self._file.opened():
            self._file.pass_on(blocks, self._take_memory, write)
        with self._lock:
            self._tasks_left -= 1
            is_last = self._tasks_left == 0
        if is_last:
            self._open().finish()

    def close(self) -> None:
        self._file.close()
        if self._writer is not None and self._tasks_left:
            self._writer.abandon()

    def _open(self) -> FileWriter:
        with self._lock:
            if self._writer is None:
                size = self._file.entry.size
                self._writer = self._target.create(self._file.name, size, beside=self._beside)
            return self._writer


def _is_whole(target: Store, file: ShardFile, scratch: Scratch, stop: StopSignal) -> bool:
    """Whether the target has every byte of a file, durable from now on."""
    try:
        reader = target.open(file.name)
    except FileNotFoundError:
        return False
    try:
        if reader.size != file.entry.size or any(
            _format.block_digest(_pieces(reader, block, scratch, stop)) != block.digest
            for block in file.blocks
        ):
            return False
    finally:
        reader.close()
    target.sync(file.name)  # Its writer may have been killed before it was.
    return True


def _pieces(reader: FileReader, block: Block, scratch: Scratch, stop: StopSignal) -> Iterator[Any]:
    for at in range(block.file_start, block.file_stop, PIECE_BYTES):
        stop.check()
        piece = scratch.take(min(PIECE_BYTES, block.file_stop - at))
        yield piece[: reader.read_into(at, [piece])]
