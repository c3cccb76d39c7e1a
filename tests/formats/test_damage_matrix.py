"""Every kind of damage to every file of every kind of checkpoint: none missed, none misattributed.

What is said is compared with a map of the bytes that the safetensors package makes.
"""

import errno
import os
import re
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
from damage_map import DamageMap, StoredBox
from figures import Figures
from manual import find_block
from mounts import lose_sectors
from nnx_models import Block
from ostraka.errors import CheckpointNotFound, Damaged, DegradedRead, store_error
from ostraka.testing import FaultyStore, run_processes
from places import BucketPath, flip

SOAK_TIMES = 50
IN_THE_SUITE = 3
"""Of so many flips of a kind the suite does one."""


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


KINDS: dict[str, tuple[int, Callable[[int], Any]]] = {
    "plain": (450, make_plain),
    "compressed": (300, make_compressed),
    "processes": (350, make_plain),
    "packed": (600, make_packed),
    "many": (150, make_many),
    "nnx": (100, make_nnx),
    "large": (50, make_large),
    "parity": (150, make_plain),
}
"""How many bytes are flipped, so that each kind takes about as long, and the tree."""
SMALL = ("plain", "compressed", "processes", "packed")


def save(path: str, kind: str, seed: int) -> None:
    compress = "zstd" if kind == "compressed" else None
    parity = 1 if kind == "parity" else 0
    ostraka.save(path, KINDS[kind][1](seed), compress=compress, parity=parity)


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
        assert report.problems == ()
        assert "intact" in str(report)
        shards = self.map.shards
        assert report.files == len(shards) + ("parity" in self.kind)
        assert report.bytes_read >= sum(self.map.sizes[file] for file in shards)
        assert read_leaves(self.path, [*self.values]) == self.values


Subjects = Callable[[str], Subject]


def arrays_in(checkpoint: ostraka.Checkpoint) -> list[str]:
    return [leaf for leaf, value in checkpoint.items() if isinstance(value, ostraka.LazyArray)]


