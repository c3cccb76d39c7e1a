"""`ostraka.copy`: the same bytes in another store, all or nothing, and going on after anything."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ostraka
from cli_runs import flip
from ostraka import Manager
from ostraka.errors import (
    Busy,
    CheckpointNotFound,
    Damaged,
    NotACheckpoint,
    PathInTheWay,
    StoreError,
)
from ostraka.storage import MemoryStore, Store, Traits, claimed, open_store
from ostraka.testing import FaultyStore
from ostraka.transfer import _copy_ostraka as _files
from runs import contents

IN_ORDER = Traits(in_any_order=False)


def tree_of(number: int = 0, rows: int = 8) -> dict[str, Any]:
    """Eight shards and a file of host arrays, of `rows` × 512 KiB and as much again."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    value = np.arange(rows * (1 << 17), dtype=np.float32).reshape(rows, -1) + number
    sharded = jax.device_put(value, NamedSharding(mesh, PartitionSpec("x")))
    return {"sharded": sharded, "host": value, "small": np.arange(7) + number, "rate": float("nan")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "checkpoint"
    ostraka.save(path, tree_of(), metadata={"run": 1})
    return path


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    """8 MiB in several files, for a test to spoil."""
    return Path(shutil.copytree(made, tmp_path / "checkpoint"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    with Manager(path, every=None, keep=None, asynchronous=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"a": np.full(1000, step)})
        manager.pin(2)
    return path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if files were large: many tasks a file, and blocks that don't fit into a piece."""
    monkeypatch.setattr(_files, "_TASK_BYTES", 1 << 18)
    for name in ("_PASS_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(_files, name, 100_000)


def save_one_file(path: Path, value: np.ndarray) -> None:
    """As an array of one device, for those in host memory are shared out."""
    ostraka.save(path, {"x": jax.device_put(value)}, max_file_bytes="1GB")
    (file,) = path.glob("shards-*/*.safetensors")
    assert file.stat().st_size > value.nbytes


def size_of(path: Any) -> int:
    return sum(map(len, contents(path).values()))


def memory() -> MemoryStore:
    return MemoryStore(f"copies-{uuid.uuid4().hex}")


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# One checkpoint


@pytest.fixture(params=["directory", "memory", "in order", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kinds: dict[str, Callable[[], Any]] = {
        "directory": lambda: tmp_path / "copies",
        "memory": lambda: f"memory://{uuid.uuid4().hex}",
        "in order": lambda: FaultyStore(memory(), traits=IN_ORDER),
        "bucket": lambda: request.getfixturevalue("bucket"),
    }
    return kinds[request.param]()


def below(place: Any, name: str) -> Any:
    return place.at(name) if isinstance(place, Store) else os.path.join(place, name)


def test_a_copy_is_the_same_checkpoint(made: Path, place: Any, tmp_path: Path):
    there = below(place, "there")
    report = ostraka.copy(made, there)
    assert contents(there) == contents(made)
    assert (report.source, report.copied, report.skipped) == (str(made), 1, 0)
    assert (report.bytes_copied, report.bytes_skipped) == (size_of(made), 0)
    assert ostraka.verify(there).ok
    source = FaultyStore(made)
    report = ostraka.copy(source, there)
    assert (report.copied, report.bytes_copied) == (0, 0)
    assert (report.skipped, report.bytes_skipped) == (1, size_of(made))
    assert not any(verb == "open" for verb, _ in source.calls)
    back = tmp_path / "back"
    ostraka.copy(there, back)
    assert contents(back) == contents(made)
    assert np.array_equal(ostraka.restore(back)["sharded"], tree_of()["host"])


@pytest.mark.parametrize("traits", [None, IN_ORDER], ids=["any order", "in order"])
def test_files_in_many_tasks_and_pieces(made: Path, small_pieces: None, traits: Traits | None):
    seen: list[tuple[int, int]] = []
    target = memory()
    ostraka.copy(made, FaultyStore(target, traits=traits), on_bytes=lambda *now: seen.append(now))
    assert contents(target) == contents(made)
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {size_of(made)}
    assert seen[-1] == (size_of(made), size_of(made))


def test_a_large_upload(bucket: str, tmp_path: Path):
    """Of several parts, that wait while others are sent: what waits must not be written over."""
    value = np.random.default_rng(0).integers(0, 255, 40 << 20, dtype=np.uint8)
    save_one_file(tmp_path / "c", value)
    ostraka.copy(tmp_path / "c", f"{bucket}/c")
    assert ostraka.verify(f"{bucket}/c").ok
    ostraka.copy(f"{bucket}/c", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "c")


def test_a_checkpoint_without_arrays(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"step": 3})
    ostraka.copy(tmp_path / "c", tmp_path / "there")
    assert ostraka.restore(tmp_path / "there") == {"step": 3}
    assert ostraka.copy(tmp_path / "c", tmp_path / "there").skipped == 1


def test_memory_is_bounded(tmp_path: Path):
    """However large a file is: bytes that are held are those of a few pieces."""
    save_one_file(tmp_path / "c", np.zeros(128 << 20, np.uint8))
    program = """
import pathlib, re, sys, ostraka
def peak():  # of this program alone: getrusage has that of the one that started it, too
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
ostraka.copy(sys.argv[2], sys.argv[3])
before = peak()
ostraka.copy(sys.argv[1], sys.argv[4])
assert peak() - before < 72 << 10, peak() - before
assert "jax" not in sys.modules
"""
    ostraka.save(tmp_path / "small", {"x": np.zeros(9)})
    names = ["c", "small", "small there", "there"]
    command = [sys.executable, "-c", program, *(str(tmp_path / name) for name in names)]
    subprocess.run(command, check=True)
    assert ostraka.verify(tmp_path / "there").ok


# Again


@pytest.mark.parametrize("verb", ["create", "write", "finish", "put", "publish", "sync"])
def test_a_full_target_and_going_on(made: Path, verb: str):
    below = memory()
    with pytest.raises(OSError, match="No space left"):
        ostraka.copy(made, FaultyStore(below, fail={verb: no_space()}))
    refused = StoreError("can't write there: no permission", errno=errno.EACCES)
    with pytest.raises(StoreError, match="no permission"):
        ostraka.copy(made, FaultyStore(below, fail={verb: refused}))
    assert "_METADATA" not in below.list()
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at"):
        ostraka.open(below)
    ostraka.copy(made, below)
    assert contents(below) == contents(made)


def test_files_that_are_whole_are_kept(made: Path):
    below = memory()
    shards = [name for name in contents(made) if name.endswith(".safetensors")]

    def refuse_last(verb: str, name: str) -> None:
        if verb == "create" and name == shards[-1]:
            raise no_space()

    traits = Traits(at_once=1, in_any_order=False)
    with pytest.raises(OSError, match="No space left"):
        ostraka.copy(made, FaultyStore(below, before=refuse_last, traits=traits))
    kept = sum(len(below.get(file.name)) for file in below.files("shards-"))
    assert kept > 0
    target = FaultyStore(below, traits=traits)
    report = ostraka.copy(made, target)
    assert [name for verb, name in target.calls if verb == "create"] == [shards[-1]]
    # Whoever wrote them may have been killed before they were durable.
    assert {("sync", name) for name in shards[:-1]} <= {*target.calls}
    assert target.calls.index(("sync", shards[0])) < target.calls.index(("put", "_METADATA"))
    assert (report.copied, report.bytes_skipped) == (1, kept)
    assert report.bytes_copied == size_of(made) - kept
    assert contents(below) == contents(made)


def test_a_power_failure_after_a_copy(made: Path, tmp_path: Path):
    there = FaultyStore(tmp_path / "there")
    ostraka.copy(made, there)
    assert there.calls.index(("sync", "")) < there.calls.index(("put", "_METADATA"))
    there.lose_unsynced()
    # But for the second copy of `_METADATA`, which no promise depends on.
    safe = {name: data for name, data in contents(made).items() if "metadata.json" not in name}
    assert safe.items() <= contents(tmp_path / "there").items()
    assert ostraka.verify(tmp_path / "there").ok


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda data: data[:-1],
        lambda data: data + b"x",
        None,
    ],
    ids=["byte", "shorter", "longer", "strange"],
)
def test_files_that_are_not_whole_are_copied_again(made: Path, tmp_path: Path, spoil: Any):
    there = Path(shutil.copytree(made, tmp_path / "there"))
    (there / "_METADATA").unlink()
    shard = max(there.glob("shards-*/*.safetensors"))
    kept = sum(path.stat().st_size for path in made.glob("shards-*/*.safetensors"))
    if spoil is None:  # of a `put` that was killed
        (shard.parent / "process_00000.json.0123abcd.tmp").write_bytes(b"{}")
    else:
        kept -= shard.stat().st_size
        shard.write_bytes(spoil(shard.read_bytes()))
    assert ostraka.copy(made, there).bytes_skipped == kept
    assert contents(there) == contents(made)


KILLED = """
import os, signal, sys, ostraka
from ostraka.testing import FaultyStore
left = [int(sys.argv[3])]
def before(verb, name):
    if verb in ("create", "write", "finish", "put", "publish", "sync"):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
ostraka.copy(sys.argv[1], FaultyStore(sys.argv[2], before=before))
"""


def kill_copy(source: Path, target: Any, moment: int) -> None:
    command = [sys.executable, "-c", KILLED, str(source), str(target), str(moment)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", [1, 2, 5, 9, 14, 20, -1, -2, -3])
def test_killed_copies_are_finished_by_the_next(made: Path, tmp_path: Path, moment: int):
    """From the first verb to the last: those below 0 count from the end."""
    counted = FaultyStore(tmp_path / "counted")
    ostraka.copy(made, counted)
    verbs = ("create", "write", "finish", "put", "publish", "sync")
    count = sum(verb in verbs for verb, _ in counted.calls)
    there = tmp_path / "there"
    kill_copy(made, there, moment if moment > 0 else count + 1 + moment)
    assert not (there / "_METADATA").exists()
    ostraka.copy(made, there)
    assert contents(there) == contents(made)


def test_a_copy_to_a_bucket_that_was_killed(
    made: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ostraka.storage._claim.DEAD_AFTER_S", 2.0)
    kill_copy(made, f"{bucket}/there", 8)
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at"):
        ostraka.open(f"{bucket}/there")
    ostraka.copy(made, f"{bucket}/there")
    assert contents(f"{bucket}/there") == contents(made)


def test_leftovers_of_other_saves_go(made: Path, place: Any):
    there = below(place, "there")
    writer = open_store(there).create("shards-0123456789abcdef/shard_00000.safetensors", 1)
    writer.write(0, [b"x"])
    writer.finish()
    ostraka.copy(made, there)
    assert contents(there) == contents(made)


# What is not copied


@pytest.mark.parametrize("pieces", ["usual", "small"])
def test_a_damaged_source(
    checkpoint: Path, place: Any, pieces: str, request: pytest.FixtureRequest
):
    """A block may not fit into a piece."""
    if pieces == "small":
        request.getfixturevalue("small_pieces")
    flip(checkpoint)
    there = below(place, "there")
    with pytest.raises(Damaged, match="'(host|sharded|small)'.* are not as they were written"):
        ostraka.copy(checkpoint, there)
    assert contents(there) == {}


@pytest.mark.parametrize("what", ["_METADATA", "process_00000.json", "shard_00003", "header"])
def test_other_damage(checkpoint: Path, tmp_path: Path, what: str):
    pattern = {"_METADATA": what, "header": "shards-*/shard_00000*"}.get(what, f"shards-*/{what}*")
    (file,) = checkpoint.glob(pattern)
    if what == "shard_00003":
        file.unlink()
    else:
        data = file.read_bytes()
        file.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    with pytest.raises(Damaged, match=file.name):
        ostraka.copy(checkpoint, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_reads_that_are_cut_short(made: Path, tmp_path: Path):
    with pytest.raises(Damaged, match="it ends at byte"):
        ostraka.copy(FaultyStore(made, cut_reads_bytes=1000), tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_target_that_is_damaged(made: Path, tmp_path: Path):
    there = Path(shutil.copytree(made, tmp_path / "there"))
    next(there.glob("shards-*/shard_00002*")).unlink()
    with pytest.raises(Damaged, match=r"there is damaged: .*shard_00002.*: it is missing"):
        ostraka.copy(made, there)
    assert len(contents(there)) == len(contents(made)) - 1


def test_other_things_in_the_target(made: Path, root: Path, checkpoint: Path, tmp_path: Path):
    ostraka.save(tmp_path / "there", {"a": 1})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for source, target, told in [
        (made, "mine", r"other things in it \(.*notes.txt"),
        (made, "mine/notes.txt", "a file of that name"),
        (made, "there", "has another checkpoint, which a copy does not replace"),
        (made, "runs", r"a path of its own, as .*/runs/checkpoint"),
        (root, "checkpoint", "give a directory for its steps"),
    ]:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(PathInTheWay, match=told):
            ostraka.copy(source, tmp_path / target)
        assert sorted(tmp_path.rglob("*")) == before
    assert ostraka.restore(tmp_path / "there") == {"a": 1}


@pytest.mark.parametrize("source", ["made", "root"])
def test_onto_and_into_itself(source: str, request: pytest.FixtureRequest):
    path = request.getfixturevalue(source)
    before = sorted(path.rglob("*"))
    with pytest.raises(PathInTheWay, match="can't be copied onto itself"):
        ostraka.copy(path, path)
    with pytest.raises(PathInTheWay, match="can't be copied to .*/below, which is inside it"):
        ostraka.copy(path, path / "below")
    assert sorted(path.rglob("*")) == before


def test_stores_of_one_name_on_two_servers(made: Path, tmp_path: Path):
    target = FaultyStore(tmp_path / "there")
    target.location = str(made)
    ostraka.copy(open_store(made), target)
    assert contents(tmp_path / "there") == contents(made)


def test_nothing_to_copy(tmp_path: Path):
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at"):
        ostraka.copy(tmp_path / "nothing", tmp_path / "there")
    (tmp_path / "orbax" / "7").mkdir(parents=True)
    (tmp_path / "orbax" / "7" / "_METADATA").write_text("{}")
    with pytest.raises(NotACheckpoint, match="was written by something else"):
        ostraka.copy(tmp_path / "orbax", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_target_where_a_save_is_under_way(made: Path, tmp_path: Path):
    there = tmp_path / "there"
    there.mkdir()
    with claimed(open_store(there)), pytest.raises(Busy, match="is under way"):
        ostraka.copy(made, there)
    ostraka.copy(made, there)
    assert contents(there) == contents(made)


def test_two_copies_at_once(made: Path):
    """The second finds the place taken, and spoils nothing."""
    below = memory()
    refused: list[str] = []

    def copy_too(verb: str, name: str) -> None:
        if verb == "finish" and not refused:
            with pytest.raises(Busy, match="is under way") as caught:
                ostraka.copy(made, below)
            refused.append(str(caught.value))

    ostraka.copy(made, FaultyStore(below, before=copy_too, traits=Traits(at_once=1)))
    assert refused
    assert contents(below) == contents(made)


def test_a_copy_that_was_taken_for_dead_deletes_nothing(checkpoint: Path):
    """It finds damage, in its last file, after another has taken its place."""
    last = max(checkpoint.glob("shards-*/*.safetensors"))
    data = last.read_bytes()
    last.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    below = memory()
    taken: list[str] = []

    def take_over(verb: str, name: str) -> None:
        if verb == "finish" and not taken:
            taken.append(name)
            below.delete(below.files("_CLAIM-")[0].name)

    traits = Traits(at_once=1, in_any_order=False)
    with pytest.raises(Damaged, match=last.name):
        ostraka.copy(checkpoint, FaultyStore(below, before=take_over, traits=traits))
    assert below.look(taken[0]) is not None


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("shards-", "which this copy has written, .*; copy again"),
        ("_CLAIM-", "took this one for dead"),
    ],
)
def test_files_that_another_removes_before_the_commit(made: Path, lost: str, told: str):
    below = memory()

    def remove(verb: str, name: str) -> None:
        if (verb, name) == ("put", "_METADATA"):
            below.delete(below.files(lost)[-1].name)

    with pytest.raises(Busy, match=told):
        ostraka.copy(made, FaultyStore(below, before=remove))
    assert "_METADATA" not in below.list()


# A source that changes


def test_a_source_that_is_replaced_meanwhile(checkpoint: Path, tmp_path: Path):
    replaced: list[int] = []

    def replace(verb: str, name: str) -> None:
        if verb == "open" and not replaced:
            replaced.append(1)
            ostraka.save(checkpoint, tree_of(5))

    report = ostraka.copy(FaultyStore(checkpoint, before=replace), tmp_path / "there")
    assert replaced
    assert contents(tmp_path / "there") == contents(checkpoint)
    assert report.bytes_copied == size_of(checkpoint)
    assert np.array_equal(ostraka.restore(tmp_path / "there")["host"], tree_of(5)["host"])


def test_a_source_that_is_removed_meanwhile(checkpoint: Path, tmp_path: Path):
    def remove(verb: str, name: str) -> None:
        if verb == "open" and checkpoint.exists():
            shutil.rmtree(checkpoint)

    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at"):
        ostraka.copy(FaultyStore(checkpoint, before=remove), tmp_path / "there")
    assert not (tmp_path / "there").exists()


# Steps


def test_all_steps(root: Path, place: Any):
    there = below(place, "there")
    report = ostraka.copy(root, there)
    assert (report.source, report.copied) == (str(root), 3)
    pin = "step_00000002/_PINNED"
    assert contents(there) == {k: v for k, v in contents(root).items() if k != pin}
    manager = Manager(there, read_only=True)
    assert manager.steps() == [1, 2, 3]
    assert manager.restore(2)["a"].tolist() == [2] * 1000


def test_only_new_steps_are_copied(root: Path, tmp_path: Path):
    (root / "step_00000009" / "shards-0123456789abcdef").mkdir(parents=True)
    (root / "notes").mkdir()
    assert ostraka.copy(root, tmp_path / "there").copied == 3
    with Manager(root, every=None, keep=None, asynchronous=False) as manager:
        manager.save(4, {"a": np.zeros(9)})
    seen: list[tuple[int, int]] = []
    report = ostraka.copy(root, tmp_path / "there", on_bytes=lambda *now: seen.append(now))
    assert sorted(os.listdir(tmp_path / "there")) == [f"step_0000000{n}" for n in (1, 2, 3, 4)]
    assert (report.copied, report.skipped) == (1, 3)
    assert report.bytes_copied == size_of(root / "step_00000004")
    total = report.bytes_copied + report.bytes_skipped
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    report = ostraka.copy(root / "2", tmp_path / "one")  # a step by its number
    assert report.source == str(root / "step_00000002")
    assert ostraka.restore(tmp_path / "one")["a"][0] == 2


def test_a_damaged_step_does_not_keep_the_others_from_being_copied(root: Path, tmp_path: Path):
    flip(root / "step_00000001")
    (root / "step_00000002" / "_METADATA").write_bytes(b'{"format":"ostraka"')
    with pytest.raises(Damaged, match=r"step_00000001/shards-.* are not as they were") as caught:
        ostraka.copy(root, tmp_path / "there")
    files = [problem.file.split("/")[0] for problem in caught.value.problems]
    assert sorted(files) == ["step_00000001", "step_00000002"]
    assert caught.value.path == str(root)
    assert Manager(tmp_path / "there", read_only=True).steps() == [3]
    assert sorted(os.listdir(tmp_path / "there")) == ["step_00000003"]


def test_a_step_that_the_run_deletes_meanwhile(root: Path, tmp_path: Path):
    def remove(verb: str, name: str) -> None:
        if verb == "open" and name.startswith("step_00000002"):
            shutil.rmtree(root / "step_00000002", ignore_errors=True)

    report = ostraka.copy(FaultyStore(root, before=remove), tmp_path / "there")
    assert report.copied == 2
    assert Manager(tmp_path / "there", read_only=True).steps() == [1, 3]
