"""`save_async` in one process: the values are those at the call, and no error is lost."""

import asyncio
import collections
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from mounts import mounted
from numbered import threads_left
from ostraka.errors import Busy, InvalidTree, PathInTheWay, SaveFailed
from ostraka.saving import background
from places import Place, in_the_way
from runs import writes_held
from same import assert_same, data_of


@pytest.fixture(autouse=True)
def _no_save_left() -> Iterator[None]:
    yield
    with suppress(Exception):
        background.wait_for_background()


def make_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def put(value: Any, *axes: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(make_mesh(), P(*axes)))


def make_arrays(seed: int = 0) -> dict[str, jax.Array]:
    """Every way in which an array can lie on devices."""
    noise = np.random.default_rng(seed).standard_normal((64, 32), np.float32)
    small = np.random.default_rng(seed).integers(-8, 8, (16, 8))
    return {
        "sharded": put(noise, "x", "y"),
        "replicated": put(noise + 1),
        "partly": put(noise + 2, None, "y"),
        "bf16": put(noise.astype(jnp.bfloat16), "x"),
        "int4": put(small.astype(jnp.int4), "x"),
        "one_device": jax.device_put(noise + 3, SingleDeviceSharding(jax.devices()[3])),
        "scalar": put(np.float32(seed)),
    }


def host(tree: Any) -> Any:
    """Copies of all arrays in host memory."""
    return jax.tree.map(lambda a: np.array(a, copy=True), tree)


_step_one = jax.jit(lambda a: a + a + 1, donate_argnums=0)


def step(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """New values in the memory of the old ones."""
    return jax.tree.map(_step_one, tree)


# The values are those at the call: each case yields a tree, the options of the save, and the values
# that are to be restored; then it changes what it has


Case = Generator[tuple[Any, dict[str, Any], Any]]


def donated() -> Case:
    arrays = make_arrays()
    yield arrays, {}, host(arrays)
    changed = step(step(step(arrays)))
    jax.block_until_ready(changed)
    assert any(array.is_deleted() for array in arrays.values())


def deleted() -> Case:
    arrays = make_arrays()
    yield arrays, {}, host(arrays)
    freed = [(array.shape, array.dtype) for array in arrays.values()]
    for array in arrays.values():
        array.delete()
    # As much memory as was freed, several times over.
    jax.block_until_ready([jnp.full(shape, 7, dtype) for shape, dtype in freed * 4])


def donated_keys() -> Case:
    key = jax.random.split(jax.random.key(5, impl="rbg"), 8)
    fold = jax.jit(jax.vmap(lambda k: jax.random.fold_in(k, 1)), donate_argnums=0)
    yield {"key": key}, {}, {"key": np.array(jax.random.key_data(key))}
    jax.block_until_ready(fold(key))


def cast() -> Case:
    arrays = {"sharded": make_arrays()["sharded"]}
    want = {"sharded": np.asarray(arrays["sharded"]).astype(jnp.bfloat16)}
    yield arrays, {"dtype": "bfloat16"}, want
    jax.block_until_ready(step(arrays))


@nnx.jit(donate_argnums=(0, 1))
def train(model: nnx.Module, optimizer: nnx.Optimizer[Any], x: jax.Array) -> None:
    grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)


def trained() -> Case:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.1, rngs=rngs))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    train(model, optimizer, jnp.ones((8, 4)))
    tree = {"model": model, "optimizer": optimizer}
    ostraka.save("memory://trained", tree)
    want = jax.tree.map(data_of, ostraka.restore("memory://trained"))
    yield tree, {}, want
    train(model, optimizer, jnp.ones((8, 4)))
    kernel = next(leaf for leaf in jax.tree.leaves(want["model"]) if leaf.ndim == 2)
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert not any(np.array_equal(kernel, param) for param in params)


def written_to() -> Case:
    numbers = np.arange(3 << 20)  # 24 MiB, which several threads copy
    mutable: dict[str, Any] = {
        "plain": np.arange(1000.0),
        "fortran": np.asfortranarray(np.arange(64).reshape(8, 8)),
        "big_endian": np.arange(10, dtype=">i4"),
        "view": np.arange(100)[::3],
        "int4": np.arange(-8, 8).astype(jnp.int4),
        "one_dimension": numbers.copy(),
        "rows": numbers.reshape(1024, -1).copy(),
        "large_fortran": np.asfortranarray(numbers.reshape(512, 8, -1)),
        "one_row": numbers.reshape(1, -1).copy(),
        "every_second": np.repeat(numbers, 2)[::2],
        "backwards": numbers.copy()[::-1],
        "small": {str(n): np.full(n, n) for n in range(40)},
    }
    want = jax.tree.map(np.copy, mutable)
    want["big_endian"] = want["big_endian"].astype("<i4")
    metadata = {"tags": ["a"]}
    yield mutable, {"metadata": metadata}, want
    for array in jax.tree.leaves(mutable):
        array[...] = -1
    metadata["tags"].append("b")
    mutable["more"] = np.ones(3)


