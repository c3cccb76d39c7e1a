"""A bucket against what it could do: `python -m bench.buckets`.

512 MiB on 8 devices, in SeaweedFS on this machine, in turns: Ostraka; bare obstore (multipart puts
and ranged gets, at the best of several settings); TensorStore's own S3 driver (zarr3 in OCDBT, what
Orbax stands on), once plain, and once with the settings that Orbax gives it for zarr3.

Then the same with a server of our own that serves from memory (`bench.memory_server`) and costs
next to nothing: where the server has cores of its own, it is the client that counts. There once
more with payloads that are not signed, as Ostraka sends them over TLS. Beside the time, each
contender has the seconds of CPU that it takes and those that the server takes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import obstore
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization.tensorstore_utils import ArrayWriteSpec
from tests.support.servers import BUCKET, Server, seaweed

import ostraka
from bench.memory_server import memory_server
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
    parser.add_argument("--server", choices=("seaweed", "memory", "memory-unsigned"))
    arguments = parser.parse_args()
    for name in (arguments.server,) if arguments.server else SERVERS:
        print(f"server: {name}", flush=True)
        with tempfile.TemporaryDirectory() as directory, SERVERS[name](Path(directory)) as server:
            os.environ.update(server.environment)
            compare(server, arguments.mib << 20, arguments.rounds)


@contextmanager
def memory_unsigned(_: Path) -> Generator[Server]:
    with memory_server() as server:
        unsigned = {**server.environment, "AWS_UNSIGNED_PAYLOAD": "true"}
        yield replace(server, environment=unsigned)


SERVERS: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "seaweed": seaweed,
    "memory": lambda _: memory_server(),
    "memory-unsigned": memory_unsigned,
}


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
        self.bucket: Any = open_store(f"s3://{BUCKET}/bare")._contact.lasting  # pyright: ignore
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


class Cost(NamedTuple):
    """In seconds."""

    wall: float
    client: float
    """CPU of this process."""
    server: float
    """CPU of the processes that it has started."""


def now() -> Cost:
    return Cost(time.perf_counter(), time.process_time(), server_cpu_s())


def server_cpu_s() -> float:
    ticks = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def in_turns(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Cost]:
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    # In another order each turn: the memory that one has let go is there for the next, or is not.
    shuffle = random.Random(0)
    for turn in range(rounds + 1):
        for name, run in shuffle.sample(list(contenders.items()), len(contenders)):
            before = now()
            run()
            after = now()
            if turn:
                costs[name].append(Cost(*(b - a for a, b in zip(before, after, strict=True))))
    return {
        name: Cost(*(statistics.median(column) for column in zip(*found, strict=True)))
        for name, found in costs.items()
    }


def show(name: str, medians: dict[str, Cost]) -> None:
    ours = medians["ostraka"]
    best = min((cost.wall, n) for n, cost in medians.items() if n.startswith("bare"))
    ratio = ours.wall / best[0]
    print(f"{name}: ostraka {ours.wall:.3f} s; {best[1]} {best[0]:.3f} s ({ratio:.2f}x of bare)")
    for other in ("tensorstore", "tensorstore as Orbax"):
        found = medians[other]
        print(
            f"  {other} {found.wall:.3f} s ({found.wall / ours.wall:.2f}x ours; "
            f"{found.client / ours.client:.2f}x our CPU)"
        )
    for contender, (wall_s, client_s, server_s) in medians.items():
        print(
            f"  {contender:24} {wall_s:.3f} s; CPU {client_s:.2f} s, server {server_s:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
