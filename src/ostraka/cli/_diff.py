"""`ostraka diff`: compare two checkpoints. No JAX."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial, reduce
from operator import add
from typing import Any

import click

from ostraka.cli._arguments import flag, json_option, names_option, option, path_argument
from ostraka.cli._errors import DIFFERENT
from ostraka.cli._fold import fold
from ostraka.cli._output import (
    Table,
    echo_json,
    echo_lines,
    human_number,
    human_share,
    human_size,
    progress,
    screen_lines,
)
from ostraka.cli._tree import LeafRow
from ostraka.common.text import json_number, shorten, show_shape
from ostraka.errors import count_of, printable
from ostraka.reading.locate import read_whole
from ostraka.report.compare import (
    CompareOptions,
    Distance,
    LeafComparison,
    LeafDescription,
    TreeComparison,
    compare,
    open_named,
)
from ostraka.tree.blocks import separator_of

_TOLERANCE = click.FloatRange(0)
_VALUE_WIDTH = 40
_DIGITS = 4
_FEWEST_LINES = 8
"""Lines for leaves, however low the screen is."""
_HEAD = ("leaf", "what", "changed", "largest", "mean", "relative")
_COLOURS = {"the same": None, "different": "yellow", "only in a": "red", "only in b": "green"}
"""The states of a leaf, in the order of the summary."""
_LONELY = ("only in a", "only in b")


def _refuse_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """Raise BadParameter for NaN: every comparison with it is false."""
    if math.isnan(value):
        raise click.BadParameter("nan is no tolerance; give a number such as 1e-5", ctx, param)
    return value


@click.command()
@path_argument("a")
@path_argument("b")
@click.argument("pattern", nargs=-1)
@option("--rtol", _TOLERANCE, "Relative tolerance.", default=0.0, callback=_refuse_nan)
@option("--atol", _TOLERANCE, "Absolute tolerance.", default=0.0, callback=_refuse_nan)
@flag("--structure", "Compare names, shapes and dtypes only: read no array, ignore values.")
@flag("--ignore-sharding", "Ignore how arrays were sharded.")
@flag("--all everything", "List every leaf, unchanged ones too, and fold nothing.")
@names_option("Compare tensors of files as the leaves that a restore makes of them")
@json_option("Print the same as JSON.")
@click.pass_context
def diff(
    context: click.Context,
    a: str,
    b: str,
    pattern: tuple[str, ...],
    *,
    everything: bool,
    names: Any,
    as_json: bool,
    **rules: Any,
) -> None:
    """Show how checkpoints A and B differ.

    The table lists different shapes, dtypes, shardings and values, and leaves that only one of them
    has. A subtree that only one has is one line. For each array it counts the elements that differ,
    and gives the largest and the mean absolute difference, and the relative one: the sum of
    |a - b| divided by the sum of |b|, over the elements that differ. If it is longer than the
    screen, it is folded as ostraka show folds a tree, and --all unfolds it. Arrays are read and
    verified piece by piece, however large they are. NaN equals NaN. Elements are alike if
    |a - b| <= atol + rtol * |b|, as in numpy.

    Each PATTERN selects leaves: * stands for anything in one name, ** for anything at all. The exit
    code is 1 if anything differs. A or B may be a directory of steps, for the newest of them, or
    runs/7 for step 7 of runs. With --names, tensor names of safetensors directories are mapped to
    the paths of leaves first (for A, B or both).

    \b
    Examples:
      ostraka diff runs/6 runs/7
      ostraka diff runs/6 runs/7 'params/**/kernel' --rtol 1e-5
      ostraka diff runs/7 copies/7 --ignore-sharding
      ostraka diff runs/7 other_runs/7 --structure
      ostraka diff llama/ runs/0 --names hf
      ostraka diff runs/6 runs/7 --json | jq '.leaves[] | select(.elements.largest > 1)'
    """
    options = CompareOptions(pattern, **rules)
    found = read_whole(
        [a, b],
        lambda found: compare(found[0], found[1], options, progress),
        partial(open_named, names=names),
    )
    if pattern and not found.leaves:
        raise click.UsageError(f"no leaf matches {' '.join(map(repr, pattern))}")
    if as_json:
        containers = [{"path": path, "a": one, "b": other} for path, one, other in found.containers]
        echo_json(
            {
                "a": found.a,
                "b": found.b,
                "same": found.same,
                "containers": containers,
                "leaves": [_document(leaf) for leaf in found.leaves],
            }
        )
    else:
        echo_lines(_lines(found, everything=everything))
    if not found.same:
        context.exit(DIFFERENT)


# For people


def _lines(found: TreeComparison, *, everything: bool) -> list[str]:
    lines = [
        f"a  {click.style(printable(found.a), bold=True)}",
        f"b  {click.style(printable(found.b), bold=True)}",
    ]
    for path, one, other in found.containers:
        a_has, b_has = printable(one), printable(other)
        lines.append(f"container {printable(path)!r}: a has {a_has}, b has {b_has}")
    listed = [leaf for leaf in found.leaves if everything or not leaf.same]
    if not everything:
        lonely, listed = _lonely_subtrees(found.leaves, listed)
        lines += lonely
    if listed:
        # The lines above and below, with blank ones, the head, and the prompt of the shell.
        most = max(screen_lines() - len(lines) - 5, _FEWEST_LINES)
        is_whole = everything or len(listed) <= most
        lines += ["", *(_table(listed) if is_whole else _folded(listed, most))]
    return [*lines, "", _summary(found)]


def _lonely_subtrees(
    leaves: Sequence[LeafComparison], listed: Sequence[LeafComparison]
) -> tuple[list[str], list[LeafComparison]]:
    """A line for each subtree that only one checkpoint has, and the other leaves."""
    separator = separator_of(leaf.path for leaf in leaves)
    states: dict[str, str | None] = {}
    for leaf in leaves:
        for above in _names_above(leaf.path, separator):
            is_first = above not in states
            states[above] = leaf.state if is_first or states[above] == leaf.state else None
    subtrees: dict[str, list[LeafComparison]] = {}
    others: list[LeafComparison] = []
    for leaf in listed:
        above = next((n for n in _names_above(leaf.path, separator) if states[n] in _LONELY), None)
        if above is None:
            others.append(leaf)
        else:
            subtrees.setdefault(above, []).append(leaf)
    lines: list[str] = []
    for name, some in subtrees.items():
        if len(some) == 1:
            others += some
            continue
        size = human_size(sum(one.nbytes for leaf in some if (one := leaf.a or leaf.b)))
        text = f"{some[0].state}: {printable(name)} ({count_of(len(some), 'leaf')}, {size})"
        lines.append(click.style(text, fg=_COLOURS[some[0].state]))
    return lines, others


def _names_above(path: str, separator: str) -> Iterator[str]:
    """`a` and `a/b` for `a/b/c`."""
    end = path.find(separator)
    while end > 0:
        yield path[:end]
        end = path.find(separator, end + 1)


def _table(listed: Sequence[LeafComparison]) -> list[str]:
    table = Table(_HEAD, right=_HEAD[2:], shrink=("what",))
    for leaf in listed:
        table.add(leaf.path, *_cells(leaf), colour=_COLOURS[leaf.state])
    return table.lines()


def _folded(listed: Sequence[LeafComparison], most: int) -> list[str]:
    """The differences as a tree of `most` lines, in which equal blocks are one."""
    by_path = {leaf.path: leaf for leaf in listed}
    rows = [LeafRow(leaf.path, (leaf.path, _cells(leaf)[0])) for leaf in listed]
    lines, cut = fold(rows, most, separator=separator_of(by_path), is_last=lambda row: False)
    table = Table(_HEAD, right=_HEAD[2:], shrink=("what", "leaf"))
    for line in lines:
        leaves = [by_path[row.path] for row in line.rows]
        if line.is_open:
            table.add(line.label, *[""] * (len(_HEAD) - 1))
            continue
        distances = [leaf.distance for leaf in leaves if leaf.distance is not None]
        numbers = _show_distance(reduce(add, distances)) if distances else [""] * 4
        colour = _COLOURS[leaves[0].state] if len({leaf.state for leaf in leaves}) == 1 else None
        if line.block.leaf is None:
            what = count_of(len(leaves), "leaf")
        else:
            what = _cells(leaves[0])[0]
            what = f"{what} ×{len(leaves)}" if len(leaves) > 1 else what
        table.add(line.label, what, *numbers, colour=colour)
    shown = table.lines()
    if cut:
        shown.append(f"… and {count_of(len(cut), 'leaf')} more; --all lists them")
    return shown


def _cells(leaf: LeafComparison) -> tuple[str, ...]:
    if leaf.a is None or leaf.b is None:
        there = leaf.a or leaf.b
        assert there is not None
        return (f"{leaf.state}: {_show(there)}",)
    what = [_show_aspect(aspect, leaf.a, leaf.b) for aspect in leaf.differs if aspect != "value"]
    if leaf.a.value != leaf.b.value and "value" in leaf.differs:
        values = [shorten(printable(str(one.value)), _VALUE_WIDTH) for one in (leaf.a, leaf.b)]
        return (", ".join([*what, " → ".join(values)]),)
    if leaf.distance is None:
        return (", ".join(what) or ("same" if leaf.same else ""),)
    if "value" in leaf.differs:
        what.append("values")
    return (", ".join(what) or "same", *_show_distance(leaf.distance))


def _show_distance(distance: Distance) -> list[str]:
    changed = "0"
    if distance.changed:
        changed = f"{distance.changed:,} ({human_share(distance.changed, distance.elements)})"
    if distance.nan:
        changed += f", {distance.nan:,} NaN"
    apart = (distance.largest, distance.mean, distance.relative)
    return [changed, *(human_number(number, _DIGITS) for number in apart)]


def _show_aspect(aspect: str, a: LeafDescription, b: LeafDescription) -> str:
    if aspect == "shape":
        return f"{_show_shape(a)} → {_show_shape(b)}"
    if aspect == "same_as":
        shared = [f"= {one.same_as}" if one.same_as else "its own array" for one in (a, b)]
        return " → ".join(shared)
    return f"{getattr(a, aspect)} → {getattr(b, aspect)}"


def _show(one: LeafDescription) -> str:
    if one.shape is None:
        return f"{one.kind} {shorten(str(one.value), _VALUE_WIDTH)}"
    return f"{one.dtype} {_show_shape(one)}"


def _show_shape(one: LeafDescription) -> str:
    return "no array" if one.shape is None else show_shape(one.shape)


def _summary(found: TreeComparison) -> str:
    if found.same:
        return click.style(f"no difference in {count_of(len(found.leaves), 'leaf')}", fg="green")
    counts = Counter(leaf.state for leaf in found.leaves)
    shown = [f"{counts[state]:,} {state}" for state in _COLOURS if counts[state]]
    if found.containers:
        shown.append(f"{count_of(len(found.containers), 'container')} different")
    return f"{count_of(len(found.leaves), 'leaf')}: {', '.join(shown)}"


# For scripts


def _document(leaf: LeafComparison) -> dict[str, Any]:
    elements: dict[str, Any] | None = None
    if leaf.distance is not None:
        elements = {
            "count": leaf.distance.elements,
            "changed": leaf.distance.changed,
            "nan": leaf.distance.nan,
            "largest": json_number(leaf.distance.largest),
            "mean": json_number(leaf.distance.mean),
            "relative": json_number(leaf.distance.relative),
        }
    return {
        "path": leaf.path,
        "same": leaf.same,
        "differs": leaf.differs,
        "a": None if leaf.a is None else _describe_one(leaf.a),
        "b": None if leaf.b is None else _describe_one(leaf.b),
        "elements": elements,
    }


def _describe_one(one: LeafDescription) -> dict[str, Any]:
    document = asdict(one)
    return {**document, "bytes": document.pop("nbytes")}
