"""Bandwidths with their units, to bytes a second. Pure."""

from __future__ import annotations

import math
from typing import Any

from ostraka._units import AMOUNT, bytes_in, parse_argument

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
