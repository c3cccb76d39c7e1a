"""What parity costs a save, and how fast a lost file comes back: `python -m bench.parity`.

The same tree on 8 devices of one process, in turns: saved without parity, with one and with two
parity files; wall time and processor time of each. Then a shard file is lost: a restore that takes
it from parity against one that does not need to, and `ostraka.repair`, which reads and compares all
other files, too, against a plain copy of the lost one.
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
        compare("one of 8 shard files", repairs(place), arguments.rounds)


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


Contest = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]
"""What is compared, by name: what comes before, and what is measured; the first is what the others
are measured by."""


def compare(title: str, contest: Contest, rounds: int) -> None:
    """Run each in turn; print medians and minima, and ratios to the first."""
    wall: dict[str, list[float]] = {name: [] for name in contest}
    used: dict[str, list[float]] = {name: [] for name in contest}
    for number in range(rounds + 1):
        for name, (prepare, run) in contest.items():
            prepare()
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
    def clear(parity: int) -> None:
        remove(place / f"parity_{parity}")
        os.sync()  # What was written before is not waited for by the next.

    def save(parity: int) -> None:
        ostraka.save(place / f"parity_{parity}", tree, parity=parity)

    return {
        "without parity": (lambda: clear(0), lambda: save(0)),
        "parity=1": (lambda: clear(1), lambda: save(1)),
        "parity=2": (lambda: clear(2), lambda: save(2)),
    }


def restores(place: Path, tree: Any) -> Contest:
    whole, lost = place / "parity_1", place / "lost"
    shutil.copytree(whole, lost)
    next(lost.glob("shards-*/shard_00003.safetensors")).unlink()

    def restore(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jax.block_until_ready(ostraka.restore(path, like=tree))

    def nothing() -> None:
        pass

    return {
        "whole": (nothing, lambda: restore(whole)),
        "by parity": (nothing, lambda: restore(lost)),
    }


def repairs(place: Path) -> Contest:
    """A copy of the file, on disk when it returns, as that of a repair is."""

    def copy_of(path: Path, numbers: range) -> None:
        for number in numbers:
            original = next(path.glob(f"shards-*/shard_{number:05d}.safetensors"))
            with original.open("rb") as read, (place / f"copy_{number}").open("wb") as write:
                shutil.copyfileobj(read, write, PIECE_BYTES)
                os.fsync(write.fileno())

    def repair(path: Path, numbers: range) -> None:
        report = ostraka.repair(path)
        assert len(report.repaired) == len(numbers)

    def lose(path: Path, numbers: range) -> None:
        for number in numbers:
            next(path.glob(f"shards-*/shard_{number:05d}.safetensors")).unlink()

    one, two = place / "parity_1", place / "parity_2"
    return {
        "a file copied": (lambda: None, lambda: copy_of(one, range(1))),
        "a lost file repaired, parity=1": (
            lambda: lose(one, range(3, 4)),
            lambda: repair(one, range(3, 4)),
        ),
        "a lost file repaired, parity=2": (
            lambda: lose(two, range(3, 4)),
            lambda: repair(two, range(3, 4)),
        ),
        "two files copied": (lambda: None, lambda: copy_of(two, range(2))),
        "two lost files repaired, parity=2": (
            lambda: lose(two, range(3, 5)),
            lambda: repair(two, range(3, 5)),
        ),
    }


if __name__ == "__main__":
    main()
