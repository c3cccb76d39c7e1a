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
from ostraka._values import ShardedValue, taken_apart
from ostraka.errors import InvalidTree

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
@pytest.mark.parametrize("in_company", [True, False])
def test_threads_that_ask_at_once_get_the_shards_they_ask_for(in_company: bool):
    for _ in range(300):
        index_of = {device: device for device in range(8)}
        value = ShardedValue(sharded(NUMBERS), index_of, BOXES, in_company=in_company)
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
    """An array as threads of the program may leave it, with more or fewer shards than devices.

    JAX makes no such array on demand.
    """

    shape = (8, 8)
    sharding = SimpleNamespace(addressable_devices=frozenset(range(8)))

    def __init__(self, length: int, twin: "MixedUp | None" = None):
        self._arrays = [0] * length
        self._twin = twin

    def is_deleted(self) -> bool:
        return False

    def clone(self) -> "MixedUp | None":
        return self._twin


@pytest.mark.parametrize("length", [7, 16])
@pytest.mark.parametrize("in_company", [True, False])
def test_an_array_that_threads_have_mixed_up_is_taken_apart_anew(length: int, in_company: bool):
    whole: Any = MixedUp(8)
    mixed_up: Any = MixedUp(length, whole)
    assert taken_apart(mixed_up, in_company=in_company) is whole


@pytest.mark.parametrize("length", [7, 16])
def test_an_array_that_can_not_be_taken_apart_is_refused(length: int):
    mixed_up: Any = MixedUp(length, MixedUp(length))
    with pytest.raises(
        RuntimeError, match=rf"JAX lists {length} shards on 8 devices .* \(8, 8\); save a copy"
    ):
        taken_apart(mixed_up, in_company=False)


def test_an_array_is_copied_by_no_way_of_looking_at_it():
    array = sharded(NUMBERS)
    for in_company in (True, False):
        parts = taken_apart(array, in_company=in_company)
        for device in range(8):
            part, mine = parts.addressable_data(device), array.addressable_data(device)
            assert part.unsafe_buffer_pointer() == mine.unsafe_buffer_pointer()


def test_a_deleted_array_says_so(tmp_path: Path):
    array = sharded(NUMBERS)
    array.delete()
    with pytest.raises(InvalidTree, match="leaf 'a' .*deleted"):
        ostraka.save(tmp_path / "c", {"a": array})
