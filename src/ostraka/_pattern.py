"""Patterns over leaf paths, as `only=`, `dtype=` and the rules of `ostraka.sharding` take them.

| pattern | stands for |
| --- | --- |
| `?` | one character of a name |
| `*` | any characters of a name: `layers/*/kernel` is the kernel of each layer |
| `**/` | any number of names, none included: `**/kernel` is every kernel, a bare `kernel` too |
| `/**` at the end | everything below |

A pattern that matches a name matches everything below it: `model` does what `model/**` does. In
`only=`, a pattern after `!` leaves out what it matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ostraka.errors import nearest

Patterns = str | Sequence[str]


def matches(patterns: Patterns, path: str) -> bool:
    """Whether any of the patterns matches the path, or a name above it."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(_compiled(pattern).fullmatch(path) is not None for pattern in listed)


def split_patterns(patterns: Patterns) -> tuple[list[str], list[str]]:
    """The patterns that select, and those after `!` that leave out."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    left_out = [pattern for pattern in listed if pattern.startswith("!")]
    return [pattern for pattern in listed if pattern not in left_out], left_out


def selects(patterns: Patterns, path: str) -> bool:
    """As `matches`, but without what is matched by a pattern after `!`.

    Where there are only such patterns, everything else is selected.
    """
    wanted, left_out = split_patterns(patterns)
    unwanted = [pattern[1:] for pattern in left_out]
    return (not wanted or matches(wanted, path)) and not matches(unwanted, path)


def unmatched(patterns: Iterable[str], paths: Collection[str]) -> list[str]:
    """For each pattern that matches none of the paths, the pattern and the nearest name."""
    unused = [
        pattern
        for pattern in patterns
        if not any(matches(pattern.removeprefix("!"), path) for path in paths)
    ]
    names = {name for path in paths if unused for name in (*names_on(path), *path.split("/"))}
    return [f"{pattern!r}{nearest(pattern.strip('!*/'), sorted(names))}" for pattern in unused]


def names_on(path: str) -> list[str]:
    """The names above a leaf, topmost first, and its own path."""
    return list(accumulate(path.split("/"), "{}/{}".format))


def lookup(table: Mapping[str, Any], path: str) -> Any:
    """The entry of the first pattern that matches the path, or None."""
    return next((value for pattern, value in table.items() if matches(pattern, path)), None)


def rename_with(table: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces the longest beginning of a path that the table names."""
    ordered = sorted(table.items(), key=lambda item: -len(item[0]))

    def rename(path: str) -> str:
        for old, new in ordered:
            if path == old:
                return new
            if path.startswith(f"{old}/"):
                return f"{new}{path[len(old) :]}"
        return path

    return rename


_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    # "**/" stands for whole names only: in "a**/b" the stars belong to a name.
    parts = re.split(r"((?:(?<=/)|(?<=^))\*\*/|\*\*|\*|\?)", pattern)
    text = "".join(_WILDCARDS.get(part) or re.escape(part) for part in parts)
    return re.compile(f"{text}(/.*)?", re.DOTALL)
