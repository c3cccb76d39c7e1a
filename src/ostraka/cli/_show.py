"""`ostraka show`: the leaves, files and elements of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ostraka.cli import _tree
from ostraka.cli._arguments import (
    complete_leaves,
    flag,
    json_option,
    names_option,
    option,
    parsed,
    path_argument,
)
from ostraka.cli._errors import DIFFERENT
from ostraka.cli._output import Table, echo_json, echo_lines, human_number
from ostraka.cli._tree import LeafRow
from ostraka.common.units import human_bytes
from ostraka.errors import count_of, nearest_path
from ostraka.formats.source import Source
from ostraka.reading.locate import open_at, read_whole
from ostraka.tree.patterns import matches

if TYPE_CHECKING:
    from ostraka.cli._measure import Statistics

_COLUMNS = ("leaf", "dtype", "shape", "spec", "size")
_STATISTICS = ("least", "most", "mean", "std", "nan", "inf")


def _two_numbers(text: str) -> tuple[int, int]:
    one, other = map(int, text.split(","))
    return one, other


@click.command()
@path_argument("path")
@click.argument("leaf", required=False, shell_complete=complete_leaves)
@option("--depth", click.IntRange(1), "Sum up deeper leaves; not in JSON.")
@option("--sort", click.Choice(["tree", "size", "name"]), "Default: tree.", default="tree")
@flag("--stats", "Read the arrays: least, most, mean, std, NaN.")
@flag("--nan", "Read the arrays, and list those with NaN or infinity.")
@flag("--files", "List the files, with the process and host of each.")
@option("--slice index", "INDEX", "Print these elements of LEAF: '0:4,:3'.")
@option(
    "--dimensions",
    parsed("I,J", _two_numbers, "is not two numbers of dimensions, as in 0,2"),
    "Draw LEAF's sharding along these two. Default: the first two that are sharded.",
)
@names_option("Show tensors as the leaves that a restore makes of them")
@json_option()
def show(path: str, leaf: str | None, names: Any, **options: Any) -> None:
    """Show what the checkpoint at PATH holds.

    The table lists every leaf with its dtype, its global shape, its sharding and its size. Below it
    you see who wrote the checkpoint, when, where, and how long that took. Arrays are read only for
    --stats, --nan and --slice, and are verified then. With --nan the exit code is 1 if there is any
    NaN or infinity.

    LEAF is a path, or a pattern: * stands for anything in one name, ** for anything at all, and a
    name above leaves for all of them. For a single array the command draws its sharding, with the
    numbers of devices, and lists the file of each box with the process and host that wrote it.

    PATH may be a directory of steps, for the newest of them, or runs/7 for step 7 of runs. The
    first line says which it is. ostraka ls lists them all.

    \b
    Examples:
      ostraka show runs/7
      ostraka show runs/7 --depth 2 --sort size
      ostraka show runs/7 'params/**/kernel' --stats
      ostraka show runs/7 params/embedding --slice '0:4,:3'
      ostraka show runs --nan
      ostraka show llama/ --names hf
      ostraka show runs/7 --json | jq '.leaves[] | select(.bytes > 1e9) | .path'
    """
    is_fine = read_whole(
        [path],
        lambda found: _show(found[0], leaf, **options),
        partial(open_at, names=names),
    )
    if not is_fine:
        click.get_current_context().exit(DIFFERENT)


def _show(
    source: Source,
    leaf: str | None,
    *,
    depth: int | None,
    sort: str,
    stats: bool,
    nan: bool,
    files: bool,
    index: str | None,
    dimensions: tuple[int, int] | None,
    as_json: bool,
) -> bool:
    """Read everything, then print a checkpoint. Returns False if --nan found something."""
    rows = _tree.rows_of(source)
    chosen = _choose(source.location, rows, leaf)
    of_array = {"--slice": index, "--dimensions": dimensions}
    if nan:
        others = {"--stats": stats, "--files": files, "--depth": depth, **of_array}
        if clash := next(filter(others.get, others), None):
            raise click.UsageError(f"--nan does not go together with {clash}; give one")
        from ostraka.cli._show_arrays import show_not_finite

        return show_not_finite(source, chosen, as_json=as_json)
    if len(chosen) == 1 and chosen[0].path == leaf and chosen[0].number is not None:
        from ostraka.cli._show_arrays import show_leaf  # with numpy, which the table does without

        show_leaf(source, chosen[0], index, dimensions, stats=stats, as_json=as_json)
        return True
    for name, value in of_array.items():
        if value is not None:
            given = "no LEAF is given" if leaf is None else f"{leaf!r} is not one"
            raise click.UsageError(f"{name} needs the path of one array, and {given}")
    found: Mapping[int, Statistics] = {}
    if stats:
        from ostraka.cli._measure import statistics_of

        numbers = {row.number for row in chosen if row.number is not None}
        found = statistics_of(source, sorted(numbers))
    if depth is not None and not as_json:
        chosen = _tree.summed_up(chosen, depth)
    if sort != "tree":
        chosen.sort(key=lambda row: -row.nbytes if sort == "size" else row.path)
    if as_json:
        echo_json(_tree.describe(source, rows, chosen, found))
        return True
    lines = [_tree.title(source)]
    if chosen:
        lines += ["", *_table(chosen, found)]
    if files:
        lines += ["", *_tree.files_table(source)]
    lines.append("")
    if leaf is not None:
        size = human_bytes(sum(row.nbytes for row in chosen))
        lines.append(f"{count_of(sum(row.leaves for row in chosen), 'leaf')} of {leaf!r}, {size}")
    echo_lines([*lines, *_tree.totals_lines(source, rows)])
    return True


def _choose(location: str, rows: Sequence[LeafRow], leaf: str | None) -> list[LeafRow]:
    """The rows of the leaf, or of the leaves that it matches as a pattern."""
    if leaf is None:
        return list(rows)
    chosen = [row for row in rows if row.path == leaf]
    chosen = chosen or [row for row in rows if matches(leaf.rstrip("/"), row.path)]
    if not chosen:
        close = nearest_path(leaf, [row.path for row in rows])
        raise click.UsageError(f"{location} has no leaf {leaf!r}{close}")
    return chosen


def _table(rows: Sequence[LeafRow], statistics: Mapping[int, Statistics]) -> list[str]:
    table = Table(_COLUMNS + (_STATISTICS if statistics else ()), right=("size", *_STATISTICS))
    for row in rows:
        extra: tuple[str, ...] = ()
        if statistics and len(row.cells) == len(_COLUMNS):
            found = None if row.number is None else statistics.get(row.number)
            extra = ("",) * len(_STATISTICS)
            if found is not None:
                extra = tuple(map(human_number, astuple(found)[1:]))
        table.add(*row.cells, *extra)
    return table.lines()
