"""Shared reads, in real processes: each reads a part of what several need."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from counting import CountingStore
from ostraka.errors import Damaged, RestoreFailed
from ostraka.layout import plan_restore as plan_share
from ostraka.processes import operation
from ostraka.restoring import share
from ostraka.storage import Traits
from ostraka.testing import FaultyStore, run_processes

MIB = 1 << 20
REMOTE = Traits(is_remote=True)


def counting(path: str, traits: Traits | None = None) -> Any:
    return CountingStore(FaultyStore(path, traits=traits))


def bytes_of(store: CountingStore) -> int:
    return store.bytes_read + sum(store.gotten.values())


def make_values(megabytes: int) -> dict[str, Any]:
    """Arrays of many kinds, the same on all processes."""
    rng = np.random.default_rng(0)
    side = 512
    values: dict[str, Any] = {
        f"w{n}": rng.standard_normal((side, side, megabytes // 2), np.float32) for n in range(2)
    }
    values |= {f"small{n}": rng.standard_normal((64, 64), np.float32) for n in range(40)}
    values["int4"] = rng.integers(-8, 8, (1024, 1000)).astype(ml_dtypes.int4)
    values["odd"] = rng.integers(-8, 8, (7, 11)).astype(ml_dtypes.int4)
    values["bool"] = rng.integers(0, 2, (1 << 20,)).astype(bool)
    values["f8"] = rng.standard_normal((4, 3, 8)).astype(ml_dtypes.float8_e4m3fn)
    values["scalar"] = np.array(3.5, ml_dtypes.bfloat16)
    values["empty"] = np.zeros((0, 4), np.float32)
    return values


def place(values: dict[str, Any], sharding: Any) -> dict[str, Any]:
    """As JAX arrays; `sharding` gives the one for an array."""
    return {
        name: jax.make_array_from_callback(
            value.shape, sharding(value), lambda index, value=value: value[index], dtype=value.dtype
        )
        for name, value in values.items()
    }


def assert_same(found: Any, tree: Any) -> None:
    """Bit for bit, on every device of this process, and in the same shardings."""
    for name, value in tree.items():
        other = found[name]
        if not isinstance(value, jax.Array):
            assert type(other) is type(value), name
            assert np.array_equal(other, value), name
            continue
        assert other.dtype == value.dtype, name
        assert other.sharding == value.sharding, name
        assert other.committed == value.committed, name
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            other, value = jax.random.key_data(other), jax.random.key_data(value)
        for one, two in zip(other.addressable_shards, value.addressable_shards, strict=True):
            assert np.asarray(one.data).tobytes() == np.asarray(two.data).tobytes(), name


def mesh_of(**axes: int) -> Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


def by_axis(axis: int, mesh: Mesh, *axes: str) -> Any:
    """Shard a dimension where it divides; the rest is replicated."""
    parts = int(np.prod([mesh.shape[name] for name in axes]))

    def sharding(value: Any) -> Any:
        at = axis % max(value.ndim, 1)
        fits = value.ndim > at and (at or axis == 0) and value.shape[at] % parts == 0
        return NamedSharding(mesh, P(*[None] * at, axes) if fits else P())

    return sharding


def by_rows(mesh: Mesh, *axes: str) -> Any:
    return by_axis(0, mesh, *axes)


@contextmanager
def small_stages() -> Generator[None]:
    """So that a few megabytes make many stages, and every byte is worth sharing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_share, "STAGE_BYTES", 4 * MIB)
        patch.setattr(plan_share, "BLOCK_BYTES", 1 * MIB)
        patch.setattr(plan_share, "WORTH_BYTES", 1)
        yield


# What comes back


