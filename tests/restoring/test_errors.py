"""What goes wrong in a user's hands: the right exception, one sentence, with the path in it."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save as save_tensors

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
    ReplicasDiffer,
    RestoreFailed,
    ResumeDiverged,
    SaveFailed,
    StoreError,
    UnsupportedFormat,
    problems_from_json,
    problems_to_json,
)
from places import BucketPath, Place


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


# Paths


VALUE = {"a": np.arange(5), "b": 2}


def assert_restores(path: Any) -> None:
    tree = ostraka.restore(path)
    assert tree["a"].tolist() == [0, 1, 2, 3, 4]
    assert tree["b"] == 2
    assert ostraka.verify(path).ok
    assert ostraka.open(path)["a"][1:3].tolist() == [1, 2]


NAMES = ["with spaces in it", "ὄστρακα/中文/é", "a%20b", "new\nline", "trailing.", "#?&;*'\"", "-f"]


def test_unusual_names(place: Place):
    said = "the bucket and a prefix only|has a control character in it"
    for name in NAMES:
        if isinstance(place, BucketPath) and set(name) & set("?#\n"):
            with pytest.raises(ValueError, match=said):
                ostraka.save(place / name, VALUE)
            continue
        ostraka.save(place / name, VALUE)
        assert_restores(place / name)
        assert_restores(str(place / name))


def test_other_names_of_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Relative, below `~`, by a link, and by a URL."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real").mkdir()
    ostraka.save("memory://test-errors/one", VALUE)
    for path, real in (
        ("./new/deeper", tmp_path / "new" / "deeper"),
        ("~/runs/1", tmp_path / "runs" / "1"),
        (Path("~/runs/2"), tmp_path / "runs" / "2"),
        (tmp_path / "link", tmp_path / "real"),
        (f"file://{tmp_path}/one", tmp_path / "one"),
        ((tmp_path / "with space").as_uri(), tmp_path / "with space"),
        ("memory://test-errors/one", "memory://test-errors/one"),
    ):
        ostraka.save(path, VALUE)
        assert_restores(path)
        assert_restores(real)
    assert not (tmp_path / "~").exists()
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint") as caught:
        ostraka.restore("memory://test-errors/two")
    assert_one_sentence(caught.value, "memory://test-errors/two")


READERS = (ostraka.restore, ostraka.open, ostraka.verify)


def save(path: Any) -> None:
    ostraka.save(path, VALUE)


def test_what_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ("gopher://hole/checkpoint", UnsupportedFormat, "gopher://hole/checkpoint"),
        ("", ValueError, "path is empty"),
        *((odd, TypeError, "path|str|PathLike") for odd in (None, 3, b"bytes", ["list"])),
    ]
    for work in (*READERS, save):
        for path, kind, message in wrong:
            with pytest.raises(kind, match=message) as caught:
                work(path)
            assert_one_sentence(caught.value)
    assert list(tmp_path.iterdir()) == []


# Nothing there, or something else


def checkpoints(*names: str) -> Callable[[Place], None]:
    def save_all(place: Place) -> None:
        for name in names:
            ostraka.save(place / name, VALUE)

    return save_all


def files(**contents: str | bytes) -> Callable[[Place], None]:
    """Writes files; in their names `__` is a dot."""

    def write(place: Place) -> None:
        for name, content in contents.items():
            data = content if isinstance(content, bytes) else content.encode()
            (place / name.replace("__", ".")).write_bytes(data)

    return write


def without_steps(place: Place) -> None:
    (place / "config.json").write_text("{}")
    (place / "step_7").mkdir()


def unfinished(place: Place) -> None:
    ostraka.save(place / "c", VALUE)
    (place / "c" / "_METADATA").unlink()


def one_of_two(place: Place) -> None:
    tensors = save_tensors({"x": np.arange(3)})
    (place / "model-00001-of-00002.safetensors").write_bytes(tensors)
    (place / "config.json").write_text("{}")


NO_CHECKPOINT = "there is no checkpoint at"
NOTHING: dict[str, tuple[Callable[[Place], None], str, Any, str]] = {
    "too long": (checkpoints(), "x" * 300, (StoreError, CheckpointNotFound), "x" * 300),
    "nothing": (checkpoints(), "nothing", CheckpointNotFound, NO_CHECKPOINT),
    "no steps by name": (checkpoints("a", "tuned"), "", CheckpointNotFound, "did you mean.*/tuned"),
    "alike": (checkpoints("tuned"), "tune", CheckpointNotFound, "did you mean 'tuned'"),
    "unlike": (checkpoints("copied"), "nope", CheckpointNotFound, "there is no such directory$"),
    "a step": (checkpoints("step_6", "7"), "8", CheckpointNotFound, "; the steps in .* are 6, 7$"),
    "no steps": (without_steps, "", CheckpointNotFound, "_METADATA, and there are no steps in it"),
    "unfinished": (unfinished, "c", CheckpointNotFound, "never finished.* _METADATA"),
    "below a file": (files(file="text"), "file/below", CheckpointNotFound, NO_CHECKPOINT),
    "file": (files(file="text"), "file", NotACheckpoint, "is a file, not a checkpoint"),
    "metadata": (checkpoints("c"), "c/_METADATA", NotACheckpoint, "is a file"),
    "tensors": (
        files(model__bin=save_tensors({"x": np.arange(3)})),
        "model.bin",
        NotACheckpoint,
        "looks like a safetensors file, and its .*rename it",
    ),
    "one of two": (one_of_two, "", Damaged, "model-00002-of-00002.safetensors: it is missing"),
    "Orbax of another form": (
        files(_METADATA="{}", manifest__ocdbt=""),
        "",
        NotACheckpoint,
        "is an Orbax checkpoint in a form that.*restore it with Orbax",
    ),
    "a part of Orbax": (
        files(metadata="{}", commit_success__txt=""),
        "",
        NotACheckpoint,
        "is a part of an Orbax checkpoint.*give the directory above it",
    ),
    **{
        f"metadata {text}": (files(_METADATA=text, a="x"), "", NotACheckpoint, "not an Ostraka che")
        for text in ("", "{}", "[]", "no JSON", '{"format": "other"}', "\0" * 99)
    },
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_there_or_something_else(place: Place, case: str):
    make, name, kind, message = NOTHING[case]
    make(place)
    path = place / name if name else place
    for work in READERS:
        with pytest.raises(kind, match=message) as caught:
            work(path)
        assert_one_sentence(caught.value, path)


def test_no_checkpoint_in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty one, a pipe, a shard, and the id of a repository."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    ostraka.save(tmp_path / "c", {"x": np.arange(3)})
    shard = min((tmp_path / "c").glob("shards-*/shard_*"))
    llama = "meta-llama/Llama-3.1-8B"
    hub = "hf://openai/gpt-oss-20b/original"
    for work in READERS:
        for path, kind, message in (
            (tmp_path / "empty", CheckpointNotFound, "has no _METADATA(?!.*did you mean)"),
            (tmp_path / "pipe", NotACheckpoint, "is a file, not a checkpoint directory"),
            (shard, NotACheckpoint, "it is a part of .*c; give that"),
            (llama, CheckpointNotFound, f"{tmp_path}/{llama}.*`hf download {llama} "),
            ("runs/step_7", CheckpointNotFound, "there is no such directory$"),
            (hub, UnsupportedFormat, "run `hf download openai/gpt-oss-20b --local-dir"),
        ):
            with pytest.raises(kind, match=message) as caught:
                work(path)
            assert_one_sentence(caught.value, path)


def test_an_orbax_checkpoint(tmp_path: Path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    path = tmp_path / "checkpoint"
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"a": np.arange(4.0)})
    before = sorted(p.name for p in path.iterdir())
    with pytest.raises(UnsupportedFormat, match="it has no digests to compare with") as caught:
        ostraka.verify(path)
    assert_one_sentence(caught.value, path)
    with pytest.raises(PathInTheWay, match=re.escape(str(path))) as in_the_way:
        ostraka.save(path, VALUE)
    assert_one_sentence(in_the_way.value, path)
    assert sorted(p.name for p in path.iterdir()) == before
    for work in READERS:
        with pytest.raises(NotACheckpoint, match="none of which is a finished step") as above:
            work(tmp_path)
        assert_one_sentence(above.value, tmp_path, f"such as {tmp_path}/checkpoint")


# Places that can't be saved to


def dangling(place: Any) -> None:
    (place / "link").symlink_to("nowhere")


@pytest.mark.parametrize(
    ("make", "names", "message"),
    [
        (dangling, ["link"], "in the way"),
        (files(thesis__tex="years of work"), [""], "other things in it.*thesis.tex"),
        (checkpoints("step_1"), [""], "step_1"),
        (files(_METADATA='{"tree_metadata": {}}'), [""], "did not write"),
        (files(file="keep me"), ["file", "file/below", "file/a/b"], "in the way"),
    ],
    ids=["link", "others", "checkpoints", "metadata", "file"],
)
def test_what_is_in_the_way(tmp_path: Path, make: Any, names: list[str], message: str):
    make(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for path in (tmp_path / name for name in names):
        with pytest.raises(PathInTheWay, match=message) as caught:
            ostraka.save(path, VALUE)
        assert_one_sentence(caught.value, path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_leftovers_and_a_note_are_not_in_the_way(place: Place):
    """What a user put into a checkpoint's directory survives an overwrite."""
    path = place / "checkpoint"
    ostraka.save(path, VALUE)
    (path / "_METADATA").unlink()
    ostraka.save(path, VALUE)
    assert len(list(path.iterdir())) == 2
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


