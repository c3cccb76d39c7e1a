"""The CRC-32 of two pieces of data together, from the CRC-32 of each. Pure.

A CRC is linear over GF(2): that of `a + b` is that of `a` followed by as many zeros as `b` has
bytes, XOR that of `b`. To follow by zeros is to multiply with a power of x.
"""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1, bits reversed as zlib has them."""


def join_crcs(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of all of the data; `second_bytes` is how long its second part is."""
    return _multiply(_zeros(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of the CRC."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFF_FFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _zeros(nbytes: int) -> int:
    """The polynomial that stands for so many zero bytes."""
    result, bit = _ONE, 0
    while nbytes >> bit:
        if nbytes >> bit & 1:
            result = _multiply(_power(bit), result)
        bit += 1
    return result


@cache
def _power(bit: int) -> int:
    """That of `1 << bit` zero bytes."""
    if bit == 0:
        return _ONE >> 8
    half = _power(bit - 1)
    return _multiply(half, half)
