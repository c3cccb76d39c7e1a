"""What it costs to look at a checkpoint: `ostraka.verify` beside plain reads, `ostraka show`."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

import ostraka
from bench.data import few_large
from bench.machine import drop_caches, remove
from bench.rounds import Options, Row, interleave, timed
from bench.state import make_tree

PIECE_BYTES = 1 << 20
"""What a read takes at a time: `cp` and `cat` take less, and larger ones are slower here."""
LEAVES = 5_000


@dataclass(frozen=True, slots=True)
class Reader:
    """A way to read all files below a path, and the column of the table."""

    name: str
    read: Callable[[Path], None]


def verify(options: Options) -> list[Row]:
    """Verify 1 GiB, from the page cache and from the disk, beside reading the same files."""
    size = few_large(options.scale)
    path = options.scratch / "verify"
    ostraka.save(path, make_tree(size))
    title = f"verify {size.state_bytes / 2**30:.3g} GiB"
    warm = Row("verify_warm", f"{title}, warm", size.state_bytes)
    cold = Row("verify_cold", f"{title}, cold", size.state_bytes)
    cores = len(os.sched_getaffinity(0))
    readers = [
        Reader("ostraka", _verify),
        Reader("bare", partial(_read_all, threads=cores)),
        Reader("in_turn", partial(_read_all, threads=1)),
    ]
    for row in (warm, cold):

        def turn(reader: Reader, row: Row = row) -> float:
            if row is cold:
                drop_caches(options.scratch)
            return timed(lambda: reader.read(path))[0]

        # A round that does not count.
        interleave(Row(row.id, row.title, row.state_bytes), readers, 1, turn)
        # Turns are short, and those of a cold disk differ by a factor of three.
        interleave(row, readers, 4 * options.rounds, turn)
        row.note(f"{row.id}: the readers fill the same {PIECE_BYTES >> 20} MiB again and again")
    remove(path)
    return [warm, cold]


def show(options: Options) -> list[Row]:
    """Run `ostraka show` on 5,000 leaves, from its start to its end."""
    leaves = max(8, round(LEAVES * options.scale))
    path = options.scratch / "show"
    array = jax.device_put(np.zeros((8, 8), np.float32))
    layers = -(-leaves // 8)
    layer = {f"w{number}": array for number in range(8)}
    ostraka.save(path, {f"layer_{number:04d}": layer for number in range(layers)})
    command = [str(Path(sys.executable).parent / "ostraka"), "show", str(path)]
    row = Row("show", f"`ostraka show` of {layers * 8:,} leaves", layers * 8 * array.nbytes)

    def run(_: Path) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def turn(reader: Reader) -> float:
        return timed(lambda: reader.read(path))[0]

    interleave(row, [Reader("ostraka", run)], options.rounds, turn)
    remove(path)
    return [row]


def _verify(path: Path) -> None:
    if not ostraka.verify(path).ok:
        raise AssertionError(f"{path} is damaged")


def _read_all(path: Path, threads: int) -> None:
    """Read every byte below `path`, file by file, into memory that is used again."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    with ThreadPoolExecutor(threads) as pool:
        shares = [files[number::threads] for number in range(threads)]
        list(pool.map(_read_files, shares))


def _read_files(files: list[Path]) -> None:
    # Whole pages: into memory that begins elsewhere the kernel copies several times more slowly.
    memory = mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(memory):
                pass
