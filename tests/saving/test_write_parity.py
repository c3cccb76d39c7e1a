"""Parity as a save writes it: by one process and by four, from memory or read back, and killed."""

import json
import os
import signal
import warnings
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from safetensors import safe_open

import ostraka
from figures import Figures
from numbered import on_all
from ostraka.errors import Damaged, DegradedRead, SaveFailed, StoreError
from ostraka.saving._write_parity import ParityCompanion
from ostraka.storage import Traits
from ostraka.testing import FaultyStore, run_processes
from places import BucketPath, Place, copy_tree, flip, remove_tree
from same import assert_same, open_at
from test_kill import find_number, kill_saves, make_tree


def tree_on_all(rows: int = 512) -> dict[str, Any]:
    value = np.random.default_rng(5).standard_normal((rows, 300), np.float32)
    return {
        "sharded": on_all(value, "x"),
        "replicated": on_all(value[:31]),
        "own": np.full(50, jax.process_index()),
        "step": 3,
    }


def files_in(path: Any) -> dict[str, bytes]:
    """All but the copy of `_METADATA`, which has the time in it."""
    files = path.glob("shards-*/*")
    return {file.name: file.read_bytes() for file in files if file.name != "metadata.json"}


# From memory, or read back: the same bytes


def saved_files(path: Path, store: Any) -> dict[str, bytes]:
    """Parity files of several blocks, in several groups of the same sizes."""
    tree = {"a": tree_on_all(8 * 4000), "b": tree_on_all(8 * 4000)["sharded"]}
    ostraka.save(store, tree, parity=2, max_file_bytes=5 << 20)
    return {name: data for name, data in files_in(path).items() if "parity" in name}


def test_read_back_or_from_memory_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostraka.saving.agree.secrets.token_hex", lambda n: "ab" * n)
    found: list[dict[str, bytes]] = []
    for way in ("from memory", "read back"):
        if way == "read back":
            monkeypatch.setattr(ParityCompanion, "take_blocks", lambda *_: [])
        for in_any_order in (True, False):
            path = tmp_path / f"{way} {in_any_order}"
            store = FaultyStore(path, traits=Traits(in_any_order=in_any_order))
            found.append(saved_files(path, store))
            if in_any_order:
                read = {name for verb, name in store.calls if verb == "read_into"}
                assert any("shard_" in name for name in read) == (way == "read back")
    assert sum(len(data) > 4 << 20 for data in found[0].values()) == 4
    assert found == [found[0]] * 4


def test_a_save_fails_with_its_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(verb: str, name: str) -> None:
        if verb == "finish" and "parity" in name:
            raise StoreError("no room for parity")

    def spoil(verb: str, name: str) -> None:
        if verb == "put" and "process_" in name:
            flip(next((tmp_path / "c").glob("shards-*/shard_00004*")), -1)

    ostraka.save(tmp_path / "c", {"a": 1})
    for before, said in (
        (refuse, "no room for parity"),
        (spoil, r"can't read back .*shard_00004.*not as they were"),
    ):
        with pytest.raises(SaveFailed, match=said):
            ostraka.save(FaultyStore(tmp_path / "c", before=before), tree_on_all(9000), parity=1)
        assert ostraka.restore(tmp_path / "c") == {"a": 1}
        assert len(list((tmp_path / "c").iterdir())) == 1  # no shards are left
        monkeypatch.setattr(ParityCompanion, "take_blocks", lambda *_: [])  # it is read back


def test_parity_files_are_safetensors(tmp_path: Path) -> None:
    ostraka.save(tmp_path / "c", tree_on_all(), parity=1)
    shards = next((tmp_path / "c").glob("shards-*"))
    with safe_open(shards / "parity_00000.safetensors", "numpy") as file:
        about = json.loads(file.metadata()["ostraka_parity"])
        parity, index = file.get_tensor("parity"), file.get_tensor("process_00000.json")
    assert index.tobytes() == (shards / "process_00000.json").read_bytes()
    expected = np.zeros_like(parity)
    for name, size in about["members"]:
        data = np.fromfile(shards / name, np.uint8)
        assert len(data) == size
        expected[: len(data)] ^= data
    assert np.array_equal(parity, expected)


