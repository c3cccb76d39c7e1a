"""`ostraka show`: what is in a checkpoint, and on request in its arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ostraka import _checkpoint
from ostraka._pattern import matches
from ostraka.cli import _tree
from ostraka.cli._arguments import complete_leaves, path_argument
from ostraka.cli._text import Table, count_of, echo_lines, human_bytes, human_number
from ostraka.cli._tree import Row
from ostraka.errors import CheckpointNotFound, nearest
from ostraka.storage import open_store

if TYPE_CHECKING:
    from ostraka._statistics import Statistics

_COLUMNS = ("leaf", "dtype", "shape", "spec", "size")
_STATISTICS = ("least", "most", "mean", "std", "nan", "inf")


def _parse_dimensions(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        one, other = (int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not two numbers of dimensions, as in 0,2", context, parameter
        ) from None
    return one, other


@click.command()
@path_argument("path")
@click.argument("leaf", required=False, shell_complete=complete_leaves)
@click.option("--depth", type=click.IntRange(1), help="Sum up what lies deeper; not in JSON.")
@click.option(
    "--sort", type=click.Choice(["tree", "size", "name"]), default="tree", help="Default: tree."
)
@click.option("--stats", is_flag=True, help="Read the arrays: least, most, mean, std, NaN.")
@click.option("--slice", "index", metavar="INDEX", help="Print these elements of LEAF: '0:4,:3'.")
@click.option(
    "--dimensions",
    callback=_parse_dimensions,
    metavar="I,J",
    help="Draw LEAF's sharding along these two. Default: the first two that are cut.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, sizes in bytes.")
def show(path: str, leaf: str | None, as_json: bool, **options: Any) -> None:
    """Show what the checkpoint at PATH holds.

    Every leaf is listed with its dtype, its global shape, how it was cut over the mesh, and its
    size; then who wrote it, when, and how long that took. No array is read unless --stats or
    --slice asks for it, and what is read is verified.

    LEAF is a path, or a pattern: * stands for anything in one name, ** for anything at all, and a
    name above leaves for all of them. Of a single array its sharding is drawn, the numbers are
    those of devices, and the file of each box is told.

    Of a directory of steps, the steps are listed, as ostraka ls does.

    \b
    Examples:
      ostraka show runs/7
      ostraka show runs/7 --depth 2 --sort size
      ostraka show runs/7 'params/**/kernel' --stats
      ostraka show runs/7 params/embedding --slice '0:4,:3'
      ostraka show runs/7 --json | jq '.leaves[] | select(.bytes > 1e9) | .path'
    """
    try:
        source = _checkpoint.load(open_store(path))
    except CheckpointNotFound:
        if leaf is not None or not _has_steps(path):
            raise
        source = None
    if source is None:
        _show_steps(path, as_json)
        return
    rows = _tree.rows_of(source)
    chosen = _choose(source.location, rows, leaf)
    if _is_one_array(chosen, leaf):
        from ostraka.cli._show_leaf import show_leaf  # with numpy, which the table does without

        show_leaf(source, chosen[0], as_json=as_json, **options)
        return
    for name in ("index", "dimensions"):
        if options[name] is not None:
            _refuse(name, leaf)
    _show_tree(source, rows, chosen, leaf, as_json=as_json, **options)


def _has_steps(path: str) -> bool:
    from ostraka.cli._roots import checkpoints_at

    return checkpoints_at(path) != [path]


def _show_steps(path: str, as_json: bool) -> None:
    from ostraka.cli._ls import list_steps

    list_steps(path, as_json=as_json, verified=False)


def _choose(location: str, rows: Sequence[Row], leaf: str | None) -> list[Row]:
    if leaf is None:
        return list(rows)
    # A leaf may have a name that would be a pattern, too.
    chosen = [row for row in rows if row.path == leaf]
    chosen = chosen or [row for row in rows if matches(leaf.rstrip("/"), row.path)]
    if not chosen:
        close = nearest(leaf, [row.path for row in rows])
        raise click.UsageError(
            f"{location} has no leaf {leaf!r}{close}", click.get_current_context()
        )
    return chosen


def _is_one_array(chosen: Sequence[Row], leaf: str | None) -> bool:
    return len(chosen) == 1 and chosen[0].path == leaf and chosen[0].number is not None


def _refuse(name: str, leaf: str | None) -> None:
    option = "--slice" if name == "index" else "--dimensions"
    found = "no LEAF is given" if leaf is None else f"{leaf!r} is not one"
    raise click.UsageError(
        f"{option} needs the path of one array, and {found}", click.get_current_context()
    )


def _show_tree(
    source: _checkpoint.Source,
    rows: Sequence[Row],
    chosen: list[Row],
    leaf: str | None,
    *,
    depth: int | None,
    sort: str,
    stats: bool,
    as_json: bool,
    **_: Any,
) -> None:
    found = _statistics(source, chosen) if stats else {}
    if as_json:
        click.echo(json.dumps(_tree.describe(source, rows, _sorted(chosen, sort), found), indent=1))
        return
    lines = [_tree.title(source)]
    if chosen:
        if depth is not None:
            chosen = _tree.summed_up(chosen, depth)
        lines += ["", *_table(_sorted(chosen, sort), found)]
    lines.append("")
    if leaf is not None:
        size = human_bytes(sum(row.nbytes for row in chosen))
        lines.append(f"{count_of(sum(row.leaves for row in chosen), 'leaf')} of {leaf!r}, {size}")
    echo_lines([*lines, *_tree.totals_lines(source, rows)])


def _sorted(rows: list[Row], sort: str) -> list[Row]:
    keys: dict[str, Callable[[Row], Any]] = {
        "size": lambda row: -row.nbytes,
        "name": lambda row: row.path,
    }
    return sorted(rows, key=keys[sort]) if sort in keys else rows


def _table(rows: Sequence[Row], found: dict[int, Statistics]) -> list[str]:
    head = _COLUMNS + (_STATISTICS if found else ())
    table = Table(head, right=("size", *_STATISTICS))
    for row in rows:
        extra = statistics_cells(found.get(-1 if row.number is None else row.number))
        table.add(*row.cells, *(extra if found and len(row.cells) == len(_COLUMNS) else ()))
    return table.lines()


def statistics_cells(found: Statistics | None) -> tuple[str, ...]:
    if found is None:
        return ("",) * len(_STATISTICS)
    numbers = (found.least, found.most, found.mean, found.std)
    return (*map(human_number, numbers), f"{found.nan:,}", f"{found.infinite:,}")


def _statistics(source: _checkpoint.Source, rows: Sequence[Row]) -> dict[int, Statistics]:
    from ostraka._statistics import statistics_of
    from ostraka.cli._progress import progress

    arrays = [row for row in rows if row.number is not None]
    with progress("reading", sum(row.nbytes for row in arrays)) as bar:
        numbers = [row.number for row in arrays if row.number is not None]
        return statistics_of(source, numbers, on_bytes=bar.advance)
