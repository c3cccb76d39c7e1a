"""`ostraka.verify`: compare `_METADATA`, process indexes and every block with their digests."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

from ostraka.common.progress import Count, OnBytes, shown
from ostraka.common.threads import StopSignal, run_as_completed
from ostraka.errors import (
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    Problem,
    UnsupportedFormat,
)
from ostraka.formats.ostraka.damage import (
    MISSING,
    PIECE_BYTES,
    check_metadata_copy,
    damage_on_contradiction,
    damage_on_loss,
    loss_of,
    other_size,
    unmatched_blocks,
)
from ostraka.formats.ostraka.shard_reader import ShardFile
from ostraka.formats.ostraka.shards import lost_in
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.unknown import is_committed
from ostraka.integrity._coverage import (
    MAX_HEADER_BYTES,
    Contradiction,
    boxes_in_header,
    find_gap,
)
from ostraka.integrity._report import UNPROVEN, Note, VerifyReport, find_foreign
from ostraka.layout import shard_file as _format
from ostraka.layout.box import Box
from ostraka.layout.file_names import steps_among
from ostraka.layout.metadata import shard_contents
from ostraka.layout.parity_file import ParityFile
from ostraka.layout.shard_file import Block, Entry, FileDigests, FileEntry
from ostraka.reading.locate import open_at
from ostraka.storage import PathLike, open_store
from ostraka.tree.nodes import has_values


def verify(
    path: PathLike,
    *,
    raises: bool = True,
    read: bool = True,
    all_steps: bool = False,
    progress: bool = False,
    on_bytes: OnBytes | None = None,
) -> VerifyReport:
    """Read a checkpoint, compare every byte with its digest, and decode its tree.

    A verified checkpoint can be restored. Headers are compared with `_METADATA`, too, and every
    element of every leaf must be in the files exactly once. If `_METADATA` itself is damaged,
    nothing else can be checked, and the report counts no leaves and no files.

    Safetensors files have no digests. For them, `verify` checks that all files exist, that none is
    truncated, and that headers, index and sizes agree.

    Args:
        path: A checkpoint, a run directory for its newest step, or `runs/7` for step 7 of `runs`.
            The report's `path` is the location of the checkpoint.
        raises: Raise an error for damage. With False, only the report has it.
        read: Read shard files. With False, they must exist and have their sizes. A bucket also
            tells if they are the objects that the save uploaded. This detects lost, truncated and
            overwritten files, but no bit rot.
        all_steps: Verify all steps of the run directory at `path`. The report's `steps` has a
            report for each, and the file names in `problems` begin with the name of the step.
        progress: Show how far it has come: a bar on a terminal or in a notebook, else a line in the
            log every 30 s.
        on_bytes: Called now and then with the bytes read so far and the bytes in all.

    Returns:
        A report with all problems and notes.

    Raises:
        Damaged: Something is damaged. It names files, the processes that wrote them, leaves and
            their boxes.
        CheckpointNotFound: Nothing is at the path.
        UnsupportedFormat: Ostraka did not write it, and it has no digests.

    Example:
        >>> print(ostraka.verify("runs/7"))
        >>> print(ostraka.verify("runs", all_steps=True, raises=False))
    """
    with shown(f"verify {path}", progress, on_bytes) as tell:
        report = (_verify_steps if all_steps else _verify_one)(path, read, tell)
    if report.problems and raises:
        raise Damaged(report.path, report.problems)
    return report


def _verify_one(path: PathLike, read: bool, on_bytes: OnBytes | None) -> VerifyReport:
    begin = time.perf_counter()
    while True:
        try:
            source = open_at(path)
        except Damaged as error:
            return VerifyReport(error.path, 0, 0, 0, time.perf_counter() - begin, error.problems)
        if isinstance(source, SafetensorsSource):  # Opening it has checked all that can be checked.
            return VerifyReport(
                path=source.location,
                leaves=len(source.saved.leaves),
                files=len(source.files()),
                bytes_read=source.header_bytes,
                duration_s=time.perf_counter() - begin,
                problems=(),
                has_digests=False,
            )
        if not isinstance(source, OstrakaSource):
            raise UnsupportedFormat(
                f"can't verify {source.location}: Ostraka did not write it, and it has no digests "
                "to compare with"
            )
        if source.shards.parities is not None:
            source.shards.parities.has_warned = True  # What is damaged comes into the report.
        check = Check(source, on_bytes)
        check.run(read=read)
        # A save to the same path may have replaced the files under our hands.
        if not check.problems or source.is_current():
            break
    return VerifyReport(
        path=source.location,
        leaves=len(source.metadata.leaves),
        files=len(source.files()),
        bytes_read=check.bytes_read.done,
        duration_s=time.perf_counter() - begin,
        problems=tuple(check.problems),
        notes=tuple(check.notes),
        unchecked=tuple(check.unchecked),
        proven=check.proven,
        is_empty=not (check.problems or source.metadata.leaves or has_values(source.tree)),
    )


def _verify_steps(path: PathLike, read: bool, on_bytes: OnBytes | None) -> VerifyReport:
    begin = time.perf_counter()
    root = open_store(path)
    steps: list[VerifyReport] = []
    problems: list[Problem] = []
    committed = (
        name
        for names in steps_among(root.list()).values()
        for name in [n for n in names if is_committed(root.at(n))][:1]
    )
    for name in committed:
        try:
            report = _verify_one(root.at(name), read, on_bytes)
        except NotACheckpoint:
            continue
        steps.append(report)
        problems += [replace(found, file=f"{name}/{found.file}") for found in report.problems]
    if not steps:
        raise CheckpointNotFound(f"there are no steps in {root.location} to verify")
    return VerifyReport(
        path=root.location,
        leaves=sum(step.leaves for step in steps),
        files=sum(step.files for step in steps),
        bytes_read=sum(step.bytes_read for step in steps),
        duration_s=time.perf_counter() - begin,
        problems=tuple(problems),
        proven=sum(step.proven for step in steps),
        steps=tuple(steps),
    )


# Check every file of one checkpoint, in threads.

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
    boxes: dict[int, Box | None] = field(default_factory=dict[int, Box | None])
    """By leaf, the box in the header, if the task was to compare that. None if it is unknown."""


_Task = Callable[[memoryview], _TaskResult]
_AnyFile = FileEntry | ParityFile
_Contents = Sequence[tuple[FileEntry, list[Entry]]]
"""Shard files and their boxes."""


class Check:
    """The check of one checkpoint, and its findings."""

    def __init__(self, source: OstrakaSource, on_bytes: OnBytes | None):
        self.problems: list[Problem] = []
        self.notes: list[Note] = []
        self.unchecked: list[str] = []
        self.proven = 0
        nbytes = sum(file.nbytes for file in source.files())
        self.bytes_read = Count(source.metadata_bytes + nbytes, on_bytes)
        self.bytes_read.done = source.metadata_bytes
        self._source = source
        self._shards = source.shards
        self._metadata = source.metadata
        parity = source.metadata.parity
        self._parity = () if parity is None else parity.files
        self._own = {_format.METADATA_NAME}
        """Names of the checkpoint's own files."""
        self._boxes: dict[int, list[Box | None]] = defaultdict(list)
        """The boxes of each leaf that were found in headers. None for headers not compared."""

    def run(self, *, read: bool) -> None:
        """Check all files. Without `read`, only look at the sizes of shard files."""
        source, shards = self._source, self._shards
        with _collected(self.problems):
            _ = source.tree  # What can't be decoded can't be restored.
        with _collected(self.problems), damage_on_contradiction(source.store):
            contents = list(shard_contents(self._metadata, None, shards.allowance()).values())
            if read:
                self._read_all(contents)
                self._check_coverage()
            else:
                self._look_at_all(contents)
        self._check_copy()
        self.problems = list(dict.fromkeys(self.problems))
        own = self._own | {file.name for file in source.files()}
        own |= {shards.name_of_index(process) for process in self._metadata.indexes}
        self.notes += find_foreign(source.store, self._metadata.id, own)

    # Reading

    def _read_all(self, contents: _Contents) -> None:
        scratch = _Scratch()
        found: dict[int, _TaskResult] = {}
        for number, result in run_as_completed(
            lambda task: task(scratch.memory),
            self._tasks(contents),
            threads=max(_THREADS, self._source.store.traits.reads_at_once),
            stop=StopSignal(),
        ):
            found[number] = result
            self.bytes_read.add(result.bytes_read)
        for _, result in sorted(found.items()):
            self.problems += result.problems
            for leaf, box in result.boxes.items():
                self._boxes[leaf].append(box)

    def _tasks(self, contents: _Contents) -> Iterator[_Task]:
        for entry, entries in contents:
            try:
                file = ShardFile(self._shards, entry, entries)
            except Damaged as error:
                self._set_aside(error, entry, entries)
            else:
                yield from self._tasks_for(file, entries)
        for file in self._parity:
            with _collected(self.problems):
                yield from self._tasks_for(ShardFile(self._shards, file, ()), [])
        known = {entry.name for entry, _ in contents}
        for process in self._metadata.indexes:
            with _collected(self.problems):
                # Whoever reads files takes a copy of a lost index from parity.
                self._shards.read_index(process)
            with _collected([]):  # A damaged index was told of with its files.
                # The files that it has beyond the file table, such as parity files.
                for name, digests in self._shards.listed_by(process).items():
                    if name not in known and _LISTED_NAME.fullmatch(name):
                        path = self._shards.path_of(name)
                        self._own.add(path)
                        self.bytes_read.total += digests.size
                        yield partial(self._check_listed, process, path, digests)

    def _tasks_for(self, file: ShardFile, entries: list[Entry]) -> list[_Task]:
        """Tasks for groups of adjacent blocks, each for any thread."""
        groups = groupby(file.blocks, lambda block: block.file_start // _TASK_BYTES)
        parts = [list(blocks) for _, blocks in groups]
        file.reads_left = len(parts)
        return [partial(self._check_blocks, file, entries, blocks) for blocks in parts]

    def _check_blocks(
        self, file: ShardFile, entries: list[Entry], blocks: list[Block], scratch: memoryview
    ) -> _TaskResult:
        """Compare some blocks of a file, and its header with the expected boxes."""
        found = _TaskResult()
        if blocks[0].file_start == 0:
            found.boxes = dict.fromkeys(entry.leaf for entry in entries)
        # If it can't be opened, each task says so, and it is told once.
        with _collected(found.problems), file.opened():
            for block in blocks:
                length = block.file_stop - block.file_start
                with _collected(found.problems):
                    if entries and block.file_start == 0 and length <= MAX_HEADER_BYTES:
                        header = memoryview(bytearray(length))
                        file.check(block, header)
                        found.boxes |= self._compare_header(file, header, entries)
                    else:
                        file.check(block, scratch)
                found.bytes_read += length
        return found

    def _compare_header(
        self, file: ShardFile, header: memoryview, entries: list[Entry]
    ) -> dict[int, Box]:
        leaves = self._metadata.leaves
        try:
            return boxes_in_header(header, leaves, entries, file.blocks)
        except Contradiction as error:
            named = [e for e in entries if leaves[e.leaf].spec.path == error.leaf]
            start, stop = (named[0].offset, named[0].offset + named[0].nbytes) if named else (0, 0)
            raise file.damaged(str(error), start, stop, (0, len(header))) from error

    def _check_listed(
        self, process: int, name: str, digests: FileDigests, scratch: memoryview
    ) -> _TaskResult:
        """Compare a file without leaves with its digests in an index."""
        found = _TaskResult(digests.size)

        def damaged(what: str, span: tuple[int, int] | None = None) -> Damaged:
            host = self._shards.host_of(process)
            problem = Problem(name, what, span=span, process=process, host=host)
            return Damaged(self._source.location, [problem])

        with (
            _collected(found.problems),
            damage_on_loss(damaged),
            closing(self._source.store.open(name)) as reader,
        ):
            if reader.size != digests.size:
                raise damaged(other_size(reader.size, digests.size))
            blocks = digests.blocks()
            for number, what in unmatched_blocks(reader, blocks, scratch):
                span = (blocks[number].file_start, blocks[number].file_stop)
                found.problems += damaged(what, span).problems
        return found

    def _set_aside(self, error: Damaged, file: FileEntry, entries: list[Entry]) -> None:
        """Check that a file with a damaged index exists and has its size."""
        self.problems += error.problems
        self.unchecked.append(self._shards.name_of(file))
        for entry in entries:
            self._boxes[entry.leaf].append(None)
        self.bytes_read.total -= file.size
        self._look_at(file, entries)

    # What was read, together

    def _check_coverage(self) -> None:
        """Find leaves without all of their elements, or with some of them twice, in the files."""
        for number, leaf in enumerate(self._metadata.leaves):
            boxes = self._boxes[number]
            known = [box for box in boxes if box is not None]
            gap = find_gap(leaf.spec.shape, known) if len(known) == len(boxes) else None
            if gap is not None:
                found = f"the files do not hold {leaf.spec.path!r} once as a whole: {gap}"
                self.problems.append(Problem(_format.METADATA_NAME, found, (leaf.spec.path,)))

    def _check_copy(self) -> None:
        """Compare the copy of `_METADATA`. Other bytes are damage, missing bytes are a note."""
        if not self._metadata.files:
            return
        store, name = self._source.store, self._shards.path_of(_format.METADATA_COPY)
        self._own.add(name)
        with _collected(self.problems):
            check_metadata_copy(store, self._metadata)
            there = store.look(name)
            if there is not None and there.size != self._source.metadata_bytes:
                found = f"this copy of {_format.METADATA_NAME} is not complete"
                self.notes.append(Note(name, f"{found}; only a repair would need it"))

    # Without reading

    def _look_at_all(self, contents: _Contents) -> None:
        there = {info.name: info for info in self._source.store.files(self._shards.path_of(""))}
        place = _format.digest(self._source.location.encode())
        for file in self._parity:
            self._look_at(file, ())
        for entry, entries in contents:
            try:
                digests = ShardFile(self._shards, entry, entries).digests
            except Damaged as error:
                self._set_aside(error, entry, entries)
                continue
            name = self._shards.name_of(entry)
            if not self._look_at(entry, entries):
                continue
            if not digests.identity or digests.place != place:
                self.notes.append(Note(name, UNPROVEN))
            elif there[name].identity == digests.identity:
                self.proven += 1
            else:
                found = f"it was written again since it was saved; {UNPROVEN}"
                self._add_problem(entry, entries, found)

    def _look_at(self, file: _AnyFile, entries: Sequence[Entry]) -> bool:
        """Return True if a file exists and has its size. Else add a problem."""
        try:
            info = self._source.store.look(self._shards.name_of(file))
        except OSError as error:
            if (found := loss_of(error)) is None:
                raise
        else:
            if info is not None and info.size == file.size:
                return True
            found = MISSING if info is None else other_size(info.size, file.size)
        self._add_problem(file, entries, found)
        return False

    def _add_problem(self, file: _AnyFile, entries: Sequence[Entry], found: str) -> None:
        """Add a problem with all bytes of a file."""
        end = entries[-1].offset + entries[-1].nbytes if entries else 0
        self.problems.append(lost_in(self._shards, file, entries, found, 0, end))


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
