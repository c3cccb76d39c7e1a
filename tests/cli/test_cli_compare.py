"""Two checkpoints compared: structure, shapes, dtypes, shardings, elements."""

import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ostraka
from ostraka.common.progress import OnBytes
from ostraka.formats import open_source
from ostraka.formats.source import Source
from ostraka.report import measure
from ostraka.report.compare import (
    CompareOptions,
    Distance,
    LeafComparison,
    TreeComparison,
    compare,
)
from ostraka.report.measure import Progress
from ostraka.storage import open_store


def see_progress() -> tuple[list[tuple[int, int]], Progress]:
    """The bytes that a bar is told of, done and in all, and that bar."""
    seen: list[tuple[int, int]] = []

    @contextmanager
    def progress(what: str, total: int) -> Generator[OnBytes]:
        yield lambda done, total: seen.append((done, total))

    return seen, progress


class Pair(NamedTuple):
    w: Any


def saved(path: Path, tree: Any) -> Source:
    ostraka.save(path, tree)
    return open_source(open_store(path))


def differ(tmp_path: Path, a: Any, b: Any, **rules: Any) -> TreeComparison:
    return compare(saved(tmp_path / "a", a), saved(tmp_path / "b", b), CompareOptions(**rules))


def only(found: TreeComparison) -> LeafComparison:
    (leaf,) = found.leaves
    return leaf


def distance(tmp_path: Path, a: Any, b: Any, **rules: Any) -> Distance:
    found = only(differ(tmp_path, {"x": a}, {"x": b}, **rules)).distance
    assert found is not None
    return found


def put(array: Any, *axes: str | None, sizes: tuple[int, int] = (4, 2)) -> jax.Array:
    mesh = jax.make_mesh(sizes, ("a", "b"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


def test_a_checkpoint_equals_itself(tmp_path: Path):
    tree = {
        "x": put(np.arange(64.0).reshape(8, 8), "a", "b"),
        "nan": np.array([np.nan, np.inf, -0.0]),
        "rate": float("nan"),
        "key": jax.random.key(1),
        "none": None,
        "empty": np.zeros((0, 4), np.float32),
        "small": jnp.arange(5, dtype=jnp.int4),
    }
    found = differ(tmp_path, tree, tree)
    assert found.same
    assert all(leaf.same for leaf in found.leaves)
    assert {leaf.path for leaf in found.leaves} == set(tree)


def test_leaves_that_one_does_not_have(tmp_path: Path):
    found = differ(tmp_path, {"a": 1, "x": np.ones(2)}, {"x": np.ones(2), "b": np.ones(3)})
    assert not found.same
    assert [(leaf.path, leaf.a is None, leaf.b is None, leaf.same) for leaf in found.leaves] == [
        ("a", False, True, False),
        ("x", False, False, True),
        ("b", True, False, False),
    ]


ASPECTS: list[tuple[Any, Any, tuple[str, ...]]] = [
    (np.ones(3), np.ones(4), ("shape",)),
    (np.ones(3, np.float32), np.ones(3, np.float64), ("dtype",)),
    (np.ones(3, np.float32), np.full(3, 2.0), ("dtype", "value")),
    (np.ones(3), 1.0, ("kind", "shape", "dtype", "sharding", "value")),
    (1, 2, ("value",)),
    (1, True, ("kind", "value")),
    ("x", "x", ()),
]


def test_aspects(tmp_path: Path):
    found = differ(tmp_path, [a for a, *_ in ASPECTS], [b for _, b, _ in ASPECTS])
    assert [leaf.differs for leaf in found.leaves] == [aspects for *_, aspects in ASPECTS]


def test_the_same_values_cut_in_another_way(tmp_path: Path):
    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    a, b = put(values, "a", "b"), put(values, "b", None, sizes=(2, 4))
    leaf = only(differ(tmp_path / "1", {"x": a}, {"x": b}))
    assert leaf.differs == ("sharding",)
    assert leaf.a is not None
    assert leaf.a.sharding == "P('a', 'b') on a=4, b=2"
    assert leaf.distance == Distance(128)
    assert differ(tmp_path / "2", {"x": a}, {"x": b}, ignore_sharding=True).same


def test_whole_dimensions_at_the_end_of_a_spec_make_no_difference(tmp_path: Path):
    values = np.ones((8, 8))
    assert differ(tmp_path, {"x": put(values, "a")}, {"x": put(values, "a", None)}).same


def test_how_far_apart(tmp_path: Path):
    a, b = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 2.5, 3.0, 2.0])
    found = distance(tmp_path, a, b)
    assert found == Distance(elements=4, changed=2, nan=0, largest=2.0, total=2.5)
    assert found.mean == 0.625


def test_nan_and_infinity(tmp_path: Path):
    nan, inf = np.nan, np.inf
    a = np.array([nan, nan, 1.0, inf, inf, inf, 0.0])
    b = np.array([nan, 1.0, nan, inf, -inf, 2.0, -0.0])
    found = distance(tmp_path, a, b, rtol=1e300, atol=1e300)
    assert (found.changed, found.nan, found.largest, found.total) == (4, 2, inf, inf)


DISTANCES = [
    (np.array([-(2**63)]), np.array([2**63 - 1]), 2.0**64),
    (np.array([2**64 - 1], np.uint64), np.array([0], np.uint64), 2.0**64),
    (np.array([2**63 - 1]), np.array([2**63 - 2]), 1.0),
    (np.array([-128], np.int8), np.array([127], np.int8), 255.0),
    (np.array([True]), np.array([False]), 1.0),
    (np.array([3 + 4j]), np.array([0j]), 5.0),
    (np.array([7], ml_dtypes.int4), np.array([-8], ml_dtypes.int4), 15.0),
    (np.array([1.5], ml_dtypes.bfloat16), np.array([1.0], ml_dtypes.bfloat16), 0.5),
]


