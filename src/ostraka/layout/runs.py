"""Long lists of integers as arithmetic runs, to JSON and back, in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

# How much memory what a checkpoint describes may take: in proportion to what its files hold. Pure.

FREE_BYTES = 32 << 20
"""The memory that any checkpoint may ask for, even the smallest."""
BYTES_FOR_EACH = 8
"""The further memory that it may ask for, per byte in its files."""


class Allowance:
    """The memory left for the lists that a checkpoint describes.

    `held_bytes` is the size of the files, or a function that returns it (called lazily).
    """

    def __init__(self, held_bytes: int | Callable[[], int]):
        self._taken = 0
        self._limit = FREE_BYTES
        self._held: int | Callable[[], int] | None = held_bytes

    def take(self, nbytes: int) -> None:
        """Count memory before taking it. Raises ValueError if there is less left."""
        self._taken += nbytes
        if self._taken > self._limit and self._held is not None:
            held = self._held if isinstance(self._held, int) else self._held()
            self._limit += BYTES_FOR_EACH * held
            self._held = None
        if self._taken > self._limit:
            raise ValueError(
                "it describes lists that are longer than any checkpoint needs whose files hold as "
                "little as these"
            )


_MOST_NUMBERS = 1 << 26
_MOST_SHARED = 1 << 17
"""Many lists have numbers below this, such as device numbers, and share the int objects."""
_BYTES_IN_LIST = 8
_BYTES_OF_INT = 32


def encode_runs(numbers: Sequence[int]) -> list[list[int]]:
    """Integers as arithmetic runs `[start, step, count]`: device orders and sizes become tiny."""
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
    """The integers again. `each_bytes` is the memory that each needs later, for the allowance.

    Raises ValueError or TypeError before it takes any memory.
    """
    count = own = 0
    for start, step, length in runs:
        if not type(start) is type(step) is type(length) is int or length < 1:
            raise ValueError("a list of numbers has something else in it")
        if max(abs(start), abs(start + step * length)) >> 63:
            raise ValueError("a list of numbers has one that is too large")
        count += length
        own += 0 if _is_shared(start, step, length) else length
    if count > _MOST_NUMBERS:
        raise ValueError("a list of numbers is longer than any checkpoint needs")
    if allowance is not None:
        allowance.take(count * (_BYTES_IN_LIST + each_bytes) + own * _BYTES_OF_INT)
    numbers: list[int] = []
    for start, step, length in runs:
        if step == 0:
            numbers += [start] * length
        elif _is_shared(start, step, length):
            stop = start + step * length
            # A negative stop would count from the end of the list.
            known = _first_numbers(max(start.bit_length(), stop.bit_length(), 8))
            numbers += known[start : stop if stop >= 0 else None : step]
        else:
            numbers += range(start, start + step * length, step)
    return tuple(numbers)


def _is_shared(start: int, step: int, length: int) -> bool:
    last = start + step * (length - 1)
    return step == 0 or (min(start, last) >= 0 and max(start, last) + abs(step) < _MOST_SHARED)


@cache
def _first_numbers(bits: int) -> list[int]:
    return list(range(1 << bits))
