"""`ostraka diff`: compare two checkpoints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from ostraka.cli._arguments import json_option, names_option, path_argument
from ostraka.cli._compare import (
    CompareOptions,
    LeafComparison,
    LeafDescription,
    TreeComparison,
    bytes_to_read,
    compare,
)
from ostraka.cli._errors import DIFFERENT
from ostraka.cli._output import (
    Table,
    echo_json,
    echo_lines,
    human_number,
    json_number,
    progress,
    shorten,
    show_shape,
)
from ostraka.errors import count_of, printable
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.source import Source
from ostraka.reading.locate import open_at, read_whole
from ostraka.storage import PathLike

_VALUE_WIDTH = 40


class _Tolerance(click.FloatRange):
    """A number from 0 on. NaN is refused: every comparison with it is false."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is no tolerance; give a number such as 1e-5", param, ctx)
        return number


@click.command()
@path_argument("a")
@path_argument("b")
@click.argument("pattern", nargs=-1)
@click.option("--rtol", type=_Tolerance(0), default=0.0, help="Relative tolerance.")
@click.option("--atol", type=_Tolerance(0), default=0.0, help="Absolute tolerance.")
@click.option("--structure", is_flag=True, help="Read no array: compare all but their elements.")
@click.option("--ignore-sharding", is_flag=True, help="Ignore how arrays were sharded.")
@click.option("--all", "everything", is_flag=True, help="List unchanged leaves, too.")
@names_option("Compare tensors of files as the leaves that a restore makes of them")
@json_option("Print the same as JSON.")
@click.pass_context
def diff(
    context: click.Context,
    a: str,
    b: str,
    pattern: tuple[str, ...],
    *,
    rtol: float,
    atol: float,
    structure: bool,
    ignore_sharding: bool,
    everything: bool,
    names: Any,
    as_json: bool,
) -> None:
    """Show how checkpoints A and B differ.

    The table lists leaves that only one of them has, and different shapes, dtypes, shardings and
    values. For each array it counts the elements that differ, and gives the largest and the mean
    absolute difference. Arrays are read and verified piece by piece, however large they are. NaN
    equals NaN. Elements are alike if |a - b| <= atol + rtol * |b|, as in numpy.

    Each PATTERN selects leaves: * stands for anything in one name, ** for anything at all. The exit
    code is 1 if anything differs. A or B may be a directory of steps, for the newest of them, or
    runs/7 for step 7 of runs. With --names, tensor names of safetensors directories are mapped to
    the paths of leaves first (for A, B or both).

    \b
    Examples:
      ostraka diff runs/6 runs/7
      ostraka diff runs/6 runs/7 'params/**/kernel' --rtol 1e-5
      ostraka diff runs/7 copies/7 --ignore-sharding
      ostraka diff llama/ runs/0 --names hf
      ostraka diff runs/6 runs/7 --json | jq '.leaves[] | select(.elements.largest > 1)'
    """
    options = CompareOptions(
        pattern, rtol, atol, values=not structure, shardings=not ignore_sharding
    )

    def work(sources: Sequence[Source]) -> tuple[Source, Source, TreeComparison]:
        one, other = sources
        with progress("comparing", bytes_to_read(one, other, options)) as bar:
            return one, other, compare(one, other, options, on_bytes=bar.advance)

    source_a, source_b, found = read_whole([a, b], work, partial(_open, names=names))
    if pattern and not found.leaves:
        raise click.UsageError(f"no leaf matches {' '.join(map(repr, pattern))}", context)
    if as_json:
        containers = [{"path": path, "a": one, "b": other} for path, one, other in found.containers]
        echo_json(
            {
                "a": source_a.location,
                "b": source_b.location,
                "same": found.same,
                "containers": containers,
                "leaves": [_describe(leaf) for leaf in found.leaves],
            }
        )
    else:
        echo_lines(_lines(source_a, source_b, found, everything=everything))
    if not found.same:
        context.exit(DIFFERENT)


def _open(path: PathLike, names: Any) -> Source:
    """Open a checkpoint. Only safetensors files have names that are not paths."""
    source = open_at(path)
    is_renamed = names is not None and isinstance(source, SafetensorsSource)
    return open_at(path, names) if is_renamed else source


# For people


