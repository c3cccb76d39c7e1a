"""Erasure codes over bytes: XOR, and Reed-Solomon with two sums as RAID-6 has it. Pure.

The members of a group are columns of bytes, padded with zeros to the longest. With D_i the bytes of
member i, in order from 0,

    P = D_0 + D_1 + D_2 + …            Q = D_0 + 2·D_1 + 4·D_2 + …

in the field of 256 elements with the polynomial x^8 + x^4 + x^3 + x^2 + 1 (0x11d), where the sum is
XOR. P alone brings one member back, both together any two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

MOST_MEMBERS = 255
"""The powers of 2 repeat after this many."""
MOST_PARITY = 2

_PIECE_BYTES = 256 << 10
"""The bytes of one pass, so that sums stay in the cache of a core."""
_REDUCED = np.uint8(0x1D)
"""The value of x^8 in the field."""


def encode(members: Sequence[Sequence[Array]], sums: Sequence[Array]) -> None:
    """Fill `sums`, of equal length, with P, or with P and Q.

    A member comes in pieces, and may end before the sums do. The rest counts as zeros.
    """
    windows = [_windows(pieces) for pieces in members]
    total = len(sums[0])
    doubled = np.empty(min(_PIECE_BYTES, total), np.uint8)
    spare = np.empty_like(doubled)
    for start in range(0, total, _PIECE_BYTES):
        p = sums[0][start : start + _PIECE_BYTES]
        columns = [next(window, ()) for window in windows]
        _add_up(columns, p)
        if len(sums) > 1:
            q = doubled[: len(p)]
            q[:] = 0
            # Horner's rule: the last member is doubled most often.
            for number, column in enumerate(reversed(columns)):
                if number:
                    double(q, spare[: len(q)])
                for at, piece in column:
                    add(q[at:], piece)
            sums[1][start : start + len(p)] = q


def solve(
    members: Mapping[int, Sequence[Array]], sums: Mapping[int, Array], lost: Sequence[int]
) -> list[Array]:
    """The lost members, as long as the sums, from all others and one sum for each lost one.

    `members` are by their place in the group, `sums` by number: 0 for P, 1 for Q. Further sums do
    not count.
    """
    if len(lost) > min(len(sums), MOST_PARITY):
        raise ValueError(f"{len(lost)} members can't be found from {len(sums)} sums")
    if not lost:
        return []
    length = len(next(iter(sums.values())))
    if len(lost) == 1 and 0 in sums:
        found = np.empty(length, np.uint8)
        encode([*members.values(), [sums[0]]], [found])
        return [found]
    # What is missing of each sum.
    p, q = np.empty(length, np.uint8), np.empty(length, np.uint8)
    encode([members.get(place, ()) for place in range(max(members, default=0) + 1)], [p, q])
    add(q, sums[1])
    if len(lost) > 1:
        add(p, sums[0])
    return resolve(p, q, lost)


def resolve(p: Array, q: Array, lost: Sequence[int]) -> list[Array]:
    """One or two lost members, from the sums without all other members. Changes `p` and `q`.

    For one member, `q` is enough, and `p` is ignored.
    """
    if len(lost) == 1:
        return [scale(q, inverse(power(lost[0])))]
    # D_a + D_b = p and 2^a·D_a + 2^b·D_b = q, so D_a = (q + 2^b·p) / (2^a + 2^b).
    one, other = lost
    add(q, scale(p, power(other)))
    first = scale(q, inverse(power(one) ^ power(other)))
    add(p, first)
    return [first, p]


def _windows(pieces: Sequence[Array]) -> Iterator[list[tuple[int, Array]]]:
    """A member's bytes by window of `_PIECE_BYTES`: pieces, and where they begin in it."""
    window: list[tuple[int, Array]] = []
    at = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = piece[start : start + _PIECE_BYTES - at]
            window.append((at, part))
            start += len(part)
            at += len(part)
            if at == _PIECE_BYTES:
                yield window
                window, at = [], 0
    if window:
        yield window


def _add_up(columns: Sequence[Sequence[tuple[int, Array]]], target: Array) -> None:
    """XOR of all columns. Copies the first one that fills the target, instead of adding it."""
    whole = next(
        (n for n, c in enumerate(columns) if len(c) == 1 and len(c[0][1]) == len(target)), -1
    )
    target[:] = 0 if whole < 0 else columns[whole][0][1]
    for number, column in enumerate(columns):
        if number != whole:
            for at, piece in column:
                add(target[at:], piece)


def add(target: Array, piece: Array) -> None:
    """Add a piece, which may end before the target does."""
    target = target[: len(piece)]
    np.bitwise_xor(target, piece, out=target)


def double(q: Array, spare: Array) -> None:
    """Multiply every byte by 2: shift it, and reduce it if its top bit falls out.

    Bytes with a top bit are negative as signed ones. numpy has all of these operations for whole
    vectors.
    """
    np.less(q.view(np.int8), 0, out=spare.view(np.bool_))
    np.multiply(spare, _REDUCED, out=spare)
    np.add(q, q, out=q)
    add(q, spare)


# The field


def power(exponent: int) -> int:
    """2 to the power of a number, in the field."""
    return _powers()[exponent % MOST_MEMBERS]


def inverse(element: int) -> int:
    return _powers()[-_powers().index(element) % MOST_MEMBERS]


def multiply(one: int, other: int) -> int:
    if not one or not other:
        return 0
    return power(_powers().index(one) + _powers().index(other))


@cache
def _powers() -> tuple[int, ...]:
    found, element = [], 1
    for _ in range(MOST_MEMBERS):
        found.append(element)
        element = (element << 1) ^ (0x11D if element & 0x80 else 0)
    return tuple(found)


def scale(data: Array, factor: int) -> Array:
    """Every byte times a factor."""
    if factor == 1:
        return data
    even = len(data) // 2 * 2
    scaled = np.empty_like(data)
    table = _pairs(factor)
    # Two bytes at a time: a table of 128 KiB stays in the cache.
    np.take(table, data[:even].view(np.uint16), out=scaled[:even].view(np.uint16), mode="clip")
    if even < len(data):
        scaled[-1] = multiply(int(data[-1]), factor)
    return scaled


@cache
def _pairs(factor: int) -> Array:
    row = np.array([multiply(element, factor) for element in range(256)], np.uint16)
    return (row[:, None] << np.uint16(8) | row[None, :]).reshape(-1)
