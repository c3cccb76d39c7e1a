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
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

from ostraka.errors import name_few, nearest

Patterns = str | Sequence[str]


def matches(patterns: Patterns, path: str) -> bool:
    """True if any of the patterns matches the path or a name above it."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(_compiled(pattern).values(path) is not None for pattern in listed)


def split_patterns(patterns: Patterns) -> tuple[list[str], list[str]]:
    """The selecting patterns, and the patterns after `!`, which leave out."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    left_out = [pattern for pattern in listed if pattern.startswith("!")]
    return [pattern for pattern in listed if pattern not in left_out], left_out


def selects(patterns: Patterns, path: str) -> bool:
    """As `matches`, but leaves out paths that a pattern after `!` matches.

    If there are only such patterns, all other paths are selected.
    """
    wanted, left_out = split_patterns(patterns)
    unwanted = [pattern[1:] for pattern in left_out]
    return (not wanted or matches(wanted, path)) and not matches(unwanted, path)


def unmatched(
    argument: str, given: Patterns | Mapping[str, Any], paths: Collection[str], what: str
) -> dict[str, str]:
    """A sentence about each pattern of an argument that matches none of the paths.

    `what` says what has these paths, such as "leaf of the tree".
    """
    listed = [given] if isinstance(given, str) else given
    found = [p for p in listed if not any(matches(p.removeprefix("!"), path) for path in paths)]
    names = {name for path in paths if found for name in (*names_on(path), *path.split("/"))}
    tops = list(dict.fromkeys(path.split("/")[0] for path in paths if found))
    rest = f"; top-level names are {name_few(tops, 5)}" if tops else ""
    return {
        pattern: (
            f"{argument}={f'{{{pattern!r}: …}}' if isinstance(given, Mapping) else repr(pattern)} "
            f"matches no {what}{nearest(pattern.strip('!*/'), sorted(names)) or rest}"
        )
        for pattern in found
    }


def refuse_unmatched(
    argument: str, given: Patterns | Mapping[str, Any], paths: Collection[str], what: str
) -> None:
    """Raise ValueError for the first pattern of an argument that matches none of the paths."""
    for sentence in unmatched(argument, given, paths, what).values():
        raise ValueError(sentence)


def names_on(path: str) -> list[str]:
    """The names above a leaf, topmost first, and its own path."""
    return list(accumulate(path.split("/"), "{}/{}".format))


def lookup(rule: Any, path: str) -> Any:
    """A rule for all paths, or in a dict the entry of the first pattern that matches, or None."""
    if not isinstance(rule, Mapping):
        return rule
    table = cast("Mapping[str, Any]", rule)
    return next((value for pattern, value in table.items() if matches(pattern, path)), None)


def rules_in(rule: Any) -> list[Any]:
    """A rule for all paths, or the entries of a dict of them."""
    return [*cast("Mapping[str, Any]", rule).values()] if isinstance(rule, Mapping) else [rule]


