"""A tree of leaves that fits one screen: repeated blocks and deep subtrees in one line each."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ostraka.cli._tree import LeafRow
from ostraka.tree.blocks import MOST_DIGITS, Block, fold_blocks

_NUMBERS = re.compile(r"\d+\.\.\d+(?:,\d+(?:\.\.\d+)?)*")
"""`0..23`, or `0..2,4..6,9`: numbers in the name of a folded block."""
_LATER = 2
"""The levels of the other names that are opened before those that come last."""
_GLOBS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the folded tree."""

    path: str
    """The path of the leaf, or of the name above leaves. `numbered_pattern` reads it back."""
    label: str
    """Its name behind the spaces of its depth, or its path where names are joined by a dot."""
    block: Block
    rows: Sequence[LeafRow]
    """All leaves that it stands for."""
    is_open: bool
    """True if the lines of its children follow."""


def fold(
    rows: Sequence[LeafRow], most: int, *, separator: str, is_last: Callable[[LeafRow], bool]
) -> tuple[list[Line], list[LeafRow]]:
    """At most `most` lines for all leaves, and the leaves at the top that have no line.

    If all leaves fit, nothing is folded. Else equal blocks whose names differ in a number become
    one. Names are opened from the top down as long as there is room, large ones before small ones,
    and later if their first leaf `is_last`.

    Where names are joined by a dot, people read them as a whole, so an open name has no line.
    """
    own_line = int(separator == "/")
    top, cut = _fold_top(rows, most, separator, own_line), list[LeafRow]()
    if len(top) > most:
        cut = [rows[leaf] for block in top[most - 1 :] for leaf in block.leaves]
        top = top[: most - 1]
    opened = _open(top, rows, most, own_line, is_last)
    lines: list[Line] = []

    def add(blocks: Sequence[Block], depth: int, above: str) -> None:
        for block in blocks:
            path = f"{above}{separator}{block.name}" if depth else block.name
            is_open = id(block) in opened
            if own_line or not is_open:
                label = f"{'  ' * depth}{block.name}" if own_line else path
                if block.leaf is None:
                    label += "/" if own_line else ".*"
                below = [rows[leaf] for leaf in block.leaves]
                lines.append(Line(path, label, block, below, is_open))
            if is_open:
                add(block.children, depth + 1, path)

    add(top, 0, "")
    return lines, cut


def _fold_top(rows: Sequence[LeafRow], most: int, separator: str, own_line: int) -> list[Block]:
    """The names at the top of the tree. Equal blocks below them are one if not all leaves fit."""
    paths = [row.path for row in rows]
    if len(rows) <= most:
        whole = fold_blocks(paths, range(len(rows)), separator).children  # No two kinds are equal.
        if sum(_lines_of(block, own_line) for block in whole) <= most:
            return whole
    return fold_blocks(paths, [_kind_of(row) for row in rows], separator).children


def _lines_of(block: Block, own_line: int) -> int:
    """The lines of a block if all below it is open."""
    if not block.children:
        return 1
    return own_line + sum(_lines_of(child, own_line) for child in block.children)


def _kind_of(row: LeafRow) -> Any:
    """Equal for leaves that may be one line: values of one type, and all shared arrays."""
    if row.number is None:
        return row.cells[1]  # the type of a value
    return "=" if row.same_as is not None else row.cells[1:]


def _open(
    top: Sequence[Block],
    rows: Sequence[LeafRow],
    most: int,
    own_line: int,
    is_last: Callable[[LeafRow], bool],
) -> set[int]:
    """The ids of the blocks whose children get lines."""
    opened: set[int] = set()
    used, order = len(top), count()
    waiting: list[tuple[int, int, int, int, Block]] = []

    def wait(blocks: Iterable[Block], depth: int) -> None:
        for block in blocks:
            if block.children:
                turn = depth + _LATER * is_last(rows[block.leaves[0]])
                nbytes = sum(rows[leaf].nbytes for leaf in block.leaves)
                heapq.heappush(waiting, (turn, depth, -nbytes, next(order), block))

    wait(top, 0)
    while waiting:
        _, depth, _, _, block = heapq.heappop(waiting)
        extra = len(block.children) + own_line - 1
        if used + extra <= most:
            used += extra
            opened.add(id(block))
            wait(block.children, depth + 1)
    return opened


def numbered_pattern(text: str) -> Callable[[str], bool] | None:
    """Reads the path of a `Line` back: whether a leaf belongs to it. None if it has no numbers.

    `blocks/0..23/**/kernel` is the kernel of the blocks 0 to 23.
    """
    pieces, wanted, end = list[str](), list[list[range]](), 0
    for found in _NUMBERS.finditer(text):
        pieces += [_as_regex(text[end : found.start()]), rf"(\d{{1,{MOST_DIGITS}}})"]
        runs = (part.split("..") for part in found[0].split(","))
        wanted.append([range(int(ends[0]), int(ends[-1]) + 1) for ends in runs])
        end = found.end()
    if not wanted:
        return None
    compiled = re.compile("".join([*pieces, _as_regex(text[end:].rstrip("/")), "(?:/.*)?"]))

    def matches(path: str) -> bool:
        found = compiled.fullmatch(path)
        return found is not None and all(
            any(int(number) in run for run in runs)
            for number, runs in zip(found.groups(), wanted, strict=True)
        )

    return matches


def _as_regex(text: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", text)
    return "".join(_GLOBS.get(part) or re.escape(part) for part in parts)
