"""Compression against Orbax's own, and against none: `python -m bench.compression`.

The same tree on 8 devices, in turns: Ostraka with and without `compress="zstd"`, Orbax as it comes
(zarr, compressed with zstd), and with zarr3. Then what one core does: a block to what is stored of
it and back, digests included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import ostraka
from bench.contenders import AS_IT_COMES, Contender, Orbax, Ostraka, Setting
from bench.machine import remove
from bench.rounds import timed
from bench.state import check_same, template
from ostraka.layout import codec, shard_file

PLAIN, OURS = "ostraka, not compressed", "ostraka, zstd"
LEAVES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--scratch", type=Path, help="where checkpoints are written")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        for name, make in STATES.items():
            print(f"{name}, {arguments.mib} MiB", flush=True)
            compare(Path(directory), make(arguments.mib << 20), arguments.rounds)
    for name, block in BLOCKS.items():
        show_core(name, block(), arguments.rounds)


# Whole checkpoints


@dataclass(frozen=True, slots=True)
class Compressed:
    """`ostraka.save(compress="zstd")`; reading needs nothing said."""

    name: str = OURS

    def save(self, path: Path, tree: Any) -> None:
        """Save; it returns when the checkpoint is durable."""
        ostraka.save(path, tree, compress="zstd")

    def restore(self, path: Path, like: Any) -> Any:
        """Restore onto the shardings of `like`."""
        return jax.block_until_ready(ostraka.restore(path, like=like))

    def check(self, restored: Any, want: Any) -> None:
        """Raise unless both are the same."""
        check_same(restored, want, self.name)


def compare(directory: Path, tree: Any, rounds: int) -> None:
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    like = template(tree)
    contenders: list[Contender] = [
        Ostraka(PLAIN),
        Compressed(),
        Orbax("orbax as it comes", AS_IT_COMES),
        Orbax("orbax, zarr3", Setting(use_zarr3=True)),
    ]
    saves: dict[str, list[float]] = {c.name: [] for c in contenders}
    restores: dict[str, list[float]] = {c.name: [] for c in contenders}
    busy: dict[str, list[float]] = {c.name: [] for c in contenders}
    sizes: dict[str, int] = {}
    path = directory / "checkpoint"
    for turn in range(rounds + 1):
        for contender in contenders:
            remove(path)
            save_s, _ = timed(lambda c=contender: c.save(path, tree))
            restore_s, (busy_s, restored) = timed(lambda c=contender: with_busy_s(c, path, like))
            if turn == 0:
                contender.check(restored, tree)
                files = (file for file in path.rglob("*") if file.is_file())
                sizes[contender.name] = sum(file.stat().st_size for file in files)
            else:
                saves[contender.name].append(save_s)
                restores[contender.name].append(restore_s)
                busy[contender.name].append(busy_s)
            del restored
    show(nbytes, sizes, saves, restores)
    show_busy(nbytes, busy)


def with_busy_s(contender: Contender, path: Path, like: Any) -> tuple[float, Any]:
    """What is restored, and the seconds of CPU that it took."""
    begun_s = time.process_time()
    restored = contender.restore(path, like)
    return time.process_time() - begun_s, restored


def show(
    nbytes: int,
    sizes: dict[str, int],
    saves: dict[str, list[float]],
    restores: dict[str, list[float]],
) -> None:
    ours = (statistics.median(saves[OURS]), statistics.median(restores[OURS]))
    for name, size in sizes.items():
        save_s, restore_s = statistics.median(saves[name]), statistics.median(restores[name])
        print(
            f"  {name:24} {size / nbytes:.3f} of the bytes; "
            f"save {save_s:.3f} s ({save_s / ours[0]:.2f}x ours), "
            f"restore {restore_s:.3f} s ({restore_s / ours[1]:.2f}x ours, "
            f"{nbytes / restore_s / 1e9:.2f} GB/s)",
            flush=True,
        )


def show_busy(nbytes: int, busy: dict[str, list[float]]) -> None:
    """What a whole restore takes of the cores: reading, digests, decoding, and fresh memory."""
    rates = {name: nbytes / statistics.median(found) / 1e9 for name, found in busy.items()}
    print(
        f"  a core restores {rates[OURS]:.2f} GB/s compressed and {rates[PLAIN]:.2f} GB/s plain, "
        f"by CPU time ({rates[OURS] / rates[PLAIN]:.2f} of plain)",
        flush=True,
    )


# States: normal weights, and what Adam makes of their gradients


def normal(nbytes: int, dtype: Any) -> dict[str, jax.Array]:
    placed = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
    columns = nbytes // LEAVES // 1024 // np.dtype(dtype).itemsize // 64 * 64
    numbers = [np.random.default_rng(n) for n in range(LEAVES)]
    return {
        f"w{n}": jax.device_put(
            (rng.standard_normal((1024, columns), np.float32) * 0.02).astype(dtype), placed
        )
        for n, rng in enumerate(numbers)
    }


def training(nbytes: int) -> dict[str, Any]:
    """Weights in bfloat16, and first moments in float32 after a step from bfloat16 gradients."""
    weights = normal(nbytes // 3, ml_dtypes.bfloat16)
    moments = {f"mu_{name}": value.astype(jnp.float32) for name, value in weights.items()}
    return {**moments, **weights}


STATES: dict[str, Callable[[int], Any]] = {
    "bfloat16 weights": lambda nbytes: normal(nbytes, ml_dtypes.bfloat16),
    "float32 weights": lambda nbytes: normal(nbytes, np.float32),
    "bfloat16 weights and their float32 moments": training,
}


# One core


def block_of(dtype: Any) -> np.ndarray[Any, Any]:
    count = shard_file.BLOCK_BYTES // np.dtype(dtype).itemsize
    return (np.random.default_rng(0).standard_normal(count) * 0.02).astype(dtype)


BLOCKS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "bfloat16": lambda: block_of(ml_dtypes.bfloat16),
    "float32": lambda: block_of(np.float32),
    "float32 from bfloat16": lambda: block_of(ml_dtypes.bfloat16).astype(np.float32),
}


def show_core(name: str, array: np.ndarray[Any, Any], rounds: int) -> None:
    data, width = array.view(np.uint8), array.dtype.itemsize
    out = np.empty_like(data)
    pieces = codec.Zstd(None).encode(data, width)
    assert pieces is not None
    stored = np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])

    def encode() -> None:
        encoded = codec.Zstd(None).encode(data, width)
        shard_file.block_digest([data])
        shard_file.block_digest(encoded or [])

    def decode() -> None:
        shard_file.block_digest([stored])
        codec.decode(stored, out)
        shard_file.block_digest([out])

    there, back = (data.size / seconds_of(work, rounds) / 1e9 for work in (encode, decode))
    assert (out == data).all()
    ratio = stored.size / data.size
    print(f"one core, {name}: {ratio:.3f}; saved at {there:.2f} GB/s, restored at {back:.2f} GB/s")


def seconds_of(work: Callable[[], None], rounds: int) -> float:
    """The time of this thread's core, whatever else the machine does; the median."""
    times: list[float] = []
    for _ in range(4 * rounds + 1):
        start_s = time.thread_time()
        work()
        times.append(time.thread_time() - start_s)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
