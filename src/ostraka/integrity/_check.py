"""Check every file of one checkpoint, in threads."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from ostraka.common.progress import Count, OnBytes
from ostraka.common.threads import StopSignal, run_as_completed
from ostraka.errors import Damaged, Problem
from ostraka.formats.ostraka.damage import (
    MISSING,
    PIECE_BYTES,
    check_metadata_copy,
    damage_on_contradiction,
    damage_on_loss,
    other_size,
    unmatched_blocks,
)
from ostraka.formats.ostraka.shard_reader import ShardFile
from ostraka.formats.ostraka.shards import lost_in
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.integrity._coverage import (
    MAX_HEADER_BYTES,
    Contradiction,
    boxes_in_header,
    find_gap,
)
from ostraka.integrity._report import UNPROVEN, Note, find_foreign
from ostraka.layout import shard_file as _format
from ostraka.layout.box import Box
from ostraka.layout.metadata import shard_contents
from ostraka.layout.parity_file import ParityFile
from ostraka.layout.shard_file import Block, Entry, FileDigests, FileEntry

_THREADS = min((os.cpu_count() or 1) + 1, 16)
"""One more than there are cores, which waits for the disk while the others compare."""
_TASK_BYTES = 32 << 20
"""Bytes of a file that a thread takes at a time. Several threads read a large file."""
_LISTED_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*")
"""Names that an index may have for other files. They can't lead out of the directory."""


@dataclass(slots=True)
class _TaskResult:
    """The findings of one task."""

    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list[Problem])
    entries: Sequence[Entry] = ()
    """The expected boxes of the file, if the task was to compare its header."""
    boxes: dict[int, Box] = field(default_factory=dict[int, Box])
    """The boxes in its header, by leaf."""


_Task = Callable[[memoryview], _TaskResult]


