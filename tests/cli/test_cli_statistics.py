"""Statistics of leaves, against numpy on the whole array."""

import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from ostraka.common.dtypes import DTYPES, is_inexact
from ostraka.formats.source import Source
from ostraka.report import measure
from ostraka.report.measure import Statistics, count_not_finite, statistics_of
from test_cli_compare import saved, see_progress


def test_numbers_of_every_kind(tmp_path: Path):
    names = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn"]
    names += ["int8", "uint16", "int64"]
    values = np.random.default_rng(0).normal(size=(37, 11)) * 20
    arrays = [
        (np.abs(values) if name.startswith("u") else values).astype(getattr(ml_dtypes, name, name))
        for name in names
    ]
    for array, found in zip(arrays, all_of(tmp_path / "c", arrays), strict=True):
        wide = array.astype(np.float64)
        assert (found.count, found.nan, found.infinite) == (array.size, 0, 0), array.dtype
        assert (found.least, found.most) == (wide.min(), wide.max()), array.dtype
        assert found.mean == pytest.approx(wide.mean())
        assert found.std == pytest.approx(wide.std())


def all_of(path: Path, arrays: list[Any]) -> list[Statistics]:
    """The statistics of each of them."""
    found = statistics_of(saved(path, arrays), range(len(arrays)))
    return [found[number] for number in range(len(arrays))]


ODD: list[tuple[Any, dict[str, Any]]] = [
    # Less than a byte.
    (jnp.arange(-8, 8, dtype=jnp.int4).reshape(2, 8), {"least": -8, "most": 7, "mean": -0.5}),
    # Integers stay exact.
    (np.array([2**64 - 1, 2**63 + 1], np.uint64), {"least": 2**63 + 1, "most": 2**64 - 1}),
    # NaN and infinity are counted and left out.
    (
        np.array([1.0, np.nan, 3.0, np.inf, -np.inf, np.nan], np.float32),
        {"nan": 2, "infinite": 2, "finite": 2, "least": -np.inf, "most": np.inf}
        | {"mean": 2.0, "std": 1.0},
    ),
    # Without a number there is nothing to say.
    (np.zeros((0, 3), np.float32), {"least": None, "most": None, "mean": None, "std": None}),
    (np.full(3, np.nan), {"least": None, "most": None, "mean": None, "std": None}),
    # Of complex numbers the magnitudes count.
    (
        np.array([3 + 4j, 0, complex(0, float("nan"))], np.complex64),
        {"least": 0.0, "most": 5.0, "mean": 2.5, "nan": 1},
    ),
    # Huge numbers do not raise.
    (np.array([1e308, -1e308, 1e308]), {"least": -1e308, "most": 1e308}),
]


def test_odd_numbers(tmp_path: Path):
    for (array, expected), found in zip(
        ODD, all_of(tmp_path / "c", [array for array, _ in ODD]), strict=True
    ):
        assert {name: getattr(found, name) for name in expected} == expected, array


def test_pieces_add_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "PIECE_BYTES", 256)
    monkeypatch.setattr(measure, "_ELEMENTS_AT_A_TIME", 7)
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    values = np.random.default_rng(1).normal(size=(6, 5, 8)).astype(np.float32)
    tree = {
        "cut": jax.device_put(values, NamedSharding(mesh, PartitionSpec("a", None, "b"))),
        "long": np.arange(5000.0),
        "one": np.float64(3.5),
    }
    source = saved(tmp_path / "c", tree)
    seen, progress = see_progress()
    found = statistics_of(source, [0, 1, 2], progress=progress)
    assert found[0].mean == pytest.approx(values.mean(dtype=np.float64))
    assert found[0].std == pytest.approx(values.std(dtype=np.float64))
    assert (found[1].count, found[1].least, found[1].most) == (5000, 0.0, 4999.0)
    assert found[1].mean == pytest.approx(2499.5)
    assert found[1].std == pytest.approx(np.arange(5000.0).std())
    assert found[2].std == 0.0
    in_all = values.nbytes + 5000 * 8 + 8
    assert seen[-1] == (in_all, in_all)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 40)
)
@settings(max_examples=40)
def test_statistics_add_like_numbers(values: list[float], one: int, other: int):
    low, high = sorted((one, other))
    parts = [values[:low], values[low:high], values[high:]]
    total = Statistics()
    for part in parts:
        if part:
            array = np.array(part)
            total += Statistics(
                len(part),
                float(array.min()),
                float(array.max()),
                float(array.mean()),
                float(array.std()),
            )
    whole = np.array(values)
    assert (total.count, total.least, total.most) == (whole.size, whole.min(), whole.max())
    assert total.mean == pytest.approx(whole.mean(), abs=1e-6)
    assert total.std == pytest.approx(whole.std(), abs=1e-6)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "PIECE_BYTES", 1 << 20)
    source = saved(tmp_path / "c", {"x": np.zeros((64, 1 << 18), np.float32)})
    tracemalloc.start()
    try:
        statistics_of(source, [0])
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


# NaN and infinity alone


def not_finite(source: Source, leaves: list[int]) -> dict[int, tuple[int, int]]:
    found = statistics_of(source, leaves, count_not_finite)
    return {leaf: (counts.nan, counts.infinite) for leaf, counts in found.items()}


def test_what_is_not_finite_is_counted(tmp_path: Path):
    array = np.zeros((50, 40))
    array[3, :7] = np.nan
    array[:5, 39] = -np.inf
    kinds = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
    complex_numbers = [1, complex(0, np.nan), complex(np.inf, np.nan), complex(0, -np.inf)]
    tree = [
        *(array.astype(kind) for kind in kinds),
        np.ones(9, np.float32),
        np.array(complex_numbers),
        np.array([1, np.nan], ml_dtypes.float8_e4m3fn),  # It has no infinity.
    ]
    expected = [*[(7, 5)] * len(kinds), (0, 0), (2, 1), (1, 0)]
    found = not_finite(saved(tmp_path / "c", tree), [*range(len(tree)), 0])
    assert found == dict(enumerate(expected))


def test_which_dtypes_may_have_some():
    for name in DTYPES:
        kind = np.dtype(getattr(ml_dtypes, name, name))
        counts = kind.kind in "biu" or name.startswith(("int", "uint"))
        assert is_inexact(name) is not counts, name


def test_counting_is_done_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "_SMALL_BYTES", 1 << 10)
    array = np.zeros((300, 1000), np.float32)
    array[::100, 7] = np.nan
    source = saved(tmp_path / "c", {"x": array})
    del array
    tracemalloc.start()
    try:
        found = not_finite(source, [0])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == {0: (3, 0)}
    assert peak < 900_000
