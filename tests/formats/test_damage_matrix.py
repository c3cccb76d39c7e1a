"""Every kind of damage to every file of every kind of checkpoint: none missed, none misattributed.

What is said is compared with a map of the bytes that the safetensors package makes.
"""

import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from damage_map import DamageMap
from figures import Figures
from nnx_models import Block
from ostraka.errors import CheckpointNotFound, Damaged, DegradedRead, Problem
from ostraka.testing import run_processes
from places import flip

FLIPS = {
    "plain": 450,
    "compressed": 300,
    "processes": 350,
    "packed": 600,
    "many": 150,
    "nnx": 100,
    "large": 50,
    "parity": 150,
}
"""Of each kind, so many that they take about as long."""
KINDS = tuple(FLIPS)
SOAK_TIMES = 50


def on_mesh(value: np.ndarray, *axes: Any) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(-1, 2), ("x", "y"))
    sharding = NamedSharding(mesh, P(*axes))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def weights(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_plain(seed: int) -> Any:
    return {
        "kernel": on_mesh(weights(seed, 8, 6), "x", "y"),
        "bias": on_mesh(weights(seed, 7).astype(ml_dtypes.bfloat16)),
        "table": {"rows": on_mesh(weights(seed, 16, 3), ("x", "y")), "host": weights(seed, 3, 5)},
        "empty": np.zeros((0, 3)),
        "flag": np.asarray(True),
        "step": seed,
    }


def make_compressed(seed: int) -> Any:
    return {"a": on_mesh(weights(seed, 128, 512), "x"), "b": on_mesh(weights(seed, 96, 256))}


def make_packed(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        "int4": on_mesh(rng.integers(-8, 8, (8, 3)).astype(ml_dtypes.int4), "x"),
        "uint2": on_mesh(rng.integers(0, 4, (5, 7)).astype(ml_dtypes.uint2)),
        "float4": on_mesh(weights(seed, 16, 4).astype(ml_dtypes.float4_e2m1fn), "x", "y"),
        "complex": np.asarray(weights(seed, 4) + 1j, np.complex128),
    }


def make_many(seed: int) -> Any:
    return {
        f"layer{n:03d}": {"scale": on_mesh(weights(seed + n, 8), "x"), "shift": weights(n, 3)}
        for n in range(30)
    }


def make_nnx(seed: int) -> Any:
    model = Block(rngs=nnx.Rngs(seed))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)}


def make_large(seed: int) -> Any:
    """Boxes of several blocks, one of them with rows that are longer than a block."""
    return {
        "rows": jnp.asarray(weights(seed, 96, 3 << 14)),
        "wide": jnp.asarray(weights(seed, 1, 5 << 18)),
        "small": jnp.asarray(weights(seed, 10)),
    }


MAKERS: dict[str, Callable[[int], Any]] = {
    "plain": make_plain,
    "compressed": make_compressed,
    "processes": make_plain,
    "packed": make_packed,
    "many": make_many,
    "nnx": make_nnx,
    "large": make_large,
    "parity": make_plain,
}


def save(path: str, kind: str, seed: int) -> None:
    compress = "zstd" if kind == "compressed" else None
    parity = 1 if kind == "parity" else 0
    ostraka.save(path, MAKERS[kind](seed), compress=compress, parity=parity)


def save_kind(path: Path, kind: str, seed: int = 1) -> None:
    if kind == "processes":
        run_processes(save, str(path), kind, seed, processes=4, devices_per_process=1)
    else:
        save(str(path), kind, seed)


class Subject:
    """A checkpoint to damage, what is in it, and the same tree with other values in another."""

    def __init__(self, path: Path, kind: str):
        self.kind = kind
        self.path = path / "checkpoint"
        self.other = path / "other"
        save_kind(self.path, kind)
        save_kind(self.other, kind, seed=2)
        self.map = DamageMap(self.path)
        checkpoint = ostraka.open(self.path)
        self.values = {leaf: read(checkpoint, leaf) for leaf in arrays_in(checkpoint)}

    def assert_whole(self) -> None:
        report = ostraka.verify(self.path)
        assert (report.ok, report.notes, report.unchecked) == (True, (), ())
        checkpoint = ostraka.open(self.path)
        assert {leaf: read(checkpoint, leaf) for leaf in self.values} == self.values


