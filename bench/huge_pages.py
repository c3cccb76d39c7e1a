"""Restores with and without huge pages, beside bare reads: `python -m bench.huge_pages`.

Prints the median and the worst of ten interleaved rounds for each size. With `--fragmented` it
first leaves the kernel few free huge pages.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

import ostraka
from bench.data import Size
from bench.machine import free_memory
from bench.state import make_tree, template
from ostraka.common import huge_pages

HUGE_BYTES = huge_pages.HUGE_BYTES
PIECE_BYTES = 16 << 20
SIZES = {1: Size(64, 2048, 2048), 4: Size(64, 8192, 2048)}


def read_bare(path: Path, huge: bool) -> list[mmap.mmap]:
    """Read all files into fresh memory, with as many threads as cores."""
    files = [file for file in path.rglob("*") if file.is_file()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda file: _read_file(file, huge), files))


def _read_file(file: Path, huge: bool) -> mmap.mmap:
    size = file.stat().st_size
    memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    view = np.frombuffer(memory, np.uint8)
    start = -view.ctypes.data % HUGE_BYTES
    with file.open("rb", buffering=0) as source:
        for at in range(0, size, PIECE_BYTES):
            source.readinto(view[start + at : start + min(at + PIECE_BYTES, size)].data)
    return memory


@contextmanager
def no_huge_pages() -> Generator[None]:
    """Have Ostraka see no free huge pages, as before it asked for any."""
    look = huge_pages.free_bytes
    huge_pages.free_bytes = lambda: 0
    try:
        time.sleep(0.1)  # until the last look does not count any more
        yield
    finally:
        huge_pages.free_bytes = look
        time.sleep(0.1)


@contextmanager
def fragmented(keep_bytes: int) -> Generator[None]:
    """Hold one small page of each huge one, for all but `keep_bytes` of the free huge pages."""
    count = max(huge_pages.free_bytes() - keep_bytes, 0) // HUGE_BYTES
    memory = mmap.mmap(-1, (count + 1) * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(memory, np.uint8)
    start = -view.ctypes.data % HUGE_BYTES
    view[start : start + count * HUGE_BYTES : mmap.PAGESIZE] = 1
    for page in range(start, start + count * HUGE_BYTES, HUGE_BYTES):
        memory.madvise(mmap.MADV_DONTNEED, page + mmap.PAGESIZE, HUGE_BYTES - mmap.PAGESIZE)
    del view
    try:
        yield
    finally:
        memory.close()


def measure(path: Path, size: Size, rounds: int) -> dict[str, list[float]]:
    """The seconds of each round, by reader."""
    tree = make_tree(size)
    ostraka.save(path, tree)
    like = template(tree)
    del tree

    def restore() -> object:
        return jax.block_until_ready(ostraka.restore(path, like=like))

    def restore_before() -> object:
        with no_huge_pages():
            return timed(restore)

    seconds: dict[str, list[float]] = {}

    def timed(work: Callable[[], object]) -> float:
        free_memory()
        start = time.perf_counter()
        result = work()
        took_s = time.perf_counter() - start
        del result
        return took_s

    for number in range(rounds + 1):
        turns = {
            "bare reads": timed(lambda: read_bare(path, False)),
            "bare reads, huge pages asked for": timed(lambda: read_bare(path, True)),
            "restore, none asked for": restore_before(),
            "restore": timed(restore),
        }
        if number:  # The first one does not count.
            for name, took_s in turns.items():
                seconds.setdefault(name, []).append(took_s)
    return seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--gib", type=int, action="append", choices=SIZES)
    parser.add_argument("--fragmented", action="store_true")
    parser.add_argument("--scratch", type=Path, default=Path("bench/scratch"))
    arguments = parser.parse_args()
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=arguments.scratch.resolve()))
    print("| state | work | median | worst |\n| --- | --- | ---: | ---: |")
    try:
        for gib in arguments.gib or SIZES:
            with fragmented(64 << 20) if arguments.fragmented else nullcontext():
                free_mib = huge_pages.free_bytes() >> 20
                found = measure(scratch / str(gib), SIZES[gib], arguments.rounds)
            shutil.rmtree(scratch / str(gib))
            for name, seconds in found.items():
                middle, worst = statistics.median(seconds), max(seconds)
                print(f"| {gib} GiB | {name} | {middle:.3f} s | {worst:.3f} s |", flush=True)
            print(f"{gib} GiB: {free_mib:,} MiB in free huge pages before", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
