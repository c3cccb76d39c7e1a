"""Data in logical shards: filtered, packed and mixed by Grain, and digests of batches."""

import hashlib
from collections.abc import Callable
from typing import Any

import grain
import grain.experimental
import jax
import numpy as np

LENGTH = 16


def _tokens(seed: int) -> Callable[[int], dict[str, Any]]:
    """An example of a length of its own, always the same for a number."""

    def make(number: int) -> dict[str, Any]:
        chance = np.random.default_rng([seed, int(number)])
        size = int(chance.integers(1, LENGTH + 1))
        return {"tokens": chance.integers(0, 1000, size, np.int32)}

    return make


def _is_kept(example: dict[str, Any]) -> bool:
    return len(example["tokens"]) % 3 != 1


def _documents(shard: int, shards: int, count: int, seed: int) -> Any:
    """The documents of one shard in a random order, some of them left out."""
    numbers = grain.MapDataset.range(count)[shard::shards].shuffle(seed=seed)
    return numbers.map(_tokens(seed)).to_iter_dataset().filter(_is_kept)


def _first_fit(parent: Any) -> Any:
    return grain.experimental.FirstFitPackIterDataset(
        parent, length_struct={"tokens": LENGTH}, num_packing_bins=3, seed=5
    )


def _concat_then_split(parent: Any) -> Any:
    return grain.experimental.ConcatThenSplitIterDataset(parent, length_struct={"tokens": LENGTH})


def mixed(shard: int, shards: int, count: int) -> Any:
    """Two sources, each filtered and packed in its way, three to one."""
    parts = [
        _first_fit(_documents(shard, shards, count, 1)).map(_same_keys),
        _concat_then_split(_documents(shard, shards, count, 2)).map(_same_keys),
    ]
    return grain.IterDataset.mix(parts, weights=[3, 1])


def _same_keys(packed: dict[str, Any]) -> dict[str, Any]:
    return {name: packed[name] for name in sorted(packed)}


def row_digests(batch: Any) -> dict[int, str]:
    """By its number, the digest of each row of a global batch that is on this process."""
    found: dict[int, Any] = {}
    for leaf in jax.tree.leaves(batch):
        here: dict[int, Any] = {}
        for shard in leaf.addressable_shards:
            first, end, _ = shard.index[0].indices(leaf.shape[0])
            for row, values in zip(range(first, end), np.asarray(shard.data), strict=True):
                assert np.array_equal(here.setdefault(row, values), values), "replicas differ"
        for row, values in here.items():
            digest = found.setdefault(row, hashlib.sha256())
            digest.update(f"{values.dtype}{values.shape}".encode() + values.tobytes())
    return {row: digest.hexdigest()[:16] for row, digest in found.items()}