# Trees that can't be saved


class Thing:
    pass


def test_arguments_that_are_swapped(tmp_path: Path):
    trees: list[Any] = [{"a": 1}, np.ones(2), len]
    for call in (ostraka.save, ostraka.save_async, ostraka.restore):
        match = rf"arguments are swapped: the path comes first, as in {call.__name__}\(path, "
        for tree in trees:
            for path in (tmp_path / "c", str(tmp_path / "c")):
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
        (
            lambda x: ostraka.restore(
                tmp_path / "c", like={"a": jax.ShapeDtypeStruct((2,), np.float32), "k": key}
            ),
            "restore",
        ),
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


def test_metadata_that_is_not_json_or_that_json_would_change(tmp_path: Path):
    values: list[Any] = [Thing(), float("nan"), b"x", (1, 2), {3: "x"}]
    for value in values:
        with pytest.raises(InvalidTree, match="metadata must be JSON") as caught:
            ostraka.save(tmp_path / "new", VALUE, metadata={"a": value})
        assert_one_sentence(caught.value)
        assert ("as it is" in str(caught.value)) == isinstance(value, tuple | dict), value
    assert list(tmp_path.iterdir()) == []


def test_a_leaf_that_is_not_there(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"dense": {"kernel": 1}})
    with pytest.raises(KeyError, match=f"{tmp_path}/c.*did you mean 'dense/kernel'"):
        ostraka.open(tmp_path / "c")["dense/kernle"]


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
    ReplicasDiffer: ValueError,
    ResumeDiverged: ValueError,
    SaveFailed: RuntimeError,
    RestoreFailed: RuntimeError,
    RepairFailed: RuntimeError,
}


