"""`ostraka show`: the leaves, files and elements of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from functools import partial, reduce
from operator import add
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
from ostraka.cli._fold import Line, fold, numbered_pattern
from ostraka.cli._output import (
    Table,
    echo_json,
    echo_lines,
    human_number,
    human_size,
    progress,
    screen_lines,
    screen_width,
)
from ostraka.cli._tree import LeafRow
from ostraka.errors import count_of, nearest_path
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.source import Source
from ostraka.reading.groups import OPTIMIZER, groups_of
from ostraka.reading.locate import open_at, read_whole
from ostraka.tree.blocks import separator_of
from ostraka.tree.nodes import escape
from ostraka.tree.patterns import matches

if TYPE_CHECKING:
    from ostraka.report.measure import Statistics

_COLUMNS = ("leaf", "dtype", "shape", "spec", "size")
_STATISTICS = ("least", "most", "mean", "std", "nan", "inf")
_FEWEST_LINES = 8
"""Lines for leaves, however low the screen is."""


def _two_numbers(text: str) -> tuple[int, int]:
    one, other = map(int, text.split(","))
    return one, other


@click.command()
@path_argument("path")
@click.argument("leaf", required=False, shell_complete=complete_leaves)
@option("--depth", click.IntRange(1), "Sum up deeper leaves; not in JSON.")
@option("--sort", click.Choice(["tree", "size", "name"]), "Default: tree.", default="tree")
@flag("--all everything", "List every leaf with its path, and fold nothing.")
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

    First comes the number of parameters, then the tree: each leaf with its dtype, its global shape,
    its sharding and its size. A tree that is longer than the screen is folded: equal blocks, such
    as blocks/0..23, become one, and deep subtrees become one line with the number of their leaves
    and their bytes. --all unfolds it. Below it you see who wrote the checkpoint, when, where, and
    how long that took. Arrays are read only for --stats, --nan and --slice, and are verified then.
    With --nan the exit code is 1 if there is any NaN or infinity.

    LEAF is a path, or a pattern: * stands for anything in one name, ** for anything at all, 0..23
    for these numbers, and a name above leaves for all of them. Tensors of other files go by the
    names that they have there. For a single array the command draws its sharding, with the numbers
    of devices, and lists the file of each box with the process and host that wrote it.

    PATH may be a directory of steps, for the newest of them, or runs/7 for step 7 of runs. The
    first line says which it is. ostraka ls lists them all.

    \b
    Examples:
      ostraka show runs/7
      ostraka show runs/7 --all
      ostraka show runs/7 --depth 2 --sort size
      ostraka show runs/7 'params/**/kernel' --stats
      ostraka show runs/7 'params/blocks/0..23/attention'
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
    everything: bool,
    stats: bool,
    nan: bool,
    files: bool,
    index: str | None,
    dimensions: tuple[int, int] | None,
    as_json: bool,
) -> bool:
    """Read everything, then print a checkpoint. Returns False if --nan found something."""
    rows = _tree.rows_of(source)
    chosen = _choose(source, rows, leaf)
    of_array = {"--slice": index, "--dimensions": dimensions}
    if nan:
        others = {"--stats": stats, "--files": files, "--depth": depth, **of_array}
        if clash := next(filter(others.get, others), None):
            raise click.UsageError(f"--nan does not go together with {clash}; give one")
        from ostraka.cli._show_arrays import show_not_finite

        return show_not_finite(source, chosen, as_json=as_json)
    names = {leaf, _escaped(source, leaf)}
    if len(chosen) == 1 and chosen[0].path in names and chosen[0].number is not None:
        from ostraka.cli._show_arrays import show_leaf  # with numpy, which the table does without

        show_leaf(source, chosen[0], index, dimensions, stats=stats, as_json=as_json)
        return True
    for name, value in of_array.items():
        if value is not None:
            given = "no LEAF is given" if leaf is None else f"{leaf!r} is not one"
            raise click.UsageError(f"{name} needs the path of one array, and {given}")
    found: Mapping[int, Statistics] = {}
    if stats:
        from ostraka.report.measure import statistics_of

        numbers = {row.number for row in chosen if row.number is not None}
        found = statistics_of(source, sorted(numbers), progress=progress)
    if depth is not None and not as_json:
        chosen = _tree.summed_up(chosen, depth)
    if sort != "tree":
        chosen.sort(key=lambda row: -row.nbytes if sort == "size" else row.path)
    if as_json:
        echo_json(_tree.describe(source, rows, chosen, found))
        return True
    groups = groups_of(source)
    top = [*_tree.title_lines(source), *_tree.parameters_lines(source, groups)]
    end = ["", *_tree.files_table(source)] if files else []
    end.append("")
    if leaf is not None:
        size = human_size(sum(row.nbytes for row in chosen))
        end.append(f"{count_of(sum(row.leaves for row in chosen), 'leaf')} of {leaf!r}, {size}")
    end += _tree.totals_lines(source, rows)
    table: list[str] = []
    if everything or leaf is not None or depth is not None or sort != "tree":
        table = ["", *_table(source, chosen, found)] if chosen else []
    elif chosen:
        # A blank line, the head, a line about folding, and the prompt of the shell below it all.
        most = max(screen_lines() - len(top) - len(end) - 4, _FEWEST_LINES)
        table = ["", *_folded(source, chosen, found, groups, most)]
    echo_lines([*top, *table, *end])
    return True


def _escaped(source: Source, leaf: str | None) -> str | None:
    """The path of a tensor by its name in a file, where both differ."""
    if leaf is not None and isinstance(source, SafetensorsSource):
        return escape(leaf)
    return leaf


def _choose(source: Source, rows: Sequence[LeafRow], leaf: str | None) -> list[LeafRow]:
    """The rows of the leaf, or of the leaves that it matches as a pattern."""
    if leaf is None:
        return list(rows)
    path = _escaped(source, leaf)
    chosen = [row for row in rows if row.path in (leaf, path)]
    chosen = chosen or [row for row in rows if matches(leaf.rstrip("/"), row.path)]
    if not chosen and (is_numbered := numbered_pattern(leaf)) is not None:
        chosen = [row for row in rows if is_numbered(row.path)]
    if not chosen:
        close = nearest_path(leaf, [row.path for row in rows])
        raise click.UsageError(f"{source.location} has no leaf {leaf!r}{close}")
    return chosen


def _table(
    source: Source, rows: Sequence[LeafRow], statistics: Mapping[int, Statistics]
) -> list[str]:
    """A row for each leaf, with its whole path."""
    found = [[row] if row.number in statistics else [] for row in rows]
    cells = [(_tree.name_in(source, row.path), *row.cells[1:]) for row in rows]
    has_spec = _has_spec(source)
    return _fitted(cells, found, statistics, has_spec=has_spec, shrink=("dtype", "spec"))


def _has_spec(source: Source) -> bool:
    """False for files that record no sharding of any array."""
    saved = source.saved.in_files
    return "library" not in saved.writer or any(leaf.mesh >= 0 for leaf in saved.leaves)


def _folded(
    source: Source,
    rows: Sequence[LeafRow],
    statistics: Mapping[int, Statistics],
    groups: Mapping[int, str],
    most: int,
) -> list[str]:
    """The tree, folded to `most` lines."""
    separator = separator_of(row.path for row in rows)
    lines, cut = fold(
        rows,
        most,
        separator=separator,
        is_last=lambda row: groups.get(-1 if row.number is None else row.number) == OPTIMIZER,
    )
    cells = [_cells(source, line) for line in lines]
    found = [[] if line.is_open else line.rows for line in lines]
    shrink = ("dtype", "spec") if separator == "." else ("dtype", "spec", "leaf")
    shown = _fitted(cells, found, statistics, has_spec=_has_spec(source), shrink=shrink)
    if cut:
        size = human_size(sum(row.nbytes for row in cut))
        shown.append(f"… and {count_of(len(cut), 'leaf')} more, {size}; --all lists them")
    elif any(len(line.rows) > 1 and not line.is_open for line in lines):
        hint = f"--all lists all {count_of(len(rows), 'leaf')}"
        shown.append(click.style(hint, dim=True))
    return shown


def _cells(source: Source, line: Line) -> tuple[str, ...]:
    """The cells of a line of the tree."""
    block, first = line.block, line.rows[0]
    if block.leaf is not None:
        _, *cells = first.cells
        is_several = len(line.rows) > 1 and first.same_as is None
        if is_several and first.number is not None:
            cells[-1] = f"{len(line.rows)} × {cells[-1]}"
        elif is_several and len({row.cells[2] for row in line.rows}) > 1:
            cells[1] = f"{len(line.rows)} values"
        return _tree.name_in(source, line.label), *cells
    leaves = count_of(len(line.rows) // block.repeats, "leaf")
    if block.repeats > 1:
        leaves = f"{block.repeats} × {leaves}"
    size = human_size(sum(row.nbytes for row in line.rows))
    return line.label, _tree.dtypes_in(line.rows, 1), leaves, "", size


def _fitted(
    cells: Sequence[tuple[str, ...]],
    rows: Sequence[Sequence[LeafRow]],
    statistics: Mapping[int, Statistics],
    *,
    has_spec: bool,
    shrink: Sequence[str],
) -> list[str]:
    """A table of the cells, and of the statistics of the rows that each line stands for.

    On a narrow screen, statistics take the place of other columns and have fewer digits.
    """
    columns = tuple(name for name in _COLUMNS if has_spec or name != "spec")
    width = screen_width()
    if not statistics:
        table = _made(_COLUMNS, cells, columns, shrink)
        if not has_spec and width is not None and table.width() > width:
            # Names of tensors are long, and mostly of one dtype, which the line above has.
            return _made(_COLUMNS, cells, ("leaf", "shape", "size"), shrink).lines()
        return table.lines()
    summed = [_summed(some, statistics) for some in rows]

    def make(columns: tuple[str, ...], digits: int) -> Table:
        wide = [
            (*row, *_show_statistics(found, digits)) if len(row) == len(_COLUMNS) else row
            for row, found in zip(cells, summed, strict=True)
        ]
        return _made(_COLUMNS + _STATISTICS, wide, columns + _STATISTICS, ("leaf",))

    for some in (columns, ("leaf", "dtype", "shape")):
        table = make(some, 6)
        if width is None or table.width() <= width:
            return table.lines()
    return make(("leaf",), 4).lines()


def _summed(rows: Sequence[LeafRow], statistics: Mapping[int, Statistics]) -> Statistics | None:
    """The statistics of the arrays in some rows together. None without arrays."""
    numbers = dict.fromkeys(row.number for row in rows if row.number in statistics)
    found = [statistics[number] for number in numbers if number is not None]
    return reduce(add, found) if found else None


def _show_statistics(found: Statistics | None, digits: int) -> tuple[str, ...]:
    if found is None:
        return ("",) * len(_STATISTICS)
    return tuple(human_number(number, digits) for number in astuple(found)[1:])


def _made(
    head: Sequence[str],
    rows: Sequence[tuple[str, ...]],
    columns: Sequence[str],
    shrink: Sequence[str],
) -> Table:
    """A table of some columns of the rows. Short rows, which are values, stay as they are."""
    table = Table(columns, right=("size", *_STATISTICS), shrink=shrink)
    kept = [head.index(name) for name in columns]
    for row in rows:
        table.add(*(row[column] for column in kept) if len(row) == len(head) else row)
    return table
