"""Patterns with placeholders, for names of tensors and paths of leaves. Pure.

`{n}` stands for a part of a name without dots and slashes, `{rest*}` for any number of parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z_0-9]*\*?)\}")


def placeholders(pattern: str) -> list[str]:
    """The names of what a pattern leaves open; `rest*` with its star."""
    return _PLACEHOLDER.findall(pattern)


@lru_cache(maxsize=4096)
def compiled(pattern: str, *, is_path: bool) -> re.Pattern[str]:
    """What matches a name or a path as a whole, with a group for each placeholder."""
    text = ""
    seen: set[str] = set()
    for number, part in enumerate(_PLACEHOLDER.split(pattern)):
        name = part.rstrip("*")
        if number % 2 == 0:
            text += re.escape(part)
        elif name in seen:
            text += f"(?P={name})"
        else:
            seen.add(name)
            anything = ".+" if part.endswith("*") else "[^/]+" if is_path else "[^./]+"
            text += f"(?P<{name}>{anything})"
    return re.compile(text, re.DOTALL)


def filled(pattern: str, values: Mapping[str, str], *, is_path: bool) -> str:
    """A pattern with its placeholders filled in, as a path or as the name of a tensor."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        text = values[name.rstrip("*")]
        if not name.endswith("*"):
            return text
        return text.replace(".", "/") if is_path else text.replace("/", ".")

    return _PLACEHOLDER.sub(fill, pattern)
