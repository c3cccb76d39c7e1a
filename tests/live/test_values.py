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
from ostraka.layout.box import Box
from ostraka.layout.plan_write import BAND_BYTES
from ostraka.live.values import Placement, ShardedValue, shards_of
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
def test_threads_that_ask_at_once_get_the_shards_they_ask_for():
    for _ in range(500):
        index_of = {device: device for device in range(8)}
        array = sharded(NUMBERS)
        placement = Placement(NUMBERS.shape, jax.devices(), index_of, BOXES, gives_views=True)
        value = ShardedValue(array, placement)
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


def devices_of(array: Any) -> str:
    return "".join(str(shard.device) for shard in shards_of(array, "abcd"))


# What two or three threads leave, or have so far; some of it is as long as it should be.
MIXED_UP = ["", "abc", "aabc", "abab", "aabb", "aaba", "aabbcdcd", "abcdabcd"]


def test_an_array_that_threads_have_mixed_up_is_taken_apart_anew():
    for mixed_up in MIXED_UP:
        assert devices_of(Listed(mixed_up, twin=Listed("abcd"))) == "abcd", mixed_up
        # One that spans processes has no twin: its list is whole in a moment.
        assert devices_of(Listed(mixed_up, mixed_up, mixed_up + "dcba")) == "abcd", mixed_up
    assert devices_of(Listed("abcd", twin=Listed("dcba"))) == "abcd"


def test_an_array_that_can_not_be_taken_apart_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ostraka.live.values._PATIENCE_S", 0.01)
    said = r"JAX lists 3 shards on 4 devices .*\(8, 8\).*; save a copy of it"
    with pytest.raises(RuntimeError, match=said):
        devices_of(Listed("abc"))


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6, 7], [7, 2, 5, 0], [3]])
def test_jax_lists_shards_in_the_order_of_the_mesh(order: list[int]):
    devices = [jax.devices()[number] for number in order]
    mesh = Mesh(np.array(devices).reshape(-1, 1), ("x", "y"))
    for spec in (P("x"), P(("y", "x")), P(None, "x"), P()):
        array: Any = jax.device_put(NUMBERS, NamedSharding(mesh, spec))
        assert [shard.device for shard in array._arrays] == devices


def test_a_twin_is_no_copy():
    array: Any = sharded(NUMBERS)
    for device, shard in enumerate(shards_of(array.clone(), jax.devices())):
        assert (
            shard.unsafe_buffer_pointer() == array.addressable_data(device).unsafe_buffer_pointer()
        )


def save_while_a_thread_looks(folder: str, attempts: int) -> int:
    """Arrays that span processes; returns how many saves were right."""
    sys.setswitchinterval(1e-6)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    numbers = np.arange(64, dtype=np.float32)
    right = 0
    for attempt in range(attempts):
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
        save_while_a_thread_looks, str(tmp_path), 10, processes=2, devices_per_process=4
    )
    assert [result.value for result in results] == [10, 10]


# In parts


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_part_of_a_large_shard_is_cut_out_where_it_lies(dtype: str):
    numbers = np.arange(9 << 20).reshape(1 << 10, 9 << 10) % 7
    array = jax.device_put(jax.numpy.asarray(numbers, dtype), jax.devices()[3])
    whole: Box = ((0, 1 << 10), (0, 9 << 10))
    placed = Placement(array.shape, [jax.devices()[3]], {3: 0}, {3: whole}, gives_views=False)
    value = ShardedValue(array, placed)
    with jax.transfer_guard_host_to_device("disallow"):  # of the program, not of what it saves
        part = value.read(3, ((513, 514), (5, 9_000)))
    assert value.band_bytes == BAND_BYTES
    assert (part.astype(np.int64) == numbers[513:514, 5:9_000]).all()
    small = ShardedValue(sharded(NUMBERS), Placement((8, 8), jax.devices(), {}, BOXES, False))
    assert small.band_bytes == 0


@pytest.mark.parametrize("shape", [(9, 1 << 20), (3, 3_000_001), (9_000_001,)])
def test_a_large_array_is_converted_in_bands(tmp_path: Path, shape: tuple[int, ...]):
    numbers = np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)
    tree = {"four": jax.numpy.asarray(numbers, "int4"), "cast": jax.numpy.asarray(numbers)}
    path = tmp_path / "converted"
    ostraka.save(path, tree, dtype={"cast": "bfloat16"})
    found = ostraka.restore(path)
    assert found["cast"].dtype == "bfloat16"
    for name in tree:
        assert (np.asarray(found[name]).astype(np.float32) == numbers).all()
