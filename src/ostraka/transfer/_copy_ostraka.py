"""Copy one Ostraka checkpoint atomically: first its files, then `_METADATA`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from ostraka.common.progress import Count
from ostraka.common.threads import StopSignal, batches, run_all
from ostraka.errors import Damaged, PathInTheWay, Problem
from ostraka.formats.buffers import Scratch, aligned
from ostraka.formats.ostraka.damage import (
    PIECE_BYTES,
    damage_on_contradiction,
    damage_on_loss,
    damaged,
    unmatched_blocks,
)
from ostraka.formats.ostraka.shard_reader import ShardFile
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.layout import shard_file as _format
from ostraka.layout.metadata import decode_metadata, metadata_is_intact, shard_contents
from ostraka.layout.shard_file import METADATA_NAME, Block
from ostraka.saving.place import Place, find_misfits
from ostraka.storage import FileWriter, Store, Traits

# Shard files, copied in parallel and compared with their digests on the way.

_TASK_BYTES = 32 << 20
"""Bytes of a file that a thread takes at a time, where several may write a file."""

_PASS_BYTES = 8 << 20
"""Bytes to read and compare at a time."""

_WRITE_BYTES = 2 << 20
"""Bytes to write at a time. 8 MiB at a time took two to four times as long on ext4."""


def _copy_all(
    files: Sequence[ShardFile], there: Set[str], read: Traits, target: Store, progress: Count
) -> None:
    """Copy files. Those in `there` replace files of an earlier copy."""
    traits = target.traits
    # Where a file is written in order, each thread has one of its own, and what waits to be sent.
    threads = max(traits.at_once, read.reads_at_once) if traits.in_any_order else traits.at_once
    # A writer in order may keep what it was given until it has sent it; others take it at once.
    take_memory = Scratch().take if traits.in_any_order else aligned
    beside = min(len(files), threads)
    copies = [
        _FileCopy(file, target, beside, take_memory, progress, file.name in there) for file in files
    ]
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


@dataclass(slots=True)
class _FileCopy:
    """The copy of one file, created for its first bytes and finished after its last ones."""

    file: ShardFile
    target: Store
    beside: int
    take_memory: Callable[[int], Any]
    """Returns the memory for some bytes."""
    progress: Count
    replace: bool
    """True if a file of an earlier copy is in its place.

    It is never deleted first: another copy, which took this one for dead, may have written and
    committed it meanwhile. It has the same bytes.
    """
    tasks_left: int = 0
    writer: FileWriter | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tasks(self) -> Sequence[tuple[_FileCopy, list[Block]]]:
        """Groups of adjacent blocks, each for any thread. One group if the store wants order."""
        traits = self.target.traits
        size = _TASK_BYTES if traits.in_any_order else self.file.entry.size
        groups = groupby(self.file.blocks, lambda block: block.file_start // size)
        tasks = [(self, list(blocks)) for _, blocks in groups]
        self.tasks_left = self.file.reads_left = len(tasks)
        return tasks

    def copy(self, blocks: Sequence[Block], stop: StopSignal) -> None:
        """Copy the stored bytes of adjacent blocks, compared with their digests first.

        A block of more than `_PASS_BYTES` is copied in pieces, and compared after its last one.
        """

        def write(offset: int, data: Any) -> None:
            for start in range(0, len(data), _WRITE_BYTES):
                stop.check()
                part = data[start : start + _WRITE_BYTES]
                self._open().write(offset + start, [part])
                self.progress.add(len(part))

        def pieces(block: Block) -> Iterator[Any]:
            for start in range(block.file_start, block.file_stop, _PASS_BYTES):
                end = min(start + _PASS_BYTES, block.file_stop)
                memory = self.take_memory(end - start)
                self.file.fill(start, end, [memory], [block])
                write(start, memory)
                yield memory

        with self.file.opened():
            for run in batches(blocks, lambda b: b.file_stop - b.file_start, _PASS_BYTES):
                start, nbytes = run[0].file_start, run[-1].file_stop - run[0].file_start
                if nbytes > _PASS_BYTES:
                    self.file.compare(run[0], pieces(run[0]))
                else:
                    write(start, self.file.read_stored(run, self.take_memory(nbytes)))
        with self.lock:
            self.tasks_left -= 1
            is_last = self.tasks_left == 0
        if is_last:
            self._open().finish()

    def close(self) -> None:
        self.file.close()
        if self.writer is not None and self.tasks_left:
            self.writer.abandon()

    def _open(self) -> FileWriter:
        with self.lock:
            if self.writer is None:
                size, name = self.file.entry.size, self.file.name
                self.writer = self.target.create(
                    name, size, beside=self.beside, replace=self.replace
                )
            return self.writer


def _is_whole(target: Store, file: ShardFile, scratch: Scratch, stop: StopSignal) -> bool:
    """Return True if the target has every byte of a file, and make it durable."""
    try:
        reader = target.open(file.name)
    except FileNotFoundError:
        return False
    with closing(reader):
        memory = scratch.take(PIECE_BYTES)
        unmatched = unmatched_blocks(reader, file.blocks, memory, lambda nbytes: stop.check())
        if reader.size != file.entry.size or any(True for _ in unmatched):
            return False
    target.sync(file.name)  # Its writer may have been killed before it was.
    return True


def total_bytes(source: OstrakaSource) -> int:
    """The bytes of all files of a checkpoint."""
    sizes = source.metadata.file_sizes()
    return source.metadata_bytes * (2 if sizes else 1) + sum(sizes.values())


def copy_checkpoint(source: OstrakaSource, target: Store, progress: Count) -> bool:
    """Copy a checkpoint. Returns False if the target has all of it already.

    Complete files of an earlier copy are kept. Raises PathInTheWay if the target has something
    else, Busy if another process writes there, and Damaged for the source, or for the target if its
    committed checkpoint has lost files.
    """
    place = CopyPlace(source, target, may_replace=False)
    if not place.take():
        progress.add(total_bytes(source), kept=True)
        return False
    try:
        copy_shards(source, target, progress, process=0, count=1)
        progress.add(place.commit())
    except Damaged:
        place.discard()
        raise
    finally:
        place.release()
    return True


class CopyPlace:
    """The target of one copy. One process has it, if several copy together.

    With `may_replace`, another checkpoint is replaced atomically, and a copy that has lost files is
    completed. Else both are refused.
    """

    def __init__(self, source: OstrakaSource, target: Store, *, may_replace: bool):
        self._source = source
        self._target = target
        self._may_replace = may_replace
        self._metadata = b""
        self._place = Place(target, "copy")
        self.discard, self.release = self._place.discard, self._place.release
        self._directory = _format.shards_directory(source.metadata.id)

    def take(self) -> bool:
        """Lock and clear the target. Returns False, and does nothing, if the copy is complete."""
        self._metadata = _read_metadata(self._source)
        if self._is_there():
            return False
        try:
            self._place.take()
            if self._is_there():  # Another copy was faster.
                self.release()
                return False
            self._place.make_room(self._directory)  # Files of an earlier copy are used.
            sizes = self._source.metadata.file_sizes()
            for file in self._target.files(f"{self._directory}/"):
                if file.name not in sizes:
                    self._place.delete(file.name)  # Temporary files of a copy that was killed.
        except BaseException:
            self.release()
            raise
        return True

    def commit(self) -> int:
        """Write `_METADATA` after all files. Returns the bytes that it took. Raises Busy."""
        sizes = self._source.metadata.file_sizes()
        copy = f"{self._directory}/{_format.METADATA_COPY}" if sizes else ""
        self._place.commit(self._metadata, sizes, copy)
        self._place.clear()
        return len(self._metadata) * (2 if copy else 1)

    def _is_there(self) -> bool:
        """Return True if the target is the same checkpoint, with all of its files."""
        try:
            found = self._target.get(METADATA_NAME)
        except FileNotFoundError:
            return False
        is_same = found == self._metadata
        lost = find_lost(self._source, self._target) if is_same else []
        if (is_same and not lost) or self._may_replace:
            return is_same and not lost
        if lost:
            raise Damaged(self._target.location, lost)
        raise PathInTheWay(
            f"{self._target.location} has another checkpoint, which a copy does not replace; "
            "remove it, or copy elsewhere"
        )


def copy_shards(
    source: OstrakaSource, target: Store, progress: Count, *, process: int, count: int
) -> None:
    """Copy the share of one of `count` processes: its own files, but not `_METADATA`.

    If another number of processes wrote them, the files are shared out. All are durable then.
    Complete files of an earlier copy are kept. Others are replaced. Raises Damaged for the source.
    """
    metadata, shards = source.metadata, source.shards
    devices = {device for device, of in enumerate(metadata.process_of) if of % count == process}
    with damage_on_contradiction(source.store):
        contents = shard_contents(metadata, devices, shards.allowance())
    files = [ShardFile(shards, *file) for file in contents.values()]
    parity = () if metadata.parity is None else metadata.parity.files
    files += [ShardFile(shards, file, ()) for file in parity if file.process % count == process]
    directory = _format.shards_directory(metadata.id)
    there = {file.name: file.size for file in target.files(f"{directory}/")}
    candidates = [file for file in files if there.get(file.name) == file.entry.size]
    stop, scratch = StopSignal(), Scratch()
    is_whole = run_all(
        lambda file: _is_whole(target, file, scratch, stop),
        candidates,
        threads=target.traits.reads_at_once,
        stop=stop,
    )
    whole = {file.name for file, good in zip(candidates, is_whole, strict=True) if good}
    progress.add(sum(file.entry.size for file in files if file.name in whole), kept=True)
    missing = [file for file in files if file.name not in whole]
    _copy_all(missing, set(there), source.store.traits, target, progress)

    def copy_index(of: int) -> None:
        data = shards.find_index(of)
        target.put(shards.name_of_index(of), data)
        progress.add(len(data))

    # After the files: with them the directory came, whose names a `put` makes durable.
    indexes = [of for of in metadata.indexes if of % count == process]
    run_all(copy_index, indexes, threads=target.traits.at_once, stop=StopSignal())


def _read_metadata(source: OstrakaSource) -> bytes:
    """Read `_METADATA`. Raises Damaged if it has changed since the source was opened."""
    with damage_on_loss(partial(damaged, source.store, METADATA_NAME)):
        data = source.store.get(METADATA_NAME)
    wanted = attrgetter("id", "files", "indexes")
    if not metadata_is_intact(data) or wanted(decode_metadata(data)) != wanted(source.metadata):
        raise damaged(source.store, METADATA_NAME, "it has changed while it was being read")
    return data


def find_lost(source: OstrakaSource, target: Store) -> list[Problem]:
    """Problems for the files that a target lacks, or has with another size."""
    return [
        Problem(name, "it is missing" if found is None else f"it does not have {size:,} bytes")
        for name, size, found in find_misfits(target, source.metadata.file_sizes())
    ]