def test_small_and_odd_trees(tmp_path: Path) -> None:
    for number, tree in enumerate(
        (
            {"only": "values"},
            {"a": np.arange(3)},
            {"empty": np.zeros((0, 3))},
            {"keys": jax.random.key(3), "int4": jnp.ones((5, 3), jnp.int4)},
            [np.full((100, 100), n, np.float32) for n in range(9)],
        )
    ):
        path = tmp_path / str(number)
        ostraka.save(path, tree, parity=2)
        assert ostraka.verify(path).ok
        for file in path.glob("shards-*/shard_00000*"):
            file.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegradedRead)
            assert_same(ostraka.restore(path), tree)


def test_a_save_without_parity_has_none_of_it(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "c")
    ostraka.save(store, tree_on_all())
    assert not any("parity" in name or verb == "read_into" for verb, name in store.calls)
    assert b"parity" not in (tmp_path / "c" / "_METADATA").read_bytes()


def test_in_the_background_and_by_a_manager(tmp_path: Path) -> None:
    live = {"weights": np.arange(1_000_000), "large": np.zeros(3_000_000, np.uint8)}
    handle = ostraka.save_async(tmp_path / "c", live, parity=1)
    live["weights"][:] = -1
    handle.wait()
    for file in (tmp_path / "c").glob("shards-*/shard_00000*"):
        file.unlink()
    with pytest.warns(DegradedRead):
        assert np.array_equal(ostraka.restore(tmp_path / "c")["weights"], np.arange(1_000_000))
    with ostraka.Manager(tmp_path / "runs", parity=1, keep=1, mirror=tmp_path / "mirror") as runs:
        runs.save(1, live)
        runs.save(2, live, parity=2)
    assert len(list((tmp_path / "runs").glob("*/shards-*/parity_*"))) == 2
    assert len(list((tmp_path / "mirror").glob("step_00000002/shards-*/parity_*"))) == 2
    assert ostraka.verify(tmp_path / "mirror").ok
    with pytest.raises(ValueError, match="parity is 3; it must be 0, 1 or 2"):
        ostraka.save(tmp_path / "d", live, parity=3)
    assert not (tmp_path / "d").exists()


def test_a_power_failure_after_the_save_loses_nothing(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "c")
    ostraka.save(store, tree_on_all(), parity=2)
    store.lose_unsynced()
    assert ostraka.verify(tmp_path / "c").ok


# Four processes


def save_and_restore_among_four(path: str) -> list[tuple[dict[str, int], list[int]]]:
    tree = tree_on_all()
    ostraka.save(f"{path}/one", tree, parity=1)
    ostraka.save(f"{path}/two", tree, parity=2)
    ostraka.save(f"{path}/packed", tree_on_all(8 * 600), parity=1, compress="zstd")
    multihost_utils.sync_global_devices("saved")
    if jax.process_index() == 0:
        copy_tree(Path(path) / "one", Path(path) / "lost")
        lose_process(Path(path) / "lost", 2)
    multihost_utils.sync_global_devices("lost")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegradedRead)
        found = ostraka.restore(f"{path}/lost", like=tree)
    assert_same(local(found), local(tree))
    planned: list[tuple[dict[str, int], list[int]]] = []
    alike = {name: tree[name] for name in ("sharded", "replicated")}
    for count in (1, 2):
        ostraka.save(f"{path}/planned_{count}", alike, parity=count)
        plan = ostraka.plan(alike, parity=count)
        planned.append((plan.files, plan.bytes_by_process))
    return planned


def local(tree: Any) -> Any:
    """The values of a tree that this process has."""
    return jax.tree.map(lambda x: [s.data for s in getattr(x, "addressable_shards", ())] or x, tree)


def read_all(path: Any) -> dict[str, bytes]:
    """What each process had alone is not for a single one to restore: read by name."""
    opened = ostraka.open(path)
    return {name: opened[name][...].tobytes() for name in ("sharded", "replicated", "own")}


def files_of_process(path: Any, process: int) -> list[str]:
    source = open_at(path)
    files = [file.name for file in source.files() if file.process == process]
    return [*files, source.shards.name_of_index(process)]


