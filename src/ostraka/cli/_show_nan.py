"""`ostraka show --nan`: which leaves have NaN or infinity in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ostraka._source import Source
from ostraka.cli import _tree
from ostraka.cli._progress import progress
from ostraka.cli._statistics import NotFinite, count_not_finite, may_be_not_finite
from ostraka.cli._text import Table, count_of, echo_json, echo_lines, printable, show_shape
from ostraka.cli._tree import Row


def show_not_finite(source: Source, rows: Sequence[Row], *, as_json: bool) -> bool:
    """Read all arrays that could have some, and list those that have; whether there are none."""
    found = _count(source, rows)
    total = sum(found.values(), NotFinite())
    bad = [row for row in rows if found.get(row.path)]
    if as_json:
        document = {
            "path": source.location,
            "finite": not total,
            "nan": total.nan,
            "infinite": total.infinite,
            "leaves_read": len(found),
            "leaves": [_describe(source, row, found[row.path]) for row in bad],
        }
        echo_json(document)
        return not total
    lines = [_tree.title(source), ""]
    if bad:
        table = Table(("leaf", "dtype", "shape", "nan", "inf"), right=("nan", "inf"))
        for row in bad:
            counts = found[row.path]
            table.add(*_cells(source, row), f"{counts.nan:,}", f"{counts.infinite:,}", colour="red")
        lines += [*table.lines(), ""]
    looked_at = count_of(len(found), "leaf")
    if total:
        lines.append(
            f"NaN or infinity in {len(bad):,} of {looked_at} of floating-point numbers: "
            f"{total.nan:,} NaN, {total.infinite:,} infinite"
        )
    else:
        lines.append(f"no NaN and no infinity in {looked_at} of floating-point numbers")
    echo_lines(lines)
    return not total


def _count(source: Source, rows: Sequence[Row]) -> dict[str, NotFinite]:
    """Of each leaf of floating-point numbers, by its path; of an array only at its first."""
    leaves = source.saved.leaves
    found = {
        row.path: _of_value(row.value) for row in rows if isinstance(row.value, float | complex)
    }
    arrays: dict[int, Row] = {}
    for row in rows:
        if row.number is not None and may_be_not_finite(leaves[row.number].dtype):
            arrays.setdefault(row.number, row)
    nbytes = sum(leaves[number].nbytes for number in arrays)
    with progress("reading", nbytes) as bar:
        counted = count_not_finite(source, list(arrays), on_bytes=bar.advance)
    return found | {arrays[number].path: counts for number, counts in counted.items()}


def _of_value(value: float | complex) -> NotFinite:
    parts = (value.real, value.imag)
    if any(map(math.isnan, parts)):
        return NotFinite(nan=1)
    return NotFinite(infinite=int(any(map(math.isinf, parts))))


def _cells(source: Source, row: Row) -> tuple[str, str, str]:
    if row.number is None:
        return printable(row.path), type(row.value).__name__, ""
    leaf = source.saved.leaves[row.number]
    return printable(row.path), leaf.dtype, show_shape(_tree.shape_of(leaf))


def _describe(source: Source, row: Row, counts: NotFinite) -> dict[str, Any]:
    described = _tree.describe_row(source.saved, row)
    return described | {"nan": counts.nan, "infinite": counts.infinite}
