"""Files that are missing come back in one pass over their group, wherever blocks and ranges end."""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import ostraka
from numbered import on_all
from ostraka.integrity.repair import _parity_pass
from places import flip
from runs import contents


def make_tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "large": on_all(rng.standard_normal((8, 270_000)).astype(np.float32), "x"),
        "coarse": on_all(rng.integers(0, 9, (8, 20_001)).astype(np.int32), "x"),
        "of_one_device": jax.device_put(
            rng.standard_normal(200_003).astype(np.float32), jax.devices()[3]
        ),
        "numpy": rng.standard_normal(1_000),
    }


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compress": "zstd"},
    "several files a device": {"max_file_bytes": "600 KiB"},
}
MANY_RANGES = {
    "_PIECE_BYTES": 48 << 10,
    "_WRITE_BYTES": 100_000,
    "_LEAST_RANGE_BYTES": 300_000,
    "_MOST_RANGE_BYTES": 700_000,
}


MADE: dict[str, Path] = {}


@pytest.fixture(params=["one range", *WAYS])
def saved(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Plain, to be repaired in one range. In each way, to be repaired in many."""
    way = "plain" if request.param == "one range" else request.param
    if way not in MADE:
        MADE[way] = tmp_path_factory.mktemp("saved") / "c"
        ostraka.save(MADE[way], make_tree(), parity=2, **WAYS[way])
    for name, value in MANY_RANGES.items() if request.param in WAYS else ():
        monkeypatch.setattr(_parity_pass, name, value)
    return MADE[way]


def lose(saved: Path, place: Path, names: Sequence[str]) -> Path:
    shutil.copytree(saved, place)
    for name in names:
        next(place.glob(f"shards-*/{name}")).unlink()
    return place


def members(saved: Path) -> list[str]:
    return sorted(f.name for f in saved.glob("shards-*/shard_*"))


def test_any_one(saved: Path, tmp_path: Path):
    before = contents(saved)
    for name in members(saved)[::3]:
        place = lose(saved, tmp_path / name, [name])
        report = ostraka.repair(place)
        assert [(f.nbytes, f.origins) for f in report.repaired] == [
            (len(next(v for k, v in before.items() if k.endswith(name))), ("parity",))
        ]
        assert contents(place) == before
        shutil.rmtree(place)


def test_any_two(saved: Path, tmp_path: Path):
    before = contents(saved)
    sums = sorted(f.name for f in saved.glob("shards-*/parity_*"))[:1]
    for lost in itertools.islice(itertools.combinations([*members(saved), *sums], 2), 0, None, 11):
        place = lose(saved, tmp_path / "-".join(lost), lost)
        repaired = ostraka.repair(place).repaired
        assert len(repaired) == 2
        # In one pass, that is: block by block, headers would be from `_METADATA`.
        assert {f.origins for f in repaired} <= {("parity",), ("its group",)}
        assert contents(place) == before
        shutil.rmtree(place)


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_read_twice(
    saved: Path, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.undo()
    names = members(saved)[2 : 2 + count]
    place = lose(saved, tmp_path / "c", names)
    there = sum(f.stat().st_size for f in place.rglob("*") if f.is_file())
    report = ostraka.repair(place)
    sizes = [next(saved.glob(f"shards-*/{name}")).stat().st_size for name in names]
    assert report.bytes_written == sum(sizes)
    # Blocks that reach from one range into the next, and digests of parity, are read once more.
    assert report.bytes_read <= 1.5 * there


@pytest.mark.parametrize("other", ["shard", "parity"])
def test_another_file_is_damaged_too(saved: Path, tmp_path: Path, other: str):
    """The pass is given up; both files are repaired by what is left."""
    one = members(saved)[2]
    place = lose(saved, tmp_path / "c", [one])
    there = sorted(place.glob(f"shards-*/{other}_*"))
    damaged = there[-1] if other == "shard" else there[0]
    flip(damaged, damaged.stat().st_size // 2)
    report = ostraka.repair(place)
    repaired = sorted(f.file.rpartition("/")[2] for f in report.repaired)
    assert repaired == sorted([one, damaged.name])
    assert contents(place) == contents(saved)


def test_a_parity_file_whose_end_is_damaged(saved: Path, tmp_path: Path):
    """Of a file whose parity was used and is right, the rest is looked at, too."""
    before = contents(saved)
    place = lose(saved, tmp_path / "c", [members(saved)[0]])
    parities = sorted(place.glob("shards-*/parity_*"))
    flip(parities[0], 20)
    assert parities[0].name in {f.file.rpartition("/")[2] for f in ostraka.repair(place).repaired}
    assert contents(place) == before


def test_a_dry_run_says_what_a_repair_writes(saved: Path, tmp_path: Path):
    place = lose(saved, tmp_path / "c", members(saved)[:2])
    before = contents(place)
    said = ostraka.repair(place, dry_run=True)
    assert contents(place) == before
    done = ostraka.repair(place)
    assert said.repaired == done.repaired
    assert sum(f.nbytes for f in said.repaired) == done.bytes_written


def test_what_is_in_the_way_is_replaced(saved: Path, tmp_path: Path):
    name = members(saved)[1]
    place = lose(saved, tmp_path / "c", [name])
    next(place.glob("shards-*")).joinpath(name).symlink_to("/etc/hostname")
    assert [f.found for f in ostraka.repair(place).repaired] != []
    assert contents(place) == contents(saved)
