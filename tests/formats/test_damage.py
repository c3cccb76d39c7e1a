"""Bytes that were changed, lost, added or swapped: always found, always named, never returned."""

import errno
import json
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from figures import Figures
from mounts import lose_sectors
from ostraka.errors import CheckpointNotFound, Damaged, store_error
from ostraka.testing import FaultyStore, run_processes
from places import Place, copy_tree, flip, remove_tree

FLIPS = 600
"""Random places in each checkpoint, beside the edges of all regions."""


@dataclass(frozen=True)
class Region:
    """Bytes `[start, stop)` of a file of a checkpoint; `leaves` are those whose data they are."""

    name: str
    file: str
    start: int
    stop: int
    leaf: str | None = None


@dataclass(frozen=True)
class Subject:
    """A checkpoint to damage."""

    path: Place

    @property
    def flips(self) -> int:
        """How many random places are tried; of a file in a bucket all is rewritten for each."""
        return FLIPS if isinstance(self.path, Path) else FLIPS // 30

    @property
    def shards(self) -> list[str]:
        found = self.path.glob("shards-*/*.safetensors")
        return sorted(str(file.relative_to(self.path)) for file in found)

    @property
    def files(self) -> list[str]:
        """All that a restore may read: not the second copy of `_METADATA`."""
        found = [p for p in self.path.rglob("*") if p.is_file() and p.name != "metadata.json"]
        return sorted(str(file.relative_to(self.path)) for file in found)

    def size(self, file: str) -> int:
        return (self.path / file).stat().st_size

    def regions(self) -> list[Region]:
        regions: list[Region] = []
        for file in self.files:
            size = self.size(file)
            if file.endswith(".safetensors"):
                regions += shard_regions(self.path, file)
            else:
                regions.append(Region("index" if "/" in file else "metadata", file, 0, size))
        if isinstance(self.path, Path):
            return regions
        return list({(region.name, region.leaf): region for region in regions}.values())


def shard_regions(path: Place, file: str) -> Iterator[Region]:
    data = (path / file).read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:header_bytes])
    text_end = len(data[:header_bytes].rstrip(b" "))
    yield Region("header length", file, 0, 8)
    yield Region("header", file, 8, text_end)
    yield Region("header padding", file, text_end, header_bytes)
    for leaf, tensor in header.items():
        if leaf != "__metadata__":
            start, stop = tensor["data_offsets"]
            if start < stop:
                yield Region("data", file, header_bytes + start, header_bytes + stop, leaf)


@cache
def sources() -> dict[str, np.ndarray]:
    """What is saved, leaf by leaf."""
    rng = np.random.default_rng(5)
    return {
        "kernel": rng.standard_normal((8, 6)).astype(np.float32),
        "bias": rng.standard_normal(7).astype(ml_dtypes.bfloat16),
        "packed": rng.integers(-8, 8, (8, 3)).astype(ml_dtypes.int4),
        "host": rng.standard_normal((3, 5)),
        "flag": np.asarray(True),
    }


SPECS = {"kernel": P("x"), "bias": P(), "packed": P("x")}