def _lines(a: Source, b: Source, found: TreeComparison, *, everything: bool) -> list[str]:
    lines = [
        f"a  {click.style(printable(a.location), bold=True)}",
        f"b  {click.style(printable(b.location), bold=True)}",
    ]
    for path, one, other in found.containers:
        a_has, b_has = printable(one), printable(other)
        lines.append(f"container {printable(path)!r}: a has {a_has}, b has {b_has}")
    listed = [leaf for leaf in found.leaves if everything or not leaf.same]
    if listed:
        numbers = ("changed", "largest", "mean")
        table = Table(("leaf", "what", *numbers), right=numbers)
        for leaf in listed:
            colour = None if leaf.same else "red" if leaf.b is None else "yellow"
            colour = "green" if leaf.a is None else colour
            table.add(printable(leaf.path), *_cells(leaf), colour=colour)
        lines += ["", *table.lines()]
    return [*lines, "", _summary(found)]


def _cells(leaf: LeafComparison) -> tuple[str, ...]:
    if leaf.a is None or leaf.b is None:
        there = leaf.a or leaf.b
        assert there is not None
        return (f"only in {'a' if leaf.b is None else 'b'}: {_show(there)}",)
    what = [_show_aspect(aspect, leaf.a, leaf.b) for aspect in leaf.differs if aspect != "value"]
    if leaf.a.value != leaf.b.value:
        values = [shorten(printable(str(one.value)), _VALUE_WIDTH) for one in (leaf.a, leaf.b)]
        return (", ".join([*what, " → ".join(values)]),)
    if leaf.distance is None:
        return (", ".join(what) or ("same" if leaf.same else ""),)
    if "value" in leaf.differs:
        what.append("values")
    distance = leaf.distance
    share = 100 * distance.changed / max(distance.elements, 1)
    changed = f"{distance.changed:,} ({share:.3g} %)" if distance.changed else "0"
    if distance.nan:
        changed += f", {distance.nan:,} NaN"
    apart = map(human_number, (distance.largest, distance.mean))
    return (", ".join(what) or "same", changed, *apart)


def _show_aspect(aspect: str, a: LeafDescription, b: LeafDescription) -> str:
    if aspect == "shape":
        return f"{_show_shape(a)} → {_show_shape(b)}"
    if aspect == "same_as":
        shared = [f"= {one.same_as}" if one.same_as else "its own array" for one in (a, b)]
        return printable(" → ".join(shared))
    return printable(f"{getattr(a, aspect)} → {getattr(b, aspect)}")


def _show(one: LeafDescription) -> str:
    if one.shape is None:
        return printable(f"{one.kind} {shorten(str(one.value), _VALUE_WIDTH)}")
    return printable(f"{one.dtype} {_show_shape(one)}")


def _show_shape(one: LeafDescription) -> str:
    return "no array" if one.shape is None else show_shape(one.shape)


def _summary(found: TreeComparison) -> str:
    if found.same:
        return click.style(f"no difference in {count_of(len(found.leaves), 'leaf')}", fg="green")
    counts: Counter[str] = Counter()
    for leaf in found.leaves:
        if leaf.b is None:
            counts["only in a"] += 1
        elif leaf.a is None:
            counts["only in b"] += 1
        else:
            counts["the same" if leaf.same else "different"] += 1
    order = ("the same", "different", "only in a", "only in b")
    shown = [f"{counts[name]:,} {name}" for name in order if counts[name]]
    if found.containers:
        shown.append(f"{count_of(len(found.containers), 'container')} different")
    return f"{count_of(len(found.leaves), 'leaf')}: {', '.join(shown)}"


# For scripts


def _describe(leaf: LeafComparison) -> dict[str, Any]:
    elements: dict[str, Any] | None = None
    if leaf.distance is not None:
        elements = {
            "count": leaf.distance.elements,
            "changed": leaf.distance.changed,
            "nan": leaf.distance.nan,
            "largest": json_number(leaf.distance.largest),
            "mean": json_number(leaf.distance.mean),
        }
    return {
        "path": leaf.path,
        "same": leaf.same,
        "differs": leaf.differs,
        "a": None if leaf.a is None else asdict(leaf.a),
        "b": None if leaf.b is None else asdict(leaf.b),
        "elements": elements,
    }
