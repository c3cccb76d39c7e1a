"""A bucket against what it could do: `python -m bench.buckets`.

512 MiB on 8 devices, in SeaweedFS on this machine, in turns: Ostraka; bare obstore (multipart puts
and ranged gets, at the best of several settings); TensorStore's own S3 driver (zarr3 in OCDBT, what
Orbax stands on), once plain, and once with the settings that Orbax gives it for zarr3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import obstore
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization.tensorstore_utils import ArrayWriteSpec
from tests.servers import BUCKET, Server, seaweed

import ostraka
from ostraka.storage import open_store

LEAVES = 8
PUTS = ((8, 8 << 20, 4), (4, 8 << 20, 4), (2, 16 << 20, 4), (8, 32 << 20, 2))
"""Files at once, bytes of a part, parts at once of a file."""
GETS = ((4, 8 << 20), (8, 8 << 20), (16, 8 << 20), (4, 32 << 20))
"""Requests at once, bytes of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, seaweed(Path(directory)) as server:
        os.environ.update(server.environment)
        compare(server, arguments.mib << 20, arguments.rounds)


def compare(server: Server, nbytes: int, rounds: int) -> None:
    tree = make_tree(nbytes)
    bare = Bare(nbytes)
    tensors = Tensors(server, tree)
    as_orbax = AsOrbax(server, tree)
    path = f"{server.url}/ours"
    saves: dict[str, Callable[[], Any]] = {
        "ostraka": lambda: ostraka.save(path, tree),
        **{f"bare {setting}": lambda s=setting: bare.put(*s) for setting in PUTS},
        "tensorstore": tensors.write,
        "tensorstore as Orbax": as_orbax.write,
    }
    restores: dict[str, Callable[[], Any]] = {
        "ostraka": lambda: jax.block_until_ready(ostraka.restore(path, like=tree)),
        **{f"bare {setting}": lambda s=setting: bare.get(*s) for setting in GETS},
        "tensorstore": tensors.read,
        "tensorstore as Orbax": as_orbax.read,
    }
    for name, contenders in (("save", saves), ("restore", restores)):
        show(name, in_turns(contenders, rounds))


def make_tree(nbytes: int) -> dict[str, jax.Array]:
    placed = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
    shape = (8, nbytes // LEAVES // 8 // 4)
    return {
        f"w{n}": jax.device_put(np.random.default_rng(n).random(shape, np.float32), placed)
        for n in range(LEAVES)
    }


class Bare:
    """As many files of the same bytes, by obstore alone."""

    def __init__(self, nbytes: int):
        self.size = nbytes // 8
        self.bucket: Any = open_store(f"s3://{BUCKET}/bare")._bucket  # pyright: ignore
        rng = np.random.default_rng(0)
        self.data = [rng.integers(0, 255, self.size, np.uint8) for _ in range(8)]

    def put(self, files: int, part: int, at_once: int) -> None:
        def put(n: int) -> None:
            obstore.put(
                self.bucket, f"bare/{n}", self.data[n], chunk_size=part, max_concurrency=at_once
            )

        with ThreadPoolExecutor(files) as pool:
            list(pool.map(put, range(8)))

    def get(self, requests: int, nbytes: int) -> None:
        into = [np.empty(self.size, np.uint8) for _ in range(8)]

        def get(place: tuple[int, int]) -> None:
            n, start = place
            stop = min(start + nbytes, self.size)
            data: Any = obstore.get_range(self.bucket, f"bare/{n}", start=start, end=stop)
            into[n][start:stop] = np.frombuffer(data, np.uint8)

        with ThreadPoolExecutor(requests) as pool:
            list(pool.map(get, [(n, s) for n in range(8) for s in range(0, self.size, nbytes)]))


class Tensors:
    """The same arrays, a chunk for each shard."""

    name = "tensorstore"

    def __init__(self, server: Server, tree: dict[str, jax.Array]):
        self.values = {name: np.asarray(value) for name, value in tree.items()}
        self.endpoint = server.endpoint
        self.turn = 0

    def base(self) -> dict[str, Any]:
        return {
            "driver": "s3",
            "bucket": BUCKET,
            "endpoint": self.endpoint,
            "aws_region": "us-east-1",
            "path": f"{self.name}-{self.turn}/",
        }

    def spec(self, name: str) -> dict[str, Any]:
        shape = self.values[name].shape
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": self.base(), "path": f"{name}/"},
            "metadata": {
                "shape": list(shape),
                "data_type": "float32",
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [1, shape[1]]},
                },
            },
        }

    def write(self) -> None:
        self.turn += 1
        batch = ts.Transaction(atomic=False)
        opened = [
            ts.open(self.spec(name), create=True, open=True, transaction=batch)
            for name in self.values
        ]
        writes = [
            future.result().write(value)
            for future, value in zip(opened, self.values.values(), strict=True)
        ]
        for write in writes:
            write.result()
        batch.commit_async().result()

    def read(self) -> None:
        opened = [ts.open(self.spec(name), open=True) for name in self.values]
        reads = [future.result().read() for future in opened]
        for read in reads:
            read.result()


class AsOrbax(Tensors):
    """The same, with the spec that Orbax makes for zarr3 by default, compression included."""

    name = "as-orbax"

    def spec(self, name: str) -> dict[str, Any]:
        shape = self.values[name].shape
        made: dict[str, Any] = ArrayWriteSpec(
            "/anywhere",
            relative_array_filename=name,
            global_shape=shape,
            write_shape=(1, *shape[1:]),
            dtype=np.dtype("float32"),
            use_zarr3=True,
            use_ocdbt=True,
            process_id=0,
        ).json
        kvstore = {**made["kvstore"], "base": self.base()}
        # The pool of caches is one of Orbax's own context; a manifest of its own is for files.
        for key in ("manifest", "cache_pool"):
            del kvstore[key]
        return {**made, "kvstore": kvstore}


def in_turns(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            start_s = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start_s)
    return {name: statistics.median(values) for name, values in times.items()}


def show(name: str, medians: dict[str, float]) -> None:
    ours = medians["ostraka"]
    best = min((s, n) for n, s in medians.items() if n.startswith("bare"))
    print(
        f"{name}: ostraka {ours:.3f} s; {best[1]} {best[0]:.3f} s ({ours / best[0]:.2f}x of bare)"
    )
    for other in ("tensorstore", "tensorstore as Orbax"):
        print(f"  {other} {medians[other]:.3f} s ({medians[other] / ours:.2f}x ours)")
    print("  " + ", ".join(f"{n} {s:.3f}" for n, s in medians.items()), flush=True)


if __name__ == "__main__":
    main()
