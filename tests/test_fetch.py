"""Boxes of leaves read into memory, whatever they have in common."""

import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostraka
from cli_runs import put
from ostraka import _plan_read
from ostraka._source import Source
from ostraka._spec import Target
from ostraka.formats import open_source
from ostraka.storage import open_store

SHAPE = (24, 16)
ARRAYS = [np.arange(24 * 16, dtype=np.float32).reshape(SHAPE) + 1000 * n for n in range(3)]


@pytest.fixture(scope="module")
def source() -> Source:
    path = f"memory://{uuid.uuid4().hex}"
    ostraka.save(path, [ARRAYS[0], put(ARRAYS[1], "fsdp", "tp"), put(ARRAYS[2], None, "fsdp")])
    return open_source(open_store(path))


def spans(extent: int) -> st.SearchStrategy[tuple[int, int]]:
    ends = st.integers(0, extent)
    return st.tuples(ends, ends).map(lambda pair: (min(pair), max(pair)))


boxes = st.just(tuple((0, n) for n in SHAPE)) | st.tuples(*map(spans, SHAPE))
targets = st.lists(st.builds(Target, st.integers(0, 2), boxes), min_size=1, max_size=6)


def elements(target: Target) -> Any:
    return ARRAYS[target.leaf][tuple(slice(*span) for span in target.box)]


@given(wanted=targets)
def test_targets_may_want_the_same_elements(source: Source, wanted: list[Target]):
    found = list(source.read(wanted))
    assert sorted(number for number, _ in found) == list(range(len(wanted)))
    for number, array in found:
        assert np.array_equal(array, elements(wanted[number]))


def test_large_targets_may_want_the_same_elements(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_plan_read, "CHUNK_BYTES", 1 << 12)
    path = f"memory://{uuid.uuid4().hex}"
    array = np.arange(100_000)
    ostraka.save(path, {"x": array, "y": array + 1})
    source = open_source(open_store(path))
    whole, most = ((0, 100_000),), ((10, 99_000),)
    wanted = [Target(0, whole), Target(0, most), Target(0, whole), Target(1, whole)]
    expected = [array, array[10:99_000], array, array + 1]
    found = dict(source.read(wanted))
    assert len(found) == len(wanted)
    assert all(np.array_equal(found[number], expected[number]) for number in found)
