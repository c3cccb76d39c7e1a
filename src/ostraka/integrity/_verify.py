"""Walk the whole chain of digests: `_METADATA`, process indexes, every block of every file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ostraka import _format
from ostraka._checkpoint import Source, load
from ostraka._format import Entry, FileDigests, FileEntry
from ostraka._parallel import StopSignal, run_all
from ostraka._spec import DTYPES
from ostraka.errors import Damaged, Problem, count_of
from ostraka.storage import FileReader, PathLike, open_store

_THREADS = max(2, min(os.cpu_count() or 1, 16))


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
        size = (
            f"{self.leaves:,} arrays in {count_of(self.files, 'file')}, {self.bytes_read:,} bytes"
        )
        state = "intact" if self.ok else count_of(len(self.problems), "problem")
        return f"{self.path}: {state} ({size}, {self.seconds:.2f} s)"


def verify(path: PathLike, *, raises: bool = True) -> Report:
    """Read all of a checkpoint and compare every byte with its digest.

    Raises Damaged with every problem, naming files and leaves; with `raises=False` the report has
    them instead. Damage to `_METADATA` itself always raises: nothing else can be told without it.

    >>> print(ostraka.verify("runs/7"))
    """
    begin = time.perf_counter()
    store = open_store(path)
    while True:
        source = load(store)
        bytes_read, problems = _check_all(source)
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


def _check_all(source: Source) -> tuple[int, list[Problem]]:
    metadata = source.metadata
    contents = _format.entries_by_file(metadata.leaves, metadata.layouts)
    problems = list(_table_problems(source, set(contents)))
    stop = StopSignal()

    def check(file: FileEntry) -> tuple[int, list[Problem]]:
        stop.check()
        return _FileCheck(source, file, contents.get((file.device, file.part), [])).run()

    results = run_all(check, metadata.files, threads=_THREADS, stop=stop)
    problems += dict.fromkeys(problem for _, found in results for problem in found)
    return source.metadata_bytes + sum(count for count, _ in results), problems


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

    def run(self) -> tuple[int, list[Problem]]:
        try:
            digests = self._source.digests_of(self._file)
        except Damaged as error:
            return 0, list(error.problems)
        try:
            reader = self._source.store.open(self._name)
        except FileNotFoundError:
            return 0, [self._problem("it is missing", 0, self._file.size)]
        try:
            if reader.size != self._file.size:
                found = f"it has {reader.size:,} bytes where {self._file.size:,} were written"
                return 0, [
                    self._problem(found, min(reader.size, self._file.size - 1), self._file.size)
                ]
            return self._file.size, list(self._block_problems(reader, digests))
        finally:
            reader.close()

    def _block_problems(self, reader: FileReader, digests: FileDigests) -> Iterator[Problem]:
        scratch = np.empty(max(digests.lengths), np.uint8)
        start = 0
        for number, length in enumerate(digests.lengths):
            block = scratch[:length]
            count = reader.read_into(start, [block])
            stop = start + length
            if count != length:
                yield self._problem(f"it ends at byte {start + count:,}", start + count, stop)
                return
            if _format.block_digest([block]) != digests.digests[number]:
                if number == 0:
                    yield self._problem("its header is not as it was written", 0, 0)
                else:
                    found = f"bytes {start:,} to {stop:,} are not as they were written"
                    yield self._problem(found, start, stop)
            elif number == 0 and not self._header_agrees(block):
                yield self._problem(f"its header contradicts {_format.METADATA_NAME}", 0, 0)
            start = stop

    def _header_agrees(self, header: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
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
