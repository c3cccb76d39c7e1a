"""`ostraka show` of elements: one array with its devices and files, or NaN and infinity in all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import astuple
from math import prod
from typing import Any

import click
import numpy as np

from ostraka.cli import _tree
from ostraka.cli._output import (
    Table,
    echo_json,
    echo_lines,
    human_number,
    human_size,
    progress,
)
from ostraka.cli._tree import LeafRow
from ostraka.common.dtypes import is_inexact, numpy_dtype
from ostraka.common.text import json_number, show_shape
from ostraka.errors import InvalidSharding, count_of, printable
from ostraka.formats.source import Source
from ostraka.layout import box as _box
from ostraka.layout.spec import LeafSpec, Target
from ostraka.reading.lazy import bounding_box
from ostraka.reading.show import show_dtype, show_sharding
from ostraka.report.measure import Statistics, as_numbers, count_not_finite, statistics_of
from ostraka.sharding.drawing import draw
from ostraka.sharding.leaves import every_dimension

_MOST_BOXES = 32
_MOST_DRAWINGS = 8
_MOST_SLICE_BYTES = 64 << 20


def show_leaf(
    source: Source,
    row: LeafRow,
    index: str | None,
    dimensions: tuple[int, int] | None,
    *,
    stats: bool,
    as_json: bool,
) -> None:
    """Print one array: its placement, and the elements or statistics that were asked for."""
    assert row.number is not None
    leaf = source.saved.leaves[row.number]
    drawing = _draw(source, leaf, dimensions)
    elements = None if index is None else _read_slice(source, row.number, index)
    found = statistics_of(source, [row.number], progress=progress)[row.number] if stats else None
    if as_json:
        document = _tree.describe_row(source.saved, row)
        document |= {"checkpoint": source.location, "boxes": _describe_boxes(source, row.number)}
        if found is not None:
            document["statistics"] = _tree.describe_statistics(found)
        if elements is not None:
            values = _plain(elements)
            document["slice"] = {"index": index, "shape": elements.shape, "values": values}
        echo_json(document)
        return
    name = printable(_tree.name_in(source, row.path))
    lines = [f"{click.style(name, bold=True)} of {printable(source.location)}"]
    shown = [
        show_dtype(leaf) + ("" if leaf.cast_from is None else f"  (was {leaf.cast_from})"),
        show_shape(leaf.logical_shape),
        human_size(leaf.nbytes),
        show_sharding(leaf, source.saved.meshes),
    ]
    lines.append(printable("  ".join(shown)))
    if row.same_as is not None:
        lines.append(printable(f"the same array as {row.same_as}"))
    if drawing:
        lines += ["", *drawing]
    lines += ["", *_files_table(source, row.number)]
    if found is not None:
        lines += ["", *_statistics_lines(leaf, found)]
    if elements is not None:
        lines += ["", click.style(f"[{index}]", dim=True), *_print(elements)]
    echo_lines(lines)


def _draw(source: Source, leaf: LeafSpec, dimensions: tuple[int, int] | None) -> list[str]:
    """A drawing of the devices of each shard. Arrays on no mesh have none."""
    mesh = source.saved.meshes[leaf.mesh] if leaf.mesh >= 0 else None
    if mesh is None or not mesh.axis_names:
        if dimensions is not None:
            raise click.UsageError(
                f"--dimensions needs an array on a mesh, and {leaf.path!r} was on none"
            )
        return []
    partition = every_dimension(leaf.partition, len(leaf.shape))
    try:
        text = draw(leaf.shape, mesh, partition, dimensions=dimensions, most=_MOST_DRAWINGS)
    except InvalidSharding as error:
        raise click.UsageError(f"--dimensions: {error}") from error
    return [printable(line) for line in text.splitlines()]


# Files


def _files_table(source: Source, number: int) -> list[str]:
    boxes = source.boxes_of(number)
    hosts = _tree.hosts_of(source.saved)
    head = ("box", "file", "process", "host", "at byte", "bytes")
    is_compressed = any(place.stored_bytes != place.nbytes for place in boxes)
    stored = ("stored bytes",) if is_compressed else ()
    table = Table((*head, *stored), right=("process", "at byte", "bytes", *stored))
    for place in boxes[:_MOST_BOXES]:
        table.add(
            f"[{', '.join(f'{start}:{stop}' for start, stop in place.box)}]",
            place.file.rpartition("/")[2],
            f"{place.process}",
            hosts.get(place.process, "unknown"),
            f"{place.offset:,}",
            f"{place.nbytes:,}",
            *([f"{place.stored_bytes:,}"] if is_compressed else []),
        )
    lines = table.lines()
    if len(boxes) > _MOST_BOXES:
        lines.append(f"… and {len(boxes) - _MOST_BOXES:,} more boxes; --json has all")
    return [*lines, *_tree.directory_lines([place.file for place in boxes])]


# Elements


def _parse_index(text: str) -> Any:
    """One entry of an index in numpy: `0:4`, `-1`, `...`, `::2`. Raises ValueError."""
    if text == "...":
        return ...
    if ":" in text:
        bounds = [int(part) if part.strip() else None for part in text.split(":")]
        if len(bounds) > 3 or (len(bounds) == 3 and bounds[2] == 0):
            raise ValueError(text)
        return slice(*bounds)
    return int(text)


def _read_slice(source: Source, number: int, text: str) -> np.ndarray[Any, Any]:
    leaf = source.saved.leaves[number]
    try:
        index = [_parse_index(part.strip()) for part in text.strip().strip("[]").split(",")]
    except ValueError:
        raise click.UsageError(
            f"--slice {text!r} is not an index; give integers and slices, as in '0:4,:3'"
        ) from None
    try:
        box, within = bounding_box(leaf, index)
    except IndexError as error:
        raise click.UsageError(f"--slice {text!r}: {error}") from error
    nbytes = prod(_box.shape_of(box)) * numpy_dtype(leaf.dtype).itemsize
    if nbytes > _MOST_SLICE_BYTES:
        raise click.UsageError(
            f"--slice {text!r} spans {human_size(nbytes)}, more than "
            f"{human_size(_MOST_SLICE_BYTES)}; take a smaller one, or --stats"
        )
    ((_, array),) = source.read([Target(number, box)])
    return np.asarray(array[(*within, ...)])


def _print(elements: np.ndarray[Any, Any]) -> list[str]:
    if elements.dtype.kind == "V":
        # numpy does not know how to line up the numbers of ml_dtypes.
        is_integer = elements.dtype.name.startswith(("int", "uint"))
        elements = elements.astype(np.int64 if is_integer else np.float32)
    width = shutil.get_terminal_size((100, 24)).columns
    return np.array2string(elements, max_line_width=width, threshold=400).splitlines()


def _statistics_lines(leaf: LeafSpec, found: Statistics) -> list[str]:
    of_what = " of magnitudes" if leaf.dtype.startswith("complex") else ""
    names = (f"least{of_what}", "most", "mean", "std", "NaN", "infinite")
    shown = zip(names, map(human_number, astuple(found)[1:]), strict=True)
    return ["  ".join(f"{click.style(name, dim=True)} {value}" for name, value in shown)]


def _describe_boxes(source: Source, number: int) -> list[dict[str, object]]:
    hosts = _tree.hosts_of(source.saved)
    return [
        {
            "box": place.box,
            "file": place.file,
            "process": place.process,
            "host": hosts.get(place.process),
            "offset": place.offset,
            "bytes": place.nbytes,
            "stored_bytes": place.stored_bytes,
        }
        for place in source.boxes_of(number)
    ]


def _plain(elements: np.ndarray[Any, Any]) -> Any:
    """Elements as nested lists for JSON, with complex numbers as strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            items: list[Any] = value
            return [plain(item) for item in items]
        return repr(value) if isinstance(value, complex) else json_number(value)

    numbers = elements if elements.dtype.kind == "b" else as_numbers(elements)
    return plain(numbers.tolist())


