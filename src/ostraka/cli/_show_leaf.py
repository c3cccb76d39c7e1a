"""`ostraka show PATH LEAF` for one array: its devices, its files and its elements."""

from __future__ import annotations

import shutil
from math import prod
from typing import Any

import click
import numpy as np

from ostraka import _box
from ostraka._box import Box
from ostraka._lazy import bounding_box
from ostraka._source import Source
from ostraka._spec import LeafSpec, Target, numpy_dtype
from ostraka.cli import _tree
from ostraka.cli._progress import progress
from ostraka.cli._statistics import Statistics, statistics_of
from ostraka.cli._text import (
    Table,
    echo_json,
    echo_lines,
    human_bytes,
    human_number,
    json_number,
    printable,
    show_shape,
)
from ostraka.cli._tree import Row
from ostraka.errors import InvalidSharding
from ostraka.sharding._drawing import draw

_MOST_BOXES = 32
_MOST_DRAWINGS = 8
_MOST_SLICE_BYTES = 64 << 20


def show_leaf(
    source: Source,
    row: Row,
    *,
    index: str | None,
    stats: bool,
    dimensions: tuple[int, int] | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Print one array: its placement, and the elements or statistics that were asked for."""
    assert row.number is not None
    leaf = source.saved.leaves[row.number]
    drawing = _draw(source, leaf, dimensions)
    elements = None if index is None else _read_slice(source, row.number, index)
    found = _statistics(source, row.number) if stats else None
    if as_json:
        echo_json(_describe(source, row, index, elements, found))
        return
    lines = [f"{click.style(printable(row.path), bold=True)} of {printable(source.location)}"]
    lines += [_headline(source, leaf)]
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


def _headline(source: Source, leaf: LeafSpec) -> str:
    shown = [
        _tree.dtype_of(leaf),
        show_shape(_tree.shape_of(leaf)),
        human_bytes(leaf.nbytes),
        _tree.placement(source.saved, leaf),
    ]
    if leaf.cast_from is not None:
        shown.insert(1, f"(was {leaf.cast_from})")
    return printable("  ".join(shown))


def _draw(source: Source, leaf: LeafSpec, dimensions: tuple[int, int] | None) -> list[str]:
    """Which device held what; nothing for arrays that lay on no mesh."""
    mesh = source.saved.meshes[leaf.mesh] if leaf.mesh >= 0 else None
    if mesh is None or not mesh.axis_names:
        if dimensions is not None:
            raise click.UsageError(
                f"--dimensions needs an array on a mesh, and {leaf.path!r} was on none",
                click.get_current_context(),
            )
        return []
    whole = ((),) * (len(leaf.shape) - len(leaf.partition))
    try:
        text = draw(
            leaf.shape,
            mesh,
            leaf.partition + whole,
            dimensions=dimensions,
            most=_MOST_DRAWINGS,
        )
    except InvalidSharding as error:
        raise click.UsageError(f"--dimensions: {error}", click.get_current_context()) from error
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
        host = _tree.host_of(hosts, place.process) or _tree.UNKNOWN_HOST
        table.add(
            _show_box(place.box),
            printable(place.file.rpartition("/")[2]),
            f"{place.process}",
            printable(host),
            f"{place.offset:,}",
            f"{place.nbytes:,}",
            *([f"{place.stored_bytes:,}"] if is_compressed else []),
        )
    lines = table.lines()
    if len(boxes) > _MOST_BOXES:
        lines.append(f"… and {len(boxes) - _MOST_BOXES:,} more boxes; --json has all")
    return [*lines, *_tree.where_files_are([place.file for place in boxes])]


def _show_box(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


# Elements


def parse_index(text: str) -> tuple[Any, ...]:
    """What stands between the brackets in numpy: `0:4,:3`, `-1`, `..., ::2`."""
    return tuple(_parse_entry(part.strip()) for part in text.strip().strip("[]").split(","))


def _parse_entry(text: str) -> Any:
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
    context = click.get_current_context()
    try:
        index = parse_index(text)
    except ValueError:
        raise click.UsageError(
            f"--slice {text!r} is not an index; give integers and slices, as in '0:4,:3'", context
        ) from None
    try:
        box, within = bounding_box(leaf, list(index))
    except IndexError as error:
        raise click.UsageError(f"--slice {text!r}: {error}", context) from error
    nbytes = prod(_box.shape_of(box)) * numpy_dtype(leaf.dtype).itemsize
    if nbytes > _MOST_SLICE_BYTES:
        raise click.UsageError(
            f"--slice {text!r} spans {human_bytes(nbytes)}, more than "
            f"{human_bytes(_MOST_SLICE_BYTES)}; take a smaller one, or --stats",
            context,
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


def _statistics(source: Source, number: int) -> Statistics:
    nbytes = source.saved.leaves[number].nbytes
    with progress("reading", nbytes) as bar:
        return statistics_of(source, [number], on_bytes=bar.advance)[number]


def _statistics_lines(leaf: LeafSpec, found: Statistics) -> list[str]:
    of_what = " of magnitudes" if leaf.dtype.startswith("complex") else ""
    shown = {
        f"least{of_what}": human_number(found.least),
        "most": human_number(found.most),
        "mean": human_number(found.mean),
        "std": human_number(found.std),
        "NaN": f"{found.nan:,}",
        "infinite": f"{found.infinite:,}",
    }
    return ["  ".join(f"{click.style(name, dim=True)} {value}" for name, value in shown.items())]


def _describe(
    source: Source,
    row: Row,
    index: str | None,
    elements: np.ndarray[Any, Any] | None,
    found: Statistics | None,
) -> dict[str, object]:
    assert row.number is not None
    document = _tree.describe_row(source.saved, row)
    document["checkpoint"] = source.location
    hosts = _tree.hosts_of(source.saved)
    document["boxes"] = [
        {
            "box": place.box,
            "file": place.file,
            "process": place.process,
            "host": _tree.host_of(hosts, place.process),
            "offset": place.offset,
            "bytes": place.nbytes,
            "stored_bytes": place.stored_bytes,
        }
        for place in source.boxes_of(row.number)
    ]
    if found is not None:
        document["statistics"] = _tree.describe_statistics(found)
    if elements is not None:
        document["slice"] = {
            "index": index,
            "shape": elements.shape,
            "values": _plain(elements),
        }
    return document


def _plain(elements: np.ndarray[Any, Any]) -> Any:
    """Elements as nested lists of what JSON has; complex numbers as text."""
    from ostraka.cli._stream import as_numbers

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            items: list[Any] = value
            return [plain(item) for item in items]
        return repr(value) if isinstance(value, complex) else json_number(value)

    numbers = elements if elements.dtype.kind == "b" else as_numbers(elements)
    return plain(numbers.tolist())