def lose_process(path: Place, *processes: int) -> None:
    for name in [name for process in processes for name in files_of_process(path, process)]:
        (path / name).unlink()


def test_all_files_of_a_process_may_be_lost(tmp_path: Path) -> None:
    results = run_processes(
        save_and_restore_among_four, str(tmp_path), processes=4, devices_per_process=2
    )
    for result in results:
        for count, (files, by_process) in enumerate(result.value, 1):
            path = tmp_path / f"planned_{count}"
            assert files == {name: len(data) for name, data in files_in(path).items()}
            for process, size in enumerate(by_process):
                names = files_of_process(path, process)
                assert size == sum((path / name).stat().st_size for name in names)
    for name, count in (("one", 1), ("two", 2), ("packed", 1)):
        expected = read_all(tmp_path / name)
        assert ostraka.verify(tmp_path / name).ok
        assert open_at(tmp_path / name).metadata.version == (2 if name == "packed" else 1)
        for lost in combinations(range(4), count):
            copy = tmp_path / "copy"
            copy_tree(tmp_path / name, copy)
            lose_process(copy, *lost)
            with pytest.warns(DegradedRead):
                assert read_all(copy) == expected
            remove_tree(copy)
        lose_process(tmp_path / name, *range(count + 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegradedRead)
            with pytest.raises(
                Damaged, match=r"process_0000\d.json: it is missing|because more is lost"
            ):
                read_all(tmp_path / name)


def save_in_bucket(path: str) -> None:
    ostraka.save(path, tree_on_all(8 * 600), parity=1)


def test_two_processes_in_a_bucket(bucket: str) -> None:
    path = BucketPath(bucket)
    run_processes(save_in_bucket, str(path), processes=2, devices_per_process=2)
    expected = read_all(path)
    lose_process(path, 1)
    with pytest.warns(DegradedRead):
        assert read_all(path) == expected


def save_other_parity(path: str) -> str:
    with pytest.raises(SaveFailed, match="process 1.*metadata and options must be the same"):
        ostraka.save(path, {"a": np.arange(9)}, parity=jax.process_index())
    return "raised"


@pytest.mark.soak
def test_processes_that_do_not_agree(tmp_path: Path) -> None:
    results = run_processes(save_other_parity, str(tmp_path / "c"), processes=2)
    assert [result.value for result in results] == ["raised", "raised"]


# kill -9


MOMENTS = 14
"""At most as many as there are with two parity files of a block each."""


@pytest.mark.parametrize(
    "moments",
    [[2, 9, 12], pytest.param([*range(1, MOMENTS + 1)] * 3, marks=pytest.mark.soak)],
    ids=["few", "42"],
)
def test_killed_while_parity_is_written(
    tmp_path: Path, moments: list[int], figures: Figures
) -> None:
    tally = kill_saves(tmp_path, moments, 12 << 20, 2)
    assert (tally["returned"], sum(tally.values())) == (0, len(moments))
    figures.add("saves killed while parity is written", len(moments))


def save_while_one_dies(path: str) -> str:
    from ostraka.processes import operation

    operation.DEAD_AFTER_S = 5.0

    def die(verb: str, name: str) -> None:
        if verb == "create" and "parity" in name and jax.process_index() > 0:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        ostraka.save(FaultyStore(path, before=die), make_tree(1, 4 << 20), parity=1)
    except SaveFailed as error:
        return str(error)
    return "saved"


@pytest.mark.soak
def test_a_process_is_killed_while_it_writes_parity(tmp_path: Path) -> None:
    ostraka.save(tmp_path / "c", make_tree(0, 4 << 20))
    results = run_processes(
        save_while_one_dies, str(tmp_path / "c"), processes=4, devices_per_process=2, check=False
    )
    said = {result.process: result.value for result in results if result.value is not None}
    killed = {0, 1, 2, 3} - said.keys()
    assert killed
    assert 0 in said
    for text in said.values():
        assert any(f"on process {p}: it has ended, or was killed" in text for p in killed)
    assert find_number(str(tmp_path / "c")) == 0
    assert len(list((tmp_path / "c").iterdir())) == 2
