"""Long lists of integers as arithmetic runs, to JSON and back, in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ostraka._allowance import Allowance

_MOST_NUMBERS = 1 << 26
_MOST_SHARED = 1 << 17
"""Device numbers and the like, which many lists have: one object stands in all of them."""
_BYTES_IN_LIST = 8
_BYTES_OF_INT = 32


def encode_runs(numbers: Sequence[int]) -> list[list[int]]:
    """Integers as arithmetic runs `[start, step, count]`; device orders and sizes become tiny."""
    runs: list[list[int]] = []
    for number in numbers:
        start, step, length = runs[-1] if runs else (0, 0, 0)
        if length == 1:
            runs[-1] = [start, number - start, 2]
        elif length and number == start + step * length:
            runs[-1][2] += 1
        elif length == 2 and step:
            # Two numbers alone are no run yet: let the second begin one of its own.
            runs[-1:] = [[start, 0, 1], [start + step, number - start - step, 2]]
        else:
            runs.append([number, 0, 1])
    return runs


def decode_runs(
    runs: Sequence[Sequence[int]], allowance: Allowance | None = None, each_bytes: int = 0
) -> tuple[int, ...]:
    """The integers again. `each_bytes` is what is made of each later, for the allowance.

    Raises ValueError or TypeError before any memory is taken.
    """
    if not all(type(n) is int for run in runs for n in run) or any(run[2] < 1 for run in runs):
        raise ValueError("a list of numbers has something else in it")
    count = count_runs(runs)
    if count > _MOST_NUMBERS:
        raise ValueError("a list of numbers is longer than any checkpoint needs")
    if any(max(abs(start), abs(start + step * length)) >> 63 for start, step, length in runs):
        raise ValueError("a list of numbers has one that is too large")
    if allowance is not None:
        own = sum(length for start, step, length in runs if not _is_shared(start, step, length))
        allowance.take(count * (_BYTES_IN_LIST + each_bytes) + own * _BYTES_OF_INT)
    numbers: list[int] = []
    for start, step, length in runs:
        if step == 0:
            numbers += [start] * length
        elif _is_shared(start, step, length):
            stop = start + step * length
            # A negative stop would count from the end of the list.
            numbers += _up_to(max(start, stop))[start : stop if stop >= 0 else None : step]
        else:
            numbers += range(start, start + step * length, step)
    return tuple(numbers)


def count_runs(runs: Sequence[Sequence[int]]) -> int:
    """How many numbers runs stand for."""
    return sum(length for _, _, length in runs)


def _is_shared(start: int, step: int, length: int) -> bool:
    last = start + step * (length - 1)
    return step == 0 or (min(start, last) >= 0 and max(start, last) + abs(step) < _MOST_SHARED)


def _up_to(number: int) -> list[int]:
    """At least all numbers below this one."""
    return _first_numbers(max(number.bit_length(), 8))


@cache
def _first_numbers(bits: int) -> list[int]:
    return list(range(1 << bits))
