"""Batches of logical shards beside Grain alone: `python -m bench.logical_shards`.

Prints the batches per second of each way, medians of interleaved rounds. The last columns have the
medians of the ratios of each round: `ElasticIterator` over the same pipelines stacked by hand, and
over one pipeline that Grain batches. `--cpu` counts seconds of CPU time of all threads, which other
programs on the machine change less.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grain
import grain.experimental
import jax
import numpy as np

from ostraka.data import ElasticIterator

BATCH = 128
TURN_S = 0.4

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the table."""

    kind: str
    threads: int
    """Read threads of each pipeline. With 0 it reads where it is asked."""
    length: int
    """Tokens in a row."""
    shards: int

    def __str__(self) -> str:
        return f"{self.kind:6} threads={self.threads} tokens={self.length:<5} K={self.shards:<3}"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Makes a document of a number. The same number gives the same tokens."""

    length: int
    has_any_length: bool

    def __call__(self, number: int) -> dict[str, Any]:
        length = 1 + number * 7919 % self.length if self.has_any_length else self.length
        return {"tokens": np.full(length, number, np.int32)}


def is_kept(example: dict[str, Any]) -> bool:
    """Two of three."""
    return example["tokens"][0] % 3 != 1


def documents(setting: Setting, shard: int, shards: int, has_any_length: bool) -> Any:
    """The documents of one shard, shuffled, without end."""
    numbers = grain.MapDataset.range(1 << 16)[shard::shards].shuffle(seed=0).repeat()
    made = numbers.map(Tokens(setting.length, has_any_length))
    buffer = 16 if setting.threads else 0
    return made.to_iter_dataset(grain.ReadOptions(setting.threads, buffer))


def pack(parent: Any, length: int) -> Any:
    """Rows of several documents."""
    return grain.experimental.FirstFitPackIterDataset(
        parent, length_struct={"tokens": length}, num_packing_bins=8, seed=5
    )


def pipeline(setting: Setting, shard: int, shards: int) -> Any:
    """The examples of one of so many shards."""
    if setting.kind == "map":
        return documents(setting, shard, shards, has_any_length=False)
    if setting.kind == "filter":
        return documents(setting, shard, shards, has_any_length=False).filter(is_kept)
    if setting.kind == "pack":
        kept = documents(setting, shard, shards, has_any_length=True).filter(is_kept)
        return pack(kept, setting.length)
    parts = [documents(setting, shard, shards, has_any_length=False).filter(is_kept)] * 2
    return grain.IterDataset.mix(parts, weights=[3, 1])


# The ways to a batch


def bare(setting: Setting) -> Generator[Any]:
    """The examples of the pipelines, not stacked: what Grain takes."""
    pipelines = [iter(pipeline(setting, k, setting.shards)) for k in range(setting.shards)]
    each = BATCH // setting.shards
    with closing(pipelines):
        while True:
            yield [next(rows) for rows in pipelines for _ in range(each)]


def by_hand(setting: Setting) -> Generator[Any]:
    """The same, stacked and put on the device."""
    with contextlib.closing(bare(setting)) as batches:
        for examples in batches:
            yield jax.device_put(
                {key: np.stack([example[key] for example in examples]) for key in examples[0]}
            )


def one(setting: Setting) -> Generator[Any]:
    """One pipeline over all of the data, batched by Grain."""
    whole = iter(pipeline(setting, 0, 1).batch(BATCH))
    with closing([whole]):
        for batch in whole:
            yield jax.device_put(batch)


def elastic(setting: Setting) -> Generator[Any]:
    """An ElasticIterator."""
    with ElasticIterator(
        lambda k: pipeline(setting, k, setting.shards), shards=setting.shards, batch=BATCH
    ) as data:
        yield from data


@contextlib.contextmanager
def closing(pipelines: list[Any]) -> Generator[None]:
    """Close them in the end: each has threads."""
    try:
        yield
    finally:
        for found in pipelines:
            found.close()


WAYS: dict[str, Callable[[Setting], Generator[Any]]] = {
    "bare": bare,
    "by hand": by_hand,
    "one": one,
    "elastic": elastic,
}


def take(way: str, setting: Setting, batches: int, clock: Clock) -> float:
    """Take batches, and return how many there were per second. The first does not count."""
    gc.collect()
    # Its own generator must end before the next turn, with its threads.
    with contextlib.closing(WAYS[way](setting)) as found:
        jax.block_until_ready(next(found))
        start = clock()
        for batch in itertools.islice(found, batches):
            jax.block_until_ready(batch)
        return batches / (clock() - start)


def measure(setting: Setting, rounds: int, turn_s: float, clock: Clock) -> dict[str, list[float]]:
    """Return what each way gave in each round."""
    batches = max(8, round(take("by hand", setting, 8, clock) * turn_s))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    order = list(WAYS)
    for number in range(rounds):
        for way in order[number % len(order) :] + order[: number % len(order)]:
            found[way].append(take(way, setting, batches, clock))
    return found


def show(setting: Setting, found: dict[str, list[float]]) -> str:
    """One line: the medians, and the ratios to "by hand" and to one pipeline."""
    medians = " ".join(f"{statistics.median(found[way]):8.1f}" for way in WAYS)
    ratios = " ".join(f"{ratio(found, way):8.2f}" for way in ("by hand", "one"))
    return f"{setting} {medians} {ratios}"


def ratio(found: dict[str, list[float]], way: str) -> float:
    """The median of the ratios of all rounds."""
    pairs = zip(found["elastic"], found[way], strict=True)
    return statistics.median(mine / other for mine, other in pairs)


def main() -> int:
    """Measure all settings that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="map,filter,pack,mix")
    parser.add_argument("--threads", default="0,2")
    parser.add_argument("--lengths", default="32,512,4096")
    parser.add_argument("--shards", default="4,16,64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-s", type=float, default=TURN_S)
    parser.add_argument("--cpu", action="store_true", help="count CPU time")
    parser.add_argument("--json", help="append the values to this file")
    given = parser.parse_args()
    clock = time.process_time if given.cpu else time.perf_counter
    axes = [given.kinds.split(",")]
    axes += [[int(n) for n in text.split(",")] for text in (given.threads, given.lengths)]
    axes += [[int(n) for n in given.shards.split(",")]]
    print(f"{'':39} " + " ".join(f"{way:>8}" for way in WAYS) + "  of hand   of one")
    for combination in itertools.product(*axes):
        setting = Setting(*combination)  # type: ignore[arg-type]
        found = measure(setting, given.rounds, given.turn_s, clock)
        print(show(setting, found), flush=True)
        if given.json:
            with open(given.json, "a") as file:
                print(json.dumps([str(setting), found]), file=file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
