"""`ostraka show`: what is in a checkpoint, from its `_METADATA` alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import click

from ostraka import _checkpoint
from ostraka._document import ArrayNumber, leaves_of
from ostraka._format import Metadata
from ostraka._spec import LeafSpec, show_partition
from ostraka.storage import open_store

_COLUMNS = ("leaf", "dtype", "shape", "spec", "size")
_VALUE_WIDTH = 60


@click.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON, sizes in bytes.")
def show(path: str, as_json: bool) -> None:
    """Show what the checkpoint at PATH holds.

    Every leaf is listed with its dtype, its global shape, how it was cut over the mesh, and its
    size. No array is read.

    \b
    Examples:
      ostraka show runs/7
      ostraka show runs/7 --json | jq '.leaves[] | select(.bytes > 1e9) | .path'
    """
    source = _checkpoint.load(open_store(path))
    metadata = source.metadata
    leaves = {leaf.path: leaf.value for leaf in leaves_of(source.tree)}
    if as_json:
        click.echo(json.dumps(_document(source.location, metadata, leaves), indent=1))
        return
    click.echo(click.style(source.location, bold=True), nl=False)
    click.echo(f"  {_origin(metadata.writer)}")
    if leaves:
        click.echo()
        _print_table([_row(metadata, path, value) for path, value in leaves.items()])
    click.echo()
    for line in _totals_lines(_totals(metadata, leaves), metadata):
        click.echo(line)


# For people


def _origin(writer: Mapping[str, Any]) -> str:
    when = str(writer.get("time", "at an unknown time"))
    if when.endswith("+00:00"):
        when = f"{when[:19].replace('T', ' ')} UTC"
    return _printable(f"saved {when} by ostraka {writer.get('ostraka', '(unknown version)')}")


def _row(metadata: Metadata, path: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, ArrayNumber):
        shown = repr(value)
        if len(shown) > _VALUE_WIDTH:
            shown = f"{shown[: _VALUE_WIDTH - 1]}…"
        return _printable(path), type(value).__name__, _printable(shown)
    leaf = metadata.leaves[value.number].spec
    shape = leaf.shape[1:] if leaf.per_process else leaf.shape
    dtype = leaf.dtype
    if leaf.prng is not None:
        shape, dtype = shape[:-1], f"key<{leaf.prng}>"
    written = " × ".join(str(n) for n in shape) or "()"
    where = _printable(_placement(metadata, leaf))
    return _printable(path), _printable(dtype), written, where, human_bytes(leaf.nbytes)


def _placement(metadata: Metadata, leaf: LeafSpec) -> str:
    if leaf.per_process:
        return f"one for each of {leaf.shape[0]} processes"
    if leaf.mesh < 0:
        return "host memory"
    if not metadata.meshes[leaf.mesh].axis_names:
        return "one device"
    return show_partition(leaf.partition)


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    # A value takes all the room behind its type, so it does not count for the widths.
    arrays = [_COLUMNS, *(row for row in rows if len(row) == len(_COLUMNS))]
    widths = [max(len(row[column]) for row in arrays) for column in range(len(_COLUMNS))]
    for column in (0, 1):
        widths[column] = max(widths[column], *(len(row[column]) for row in rows))
    click.echo(click.style(_line(_COLUMNS, widths), dim=True))
    for row in rows:
        click.echo(_line(row, widths))


def _line(row: tuple[str, ...], widths: Sequence[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
    if len(row) == len(_COLUMNS):
        cells[-1] = row[-1].rjust(widths[-1])
    return "  ".join(cells).rstrip()


def _totals_lines(totals: Mapping[str, Any], metadata: Metadata) -> list[str]:
    inside = [_count(totals["arrays"], "array")]
    if totals["values"]:
        inside.append(_count(totals["values"], "value"))
    size = human_bytes(totals["bytes"])
    writers = f"{_count(totals['processes'], 'process')} with {_count(totals['devices'], 'device')}"
    lines = [
        f"{', '.join(inside)}, {size} in {_count(totals['files'], 'file')}, written by {writers}"
    ]
    meshes = [_printable(str(mesh)) for mesh in metadata.meshes if mesh.axis_names]
    lines += [f"mesh: {mesh}" for mesh in dict.fromkeys(meshes)]
    if metadata.user:
        lines.append(f"metadata: {json.dumps(metadata.user)}")
    return lines


def _printable(text: str) -> str:
    """Text of a checkpoint that may come from a stranger: it must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def human_bytes(count: int) -> str:
    """A size that people read at a glance: `1.5 MiB`."""
    if count < 1024:
        return f"{count} B"
    power = min(int(math.log2(count) // 10), 6)
    return f"{count / 1024**power:.1f} {' KMGTPE'[power]}iB"


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun if number == 1 else noun + plural}"


# For scripts


def _document(location: str, metadata: Metadata, leaves: Mapping[str, Any]) -> Mapping[str, object]:
    return {
        "path": location,
        "id": metadata.id,
        "writer": metadata.writer,
        "metadata": metadata.user,
        "meshes": [
            dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)) for mesh in metadata.meshes
        ],
        "leaves": [_describe(metadata, path, value) for path, value in leaves.items()],
        "totals": _totals(metadata, leaves),
    }


def _describe(metadata: Metadata, path: str, value: Any) -> Mapping[str, object]:
    if not isinstance(value, ArrayNumber):
        plain = value is None or isinstance(value, bool | int | str)
        finite = isinstance(value, float) and math.isfinite(value)
        shown = value if plain or finite else repr(value)
        return {"path": path, "kind": "value", "type": type(value).__name__, "value": shown}
    leaf = metadata.leaves[value.number].spec
    return {
        "path": path,
        "kind": leaf.kind,
        "dtype": leaf.dtype,
        "shape": leaf.shape,
        "spec": leaf.partition if leaf.mesh >= 0 else None,
        "mesh": leaf.mesh if leaf.mesh >= 0 else None,
        "prng": leaf.prng,
        "per_process": leaf.per_process,
        "bytes": leaf.nbytes,
    }


def _totals(metadata: Metadata, leaves: Mapping[str, Any]) -> Mapping[str, int]:
    return {
        "arrays": len(metadata.leaves),
        "values": len(leaves) - len(metadata.leaves),
        "bytes": sum(leaf.spec.nbytes for leaf in metadata.leaves),
        "files": len(metadata.files),
        "file_bytes": sum(file.size for file in metadata.files),
        "processes": metadata.process_count,
        "devices": len(metadata.process_of),
    }