def rename_with(table: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces the longest beginning of a path found in the table."""
    ordered = sorted(table.items(), key=lambda item: -len(item[0]))

    def rename(path: str) -> str:
        for old, new in ordered:
            if path == old:
                return new
            if path.startswith(f"{old}/"):
                return f"{new}{path[len(old) :]}"
        return path

    return rename


# Matching without backtracking

_BACKTRACKED = 10_000
"""The most combinations that an expression may try."""


class Wildcard(NamedTuple):
    """A part of a pattern that stands for characters of a text."""

    without: str = ""
    """Characters that it does not stand for."""
    least: int = 0
    most: int | None = None
    """1, or None for any number."""
    ends_in: str = ""
    """If given, the matched text ends in this character or is empty."""


def find_spans(parts: Sequence[str | Wildcard], text: str) -> list[tuple[int, int]] | None:
    """The span of each part of a pattern in a text, or None if they do not match all of it.

    Each wildcard in turn is as long as it can be, as in a regular expression. Each part takes a few
    passes over the text. Sets of positions are integers: bit n is the position n before the end.
    """
    length = len(text)
    reached = [1]
    """From the last part to the first: the positions where the parts from there on may begin."""
    for part in reversed(parts):
        reached.append(_step(part, text, reached[-1]))
        if not reached[-1]:
            return None
    if not reached.pop() >> length & 1:
        return None
    spans: list[tuple[int, int]] = []
    start = 0
    for part in parts:
        ends = reached.pop()
        if isinstance(part, str):
            stop = start + len(part)
        else:
            if part.ends_in:
                ends &= _ends_of(part.ends_in, text) | 1 << length - start
            stop = _furthest(part, text, start)
            ends >>= length - stop
            stop -= (ends & -ends).bit_length() - 1
        spans.append((start, stop))
        start = stop
    return spans


def _step(part: str | Wildcard, text: str, ends: int) -> int:
    """The positions where a part may begin if it ends at one of these."""
    if isinstance(part, str):
        return (ends & _ends_of(part, text)) << len(part)
    if part.ends_in:
        lowest = ends & _ends_of(part.ends_in, text)
        return ends | (_from(lowest, len(text)) << 1 & _all(len(text)))
    if not part.without:
        found = ends if part.most == 1 else _from(ends, len(text))
        return found if not part.least else found << 1 & _all(len(text))
    marks = ["0" if character in part.without else "1" for character in text]
    allowed = int("".join(marks) or "0", 2)
    if part.most == 1:
        return (ends & allowed) << 1
    if part.least:
        ends = (ends & allowed) << 1
    # The sum carries each position through the allowed characters that follow it.
    return ((ends & allowed) + allowed ^ allowed) | ends


def _from(positions: int, length: int) -> int:
    """All positions from the lowest of these on."""
    return _all(length) & -(positions & -positions) if positions else 0


def _all(length: int) -> int:
    return (2 << length) - 1


def _ends_of(literal: str, text: str) -> int:
    """Where a literal part ends."""
    marks = bytearray(b"0") * (len(text) + 1)
    at = text.find(literal)
    while at >= 0:
        marks[at + len(literal)] = ord("1")
        at = text.find(literal, at + 1)
    return int(marks, 2)


def _furthest(part: Wildcard, text: str, start: int) -> int:
    """The last position at which a wildcard may end."""
    if part.most == 1:
        return start + 1
    ends = (text.find(character, start) for character in part.without)
    return min((end for end in ends if end >= 0), default=len(text))


class Compiled(NamedTuple):
    """A pattern, as parts and as a regular expression that finds the same values."""

    parts: tuple[str | Wildcard, ...]
    expression: re.Pattern[str]
    unbound: int
    """The number of wildcards that may end at any character."""
    tails: tuple[tuple[str | Wildcard, ...], ...]
    """Parts that may follow."""

    def values(self, text: str) -> Sequence[str] | None:
        """The texts that the wildcards stand for, or None if the pattern does not match.

        Each unbound wildcard may end at any character, and an expression tries all combinations. On
        an untrusted name that may take hours. Then `find_spans` is faster.
        """
        if self.unbound <= 1 or len(text) ** self.unbound <= _BACKTRACKED:
            matched = self.expression.fullmatch(text)
            return None if matched is None else matched.groups()
        for tail in self.tails:
            spans = find_spans((*self.parts, *tail), text)
            if spans is not None:
                pairs = zip(self.parts, spans, strict=False)
                return [text[slice(*span)] for part, span in pairs if isinstance(part, Wildcard)]
        return None


def compile_parts(parts: Sequence[str | Wildcard], *, or_below: bool = False) -> Compiled:
    """Compile a pattern. With `or_below`, it also matches what a slash separates from a match."""
    text = "".join(map(_expression, parts)) + ("(?:/.*)?" if or_below else "")
    unbound = sum(not _is_bound(parts, number) for number in range(len(parts)))
    tails = ((), ("/", Wildcard())) if or_below else ((),)
    return Compiled(tuple(parts), re.compile(text, re.DOTALL), unbound, tails)


def _expression(part: str | Wildcard) -> str:
    if isinstance(part, str):
        return re.escape(part)
    if part.ends_in:
        return f"((?:.*{part.ends_in})?)"
    times = "" if part.most == 1 else "+" if part.least else "*"
    return f"([^{part.without}]{times})" if part.without else f"(.{times})"


def _is_bound(parts: Sequence[str | Wildcard], number: int) -> bool:
    """True if a part can end at one place only, as a whole name or the rest of a text does."""
    part, is_last = parts[number], number + 1 == len(parts)
    if isinstance(part, str) or part.most == 1:
        return True
    if not part.without:
        return is_last and not part.ends_in
    before, after = parts[number - 1], parts[(number + 1) % len(parts)]
    first = before[-1] if isinstance(before, str) else before.ends_in
    is_whole = number == 0 or first in {*part.without}
    return is_whole and (is_last or (isinstance(after, str) and after[0] in part.without))


# Patterns over paths

_WILDCARDS = {
    "**/": Wildcard(ends_in="/"),
    "**": Wildcard(),
    "*": Wildcard("/"),
    "?": Wildcard("/", 1, 1),
}


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Compiled:
    # "**/" stands for whole names only: in "a**/b" the stars belong to a name.
    split = re.split(r"((?:(?<=/)|(?<=^))\*\*/|\*\*|\*|\?)", pattern)
    return compile_parts([_WILDCARDS.get(part) or part for part in split if part], or_below=True)
