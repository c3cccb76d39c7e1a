"""A tree of leaves that fits one screen: repeated blocks and deep subtrees in one line each."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ostraka.cli._tree import LeafRow

_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_NUMBERS = re.compile(r"\d+\.\.\d+(?:,\d+(?:\.\.\d+)?)*")
"""`0..23`, or `0..2,4..6,9`: numbers in the name of a folded block."""
_LATER = 2
"""The levels of the other names that are opened before those that come last."""
_MOST_DOTS = 50
"""Names with more dots are not taken apart."""
_GLOBS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@dataclass(slots=True)
class Node:
    """A name in the tree: a leaf, or all leaves below it."""

    name: str
    row: LeafRow | None = None
    """The leaf. None for a name above leaves."""
    children: list[Node] = field(default_factory=list["Node"])
    repeats: int = 1
    """The number of equal blocks that this one stands for."""
    rows: list[LeafRow] = field(default_factory=list[LeafRow])
    """All leaves that it stands for."""
    kind: int = 0
    """Equal for nodes with equal names, dtypes, shapes and shardings below them."""

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the folded tree."""

    depth: int
    path: str
    """The path of the leaf, or of the name above leaves. `numbered_pattern` reads it back."""
    node: Node
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
    root = _build(rows, separator)
    own_line = int(separator == "/")
    if sum(_lines_of(node, own_line) for node in root.children) > most:
        _merge_repeats(root, {})
    _join_only_children(root, separator)
    top, cut = root.children, list[LeafRow]()
    if len(top) > most:
        cut = [row for node in top[most - 1 :] for row in node.rows]
        top = top[: most - 1]
    opened = _open(top, most, own_line, is_last)
    lines: list[Line] = []

    def add(nodes: Sequence[Node], depth: int, above: str) -> None:
        for node in nodes:
            path = f"{above}{separator}{node.name}" if depth else node.name
            is_open = id(node) in opened
            if own_line or not is_open:
                lines.append(Line(depth, path, node, is_open))
            if is_open:
                add(node.children, depth + 1, path)

    add(top, 0, "")
    return lines, cut


def _open(
    top: Sequence[Node], most: int, own_line: int, is_last: Callable[[LeafRow], bool]
) -> set[int]:
    """The ids of the nodes whose children get lines."""
    opened: set[int] = set()
    used, order = len(top), count()
    waiting: list[tuple[int, int, int, int, Node]] = []

    def wait(nodes: Iterable[Node], depth: int) -> None:
        for node in nodes:
            if node.children:
                turn = depth + _LATER * is_last(node.rows[0])
                heapq.heappush(waiting, (turn, depth, -node.nbytes, next(order), node))

    wait(top, 0)
    while waiting:
        _, depth, _, _, node = heapq.heappop(waiting)
        extra = len(node.children) + own_line - 1
        if used + extra <= most:
            used += extra
            opened.add(id(node))
            wait(node.children, depth + 1)
    return opened


def _build(rows: Sequence[LeafRow], separator: str) -> Node:
    root = Node("")
    known = {"": root}

    def find(path: str) -> Node:
        node = known.get(path)
        if node is None:
            above, _, name = path.rpartition(separator)
            node = known[path] = Node(name)
            find(above).children.append(node)
        return node

    for row in rows:
        above, _, name = row.path.rpartition(separator)
        find(above).children.append(Node(name, row, rows=[row]))
    _gather(root)
    return root


def _gather(node: Node) -> None:
    for child in node.children:
        if child.row is None:
            _gather(child)
        node.rows += child.rows


def _lines_of(node: Node, own_line: int) -> int:
    """The lines of a node if all below it is open."""
    if not node.children:
        return 1
    # An only child shares the line of its parent.
    own = own_line if len(node.children) > 1 else 0
    return own + sum(_lines_of(child, own_line) for child in node.children)


