"""Walk the whole chain of digests: `_METADATA`, process indexes, every block of every file."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ostraka import _format
from ostraka._checkpoint import Source, load_at
from ostraka._format import Entry, FileDigests, FileEntry
from ostraka._parallel import StopSignal, run_as_completed
from ostraka._spec import DTYPES
from ostraka.errors import Damaged, Problem, StoreError, count_of
from ostraka.storage import FileReader, PathLike

_THREADS = min((os.cpu_count() or 1) + 1, 16)
"""One more than there are cores: it waits for the disk while the others compare."""
_TASK_BYTES = 32 << 20
"""What a thread takes at a time: parts of a large file are read by several threads."""
_PIECE_BYTES = 2 << 20
"""What is read at a time, whatever a stranger's index says of the length of blocks: larger pieces
have the processor wait for the disk, smaller ones it for the interpreter."""

OnBytes = Callable[[int, int], None]
"""Told of progress: the bytes that have been read so far, and those that there are in all."""


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found."""

    path: str
    leaves: int
    files: int
    bytes_read: int
    seconds: float
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        arrays, files = count_of(self.leaves, "array"), count_of(self.files, "file")
        size = f"{arrays} in {files}, {self.bytes_read:,} bytes"
        state = "intact" if self.ok else count_of(len(self.problems), "problem")
        return f"{self.path}: {state} ({size}, {self.seconds:.2f} s)"


def verify(path: PathLike, *, raises: bool = True, on_bytes: OnBytes | None = None) -> Report:
    """Read all of a checkpoint, compare every byte with its digest, and decode its tree.

    What is intact can be restored. Raises Damaged with every problem, naming files and leaves; with
    `raises=False` the report has them instead. Damage to `_METADATA` itself always raises: nothing
    else can be told without it. `on_bytes` is called now and then with the bytes read so far and
    the bytes that there are.

    `path` may be a directory of steps, for the newest of them, or `runs/7` for step 7 of `runs`;
    the report's `path` tells which it was.

    >>> print(ostraka.verify("runs/7"))
    """
    begin = time.perf_counter()
    while True:
        source = load_at(path)
        bytes_read, problems = _check_all(source, on_bytes)
        # A save to the same path may have replaced the files under our hands.
        if not problems or source.is_still_there():
            break
    if problems and raises:
        raise Damaged(source.location, problems)
    return Report(
        path=source.location,
        leaves=len(source.metadata.leaves),
        files=len(source.metadata.files),
        bytes_read=bytes_read,
        seconds=time.perf_counter() - begin,
        problems=tuple(problems),
    )


def _check_all(source: Source, on_bytes: OnBytes | None) -> tuple[int, list[Problem]]:
    metadata = source.metadata
    contents = _format.entries_by_file(metadata.leaves, metadata.layouts)
    problems = [*_tree_problems(source), *_table_problems(source, set(contents))]
    total = source.metadata_bytes + sum(file.size for file in metadata.files)

    def tasks() -> Iterator[_Task]:
        for file in metadata.files:
            yield from _FileCheck(source, file, contents.get((file.device, file.part), [])).tasks()

    found: dict[int, _Found] = {}
    bytes_read = source.metadata_bytes
    scratch = _Scratch()
    done = run_as_completed(
        lambda task: task(scratch), tasks(), threads=_THREADS, stop=StopSignal()
    )
    for number, result in done:
        found[number] = result
        bytes_read += result[0]
        if on_bytes is not None:
            on_bytes(bytes_read, total)
    in_order = (problem for number in sorted(found) for problem in found[number][1])
    return bytes_read, problems + list(dict.fromkeys(in_order))


class _Scratch(threading.local):
    """Memory for each thread, which it reads into by turns."""

    def __init__(self) -> None:
        # Whole pages: where memory begins elsewhere, reads into it take several times as long.
        self.halves = [memoryview(mmap.mmap(-1, _PIECE_BYTES)) for _ in range(2)]


class _Ended(Exception):
    """A file ended before it should; `at` is where."""

    def __init__(self, at: int):
        super().__init__(at)
        self.at = at


_Found = tuple[int, Sequence[Problem]]
"""Bytes that were read, and what is wrong with them."""
_Task = Callable[[_Scratch], _Found]


def _tree_problems(source: Source) -> Sequence[Problem]:
    """What keeps a restore from making the tree again, though every byte is as it was written."""
    try:
        _ = source.tree
    except Damaged as error:
        return error.problems
    return ()


