"""Patterns over leaf paths, as `only=`, `dtype=` and the rules of `ostraka.sharding` take them.

| pattern | stands for |
| --- | --- |
| `?` | one character of a name |
| `*` | any characters of a name: `layers/*/kernel` is the kernel of each layer |
| `**/` | any number of names, none included: `**/kernel` is every kernel, a bare `kernel` too |
| `/**` at the end | everything below |

A pattern that matches a name matches everything below it: `model` does what `model/**` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

Patterns = str | Sequence[str]


def matches(patterns: Patterns, path: str) -> bool:
    """Whether any of the patterns matches the path, or a name above it."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(_compiled(pattern).fullmatch(path) is not None for pattern in listed)


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