def save_and_change(path: Place, case: Case) -> Any:
    tree, options, want = next(case)
    with writes_held(path) as (store, _):
        handle = ostraka.save_async(store, tree, **options)
        for _ in case:
            raise AssertionError
        assert not handle.done()
    handle.wait()
    assert_same(ostraka.restore(path), want)
    assert ostraka.verify(path).ok


@pytest.mark.parametrize("case", [donated, deleted, donated_keys, cast, trained])
def test_has_the_values_before_donating_steps(place: Place, case: Callable[[], Case]):
    save_and_change(place / "c", case())


def test_has_the_values_before_numpy_arrays_are_written_to(tmp_path: Path):
    save_and_change(tmp_path / "c", written_to())
    assert ostraka.open(tmp_path / "c").metadata == {"tags": ["a"]}


class Counter:
    """An iterator whose state is its own dict, which it goes on changing."""

    def __init__(self) -> None:
        self.state = {"next": 0, "seen": [0]}

    def __next__(self) -> int:
        self.state["next"] += 1  # pyright: ignore[reportOperatorIssue]
        self.state["seen"].append(1)  # pyright: ignore[reportAttributeAccessIssue]
        return 0

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        self.state = state


def test_has_the_state_of_an_iterator_before_it_moves_on(tmp_path: Path):
    data = Counter()
    next(data)
    with writes_held(tmp_path / "c") as (store, _):
        handle = ostraka.save_async(store, {"data": data, "x": jnp.ones(8)})
        next(data)
    handle.wait()
    ostraka.restore(tmp_path / "c", like={"data": data, "x": jnp.ones(8)})
    assert data.state == {"next": 1, "seen": [0, 1]}


# The handle


def test_handle_tells_how_far_it_is(place: Place):
    ostraka.save(place / "c", {"x": np.zeros(4)})
    with writes_held(place / "c") as (store, gate):
        handle = ostraka.save_async(store, make_arrays())
        assert not handle.done()
        assert handle.record is None
        assert handle.bytes_written == 0
        assert "under way" in repr(handle)
        with pytest.raises(TimeoutError, match=r"the save to .*/c has not ended after 0.05 s"):
            handle.wait(0.05)
        with pytest.raises(TimeoutError, match="has not ended after 0 s"):
            handle.exception(0)
        assert ostraka.restore(place / "c")["x"].tolist() == [0] * 4  # nothing of it shows
        gate.open()
        handle.wait(60)
    assert handle.done()
    assert handle.exception() is None
    assert "done" in repr(handle)
    sizes = [file.stat().st_size for file in (place / "c").glob("*/*.safetensors")]
    assert handle.bytes_written == handle.bytes_total == sum(sizes)
    handle.wait()


def test_what_can_not_be_saved_raises_at_the_call(tmp_path: Path):
    with pytest.raises(InvalidTree, match="'bad'"):
        ostraka.save_async(tmp_path / "c", {"bad": object()})
    with pytest.raises(ValueError, match="max_file_bytes is 1"):
        ostraka.save_async(tmp_path / "c", {}, max_file_bytes=1)
    with pytest.raises(ValueError, match='if_busy is \'never\'; it must be "wait" or "raise"'):
        ostraka.save_async(tmp_path / "c", {}, if_busy="never")  # pyright: ignore[reportArgumentType]
    ostraka.save_async(tmp_path / "c", {"good": 1}).wait()


def fail_in_background(place: Place) -> ostraka.SaveHandle:
    return ostraka.save_async(in_the_way(place / "file" / "c"), {"x": np.ones(4)})


def test_error_is_raised_by_wait_or_returned_and_not_raised_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    handle = fail_in_background(tmp_path)
    for _ in range(2):
        with pytest.raises(PathInTheWay, match="file/c"):
            handle.wait()
    assert "failed" in repr(handle)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    ostraka.save(tmp_path / "next", {"x": 1})
    ostraka.save_async(tmp_path / "next", {"x": 1}).wait()
    called: list[int] = []
    path = in_the_way(tmp_path / "other")
    handle = ostraka.save_async(path, {"x": 5}, on_commit=lambda: called.append(1))
    assert isinstance(handle.exception(), PathInTheWay)
    ostraka.save(tmp_path / "next", {"x": 1})
    assert called == []