def restore_in_many_ways(path: str) -> dict[tuple[str, str], int]:
    """On 4 processes with 2 devices each; by case, how many bytes this process has read."""
    data, both = mesh_of(data=8), mesh_of(replica=2, fsdp=4)
    crossed = Mesh(np.array(jax.devices()).reshape(4, 2).T, ("fsdp", "replica"))
    values = make_values(16)
    local = SingleDeviceSharding(jax.local_devices()[0])
    trees: dict[str, Any] = {
        "replicated": place(values, by_rows(data)),
        "fsdp x replicas": place(values, by_rows(both, "fsdp")),
        "crossed": place(values, by_rows(crossed, "fsdp")),
        "all cut": place(values, by_rows(data, "data")),
        "local": place(values, lambda value: local),
        "numpy": dict(values),
    }
    some = ("int4", "bool", "odd", "scalar")
    trees["mixed"] = {
        **{name: value for name, value in trees["fsdp x replicas"].items() if name not in some},
        **{name: trees["replicated"][name] for name in some},
        "key": jax.random.key(7),
        "keys": jax.random.wrap_key_data(
            place({"x": np.arange(64, dtype=np.uint32).reshape(32, 2)}, by_rows(data))["x"]
        ),
        "count": np.arange(5),
        "own": np.full(3, jax.process_index()),
        "step": 12,
    }
    counts: dict[tuple[str, str], int] = {}
    for case, tree in trees.items():
        ostraka.save(f"{path}/{case}", tree)
        for stages in (nullcontext, small_stages):
            store = counting(f"{path}/{case}")
            with stages():
                assert_same(ostraka.restore(store, like=tree, share_reads=True), tree)
            counts[case, stages.__name__] = bytes_of(store)
    return counts


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_every_byte_is_read_once_and_comes_back_as_it_was(tmp_path: Path):
    results = run_processes(
        restore_in_many_ways, str(tmp_path), processes=4, devices_per_process=2, timeout_s=600
    )
    for case, stages in results[0].value:
        counts = [result.value[case, stages] for result in results]
        size = size_of(tmp_path / case)
        if case in ("replicated", "crossed", "local", "numpy"):
            assert sum(counts) <= 1.05 * size, (case, stages)
        elif stages == "small_stages":  # Blocks that two share may be read twice.
            assert sum(counts) <= 1.15 * size, (case, stages)
        else:  # What only some share is too small to be worth it.
            assert sum(counts) <= 1.5 * size, (case, stages)
        assert max(counts) <= 1.1 * sum(counts) / 4, (case, stages)


def restore_across(path: str) -> dict[tuple[str, str], int]:
    """What was saved in rows, restored in columns; by case, the bytes this process has read."""
    data, both = mesh_of(data=8), mesh_of(replica=2, fsdp=4)
    crossed = Mesh(np.array(jax.devices()).reshape(4, 2).T, ("fsdp", "replica"))
    some = Mesh(np.array(jax.devices()[2:]), ("data",))  # process 0 has no part in it
    values = make_values(16)
    values["w2"] = np.random.default_rng(1).standard_normal((240, 300, 12), np.float32)
    shardings: dict[str, Any] = {
        "columns": by_axis(-1, data, "data"),
        "columns x replicas": by_axis(-1, both, "fsdp"),
        "crossed": by_axis(-1, crossed, "fsdp", "replica"),
        "other devices": by_axis(-1, some, "data"),
    }
    saved = place(values, by_rows(data, "data"))
    ostraka.save(f"{path}/rows", saved)
    ostraka.save(f"{path}/packed", saved, compress="zstd")
    counts: dict[tuple[str, str], int] = {}
    for name in ("rows", "packed"):
        for case, sharding in shardings.items():
            like = place(values, sharding)
            store = counting(f"{path}/{name}")
            with small_stages() if case == "columns" else nullcontext():
                assert_same(ostraka.restore(store, like=like, share_reads=True), like)
            counts[name, case] = bytes_of(store)
    half = place({"w0": values["w0"].astype(ml_dtypes.bfloat16)}, by_rows(data))
    like = {"w0": jax.ShapeDtypeStruct((512, 512, 8), "bfloat16", sharding=half["w0"].sharding)}
    store = counting(f"{path}/rows", REMOTE)
    with small_stages():
        assert_same(ostraka.restore(store, like=like, dtype="like"), half)
    counts["cast", ""] = bytes_of(store)
    return counts


def test_blocks_that_are_needed_in_part_by_many_are_read_once(tmp_path: Path):
    """And what is shared is cast when it is there."""
    results = run_processes(
        restore_across, str(tmp_path), processes=4, devices_per_process=2, timeout_s=600
    )
    for name, case in results[0].value:
        counts = [result.value[name, case] for result in results]
        size = 8 * MIB if name == "cast" else size_of(tmp_path / name)
        assert sum(counts) <= 1.15 * size, (name, case, counts)


