"""Sizes and rates with their units, to bytes and back. Pure."""

from __future__ import annotations

import math
import re
from typing import Any

_POWERS = {letter: power for power, letter in enumerate(" kmgtp") if power}
_NUMBER = r"(\d+(?:\.\d+)?(?:e\d+)?)\s*"
_BYTES = re.compile(rf"{_NUMBER}(?:([kmgtpKMGTP])([iI]?))?(?:B|[bB]ytes?)?")
_BITS = re.compile(rf"{_NUMBER}([kmgtpKMGTP])?(?:[bB]its?|bps)")
_LETTER_B = re.compile(rf"{_NUMBER}([kmgtpKMGTP])?([iI]?)b")
_BARE_LETTER = re.compile(rf"{_NUMBER}([kmgtpKMGTP])")


def parse_size(text: str) -> int:
    """The bytes that a text such as `5GiB`, `500MB` or `2000000000` means.

    Raises ValueError for what could mean several things: `5G` may be GB or GiB, `5Gb` gigabits.
    """
    text = text.strip()
    if "/" in text or text.endswith("ps"):
        raise ValueError(f"{text!r} is a rate; a size is written as 5GiB, 500MB or 2000000000")
    if _BITS.fullmatch(text):
        raise ValueError(f"{text!r} is in bits; a size is in bytes: 5GiB, 500MB or 2000000000")
    found = _BYTES.fullmatch(text)
    _refuse_ambiguous(text, bits="")
    if found is None:
        raise ValueError(f"{text!r} is no size; write it as 5GiB, 500MB or 2000000000")
    return round(_in_range(text, _bytes(found), "size"))


def parse_rate(text: str) -> float:
    """The bytes a second that a text means: `2GB/s`, `2GB`, `25Gbit/s`, `25Gbps`."""
    text = text.strip()
    plain = text.removesuffix("/s")
    bits = _BITS.fullmatch(plain)
    if bits is not None:
        return _in_range(text, float(bits[1]) * 1000 ** _POWERS.get((bits[2] or "").lower(), 0) / 8)
    if plain.endswith("Bps"):
        plain = plain.removesuffix("ps")
    _refuse_ambiguous(plain, bits="bit/s")
    found = _BYTES.fullmatch(plain)
    if found is None:
        raise ValueError(f"{text!r} is no bandwidth; write it as 2GB/s, 500MiB/s or 25Gbit/s")
    return _in_range(text, _bytes(found))


def _bytes(found: re.Match[str]) -> float:
    base = 1024 if found[3] else 1000
    return float(found[1]) * base ** _POWERS.get((found[2] or "").lower(), 0)


def _refuse_ambiguous(text: str, *, bits: str) -> None:
    """Raise for a lower-case b, which is bits to some, and for a letter alone."""
    found = _LETTER_B.fullmatch(text)
    if found is not None:
        prefix = f"{found[1]}{(found[2] or '').upper()}"
        in_bytes = f"{prefix}{'i' if found[3] else ''}B"
        or_bits = f", {prefix}{bits} for bits" if bits else ""
        raise ValueError(f"{text!r} may mean bits or bytes; write {in_bytes} for bytes{or_bits}")
    found = _BARE_LETTER.fullmatch(text)
    if found is not None:
        prefix = f"{found[1]}{found[2].upper()}"
        power = 3 * _POWERS[found[2].lower()]
        raise ValueError(
            f"{text!r} may mean 10^{power} or 2^{power // 3 * 10} bytes each; write {prefix}B for "
            f"the former, {prefix}iB for the latter"
        )


def _in_range(text: str, size: float, what: str = "bandwidth") -> float:
    if not 1 <= size < 2**63:
        raise ValueError(f"{text!r} is no {what}: it must be at least a byte, and less than 2^63")
    return size


def size_bytes(name: str, given: Any) -> int:
    """The argument `name` in bytes: a whole number, or a text such as `"1GiB"`."""
    if isinstance(given, str):
        try:
            return parse_size(given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(given, float) and given.is_integer():
        return int(given)
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(
            f"{name} is {given!r}; it must be a whole number of bytes, or a text such as '1GiB'"
        )
    return int(given)


def bytes_per_second(name: str, given: Any) -> float | None:
    """The argument `name` in bytes a second: a number, or a text such as `"2GB/s"`."""
    if given is None:
        return None
    if isinstance(given, str):
        try:
            return parse_rate(given)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
        raise TypeError(
            f"{name} is {given!r}; it must be a number of bytes a second, or a text such as '2GB/s'"
        )
    return float(given)


def human_bytes(count: int) -> str:
    """A size that people read at a glance: `1.5 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = min(int(math.log2(count) // 10), 6)
    return f"{count / 1024**power:.1f} {' KMGTPE'[power]}iB"
