"""The bytes of arrays, as several threads ask for them."""

import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka._box import Box
from ostraka._values import ShardedValue, take_apart

BOXES: dict[int, Box] = {device: ((device, device + 1), (0, 8)) for device in range(8)}
NUMBERS = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def threads_switch_often() -> Generator[None]:
    """At this interval JAX mixes up the shards of an array within a few hundred tries."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def sharded(numbers: np.ndarray[Any, Any]) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.device_put(numbers, NamedSharding(mesh, P("x")))


def read_by_four_threads(value: ShardedValue) -> list[Any]:
    """For each device what is read of it, or the error."""
    found: list[Any] = [None] * 8
    barrier = threading.Barrier(4)

    def read(first: int) -> None:
        barrier.wait()
        for device in (7 - first, first):
            try:
                found[device] = value.read(device, BOXES[device])[0].tolist()
            except Exception as error:
                found[device] = error

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.usefixtures("threads_switch_often")
def test_threads_that_ask_at_once_get_the_shards_they_ask_for():
    for _ in range(500):
        value = ShardedValue(sharded(NUMBERS), {device: device for device in range(8)}, BOXES)
        assert read_by_four_threads(value) == NUMBERS.tolist()


@pytest.mark.usefixtures("threads_switch_often")
def test_a_save_whose_threads_all_look_at_the_arrays(tmp_path: Path):
    # Saved as another dtype, every file is the work of one thread from its first byte to its last.
    for number in range(20):
        tree = {f"leaf {n}": sharded(NUMBERS + n) for n in range(20)}
        ostraka.save(f"memory://{tmp_path}/{number}", tree, dtype="bfloat16")
        found = ostraka.restore(f"memory://{tmp_path}/{number}")
        for n in range(20):
            expected = (NUMBERS + n).astype(found[f"leaf {n}"].dtype)
            assert np.array_equal(found[f"leaf {n}"], expected), n


class MixedUp:
    """An array as threads of the program may leave it: its list of shards is not what it should be.

    JAX makes no such array on demand.
    """

    shape = (8, 8)
    sharding = SimpleNamespace(addressable_devices=frozenset(range(8)))

    def __init__(self, *lengths: int):
        self._lengths = iter(lengths)
        self._length = 0

    @property
    def _arrays(self) -> list[int]:
        self._length = next(self._lengths, self._length)
        return [0] * self._length


def test_a_list_of_shards_that_another_thread_makes_is_waited_for():
    array: Any = MixedUp(1, 3, 8, 16)
    take_apart(array)
    assert len(array._arrays) == 16


@pytest.mark.parametrize("length", [7, 16])
def test_an_array_that_other_threads_have_mixed_up_is_refused(
    length: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ostraka._values._PATIENCE_S", 0.01)
    array: Any = MixedUp(length)
    with pytest.raises(
        RuntimeError,
        match=rf"JAX lists {length} shards on 8 devices .* shape \(8, 8\).*save a copy of it",
    ):
        take_apart(array)
