"""Plain values as JSON and back."""

import enum
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraka.tree.json_values import (
    Unwritable,
    decode_key,
    decode_plain,
    encode_key,
    encode_plain,
    encode_scalar,
    key_text,
    text_of_encoded,
)


class Number(enum.IntEnum):
    ONE = 1


class Odd(enum.Enum):
    THING = object()


class Flag(enum.Flag):
    A = 1
    B = 2


def through_json(encoded: Any) -> Any:
    return json.loads(json.dumps(encoded, allow_nan=False))


def exact(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag)
    return value


SURROGATES = st.text(st.characters(categories=["Cs", "Ll"]), max_size=6)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.builds(
        lambda bits: struct.unpack(">d", struct.pack(">Q", bits))[0], st.integers(0, 2**64 - 1)
    ),
    st.complex_numbers(allow_nan=True),
    st.text(),
    SURROGATES,
    st.binary(),
)


@given(SCALARS)
def test_scalars_are_exact(value: Any):
    again = decode_plain(through_json(encode_scalar(value)))
    assert type(again) is type(value)
    assert exact(again) == exact(value)


@given(st.recursive(SCALARS, lambda x: st.one_of(st.lists(x), st.lists(x).map(tuple))))
def test_plain_values_are_exact(value: Any):
    again = decode_plain(through_json(encode_plain(value)))
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        Number.ONE,
        np.float32(0.1),
        np.int8(-3),
        np.bool_(True),
        np.str_("é"),
        np.bytes_(b"x"),
        np.complex64(1 + 2j),
        {"a": (1, [Number.ONE])},
        np.dtype(">f4").type(2.5),
    ],
    ids=repr,
)
def test_other_plain_values_come_back(value: Any):
    again = decode_plain(through_json(encode_plain(value)))
    assert type(again) is type(value)
    assert again == value


def test_an_enum_whose_class_is_not_loaded_is_what_it_stands_for():
    class Local(enum.Enum):
        A = (1, "x")

    encoded = through_json(encode_plain(Local.A))
    assert decode_plain(encoded) == (1, "x")
    assert text_of_encoded(encoded) == "Local.A"
    assert decode_plain({"enum": ["no_such_module", "Kind", "A", {"int": 3}]}) == 3
    assert decode_plain(through_json(encode_plain(Odd.THING))) is Odd.THING
    assert decode_plain({"enum": [__name__, "Odd", "GONE", {"str": "GONE"}]}) == "GONE"


def test_members_of_a_flag_that_have_no_name_of_their_own():
    both = Flag.A | Flag.B
    assert decode_plain(through_json(encode_plain(both))) in (both, 3)


@pytest.mark.parametrize("value", [object(), {1}, len, np.datetime64(1, "s"), [object()], int])
def test_what_is_not_plain(value: Any):
    with pytest.raises(Unwritable, match="^a "):
        encode_plain(value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("a/b", "a/b"),
        (7, "7"),
        (True, "True"),
        (None, "None"),
        (1.5, "1.5"),
        (("kernel", "u"), "('kernel', 'u')"),
        (("kernel",), "('kernel',)"),
        ((), "()"),
        ((1, (Number.ONE, None)), "(1, (Number.ONE, None))"),
        (np.float32(0.5), "0.5"),
        (np.str_("x"), "x"),
        (b"k", "b'k'"),
    ],
)
def test_keys_in_paths(key: Any, text: str):
    assert key_text(key) == text
    encoded = through_json(encode_key(key))
    assert text_of_encoded(encoded) == text
    assert decode_key(encoded) == key


@pytest.mark.parametrize(
    "encoded", [{"bool": 1}, {"int": "x"}, {"float": "y"}, {"what": 1}, {"numpy": ["object", "00"]}]
)
def test_what_nobody_writes(encoded: Any):
    with pytest.raises((ValueError, TypeError), match=r".+"):
        decode_plain(encoded)
