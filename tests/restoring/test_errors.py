"""What goes wrong in a user's hands: the right exception, one sentence, with the path in it."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from mounts import mounted
from ostraka import errors
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    Damaged,
    InvalidSharding,
    InvalidTree,
    LostBox,
    Mismatch,
    NotACheckpoint,
    OstrakaError,
    PathInTheWay,
    Problem,
    RepairFailed,
    RestoreFailed,
    SaveFailed,
    StoreError,
    UnsupportedFormat,
    problems_from_json,
    problems_to_json,
)
from places import BucketPath, Place


def struct(*shape: int, dtype: Any = np.float32, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def mesh_of(*sizes: int, names: str = "xy") -> Mesh:
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), tuple(names[: len(sizes)]))


def assert_one_sentence(error: BaseException, *parts: object) -> None:
    """One line, no full stop inside, not too long to read, with all `parts` in it."""
    text = str(error)
    assert "\n" not in text
    assert not re.search(r"[.!?] +[A-Z]", text), text
    assert not text.endswith((".", " ", ":")), text
    assert "Errno" not in text
    assert "Traceback" not in text
    # The paths themselves may be long.
    assert len(text) < 240 + sum(len(str(part)) for part in parts), text
    for part in parts:
        assert str(part) in text


# `like` does not fit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    ostraka.save(
        path,
        {
            "dense": {"kernel": jnp.ones((6, 4)), "bias": jnp.zeros(4, jnp.bfloat16)},
            "key": jax.random.key(0),
            "step": 3,
            "name": "ostrakon",
            "rate": np.float32(0.5),
        },
    )
    return path


def fitting() -> dict[str, Any]:
    return {
        "dense": {"kernel": struct(6, 4), "bias": struct(4, dtype=jnp.bfloat16)},
        "key": jax.random.key(1),
        "step": 0,
        "name": "",
        "rate": np.float32(0),
    }


def differences(path: Place, like: Any, **options: Any) -> list[str]:
    with pytest.raises(Mismatch, match=re.escape(str(path))) as caught:
        ostraka.restore(path, like=like, **options)
    assert isinstance(caught.value, ValueError)
    for line in caught.value.differences:
        assert line in str(caught.value)
    return list(caught.value.differences)


def test_what_fits(model: Place):
    tree = ostraka.restore(model, like=fitting())
    assert tree["step"] == 3
    assert tree["name"] == "ostrakon"
    assert tree["dense"]["kernel"].tolist() == np.ones((6, 4)).tolist()


def test_a_missing_leaf_and_its_nearest_name(model: Place):
    like = fitting()
    like["dense"]["kernal"] = like["dense"].pop("kernel")
    found = differences(model, like)
    assert len(found) == 2
    assert "'dense/kernal' is not in the checkpoint" in found[0]
    assert "did you mean 'dense/kernel'?" in found[0]
    assert "'dense/kernel'" in found[1]
    assert "not in `like`" in found[1]


def test_a_missing_leaf_like_no_other(model: Place):
    like = fitting()
    like["dense"]["zzzzzzzz"] = struct(1)
    (found,) = differences(model, like)
    assert "'dense/zzzzzzzz'" in found
    assert "did you mean" not in found


def test_an_extra_leaf(model: Place):
    like = fitting()
    del like["dense"]["bias"]
    (found,) = differences(model, like)
    assert "'dense/bias'" in found
    assert "not in `like`" in found


@pytest.mark.parametrize(
    ("where", "wanted", "parts"),
    [
        ("kernel", struct(4, 6), ["'dense/kernel'", "shape (6, 4)", "(4, 6)"]),
        ("kernel", struct(24), ["'dense/kernel'", "shape (6, 4)", "(24,)"]),
        ("kernel", struct(6, 4, dtype=np.float16), ["'dense/kernel'", "float32", "float16"]),
        ("bias", struct(4), ["'dense/bias'", "bfloat16", "float32"]),
        ("bias", np.zeros(4, np.float32), ["'dense/bias'", "bfloat16", "float32"]),
        ("kernel", jax.random.key(0), ["'dense/kernel'", "float32[6,4]", "PRNG key"]),
        ("kernel", "text", ["'dense/kernel'", "float32[6,4]", "str", "'text'"]),
        ("kernel", 1.5, ["'dense/kernel'", "float32[6,4]", "float", "'1.5'"]),
        ("kernel", None, ["'dense/kernel'", "float32[6,4]", "None"]),
    ],
)
def test_another_shape_dtype_or_kind(model: Place, where: str, wanted: Any, parts: list[str]):
    like = fitting()
    like["dense"][where] = wanted
    (found,) = differences(model, like)
    for part in parts:
        assert part in found


@pytest.mark.parametrize(
    ("where", "wanted", "parts"),
    [
        ("step", "3", ["'step'", "the int '3'", "the str '3'"]),
        ("step", 3.0, ["'step'", "the int '3'", "the float '3.0'"]),
        ("step", True, ["'step'", "the int '3'", "the bool 'True'"]),
        ("step", None, ["'step'", "the int '3'", "None"]),
        ("step", struct(2, dtype=np.int32), ["'step'", "the int '3'", "int32[2]"]),
        ("name", 1, ["'name'", "the str 'ostrakon'", "the int '1'"]),
        ("name", struct(2), ["'name'", "the str 'ostrakon'", "float32[2]"]),
        ("key", struct(2, dtype=np.uint32), ["'key'", "threefry2x32 key", "uint32[2]"]),
        ("key", jax.random.key(0, impl="rbg"), ["'key'", "threefry2x32", "rbg"]),
        ("key", jax.random.split(jax.random.key(0), 3), ["'key'", "shape ()", "(3,)"]),
        ("rate", 1, ["'rate'", "float32[]", "the int '1'"]),
    ],
)
def test_another_value(model: Place, where: str, wanted: Any, parts: list[str]):
    (found,) = differences(model, {**fitting(), where: wanted})
    for part in parts:
        assert part in found


def test_another_container(model: Place):
    found = differences(model, {**fitting(), "dense": [struct(6, 4), struct(4)]})
    assert len(found) == 4
    assert "'dense/0' is not in the checkpoint" in found[0]


def test_all_differences_at_once(model: Place):
    like = fitting()
    like["dense"]["kernel"] = struct(6, 5)
    like["dense"]["bias"] = struct(4, dtype=np.float16)
    like["nome"] = like.pop("name")
    like["step"] = "three"
    with pytest.raises(Mismatch, match="for 4 reasons|for 5 reasons") as caught:
        ostraka.restore(model, like=like)
    head, *lines = str(caught.value).splitlines()
    assert str(model) in head
    assert len(lines) == len(caught.value.differences)
    text = str(caught.value)
    for part in ("'dense/kernel'", "'dense/bias'", "'nome'", "did you mean 'name'?", "'step'"):
        assert part in text


def test_one_difference_is_one_sentence(model: Place):
    like = fitting()
    like["dense"]["kernel"] = struct(6, 5)
    with pytest.raises(Mismatch, match="`like` does not fit checkpoint") as caught:
        ostraka.restore(model, like=like)
    assert_one_sentence(caught.value, model, "dense/kernel")


def test_many_differences_stay_readable(place: Place):
    path = place / "many"
    ostraka.save(path, {"layers": [np.zeros(2) for _ in range(300)]})
    with pytest.raises(Mismatch, match=r"'layers/0': saved with .* \(and so 299 more") as caught:
        ostraka.restore(path, like={"layers": [np.zeros(3) for _ in range(300)]})
    assert len(str(caught.value).splitlines()) == 1
    shapes = [np.zeros(3 + number) for number in range(300)]
    with pytest.raises(Mismatch, match="for 300 reasons") as caught:
        ostraka.restore(path, like={"layers": shapes})
    assert len(caught.value.differences) == 300
    assert len(str(caught.value).splitlines()) < 60
    assert "and 250 more" in str(caught.value)


# Shardings that don't fit


def saved_on(mesh: Mesh, place: Place, spec: P, *shape: int) -> Place:
    path = place / "sharded"
    array = jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, spec))
    ostraka.save(path, {"a": array})
    return path


def placing_problems(path: Place, **options: Any) -> list[str]:
    with pytest.raises(Mismatch, match=re.escape(str(path))) as caught:
        ostraka.restore(path, **options)
    return list(caught.value.differences)


def test_an_axis_that_the_mesh_lacks(place: Place):
    path = saved_on(mesh_of(4, 2), place, P("x", "y"), 8, 8)
    (found,) = placing_problems(path, mesh=mesh_of(8, names="x"))
    assert "'a', dimension 1" in found
    assert "no axis 'y'" in found
    assert "x=8" in found


def test_an_axis_in_specs_that_the_mesh_lacks(place: Place):
    path = saved_on(mesh_of(4, 2), place, P("x", "y"), 8, 8)
    (found,) = placing_problems(path, mesh=mesh_of(4, 2), specs={"a": P("z")})
    assert "'a', dimension 0" in found
    assert "no axis 'z'" in found


def test_a_dimension_that_does_not_divide(place: Place):
    path = saved_on(mesh_of(2), place, P("x"), 6, 5)
    wanted = {"a": struct(6, 5, sharding=NamedSharding(mesh_of(4), P("x")))}
    for options in ({"like": wanted}, {"mesh": mesh_of(4)}):
        (found,) = placing_problems(path, **options)
        assert "'a', dimension 0" in found
        assert "6 elements do not divide into 4 parts along x" in found


def test_two_axes_that_do_not_divide(place: Place):
    path = saved_on(mesh_of(2), place, P(), 6, 5)
    (found,) = placing_problems(path, mesh=mesh_of(4, 2), specs=P(("x", "y")))
    assert "6 elements do not divide into 8 parts along x × y" in found


@pytest.mark.parametrize("spec", [P(None, None, "x"), P("x", None, None)])
def test_a_spec_with_too_many_entries(place: Place, spec: P):
    path = saved_on(mesh_of(2), place, P("x"), 6, 4)
    placed = {"specs": {"a": NamedSharding(mesh_of(2), spec)}}
    for options in (placed, {"mesh": mesh_of(2), "specs": {"a": spec}}):
        found = placing_problems(path, **options)
        assert "'a' has 2 dimensions (6, 4)" in found[0]
        assert "3 entries" in found[0]


@pytest.mark.parametrize("spec", [P("x", "x"), P(("x", "x"))])
def test_an_axis_used_twice(place: Place, spec: P):
    path = saved_on(mesh_of(2), place, P("x"), 8, 8)
    found = placing_problems(path, mesh=mesh_of(2), specs={"a": spec})
    assert any("'a'" in line and "axis 'x' is used twice" in line for line in found)


def test_specs_without_a_mesh(place: Place):
    path = saved_on(mesh_of(2), place, P("x"), 8)
    (found,) = placing_problems(path, like={"a": struct(8)}, specs=P("x"))
    assert "'a'" in found
    assert "pass mesh=" in found


def test_specs_that_name_no_leaf(place: Place):
    path = saved_on(mesh_of(2), place, P("x"), 8)
    (found,) = placing_problems(path, mesh=mesh_of(2), specs={"b": P("x")})
    assert "specs has 'b', which is no leaf" in found


def test_an_abstract_mesh_without_devices(place: Place):
    path = saved_on(mesh_of(2), place, P("x"), 8)
    abstract = NamedSharding(mesh_of(2).abstract_mesh, P("x"))
    (found,) = placing_problems(path, like={"a": struct(8, sharding=abstract)})
    assert "'a'" in found
    assert "abstract mesh" in found
    assert "pass mesh=" in found


def test_shardings_and_shapes_at_once(place: Place):
    path = place / "several"
    zeros = np.zeros((6, 4), np.float32)
    ostraka.save(path, {"tree": {"a": zeros, "b": zeros, "c": zeros}})
    like = {
        "tree": {
            "a": struct(6, 4, sharding=NamedSharding(mesh_of(4), P("x"))),
            "b": struct(6, 5),
            "d": struct(1),
        }
    }
    found = differences(path, like)
    assert len(found) == 4
    assert "do not divide" in "\n".join(found)
    assert "shape (6, 4)" in "\n".join(found)


# A part of what was saved


def test_parts_of_a_dict_of_several_things(place: Place):
    path = place / "parts"
    ostraka.save(
        path,
        {"model": {"w": np.ones(3)}, "optimizer": {"mu": {"w": np.zeros(3)}}, "step": 7},
    )
    assert (
        ostraka.restore(path, like={"model": {"w": np.zeros(3)}})["model"]["w"].tolist() == [1] * 3
    )
    assert ostraka.restore(path, like={"step": 0}) == {"step": 7}
    two = ostraka.restore(path, like={"step": 0, "model": {"w": np.zeros(3)}})
    assert list(two) == ["step", "model"]


def test_parts_of_a_part(place: Place):
    """Below the top level everything counts."""
    path = place / "parts"
    ostraka.save(path, {"model": {"w": np.ones(3), "b": np.ones(1)}, "step": 7})
    (found,) = differences(path, {"model": {"w": np.zeros(3)}})
    assert "'model/b'" in found


def test_an_array_left_out_of_a_flat_dict(place: Place):
    path = place / "flat"
    ostraka.save(path, {"kernel": np.ones(3), "bias": np.ones(1), "step": 3})
    restored = ostraka.restore(path, like={"kernel": np.zeros(3)})
    assert list(restored) == ["kernel"]
    assert np.array_equal(restored["kernel"], np.ones(3))


def test_an_array_left_out_further_down(place: Place):
    path = place / "deep"
    ostraka.save(path, {"dense": {"kernel": np.ones(3), "bias": np.ones(1)}})
    (found,) = differences(path, {"dense": {"kernel": np.zeros(3)}})
    assert "'dense/bias' is in the checkpoint but not in `like`" in found


def test_a_part_that_was_not_saved(place: Place):
    path = place / "parts"
    ostraka.save(path, {"model": {"w": np.ones(3)}, "step": 7})
    (found,) = differences(path, {"modle": {"w": np.zeros(3)}})
    assert "'modle/w' is not in the checkpoint" in found
    assert "did you mean 'model/w'?" in found


# 64 bits


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.complex128])
def test_64_bit_leaves_without_x64(place: Place, dtype: Any):
    path = place / "wide"
    value = np.array([1, 2**53 + 1 if np.dtype(dtype).kind in "iu" else 0.1], dtype)
    with jax.enable_x64(True):
        ostraka.save(path, {"a": jnp.asarray(value)})
    name = np.dtype(dtype).name
    with pytest.raises(
        Mismatch, match=f"saved as {name}, which JAX would cut to 32 bits"
    ) as caught:
        ostraka.restore(path)
    assert_one_sentence(caught.value, path, "jax_enable_x64")
    with pytest.raises(Mismatch, match=f"saved as {name}"):
        ostraka.restore(path, like={"a": struct(2, dtype=np.float32)})
    as_numpy = ostraka.restore(path, like={"a": np.zeros(2, dtype)})["a"]
    assert as_numpy.tobytes() == value.tobytes()
    with jax.enable_x64(True):
        back = ostraka.restore(path)["a"]
        assert back.dtype == dtype
        assert np.asarray(back).tobytes() == value.tobytes()


# Paths


VALUE = {"a": np.arange(5), "b": 2}


def assert_restores(path: Any) -> None:
    tree = ostraka.restore(path)
    assert tree["a"].tolist() == [0, 1, 2, 3, 4]
    assert tree["b"] == 2
    assert ostraka.verify(path).ok
    assert ostraka.open(path)["a"][1:3].tolist() == [1, 2]


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for path in ("here", "./there", "new/deeper/down", Path("as/path")):
        ostraka.save(path, VALUE)
        assert_restores(path)
        assert_restores(tmp_path / path)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert_restores("../here")
    ostraka.save(".", VALUE)
    assert_restores(tmp_path / "sub")


def test_a_relative_path_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    ostraka.save("here", VALUE)
    opened = ostraka.open("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert opened["a"][...].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint") as caught:
        ostraka.restore("here")
    assert_one_sentence(caught.value, tmp_path / "elsewhere" / "here")


@pytest.mark.parametrize(
    "name",
    ["with spaces in it", "ὄστρακα/中文/é", "a%20b", "new\nline", "trailing.", "#?&;*'\"", "-f"],
)
def test_unusual_names(place: Place, name: str):
    if isinstance(place, BucketPath) and set(name) & set("?#\n"):
        with pytest.raises(ValueError, match="the bucket and a prefix only|has a line break"):
            ostraka.save(place / name, VALUE)
        return
    ostraka.save(place / name, VALUE)
    assert_restores(place / name)
    assert_restores(str(place / name))


def test_a_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ostraka.save("~/runs/1", VALUE)
    assert_restores("~/runs/1")
    assert_restores(Path("~/runs/1"))
    assert_restores(tmp_path / "runs" / "1")
    assert not (tmp_path / "~").exists()


def test_a_symbolic_link(tmp_path: Path):
    ostraka.save(tmp_path / "real", VALUE)
    (tmp_path / "latest").symlink_to("real")
    assert_restores(tmp_path / "latest")
    ostraka.save(tmp_path / "latest", VALUE)
    assert (tmp_path / "latest").is_symlink()
    assert_restores(tmp_path / "real")


def test_file_urls(tmp_path: Path):
    ostraka.save(f"file://{tmp_path}/one", VALUE)
    assert_restores(tmp_path / "one")
    assert_restores(f"file://{tmp_path}/one")
    ostraka.save(tmp_path / "with space", VALUE)
    assert_restores((tmp_path / "with space").as_uri())


def test_memory_urls():
    ostraka.save("memory://test-errors/one", VALUE)
    assert_restores("memory://test-errors/one")
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint") as caught:
        ostraka.restore("memory://test-errors/two")
    assert_one_sentence(caught.value, "memory://test-errors/two")


@pytest.mark.parametrize("work", [ostraka.restore, ostraka.open, ostraka.verify])
def test_an_unknown_scheme(work: Any):
    with pytest.raises(UnsupportedFormat, match="gopher://") as caught:
        work("gopher://hole/checkpoint")
    assert isinstance(caught.value, ValueError)
    assert_one_sentence(caught.value, "gopher://hole/checkpoint")


def test_saving_to_an_unknown_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedFormat, match="gopher://") as caught:
        ostraka.save("gopher://hole/checkpoint", VALUE)
    assert_one_sentence(caught.value, "gopher://hole/checkpoint")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("work", [ostraka.restore, ostraka.open, ostraka.verify])
def test_an_empty_path(work: Any):
    with pytest.raises(ValueError, match="path is empty") as caught:
        work("")
    assert_one_sentence(caught.value)


def test_saving_to_an_empty_path():
    with pytest.raises(ValueError, match="path is empty"):
        ostraka.save("", VALUE)


@pytest.mark.parametrize("path", [None, 3, b"bytes", ["list"]])
def test_what_is_no_path(path: Any):
    with pytest.raises(TypeError, match="path|str|PathLike") as caught:
        ostraka.save(path, VALUE)
    assert_one_sentence(caught.value)


# Nothing there, or something else


READERS = pytest.mark.parametrize(
    "work", [ostraka.restore, ostraka.open, ostraka.verify], ids=["restore", "open", "verify"]
)


@READERS
def test_no_such_directory(place: Place, work: Any):
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at") as caught:
        work(place / "nothing")
    assert isinstance(caught.value, FileNotFoundError)
    assert_one_sentence(caught.value, place / "nothing")


@READERS
def test_an_empty_directory(tmp_path: Path, work: Any):
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at") as caught:
        work(tmp_path)
    assert_one_sentence(caught.value, tmp_path, "_METADATA")
    assert "did you mean" not in str(caught.value)


@READERS
def test_a_directory_of_checkpoints_that_are_no_steps(place: Place, work: Any):
    for name in ("base", "tuned"):
        ostraka.save(place / name, VALUE)
    with pytest.raises(CheckpointNotFound, match="did you mean") as caught:
        work(place)
    assert_one_sentence(caught.value, f"{place}/tuned")


@READERS
def test_a_name_that_is_much_like_one_that_is_there(place: Place, work: Any):
    ostraka.save(place / "finetuned", VALUE)
    with pytest.raises(CheckpointNotFound, match="did you mean 'finetuned'") as caught:
        work(place / "finetune")
    assert_one_sentence(caught.value, place / "finetune")


@READERS
def test_a_name_unlike_those_beside_it(place: Place, work: Any):
    ostraka.save(place / "copied", VALUE)
    with pytest.raises(CheckpointNotFound, match="there is no such directory$"):
        work(place / "nope")


@READERS
def test_a_repo_id_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Any):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFound, match="`hf download meta-llama/Llama-3.1-8B ") as caught:
        work("meta-llama/Llama-3.1-8B")
    assert_one_sentence(caught.value, tmp_path / "meta-llama/Llama-3.1-8B")
    with pytest.raises(CheckpointNotFound, match="there is no such directory$"):
        work("runs/step_7")
    with pytest.raises(UnsupportedFormat, match="run `hf download openai/gpt-oss-20b --local-dir"):
        work("hf://openai/gpt-oss-20b/original")


@READERS
def test_a_step_that_is_not_there(place: Place, work: Any):
    for step in (6, 7):
        ostraka.save(place / f"step_{step}", VALUE)
    with pytest.raises(
        CheckpointNotFound, match="no such directory; the steps in .* are 6, 7$"
    ) as c:
        work(place / "8")
    assert_one_sentence(c.value, place / "8")


@READERS
def test_a_directory_without_steps(place: Place, work: Any):
    (place / "config.json").write_text("{}")
    (place / "step_7").mkdir()
    with pytest.raises(CheckpointNotFound, match="and there are no steps in it") as caught:
        work(place)
    assert_one_sentence(caught.value, place, "_METADATA")


@READERS
def test_a_shard_of_a_checkpoint(place: Place, work: Any):
    ostraka.save(place / "checkpoint", {"x": np.arange(3)})
    shard = min((place / "checkpoint").glob("shards-*/shard_*"))
    with pytest.raises(NotACheckpoint, match="it is a part of .*checkpoint; give that") as caught:
        work(shard)
    assert_one_sentence(caught.value, shard)


@READERS
def test_a_safetensors_file_of_another_name(place: Place, work: Any):
    from safetensors.numpy import save

    (place / "model.bin").write_bytes(save({"x": np.arange(3)}))
    with pytest.raises(NotACheckpoint, match="looks like a safetensors file, and its") as caught:
        work(place / "model.bin")
    assert_one_sentence(caught.value, place / "model.bin", "rename it")


@READERS
def test_a_pipe(tmp_path: Path, work: Any):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotACheckpoint, match="is a file, not a checkpoint directory") as caught:
        work(tmp_path / "pipe")
    assert_one_sentence(caught.value, tmp_path / "pipe")


@READERS
def test_a_directory_of_some_safetensors_files(place: Place, work: Any):
    from safetensors.numpy import save

    (place / "model-00001-of-00002.safetensors").write_bytes(save({"x": np.arange(3)}))
    (place / "config.json").write_text("{}")
    with pytest.raises(Damaged, match="model-00002-of-00002.safetensors: it is missing") as caught:
        work(place)
    assert_one_sentence(caught.value, place)


@READERS
def test_a_file(place: Place, work: Any):
    (place / "file").write_text("no checkpoint")
    with pytest.raises(NotACheckpoint, match="is a file") as caught:
        work(place / "file")
    assert isinstance(caught.value, ValueError)
    assert_one_sentence(caught.value, place / "file")


@READERS
def test_below_a_file(place: Place, work: Any):
    (place / "file").write_text("no checkpoint")
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint") as caught:
        work(place / "file" / "below")
    assert_one_sentence(caught.value, place / "file" / "below")


@READERS
def test_the_metadata_file_itself(place: Place, work: Any):
    """A path one level too deep."""
    ostraka.save(place / "checkpoint", VALUE)
    with pytest.raises(NotACheckpoint, match="is a file") as caught:
        work(place / "checkpoint" / "_METADATA")
    assert_one_sentence(caught.value, place / "checkpoint" / "_METADATA")


@READERS
def test_an_unfinished_save(place: Place, work: Any):
    path = place / "checkpoint"
    ostraka.save(path, VALUE)
    (path / "_METADATA").unlink()
    with pytest.raises(CheckpointNotFound, match="never finished") as caught:
        work(path)
    assert_one_sentence(caught.value, path, "_METADATA")


@READERS
@pytest.mark.parametrize("content", ["", "{}", "[]", "no JSON", '{"format": "other"}', "\0" * 99])
def test_the_metadata_of_something_else(place: Place, work: Any, content: str):
    (place / "_METADATA").write_text(content)
    (place / "data").write_text("data")
    with pytest.raises(NotACheckpoint, match="not an Ostraka checkpoint") as caught:
        work(place)
    assert_one_sentence(caught.value, place)


@pytest.fixture(scope="module")
def orbax_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Place:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    path = tmp_path_factory.mktemp("orbax") / "checkpoint"
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"a": np.arange(4.0)})
    return path


def test_verifying_an_orbax_checkpoint(orbax_checkpoint: Place):
    with pytest.raises(UnsupportedFormat, match="it has no digests to compare with") as caught:
        ostraka.verify(orbax_checkpoint)
    assert_one_sentence(caught.value, orbax_checkpoint)


@READERS
def test_an_orbax_checkpoint_of_another_form(tmp_path: Path, work: Any):
    (tmp_path / "_METADATA").write_text("{}")
    (tmp_path / "manifest.ocdbt").write_text("")
    with pytest.raises(NotACheckpoint, match="is an Orbax checkpoint in a form that") as caught:
        work(tmp_path)
    assert_one_sentence(caught.value, tmp_path, "restore it with Orbax")


@READERS
def test_a_directory_of_orbax_checkpoints_that_are_no_steps(orbax_checkpoint: Place, work: Any):
    above = orbax_checkpoint.parent
    with pytest.raises(NotACheckpoint, match="none of which is a finished step") as caught:
        work(above)
    assert_one_sentence(caught.value, above, f"such as {above}/checkpoint")


@READERS
def test_a_part_of_an_orbax_checkpoint(tmp_path: Path, work: Any):
    (tmp_path / "metadata").write_text("{}")
    (tmp_path / "commit_success.txt").write_text("")
    with pytest.raises(NotACheckpoint, match="is a part of an Orbax checkpoint") as caught:
        work(tmp_path)
    assert_one_sentence(caught.value, tmp_path, "give the directory above it")


def test_saving_over_an_orbax_checkpoint(orbax_checkpoint: Place):
    before = sorted(p.name for p in orbax_checkpoint.iterdir())
    with pytest.raises(PathInTheWay, match=re.escape(str(orbax_checkpoint))) as caught:
        ostraka.save(orbax_checkpoint, VALUE)
    assert_one_sentence(caught.value, orbax_checkpoint)
    assert sorted(p.name for p in orbax_checkpoint.iterdir()) == before


# Places that can't be saved to


def test_a_directory_with_other_things(place: Place):
    (place / "thesis.tex").write_text("years of work")
    with pytest.raises(PathInTheWay, match="other things in it") as caught:
        ostraka.save(place, VALUE)
    assert isinstance(caught.value, FileExistsError)
    assert_one_sentence(caught.value, place, "thesis.tex")
    assert [p.name for p in place.iterdir()] == ["thesis.tex"]


def test_a_directory_of_checkpoints_is_in_the_way(place: Place):
    ostraka.save(place / "step_1", VALUE)
    with pytest.raises(PathInTheWay, match="step_1"):
        ostraka.save(place, VALUE)
    assert_restores(place / "step_1")


def test_foreign_metadata_is_in_the_way(place: Place):
    (place / "_METADATA").write_text('{"tree_metadata": {}}')
    with pytest.raises(PathInTheWay, match="did not write") as caught:
        ostraka.save(place, VALUE)
    assert_one_sentence(caught.value, place)
    assert (place / "_METADATA").read_text() == '{"tree_metadata": {}}'


def test_a_file_in_the_way(tmp_path: Path):
    (tmp_path / "file").write_text("keep me")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "file" / "a" / "b"):
        with pytest.raises(PathInTheWay, match="in the way") as caught:
            ostraka.save(path, VALUE)
        assert_one_sentence(caught.value, path)
    assert (tmp_path / "file").read_text() == "keep me"


def test_a_dangling_link_in_the_way(tmp_path: Path):
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(PathInTheWay, match="in the way") as caught:
        ostraka.save(tmp_path / "link", VALUE)
    assert_one_sentence(caught.value, tmp_path / "link")


def test_an_empty_directory_is_not_in_the_way(place: Place):
    ostraka.save(place, VALUE)
    assert_restores(place)


def test_leftovers_are_not_in_the_way(place: Place):
    path = place / "checkpoint"
    ostraka.save(path, VALUE)
    (path / "_METADATA").unlink()
    ostraka.save(path, VALUE)
    assert len(list(path.iterdir())) == 2
    assert_restores(path)


def test_a_checkpoint_with_a_note_beside_it(place: Place):
    """What a user put into a checkpoint's directory survives an overwrite."""
    path = place / "checkpoint"
    ostraka.save(path, VALUE)
    (path / "README").write_text("best run")
    ostraka.save(path, VALUE)
    assert (path / "README").read_text() == "best run"
    assert_restores(path)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory with a checkpoint that nobody can write to, not even root."""
    place = tmp_path / "read-only"
    if os.getuid() != 0:
        ostraka.save(place / "checkpoint", VALUE)
        for directory in (place / "checkpoint", place):
            directory.chmod(0o555)
        yield place
        for directory in (place, place / "checkpoint"):
            directory.chmod(0o755)
        return
    with mounted(place, options="rw", for_what="a read-only disk"):
        ostraka.save(place / "checkpoint", VALUE)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        yield place


def test_a_read_only_place(read_only: Path):
    assert_restores(read_only / "checkpoint")
    for path in (read_only / "checkpoint", read_only / "new", read_only / "new" / "deeper"):
        with pytest.raises(StoreError, match="Read-only file system|Permission denied") as caught:
            ostraka.save(path, VALUE)
        assert isinstance(caught.value, OSError)
        assert caught.value.errno
        assert_one_sentence(caught.value, path)
    assert_restores(read_only / "checkpoint")


def test_a_name_that_is_too_long(tmp_path: Path):
    path = tmp_path / ("x" * 300)
    with pytest.raises(StoreError, match="name too long") as caught:
        ostraka.save(path, VALUE)
    assert_one_sentence(caught.value, path)
    with pytest.raises((StoreError, CheckpointNotFound), match="x" * 300) as caught:
        ostraka.restore(path)
    assert_one_sentence(caught.value, path)


def test_a_null_byte_in_a_path(tmp_path: Path):
    with pytest.raises(ValueError, match="null"):
        ostraka.save(f"{tmp_path}/a\0b", VALUE)


# Trees that can't be saved


class Thing:
    pass


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"a": {"b": Thing()}}, ["'a/b'", "Thing"]),
        ({"a": {1, 2}}, ["'a'", "set"]),
        ({"a": np.array(["x"])}, ["'a'", "dtype"]),
        ({"a": np.array([None])}, ["'a'", "object"]),
        ({"a": struct(2)}, ["'a'", "abstract"]),
        ({"a": {frozenset(): 2}}, ["'a'", "frozenset"]),
        ({"a": int}, ["'a'", "class int itself"]),
        ({"a": {0: 1, "0": 2}}, ["'a/0'"]),
    ],
)
def test_what_can_not_be_saved(place: Place, tree: Any, parts: list[str]):
    with pytest.raises(InvalidTree, match=re.escape(parts[0])) as caught:
        ostraka.save(place / "new", tree)
    assert isinstance(caught.value, TypeError)
    assert_one_sentence(caught.value, *parts)
    assert list(place.iterdir()) == []


def test_a_donated_array(place: Place):
    array = jnp.ones(4)
    array.delete()
    with pytest.raises(InvalidTree, match="'a/0' has been deleted or donated") as caught:
        ostraka.save(place / "new", {"a": [array]})
    assert_one_sentence(caught.value)
    assert list(place.iterdir()) == []


def test_a_traced_array(place: Place):
    with pytest.raises(InvalidTree, match="'a' is a traced value") as caught:
        jax.jit(lambda x: ostraka.save(place / "new", {"a": x}))(1.0)
    assert_one_sentence(caught.value, "jit")
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("tree", [{"a": 1}, np.ones(2), len], ids=["dict", "array", "function"])
def test_arguments_that_are_swapped(tmp_path: Path, tree: Any):
    for call in (ostraka.save, ostraka.save_async, ostraka.restore):
        for path in (tmp_path / "c", str(tmp_path / "c")):
            match = rf"arguments are swapped: the path comes first, as in {call.__name__}\(path, "
            with pytest.raises(TypeError, match=match) as caught:
                call(tree, path)
            assert_one_sentence(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_callback_that_is_none(tmp_path: Path):
    """It would be noticed only after the commit, and only in the log."""
    odd: Any = "no function"
    for options in ({"on_record": odd}, {"on_commit": odd}):
        with pytest.raises(TypeError, match=r"on_\w+ must be a function, not 'no function'"):
            ostraka.save_async(tmp_path / "c", VALUE, **options).wait()
    with pytest.raises(TypeError, match="on_record must be a function"):
        ostraka.save(tmp_path / "c", VALUE, on_record=odd)
    assert list(tmp_path.iterdir()) == []


def test_a_call_inside_jit(tmp_path: Path):
    """Also if no leaf is traced: it would run once, while the function is compiled."""
    array, key = jnp.ones(2), jax.random.key(0)
    ostraka.save(tmp_path / "c", {"a": array, "k": key})
    for call, name in (
        (lambda x: ostraka.save(tmp_path / "new", {"a": np.ones(2)}), "save"),
        (lambda x: ostraka.save(tmp_path / "new", {"a": array, "k": key}), "save"),
        (lambda x: ostraka.save_async(tmp_path / "new", {"k": key}), "save"),
        (lambda x: ostraka.restore(tmp_path / "c"), "restore"),
        (lambda x: ostraka.restore(tmp_path / "c", like={"a": x, "k": key}), "restore"),
        (lambda x: ostraka.restore(tmp_path / "c", like={"a": struct(2), "k": key}), "restore"),
        (lambda x: ostraka.restore(tmp_path / "c", into={"a": x, "k": key}), "restore"),
    ):
        for transform in (jax.jit, lambda f: lambda x: jax.eval_shape(f, x)):
            with pytest.raises(InvalidTree, match=f"{name} is called inside jit") as caught:
                transform(call)(array)
            assert_one_sentence(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_call_inside_grad_and_vmap_that_knows_its_values(tmp_path: Path):
    array = jnp.ones(2)

    def loss(x: jax.Array) -> jax.Array:
        ostraka.save(tmp_path / "c", {"a": array})
        return (x * ostraka.restore(tmp_path / "c", like={"a": array})["a"]).sum()

    assert jax.grad(loss)(array).tolist() == [1, 1]
    assert jax.vmap(loss)(array).tolist() == [2, 2]


@pytest.mark.parametrize("metadata", [{"a": Thing()}, {"a": float("nan")}, {"a": b"x"}])
def test_metadata_that_is_not_json(place: Place, metadata: Any):
    with pytest.raises(InvalidTree, match="metadata must be JSON") as caught:
        ostraka.save(place / "new", VALUE, metadata=metadata)
    assert_one_sentence(caught.value)
    assert list(place.iterdir()) == []


def test_a_leaf_that_is_not_there(model: Place):
    with pytest.raises(KeyError, match="did you mean 'dense/kernel'") as caught:
        ostraka.open(model)["dense/kernle"]
    assert str(model) in str(caught.value)


# The exceptions themselves


def raised(work: Any, *args: Any, **options: Any) -> OstrakaError:
    with pytest.raises(OstrakaError, match=r"\w") as caught:
        work(*args, **options)
    return caught.value


BUILTIN = {
    InvalidTree: TypeError,
    Mismatch: ValueError,
    InvalidSharding: ValueError,
    CheckpointNotFound: FileNotFoundError,
    NotACheckpoint: ValueError,
    PathInTheWay: FileExistsError,
    UnsupportedFormat: ValueError,
    StoreError: OSError,
    Busy: OSError,
    Damaged: ValueError,
    SaveFailed: RuntimeError,
    RestoreFailed: RuntimeError,
    RepairFailed: RuntimeError,
}


def examples() -> dict[str, OstrakaError]:
    problems = [Problem("f", "it is missing", ("a", "b")), Problem("g", "too long")]
    full = errors.store_error("write", "/x", OSError(28, "No space left on device"))
    return {
        "plain": OstrakaError("plain"),
        "tree": InvalidTree("leaf 'a' is odd"),
        "mismatch": Mismatch("`like` does not fit /x", ["one", "two"]),
        "sharding": InvalidSharding("no axis"),
        "not found": CheckpointNotFound("there is none at /x"),
        "no checkpoint": NotACheckpoint("/x is a file"),
        "in the way": PathInTheWay("/x is in the way"),
        "unsupported": UnsupportedFormat("version 9"),
        "store": full,
        "busy": Busy("another save to /x"),
        "damaged": Damaged("/x", problems),
        "save": SaveFailed("/x", 3, "StoreError: no space"),
        "save, one process": SaveFailed("/x", None, "StoreError: no space"),
        "restore": RestoreFailed("/x", 0, "it is gone"),
        "repair": RepairFailed("/x", 1, "it is gone"),
    }


def test_the_tree_of_exceptions():
    for kind, builtin in BUILTIN.items():
        assert issubclass(kind, OstrakaError)
        assert issubclass(kind, builtin)
        assert kind.__name__ in errors.__all__
        assert kind.__doc__
        # The picture at the top of the file says the same.
        assert re.search(
            rf"[├└]── {kind.__name__} .*\(.*{builtin.__name__}\)", errors.__doc__ or ""
        )
    classes = {getattr(errors, name) for name in errors.__all__}
    warnings = {errors.PartialRestore, errors.DegradedRead}
    others = {OstrakaError, Problem, errors.LostBox, errors.Preempted}
    assert classes == {*BUILTIN, *others, *warnings}


def test_being_preempted_is_no_error():
    assert not issubclass(errors.Preempted, Exception)  # `except Exception` must let it pass
    preempted = pickle.loads(pickle.dumps(errors.Preempted("step 7 is saved")))
    assert (str(preempted), preempted.code) == ("step 7 is saved", 143)
    ended = subprocess.run(
        [sys.executable, "-c", "import ostraka; raise ostraka.errors.Preempted('told')"],
        check=False,
        capture_output=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, b"", b"")


@pytest.mark.parametrize("name", examples())
@pytest.mark.parametrize(
    "duplicate",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_exceptions_survive_a_copy(name: str, duplicate: Any):
    error = examples()[name]
    twin = duplicate(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert repr(twin) == repr(error)
    assert vars(twin) == vars(error)
    for attribute in ("errno", "filename"):
        assert getattr(twin, attribute, None) == getattr(error, attribute, None)


def test_raised_exceptions_survive_a_pickle(tmp_path: Path, model: Place):
    found = [
        raised(ostraka.restore, tmp_path / "nothing"),
        raised(ostraka.restore, model, like={"dense": 1}),
        raised(ostraka.save, model / "_METADATA", VALUE),
        raised(ostraka.save, tmp_path / ("x" * 300), VALUE),
        raised(ostraka.save, tmp_path / "a", {"a": Thing()}),
    ]
    for error in found:
        twin = pickle.loads(pickle.dumps(error))
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
        assert getattr(twin, "errno", None) == getattr(error, "errno", None)


def test_what_was_added_to_a_message_survives_a_pickle():
    error = Damaged("/x", [Problem("a", "it is missing")])
    error.args = (f"{error}; the step before it is 2",)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_problems_that_are_sent_to_another_process_arrive_whole_and_once():
    lost = LostBox("w", ((0, 2), (1, 3)), (4, 3))
    problem = Problem("d/s", "it is missing", ("w",), (lost,), (8, 24), 3, "node7")
    unknown = Problem("_METADATA", "it is cut short")
    sent = json.loads(json.dumps(problems_to_json([problem, unknown, problem])))
    assert problems_from_json(sent) == (problem, unknown)


def test_a_process_failure_names_the_process():
    assert "process 3" in str(SaveFailed("/x", 3, "why"))
    assert "process" not in str(SaveFailed("/x", None, "why"))
    error = RestoreFailed("/x", 0, "why")
    assert (error.path, error.process, error.cause) == ("/x", 0, "why")
    assert "process 0" in str(error)
    assert_one_sentence(error, "/x", "why")


def test_single_device_targets_have_no_axis_to_miss(place: Place):
    path = saved_on(mesh_of(4, 2), place, P("x", "y"), 8, 8)
    device = SingleDeviceSharding(jax.devices()[3])
    like: Any = {"a": struct(8, 8, sharding=device)}
    back = ostraka.restore(path, like=like)["a"]
    assert back.devices() == {jax.devices()[3]}


@pytest.mark.parametrize("metadata", [{1: 2}, {"t": (1, 2)}, {"n": {3: "x"}}])
def test_metadata_that_json_would_change_is_refused(metadata: dict[Any, Any], place: Place):
    with pytest.raises(errors.InvalidTree, match="metadata must be JSON as it is"):
        ostraka.save(place / "checkpoint", {"x": 1}, metadata=metadata)
