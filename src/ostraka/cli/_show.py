"""`ostraka show`: what is in a checkpoint, and on request in its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ostraka._checkpoint import open_at, read_whole
from ostraka._pattern import matches
from ostraka._source import Source
from ostraka.cli import _tree
from ostraka.cli._arguments import complete_leaves, names_option, path_argument
from ostraka.cli._errors import DIFFERENT
from ostraka.cli._text import Table, count_of, echo_json, echo_lines, human_bytes, human_number
from ostraka.cli._tree import Row
from ostraka.errors import nearest_path

if TYPE_CHECKING:
    from ostraka.cli._statistics import Statistics

_COLUMNS = ("leaf", "dtype", "shape", "spec", "size")
_OPTIONS = {"index": "--slice"}
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
@click.option("--nan", is_flag=True, help="Read the arrays, and list those with NaN or infinity.")
@click.option("--files", is_flag=True, help="List the files, with the process and host of each.")
@click.option("--slice", "index", metavar="INDEX", help="Print these elements of LEAF: '0:4,:3'.")
@click.option(
    "--dimensions",
    callback=_parse_dimensions,
    metavar="I,J",
    help="Draw LEAF's sharding along these two. Default: the first two that are cut.",
)
@names_option("Show tensors as the leaves that a restore makes of them")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, sizes in bytes.")
def show(path: str, leaf: str | None, names: Any, as_json: bool, **options: Any) -> None:
    """Show what the checkpoint at PATH holds.

    Every leaf is listed with its dtype, its global shape, how it was cut over the mesh, and its
    size; then who wrote it, when, where, and how long that took. No array is read unless --stats,
    --nan or --slice asks for it, and what is read is verified. With --nan the exit code is 1 if
    there is any NaN or infinity.

    LEAF is a path, or a pattern: * stands for anything in one name, ** for anything at all, and a
    name above leaves for all of them. Of a single array its sharding is drawn, the numbers are
    those of devices, and the file of each box is listed, with the process and host that wrote it.

    PATH may be a directory of steps, for the newest of them, or runs/7 for step 7 of runs; the
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
        lambda found: _show(found[0], leaf, as_json=as_json, **options),
        partial(open_at, names=names),
    )
    if not is_fine:
        click.get_current_context().exit(DIFFERENT)


def _show(
    source: Source, leaf: str | None, *, as_json: bool, nan: bool, files: bool, **options: Any
) -> bool:
    """Print it, once all has been read; returns False if --nan has found something."""
    rows = _tree.rows_of(source)
    chosen = _choose(source.location, rows, leaf)
    if nan:
        _refuse_with_nan(files=files, **options)
        from ostraka.cli._show_nan import show_not_finite

        return show_not_finite(source, chosen, as_json=as_json)
    if _is_one_array(chosen, leaf):
        from ostraka.cli._show_leaf import show_leaf  # with numpy, which the table does without

        show_leaf(source, chosen[0], as_json=as_json, **options)
        return True
    for name in ("index", "dimensions"):
        if options[name] is not None:
            _refuse(name, leaf)
    _show_tree(source, rows, chosen, leaf, as_json=as_json, files=files, **options)
    return True


def _choose(location: str, rows: Sequence[Row], leaf: str | None) -> list[Row]:
    if leaf is None:
        return list(rows)
    # A leaf may have a name that would be a pattern, too.
    chosen = [row for row in rows if row.path == leaf]
    chosen = chosen or [row for row in rows if matches(leaf.rstrip("/"), row.path)]
    if not chosen:
        close = nearest_path(leaf, [row.path for row in rows])
        raise click.UsageError(
            f"{location} has no leaf {leaf!r}{close}", click.get_current_context()
        )
    return chosen


def _is_one_array(chosen: Sequence[Row], leaf: str | None) -> bool:
    return len(chosen) == 1 and chosen[0].path == leaf and chosen[0].number is not None


def _refuse_with_nan(**options: Any) -> None:
    for name in ("stats", "files", "depth", "index", "dimensions"):
        if options[name]:
            raise click.UsageError(
                f"--nan does not go together with {_OPTIONS.get(name, f'--{name}')}; give one",
                click.get_current_context(),
            )


def _refuse(name: str, leaf: str | None) -> None:
    option = _OPTIONS.get(name, f"--{name}")
    found = "no LEAF is given" if leaf is None else f"{leaf!r} is not one"
    raise click.UsageError(
        f"{option} needs the path of one array, and {found}", click.get_current_context()
    )


def _show_tree(
    source: Source,
    rows: Sequence[Row],
    chosen: list[Row],
    leaf: str | None,
    *,
    depth: int | None,
    sort: str,
    stats: bool,
    files: bool,
    as_json: bool,
    **_: Any,
) -> None:
    found = _statistics(source, chosen) if stats else {}
    if as_json:
        echo_json(_tree.describe(source, rows, _sorted(chosen, sort), found))
        return
    lines = [_tree.title(source)]
    if chosen:
        if depth is not None:
            chosen = _tree.summed_up(chosen, depth)
        lines += ["", *_table(_sorted(chosen, sort), found)]
    if files:
        lines += ["", *_tree.files_table(source)]
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


def _statistics(source: Source, rows: Sequence[Row]) -> dict[int, Statistics]:
    from ostraka.cli._progress import progress
    from ostraka.cli._statistics import statistics_of

    arrays = [row for row in rows if row.number is not None]
    with progress("reading", sum(row.nbytes for row in arrays)) as bar:
        numbers = [row.number for row in arrays if row.number is not None]
        return statistics_of(source, numbers, on_bytes=bar.advance)