def make_tree() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def place(value: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    model = {name: place(sources()[name], spec) for name, spec in SPECS.items()}
    return {"model": model, "host": sources()["host"], "flag": sources()["flag"], "step": 17}


def save_tree(path: str) -> None:
    ostraka.save(path, make_tree(), metadata={"note": "for damage"})


@pytest.fixture(scope="module")
def single(new_place: Callable[[str], Place]) -> Subject:
    path = new_place("single") / "checkpoint"
    save_tree(str(path))
    return Subject(path)


@pytest.fixture(scope="module")
def double(new_place: Callable[[str], Place]) -> Subject:
    path = new_place("double") / "checkpoint"
    run_processes(save_tree, str(path), processes=2, devices_per_process=2)
    return Subject(path)


@pytest.fixture(params=["single", "double"])
def subject(request: pytest.FixtureRequest, single: Subject, double: Subject) -> Subject:
    return single if request.param == "single" else double


def restore_all(path: Place) -> dict[str, Any]:
    """As numpy arrays, so that a restore costs no device work."""
    empty = {name: np.zeros_like(value) for name, value in sources().items()}
    model = {name: empty[name] for name in SPECS}
    like = {"model": model, "host": empty["host"], "flag": empty["flag"], "step": 0}
    return ostraka.restore(path, like=like)


def assert_sources(tree: dict[str, Any]) -> None:
    found = {**tree["model"], "host": tree["host"], "flag": tree["flag"]}
    assert tree["step"] == 17
    assert {name: np.asarray(value).tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in sources().items()
    }


def assert_whole(subject: Subject) -> None:
    assert ostraka.verify(subject.path).ok
    assert_sources(restore_all(subject.path))


@contextmanager
def flipped(file: Place, position: int, mask: int) -> Generator[None, None, None]:
    """The file with some bits of one byte turned over; as it was afterwards."""
    flip(file, position, mask)
    try:
        yield
    finally:
        flip(file, position, mask)


def damage_found(work: Callable[[Place], Any], path: Place) -> Damaged:
    """What `work` says about the damage; fails if it says nothing or something else."""
    with pytest.raises(Damaged, match=str(path)) as caught:
        work(path)
    return caught.value


def check_flip(subject: Subject, region: Region, position: int, mask: int) -> None:
    with flipped(subject.path / region.file, position, mask):
        for work in (restore_all, ostraka.verify):
            error = damage_found(work, subject.path)
            (problem,) = error.problems
            where = (region.name, region.file, position, mask, work.__name__, str(error))
            assert problem.file == region.file, where
            assert region.file in str(error), where
            if region.leaf is not None:
                # The leaves of one block are named together; a message shows the first few.
                assert region.leaf in problem.leaves, where
                assert repr(problem.leaves[0]) in str(error), where


def flips(subject: Subject, count: int, seed: int) -> Iterator[tuple[Region, int, int]]:
    """The edges of every region with every single bit's worth, then random places.

    Regions are drawn evenly, so that the few bytes of an index see as many flips as the data.
    """
    rng = np.random.default_rng(seed)
    regions = subject.regions()
    for region in regions:
        for position in {region.start, region.stop - 1}:
            yield region, position, 1 << int(rng.integers(8))
    by_name: dict[str, list[Region]] = {}
    for region in regions:
        by_name.setdefault(region.name, []).append(region)
    names = sorted(by_name)
    for number in range(count):
        candidates = by_name[names[number % len(names)]]
        region = candidates[int(rng.integers(len(candidates)))]
        position = int(rng.integers(region.start, region.stop))
        yield region, position, int(rng.integers(1, 256))


def test_any_flipped_byte_is_found(subject: Subject):
    for region, position, mask in flips(subject, subject.flips, seed=11):
        check_flip(subject, region, position, mask)
    assert_whole(subject)


def test_flipped_bytes_on_the_way_to_devices(single: Subject):
    like = make_tree()
    for region, position, mask in flips(single, min(single.flips, 40), seed=12):
        with flipped(single.path / region.file, position, mask):
            error = damage_found(lambda path: ostraka.restore(path, like=like), single.path)
            assert error.problems[0].file == region.file
    assert_sources(ostraka.restore(single.path, like=like))


def test_what_is_read_in_part_is_right_or_not_returned(subject: Subject):
    """Of a damaged file some leaves and rows may still be had: never with a wrong value."""
    rng = np.random.default_rng(17)
    outcomes = {"right": 0, "damaged": 0}
    names = {**{name: f"model/{name}" for name in SPECS}, "host": "host"}
    for region, position, mask in flips(subject, min(subject.flips, 60), seed=13):
        with flipped(subject.path / region.file, position, mask):
            for name, leaf in names.items():
                rows = len(sources()[name])
                start, stop = sorted(int(n) for n in rng.integers(0, rows + 1, 2))
                try:
                    found = ostraka.open(subject.path)[leaf][start:stop]
                except Damaged:
                    outcomes["damaged"] += 1
                else:
                    assert found.tobytes() == sources()[name][start:stop].tobytes()
                    outcomes["right"] += 1
    assert min(outcomes.values()) > subject.flips // 30, outcomes


@pytest.mark.soak
def test_every_byte_of_a_checkpoint(single: Subject, figures: Figures):
    """Each byte of each file, but for the padding of headers, where every 16th is enough."""
    rng = np.random.default_rng(13)
    for region in single.regions():
        step = 16 if region.name == "header padding" else 1
        for position in range(region.start, region.stop, step):
            check_flip(single, region, position, 1 << int(rng.integers(8)))
            figures.add("flips found by verify and restore")
    assert_whole(single)


def test_every_bit_of_the_ends_of_metadata(single: Subject):
    """`_METADATA` is told from foreign files by its first bytes, and its digest is in the last."""
    size = single.size("_METADATA")
    region = Region("metadata", "_METADATA", 0, size)
    bits = range(8) if isinstance(single.path, Path) else [5]
    for position in [*range(24), *range(size - 48, size)]:
        for bit in bits:
            with flipped(single.path / "_METADATA", position, 1 << bit):
                assert damage_found(restore_all, single.path).problems[0].file == region.file
    assert_whole(single)


def test_a_flip_reads_again_when_it_is_mended(single: Subject):
    for region in single.regions():
        with flipped(single.path / region.file, region.start, 0xFF):
            damage_found(restore_all, single.path)
        assert_whole(single)


def row_is_whole(checkpoint: ostraka.Checkpoint, number: int) -> bool:
    try:
        found = checkpoint["model/kernel"][number]
    except Damaged:
        return False
    return found.tobytes() == sources()["kernel"][number].tobytes()


def test_other_files_stay_readable(double: Subject):
    """Damage to one file concerns what is in that file, and nothing else."""
    region = next(r for r in double.regions() if r.leaf == "model/kernel")
    with flipped(double.path / region.file, region.start, 1):
        checkpoint = ostraka.open(double.path)
        good = [number for number in range(8) if row_is_whole(checkpoint, number)]
        assert 0 < len(good) < 8


# Files that are missing, too short, too long


def change_back(change: Callable[[Place], Any], file: Place) -> Any:
    @contextmanager
    def changed() -> Generator[None, None, None]:
        before = file.read_bytes()
        change(file)
        try:
            yield
        finally:
            file.write_bytes(before)

    return changed()


def truncate(to: int) -> Callable[[Place], Any]:
    return lambda file: file.write_bytes(file.read_bytes()[:to])


def extend(data: bytes) -> Callable[[Place], Any]:
    return lambda file: file.write_bytes(file.read_bytes() + data)


def remove(file: Place) -> None:
    file.unlink()


def exchange(foreign: Place) -> Callable[[Place], Any]:
    return lambda file: file.write_bytes(foreign.read_bytes())


def test_missing_files(subject: Subject):
    for file in subject.files:
        with change_back(remove, subject.path / file):
            if file == "_METADATA":
                for work in (restore_all, ostraka.verify, ostraka.open):
                    with pytest.raises(CheckpointNotFound, match="_METADATA is lost"):
                        work(subject.path)
                continue
            for work in (restore_all, ostraka.verify):
                (problem,) = damage_found(work, subject.path).problems
                assert (problem.file, problem.found) == (file, "it is missing")
    assert_whole(subject)


def test_truncated_files(subject: Subject):
    for file in subject.files:
        size = subject.size(file)
        for length in {0, 1, 7, 8, 4095, 4096, size // 2, size - 1}:
            if length >= size:
                continue
            with change_back(truncate(length), subject.path / file):
                for work in (restore_all, ostraka.verify):
                    error = damage_found(work, subject.path)
                    (problem,) = error.problems
                    assert problem.file == file, (file, length)
                    if file.endswith(".safetensors") and length == size - 1:
                        assert problem.leaves, str(error)
    assert_whole(subject)


def test_extended_files(subject: Subject):
    for file in subject.files:
        for more in (b"\0", b"\n", b" ", b"x" * 5000):
            with change_back(extend(more), subject.path / file):
                for work in (restore_all, ostraka.verify):
                    (problem,) = damage_found(work, subject.path).problems
                    assert problem.file == file, (file, more[:3])
    assert_whole(subject)


def test_zeroed_files(subject: Subject):
    """What a file system may leave behind after a crash: the right size, and nothing in it."""
    for file in subject.files:
        size = subject.size(file)
        with change_back(lambda f, size=size: f.write_bytes(bytes(size)), subject.path / file):
            for work in (restore_all, ostraka.verify):
                assert damage_found(work, subject.path).problems[0].file == file
    assert_whole(subject)


def test_a_directory_in_the_place_of_a_shard(tmp_path: Path):
    """A bucket has no directories."""
    single = Subject(tmp_path / "checkpoint")
    save_tree(str(single.path))
    file = tmp_path / "checkpoint" / single.shards[0]
    file.unlink()
    file.mkdir()
    for work in (restore_all, ostraka.verify):
        with pytest.raises((Damaged, OSError), match=file.name):
            work(single.path)


# Files that are whole, but not the right ones


def test_swapped_shards(subject: Subject):
    by_size: dict[int, list[str]] = {}
    for file in subject.shards:
        by_size.setdefault(subject.size(file), []).append(file)
    one, other = next(files for files in by_size.values() if len(files) > 1)[:2]
    data = (subject.path / one).read_bytes(), (subject.path / other).read_bytes()
    assert data[0] != data[1]
    (subject.path / one).write_bytes(data[1])
    (subject.path / other).write_bytes(data[0])
    try:
        damage_found(restore_all, subject.path)
        error = damage_found(ostraka.verify, subject.path)
        assert {problem.file for problem in error.problems} == {one, other}
    finally:
        (subject.path / one).write_bytes(data[0])
        (subject.path / other).write_bytes(data[1])
    assert_whole(subject)


def save_again(subject: Subject, name: str) -> Place:
    """The same tree in another save: the same sizes, the same names, another id."""
    elsewhere = subject.path.parent / name
    save_tree(str(elsewhere))
    (shards,) = elsewhere.glob("shards-*")
    assert not (subject.path / shards.name).exists()
    return shards


def test_a_shard_of_another_save(single: Subject):
    shards = save_again(single, "other")
    for file in single.shards:
        foreign = shards / Path(file).name
        assert foreign.stat().st_size == single.size(file)
        with change_back(exchange(foreign), single.path / file):
            for work in (restore_all, ostraka.verify):
                assert damage_found(work, single.path).problems[0].file == file
    assert_whole(single)


def test_an_index_of_another_save(single: Subject):
    shards = save_again(single, "other")
    file = next(file for file in single.files if file.endswith("process_00000.json"))
    foreign = shards / "process_00000.json"
    with change_back(exchange(foreign), single.path / file):
        for work in (restore_all, ostraka.verify):
            assert damage_found(work, single.path).problems[0].file == file
    assert_whole(single)


def test_metadata_of_another_save(single: Subject):
    """It names shards that are not here."""
    shards = save_again(single, "other")
    foreign = shards.parent / "_METADATA"
    with change_back(exchange(foreign), single.path / "_METADATA"):
        for work in (restore_all, ostraka.verify):
            error = damage_found(work, single.path)
            assert all(p.file.startswith(f"{shards.name}/") for p in error.problems)
            assert {p.found for p in error.problems} == {"it is missing"}
    assert_whole(single)


def test_shards_and_index_of_another_save(single: Subject):
    """A whole directory exchanged for another of the same sizes."""
    shards = save_again(single, "other")
    (mine,) = single.path.glob("shards-*")
    kept = single.path.parent / "kept"
    copy_tree(mine, kept)
    remove_tree(mine)
    copy_tree(shards, mine)
    try:
        for work in (restore_all, ostraka.verify):
            damage_found(work, single.path)
    finally:
        remove_tree(mine)
        copy_tree(kept, mine)
        remove_tree(kept)
    assert_whole(single)


# Several problems at once


def test_verify_lists_every_problem(subject: Subject):
    first, second, third = subject.shards[:3]
    with (
        flipped(subject.path / first, subject.size(first) - 1, 1),
        flipped(subject.path / second, 9, 1),
        change_back(remove, subject.path / third),
    ):
        report = ostraka.verify(subject.path, raises=False)
        assert not report.ok
        assert sorted(problem.file for problem in report.problems) == [first, second, third]
        found = {problem.file: problem for problem in report.problems}
        assert found[first].leaves
        assert "header" in found[second].found
        assert found[third].found == "it is missing"
        assert found[third].leaves
        assert "3 problems" in str(report)
        error = damage_found(ostraka.verify, subject.path)
        assert error.problems == report.problems
        for file in (first, second, third):
            assert file in str(error)
    assert_whole(subject)


def test_verify_lists_every_damaged_block(place: Place):
    """Three of the blocks of one file, each with its own bytes."""
    path = place / "checkpoint"
    ostraka.save(path, {"a": np.zeros(5 << 20, np.uint8), "b": np.ones(9 << 20, np.uint8)})
    files = sorted(path.glob("shards-*/*.safetensors"))
    regions = [r for f in files for r in shard_regions(path, str(f.relative_to(path)))]
    ends = [r for r in regions if r.leaf]
    assert {r.leaf for r in ends} == {"a", "b"}
    if not isinstance(path, Path):
        ends = list({region.leaf: region for region in ends}.values())
    for region in ends:
        with (
            flipped(path / region.file, region.start, 2),
            flipped(path / region.file, region.stop - 1, 2),
        ):
            problems = ostraka.verify(path, raises=False).problems
            if region.stop - region.start > 4 << 20:
                assert len(problems) == 2
            assert {(p.file, p.leaves) for p in problems} == {(region.file, (region.leaf,))}
            with pytest.raises(Damaged, match=f"{region.leaf!r}"):
                ostraka.restore(path)


def test_what_the_disk_can_not_give_any_more_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "checkpoint"
    ostraka.save(path, {"a": np.zeros(5 << 20, np.uint8), "b": np.ones(9 << 20, np.uint8)})
    files = [str(file.relative_to(path)) for file in path.glob("shards-*/*.safetensors")]
    b = next(r for file in files for r in shard_regions(path, file) if r.leaf == "b")
    lose_sectors([path / b.file], monkeypatch, at=b.stop - 1)
    said = "it can't be read: Input/output error"
    (problem,) = ostraka.verify(path, raises=False).problems
    assert (problem.file, problem.leaves, problem.found) == (b.file, ("b",), said)
    with pytest.raises(Damaged, match=f"{b.file} .*'b'\\): {said}"):
        ostraka.restore(path)
    assert not ostraka.open(path)["a"][...].any()


@pytest.mark.parametrize("lost", ["_METADATA", "process_00000.json"])
def test_small_files_that_the_disk_can_not_give_any_more(single: Subject, lost: str):
    def refuse(verb: str, name: str) -> None:
        if verb == "get" and name.endswith(lost):
            raise store_error("read", name, OSError(errno.EIO, os.strerror(errno.EIO)))

    for read in (ostraka.verify, ostraka.restore):
        with pytest.raises(Damaged, match=f"{lost}: it can't be read: Input/output error"):
            read(FaultyStore(single.path, before=refuse))


def test_a_report_of_a_whole_checkpoint(subject: Subject):
    report = ostraka.verify(subject.path, raises=False)
    assert report.ok
    assert report.problems == ()
    assert report.files == len(subject.shards)
    assert report.bytes_read >= sum(subject.size(file) for file in subject.shards)
    assert "intact" in str(report)


def test_extra_files_are_no_damage(single: Subject):
    """Readers look at what `_METADATA` names; a stranger's file beside it changes nothing."""
    extra = single.path / "notes.txt"
    extra.write_text("do not delete")
    try:
        assert_whole(single)
    finally:
        extra.unlink()
