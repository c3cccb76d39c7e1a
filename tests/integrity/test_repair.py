"""What a checkpoint has lost comes back bit for bit, from wherever it is, or is named."""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import md5
from itertools import product
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import ostraka
from cli_runs import run
from nnx_models import make_block, make_optimizer
from numbered import on_all
from ostraka.errors import Busy, CheckpointNotFound, Damaged, PathInTheWay
from ostraka.integrity.repair._descriptions import usual_e_tag
from ostraka.storage import MemoryStore, Traits, is_claim, open_store
from ostraka.storage.requests import PART_BYTES
from ostraka.testing import FaultyStore
from places import Place, copy_tree, flip, names_of, remove_tree
from runs import Gate, contents

LARGE = 300_000
"""So many float32 numbers of a row have a block of their own."""


def make_tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "large": on_all(rng.standard_normal((8, LARGE)).astype(np.float32), "x"),
        "replicated": on_all(rng.standard_normal((80, 100)).astype(np.float32)),
        "int4": on_all(rng.integers(-8, 8, (8, 3)).astype(ml_dtypes.int4), "x"),
        "empty": on_all(np.empty((0, 8), np.float32), None, "x"),
        "key": jax.random.key(seed),
        "numpy": rng.standard_normal(1000),
        "scalar": np.float64(seed),
        "step": 7,
    }


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    return make_tree()


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> Callable[[str], Path]:
    """A checkpoint of a kind, made once."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "compressed": {"compress": "zstd"},
        "bfloat16": {"dtype": "bfloat16"},
        "level": {"compress": {"large": ("zstd", 7), "**": None}},
    }

    @cache
    def make(kind: str) -> Path:
        path = tmp_path_factory.mktemp(kind) / "c"
        ostraka.save(path, tree, **kinds[kind])
        return path

    return make


@pytest.fixture
def made(request: pytest.FixtureRequest, make: Callable[[str], Path]) -> Path:
    """Plain, unless the test names other kinds."""
    return make(getattr(request, "param", "plain"))


every_kind = pytest.mark.parametrize("made", ["plain", "compressed", "bfloat16"], indirect=True)


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    copy_tree(made, tmp_path / "c")
    return tmp_path / "c"


def shard(path: Place, number: int) -> Any:
    return sorted(path.glob("shards-*/*.safetensors"))[number]


def index(path: Place) -> Any:
    return next(iter(path.glob("shards-*/process_*.json")))


def metadata_copy(path: Path) -> Path:
    return next(iter(path.glob("shards-*/metadata.json")))


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def link_away(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.parent / "nowhere")


HARM: dict[str, Callable[[Any], None]] = {
    "missing": Path.unlink,
    "short": lambda file: os.truncate(file, file.stat().st_size // 2),
    "long": lambda file: file.write_bytes(file.read_bytes() + b"more"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "flipped": lambda file: flip(file, file.stat().st_size - 5),
    "header": lambda file: flip(file, 40),
    "pipe": make_pipe,
    "link": link_away,
}


# From the live tree


@pytest.mark.parametrize(
    ("made", "harm"),
    [
        *(("plain", harm) for harm in HARM),
        *product(["compressed", "bfloat16"], ["missing", "flipped"]),
        ("level", "missing"),
    ],
    indirect=["made"],
)
def test_a_shard_from_the_live_tree(path: Path, tree: Any, made: Path, harm: str):
    lost = shard(path, 3)
    HARM[harm](lost)
    others = [file for file in path.rglob("*") if file.is_file() and file != lost]
    before = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in others}
    planned = ostraka.repair(path, tree, dry_run=True)
    assert (planned.ok, planned.bytes_written) == (True, 0)
    report = ostraka.repair(path, tree)
    assert [file.file for file in report.repaired] == [str(lost.relative_to(path))]
    assert report.repaired == planned.repaired
    assert report.bytes_written == lost.stat().st_size
    assert contents(path) == contents(made)
    assert before == {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in others}
    assert ostraka.verify(path).ok
    assert not ostraka.repair(path).repaired


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda large: large + 1, r"shard_00003.*trained on since.*'large'"),
    (lambda large: large[:, :9], r"'large' has the shape \(8, 9\), and \(8, 300000\) was saved"),
    (lambda large: large.astype(np.int32), r"'large' is int32, and float32 was saved"),
    (lambda large: "a text", "leaf 'large' is not in it"),
]


@every_kind
def test_a_model_that_has_trained_on(path: Path, tree: Any):
    shard(path, 3).unlink()
    before = contents(path)
    for change, message in CHANGES:
        with pytest.raises(Damaged, match=message):
            ostraka.repair(path, {**tree, "large": change(tree["large"])})
        assert contents(path) == before
    # What is lost has nothing to do with the leaf that has changed.
    assert ostraka.repair(path, {**tree, "numpy": tree["numpy"] + 1}).ok


@every_kind
def test_parts_of_a_tree_that_lies_elsewhere(path: Path, tree: Any, made: Path):
    """All on one device, and only what is needed."""
    shard(path, 3).unlink()
    device = jax.devices()[5]
    some = {
        name: jax.device_put(value, device) if isinstance(value, jax.Array) else value
        for name, value in tree.items()
        if name not in ("step", "empty")
    }
    ostraka.repair(path, some)
    assert contents(path) == contents(made)


def test_a_model_and_its_optimizer(tmp_path: Path):
    model = make_block()
    tree = {"model": model, "optimizer": make_optimizer(model), "step": 3}
    path = tmp_path / "c"
    ostraka.save(path, tree)
    before = contents(path)
    for file in (shard(path, 0), index(path)):
        file.unlink()
    assert len(ostraka.repair(path, tree).repaired) == 2
    assert contents(path) == before
    nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model, nnx.Param)))
    shard(path, 0).unlink()
    with pytest.raises(Damaged, match="trained on since"):
        ostraka.repair(path, tree)


# Indexes and `_METADATA`


@every_kind
@pytest.mark.parametrize("lost", ["index", "metadata", "index, metadata"])
def test_what_describes_the_rest(path: Path, made: Path, lost: str):
    is_compressed = '"version":2' in (path / "_METADATA").read_text()
    files = {"index": index(path), "metadata": path / "_METADATA"}
    for harm in ("missing", "flipped", "short"):
        for name in lost.split(", "):
            HARM[harm](files[name])
        if is_compressed and "index" in lost:
            with pytest.raises(Damaged, match="only a copy or parity can give the index"):
                ostraka.repair(path)
        report = ostraka.repair(path, sources=made)
        if lost in files:
            assert {file.file.rpartition("/")[2] for file in report.repaired} == {files[lost].name}
        assert contents(path) == contents(made)


def test_the_e_tag_of_a_file_that_is_lost():
    """The digest of one put, or the digest of the digests of its parts."""
    data = os.urandom(PART_BYTES + 3)
    digests = [md5(data[:PART_BYTES]).digest(), md5(data[PART_BYTES:]).digest()]
    assert usual_e_tag(iter([data[:7], data[7:9]]), 9) == md5(data[:9]).hexdigest()
    assert usual_e_tag(iter([data]), len(data)) == f"{md5(b''.join(digests)).hexdigest()}-2"


@every_kind
def test_an_index_and_a_shard_of_it(path: Path, made: Path, tree: Any):
    is_compressed = '"version":2' in (path / "_METADATA").read_text()
    index(path).unlink()
    if not is_compressed:
        (repaired,) = ostraka.repair(path).repaired
        assert repaired.origins == ("its shards",)
        assert contents(path) == contents(made)
        index(path).unlink()
    shard(path, 3).unlink()
    with pytest.raises(Damaged, match=r"process_00000.json: it is missing, and can't be repaired"):
        ostraka.repair(path)
    if is_compressed:
        return
    with pytest.raises(Damaged, match=r"process_00000.json"):
        ostraka.repair(path, {**tree, "large": tree["large"] + 1})
    assert len(ostraka.repair(path, tree).repaired) == 2
    assert contents(path) == contents(made)


def test_the_copy_of_metadata(path: Path, made: Path):
    """It is compared where it says something, and made again where it does not."""
    copy = metadata_copy(path)
    assert copy.read_bytes() == (path / "_METADATA").read_bytes()
    for offset in (0, 100, copy.stat().st_size - 1):
        flip(copy, offset)
        with pytest.raises(Damaged, match=r"metadata\.json: it is not the copy of _METADATA"):
            ostraka.verify(path)
        (file,) = ostraka.repair(path).repaired
        assert file.file == str(copy.relative_to(path))
        assert contents(path) == contents(made)
    for harm in ("missing", "short", "zeros"):  # as a crash of the machine may leave it
        HARM[harm](copy)
        assert ostraka.verify(path).ok
        assert ostraka.repair(path).repaired
        assert contents(path) == contents(made)


def test_a_place_that_was_never_committed(tmp_path: Path, tree: Any):
    """What a save left that died just before its commit is a checkpoint only if all is there."""
    path = tmp_path / "c"
    killed = FaultyStore(path, before=_die_at_the_commit)
    with suppress(_Died):
        ostraka.save(killed, tree)
    assert "_METADATA" not in names_of(path)
    with pytest.raises(CheckpointNotFound, match="c"):
        ostraka.restore(path)
    left = contents(path)
    shard(path, 3).unlink()
    with pytest.raises(Damaged, match="not all of what it names is there"):
        ostraka.repair(path)
    assert "_METADATA" not in names_of(path)
    report = ostraka.repair(path, tree)
    assert "never committed" in report.notes[0]
    assert "never committed" in str(report)
    assert contents(path).items() >= left.items()
    assert ostraka.verify(path).ok


class _Died(BaseException):
    """As a kill: nothing is cleaned up."""


def _die_at_the_commit(verb: str, name: str) -> None:
    if (verb, name) == ("publish", "_METADATA") or (verb == "delete" and "CLAIM" not in name):
        raise _Died


def test_shards_of_several_saves(tmp_path: Path, tree: Any):
    ostraka.save(tmp_path / "a", tree)
    ostraka.save(tmp_path / "b", make_tree(1))
    (one,) = (tmp_path / "a").glob("shards-*")
    (other,) = (tmp_path / "b").glob("shards-*")
    copy_tree(one, tmp_path / "b" / one.name)
    damaged = (tmp_path / "b" / "_METADATA").read_bytes()
    (tmp_path / "b" / "_METADATA").unlink()
    with pytest.raises(PathInTheWay, match=f"the shards of 2 saves.*{one.name}.*remove"):
        ostraka.repair(tmp_path / "b")
    # A `_METADATA` that is damaged, and still says whose it is, tells which.
    (tmp_path / "b" / "_METADATA").write_bytes(damaged[:-50])
    ostraka.repair(tmp_path / "b")
    assert (tmp_path / "b" / "_METADATA").read_bytes() == damaged
    assert other.is_dir()


# From other copies


@every_kind
def test_from_a_copy(path: Path, made: Path):
    for number in (0, 4, 5):
        shard(path, number).unlink()
    index(path).unlink()
    (path / "_METADATA").unlink()
    metadata_copy(path).unlink()
    report = ostraka.repair(path, sources=made)
    assert len(report.repaired) == 6
    assert contents(path) == contents(made)


def test_from_an_older_step_and_the_live_tree(tmp_path: Path, tree: Any):
    """Blocks of one file from two origins: the older step has what did not change."""
    steps = {1: tree, 2: {**tree, "numpy": tree["numpy"] + 1, "large": tree["large"]}}
    for step, state in steps.items():
        ostraka.save(tmp_path / "runs" / str(step), state)
    path = tmp_path / "runs" / "2"
    before = contents(path)
    number = next(n for n in range(8) if b'"numpy"' in shard(path, n).read_bytes()[:9000])
    shard(path, number).unlink()
    with pytest.raises(Damaged, match=r"leaf .*'numpy'.*it does not have these bytes"):
        ostraka.repair(path, sources=tmp_path / "runs" / "1")
    other = {**steps[2], "large": tree["large"] + 1}
    with pytest.raises(Damaged, match=r"trained on.*'large'"):
        ostraka.repair(path, other)
    report = ostraka.repair(path, other, sources=tmp_path / "runs" / "1")
    assert set(report.repaired[0].origins) == {
        "_METADATA",
        "the live tree",
        str(tmp_path / "runs" / "1"),
    }
    assert contents(path) == before


def test_from_a_mirror(tmp_path: Path, tree: Any):
    with ostraka.Manager(tmp_path / "runs", mirror=tmp_path / "mirror", mirror_every=1) as manager:
        manager.save(1, make_tree(1))
        manager.save(2, tree)
    path = next(iter((tmp_path / "runs").glob("*2")))
    before = contents(path)
    shard(path, 1).unlink()
    with pytest.raises(CheckpointNotFound, match="given as sources="):
        ostraka.repair(path, sources=tmp_path / "nothing")
    report = ostraka.repair(path, sources=[tmp_path / "mirror"])
    assert report.repaired[0].origins[-1] == str(tmp_path / "mirror" / path.name)
    assert contents(path) == before


def test_a_copy_that_is_damaged_too(path: Path, made: Path, tmp_path: Path):
    """Two halves make a whole, as long as some copy has each block."""
    copy_tree(made, tmp_path / "other")
    flip(shard(path, 2), shard(path, 2).stat().st_size - 100)
    flip(shard(tmp_path / "other", 2), 100)
    shard(tmp_path / "other", 3).unlink()
    report = ostraka.repair(path, sources=tmp_path / "other")
    assert report.repaired[0].origins == (str(tmp_path / "other"),)
    assert contents(path) == contents(made)
    ostraka.repair(tmp_path / "other", sources=path)
    assert contents(tmp_path / "other") == contents(made)


@pytest.mark.parametrize(
    "options", [{"parity": 1}, {"parity": 2}, {"parity": 1, "compress": "zstd"}], ids=str
)
def test_from_parity(place: Place, tree: Any, options: dict[str, Any]):
    path, parity = place / "c", options["parity"]
    ostraka.save(path, tree, **options)
    before = contents(path)
    index(path).unlink()
    (repaired,) = ostraka.repair(path).repaired
    assert repaired.origins == ("parity",)
    lost = [shard(path, 8 + parity - 1), *(shard(path, 7 - n) for n in range(parity - 1))]
    for file in [*lost, index(path)]:
        file.unlink()
    assert len(ostraka.repair(path).repaired) == parity + 1
    assert contents(path) == before
    next(iter(path.glob("shards-*/parity_00000.safetensors"))).unlink()
    assert ostraka.repair(path).repaired[0].origins == ("its group",)
    assert contents(path) == before


# The place


@pytest.mark.parametrize("kind", ["bucket", "memory", "in order", "without locks"])
def test_over_stores(made: Path, kind: str, request: pytest.FixtureRequest, tmp_path: Path):
    """All that is lost comes back, and nothing else is written."""
    in_order = Traits(in_any_order=False) if kind == "in order" else None
    store: Any = FaultyStore(tmp_path / "c", has_locks=kind != "without locks", traits=in_order)
    if kind == "bucket":
        store = open_store(f"{request.getfixturevalue('bucket')}/c")
    elif kind == "memory":
        store = MemoryStore(f"repair-{os.urandom(4).hex()}")
    ostraka.copy(made, store)
    before = {file.name: file.version for file in store.files("")}
    lost = [name for name in before if "shard_00002" in name or "process" in name or name[0] == "_"]
    for name in lost:
        store.delete(name)
    report = ostraka.repair(store, sources=[made])
    after = {file.name: file.version for file in store.files("")}
    assert sorted(file.file for file in report.repaired) == sorted(lost)
    assert {name for name in before if after[name] != before[name]} <= {*lost}
    assert contents(store) == contents(made)


def test_one_writer_at_a_time(path: Path, made: Path):
    shard(path, 1).unlink()
    gate = Gate("finish")
    first = threading.Thread(
        target=lambda: ostraka.repair(FaultyStore(path, before=gate), sources=made)
    )
    first.start()
    gate.wait_until_reached()
    others: list[Callable[[], Any]] = [
        lambda: ostraka.repair(path, sources=made),
        lambda: ostraka.repair(path, sources=made, dry_run=True),
        lambda: ostraka.save(path, {"a": np.zeros(3)}),
    ]
    for other in others:
        with pytest.raises(Busy, match="under way"):
            other()
    gate.open()
    first.join()
    assert contents(path) == contents(made)


def test_a_repair_that_was_taken_for_dead_replaces_nothing(path: Path, made: Path):
    index(path).unlink()

    def take_it_for_dead(verb: str, name: str) -> None:
        for claim in filter(is_claim, names_of(path) if verb == "put" else ()):
            (path / claim).unlink()

    with pytest.raises(Busy, match="took this one for dead"):
        ostraka.repair(FaultyStore(path, before=take_it_for_dead, has_locks=False), sources=made)
    assert not list(path.glob("shards-*/process_*.json"))


@pytest.mark.parametrize("by", ["repair", "gc"])
def test_what_a_dead_repair_left(path: Path, made: Path, by: str):
    left = shard(path, 1).with_name(f"{shard(path, 1).name}.0123456789abcdef.tmp")
    left.write_bytes(b"half")
    (left.parent / "process_00000.json.01234567.tmp").write_bytes(b"half")
    (left.parent / "notes.tmp").write_bytes(b"of somebody else")
    if by == "repair":
        ostraka.repair(path)
    else:
        result = run("gc", path, "--yes", "--json")
        found = json.loads(result.stdout)["leftovers"]
        assert [(len(one["names"]), one["bytes"]) for one in found] == [(2, 8)]
    (left.parent / "notes.tmp").unlink()
    assert contents(path) == contents(made)


@pytest.mark.parametrize("verb", ["create", "write", "finish"])
def test_a_full_disk(path: Path, made: Path, verb: str):
    shard(path, 1).write_bytes(b"what is left")
    before = contents(path)
    full = FaultyStore(path, fail={verb: OSError(28, "No space left on device")})
    with pytest.raises(OSError, match="No space left"):
        ostraka.repair(full, sources=made)
    assert contents(path) == before
    assert not list(path.rglob("*.tmp"))


def test_nothing_there(tmp_path: Path, path: Path):
    with pytest.raises(CheckpointNotFound, match="there is no checkpoint at"):
        ostraka.repair(tmp_path / "nothing")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").write_text("b")
    with pytest.raises(CheckpointNotFound, match="notes"):
        ostraka.repair(tmp_path / "notes")
    assert os.listdir(tmp_path / "notes") == ["a"]
    (path / "_METADATA").unlink()
    metadata_copy(path).unlink()
    with pytest.raises(Damaged, match="no copy of it was found; give one with sources="):
        ostraka.repair(path)
    assert not (path / "_METADATA").exists()


# The command


def test_the_command(path: Path, made: Path):
    def repair(*arguments: object) -> Any:
        return run("repair", path, *arguments)

    assert "nothing to repair" in repair().output
    shard(path, 1).unlink()
    left = repair()
    assert left.exit_code == 1
    assert "1 problem left" in left.output
    assert "'large'" in left.output
    planned = repair("--from", made, "--dry-run", "--json")
    assert planned.exit_code == 0
    assert "large" in json.loads(planned.output)["repaired"][0]["leaves"]
    repaired = repair("--from", made.parent / "c", "--yes")
    assert "1 file repaired" in repaired.output
    assert str(made) in repaired.output
    assert contents(path) == contents(made)
    remove_tree(path)
    assert repair().exit_code == 2


def test_a_directory_of_steps(tmp_path: Path, tree: Any):
    """All of its steps, as `ostraka verify` has it."""
    for step in (1, 2, 3):
        ostraka.save(tmp_path / "runs" / str(step), tree, parity=1)
    before = {f: f.read_bytes() for f in (tmp_path / "runs").rglob("*") if f.is_file()}
    for step in (1, 3):
        shard(tmp_path / "runs" / str(step), 2).unlink()
    said = json.loads(run("repair", tmp_path / "runs", "--dry-run", "--json").output)
    assert [len(report["repaired"]) for report in said["checkpoints"]] == [1, 0, 1]
    result = run("repair", tmp_path / "runs", "--yes")
    assert result.exit_code == 0, result.output
    assert result.output.count("1 file repaired") == 2
    assert {f: f.read_bytes() for f in before} == before
    for number in (2, 3):
        shard(tmp_path / "runs" / "1", number).unlink()
    assert run("repair", tmp_path / "runs").exit_code == 1
