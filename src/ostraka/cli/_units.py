"""Sizes, durations and meshes as they are written on the command line."""

from __future__ import annotations

import re

import click

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("kmgtp", 1)}
_LONGEST_S = 1e12
_DURATIONS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def parse_size(text: str) -> int:
    """`5GiB`, `500MB`, `1.5e9`, `2GB/s`."""
    number = r"(\d+(?:\.\d+)?(?:e\d+)?)"
    found = re.fullmatch(rf"{number}\s*([kmgtp]i?)?b?(?:/s)?", text.strip().lower())
    size = 0.0 if found is None else float(found[1]) * (_SIZES | _BINARY)[found[2] or ""]
    if not 1 <= size < 2**63:
        raise click.BadParameter(f"{text!r} is no size; write it as 5GiB, 500MB or 2000000000")
    return round(size)


def parse_duration(text: str) -> float:
    """`4h`, `30min`, `86400`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?", text.strip().lower())
    seconds = 0.0 if found is None else float(found[1]) * _DURATIONS[found[2] or ""]
    if not 0 < seconds < _LONGEST_S:
        raise click.BadParameter(f"{text!r} is no duration; write it as 4h, 30min, 2d or 3600s")
    return seconds


def parse_mesh(text: str) -> dict[str, int]:
    """`data=64,model=8`."""
    sizes: dict[str, int] = {}
    for axis in text.split(","):
        name, equals, size = (part.strip() for part in axis.partition("="))
        is_size = size.isdecimal() and int(size) > 0
        if not (name and equals and is_size) or name in sizes:
            raise click.BadParameter(f"{text!r} is no mesh; write it as data=64,model=8")
        sizes[name] = int(size)
    return sizes
