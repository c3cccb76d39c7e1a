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
from ostraka._blocks import ShardFile, Shards
from ostraka._checkpoint import open_at
from ostraka._format import Block, Entry, FileEntry
from ostraka._parallel import StopSignal, run_as_completed
from ostraka._spec import DTYPES
from ostraka.errors import Damaged, Problem, UnsupportedFormat, count_of
from ostraka.formats._ostraka import OstrakaSource
from ostraka.storage import PathLike

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
    time_s: float
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        arrays, files = count_of(self.leaves, "array"), count_of(self.files, "file")
        size = f"{arrays} in {files}, {self.bytes_read:,} bytes"
        state = "intact" if self.ok else count_of(len(self.problems), "problem")
        return f"{self.path}: {state} ({size}, {self.time_s:.2f} s)"


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
        source = _open(path)
        bytes_read, problems = _check_all(source, on_bytes)
        # A save to the same path may have replaced the files under our hands.
        if not problems or source.is_current():
            break
    if problems and raises:
        raise Damaged(source.location, problems)
    return Report(
        path=source.location,
        leaves=len(source.metadata.leaves),
        files=len(source.metadata.files),
        bytes_read=bytes_read,
        time_s=time.perf_counter() - begin,
        problems=tuple(problems),
    )


def _open(path: PathLike) -> OstrakaSource:
    source = open_at(path)
    if not isinstance(source, OstrakaSource):
        raise UnsupportedFormat(
            f"can't verify {source.location}: Ostraka did not write it, and it has no digests to "
            "compare with"
        )
    return source


def _check_all(source: OstrakaSource, on_bytes: OnBytes | None) -> tuple[int, list[Problem]]:
    metadata = source.metadata
    contents = _format.entries_by_file(metadata.leaves, metadata.layouts)
    problems = [*_tree_problems(source), *_table_problems(source, set(contents))]
    total = source.metadata_bytes + sum(file.size for file in metadata.files)

    def tasks() -> Iterator[_Task]:
        for file in metadata.files:
            yield from _tasks(source.shards, file, contents.get((file.device, file.part), []))

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


_Found = tuple[int, Sequence[Problem]]
"""Bytes that were read, and what is wrong with them."""
_Task = Callable[[_Scratch], _Found]


def _tree_problems(source: OstrakaSource) -> Sequence[Problem]:
    """What keeps a restore from making the tree again, though every byte is as it was written."""
    try:
        _ = source.tree
    except Damaged as error:
        return error.problems
    return ()


def _table_problems(source: OstrakaSource, expected: set[tuple[int, int]]) -> Iterator[Problem]:
    listed = {(file.device, file.part) for file in source.metadata.files}
    for key in sorted(expected ^ listed):
        yield Problem(
            _format.METADATA_NAME,
            f"the file table and the layouts disagree about {_format.shard_name(*key)}",
        )


def _tasks(shards: Shards, entry: FileEntry, contents: Sequence[Entry]) -> Iterator[_Task]:
    """What there is to do for one file, each for any thread."""
    try:
        file = ShardFile(shards, entry, contents)
    except Damaged as error:
        problems = error.problems
        yield lambda _: (0, problems)
        return
    groups: list[list[Block]] = [[]]
    size = 0
    for block in file.blocks:
        groups[-1].append(block)
        size += block.file_stop - block.file_start
        if size >= _TASK_BYTES:
            groups.append([])
            size = 0
    groups = groups if groups[-1] else groups[:-1] or groups
    file.reads_left = len(groups)
    for number, blocks in enumerate(groups):
        header = partial(_check_header, shards, contents) if number == 0 else None
        yield partial(_check_blocks, file, header, blocks)


def _check_blocks(
    file: ShardFile,
    check_header: Callable[[ShardFile], int] | None,
    blocks: Sequence[Block],
    scratch: _Scratch,
) -> _Found:
    """Compare some blocks of a file, and its header where `check_header` is given."""
    bytes_read = 0
    problems: list[Problem] = []
    try:
        with file.opened():
            if check_header is not None:
                try:
                    bytes_read += check_header(file)
                except Damaged as error:
                    problems += error.problems
            for block in blocks:
                try:
                    file.check(block, scratch.halves)
                except Damaged as error:
                    problems += error.problems
                bytes_read += block.file_stop - block.file_start
    except Damaged as error:  # It can't be opened: each task says so, and it is told once.
        problems += error.problems
    return bytes_read, problems


def _check_header(shards: Shards, contents: Sequence[Entry], file: ShardFile) -> int:
    header = file.read_header()
    if not _header_agrees(shards, contents, header):
        raise file.damaged(f"its header contradicts {_format.METADATA_NAME}")
    return len(header)


def _header_agrees(shards: Shards, contents: Sequence[Entry], header: bytearray) -> bool:
    leaves = shards.metadata.leaves
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
        for entry in contents
        for spec in [leaves[entry.leaf].spec]
        for dtype in [DTYPES[spec.dtype]]
    }
    return save_id == shards.metadata.id and found == expected
