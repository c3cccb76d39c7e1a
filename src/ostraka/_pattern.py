"""Patterns over leaf paths: `*` within one name, `**` across names, `?` one character."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

Patterns = str | Sequence[str]


def matches(patterns: Patterns, path: str) -> bool:
    """Whether any of the patterns is the path, or a name above it."""
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


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        if pattern.startswith("**", position):
            parts.append(".*")
            position += 2
        elif pattern[position] == "*":
            parts.append("[^/]*")
            position += 1
        elif pattern[position] == "?":
            parts.append("[^/]")
            position += 1
        else:
            parts.append(re.escape(pattern[position]))
            position += 1
    text = "".join(parts)
    # "model/**" is all below model; a name alone is all below it, too.
    return re.compile(f"{text}(/.*)?")