def _table_problems(source: Source, expected: set[tuple[int, int]]) -> Iterator[Problem]:
    listed = {(file.device, file.part) for file in source.metadata.files}
    for key in sorted(expected ^ listed):
        yield Problem(
            _format.METADATA_NAME,
            f"the file table and the layouts disagree about {_format.shard_name(*key)}",
        )


class _FileCheck:
    """Checks one shard file against its digests and against what `_METADATA` says it holds."""

    def __init__(self, source: Source, file: FileEntry, entries: list[Entry]):
        self._source = source
        self._file = file
        self._entries = entries
        self._name = source.name_of(file)

    def tasks(self) -> Iterator[_Task]:
        """What there is to do for this file, each for any thread."""
        try:
            digests = self._source.digests_of(self._file)
        except Damaged as error:
            problems = error.problems
            yield lambda _: (0, problems)
            return
        offset = first = 0
        start = 0
        for number, length in enumerate(digests.lengths):
            offset += length
            if offset - start >= _TASK_BYTES or number == len(digests.lengths) - 1:
                yield partial(self._check_blocks, digests, start, first, number + 1)
                start, first = offset, number + 1

    def _check_blocks(
        self, digests: FileDigests, start: int, first: int, last: int, scratch: _Scratch
    ) -> _Found:
        """Compare the blocks from `first` to before `last`, which begin at `start`."""
        try:
            reader = self._source.store.open(self._name)
        except FileNotFoundError:
            return 0, [self._problem("it is missing", 0, self._file.size)]
        problems: list[Problem] = []
        at = start
        try:
            if reader.size != self._file.size:
                # The same words from each task of this file: they are told once.
                found = f"it has {reader.size:,} bytes where {self._file.size:,} were written"
                lost = min(reader.size, self._file.size - 1)
                return 0, [self._problem(found, lost, self._file.size)]
            for number in range(first, last):
                stop = at + digests.lengths[number]
                check = self._header_problems if number == 0 else self._block_problems
                try:
                    problems += check(reader, at, stop, digests.digests[number], scratch)
                except StoreError as error:
                    if error.loss is None:
                        raise
                    problems.append(self._problem(error.loss, at, stop))
                at = stop
        except _Ended as ended:
            problems.append(self._problem(f"it ends at byte {ended.at:,}", ended.at, at + 1))
        finally:
            reader.close()
        return at - start, problems

    def _header_problems(
        self, reader: FileReader, start: int, stop: int, digest: str, _: _Scratch
    ) -> list[Problem]:
        header = memoryview(bytearray(stop - start))
        if reader.read_into(start, [header]) != len(header):
            raise _Ended(reader.size)
        if _format.block_digest([header]) != digest:
            return [self._problem("its header is not as it was written", 0, 0)]
        if not self._header_agrees(header):
            return [self._problem(f"its header contradicts {_format.METADATA_NAME}", 0, 0)]
        return []

    def _block_problems(
        self, reader: FileReader, start: int, stop: int, digest: str, scratch: _Scratch
    ) -> list[Problem]:
        def pieces() -> Iterator[memoryview]:
            # By turns, because a digest may take the second piece before it is done with the first.
            for number, at in enumerate(range(start, stop, _PIECE_BYTES)):
                piece = scratch.halves[number % 2][: stop - at]
                count = reader.read_into(at, [piece])
                if count != len(piece):
                    raise _Ended(at + count)
                yield piece

        if _format.block_digest(pieces()) == digest:
            return []
        found = f"bytes {start:,} to {stop:,} are not as they were written"
        return [self._problem(found, start, stop)]

    def _header_agrees(self, header: memoryview) -> bool:
        leaves = self._source.metadata.leaves
        try:
            save_id, tensors = _format.decode_header(header)
            found = {
                name: (tensor["dtype"], tensor["shape"], tensor["data_offsets"])
                for name, tensor in tensors.items()
            }
        except (ValueError, KeyError, TypeError):
            return False
        expected = {
            spec.path: (
                dtype.code,
                _format.tensor_shape(dtype, entry.box, entry.nbytes),
                [entry.offset, entry.offset + entry.nbytes],
            )
            for entry in self._entries
            for spec in [leaves[entry.leaf].spec]
            for dtype in [DTYPES[spec.dtype]]
        }
        return save_id == self._source.metadata.id and found == expected

    def _problem(self, found: str, start: int, stop: int) -> Problem:
        paths = _format.paths_between(
            self._source.metadata.leaves,
            self._entries,
            start - self._file.header_bytes,
            stop - self._file.header_bytes,
        )
        return Problem(self._name, found, paths)
