"""Erasure codes: any lost members, up to the number of sums, come back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostraka.layout import parity_code


def _slow_multiply(one: int, other: int) -> int:
    """By the definition of the field: polynomials over one bit, modulo 0x11d."""
    product = 0
    for bit in range(8):
        if other >> bit & 1:
            product ^= one << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def test_field_is_that_of_its_polynomial() -> None:
    for one in range(256):
        for other in (0, 1, 2, 3, 29, 128, 255):
            assert parity_code.multiply(one, other) == _slow_multiply(one, other)
        if one:
            assert parity_code.multiply(one, parity_code.inverse(one)) == 1
    assert len({parity_code.power(n) for n in range(parity_code.MOST_MEMBERS)}) == 255


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 7, 4096, 131_071, 262_144, 262_147, 300_001]), min_size=1, max_size=6
    ),
    lost=st.lists(st.integers(0, 7), max_size=2, unique=True),
    count=st.integers(1, 2),
    cuts=st.lists(st.integers(1, 299_999), max_size=3),
    seed=st.integers(0, 99),
)
def test_any_members_up_to_the_number_of_sums_come_back(lengths, lost, count, cuts, seed) -> None:
    random = np.random.default_rng(seed)
    members = [random.integers(0, 256, length, np.uint8) for length in lengths]
    longest = max(lengths)
    pieces = [np.split(member, [c for c in sorted(cuts) if c < len(member)]) for member in members]
    sums = [np.empty(longest, np.uint8) for _ in range(count)]
    parity_code.encode(pieces, sums)
    lost_members = [place for place in lost if place < len(members)][:count]
    kept_sums = dict(enumerate(sums))
    if len(lost_members) < len(lost) and len(lost_members) < count:
        kept_sums.pop(seed % count)  # one of the sums is lost as well
    if len(lost_members) > len(kept_sums):
        return
    kept = {place: pieces[place] for place in range(len(members)) if place not in lost_members}
    for place, found in zip(
        lost_members, parity_code.solve(kept, kept_sums, lost_members), strict=True
    ):
        assert np.array_equal(found[: lengths[place]], members[place])
        assert not found[lengths[place] :].any()


def test_sums_are_those_of_the_definition() -> None:
    random = np.random.default_rng(1)
    members = [random.integers(0, 256, 100, np.uint8) for _ in range(9)]
    p, q = np.empty(100, np.uint8), np.empty(100, np.uint8)
    parity_code.encode([[member] for member in members], [p, q])
    for at in range(100):
        column = [int(member[at]) for member in members]
        assert p[at] == np.bitwise_xor.reduce(column)
        expected = 0
        for place, byte in enumerate(column):
            factor = 1
            for _ in range(place):
                factor = _slow_multiply(factor, 2)
            expected ^= _slow_multiply(byte, factor)
        assert q[at] == expected


def test_more_members_than_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="2 members can't be found from 1 sums"):
        parity_code.solve({}, {0: np.zeros(8, np.uint8)}, [0, 1])