@pytest.mark.parametrize("begin", [ostraka.save, ostraka.save_async], ids=["save", "save_async"])
def test_error_that_nobody_saw_is_raised_by_the_next_save_once(
    place: Place, begin: Callable[..., Any]
):
    fail_in_background(place)
    with pytest.raises(PathInTheWay, match="file/c"):
        begin(place / "next", {"x": 1})
    assert not (place / "next").exists()
    begin(place / "next", {"x": 1})
    background.wait_for_background()
    assert ostraka.restore(place / "next") == {"x": 1}


def test_failed_save_lets_go_of_its_values(tmp_path: Path):
    path = in_the_way(tmp_path / "file" / "c")
    big = np.ones(128 << 20, np.uint8)
    before = resident()
    handle = ostraka.save_async(path, {"big": big})
    assert isinstance(handle.exception(), PathInTheWay)
    assert resident() - before < 64 << 20


# One at a time


@pytest.mark.parametrize("begin", [ostraka.save, ostraka.save_async], ids=["save", "save_async"])
def test_second_save_waits_for_the_first(tmp_path: Path, begin: Callable[..., Any]):
    real = ostraka.SaveHandle._wait_for_end
    records: list[Any] = []

    def wait_for_end(self: ostraka.SaveHandle, timeout: float | None = None) -> None:
        timer = threading.Timer(0.2, gate.open)  # after somebody has begun to wait, not before
        timer.start()
        real(self, timeout)
        timer.join()

    with writes_held(tmp_path / "a") as (store, gate):
        first = ostraka.save_async(store, make_arrays())
        with patch.object(ostraka.SaveHandle, "_wait_for_end", wait_for_end):
            begin(tmp_path / "a", {"x": 2}, on_record=records.append)
        assert first.done()
    background.wait_for_background()
    assert ostraka.restore(tmp_path / "a") == {"x": 2}
    assert records[0].phases["wait"] > 0.1
    assert records[0].blocked_s >= records[0].phases["wait"]


def test_second_save_is_refused_if_asked(tmp_path: Path):
    """At once, even while another thread waits for its turn."""
    with ThreadPoolExecutor(1) as pool, writes_held(tmp_path / "a") as (store, gate):
        first = ostraka.save_async(store, make_arrays())
        with pytest.raises(Busy, match="a save to .*/a is still under way; wait for it first"):
            ostraka.save_async(tmp_path / "c", {"x": 1}, if_busy="raise")
        second = pool.submit(ostraka.save_async, tmp_path / "b", {"x": 1})
        while background.slot.turn.acquire(blocking=False):
            background.slot.turn.release()
            time.sleep(0.001)
        with pytest.raises(Busy, match="is still under way"):
            ostraka.save_async(tmp_path / "c", {"x": 1}, if_busy="raise")
        assert not first.done()
        gate.open()
        second.result().wait()
    assert not (tmp_path / "c").exists()
    ostraka.save_async(tmp_path / "c", {"x": 1}, if_busy="raise").wait()


def test_from_several_threads_at_once(tmp_path: Path):
    def save(number: int) -> None:
        tree = {"x": np.full(100, number)}
        if number % 2:
            ostraka.save(tmp_path / str(number), tree)
        else:
            ostraka.save_async(tmp_path / str(number), tree).wait()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(16)))
    for number in range(16):
        assert np.array_equal(ostraka.restore(tmp_path / str(number))["x"], np.full(100, number))


def test_inside_a_running_event_loop(tmp_path: Path):
    async def cell() -> None:
        handle = ostraka.save_async(tmp_path / "c", make_arrays())
        await asyncio.to_thread(handle.wait)
        ostraka.save_async(tmp_path / "d", make_arrays()).wait()
        ostraka.save(tmp_path / "e", make_arrays())

    asyncio.run(cell())
    for name in "cde":
        assert_same(ostraka.restore(tmp_path / name), host(make_arrays()))


# Callbacks


def test_on_commit_is_called_once_when_the_checkpoint_can_be_restored(tmp_path: Path):
    seen: list[Any] = []
    path = tmp_path / "c"
    ostraka.save_async(path, {"x": 5}, on_commit=lambda: seen.append(ostraka.restore(path))).wait()
    assert seen == [{"x": 5}]


