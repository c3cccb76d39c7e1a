"""Repair from the live model of several processes, in a directory and in a bucket."""

import errno
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from numbered import caught
from ostraka.errors import OstrakaError
from ostraka.storage import open_store
from ostraka.testing import FaultyStore, run_processes

PROCESSES, DEVICES = 4, 2
COUNT = PROCESSES * DEVICES


def make_tree(*, turned: bool = False) -> dict[str, Any]:
    """Sharded, replicated and packed arrays, keys, numpy arrays, and what each process has."""
    rng = np.random.default_rng(3)
    devices = np.array(jax.devices())
    mesh = Mesh(devices[::-1] if turned else devices, ("x",))

    def place(value: np.ndarray, *axes: Any) -> jax.Array:
        sharding = NamedSharding(mesh, P(*axes))
        return jax.make_array_from_callback(
            value.shape, sharding, lambda index: value[index], dtype=value.dtype
        )

    keys = jax.random.key_data(jax.random.split(jax.random.key(1), COUNT))
    return {
        "large": place(rng.standard_normal((COUNT, 270_000)).astype(np.float32), "x"),
        "columns": place(rng.standard_normal((6, 2 * COUNT)).astype(np.float32), None, "x"),
        "half": place(rng.standard_normal((COUNT, 9)).astype(ml_dtypes.bfloat16), "x"),
        "int4": place(rng.integers(-8, 8, (COUNT, 3)).astype(ml_dtypes.int4), "x"),
        "replicated": place(rng.standard_normal((COUNT * 40, 100)).astype(np.float32)),
        "keys": jax.random.wrap_key_data(place(np.asarray(keys), "x")),
        "numpy": rng.standard_normal(30_000),
        "mine": np.full(5, jax.process_index(), np.int32),
        "step": 7,
    }


def look_at(path: str) -> dict[str, Any]:
    """By file: its version (on disk its inode and time) and its time, and its bytes."""
    store = open_store(path)
    return {
        file.name: ((file.version, file.changed_s), store.get(file.name))
        for file in store.files("")
        if not file.name.startswith("_CLAIM-")
    }


class Harm:
    """What process 0 does to a checkpoint while the others wait, and what it finds afterwards."""

    def __init__(self, path: str):
        self._path = path
        self._before: dict[str, Any] = {}
        self._lost: list[str] = []
        self._rounds = 0

    def delete(self, *ends: str) -> int:
        """Delete the files whose names end so; returns how many bytes these had."""
        if jax.process_index() == 0:
            self._before = look_at(self._path)
            self._lost = [file for file in self._before if file.endswith(ends)]
            assert len(self._lost) == len(ends)
            for file in self._lost:
                open_store(self._path).delete(file)
        self._wait()
        return sum(len(self._before[file][1]) for file in self._lost)

    def check_unchanged(self) -> None:
        self._wait()
        if jax.process_index() == 0:
            left = {f: seen for f, seen in self._before.items() if f not in self._lost}
            assert look_at(self._path) == left
        self._wait()

    def check_repaired(self) -> None:
        """All is there again, bit for bit, and what was not lost was not touched."""
        self._wait()
        if jax.process_index() == 0:
            after = look_at(self._path)
            assert after.keys() == self._before.keys()
            for file, (times, data) in self._before.items():
                assert after[file][1] == data, file
                assert file in self._lost or after[file][0] == times, file
            assert ostraka.verify(self._path).ok
        self._wait()

    def _wait(self) -> None:
        self._rounds += 1
        multihost_utils.sync_global_devices(f"harm {self._rounds}")


def repair_all(path: str, options: dict[str, Any]) -> None:
    tree = make_tree()
    ostraka.save(path, tree, **options)
    harm = Harm(path)
    nbytes = harm.delete("shard_00005.safetensors")
    columns = NamedSharding(tree["large"].sharding.mesh, P(None, "x"))
    for other, said in (
        (tree["large"] + 1, "trained on.*'large'"),
        (tree["large"][:1], r"'large' has the shape \(1, 270000\), and \(8, 270000\) was saved"),
        (jax.device_put(tree["large"], columns), "leaf 'large' is placed in another way"),
    ):
        with pytest.raises(OstrakaError, match=said):
            ostraka.repair(path, {**tree, "large": other})
    dry = ostraka.repair(path, tree, dry_run=True)
    harm.check_unchanged()

    report = ostraka.repair(path, tree)
    (repaired,) = report.repaired
    assert (repaired.process, repaired.file[-23:]) == (2, "shard_00005.safetensors")
    assert repaired.origins == ("_METADATA", "the live tree")
    assert (dry.repaired, dry.bytes_written) == (report.repaired, 0)
    if jax.process_index() == 0:
        assert report.bytes_written == nbytes
    harm.check_repaired()

    # On other devices, and from two processes at once.
    harm.delete("shard_00001.safetensors", "shard_00003.safetensors")
    report = ostraka.repair(path, make_tree(turned=True))
    assert [file.process for file in report.repaired] == [3, 2]
    harm.check_repaired()

    # Without a copy or parity, the index of compressed files can't be made again.
    lost = ["_METADATA"] if options.get("compress") else ["_METADATA", "process_00001.json"]
    harm.delete(*lost)
    report = ostraka.repair(path, tree)
    assert len(report.repaired) == len(lost)
    assert "never committed" in report.notes[0]
    harm.check_repaired()

    if not options.get("compress"):
        harm.delete("process_00002.json", "shard_00004.safetensors")
        assert len(ostraka.repair(path, tree).repaired) == 2
        harm.check_repaired()

    if "dtype" not in options:
        restored = ostraka.restore(path, like=tree)
        for name in ("large", "columns", "replicated", "numpy", "mine"):
            for one, other in zip(blocks_of(restored[name]), blocks_of(tree[name]), strict=True):
                np.testing.assert_array_equal(one, other)


def blocks_of(array: Any) -> list[np.ndarray]:
    if isinstance(array, np.ndarray):
        return [array]
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def repair_or_fail(path: str) -> str:
    """On process 2 the disk is full."""
    tree = make_tree()
    ostraka.save(path, tree)
    Harm(path).delete("shard_00005.safetensors")
    fail = {"finish": OSError(errno.ENOSPC, "No space left on device")}
    store = FaultyStore(path, fail=fail if jax.process_index() == 2 else {})
    return ": ".join(caught(lambda: ostraka.repair(store, tree)))


def repair_in_every_way(root: str) -> str:
    for number, options in enumerate(({}, {"compress": "zstd"}, {"dtype": "bfloat16"})):
        repair_all(f"{root}/{number}", options)
    return repair_or_fail(f"{root}/fails")


ALL: dict[str, Any] = {"processes": PROCESSES, "devices_per_process": DEVICES}


def test_from_the_live_model(tmp_path: Path):
    for result in run_processes(repair_in_every_way, str(tmp_path), **ALL):
        assert result.value.startswith("RepairFailed: ")
        assert "No space left" in result.value
        assert "on process 2" in result.value
    assert not list(tmp_path.rglob("*.tmp"))


def test_from_the_live_model_in_a_bucket(bucket: str):
    run_processes(repair_all, f"{bucket}/c", {}, **ALL)
