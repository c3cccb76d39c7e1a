"""Paths as a tree in which repeated blocks, such as the layers of a model, are one. Pure."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostraka.tree.nodes import MAX_DEPTH

MOST_DIGITS = 600
"""Longer numbers are plain text. Python refuses to read more than 640 digits where it is told to.
"""
_NUMBERED = re.compile(rf"(.*?)(?<!\d)(\d{{1,{MOST_DIGITS}}}+)(\D*)", re.DOTALL)
"""A name by its last number."""
_MOST_DOTS = 50
"""Names with more dots are not taken apart."""


@dataclass(slots=True)
class Block:
    """A name in the tree: a leaf, or all leaves below it."""

    name: str
    """`0..23` stands for the blocks 0 to 23. A slash or dot joins names that are only children."""
    leaf: int | None = None
    """The number of the leaf, the first of those that it stands for. None above leaves."""
    children: list[Block] = field(default_factory=list["Block"])
    repeats: int = 1
    """The number of equal blocks that this one stands for."""
    leaves: list[int] = field(default_factory=list[int])
    """The numbers of all leaves that it stands for."""
    kind: int = 0
    """Equal for blocks with equal names and kinds of leaves below them."""


def separator_of(paths: Iterable[str]) -> str:
    """A dot if the paths have no levels but such as names of tensors have, else a slash."""
    has_levels = any("/" in path or path.count(".") > _MOST_DOTS for path in paths)
    return "/" if has_levels else "."


def split_number(name: str) -> tuple[str, int, str] | None:
    """The texts before and after the last number of a name, around it. None without a number."""
    found = _NUMBERED.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), found[3])


def fold_blocks(
    paths: Sequence[str], kinds: Sequence[Hashable], separator: str | None = None
) -> Block:
    """The tree of some leaves, with one block for those that differ only in a number of their name.

    Args:
        paths: The path of each leaf.
        kinds: Of each leaf, equal for leaves that may become one: dtype, shape, sharding.
        separator: The character between the names of a path. None for `separator_of(paths)`.
    """
    separator = separator or separator_of(paths)
    root = _build(paths, separator)
    _merge_repeats(root, kinds, {})
    _join_only_children(root, separator)
    return root


def _build(paths: Sequence[str], separator: str) -> Block:
    root = Block("")
    known = {"": root}

    def find(above: str) -> Block:
        block = known.get(above)
        if block is None:
            name = above[:-1].rpartition(separator)[2]
            block = known[above] = Block(name)
            find(above[: len(above) - len(name) - 1]).children.append(block)
        return block

    for number, path in enumerate(paths):
        name = path.split(separator, MAX_DEPTH)[-1]  # The rest of a longer path is one name.
        find(path.removesuffix(name)).children.append(Block(name, number, leaves=[number]))
    _gather_leaves(root)
    return root


def _gather_leaves(node: Block) -> None:
    for child in node.children:
        if child.leaf is None:
            _gather_leaves(child)
        node.leaves += child.leaves


def _merge_repeats(node: Block, kinds: Sequence[Hashable], known: dict[Any, int]) -> None:
    """Join children whose names differ only in a number, below each node."""
    alike: dict[tuple[str, str, int], list[tuple[int, str, int]]] = {}
    for place, child in enumerate(node.children):
        if child.leaf is None:
            _merge_repeats(child, kinds, known)
            kind: Any = tuple((below.name, below.kind) for below in child.children)
        else:
            kind = (kinds[child.leaf],)
        child.kind = known.setdefault((child.leaf is None, kind), len(known))
        found = _NUMBERED.fullmatch(child.name)
        if found is not None:
            key = (found[1], found[3], child.kind)
            alike.setdefault(key, []).append((int(found[2]), found[2], place))
    merged: dict[int, Block] = {}
    gone: set[int] = set()
    for (prefix, suffix, _), numbered in alike.items():
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


def _joined(name: str, members: Sequence[Block]) -> Block:
    """One block for several of the same kind."""
    first = members[0]
    children = [
        _joined(column[0].name, column)
        for column in zip(*(member.children for member in members), strict=True)
    ]
    leaves = [leaf for member in members for leaf in member.leaves]
    repeats = sum(member.repeats for member in members)
    return Block(name, first.leaf, children, repeats, leaves, first.kind)


def _show_numbers(numbered: Sequence[tuple[int, str, int]]) -> str:
    """`0..23`, or `0..2,4..6` if some numbers belong to other blocks."""
    runs: list[list[tuple[int, str]]] = []
    for number, text, _ in numbered:
        if runs and runs[-1][-1][0] + 1 == number:
            runs[-1].append((number, text))
        else:
            runs.append([(number, text)])
    return ",".join(f"{run[0][1]}..{run[-1][1]}" if len(run) > 1 else run[0][1] for run in runs)


def _join_only_children(node: Block, separator: str) -> None:
    for child in node.children:
        while len(child.children) == 1:
            (only,) = child.children
            child.name += f"{separator}{only.name}"
            child.leaf, child.children = only.leaf, only.children
            child.repeats, child.leaves = only.repeats, only.leaves
        _join_only_children(child, separator)
