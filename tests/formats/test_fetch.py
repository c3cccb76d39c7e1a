"""Boxes of leaves read into memory, whatever they have in common."""

import threading
import uuid
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ostraka
from cli_runs import put
from ostraka.common.dtypes import numpy_dtype
from ostraka.formats import open_source
from ostraka.formats.source import Source
from ostraka.layout import plan_read
from ostraka.layout.spec import Target
from ostraka.storage import Traits, open_store
from ostraka.testing import FaultyStore

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
dtypes = st.sampled_from([None, None, "bfloat16", "float64"])
targets = st.lists(st.builds(Target, st.integers(0, 2), boxes, dtypes), min_size=1, max_size=6)


def elements(target: Target) -> Any:
    found = ARRAYS[target.leaf][tuple(slice(*span) for span in target.box)]
    return found if target.dtype is None else found.astype(numpy_dtype(target.dtype))


@given(wanted=targets)
def test_targets_may_want_the_same_elements(source: Source, wanted: list[Target]):
    found = list(source.read(wanted))
    assert sorted(number for number, _ in found) == list(range(len(wanted)))
    for number, array in found:
        assert array.dtype == elements(wanted[number]).dtype
        assert np.array_equal(array, elements(wanted[number]))


def test_large_targets_may_want_the_same_elements_and_casts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plan_read, "CHUNK_BYTES", 1 << 12)
    path = f"memory://{uuid.uuid4().hex}"
    array = np.linspace(-3, 3, 100_000)
    ostraka.save(path, {"x": array, "y": array + 1})
    whole, most = ((0, 100_000),), ((10, 99_000),)
    wanted = [Target(0, whole), Target(0, most), Target(0, whole), Target(1, whole)]
    expected = [array, array[10:99_000], array, array + 1]
    for dtype in (None, "float32"):
        found = dict(open_source(open_store(path)).read([t._replace(dtype=dtype) for t in wanted]))
        assert len(found) == len(wanted)
        for number, one in found.items():
            assert one.dtype == (dtype or np.float64)
            assert np.array_equal(one, expected[number].astype(one.dtype))


def test_casts_heed_what_the_caller_has_chosen_for_overflows():
    path = f"memory://{uuid.uuid4().hex}"
    ostraka.save(path, {"x": np.array([1.0, 1e300])})

    def restore() -> Any:
        return ostraka.restore(path, dtype="float32")["x"]

    with np.errstate(over="ignore"):
        assert restore().tolist() == [1.0, np.inf]
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
        assert restore().tolist() == [1.0, np.inf]
    with (
        np.errstate(over="raise"),
        pytest.raises(FloatingPointError, match="overflow encountered in cast"),
    ):
        restore()


class _HeaderComesLast(FaultyStore):
    """Gives nothing of the first bytes of a file before its last bytes have been read."""

    def __init__(self, path: str):
        super().__init__(path, traits=Traits(reads_at_once=2))
        self.has_read_last = threading.Event()

    def open(self, name: str, first_bytes: int = 0) -> Any:
        return _HeaderComesLastReader(self, super().open(name, first_bytes))


class _HeaderComesLastReader:
    def __init__(self, store: _HeaderComesLast, reader: Any):
        self._store, self._reader = store, reader
        self.size, self.close = reader.size, reader.close

    def read_into(self, offset: int, buffers: Sequence[Any]) -> int:
        if offset == 0:
            assert self._store.has_read_last.wait(60), "the rest of the file waits for its header"
        count: int = self._reader.read_into(offset, buffers)
        if offset + count == self.size:
            self._store.has_read_last.set()
        return count


def test_the_rest_of_a_file_does_not_wait_for_its_header():
    path = f"memory://{uuid.uuid4().hex}"
    array = np.arange(2 * plan_read.CHUNK_BYTES, dtype=np.uint8)
    ostraka.save(path, {"x": jax.device_put(array, jax.devices()[0])})
    source = open_source(_HeaderComesLast(path))
    assert len(source.files()) == 1
    ((_, found),) = source.read([Target(0, ((0, array.size),))])
    assert np.array_equal(found, array)
