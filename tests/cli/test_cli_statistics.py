"""Statistics of leaves, against numpy on the whole array."""

import tracemalloc
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import ostraka
from ostraka.common.dtypes import DTYPES, is_inexact
from ostraka.common.progress import OnBytes
from ostraka.formats import open_source
from ostraka.formats.source import Source
from ostraka.report import measure
from ostraka.report.measure import Statistics, count_not_finite, statistics_of
from ostraka.storage import open_store


def saved(path: Path, tree: Any) -> Source:
    ostraka.save(path, tree)
    return open_source(open_store(path))


def look_at(path: Path, array: Any) -> Statistics:
    return statistics_of(saved(path, {"x": array}), [0])[0]


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "int8", "uint16", "int64"],
)
def test_numbers_of_every_kind(tmp_path: Path, dtype: str):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.random.default_rng(0).normal(size=(37, 11)) * 20
    array = (np.abs(values) if dtype.startswith("u") else values).astype(kind)
    found = look_at(tmp_path / "c", array)
    wide = array.astype(np.float64)
    assert (found.count, found.nan, found.infinite) == (array.size, 0, 0)
    assert (found.least, found.most) == (wide.min(), wide.max())
    assert found.mean == pytest.approx(wide.mean())
    assert found.std == pytest.approx(wide.std())


def test_numbers_of_less_than_a_byte(tmp_path: Path):
    found = look_at(tmp_path / "c", jnp.arange(-8, 8, dtype=jnp.int4).reshape(2, 8))
    assert (found.least, found.most, found.mean) == (-8, 7, -0.5)


def test_integers_stay_exact(tmp_path: Path):
    found = look_at(tmp_path / "c", np.array([2**64 - 1, 2**63 + 1], np.uint64))
    assert (found.least, found.most) == (2**63 + 1, 2**64 - 1)


def test_nan_and_infinity_are_counted_and_left_out(tmp_path: Path):
    array = np.array([1.0, np.nan, 3.0, np.inf, -np.inf, np.nan], np.float32)
    found = look_at(tmp_path / "c", array)
    assert (found.nan, found.infinite, found.finite) == (2, 2, 2)
    assert (found.least, found.most) == (-np.inf, np.inf)
    assert (found.mean, found.std) == (2.0, 1.0)


@pytest.mark.parametrize("array", [np.zeros((0, 3), np.float32), np.full(3, np.nan)], ids=str)
def test_without_a_number_there_is_nothing_to_say(tmp_path: Path, array: Any):
    found = look_at(tmp_path / "c", array)
    assert (found.least, found.most, found.mean, found.std) == (None, None, None, None)


def test_of_complex_numbers_the_magnitudes_count(tmp_path: Path):
    found = look_at(tmp_path / "c", np.array([3 + 4j, 0, complex(0, float("nan"))], np.complex64))
    assert (found.least, found.most, found.mean, found.nan) == (0.0, 5.0, 2.5, 1)


def test_huge_numbers_do_not_raise(tmp_path: Path):
    found = look_at(tmp_path / "c", np.array([1e308, -1e308, 1e308]))
    assert (found.least, found.most) == (-1e308, 1e308)


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
    seen: list[tuple[int, int]] = []

    @contextmanager
    def progress(what: str, total: int) -> Generator[OnBytes]:
        yield lambda done, total: seen.append((done, total))

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


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "float8_e5m2"])
def test_what_is_not_finite_is_counted(tmp_path: Path, dtype: str):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.zeros((50, 40))
    array[3, :7] = np.nan
    array[:5, 39] = -np.inf
    source = saved(tmp_path / "c", {"x": array.astype(kind), "fine": np.ones(9, kind)})
    assert not_finite(source, [0, 1, 0]) == {0: (7, 5), 1: (0, 0)}


def test_complex_numbers_that_are_not_finite(tmp_path: Path):
    array = np.array([1, complex(0, np.nan), complex(np.inf, np.nan), complex(0, -np.inf)])
    assert not_finite(saved(tmp_path / "c", [array]), [0]) == {0: (2, 1)}


def test_a_float_without_infinity(tmp_path: Path):
    array = np.array([1, np.nan], ml_dtypes.float8_e4m3fn)
    assert not_finite(saved(tmp_path / "c", [array]), [0]) == {0: (1, 0)}


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_which_dtypes_may_have_some(name: str):
    kind = np.dtype(getattr(ml_dtypes, name, name))
    counts = kind.kind in "biu" or name.startswith(("int", "uint"))
    assert is_inexact(name) is not counts


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