def _join_only_children(node: Node, separator: str) -> None:
    for child in node.children:
        while len(child.children) == 1:
            (only,) = child.children
            child.name += f"{separator}{only.name}"
            child.row, child.children = only.row, only.children
            child.repeats = only.repeats
        _join_only_children(child, separator)


# Repeated blocks


def _merge_repeats(node: Node, kinds: dict[Any, int]) -> None:
    """Join the children of each node whose names differ only in a number, and nothing else does."""
    blocks: dict[tuple[str, str, int], list[tuple[int, str, int]]] = {}
    for place, child in enumerate(node.children):
        if child.row is None:
            _merge_repeats(child, kinds)
        child.kind = kinds.setdefault(_kind_of(child), len(kinds))
        found = _NUMBERED.fullmatch(child.name)
        if found is not None:
            key = (found[1], found[3], child.kind)
            blocks.setdefault(key, []).append((int(found[2]), found[2], place))
    merged: dict[int, Node] = {}
    gone: set[int] = set()
    for (prefix, suffix, _), numbered in blocks.items():
        if len(numbered) > 1:
            numbered.sort()
            name = f"{prefix}{_show_numbers(numbered)}{suffix}"
            places = [place for _, _, place in numbered]
            merged[min(places)] = _joined(name, [node.children[place] for place in places])
            gone.update(places)
    node.children = [
        merged.get(place, child)
        for place, child in enumerate(node.children)
        if place in merged or place not in gone
    ]


def _kind_of(node: Node) -> Any:
    if node.row is None:
        return tuple((child.name, child.kind) for child in node.children)
    if node.row.number is None:
        return node.row.cells[1]  # the type of a value
    return "=" if node.row.same_as is not None else node.row.cells[1:]


def _joined(name: str, members: Sequence[Node]) -> Node:
    """One node for several of the same kind."""
    first = members[0]
    children = [
        _joined(column[0].name, column)
        for column in zip(*(member.children for member in members), strict=True)
    ]
    rows = [row for member in members for row in member.rows]
    return Node(name, first.row, children, sum(member.repeats for member in members), rows)


def _show_numbers(numbered: Sequence[tuple[int, str, int]]) -> str:
    """`0..23`, or `0..2,4..6` if some numbers belong to other blocks."""
    runs: list[list[tuple[int, str, int]]] = []
    for one in numbered:
        if runs and runs[-1][-1][0] + 1 == one[0]:
            runs[-1].append(one)
        else:
            runs.append([one])
    shown = (f"{run[0][1]}..{run[-1][1]}" if len(run) > 1 else run[0][1] for run in runs)
    return ",".join(shown)


def separator_of(paths: Iterable[str]) -> str:
    """A dot if the paths have no levels but such as names of tensors have, else a slash."""
    listed = list(paths)
    has_levels = any("/" in path or path.count(".") > _MOST_DOTS for path in listed)
    return "/" if has_levels else "."


def numbered_pattern(text: str) -> Callable[[str], bool] | None:
    """Reads the path of a `Line` back: whether a leaf belongs to it. None if it has no numbers.

    `blocks/0..23/**/kernel` is the kernel of the blocks 0 to 23.
    """
    pieces, wanted, end = list[str](), list[set[int]](), 0
    for found in _NUMBERS.finditer(text):
        pieces += [_as_regex(text[end : found.start()]), r"(\d+)"]
        ranges = (part.split("..") for part in found[0].split(","))
        wanted.append({n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)})
        end = found.end()
    if not wanted:
        return None
    compiled = re.compile("".join([*pieces, _as_regex(text[end:].rstrip("/")), "(?:/.*)?"]))

    def matches(path: str) -> bool:
        found = compiled.fullmatch(path)
        return found is not None and all(
            int(number) in numbers for number, numbers in zip(found.groups(), wanted, strict=True)
        )

    return matches


def _as_regex(text: str) -> str:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", text)
    return "".join(_GLOBS.get(part) or re.escape(part) for part in parts)