# NaN and infinity


def show_not_finite(source: Source, rows: Sequence[LeafRow], *, as_json: bool) -> bool:
    """List the leaves with NaN or infinity. Returns True if there are none."""
    found = _count(source, rows)
    total = sum(found.values(), Statistics())
    bad = [row for row in rows if row.path in found and not found[row.path].is_finite]
    if as_json:
        document = {
            "path": source.location,
            "finite": total.is_finite,
            **_counts(total),
            "leaves_read": len(found),
            "leaves": [
                _tree.describe_row(source.saved, row) | _counts(found[row.path]) for row in bad
            ],
        }
        echo_json(document)
        return total.is_finite
    lines = [*_tree.title_lines(source), ""]
    if bad:
        table = Table(("leaf", "dtype", "shape", "nan", "inf"), right=("nan", "inf"))
        for row in bad:
            counts = found[row.path]
            kind, shape = type(row.value).__name__, ""
            if row.number is not None:
                leaf = source.saved.leaves[row.number]
                kind, shape = leaf.dtype, show_shape(leaf.logical_shape)
            cells = (row.path, kind, shape, f"{counts.nan:,}", f"{counts.infinite:,}")
            table.add(*cells, colour="red")
        lines += [*table.lines(), ""]
    looked_at = count_of(len(found), "leaf")
    if not total.is_finite:
        lines.append(
            f"NaN or infinity in {len(bad):,} of {looked_at} of floating-point numbers: "
            f"{total.nan:,} NaN, {total.infinite:,} infinite"
        )
    else:
        lines.append(f"no NaN and no infinity in {looked_at} of floating-point numbers")
    echo_lines(lines)
    return total.is_finite


def _counts(found: Statistics) -> dict[str, int]:
    return {"nan": found.nan, "infinite": found.infinite}


def _count(source: Source, rows: Sequence[LeafRow]) -> dict[str, Statistics]:
    """The counts for each leaf of floating-point numbers, at the first path of an array."""
    leaves = source.saved.leaves
    found = {
        row.path: count_not_finite(np.asarray(row.value))
        for row in rows
        if isinstance(row.value, float | complex)
    }
    arrays: dict[int, LeafRow] = {}
    for row in rows:
        if row.number is not None and is_inexact(leaves[row.number].dtype):
            arrays.setdefault(row.number, row)
    counted = statistics_of(source, arrays, count_not_finite, progress)
    return found | {arrays[number].path: counts for number, counts in counted.items()}
