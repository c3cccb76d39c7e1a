"""Packed dtypes against plain arithmetic on bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraka.common import dtypes
from ostraka.common.dtypes import DTYPES, numpy_dtype

PACKED = sorted(name for name, dtype in DTYPES.items() if dtype.packed)


def every_value(name):
    """All values of a dtype once, in the order of their bits."""
    bits = DTYPES[name].bits
    return np.arange(1 << bits, dtype=np.uint8).view(numpy_dtype(name))


def bits_of(array):
    """The elements as unsigned numbers; what lies above a packed element's own bits is dropped."""
    bits = DTYPES[array.dtype.name].bits
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [int(byte) % (1 << bits) for byte in flat]


def test_all_dtypes_below_a_byte_are_packed():
    assert PACKED == ["float4_e2m1fn", "int2", "int4", "uint2", "uint4"]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("int2", range(-2, 2)),
        ("int4", range(-8, 8)),
        ("float4_e2m1fn", [0.0, -0.0, 0.5, -6.0]),
        ("uint2", 3),
        ("int4", []),
    ],
)
def test_numbers_come_back_as_ml_dtypes_has_them(name, numbers):
    values = np.array(numbers, np.float32).astype(numpy_dtype(name))
    again = dtypes.from_bytes(dtypes.to_bytes(values), name, values.shape)
    assert (again.dtype, again.shape, again.tobytes()) == (
        *(values.dtype, values.shape),
        values.tobytes(),
    )
    found = again.astype(np.float32)
    np.testing.assert_array_equal(found, np.array(numbers, np.float32))
    assert (np.signbit(found) == np.signbit(np.array(numbers, np.float32))).all()


@settings(max_examples=60)
@given(
    name=st.sampled_from(PACKED),
    shape=st.lists(st.integers(0, 7), max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_shape_packs_in_row_major_order_and_ends_with_zeros(name, shape, seed):
    bits = DTYPES[name].bits
    rng = np.random.default_rng(seed)
    array = rng.choice(every_value(name), size=shape)
    packed = dtypes.to_bytes(array)
    assert packed.dtype == np.uint8
    assert packed.size == DTYPES[name].nbytes(array.size)
    number = int.from_bytes(packed.tobytes(), "little")
    assert number == sum(value << (bits * i) for i, value in enumerate(bits_of(array)))
    again = dtypes.from_bytes(packed, name, array.shape)
    assert again.tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("name", PACKED)
def test_arrays_that_are_not_contiguous_pack_by_element_order(name):
    array = np.resize(every_value(name), (6, 8))
    for view in (array.T, array[::2], array[:, 1:6], array[::-1, ::-1], np.asfortranarray(array)):
        assert dtypes.to_bytes(view).tobytes() == dtypes.to_bytes(view.copy(order="C")).tobytes()


def test_bits_above_an_element_do_not_leak_into_its_neighbours():
    dirty = np.array([0xF1, 0xA2, 0xFF], np.uint8).view(numpy_dtype("uint4"))
    assert dtypes.to_bytes(dirty).tobytes() == b"\x21\x0f"


def test_unpacked_memory_is_writable_and_contiguous():
    again = dtypes.from_bytes(np.frombuffer(b"\x21\x43", np.uint8), "uint4", (4,))
    assert again.flags.writeable
    assert again.flags.c_contiguous
    assert again.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_is_the_same_after_a_file(name):
    array = np.resize(every_value("uint4").view(np.uint8), (3, 4, 5)).astype(numpy_dtype(name))
    for view in (array, array.T, array[1:, ::2], array[0, 0, 0], array[:0]):
        stored = dtypes.to_bytes(view)
        assert stored.dtype == np.uint8
        assert stored.size == DTYPES[name].nbytes(view.size)
        again = dtypes.from_bytes(stored, name, view.shape)
        assert (again.dtype, again.shape) == (view.dtype, view.shape)
        assert again.tobytes() == view.tobytes()


def test_bytes_of_whole_elements_are_views():
    array = np.arange(12.0).reshape(3, 4)
    assert np.shares_memory(dtypes.to_bytes(array), array)
    assert np.shares_memory(dtypes.from_bytes(dtypes.to_bytes(array), "float64", (12,)), array)
    assert not np.shares_memory(dtypes.to_bytes(array.T), array)


def test_dtypes_that_no_file_has_are_bytes_too():
    assert dtypes.to_bytes(np.array([1, 2], "datetime64[s]")).size == 16
