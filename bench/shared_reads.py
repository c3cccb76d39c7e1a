"""Shared reads against each process reading for itself: `python -m bench.shared_reads`.

Processes of one device each restore a tree in which every leaf is replicated, from a store that
gives so many bytes a second to all of them together, in turns with and without sharing. With
`--across` it is cut: saved by rows, restored by columns.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ostraka.storage import Traits
from ostraka.testing import FaultyStore, run_processes

LEAVES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--mb-per-s", type=float, default=100.0, help="of all processes; 0: no limit"
    )
    parser.add_argument("--across", action="store_true", help="saved by rows, restored by columns")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = run_processes(
            restore_in_turns,
            directory,
            arguments.mib << 20,
            arguments.rounds,
            arguments.mb_per_s * 1e6,
            arguments.across,
            processes=arguments.processes,
            timeout_s=3600,
        )
    show([result.value for result in results], arguments.mib << 20)


class Limit:
    """So many bytes a second, for all processes that have the same file."""

    def __init__(self, path: Path, bytes_per_s: float):
        self._bytes_per_s = bytes_per_s
        self._file = path.open("r+b")
        self._free_at = mmap.mmap(self._file.fileno(), 8)
        self._lock = threading.Lock()

    def wait_for(self, nbytes: int) -> None:
        if not self._bytes_per_s:
            return
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            (free_at,) = struct.unpack("d", self._free_at[:])
            done_at = max(free_at, time.monotonic()) + nbytes / self._bytes_per_s
            self._free_at[:] = struct.pack("d", done_at)
            fcntl.flock(self._file, fcntl.LOCK_UN)
        time.sleep(max(0.0, done_at - time.monotonic()))


class LimitedStore(FaultyStore):
    """A directory that is as slow as `limit` says, and counts what is read from it."""

    def __init__(self, path: str, limit: Limit):
        super().__init__(path, traits=Traits(is_remote=True, reads_at_once=8))
        self.limit = limit
        self.nbytes = 0

    def open(self, name: str, first_bytes: int = 0) -> Any:
        return _LimitedReader(self, super().open(name, first_bytes))


class _LimitedReader:
    def __init__(self, store: LimitedStore, reader: Any):
        self._store, self._reader = store, reader
        self.size, self.close = reader.size, reader.close

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        count: int = self._reader.read_into(offset, buffers)
        self._store.limit.wait_for(count)
        self._store.nbytes += count
        return count


Turn = tuple[bool, float, int]
"""Whether reads were shared, the seconds, the bytes read."""


def restore_in_turns(
    directory: str, nbytes: int, rounds: int, bytes_per_s: float, across: bool
) -> list[Turn]:
    """In each process: the turns of all rounds."""
    import jax
    import numpy as np

    import ostraka

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rows, columns = (("data",), (None, "data")) if across else ((), ())
    saved = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*rows))
    wanted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*columns))
    shape = (1024, nbytes // LEAVES // 4 // 1024)
    like = {
        f"w{n}": jax.ShapeDtypeStruct(shape, np.float32, sharding=wanted) for n in range(LEAVES)
    }
    values = {
        name: np.random.default_rng(n).random(shape, np.float32) for n, name in enumerate(like)
    }
    tree = {
        name: jax.make_array_from_callback(shape, saved, lambda index, v=value: v[index])
        for name, value in values.items()
    }
    path = f"{directory}/checkpoint"
    ostraka.save(path, tree)
    del tree
    limit_file = Path(directory, "limit")
    if jax.process_index() == 0:
        limit_file.write_bytes(bytes(8))
    ostraka.save(f"{directory}/barrier", {"x": jax.numpy.zeros(())})
    limit = Limit(limit_file, bytes_per_s)
    turns: list[Turn] = []
    for turn in range(rounds + 1):
        for share in (False, True):
            store = LimitedStore(path, limit)
            begin_s = time.perf_counter()
            found = jax.block_until_ready(ostraka.restore(store, like, share_reads=share))
            if turn:
                turns.append((share, time.perf_counter() - begin_s, store.nbytes))
            else:
                for name, value in values.items():
                    for shard in found[name].addressable_shards:
                        assert np.array_equal(shard.data, value[shard.index])
            del found
    return turns


def show(processes: list[list[Turn]], nbytes: int) -> None:
    medians: dict[bool, float] = {}
    for share in (False, True):
        turns = [[turn for turn in turns if turn[0] == share] for turns in processes]
        medians[share] = median(
            max(turn[1] for turn in at_once) for at_once in zip(*turns, strict=True)
        )
        read = sum(of_process[0][2] for of_process in turns)
        name = "shared" if share else "each for itself"
        print(f"{name}: {medians[share]:.2f} s, {read / nbytes:.3f}x the checkpoint read")
    print(f"shared reads are {medians[False] / medians[True]:.2f}x as fast")


if __name__ == "__main__":
    main()
