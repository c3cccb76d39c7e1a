"""Reading a checkpoint bit by bit: indexes, parts of the tree, and saves that come in between."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from cli_runs import Holder, run
from ostraka.errors import Busy, CheckpointNotFound, Damaged
from ostraka.layout.spec import HOST_LOCAL, LeafSpec
from ostraka.reading.lazy import bounding_box
from places import Place
from replacing import replaced_once, saving_in_a_loop


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("lazy") / "tree"
    layers = [
        {"kernel": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32)} for _ in range(3)
    ]
    ostraka.save(path, {"model": {"layers": layers[:2], "head": layers[2]}, "step": 7})
    return path


# Indexes


@pytest.mark.parametrize("step", [1, 3, -1, -5])
def test_an_index_costs_nothing_for_its_length(step: int):
    leaf = LeafSpec("x", "numpy", "int8", (1 << 62,), HOST_LOCAL, ())
    ((start, stop),), _ = bounding_box(leaf, [slice(None, None, step)])
    picked = range(1 << 62)[::step]
    assert (start, stop) == (min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1)


def test_an_empty_array_of_a_long_dimension(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"x": np.zeros((1 << 62, 0), np.int8)})
    found = ostraka.open(tmp_path / "c")["x"]
    assert found[...].shape == found[::-1].shape == (1 << 62, 0)
    assert found[5:9].shape == (4, 0)


# Parts of the tree


def test_a_name_above_leaves_gives_those_below_it(tree: Place):
    checkpoint = ostraka.open(tree)
    model = checkpoint["model"]
    assert isinstance(model, ostraka.Checkpoint)
    assert list(model) == [path[6:] for path in checkpoint if path.startswith("model/")]
    assert len(model) == 6
    assert model.nbytes == 3 * (6 + 3) * 4 == checkpoint.nbytes
    assert model["layers/1"].nbytes == 36
    assert list(model["layers"]["1"]) == list(model["layers/1/"]) == ["kernel", "bias"]
    assert model["layers"]["1"].within == "model/layers/1"
    assert np.array_equal(model["head"]["kernel"][...], np.ones((2, 3)))
    assert model["head/kernel"].path == "model/head/kernel"
    assert (model.path, model.metadata) == (checkpoint.path, checkpoint.metadata)
    assert "model" in checkpoint
    assert "kernel" not in checkpoint


def test_what_is_printed(tree: Place):
    checkpoint = ostraka.open(tree)
    assert repr(checkpoint) == f"<Checkpoint {tree}: 7 leaves, 108 bytes>"
    assert repr(checkpoint["model/head"]) == f"<Checkpoint {tree} 'model/head': 2 leaves, 36 bytes>"
    assert "'model/head/kernel'" in repr(checkpoint.keys())
    assert dict(checkpoint["model/head"].items()).keys() == {"kernel", "bias"}


@pytest.mark.parametrize(
    ("within", "path", "message"),
    [
        ("", "modle", "has no leaf 'modle' .did you mean 'model'"),
        ("", "modle/", "has no leaf 'modle/' .did you mean 'model'"),
        ("", "model/layer", "did you mean 'model/layers'"),
        ("", "model/layers/0/kernle", "did you mean 'model/layers/0/kernel'"),
        ("", "head/kernel", "did you mean 'model/head/kernel'"),
        ("model", "heads", "'model' of .*tree has no leaf 'heads' .did you mean 'head'"),
        ("", "mod", "has no leaf 'mod'"),
        ("", "", "has no leaf ''"),
        ("", 0, "have paths that are text, such as 'model/layers/0/kernel', not 0"),
    ],
)
def test_a_name_that_is_not_there(tree: Place, within: str, path: Any, message: str):
    checkpoint = ostraka.open(tree)
    part = checkpoint[within] if within else checkpoint
    assert path not in part
    with pytest.raises(KeyError, match=message):
        part[path]


# Saves that come in between


def test_a_checkpoint_that_was_replaced_says_so(place: Place, monkeypatch: pytest.MonkeyPatch):
    path = place / "c"
    ostraka.save(path, {"x": np.arange(4)})
    checkpoint = ostraka.open(path)
    with (
        replaced_once(path, {"x": np.arange(4) + 1}, monkeypatch),
        pytest.raises(Busy, match="was replaced by another save since it was opened; open it ag"),
    ):
        checkpoint["x"][...]
    with pytest.raises(Busy, match="was replaced"):
        checkpoint["x"][:2]
    again = ostraka.open(path)
    assert np.array_equal(again["x"][...], np.arange(4) + 1)
    unread = ostraka.open(path)
    ostraka.save(path, {"x": np.arange(4)})
    with pytest.raises(Busy, match="was replaced"):
        np.asarray(unread["x"])


def test_a_checkpoint_that_was_removed_says_so(place: Place):
    with ostraka.Manager(place, asynchronous=False) as manager:
        manager.save(1, {"x": np.arange(4)})
        manager.save(2, {"x": np.arange(4)})
        checkpoint = ostraka.open(place / "1")
        manager.delete(1)
    with pytest.raises(CheckpointNotFound, match="/step_00000001 was removed since it was opened"):
        checkpoint["x"][...]


def test_what_is_really_damaged_stays_damaged(place: Place):
    path = place / "c"
    ostraka.save(path, {"x": np.arange(4)})
    checkpoint = ostraka.open(path)
    next(path.glob("shards-*/shard_*")).unlink()
    with pytest.raises(Damaged, match="it is missing"):
        checkpoint["x"][...]


def test_the_newest_step_beside_a_run_that_keeps_one(place: Place):
    seen: set[str] = set()
    deadline = time.monotonic() + 300
    with saving_in_a_loop(place, "steps"):
        while len(seen) < 20 and time.monotonic() < deadline:
            checkpoint = ostraka.open(place)
            seen.add(checkpoint.path)
            with suppress(CheckpointNotFound):  # deleted since it was opened
                assert f"step_{checkpoint['x'][0]:08d}" == Path(checkpoint.path).name
            shown = run("show", place, "--nan")
            assert shown.exit_code == 0 or "was overwritten 10 times" in shown.stderr
    assert len(seen) == 20


def test_lazy_reads_beside_saves_never_tell_of_damage_nor_mix(place: Place):
    path = place / "c"
    complete = replaced = 0
    deadline = time.monotonic() + 300
    with saving_in_a_loop(path):
        while (complete < 20 or not replaced) and time.monotonic() < deadline:
            checkpoint = ostraka.open(path)
            try:
                both = [checkpoint[name][...] for name in ("x", "y")]
            except Busy:
                replaced += 1
            else:
                assert len(np.unique(both)) == 1
                complete += 1
    assert complete
    assert replaced


# Arrays with several paths


def test_an_array_has_all_of_its_paths(tmp_path: Path):
    x = jnp.arange(15.0).reshape(3, 5)
    tree = {"x": x, "again": {"y": x, "z": x + 1}, "held": Holder(jnp.tanh)}
    ostraka.save(tmp_path / "shared", tree)
    checkpoint = ostraka.open(tmp_path / "shared")
    assert list(checkpoint) == ["x", "again/y", "again/z"]
    assert checkpoint["again/y"].path == "again/y"
    assert np.array_equal(checkpoint["again"]["y"][...], checkpoint["x"][...])
    assert checkpoint.nbytes == 2 * 60
    assert checkpoint["again"].nbytes == 2 * 60
    assert "held/function" not in checkpoint


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "bfloat16", "float8_e4m3fn"])
def test_an_array_is_handed_over_by_dlpack(tmp_path: Path, dtype: str):
    wanted = jnp.arange(12).reshape(3, 4).astype(dtype)
    ostraka.save(tmp_path / "c", {"w": wanted})
    leaf = ostraka.open(tmp_path / "c")["w"]
    taken = jax.dlpack.from_dlpack(leaf)
    assert taken.dtype == wanted.dtype
    assert np.asarray(taken).tobytes() == np.asarray(wanted).tobytes()
    if dtype in ("float32", "int8"):
        np.testing.assert_array_equal(np.from_dlpack(leaf), np.asarray(wanted))