def arrays_in(checkpoint: ostraka.Checkpoint) -> list[str]:
    return [leaf for leaf, value in checkpoint.items() if isinstance(value, ostraka.LazyArray)]


def read(checkpoint: ostraka.Checkpoint, leaf: str) -> bytes:
    return checkpoint[leaf][...].tobytes()


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    made: dict[str, Subject] = {}

    def make(kind: str) -> Subject:
        if kind not in made:
            made[kind] = Subject(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return make


# Single bytes


def random_places(subject: Subject, count: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """Files are drawn evenly: few bytes of an index see as many flips as all those of a shard.

    Half of what hits a shard hits its header.
    """
    rng = np.random.default_rng(seed)
    files = subject.map.files
    for number in range(count):
        file = files[number % len(files)]
        stop = subject.map.sizes[file]
        boxes = subject.map.boxes.get(file)
        if boxes and rng.integers(2):
            stop = boxes[0].start
        yield file, int(rng.integers(stop)), int(rng.integers(1, 256))


def find_flip(subject: Subject, file: str, position: int, mask: int, read_back: bool) -> None:
    """A flipped byte is found by `verify` and by whatever reads the leaf, each naming it."""
    box = subject.map.box_at(file, position)
    with flipped(subject.path / file, position, mask):
        problems = problems_of(subject)
        where = (subject.kind, file, position, mask, problems)
        (problem,) = problems
        assert problem.file == file, where
        if file in subject.map.boxes:
            assert problem.process == subject.map.process_of[file], where
            assert problem.span is not None, where
            start, stop = problem.span
            assert start <= position < stop, where
            assert set(problem.leaves) == subject.map.leaves_in(file, start, stop), where
            assert [lost.leaf for lost in problem.boxes] == list(problem.leaves), where
        if box is not None:
            assert_box_named(problem, box.leaf, box.index_at(position), where)
        if read_back and subject.kind == "parity" and file != "_METADATA":
            if box is not None:
                assert_read_degraded(subject, box.leaf)
        elif read_back:
            error = damage_when_read(subject, box.leaf if box else None, file)
            assert error.problems[0].file == file, where


def assert_read_degraded(subject: Subject, leaf: str) -> None:
    """What parity brings back is right, and is warned of."""
    with pytest.warns(DegradedRead, match=str(subject.path)):
        found = read(ostraka.open(subject.path), leaf)
    assert found == subject.values[leaf]


def assert_box_named(
    problem: Problem, leaf: str, index: tuple[int, ...] | None, where: Any
) -> None:
    (lost,) = [lost for lost in problem.boxes if lost.leaf == leaf]
    assert lost.elements > 0, where
    if index is not None:
        index = index[: len(lost.box)]  # complex128 is shown with a dimension more
        inside = zip(index, lost.box, strict=True)
        assert all(start <= at < stop for at, (start, stop) in inside), where


def problems_of(subject: Subject) -> tuple[Problem, ...]:
    return ostraka.verify(subject.path, raises=False).problems


def damage_when_read(subject: Subject, leaf: str | None, file: str) -> Damaged:
    """What is raised for a leaf, or without one for all that the file has."""
    in_file = sorted(subject.map.leaves_in(file))
    # An index is read with what its process wrote.
    wanted = [leaf] if leaf else in_file[:1] or list(subject.values)
    with pytest.raises(Damaged, match=str(subject.path)) as caught:
        read_leaves(subject.path, wanted)
    return caught.value


def read_leaves(path: Path, leaves: list[str]) -> None:
    checkpoint = ostraka.open(path)
    for leaf in leaves:
        read(checkpoint, leaf)


@contextmanager
def flipped(file: Path, position: int, mask: int) -> Generator[None]:
    flip(file, position, mask)
    try:
        yield
    finally:
        flip(file, position, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes(subjects: Callable[[str], Subject], kind: str):
    subject = subjects(kind)
    for number, flip_ in enumerate(random_places(subject, FLIPS[kind], seed=21)):
        find_flip(subject, *flip_, read_back=number % 2 == 0)
    subject.assert_whole()


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_flipped_bytes(subjects: Callable[[str], Subject], kind: str, figures: Figures):
    subject = subjects(kind)
    for flip_ in random_places(subject, FLIPS[kind] * SOAK_TIMES, seed=22):
        find_flip(subject, *flip_, read_back=True)
        figures.add("flips found by verify and by a read")
    subject.assert_whole()


# Whole files


@contextmanager
def changed(file: Path, change: Callable[[Path], Any]) -> Generator[None]:
    kept = file.with_name(f"{file.name}.kept")
    shutil.copyfile(file, kept.parent.parent / kept.name)
    kept = kept.parent.parent / kept.name
    try:
        change(file)
        yield
    finally:
        shutil.copyfile(kept, file)
        kept.unlink()


def cut_to(share: float) -> Callable[[Path], Any]:
    def cut(file: Path) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])

    return cut


CHANGES: dict[str, Callable[[Path], Any]] = {
    "deleted": Path.unlink,
    "emptied": lambda file: file.write_bytes(b""),
    "cut by a byte": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "cut in half": cut_to(0.5),
    "cut to its start": lambda file: file.write_bytes(file.read_bytes()[:5]),
    "extended by a byte": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "extended": lambda file: file.write_bytes(file.read_bytes() + bytes(5000)),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "its end zeroed": lambda file: file.write_bytes(
        (data := file.read_bytes())[: len(data) // 2] + bytes(len(data) - len(data) // 2)
    ),
}
"""What may become of a file. Half of an index or of `_METADATA` is never zeros."""


def find_damage(subject: Subject, damaged: set[str], *, hurt: set[str] | None = None) -> None:
    """All damaged files are named and no others; a leaf is read right, or not at all.

    `hurt` are leaves that must be named, and no others but those that lie in the same file.
    """
    problems = problems_of(subject)
    assert {problem.file for problem in problems} == damaged, (damaged, problems)
    in_them = {leaf for file in damaged for leaf in subject.map.leaves_in(file)}
    named = {leaf for problem in problems for leaf in problem.leaves}
    assert named <= in_them, problems
    if hurt is not None:
        assert hurt <= named, (hurt - named, problems)
    checkpoint = ostraka.open(subject.path)
    processes = {subject.map.process_of[file] for file in damaged & {*subject.map.indexes}}
    of_index = {
        leaf
        for file in subject.map.shards
        if subject.map.process_of[file] in processes
        for leaf in subject.map.leaves_in(file)
    }
    leaves = sorted(filter(subject.values.get, subject.values))
    for leaf in leaves[:: 1 + len(leaves) // 10]:
        if leaf in in_them | of_index:
            with pytest.raises(Damaged, match=str(subject.path)) as caught:
                read(checkpoint, leaf)
            assert {problem.file for problem in caught.value.problems} <= damaged
        else:
            assert read(checkpoint, leaf) == subject.values[leaf], leaf


def find_lost_metadata(subject: Subject) -> None:
    with pytest.raises((Damaged, CheckpointNotFound), match="_METADATA"):
        ostraka.verify(subject.path)
    with pytest.raises((Damaged, CheckpointNotFound), match="_METADATA"):
        ostraka.open(subject.path)


SMALL = tuple(kind for kind in KINDS if kind not in ("large", "nnx", "parity"))


@pytest.mark.parametrize("kind", SMALL)
def test_changed_files(subjects: Callable[[str], Subject], kind: str):
    subject = subjects(kind)
    for file, (name, change) in product(subject.map.files, CHANGES.items()):
        with changed(subject.path / file, change):
            if file == "_METADATA":
                find_lost_metadata(subject)
            else:
                is_lost = name in ("deleted", "emptied", "zeroed", "cut to its start")
                hurt = subject.map.leaves_in(file) if is_lost else None
                find_damage(subject, {file}, hurt=hurt)
    subject.assert_whole()


@pytest.mark.parametrize("kind", SMALL)
def test_exchanged_files(subjects: Callable[[str], Subject], kind: str):
    """Two shards, or two indexes, each under the name of the other."""
    subject = subjects(kind)
    pairs = [*pairwise(subject.map.shards), *pairwise(subject.map.indexes)]
    assert pairs
    for one, other in pairs:
        first, second = (subject.path / one).read_bytes(), (subject.path / other).read_bytes()
        (subject.path / one).write_bytes(second)
        (subject.path / other).write_bytes(first)
        try:
            find_damage(subject, {one, other})
        finally:
            (subject.path / one).write_bytes(first)
            (subject.path / other).write_bytes(second)
    subject.assert_whole()


@pytest.mark.parametrize("kind", SMALL)
def test_stale_files(subjects: Callable[[str], Subject], kind: str):
    """The file of the same name from a save of the same tree with other values."""
    subject = subjects(kind)
    (old,) = subject.other.glob("shards-*")
    for file in subject.map.files:
        if file == "_METADATA":
            continue  # test_damage.py: it names shards that are not there
        with changed(
            subject.path / file,
            lambda target: shutil.copyfile(old / target.name, target),
        ):
            find_damage(subject, {file})
    subject.assert_whole()


def test_several_faults_at_once(subjects: Callable[[str], Subject]):
    """An index that is lost hides none of the other damage that can be told without it."""
    subject = subjects("processes")
    index = subject.map.indexes[2]
    mine = [file for file in subject.map.shards if subject.map.process_of[file] == 2]
    other = next(file for file in subject.map.shards if subject.map.process_of[file] == 1)
    with (
        changed(subject.path / index, Path.unlink),
        changed(subject.path / mine[0], Path.unlink),
        flipped(subject.path / other, subject.map.boxes[other][0].start, 1),
    ):
        report = ostraka.verify(subject.path, raises=False)
        assert {problem.file for problem in report.problems} == {index, mine[0], other}
        assert report.unchecked == tuple(mine)
        assert report.damaged_processes == (1, 2)
        assert set(report.damaged_leaves) >= subject.map.leaves_in(mine[0])
        assert "1 file can't be checked" in str(report)
        assert "2 of 4 shard files, process_00002.json, written by process" in str(report)
    subject.assert_whole()


# What is told


def test_what_is_told_of_one_lost_file(subjects: Callable[[str], Subject]):
    subject = subjects("processes")
    file = subject.map.shards[3]
    with changed(subject.path / file, Path.unlink):
        (problem,) = ostraka.verify(subject.path, raises=False).problems
        assert problem.host
        assert f"written by process 3 on {problem.host}: it is missing" in problem.explain()
        lost = {str(box) for box in problem.boxes}
        assert "'kernel'[4:8, 3:6]" in lost
        assert any(text.startswith("'table/rows'[12:16, :]") for text in lost)
        assert "'kernel'[4:8, 3:6] (25 % of it)" in problem.explain()
        report = ostraka.verify(subject.path, raises=False)
        assert report.damaged_leaves["kernel"] == 0.25
        assert "1 of 4 shard files, written by process 3" in str(report)


def test_rows_of_a_block_are_named(subjects: Callable[[str], Subject]):
    subject = subjects("large")
    (place,) = [
        (file, box)
        for file in subject.map.shards
        for box in subject.map.boxes[file]
        if box.leaf == "rows"
    ]
    file, box = place
    with flipped(subject.path / file, box.stop - 1, 1):
        (problem,) = ostraka.verify(subject.path, raises=False).problems
    (lost,) = problem.boxes
    start, stop = lost.box[0]
    assert (stop, lost.box[1]) == (96, (0, 3 << 14))
    assert 0 < start < 96
    assert problem.span is not None
    assert problem.span[1] - problem.span[0] == (stop - start) * (3 << 14) * 4
    assert str(lost) == f"'rows'[{start}:96, :]"


def test_lost_files_of_a_checkpoint_with_parity(subjects: Callable[[str], Subject]):
    """All are told, whatever a read would bring back."""
    subject = subjects("parity")
    files = [file for file in subject.map.files if file != "_METADATA"]
    assert sum("/parity_" in file for file in files) >= 1
    for file, change in product(files, CHANGES):
        with changed(subject.path / file, CHANGES[change]):
            problems = ostraka.verify(subject.path, raises=False).problems
            assert {problem.file for problem in problems} == {file}, (change, problems)
            if change == "deleted":
                ((found,),) = [{problem.found for problem in problems}]
                assert found == "it is missing"
                named = {leaf for problem in problems for leaf in problem.leaves}
                assert named == subject.map.leaves_in(file)
    subject.assert_whole()