def restore_with_options(path: str, bucket: str) -> dict[str, int]:
    mesh = mesh_of(data=jax.device_count())
    tree = place(make_values(8), by_rows(mesh))
    ostraka.save(f"{path}/1", tree)
    ostraka.save(bucket, tree)
    counts: dict[str, int] = {}

    def restore(name: str, traits: Traits | None = None, **options: Any) -> Any:
        store = counting(f"{path}/1", traits)
        found = ostraka.restore(store, options.pop("like", tree), **options)
        counts[name] = bytes_of(store)
        return found

    assert_same(restore("off", REMOTE, share_reads=False), tree)
    assert_same(restore("directory"), tree)
    assert_same(restore("remote", REMOTE), tree)
    with jax.set_mesh(mesh):
        assert_same(restore("under a mesh", share_reads=True), tree)
    with jax.disable_jit():
        assert_same(restore("without jit", share_reads=True), tree)

    # Not all want the same, or not all would share: nothing is.
    first = jax.process_index() == 0
    found = restore("some", share_reads=True, only="w*" if first else "**")
    assert_same(found, tree)
    assert_same(restore("not all", share_reads=not first), tree)

    # What only process 0 holds does not keep the rest from being shared.
    alone = SingleDeviceSharding(jax.devices()[0])
    value = make_values(8)["bool"]
    like = {**tree, "bool": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=alone)}
    found = restore("one alone", share_reads=True, like=like)
    assert found["bool"].sharding == alone
    if first:
        assert np.array_equal(found["bool"], value)
    assert_same({**found, "bool": tree["bool"]}, tree)

    records: list[Any] = []
    manager = ostraka.Manager(path, read_only=True)
    assert_same(manager.restore(like=tree, share_reads=True, on_record=records.append), tree)
    assert_same(ostraka.restore(bucket, like=tree, on_record=records.append), tree)
    counts["manager"], counts["bucket"] = (record.bytes for record in records)
    return counts


def test_when_reads_are_shared(tmp_path: Path, bucket: str):
    results = run_processes(restore_with_options, str(tmp_path), bucket, processes=2, timeout_s=600)
    size = size_of(tmp_path)
    for case in results[0].value:
        total = sum(result.value[case] for result in results)
        if case in ("manager", "bucket"):
            total = results[0].value[case]  # which a record has of all processes
        if case in ("off", "directory", "some", "not all"):
            assert total > 1.7 * size, case
        else:
            assert total <= (1.15 if case == "one alone" else 1.05) * size, case


def test_one_process_has_nobody_to_share_with(tmp_path: Path):
    tree = place(make_values(8), by_rows(mesh_of(data=8)))
    ostraka.save(tmp_path / "c", tree)
    assert_same(ostraka.restore(tmp_path / "c", like=tree, share_reads=True), tree)


# What goes wrong


def swap(path: str, other: str) -> None:
    """Have the checkpoint at `other` in the place of that at `path`, as a save would."""
    old = [*Path(path).glob("shards-*")]
    for shards in Path(other).glob("shards-*"):
        shutil.copytree(shards, Path(path, shards.name))
    shutil.copy(Path(other, "_METADATA"), Path(path, "_METADATA.new"))
    Path(path, "_METADATA.new").rename(Path(path, "_METADATA"))
    for shards in old:
        shutil.rmtree(shards)


def fail_in_several_ways(path: str, late_s: float) -> dict[str, str]:
    """By case, the error that this process got, or nothing."""
    values = make_values(8)
    tree = place(values, by_rows(mesh_of(data=jax.device_count())))
    changed = place(
        {**values, "w0": values["w0"] + 1, "scalar": values["scalar"] * 2},
        by_rows(mesh_of(data=jax.device_count())),
    )
    for name, saved in (("whole", tree), ("new", changed), ("spoilt", tree), ("lost", tree)):
        ostraka.save(f"{path}/{name}", saved)
    me = jax.process_index()
    if me == 0:
        files = sorted(Path(path, "spoilt").glob("shards-*/shard_00001*"))
        data = bytearray(files[0].read_bytes())
        data[-5] ^= 1
        files[0].write_bytes(data)
        sorted(Path(path, "lost").glob("shards-*/shard_00002*"))[0].unlink()
    errors: dict[str, str] = {}

    def restore(case: str, expected: Any, before: Any = None, at: str = "whole") -> None:
        store = FaultyStore(f"{path}/{at}", before=before)
        try:
            assert_same(ostraka.restore(store, like=tree, share_reads=True), expected)
            errors[case] = ""
        except (Damaged, RestoreFailed) as error:
            errors[case] = f"{type(error).__name__}: {error}"

    def once(verb: str, do: Callable[[], None]) -> Any:
        """On process 1, before it first does that."""
        left = [do] if me == 1 else []
        return lambda doing, name: left.pop()() if doing == verb and left else None

    with small_stages():
        restore("late", tree, once("read_into", lambda: time.sleep(late_s)))
        restore("spoilt", tree, at="spoilt")
        restore("lost", tree, at="lost")
        restore("after that", tree)
        restore("replaced", changed, once("open", lambda: swap(f"{path}/whole", f"{path}/new")))
    return errors