class Check:
    """The check of one checkpoint, and its findings."""

    def __init__(self, source: OstrakaSource, on_bytes: OnBytes | None):
        self.source = source
        self.problems: list[Problem] = []
        self.notes: list[Note] = []
        self.unchecked: list[str] = []
        self.proven = 0
        nbytes = sum(file.nbytes for file in source.files())
        self.bytes_read = Count(source.metadata_bytes + nbytes, on_bytes)
        self.bytes_read.done = source.metadata_bytes
        parity = source.metadata.parity
        self._parity = () if parity is None else parity.files
        self._own = {_format.METADATA_NAME}
        """Names of the checkpoint's own files."""
        self._boxes: dict[int, list[Box]] = {}
        """The boxes of each leaf that were found in headers."""
        self._unknown: set[int] = set()
        """Leaves in files whose header could not be compared."""

    def run(self, *, read: bool) -> None:
        """Check all files. Without `read`, only look at the sizes of shard files."""
        with _collected(self.problems):
            _ = self.source.tree  # What can't be decoded can't be restored.
        with _collected(self.problems), damage_on_contradiction(self.source.store):
            shards = self.source.shards
            contents = shard_contents(shards.metadata, None, shards.allowance())
            if read:
                self._read_all(list(contents.values()))
                self._check_coverage()
            else:
                self._look_at_all(list(contents.values()))
        self._check_copy()
        self.problems = list(dict.fromkeys(self.problems))
        own = self._own | {file.name for file in self.source.files()}
        own |= {self.source.shards.name_of_index(p) for p in self.source.metadata.indexes}
        self.notes += find_foreign(self.source.store, self.source.metadata.id, own)

    # Reading

    def _read_all(self, contents: Sequence[tuple[FileEntry, list[Entry]]]) -> None:
        scratch = _Scratch()
        found: dict[int, _TaskResult] = {}
        for number, result in run_as_completed(
            lambda task: task(scratch.memory),
            self._tasks(contents),
            threads=max(_THREADS, self.source.store.traits.reads_at_once),
            stop=StopSignal(),
        ):
            found[number] = result
            self.bytes_read.add(result.bytes_read)
        for number in sorted(found):
            result = found[number]
            self.problems += result.problems
            for entry in result.entries:
                if entry.leaf in result.boxes:
                    self._boxes.setdefault(entry.leaf, []).append(result.boxes[entry.leaf])
                else:
                    self._unknown.add(entry.leaf)

    def _tasks(self, contents: Sequence[tuple[FileEntry, list[Entry]]]) -> Iterator[_Task]:
        for entry, entries in contents:
            try:
                file = ShardFile(self.source.shards, entry, entries)
            except Damaged as error:
                self._set_aside(error, entry, entries)
            else:
                yield from _tasks(file, self.source, entries)
        for file in self._parity:
            with _collected(self.problems):
                yield from _tasks(ShardFile(self.source.shards, file, ()), self.source, [])
        known = {entry.name for entry, _ in contents}
        for process in self.source.metadata.indexes:
            with _collected(self.problems):
                # Whoever reads files takes a copy of a lost index from parity.
                self.source.shards.read_index(process)
            yield from self._tasks_for_listed(process, known)

    def _set_aside(self, error: Damaged, file: FileEntry, entries: list[Entry]) -> None:
        """Check that a file with a damaged index exists and has its size."""
        self.problems += error.problems
        self.unchecked.append(self.source.shards.name_of(file))
        self._unknown.update(entry.leaf for entry in entries)
        self.bytes_read.total -= file.size
        self.problems += _look_at(self.source, file, entries)

    def _tasks_for_listed(self, process: int, known: set[str]) -> Iterator[_Task]:
        """Tasks for the files that an index has beyond the file table, such as parity files."""
        shards = self.source.shards
        with _collected([]):  # A damaged index was told of with its files.
            for name, digests in shards.listed_by(process).items():
                if name in known or not _LISTED_NAME.fullmatch(name):
                    continue
                path = f"{_format.shards_directory(self.source.metadata.id)}/{name}"
                self._own.add(path)
                self.bytes_read.total += digests.size
                yield _listed_task(self.source, process, path, digests)

    # What was read, together

    def _check_coverage(self) -> None:
        """Find leaves without all of their elements, or with some of them twice, in the files."""
        for number, leaf in enumerate(self.source.metadata.leaves):
            if number in self._unknown:
                continue
            gap = find_gap(leaf.spec.shape, self._boxes.get(number, []))
            if gap is not None:
                found = f"the files do not hold {leaf.spec.path!r} once as a whole: {gap}"
                self.problems.append(Problem(_format.METADATA_NAME, found, (leaf.spec.path,)))

    def _check_copy(self) -> None:
        """Compare the copy of `_METADATA`. Other bytes are damage, missing bytes are a note."""
        source = self.source
        if not source.metadata.files:
            return
        name = source.shards.path_of(_format.METADATA_COPY)
        self._own.add(name)
        with _collected(self.problems):
            check_metadata_copy(source.store, source.metadata)
            there = source.store.look(name)
            if there is not None and there.size != source.metadata_bytes:
                found = f"this copy of {_format.METADATA_NAME} is not complete"
                self.notes.append(Note(name, f"{found}; only a repair would need it"))

    # Without reading

    def _look_at_all(self, contents: Sequence[tuple[FileEntry, list[Entry]]]) -> None:
        directory = _format.shards_directory(self.source.metadata.id)
        there = {info.name: info for info in self.source.store.files(f"{directory}/")}
        place = _format.digest(self.source.location.encode())
        for file in self._parity:
            self.problems += _look_at(self.source, file, ())
        for entry, entries in contents:
            name = self.source.shards.name_of(entry)
            try:
                file = ShardFile(self.source.shards, entry, entries)
            except Damaged as error:
                self._set_aside(error, entry, entries)
                continue
            if problems := _look_at(self.source, entry, entries):
                self.problems += problems
                continue
            digests = file.digests
            if not digests.identity or digests.place != place:
                self.notes.append(Note(name, UNPROVEN))
            elif there[name].identity == digests.identity:
                self.proven += 1
            else:
                found = f"it was written again since it was saved; {UNPROVEN}"
                self.problems.append(_problem(self.source, entry, entries, found))


