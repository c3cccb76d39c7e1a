"""One checkpoint, checked: every file that it names, in threads."""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from ostraka import _format
from ostraka._blocks import ShardFile
from ostraka._box import Box
from ostraka._damage import check_metadata_copy, damage_on_contradiction, damage_on_loss, other_size
from ostraka._format import Block, Entry, FileDigests, FileEntry
from ostraka._metadata import shard_contents
from ostraka._parallel import StopSignal, run_as_completed
from ostraka._parity_format import ParityFile
from ostraka._shards import lost_in
from ostraka.errors import Damaged, Problem
from ostraka.formats._ostraka import OstrakaSource
from ostraka.integrity._beside import find_foreign
from ostraka.integrity._coverage import (
    MAX_HEADER_BYTES,
    Contradiction,
    boxes_in_header,
    find_gap,
)
from ostraka.integrity._report import UNPROVEN, Note
from ostraka.storage import FileReader

_THREADS = min((os.cpu_count() or 1) + 1, 16)
"""One more than there are cores: it waits for the disk while the others compare."""
_TASK_BYTES = 32 << 20
"""What a thread takes at a time: parts of a large file are read by several threads."""
_PIECE_BYTES = 2 << 20
"""What is read at a time, whatever a stranger's index says of the length of blocks: larger pieces
have the processor wait for the disk, smaller ones it for the interpreter."""
_LISTED_NAME = re.compile(r"[a-z0-9_]+[a-z0-9_.-]*")
"""What a file that only an index names may be called: nothing that leads elsewhere."""


@dataclass(slots=True)
class _Found:
    """What a task has found."""

    bytes_read: int = 0
    problems: list[Problem] = field(default_factory=list[Problem])
    entries: Sequence[Entry] = ()
    """What should be in the file, if the task was to look at its header."""
    boxes: dict[int, Box] = field(default_factory=dict[int, Box])
    """What is, by leaf."""


_Task = Callable[[memoryview], _Found]


class Check:
    """What is found in one checkpoint."""

    def __init__(self, source: OstrakaSource, on_bytes: Callable[[int, int], None] | None):
        self.source = source
        self.bytes_read = source.metadata_bytes
        self.problems: list[Problem] = []
        self.notes: list[Note] = []
        self.unchecked: list[str] = []
        self.proven = 0
        self._on_bytes = on_bytes
        self._total = self.bytes_read + sum(file.nbytes for file in source.files())
        self._own = {_format.METADATA_NAME}
        """The names of the checkpoint's own files."""
        self._boxes: dict[int, list[Box]] = {}
        """The boxes of each leaf that is known to be in the files."""
        self._unknown: set[int] = set()
        """Leaves that lie in files whose header could not be compared."""

    def run(self, *, read: bool) -> None:
        """Check all; `read` says whether shard files are read, or only looked at."""
        with self._collected():
            _ = self.source.tree  # What can't be decoded can't be restored.
        with self._collected(), damage_on_contradiction(self.source.store):
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

    @contextmanager
    def _collected(self) -> Generator[None]:
        with _collected(self.problems):
            yield

    # Reading

    def _read_all(self, contents: Sequence[tuple[FileEntry, list[Entry]]]) -> None:
        scratch = _Scratch()
        found: dict[int, _Found] = {}
        for number, result in run_as_completed(
            lambda task: task(scratch.memory),
            self._tasks(contents),
            threads=max(_THREADS, self.source.store.parts.reads_at_once),
            stop=StopSignal(),
        ):
            found[number] = result
            self.bytes_read += result.bytes_read
            if self._on_bytes is not None:
                self._on_bytes(self.bytes_read, self._total)
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
        for file in parity_of(self.source):
            with self._collected():
                yield from _tasks(ShardFile(self.source.shards, file, ()), self.source, [])
        known = {entry.name for entry, _ in contents}
        for process in self.source.metadata.indexes:
            with self._collected():
                # Whoever reads files takes a copy of a lost index from parity.
                self.source.shards.read_index(process)
            yield from self._tasks_for_listed(process, known)

    def _set_aside(self, error: Damaged, file: FileEntry, entries: list[Entry]) -> None:
        """Of a file whose index is damaged at least see that it is there, and how long."""
        self.problems += error.problems
        self.unchecked.append(self.source.shards.name_of(file))
        self._unknown.update(entry.leaf for entry in entries)
        self._total -= file.size
        self.problems += _look_at(self.source, file, entries)

    def _tasks_for_listed(self, process: int, known: set[str]) -> Iterator[_Task]:
        """Files that the index of a process has, and the file table has not, such as parity."""
        shards = self.source.shards
        with _collected([]):  # A damaged index was told of with its files.
            for name, digests in shards.listed_by(process).items():
                if name in known or not _LISTED_NAME.fullmatch(name):
                    continue
                path = f"{_format.shards_directory(self.source.metadata.id)}/{name}"
                self._own.add(path)
                self._total += digests.size
                yield _listed_task(self.source, process, path, digests)

    # What was read, together

    def _check_coverage(self) -> None:
        """Every element of every leaf is in the files once."""
        for number, leaf in enumerate(self.source.metadata.leaves):
            if number in self._unknown:
                continue
            gap = find_gap(leaf.spec.shape, self._boxes.get(number, []))
            if gap is not None:
                found = f"the files do not hold {leaf.spec.path!r} once as a whole: {gap}"
                self.problems.append(Problem(_format.METADATA_NAME, found, (leaf.spec.path,)))

    def _check_copy(self) -> None:
        """The second copy of `_METADATA`: what else is in it is damage, what is lost a note."""
        source = self.source
        if not source.metadata.files:
            return
        name = source.shards.path_of(_format.METADATA_COPY)
        self._own.add(name)
        with self._collected():
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
        for file in parity_of(self.source):
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
        self.memory = memoryview(mmap.mmap(-1, _PIECE_BYTES))


