"""Sizes with their units, to bytes and back. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)

_POWERS = {letter: power for power, letter in enumerate(" kmgtp") if power}
AMOUNT = re.compile(
    r"(?P<number>\d+(?:\.\d+)?(?:e\d+)?)\s*"
    r"(?:(?P<prefix>[kmgtpKMGTP])(?P<binary>[iI]?))?"
    r"(?P<unit>B|b|[bB]ytes?|(?P<bits>[bB]its?|bps)|)"
)
_SIZES = "5GiB, 500MB or 2000000000"


def parse_size(text: str) -> int:
    """The bytes that a text such as `5GiB`, `500MB` or `2000000000` means.

    Raises ValueError for what could mean several things: `5G` may be GB or GiB, `5Gb` gigabits.
    """
    text = text.strip()
    if "/" in text or text.endswith("ps"):
        raise ValueError(f"{text!r} is a rate; a size is written as {_SIZES}")
    found = AMOUNT.fullmatch(text)
    if found is not None and found["bits"]:
        raise ValueError(f"{text!r} is in bits; a size is in bytes: {_SIZES}")
    return round(bytes_in(text, found, "size", _SIZES, or_bits=""))


def bytes_in(
    text: str, found: re.Match[str] | None, what: str, examples: str, *, or_bits: str
) -> float:
    """The bytes of the amount that was found in `text`. Raises ValueError for what is not clear."""
    if found is None:
        raise ValueError(f"{text!r} is no {what}; write it as {examples}")
    letter = found["prefix"] or ""
    number = f"{found['number']}{letter.upper()}"
    power = _POWERS.get(letter.lower(), 0)
    if found["unit"] == "b":
        raise ValueError(
            f"{found[0]!r} may mean bits or bytes; write {number}{'i' if found['binary'] else ''}B "
            f"for bytes{or_bits.format(number)}"
        )
    if letter and not found["binary"] and not found["unit"]:
        raise ValueError(
            f"{found[0]!r} may mean 10^{3 * power} or 2^{10 * power} bytes each; write {number}B "
            f"for the former, {number}iB for the latter"
        )
    base = 1024 if found["binary"] else 1000
    size = float(found["number"]) * base**power / (8 if found["bits"] else 1)
    if not 1 <= size < 2**63:
        raise ValueError(f"{text!r} is no {what}: it must be at least a byte, and less than 2^63")
    return size


def size_bytes(name: str, given: Any) -> int:
    """The argument `name` in bytes: a whole number, or a text such as `"1GiB"`."""
    if isinstance(given, str):
        return parse_argument(name, given, parse_size)
    if isinstance(given, float) and given.is_integer():
        return int(given)
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(
            f"{name} is {given!r}; it must be a whole number of bytes, or a text such as '1GiB'"
        )
    return int(given)


def parse_argument(name: str, text: str, parse: Callable[[str], Number]) -> Number:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def human_bytes(count: int) -> str:
    """A size that people read at a glance: `1.5 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = min(int(math.log2(count) // 10), 6)
    return f"{count / 1024**power:.1f} {' KMGTPE'[power]}iB"


# Bandwidths with their units, to bytes a second. Pure.


_RATES = "2GB/s, 500MiB/s or 25Gbit/s"


def parse_rate(text: str) -> float:
    """The bytes a second that a text means: `2GB/s`, `2GB`, `25Gbit/s`, `25Gbps`."""
    text = text.strip()
    amount = text.removesuffix("/s")
    if amount.endswith("Bps"):
        amount = amount.removesuffix("ps")
    found = AMOUNT.fullmatch(amount)
    return bytes_in(text, found, "bandwidth", _RATES, or_bits=", {}bit/s for bits")


def bytes_per_second(name: str, given: Any) -> float | None:
    """The argument `name` in bytes a second: a number, or a text such as `"2GB/s"`."""
    if given is None:
        return None
    if isinstance(given, str):
        return parse_argument(name, given, parse_rate)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise TypeError(
            f"{name} is {given!r}; it must be a number of bytes a second, or a text such as '2GB/s'"
        )
    return float(given)
