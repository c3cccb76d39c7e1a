"""Lost and damaged files of a checkpoint with parity: read all the same, and found again."""

import warnings
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.errors import Damaged, DegradedRead
from ostraka.formats.ostraka.rebuild import Parities, Rebuild
from ostraka.formats.ostraka.source import OstrakaSource, open_ostraka
from ostraka.layout.shard_file import FileEntry
from ostraka.storage import open_store
from places import Place, copy_tree, flip

SAVES = {
    "one": {"parity": 1},
    "two": {"parity": 2},
    "two, compressed": {"parity": 2, "compress": "zstd"},
    "one, cast": {"parity": 1, "dtype": "bfloat16"},
}


def make_tree() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    numbers = np.random.default_rng(3)

    def put(value: Any, *axes: str | None) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, P(*axes)))

    return {
        "rows": put(numbers.standard_normal((512, 700), np.float32), "x"),
        "whole": put(numbers.standard_normal((37, 11), np.float32)),
        "numpy": numbers.integers(0, 99, 1000),
        "int4": jnp.asarray(numbers.integers(-8, 8, (9, 3)), jnp.int4),
        "empty": np.zeros((0, 4), np.float32),
        "step": 7,
    }


Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The tree, saved in one of the ways. Harm copies of it."""

    @cache
    def save(how: str) -> Path:
        path = tmp_path_factory.mktemp("saved") / "c"
        ostraka.save(path, make_tree(), **SAVES[how])
        return path

    return save


def assert_same(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def files_in(path: Place) -> dict[str, Place]:
    """All but the copy of `_METADATA`, which no restore needs."""
    return {f.name: f for f in path.glob("shards-*/*") if f.name != "metadata.json"}


def open_at(path: Any) -> OstrakaSource:
    source = open_ostraka(open_store(path))
    assert source is not None
    return source


@contextmanager
def said() -> Generator[list[str]]:
    """What was warned of."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    assert all(issubclass(warning.category, DegradedRead) for warning in found)
    texts += [str(warning.message) for warning in found]


class Harmed:
    """A copy of a checkpoint, to which harm is done and undone."""

    def __init__(self, whole: Path, path: Path):
        copy_tree(whole, path)
        self.path = path
        self._kept = {name: file.read_bytes() for name, file in files_in(path).items()}

    def lose(self, *names: str) -> None:
        for name in names:
            files_in(self.path)[name].unlink()

    def repair(self) -> None:
        directory = next(self.path.glob("shards-*"))
        for name, data in self._kept.items():
            (directory / name).write_bytes(data)


@pytest.mark.parametrize("how", SAVES)
def test_any_lost_files_are_read_all_the_same(tmp_path: Path, saved: Saved, how: str) -> None:
    options = SAVES[how]
    expected = ostraka.restore(saved(how))
    assert ostraka.verify(saved(how)).ok
    harmed = Harmed(saved(how), tmp_path / "c")
    names = sorted(files_in(harmed.path))
    assert sum(name.startswith("parity_") for name in names) == options["parity"]
    for number, lost in enumerate(combinations(names, options["parity"])):
        if number % 7 and options["parity"] == 2:
            continue
        harmed.lose(*lost)
        with said() as warned:
            assert_same(ostraka.restore(harmed.path), expected)
        needed = [name for name in lost if not name.startswith("parity_")]
        assert len(warned) == bool(needed)
        assert all(name in warned[0] and "ostraka repair" in warned[0] for name in needed)
        report = ostraka.verify(harmed.path, raises=False)
        assert {problem.file.split("/")[-1] for problem in report.problems} == set(lost)
        harmed.repair()


def test_flipped_truncated_and_swapped_files_are_read_all_the_same(
    tmp_path: Path, saved: Saved
) -> None:
    expected = ostraka.restore(saved("one"))
    harmed = Harmed(saved("one"), tmp_path / "c")
    files = files_in(harmed.path)
    shard = files["shard_00002.safetensors"]
    for harm in (
        lambda: flip(shard, 9),
        lambda: flip(shard, shard.stat().st_size - 1, 0x80),
        lambda: shard.write_bytes(shard.read_bytes()[:-100]),
        lambda: shard.write_bytes(bytes(shard.stat().st_size)),
        lambda: flip(files["process_00000.json"], 200),
    ):
        harm()
        with said() as warned:
            assert_same(ostraka.restore(harmed.path), expected)
            part = ostraka.open(harmed.path)["rows"][130:140, 5:9]
        assert np.array_equal(part, np.asarray(expected["rows"])[130:140, 5:9])
        assert len(warned) == 2  # by two readers
        assert not ostraka.verify(harmed.path, raises=False).ok
        harmed.repair()


