"""Walk the whole chain of digests: `_METADATA`, process indexes, every block of every file."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from ostraka._blocks import ShardFile, damage_on_contradiction
from ostraka._checkpoint import open_at
from ostraka._format import Block
from ostraka._metadata import shard_contents
from ostraka._parallel import StopSignal, run_as_completed
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
        source = open_at(path)
        if not isinstance(source, OstrakaSource):
            raise UnsupportedFormat(
                f"can't verify {source.location}: Ostraka did not write it, and it has no digests "
                "to compare with"
            )
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


def _check_all(source: OstrakaSource, on_bytes: OnBytes | None) -> tuple[int, list[Problem]]:
    """Returns how many bytes were read, and what is wrong with them, in the order of the files."""
    bytes_read = source.metadata_bytes
    total = bytes_read + sum(file.size for file in source.metadata.files)
    problems: list[Problem] = []
    found: dict[int, list[Problem]] = {}

    def tasks() -> Iterator[_Task]:
        with _collected(problems):
            _ = source.tree  # What can't be decoded can't be restored.
        with _collected(problems), damage_on_contradiction(source.store):
            contents_of = shard_contents(source.metadata, None, source.shards.allowance())
            for entry, contents in contents_of.values():
                with _collected(problems):
                    yield from _tasks(ShardFile(source.shards, entry, contents))

    scratch = _Scratch()
    for number, (nbytes, here) in run_as_completed(
        lambda task: _check(*task, scratch.memory),
        tasks(),
        threads=max(_THREADS, source.store.parts.reads_at_once),
        stop=StopSignal(),
    ):
        found[number] = here
        bytes_read += nbytes
        if on_bytes is not None:
            on_bytes(bytes_read, total)
    for number in sorted(found):
        problems += found[number]
    return bytes_read, list(dict.fromkeys(problems))


class _Scratch(threading.local):
    """Memory for each thread."""

    def __init__(self) -> None:
        # Whole pages: where memory begins elsewhere, reads into it take several times as long.
        self.memory = memoryview(mmap.mmap(-1, _PIECE_BYTES))


_Task = tuple[ShardFile, list[Block]]


@contextmanager
def _collected(problems: list[Problem]) -> Generator[None]:
    try:
        yield
    except Damaged as error:
        problems += error.problems


def _tasks(file: ShardFile) -> list[_Task]:
    """Blocks of a file that lie together, each group for any thread."""
    groups = groupby(file.blocks, lambda block: block.file_start // _TASK_BYTES)
    tasks = [(file, list(blocks)) for _, blocks in groups]
    file.reads_left = len(tasks)
    return tasks


def _check(file: ShardFile, blocks: list[Block], scratch: memoryview) -> tuple[int, list[Problem]]:
    """Compare some blocks of a file; returns how many bytes that took, and what is wrong."""
    bytes_read = 0
    problems: list[Problem] = []
    # If it can't be opened, each task says so, and it is told once.
    with _collected(problems), file.opened():
        for block in blocks:
            with _collected(problems):
                file.check(block, scratch)
            bytes_read += block.file_stop - block.file_start
    return bytes_read, problems