def test_distances_of_every_kind(tmp_path: Path):
    found = differ(tmp_path, [a for a, *_ in DISTANCES], [b for _, b, _ in DISTANCES])
    assert [leaf.distance for leaf in found.leaves] == [
        Distance(1, 1, 0, largest, largest) for *_, largest in DISTANCES
    ]


def test_tolerances_are_those_of_numpy(tmp_path: Path):
    a, b = np.array([1.0, 100.0, 0.0]), np.array([1.1, 101.0, 0.05])
    assert distance(tmp_path / "1", a, b, rtol=0.02).changed == 2
    assert distance(tmp_path / "2", a, b, rtol=0.02, atol=0.06).changed == 1
    found = differ(tmp_path / "3", {"x": a}, {"x": b}, rtol=0.02, atol=0.1)
    assert found.same
    assert found.leaves[0].distance is not None
    assert found.leaves[0].distance.largest == 1.0


def test_as_many_differ_as_numpy_says(tmp_path: Path):
    """For each pair of odd numbers, and of ordinary ones."""
    odd = [0.0, -0.0, 1e-45, 1e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan]
    ordinary = [*np.linspace(-2, 2, 21), *np.geomspace(1e-6, 1e6, 13)]
    a, b = np.array([*product(odd + ordinary, repeat=2)], np.float32).T
    for tolerance in (0.0, 0.1):
        found = distance(tmp_path, a, b, rtol=tolerance, atol=tolerance)
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        near = np.isclose(wide_a, wide_b, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert found.changed == (~near).sum()


def test_patterns_choose_leaves(tmp_path: Path):
    a = {"m": {"w": np.ones(2), "b": np.ones(2)}, "o": [1]}
    b = {"m": {"w": np.ones(2), "b": np.zeros(2)}, "o": (2,)}
    assert differ(tmp_path / "1", a, b, patterns=("m/w",)).same
    found = differ(tmp_path / "2", a, b, patterns=("m/*",))
    assert [leaf.path for leaf in found.leaves if not leaf.same] == ["m/b"]


def test_without_values_no_array_is_read(tmp_path: Path):
    a = saved(tmp_path / "a", {"x": np.ones(2)})
    b = saved(tmp_path / "b", {"x": np.zeros(2)})
    for shard in tmp_path.glob("*/shards-*/*.safetensors"):
        shard.unlink()
    assert compare(a, b, CompareOptions(structure=True)).same


def test_containers_of_other_kinds(tmp_path: Path):
    a = {"t": [1, np.ones(2)], "p": Pair({"v": 1}), "e": {}, "same": ({},)}
    b = {"t": (1, np.ones(2)), "p": ({"v": 1},), "same": ({},)}
    found = differ(tmp_path, a, b)
    assert found.containers == (
        ("t", "list", "tuple"),
        ("p", "namedtuple Pair", "tuple"),
        ("e", "dict", "not there"),
    )
    assert not found.same


def test_progress_tells_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "PIECE_BYTES", 128)
    monkeypatch.setattr(measure, "_ELEMENTS_AT_A_TIME", 5)
    values = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    other = values.copy()
    other[3, 5] += 1
    a = saved(tmp_path / "a", {"x": put(values, "a", "b"), "y": np.ones(3)})
    b = saved(tmp_path / "b", {"x": put(other, "b", None, sizes=(2, 4)), "y": np.ones(3)})
    seen, progress = see_progress()
    found = compare(a, b, CompareOptions(), progress)
    in_all = 2 * (values.nbytes + 24)
    assert seen[-1] == (in_all, in_all)
    assert found.leaves[0].distance is not None
    assert found.leaves[0].distance.changed == 1
    assert found.leaves[0].distance.largest == pytest.approx(1.0)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "PIECE_BYTES", 1 << 20)
    a = saved(tmp_path / "a", {"x": np.zeros((64, 1 << 18), np.float32)})
    b = saved(tmp_path / "b", {"x": np.ones((64, 1 << 18), np.float32)})
    tracemalloc.start()
    try:
        found = compare(a, b, CompareOptions())
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()
    assert found.leaves[0].distance == Distance(1 << 24, 1 << 24, 0, 1.0, float(1 << 24))


# Arrays with several paths


def test_what_is_one_array_in_one_of_them_only(tmp_path: Path):
    x = jnp.arange(6.0)
    found = differ(tmp_path, {"x": x, "y": x}, {"x": x, "y": x + 1})
    one, other = found.leaves
    assert (one.same, one.distance) == (True, Distance(6))
    assert other.differs == ("same_as", "value")
    assert other.distance == Distance(6, 6, 0, 1.0, 6.0)
    assert differ(tmp_path, {"x": x, "y": x}, {"x": x, "y": x}).same
    (_, again) = differ(tmp_path, {"x": x, "y": x}, {"x": x, "y": x + 0}).leaves
    assert again.differs == ("same_as",)


def test_bytes_of_what_is_one_array_are_read_once(tmp_path: Path):
    x = jnp.arange(6.0)
    a = saved(tmp_path / "a", {"x": x, "y": x})
    seen, progress = see_progress()
    compare(a, a, CompareOptions(), progress)
    assert seen == [(2 * 24, 2 * 24)]
