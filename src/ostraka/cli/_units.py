"""Sizes, rates, durations and meshes as they are written on the command line."""

from __future__ import annotations

import re

import click

from ostraka import _units

_LONGEST_S = 1e12
_DURATIONS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def parse_size(text: str) -> int:
    """`5GiB`, `500MB`, `1.5e9`."""
    try:
        return _units.parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_rate(text: str) -> float:
    """`2GB/s`, `25Gbit/s`."""
    from ostraka.planner import _rates

    try:
        return _rates.parse_rate(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_duration(text: str) -> float:
    """`4h`, `30min`, `86400s`; a number alone could mean anything."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?", text.strip().lower())
    if found is not None and found[2] is None:
        raise click.BadParameter(
            f"{text!r} has no unit; write {found[1]}h for hours, or {found[1]}s, {found[1]}min, "
            f"{found[1]}d"
        )
    seconds = 0.0 if found is None else float(found[1]) * _DURATIONS[found[2]]
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