def read(checkpoint: ostraka.Checkpoint, leaf: str) -> bytes:
    return checkpoint[leaf][...].tobytes()


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    made: dict[str, Subject] = {}

    def make(kind: str) -> Subject:
        if kind not in made:
            made[kind] = Subject(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return make


# Single bytes


def edges(subject: Subject) -> Iterator[tuple[str, int, int]]:
    """The first and the last byte of each file, header, box and padding."""
    for file, size in subject.map.sizes.items():
        ends = {0, 7, 8, size - 1}
        for box in subject.map.boxes.get(file, []):
            ends |= {box.start - 1, box.start, box.stop - 1}
        yield from ((file, at, 1 << at % 8) for at in sorted(ends))


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
        problems = ostraka.verify(subject.path, raises=False).problems
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
            (lost,) = [lost for lost in problem.boxes if lost.leaf == box.leaf]
            assert lost.elements > 0, where
            index = box.index_at(position)
            if index is not None:  # complex128 is shown with a dimension more.
                inside = zip(index[: len(lost.box)], lost.box, strict=True)
                assert all(start <= at < stop for at, (start, stop) in inside), where
        if read_back and subject.kind == "parity" and file != "_METADATA":
            if box is not None:  # What parity brings back is right, and is warned of.
                with pytest.warns(DegradedRead, match=str(subject.path)):
                    found = read(ostraka.open(subject.path), box.leaf)
                assert found == subject.values[box.leaf]
        elif read_back:
            assert damage_when_read(subject, box.leaf if box else None, file) == [file], where


def read_leaves(path: Path, leaves: list[str]) -> dict[str, bytes]:
    checkpoint = ostraka.open(path)
    return {leaf: read(checkpoint, leaf) for leaf in leaves}


def damage_when_read(subject: Subject, leaf: str | None, file: str) -> list[str]:
    """The files that a read of a leaf calls damaged, or without one a read of all in the file."""
    # An index is read with what its process wrote.
    wanted = [leaf] if leaf else sorted(subject.map.leaves_in(file))[:1] or [*subject.values]
    with pytest.raises(Damaged, match=file) as by_slice:
        read_leaves(subject.path, wanted)
    with pytest.raises(Damaged, match=file) as by_restore:
        ostraka.restore(subject.path, only=wanted)
    assert by_restore.value.problems == by_slice.value.problems
    return [problem.file for problem in by_slice.value.problems]


@contextmanager
def flipped(file: Path, position: int, mask: int) -> Generator[None]:
    flip(file, position, mask)
    try:
        yield
    finally:
        flip(file, position, mask)


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes(subjects: Subjects, kind: str):
    subject = subjects(kind)
    count = KINDS[kind][0] // IN_THE_SUITE
    for number, place in enumerate(random_places(subject, count, seed=21)):
        find_flip(subject, *place, read_back=number % 2 == 0)
    if kind in ("plain", "processes", "packed"):
        for place in edges(subject):
            find_flip(subject, *place, read_back=True)
    subject.assert_whole()


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_flipped_bytes(subjects: Subjects, kind: str, figures: Figures):
    subject = subjects(kind)
    for place in random_places(subject, KINDS[kind][0] * SOAK_TIMES, seed=22):
        find_flip(subject, *place, read_back=True)
        figures.add("flips found by verify and by a read")
    subject.assert_whole()


@pytest.mark.soak
def test_every_byte_of_a_checkpoint(subjects: Subjects, figures: Figures):
    """Of headers, which are mostly padding, every eighth."""
    subject = subjects("plain")
    for file, size in subject.map.sizes.items():
        data = subject.map.boxes[file][0].start if subject.map.boxes.get(file) else 0
        for at in [*range(0, data, 8), *range(data, size)]:
            find_flip(subject, file, at, 1 << at % 8, read_back=True)
            figures.add("flips found by verify and by a read")
    subject.assert_whole()


def test_every_bit_of_the_ends_of_metadata(subjects: Subjects):
    """`_METADATA` is told from foreign files by its first bytes, and its digest is in the last."""
    subject = subjects("plain")
    size = subject.map.sizes["_METADATA"]
    for at, bit in product([*range(24), *range(size - 48, size)], range(8)):
        with flipped(subject.path / "_METADATA", at, 1 << bit):
            for work in (ostraka.open, ostraka.verify):
                with pytest.raises(Damaged, match="_METADATA"):
                    work(subject.path)
    subject.assert_whole()


def test_what_is_read_in_part_is_right_or_not_returned(subjects: Subjects):
    """A damaged file may still give some rows, never with a wrong value."""
    subject = subjects("processes")
    kernel = np.asarray(ostraka.open(subject.path)["kernel"])
    found: set[tuple[bool, bool]] = set()
    for file, at, mask in [*random_places(subject, 40, seed=23), *edges(subject)]:
        if file == "_METADATA":
            continue
        with flipped(subject.path / file, at, mask):
            checkpoint = ostraka.open(subject.path)
            right: list[bool] = []
            for row in range(8):
                try:
                    assert checkpoint["kernel"][row].tobytes() == kernel[row].tobytes()
                    right.append(True)
                except Damaged:
                    right.append(False)
            found.add((any(right), all(right)))
    assert found == {(True, False)}, "damage to one file affects the rows in it, and no others"


# Whole files


@contextmanager
def changed(file: Path, change: Callable[[Path], Any]) -> Generator[None]:
    data = file.read_bytes()
    try:
        change(file)
        yield
    finally:
        if file.is_dir():
            file.rmdir()
        file.write_bytes(data)


def cut_to(nbytes: int) -> Callable[[Path], Any]:
    """Cut a file, at the latest before its last byte."""
    return lambda file: os.truncate(file, min(nbytes, file.stat().st_size - 1))


def zero_from(share: float) -> Callable[[Path], Any]:
    def zero(file: Path) -> None:
        size = file.stat().st_size
        os.truncate(file, int(size * share))
        os.truncate(file, size)

    return zero


CHANGES: dict[str, Callable[[Path], Any]] = {
    "deleted": Path.unlink,
    "emptied": cut_to(0),
    "cut to its start": cut_to(7),
    "cut to its header": cut_to(4096),
    "cut by a byte": cut_to(1 << 60),
    "cut in half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "extended by a byte": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "extended": lambda file: file.write_bytes(file.read_bytes() + bytes(5000)),
    "zeroed": zero_from(0),
    "its end zeroed": zero_from(0.5),
}
"""What may become of a file. Half of an index or of `_METADATA` is never zeros."""


def find_damage(subject: Subject, damaged: set[str], *, affected: set[str] | None = None) -> None:
    """All damaged files are named and no others; a leaf is read right, or not at all.

    `affected` are leaves that must be named, and no others but those that lie in the same file.
    """
    problems = ostraka.verify(subject.path, raises=False).problems
    assert {problem.file for problem in problems} == damaged, (damaged, problems)
    in_them = {leaf for file in damaged for leaf in subject.map.leaves_in(file)}
    named = {leaf for problem in problems for leaf in problem.leaves}
    assert named <= in_them, problems
    if affected is not None:
        assert affected <= named, (affected - named, problems)
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


@pytest.mark.parametrize("kind", SMALL)
def test_changed_files(subjects: Subjects, kind: str):
    subject = subjects(kind)
    for file, (name, change) in product(subject.map.files, CHANGES.items()):
        with changed(subject.path / file, change):
            if file == "_METADATA":
                lost = (CheckpointNotFound, "_METADATA is lost")
                error, said = lost if name == "deleted" else (Damaged, "_METADATA")
                for work in (ostraka.verify, ostraka.open, ostraka.restore):
                    with pytest.raises(error, match=said):
                        work(subject.path)
                continue
            is_lost = name in ("deleted", "emptied", "zeroed", "cut to its start")
            find_damage(subject, {file}, affected=subject.map.leaves_in(file) if is_lost else None)
            problems = ostraka.verify(subject.path, raises=False).problems
            if name == "deleted":
                assert {problem.found for problem in problems} == {"it is missing"}
            if name == "cut by a byte" and subject.map.boxes.get(file):
                assert problems[0].leaves
    subject.assert_whole()


@pytest.mark.parametrize("kind", SMALL)
def test_exchanged_files(subjects: Subjects, kind: str):
    """Two shards, or two indexes, each under the name of the other."""
    subject = subjects(kind)
    pairs = [*pairwise(subject.map.shards), *pairwise(subject.map.indexes)]
    assert pairs
    for one, other in pairs:
        first, second = (subject.path / name for name in (one, other))
        data = first.read_bytes()
        with (
            changed(first, lambda file, second=second: shutil.copyfile(second, file)),
            changed(second, lambda file, data=data: file.write_bytes(data)),
        ):
            find_damage(subject, {one, other})
    subject.assert_whole()


@pytest.mark.parametrize("kind", SMALL)
def test_stale_files(subjects: Subjects, kind: str):
    """The file of the same name from a save of the same tree with other values."""
    subject = subjects(kind)
    (old,) = subject.other.glob("shards-*")
    for file in subject.map.files:
        if file != "_METADATA":
            with changed(
                subject.path / file,
                lambda target: shutil.copyfile(old / target.name, target),
            ):
                find_damage(subject, {file})
    with changed(
        subject.path / "_METADATA", lambda target: shutil.copy(old.parent / target.name, target)
    ):
        for work in (ostraka.restore, ostraka.verify):
            with pytest.raises(Damaged, match=old.name) as caught:
                work(subject.path)
            assert {problem.found for problem in caught.value.problems} == {"it is missing"}
    subject.assert_whole()


def test_in_a_bucket(bucket: str):
    path = BucketPath(bucket) / "c"
    save(str(path), "plain", 1)
    shard, *_ = sorted(path.glob("shards-*/shard_*"))
    (index,) = path.glob("shards-*/process_*")
    for file in (shard, index):
        data = file.read_bytes()
        for change in (data[:-1], data + b"\0", data[:-1] + bytes([data[-1] ^ 1]), None):
            file.unlink() if change is None else file.write_bytes(change)
            for work in (ostraka.restore, ostraka.verify):
                with pytest.raises(Damaged, match=f"{path}.*{file.name}") as caught:
                    work(path)
                assert {problem.file for problem in caught.value.problems} == {
                    str(file.relative_to(path))
                }
        file.write_bytes(data)
    assert ostraka.verify(path).ok


def test_several_faults_at_once(subjects: Subjects):
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
        assert "3 problems" in str(report)
        with pytest.raises(Damaged, match=other) as caught:
            ostraka.verify(subject.path)
        assert caught.value.problems == report.problems
    subject.assert_whole()


# What is told


def test_what_is_told_of_one_lost_file(subjects: Subjects):
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


def test_the_manual_shows_a_problem(subjects: Subjects):
    """durability.md shows the report, checksums.md its second line."""
    subject = subjects("processes")
    file = subject.map.shards[2]
    box = subject.map.boxes[file][0]
    with flipped(subject.path / file, box.start, 1):
        report = ostraka.verify(subject.path, raises=False)
    (problem,) = report.problems
    first, second = str(report), problem.explain()
    for name, shown in {str(subject.path): "runs/7", f"on {problem.host}": "on node7"}.items():
        first, second = first.replace(name, shown), second.replace(name, shown)
    second = re.sub("shards-[0-9a-f]{16}", "shards-5dd324aae6ba37ae", second)
    brief = f"{first.rpartition(' files, ')[0]} files, …)"
    shown = find_block("docs/maintainers/durability.md", "runs/7: ")
    assert " ".join(shown.split()) == f"{brief} {second}"
    assert " ".join(find_block("docs/explanation/checksums.md", "shards-").split()) == second


def place_of(subject: Subject, leaf: str) -> tuple[str, StoredBox]:
    """The file and the box of a leaf that is whole in one."""
    ((file, box),) = [
        (file, box)
        for file, boxes in subject.map.boxes.items()
        for box in boxes
        if box.leaf == leaf
    ]
    return file, box


def test_rows_of_each_block_are_named(subjects: Subjects):
    subject = subjects("large")
    file, box = place_of(subject, "rows")
    with (
        flipped(subject.path / file, box.start, 2),
        flipped(subject.path / file, box.stop - 1, 1),
    ):
        first, last = ostraka.verify(subject.path, raises=False).problems
    assert first.boxes[0].box[0][0] == 0
    (lost,) = last.boxes
    start, stop = lost.box[0]
    assert (stop, lost.box[1]) == (96, (0, 3 << 14))
    assert 0 < start < 96
    assert last.span is not None
    assert last.span[1] - last.span[0] == (stop - start) * (3 << 14) * 4
    assert str(lost) == f"'rows'[{start}:96, :]"


def test_what_the_disk_can_not_give_any_more_is_damage(
    subjects: Subjects, monkeypatch: pytest.MonkeyPatch
):
    subject = subjects("large")
    file, box = place_of(subject, "rows")
    lose_sectors([subject.path / file], monkeypatch, at=box.stop - 1)
    said = "it can't be read: Input/output error"
    (problem,) = ostraka.verify(subject.path, raises=False).problems
    assert (problem.file, problem.leaves, problem.found) == (file, ("rows",), said)
    with pytest.raises(Damaged, match=f"{file} .*'rows'.*\\): {said}"):
        ostraka.restore(subject.path)
    assert read(ostraka.open(subject.path), "wide") == subject.values["wide"]


@pytest.mark.parametrize("lost", ["_METADATA", "process_00000.json"])
def test_small_files_that_the_disk_can_not_give_any_more(subjects: Subjects, lost: str):
    def refuse(verb: str, name: str) -> None:
        if verb == "get" and name.endswith(lost):
            raise store_error("read", name, OSError(errno.EIO, os.strerror(errno.EIO)))

    for work in (ostraka.verify, ostraka.restore):
        with pytest.raises(Damaged, match=f"{lost}: it can't be read: Input/output error"):
            work(FaultyStore(subjects("plain").path, before=refuse))


def test_lost_files_of_a_checkpoint_with_parity(subjects: Subjects):
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