@pytest.mark.parametrize("name", ["on_commit", "on_record"])
def test_callback_that_raises_does_not_fail_what_is_committed(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
):
    for error in (SystemExit(3), KeyboardInterrupt("Ctrl-C"), OSError("of its own")):
        caplog.clear()
        callback: dict[str, Any] = {name: Mock(side_effect=error)}
        handle = ostraka.save_async(tmp_path / "c", {"x": str(error)}, **callback)
        handle.wait()
        assert handle.record is not None
        assert "what it was told of is done all the same" in caplog.text
        assert str(error) in caplog.text
        assert "in the background, " not in caplog.text  # as errors of a save are logged
        assert ostraka.restore(tmp_path / "c") == {"x": str(error)}
        ostraka.save(tmp_path / "d", {"x": 6})  # and the next one does not raise it


def test_callback_that_saves_or_waits_is_told_instead_of_waiting_for_itself(tmp_path: Path):
    errors: list[str] = []
    handles: list[ostraka.SaveHandle] = []

    def call_back() -> None:
        for work in (
            lambda: ostraka.save(tmp_path / "d", {}),
            lambda: ostraka.save_async(tmp_path / "d", {}, if_busy="raise"),
            handles[0].wait,
        ):
            with pytest.raises(RuntimeError, match="can't wait for itself") as caught:
                work()
            errors.append(str(caught.value))

    with writes_held(tmp_path / "c") as (store, gate):
        handles.append(ostraka.save_async(store, {"x": np.ones(3)}, on_commit=call_back))
        gate.open()
        handles[0].wait()
    assert len(errors) == 3


# A full disk


def test_disk_that_fills_up_in_the_middle(tmp_path: Path):
    good = {"x": put(np.arange(1 << 17, dtype=np.float32), "x")}
    large = {"x": put(np.ones(1 << 20, np.float32), "x")}
    needs = r"No space left on device \(the file needs [\d,]+ bytes, {} are free\)"
    with mounted(tmp_path / "d", options="size=4m", for_what="a disk that fills up") as disk:
        ostraka.save_async(disk / "step_1", good).wait()
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(2 << 20))
        handle = ostraka.save_async(disk / "step_2", large)
        while not handle.done():
            time.sleep(0.01)
        failed = r"can't write .*/step_2/.*/shard_0000\d.safetensors: " + needs.format(r"[\d,]+")
        with pytest.raises(SaveFailed, match=failed):
            ostraka.save_async(disk / "step_3", good)
        assert not (disk / "step_2").exists()
        assert_same(ostraka.restore(disk / "step_1"), host(good))
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(SaveFailed, match="_METADATA: " + needs.format(0)):
            ostraka.save(disk / "step_2", {"step": 1})  # which has no other file
        ballast.unlink()
        ostraka.save_async(disk / "step_2", {"x": large["x"][: 1 << 18]}).wait()
        assert ostraka.verify(disk / "step_2").ok


def test_disk_that_takes_no_more_files(tmp_path: Path):
    options = "size=4m,nr_inodes=4"  # the root's, the checkpoint's, its directory's, and a file's
    with (
        mounted(tmp_path / "disk", options=options, for_what="a disk without inodes") as disk,
        pytest.raises(SaveFailed, match=r"needs [\d,]+ bytes, and the file system takes no more"),
    ):
        ostraka.save(disk / "step_1", {"x": put(np.arange(64.0), "x")})


# Nothing is left behind


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


def test_many_saves_leave_no_threads_files_or_memory(tmp_path: Path):
    """What is new counts: other tests' threads and files may go meanwhile."""
    arrays = {f"w{n}": put(np.full((64, 512), n, np.float32), "x") for n in range(8)}
    nbytes = sum(array.nbytes for array in arrays.values())
    # What counts here is not the disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for number in range(120):
            want = host(arrays) if number % 10 == 0 else None
            handle = ostraka.save_async(Path(folder) / "c", arrays)
            arrays = step(arrays)  # while it is written
            if want is not None:
                handle.wait()
                assert_same(ostraka.restore(Path(folder) / "c"), want)
            if number == 29:
                background.wait_for_background()
                threads, files, before = set(threading.enumerate()), open_files(), resident()
        background.wait_for_background()
        assert len(os.listdir(folder)) == 1
        after = resident()
        assert threads_left(threads) == []  # pyright: ignore[reportPossiblyUnboundVariable]
        new = open_files() - files  # pyright: ignore[reportPossiblyUnboundVariable]
        assert [name for name in new if name.startswith(folder)] == []
        assert new.total() < 50, new  # others may open some; if each save left one, it would be 90
    # If each save kept what it held, it would be 90 times this.
    assert after - before < 50 * nbytes  # pyright: ignore[reportPossiblyUnboundVariable]
