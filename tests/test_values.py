"""The bytes of arrays, as several threads ask for them."""

import sys
import threading
from collections.abc import Generator, Sequence
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
from ostraka._values import ShardedValue, shards_of
from ostraka.errors import InvalidTree
from ostraka.testing import run_processes

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
        array = sharded(NUMBERS)
        value = ShardedValue(array, jax.devices(), index_of, BOXES, in_company=in_company)
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


class Listed:
    """An array of which threads of the program have made some list of shards.

    JAX makes no such array on demand. A shard is told by its device; there are four.
    """

    shape = (8, 8)
    sharding = SimpleNamespace(addressable_devices=frozenset("abcd"))

    def __init__(self, *lists: str, twin: "Listed | None" = None):
        self._lists = iter(lists)
        self._list = ""
        self._twin = twin
        self.is_fully_addressable = twin is not None

    @property
    def _arrays(self) -> list[Any]:
        self._list = next(self._lists, self._list)
        return [SimpleNamespace(device=device) for device in self._list]

    def is_deleted(self) -> bool:
        return False

    def clone(self) -> "Listed | None":
        return self._twin


def devices_of(array: Any, devices: str | None, *, in_company: bool) -> str:
    return "".join(str(s.device) for s in shards_of(array, devices, in_company=in_company))


@pytest.mark.parametrize("mixed_up", ["", "abc", "aabbcdcd"])
@pytest.mark.parametrize("in_company", [True, False])
def test_an_array_that_threads_have_mixed_up_is_taken_apart_anew(mixed_up: str, in_company: bool):
    array = Listed(mixed_up, twin=Listed("abcd"))
    assert devices_of(array, "abcd", in_company=in_company) == "abcd"


def test_a_list_that_is_whole_is_taken_unless_others_may_make_one_too():
    assert devices_of(Listed("abcd", twin=Listed("dcba")), "abcd", in_company=False) == "abcd"
    assert devices_of(Listed("abcd", twin=Listed("dcba")), "dcba", in_company=True) == "dcba"


@pytest.mark.parametrize("lists", [("abcd",), ("aabbcdcd",), ("dcba",), ("", "a", "ab", "abdc")])
@pytest.mark.parametrize("devices", ["abcd", "cdab"])
def test_shards_of_an_array_that_spans_processes_are_told_by_their_devices(
    lists: tuple[str, ...], devices: str
):
    assert devices_of(Listed(*lists), devices, in_company=True) == devices


def test_the_order_of_an_array_that_spans_processes_is_that_of_a_whole_list():
    assert devices_of(Listed("", "bd", "bdac"), None, in_company=True) == "bdac"


@pytest.mark.parametrize(("mixed_up", "devices"), [("aabbcdcd", None), ("abc", "abcd")])
def test_an_array_that_can_not_be_taken_apart_is_refused(
    mixed_up: str, devices: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ostraka._values._PATIENCE_S", 0.01)
    said = rf"JAX lists {len(mixed_up)} shards on 4 devices .*\(8, 8\).*; save a copy of it"
    with pytest.raises(RuntimeError, match=said):
        devices_of(Listed(mixed_up), devices, in_company=True)


def test_no_way_of_looking_at_an_array_copies_it():
    array = sharded(NUMBERS)
    for in_company in (True, False):
        for device, shard in enumerate(shards_of(array, in_company=in_company)):
            mine = array.addressable_data(device)
            assert shard.unsafe_buffer_pointer() == mine.unsafe_buffer_pointer()


def test_a_deleted_array_says_so(tmp_path: Path):
    array = sharded(NUMBERS)
    array.delete()
    with pytest.raises(InvalidTree, match="leaf 'a' .*deleted"):
        ostraka.save(tmp_path / "c", {"a": array})


def save_while_a_thread_looks(folder: str) -> int:
    """Arrays that span processes; returns how many saves were right."""
    sys.setswitchinterval(1e-6)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    numbers = np.arange(64, dtype=np.float32)
    right = 0
    for attempt in range(10):
        tree = [
            jax.make_array_from_callback(
                (64,), NamedSharding(mesh, P("x")), lambda index, n=n: numbers[index] + n
            )
            for n in range(40)
        ]
        is_ready = threading.Event()

        def look(tree: Sequence[jax.Array] = tree, is_ready: threading.Event = is_ready) -> None:
            is_ready.wait()
            for array in tree:
                array.addressable_data(0)

        looker = threading.Thread(target=look)
        looker.start()
        is_ready.set()
        ostraka.save(f"{folder}/{attempt}", tree)
        looker.join()
        found = ostraka.open(f"{folder}/{attempt}")
        right += all(np.array_equal(found[str(n)][...], numbers + n) for n in range(40))
    return right


def test_arrays_that_span_processes_and_that_a_thread_looks_at_during_a_save(tmp_path: Path):
    results = run_processes(
        save_while_a_thread_looks, str(tmp_path), processes=2, devices_per_process=4
    )
    assert [result.value for result in results] == [10, 10]