def test_damage_to_several_files_at_different_places_is_found_block_by_block(
    tmp_path: Path,
) -> None:
    """With one parity, two files may be damaged, as long as no two bytes are at the same place."""
    rows = np.random.default_rng(3).standard_normal((3 * 3000, 700), np.float32)
    mesh = Mesh(np.array(jax.devices()[:3]), ("x",))
    tree = {"a": jax.device_put(rows, NamedSharding(mesh, P("x")))}  # two blocks in each file
    ostraka.save(tmp_path / "c", tree, parity=1)
    files = files_in(tmp_path / "c")
    size = files["shard_00001.safetensors"].stat().st_size
    assert size > 2 * 4 << 20
    flip(files["shard_00001.safetensors"], 5000)
    flip(files["shard_00002.safetensors"], size - 5)
    with said() as warned:
        assert_same(ostraka.restore(tmp_path / "c"), tree)
    assert len(warned) == 1
    flip(files["shard_00002.safetensors"], 5000)
    told = "parity can't bring it back, because more is lost"
    with said(), pytest.raises(Damaged, match=told) as raised:
        ostraka.restore(tmp_path / "c")
    named = {problem.file.split("/")[1] for problem in raised.value.problems}
    assert named == {"shard_00001.safetensors", "shard_00002.safetensors"}
    assert {leaf for problem in raised.value.problems for leaf in problem.leaves} == {"a"}


def rebuilt(parities: Parities | None, file: FileEntry, start: int, stop: int) -> bytes:
    assert parities is not None
    with closing(Rebuild(parities, file)) as rebuild:
        return rebuild.read(start, stop).tobytes()


@pytest.mark.parametrize("how", SAVES)
def test_whole_files_are_found_again_bit_for_bit(saved: Saved, how: str) -> None:
    source = open_at(saved(how))
    files = {name: file.read_bytes() for name, file in files_in(saved(how)).items()}
    parities = source.shards.parities
    assert parities is not None
    for file in parities.parity.files:
        assert b"".join(parities.rebuild_parity(file)) == files[file.name]
    for file in source.metadata.files:
        assert rebuilt(parities, file, 0, file.size) == files[file.name]
        assert rebuilt(parities, file, 4000, 4200) == files[file.name][4000:4200]
    assert parities.index_copy(0) == files["process_00000.json"]


def test_a_file_whose_digests_are_all_lost_is_found_from_verified_ones(tmp_path: Path) -> None:
    ostraka.save(tmp_path / "c", {"a": make_tree()["rows"]}, parity=2)
    files = files_in(tmp_path / "c")
    kept = files["shard_00001.safetensors"].read_bytes()
    for name in ("process_00000.json", "parity_00000-00001.safetensors", "shard_00001.safetensors"):
        files[name].unlink()
    parity = files["parity_00000.safetensors"]
    source = open_at(tmp_path / "c")
    metadata = source.metadata
    file = next(file for file in metadata.files if file.device == 1)
    # Its index is there as a copy: spoil that as well, and no digest of a member is left.
    at = parity.read_bytes().index(b'{"format":"ostraka-index"')
    flip(parity, at + 1)
    with pytest.raises(Damaged, match="its digests are lost"):
        rebuilt(source.shards.parities, file, 0, file.size)
    flip(parity, at + 1)
    with said():
        parities = open_at(tmp_path / "c").shards.parities
        assert rebuilt(parities, file, 0, file.size) == kept


def test_a_spoilt_parity_file_gives_nothing_wrong(tmp_path: Path, saved: Saved) -> None:
    Harmed(saved("one"), tmp_path / "c").lose("shard_00001.safetensors")
    flip(files_in(tmp_path / "c")["parity_00000.safetensors"], 4096 + 5000)
    with (
        said(),
        pytest.raises(Damaged, match=r"parity_00000\.safetensors: bytes .* are not as they were"),
    ):
        ostraka.restore(tmp_path / "c")
    problems = ostraka.verify(tmp_path / "c", raises=False).problems
    assert {problem.file.split("/")[1] for problem in problems} == {
        "shard_00001.safetensors",
        "parity_00000.safetensors",
    }


def test_a_copy_has_the_parity_and_what_was_lost(place: Place) -> None:
    ostraka.save(place / "c", make_tree(), parity=1)
    whole = {name: file.read_bytes() for name, file in files_in(place / "c").items()}
    ostraka.copy(place / "c", place / "d")
    assert {name: file.read_bytes() for name, file in files_in(place / "d").items()} == whole
    files_in(place / "c")["shard_00006.safetensors"].unlink()
    with said() as warned:
        ostraka.copy(place / "c", place / "e")
    assert len(warned) == 1
    assert {name: file.read_bytes() for name, file in files_in(place / "e").items()} == whole
    assert ostraka.verify(place / "e").ok
    files_in(place / "c")["parity_00000.safetensors"].unlink()
    with pytest.raises(Damaged, match=r"parity_00000\.safetensors: it is missing"):
        ostraka.copy(place / "c", place / "f")
