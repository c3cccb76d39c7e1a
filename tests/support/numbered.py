"""Trees whose every element is one number, so that a mix of two saves shows."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.storage import open_store
from places import Place

CLEAN = ["_METADATA", "shards"]
"""All that `names_in` finds where no save has left anything behind."""


def names_in(path: str | Place) -> list[str]:
    return [name.split("-")[0] for name in open_store(path).list()]


def on_all(value: np.ndarray, *axes: str | None) -> jax.Array:
    """An array on all devices of all processes, sharded along the axis "x" or replicated."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P(*axes))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def make_tree(number: int, rows: int = 96) -> dict[str, Any]:
    value = np.full((rows, 128), number, np.float32)
    return {
        "sharded": on_all(value, "x"),
        "replicated": on_all(value[:, :32]),
        "host": np.full(1000, number),
        "number": number,
    }


def number_in(tree: Any) -> int | str:
    """The number that a tree is made of, as far as this process holds it."""
    found: set[int] = set()
    for leaf in jax.tree.leaves(tree):
        is_spread = isinstance(leaf, jax.Array)
        parts = [shard.data for shard in leaf.addressable_shards] if is_spread else [leaf]
        found |= {int(number) for part in parts for number in np.unique(np.asarray(part))}
    return found.pop() if len(found) == 1 else f"a mix of {sorted(found)}"


def restored_number(path: str | Place, rows: int = 96) -> int | str:
    """The number of the checkpoint at a path, which several processes restore together."""
    return number_in(ostraka.restore(path, like=make_tree(0, rows)))


def caught(work: Callable[[], Any]) -> tuple[str, str]:
    """The type and the words of what `work` raises."""
    try:
        work()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def threads_left(known: Iterable[threading.Thread] = ()) -> list[str]:
    """The names of Ostraka's threads that do not end: a save is over a moment before its thread."""
    ours = {thread for thread in threading.enumerate() if thread.name.startswith("ostraka")}
    deadline = time.monotonic() + 60
    for thread in (new := ours - set(known)):
        thread.join(max(0, deadline - time.monotonic()))
    return [thread.name for thread in new if thread.is_alive()]