class _Scratch(threading.local):
    """Memory for each thread."""

    def __init__(self) -> None:
        # Whole pages: where memory begins elsewhere, reads into it take several times as long.
        self.memory = memoryview(mmap.mmap(-1, PIECE_BYTES))


@contextmanager
def _collected(problems: list[Problem]) -> Generator[None]:
    try:
        yield
    except Damaged as error:
        problems += error.problems


def _tasks(file: ShardFile, source: OstrakaSource, entries: list[Entry]) -> list[_Task]:
    """Tasks for groups of adjacent blocks, each for any thread."""
    groups = groupby(file.blocks, lambda block: block.file_start // _TASK_BYTES)
    parts = [list(blocks) for _, blocks in groups]
    file.reads_left = len(parts)
    return [partial(_check_blocks, file, blocks, source, entries) for blocks in parts]


def _check_blocks(
    file: ShardFile,
    blocks: list[Block],
    source: OstrakaSource,
    entries: list[Entry],
    scratch: memoryview,
) -> _TaskResult:
    """Compare some blocks of a file, and its header with the expected boxes."""
    found = _TaskResult(entries=entries if blocks[0].file_start == 0 else ())
    # If it can't be opened, each task says so, and it is told once.
    with _collected(found.problems), file.opened():
        for block in blocks:
            with _collected(found.problems):
                length = block.file_stop - block.file_start
                if entries and block.file_start == 0 and length <= MAX_HEADER_BYTES:
                    header = memoryview(bytearray(length))
                    file.check(block, header)
                    found.boxes = _compare_header(file, header, source, entries)
                else:
                    file.check(block, scratch)
            found.bytes_read += block.file_stop - block.file_start
    return found


def _compare_header(
    file: ShardFile, header: memoryview, source: OstrakaSource, entries: list[Entry]
) -> dict[int, Box]:
    try:
        return boxes_in_header(header, source.metadata.leaves, entries, file.blocks)
    except Contradiction as error:
        named = [e for e in entries if source.metadata.leaves[e.leaf].spec.path == error.leaf]
        start, stop = (named[0].offset, named[0].offset + named[0].nbytes) if named else (0, 0)
        span = (0, len(header))
        problem = lost_in(source.shards, file.entry, named, str(error), start, stop, span)
        raise Damaged(source.location, [problem]) from error


def _problem(
    source: OstrakaSource, file: FileEntry | ParityFile, entries: Sequence[Entry], found: str
) -> Problem:
    """A problem with all bytes of a file."""
    end = entries[-1].offset + entries[-1].nbytes if entries else 0
    return lost_in(source.shards, file, entries, found, 0, end)


def _look_at(
    source: OstrakaSource, file: FileEntry | ParityFile, entries: Sequence[Entry]
) -> list[Problem]:
    """The problem of a file that is missing or has another size, if it has one."""
    problems: list[Problem] = []

    def damaged(found: str) -> Damaged:
        return Damaged(source.location, [_problem(source, file, entries, found)])

    with _collected(problems), damage_on_loss(damaged):
        info = source.store.look(source.shards.name_of(file))
        if info is None:
            raise damaged(MISSING)
        if info.size != file.size:
            raise damaged(other_size(info.size, file.size))
    return problems


def _listed_task(source: OstrakaSource, process: int, name: str, digests: FileDigests) -> _Task:
    """A task that compares a file without leaves with its digests in an index."""

    def damaged(found: str, span: tuple[int, int] | None = None) -> Damaged:
        host = source.shards.host_of(process)
        problem = Problem(name, found, span=span, process=process, host=host)
        return Damaged(source.location, [problem])

    def check(scratch: memoryview) -> _TaskResult:
        found = _TaskResult(digests.size)
        with (
            _collected(found.problems),
            damage_on_loss(damaged),
            closing(source.store.open(name)) as reader,
        ):
            if reader.size != digests.size:
                raise damaged(other_size(reader.size, digests.size))
            blocks = digests.blocks()
            for number, what in unmatched_blocks(reader, blocks, scratch):
                span = (blocks[number].file_start, blocks[number].file_stop)
                found.problems += damaged(what, span).problems
        return found

    return check