@pytest.mark.parametrize("late_s", [0.2, pytest.param(30.0, marks=pytest.mark.soak)])
def test_no_process_is_left_waiting(tmp_path: Path, late_s: float):
    results = run_processes(fail_in_several_ways, str(tmp_path), late_s, processes=4, timeout_s=900)
    for case in ("late", "after that", "replaced"):
        assert [result.value[case] for result in results] == [""] * 4
    for case, file in (("spoilt", "shard_00001"), ("lost", "shard_00002")):
        errors = sorted(result.value[case] for result in results)
        assert [error.split(":")[0] for error in errors] == ["Damaged"] + 3 * ["RestoreFailed"]
        assert all(file in error for error in errors)


def die_while_reading(path: str, at: str) -> str:
    operation.DEAD_AFTER_S = 5.0
    tree = place(make_values(8), by_rows(mesh_of(data=jax.device_count())))
    ostraka.save(path, tree)
    ostraka.restore(path, like=tree, share_reads=True)

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_on_reading(verb: str, name: str) -> None:
        if verb == "read_into":
            die()

    dies = jax.process_index() == 2
    if dies and at == "gather":
        share._all_gather = die
    store = FaultyStore(path, before=die_on_reading if dies and at == "read" else None)
    try:
        ostraka.restore(store, like=tree, share_reads=True)
    except RestoreFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("at", ["read", "gather"])
def test_a_process_that_is_killed(tmp_path: Path, at: str):
    results = run_processes(
        die_while_reading, str(tmp_path / "c"), at, processes=4, check=False, timeout_s=300
    )
    assert results[2].exit_code == -signal.SIGKILL
    errors = [result.value for result in results if result.process != 2]
    if at == "read":
        assert all("process 2" in error for error in errors), results
    assert all(errors), results


# Which reads are shared by default


MANY_HOSTS = {
    "aabb": (4.0, 2.0),  # Two hosts: each process reads all that it needs.
    "abcd": (1.1, 2.1),  # Four need the same, or only two do.
}
"""By the host of each process, how often bytes are read: if all need all, if two need each half."""


def read_on_hosts(path: str) -> dict[str, list[int]]:
    """By default, from a directory: the bytes that this process reads."""
    counts: dict[str, list[int]] = {hosts: [] for hosts in MANY_HOSTS}
    for hosts, found in counts.items():
        with pytest.MonkeyPatch.context() as patch, small_stages():
            patch.setattr("socket.gethostname", lambda hosts=hosts: hosts[jax.process_index()])
            for shardings in (
                by_rows(mesh_of(data=4)),
                by_rows(mesh_of(replica=2, fsdp=2), "fsdp"),
            ):
                tree = place(make_values(16), shardings)
                store = counting(path)
                assert_same(ostraka.restore(store, like=tree), tree)
                found.append(bytes_of(store))
    return counts


def test_what_many_hosts_need_is_shared_from_a_directory(tmp_path: Path):
    ostraka.save(tmp_path / "c", make_values(16))
    size = size_of(tmp_path / "c")
    results = run_processes(read_on_hosts, str(tmp_path / "c"), processes=4)
    for hosts, most in MANY_HOSTS.items():
        for number, times in enumerate(most):
            read = sum(result.value[hosts][number] for result in results) / size
            assert times - 0.3 < read < times + 0.3, (hosts, number, read)
