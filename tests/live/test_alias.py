"""Arrays that share memory with what the program writes to during a save in the background."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.testing import FaultyStore
from places import Place

ROWS = 4096


def aligned(rows: int, *, columns: int = 256) -> np.ndarray[Any, Any]:
    """As JAX takes it over without a copy."""
    memory = np.zeros(rows * columns * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + rows * columns * 4].view(np.float32).reshape(rows, columns)
    array[:] = np.arange(rows, dtype=np.float32)[:, np.newaxis]
    return array


def on_one_device(array: Any) -> jax.Array:
    return jax.device_put(array, jax.devices()[0])


def on_all_devices(array: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x")))


def by_dlpack(array: Any) -> jax.Array:
    return jax.dlpack.from_dlpack(array)


def shares_memory(array: jax.Array, memory: np.ndarray[Any, Any]) -> bool:
    shards = [np.asarray(shard.data) for shard in array.addressable_shards]
    return all(np.shares_memory(shard, memory) for shard in shards)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (on_one_device, {}),
        (on_all_devices, {}),
        (by_dlpack, {}),
        (on_all_devices, {"compress": "zstd"}),
    ],
    ids=["one device", "all devices", "dlpack", "compressed"],
)
def test_what_is_digested_is_what_is_written(
    place: Place, make: Callable[[Any], jax.Array], options: dict[str, Any]
):
    if options:
        pytest.importorskip("zstandard")
    memory, small = aligned(ROWS), aligned(8)
    tree = {"large": make(memory), "small": make(small), "numpy": memory}
    assert shares_memory(tree["large"], memory)
    assert shares_memory(tree["small"], small)

    def change(verb: str, name: str) -> None:
        if verb in ("write", "finish"):
            memory[:] += 1
            small[:] += 1

    store = FaultyStore(str(place / "checkpoint"), before=change)
    ostraka.save_async(store, tree, **options).wait()
    assert ostraka.verify(place / "checkpoint").ok
    restored = ostraka.restore(place / "checkpoint")
    assert (np.asarray(restored["large"][0]) >= 0).all()
    # Of numpy arrays it has the values of the moment when it was called.
    assert (restored["numpy"] == np.arange(ROWS)[:, np.newaxis]).all()
