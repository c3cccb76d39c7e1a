"""What parity costs a save, and how fast a lost file comes back: `python -m bench.parity`.

The same tree on 8 devices of one process, in turns: saved without parity, with one and with two
parity files; wall time and processor time of each. Then a shard file is lost: a restore that takes
it from parity against one that does not need to, and the file rebuilt and written against a plain
copy of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ostraka
from bench.machine import remove
from ostraka._checkpoint import open_at
from ostraka._parallel import StopSignal, run_all
from ostraka._shards import Shards
from ostraka.formats._ostraka import OstrakaSource

LEAVES = 16
PIECE_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--scratch", type=Path, help="where checkpoints are written")
    arguments = parser.parse_args()
    tree = make_tree(arguments.mib << 20)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        place = Path(directory)
        compare("save", saves(place, tree), arguments.rounds)
        compare("restore, one shard lost", restores(place, tree), arguments.rounds)
        compare("one shard file", rebuilds(place), arguments.rounds)
        # A copy reads and writes the file; a rebuild reads eight files and writes one.
        print(
            f"  by the byte that is read or written, a rebuild may take {9 / 2:.1f} times as long"
        )


def make_tree(nbytes: int) -> dict[str, jax.Array]:
    mesh = Mesh(jax.devices(), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    rows = nbytes // LEAVES // 4 // 1024
    key = jax.random.key(0)
    make = jax.jit(
        lambda k: jax.random.normal(k, (rows, 1024), jnp.float32), out_shardings=sharding
    )
    return {
        f"leaf_{n}": jax.block_until_ready(make(k))
        for n, k in enumerate(jax.random.split(key, LEAVES))
    }


Contest = dict[str, Callable[[], Any]]
"""What is compared, by name; the first is what the others are measured by."""


def compare(title: str, contest: Contest, rounds: int) -> None:
    """Run each in turn; print medians and minima, and ratios to the first."""
    wall: dict[str, list[float]] = {name: [] for name in contest}
    used: dict[str, list[float]] = {name: [] for name in contest}
    for number in range(rounds + 1):
        for name, run in contest.items():
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            run()
            if number:  # the first round warms up
                wall[name].append(time.perf_counter() - begin_s)
                used[name].append(time.process_time() - begin_cpu_s)
    base = next(iter(contest))
    print(f"{title}\n{'':34} median s   ratio    min s   ratio    CPU s   ratio")
    for name in contest:
        figures = [statistics.median(wall[name]), min(wall[name]), statistics.median(used[name])]
        bases = [statistics.median(wall[base]), min(wall[base]), statistics.median(used[base])]
        row = "".join(f"{own:9.3f}{own / of:8.2f}" for own, of in zip(figures, bases, strict=True))
        print(f"  {name:32}{row}", flush=True)


def saves(place: Path, tree: Any) -> Contest:
    def save(parity: int) -> None:
        path = place / f"parity_{parity}"
        remove(path)
        ostraka.save(path, tree, parity=parity)

    return {
        "without parity": lambda: save(0),
        "parity=1": lambda: save(1),
        "parity=2": lambda: save(2),
    }


def restores(place: Path, tree: Any) -> Contest:
    whole, lost = place / "parity_1", place / "lost"
    shutil.copytree(whole, lost)
    next(lost.glob("shards-*/shard_00003.safetensors")).unlink()

    def restore(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.block_until_ready(ostraka.restore(path, like=tree))

    return {"whole": lambda: restore(whole), "by parity": lambda: restore(lost)}


def rebuilds(place: Path) -> Contest:
    source = open_at(place / "lost")
    assert isinstance(source, OstrakaSource)
    shards: Shards = source.shards
    file = next(file for file in source.metadata.files if file.device == 3)
    original = next((place / "parity_1").glob(f"shards-*/{file.name}"))
    target = place / "target"

    def copy() -> None:
        with original.open("rb") as read, target.open("wb") as write:
            shutil.copyfileobj(read, write, PIECE_BYTES)
            os.fsync(write.fileno())

    def rebuild() -> None:
        opened = shards.open_rebuild(file)
        assert opened is not None
        with target.open("wb") as write:

            def put(start: int) -> None:
                piece = opened.read(start, min(start + PIECE_BYTES, file.size))
                os.pwrite(write.fileno(), piece.data, start)

            run_all(put, range(0, file.size, PIECE_BYTES), threads=2, stop=StopSignal())
            os.fsync(write.fileno())
        opened.close()

    return {"copied": copy, "rebuilt from 7 shards and parity": rebuild}


if __name__ == "__main__":
    main()