@contextmanager
def _collected(problems: list[Problem]) -> Generator[None]:
    try:
        yield
    except Damaged as error:
        problems += error.problems


def _tasks(file: ShardFile, source: OstrakaSource, entries: list[Entry]) -> list[_Task]:
    """Blocks of a file that lie together, each group for any thread."""
    groups = groupby(file.blocks, lambda block: block.file_start // _TASK_BYTES)
    parts = [list(blocks) for _, blocks in groups]
    file.reads_left = len(parts)

    def task(blocks: list[Block]) -> _Task:
        return lambda scratch: _check_blocks(file, blocks, source, entries, scratch)

    return [task(blocks) for blocks in parts]


def _check_blocks(
    file: ShardFile,
    blocks: list[Block],
    source: OstrakaSource,
    entries: list[Entry],
    scratch: memoryview,
) -> _Found:
    """Compare some blocks of a file, and its header with what should be in it."""
    found = _Found(entries=entries if blocks[0].file_start == 0 else ())
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
        problem = lost_in(source.shards, file.entry, (), str(error), 0, 0, (0, len(header)))
        if error.leaf is not None:
            named = [e for e in entries if source.metadata.leaves[e.leaf].spec.path == error.leaf]
            start, stop = named[0].offset, named[0].offset + named[0].nbytes
            span = (0, len(header))
            problem = lost_in(source.shards, file.entry, named, str(error), start, stop, span)
        raise Damaged(source.location, [problem]) from error


def parity_of(source: OstrakaSource) -> Sequence[ParityFile]:
    return () if source.metadata.parity is None else source.metadata.parity.files


def _problem(
    source: OstrakaSource, file: FileEntry | ParityFile, entries: Sequence[Entry], found: str
) -> Problem:
    """What is wrong with all of a file."""
    end = entries[-1].offset + entries[-1].nbytes if entries else 0
    return lost_in(source.shards, file, entries, found, 0, end)


def _look_at(
    source: OstrakaSource, file: FileEntry | ParityFile, entries: Sequence[Entry]
) -> list[Problem]:
    """Whether a file is there, and has its size."""
    problems: list[Problem] = []

    def damaged(found: str) -> Damaged:
        return Damaged(source.location, [_problem(source, file, entries, found)])

    with _collected(problems), damage_on_loss(damaged):
        info = source.store.look(source.shards.name_of(file))
        if info is None:
            raise damaged("it is missing")
        if info.size != file.size:
            raise damaged(other_size(info.size, file.size))
    return problems


def _listed_task(source: OstrakaSource, process: int, name: str, digests: FileDigests) -> _Task:
    """Compare a file that holds no leaf with the digests that an index has of it."""

    def damaged(found: str, span: tuple[int, int] | None = None) -> Damaged:
        host = source.shards.host_of(process)
        problem = Problem(name, found, span=span, process=process, host=host)
        return Damaged(source.location, [problem])

    def check(scratch: memoryview) -> _Found:
        found = _Found(digests.size)
        with (
            _collected(found.problems),
            damage_on_loss(damaged),
            closing(source.store.open(name)) as reader,
        ):
            if reader.size != digests.size:
                raise damaged(other_size(reader.size, digests.size))
            for block in digests.blocks():
                span = (block.file_start, block.file_stop)
                if _format.block_digest(_pieces(reader, *span, scratch)) != block.digest:
                    what = f"bytes {span[0]:,} to {span[1]:,} are not as they were written"
                    found.problems += damaged(what, span).problems
        return found

    return check


def _pieces(reader: FileReader, start: int, stop: int, scratch: memoryview) -> Iterator[memoryview]:
    for at in range(start, stop, len(scratch)):
        piece = scratch[: stop - at]
        reader.read_into(at, [piece])
        yield piece