def examples() -> dict[str, OstrakaError]:
    problems = [Problem("f", "it is missing", ("a", "b")), Problem("g", "too long")]
    lost = errors.LostBox("w", ((0, 2),), (4,))
    groups = ((errors.Replica(0, 0), errors.Replica(1, 0)), (errors.Replica(2, 1),))
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
        "replicas": ReplicasDiffer("/x", [errors.ReplicaDifference(lost, groups)]),
        "resume": ResumeDiverged("step 3 differs", step=3, cause="the data", leaves=["w"]),
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
    replicas = {errors.Replica, errors.ReplicaDifference}
    assert classes == {*BUILTIN, *others, *replicas, *warnings}


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


def twins_of(error: OstrakaError) -> list[OstrakaError]:
    return [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


def test_exceptions_survive_a_copy(tmp_path: Path):
    found = [
        raised(ostraka.restore, tmp_path / "nothing"),
        raised(ostraka.save, tmp_path / ("x" * 300), VALUE),
        raised(ostraka.save, tmp_path / "a", {"a": Thing()}),
    ]
    longer = examples()["damaged"]
    longer.args = (f"{longer}; the step before it is 2",)
    for error in [*examples().values(), *found, longer]:
        for twin in twins_of(error):
            assert type(twin) is type(error)
            assert (str(twin), repr(twin), vars(twin)) == (str(error), repr(error), vars(error))
            for attribute in ("errno", "filename"):
                assert getattr(twin, attribute, None) == getattr(error, attribute, None)


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
