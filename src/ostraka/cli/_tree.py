"""The leaves and files of a checkpoint as rows, and totals over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from ostraka.cli._output import (
    Table,
    human_seconds,
    human_size,
    json_text,
    screen_width,
    wrap,
)
from ostraka.common.record import read_timeline
from ostraka.common.text import json_number, shorten, show_shape, show_value
from ostraka.errors import count_of, printable
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.source import CONFIG, Saved, Source
from ostraka.reading.groups import PARAMETERS, Total, totals_by_group
from ostraka.reading.show import (
    hosts_of,
    show_dtype,
    show_leaf_value,
    show_sharding,
    show_writer,
    text_in,
)
from ostraka.tree.nodes import ArrayNumber, Kept, UnreadableLeaf, leaves_of, unescape

if TYPE_CHECKING:
    from ostraka.report.measure import Statistics

_VALUE_WIDTH = 60
_MOST_HOSTS = 4


@dataclass(frozen=True, slots=True)
class LeafRow:
    """A leaf, or all leaves below a name."""

    path: str
    cells: tuple[str, ...]
    """The cells of a table: all of its columns, or path, type and value."""
    nbytes: int = 0
    leaves: int = 1
    number: int | None = None
    """The number of an array leaf."""
    same_as: str | None = None
    """The first path of an array that has several, where it is counted."""
    value: Any = None


def rows_of(source: Source) -> list[LeafRow]:
    """A row for each leaf, in tree order."""
    saved = source.saved
    rows: list[LeafRow] = []
    # A model has few kinds of leaves and many of each.
    kinds: dict[tuple[object, ...], tuple[str, ...]] = {}
    for leaf in leaves_of(source.tree):
        if not isinstance(leaf.value, ArrayNumber):
            rows.append(
                LeafRow(leaf.path, (leaf.path, *show_leaf_value(leaf.value)), value=leaf.value)
            )
            continue
        number = leaf.value.number
        spec = saved.leaves[number]
        if leaf.path != spec.path:
            cells = (leaf.path, f"= {spec.path}")
            rows.append(LeafRow(leaf.path, cells, number=number, same_as=spec.path))
            continue
        placed = (spec.mesh, spec.partition, spec.memory, spec.per_process)
        kind = (spec.dtype, spec.shape, spec.prng, *placed)
        if kind not in kinds:
            shape, sharding = show_shape(spec.logical_shape), show_sharding(spec, saved.meshes)
            kinds[kind] = show_dtype(spec), shape, sharding, human_size(spec.nbytes)
        rows.append(LeafRow(leaf.path, (leaf.path, *kinds[kind]), spec.nbytes, number=number))
    return rows


def summed_up(rows: Sequence[LeafRow], depth: int) -> list[LeafRow]:
    """The rows, with one row for all leaves below a name at `depth`."""
    groups: dict[str, list[LeafRow]] = {}
    for row in rows:
        names = row.path.split("/")
        above = "/".join(names[:depth])
        groups.setdefault(f"{above}/" if len(names) > depth else row.path, []).append(row)
    summed: list[LeafRow] = []
    for path, group in groups.items():
        if not path.endswith("/"):
            summed.append(group[0])
            continue
        shown = dtypes_in(group)
        nbytes = sum(row.nbytes for row in group)
        cells = (path, shown, count_of(len(group), "leaf"), "", human_size(nbytes))
        summed.append(LeafRow(path, cells, nbytes, leaves=len(group)))
    return summed


# All of it


def title_lines(source: Source) -> list[str]:
    """The path, when it was saved, and by what: on one line if that fits the screen."""
    by = f"saved {show_writer(source.saved.writer)}"
    path, width = click.style(printable(source.location), bold=True), screen_width()
    if width is not None and len(source.location) + 2 + len(by) > width:
        return [path, printable(by)]
    return [f"{path}  {printable(by)}"]


def parameters_lines(source: Source, groups_by_number: Mapping[int, str]) -> list[str]:
    """The number of parameters, and the bytes in all and by group. Nothing without arrays."""
    groups = totals_by_group(source, groups_by_number)
    if not groups:
        return []
    total = human_size(sum(group.nbytes for group in groups.values()))
    found = groups.pop(PARAMETERS, Total())
    others = ", ".join(f"{name} {human_size(group.nbytes)}" for name, group in groups.items())
    dtypes = f" of {' and '.join(sorted(found.dtypes))}" if len(found.dtypes) in (1, 2) else ""
    line = f"{count_of(found.elements, 'parameter')}{dtypes}, {total}"
    return wrap(f"{line} ({others})" if others else line)


def name_in(source: Source, path: str) -> str:
    """The name of a leaf as people give it: of a tensor in a file, its name there."""
    return unescape(path) if isinstance(source, SafetensorsSource) else path


def dtypes_in(rows: Iterable[LeafRow], most: int = 3) -> str:
    """The dtypes of the arrays in some rows, those with the most bytes first."""
    sizes: Counter[str] = Counter()
    for row in rows:
        if row.number is not None and row.same_as is None:
            sizes[row.cells[1]] += row.nbytes
    kinds = [kind for kind, _ in sizes.most_common()]
    return ", ".join(kinds[:most]) + (", …" if len(kinds) > most else "")


def totals(source: Source, rows: Sequence[LeafRow]) -> Mapping[str, int | None]:
    """Counts of the arrays and values in the rows, and of the files that hold them.

    The counts of processes and devices are None if the files do not record them.
    """
    saved, files = source.saved, source.files()
    numbers = {row.number for row in rows if row.number is not None}
    in_files = saved.in_files
    is_known = "library" not in saved.writer or any(leaf.mesh >= 0 for leaf in in_files.leaves)
    return {
        "arrays": len(numbers),
        "values": sum(
            row.number is None and not isinstance(row.value, Kept | UnreadableLeaf) for row in rows
        ),
        "bytes": sum(saved.leaves[number].nbytes for number in numbers),
        "files": len(files),
        "file_bytes": sum(file.nbytes for file in files),
        "parity_bytes": sum(file.nbytes for file in files if file.device is None),
        "processes": in_files.process_count if is_known else None,
        "devices": len(in_files.process_of) if is_known else None,
    }


def totals_lines(source: Source, rows: Sequence[LeafRow]) -> list[str]:
    """The totals for people: sizes, meshes, hosts, times, the model, the user's metadata."""
    found = totals(source, rows)
    arrays, nbytes = found["arrays"] or 0, found["bytes"] or 0
    inside = [count_of(arrays, "array")]
    again = sum(row.same_as is not None for row in rows)
    if again:
        inside[0] += f" at {count_of(arrays + again, 'path')}"
    if found["values"]:
        inside.append(count_of(found["values"], "value"))
    line = f"{', '.join(inside)}, {_sizes(source, nbytes)}"
    if found["processes"] is not None and found["devices"] is not None:
        processes = count_of(found["processes"], "process")
        line += f", written by {processes} with {count_of(found['devices'], 'device')}"
    lines = [line]
    meshes = [printable(str(mesh)) for mesh in source.saved.meshes if mesh.axis_names]
    lines += [f"mesh: {mesh}" for mesh in dict.fromkeys(meshes)]
    hosts = list(dict.fromkeys(hosts_of(source.saved).values()))
    if hosts:
        shown = ", ".join(printable(host) for host in hosts[:_MOST_HOSTS])
        rest = len(hosts) - _MOST_HOSTS
        more = f" and {rest:,} more; --files lists all" if rest > 0 else ""
        lines.append(f"{'host' if len(hosts) == 1 else 'hosts'}: {shown}{more}")
    lines += _took(source.saved.writer)
    lines += _model_line(source.saved.user.get(CONFIG))
    user = {name: value for name, value in source.saved.user.items() if name != CONFIG}
    if user:
        lines.append(f"metadata: {json_text(user)}")
    width = screen_width()
    return lines if width is None else [shorten(line, width) for line in lines]


def _sizes(source: Source, nbytes: int) -> str:
    """The size of the arrays in the rows, and the size of the files where it differs."""
    files = source.files()
    # A view may leave out arrays of the files. The compressed size is that of all.
    held = sum(leaf.nbytes for leaf in source.saved.in_files.leaves)
    stored = sum(file.nbytes for file in files if file.device is not None)
    size = human_size(nbytes) + (f" of {human_size(held)}" if nbytes != held else "")
    if stored < held:
        size += f" compressed to {human_size(stored)}"
    parity = [file.nbytes for file in files if file.device is None]
    size += f" in {count_of(len(files), 'file')}"
    if parity:
        size += f", {len(parity):,} of them parity of {human_size(sum(parity))}"
    return size


def _model_line(config: Any) -> list[str]:
    """The type of model in config.json. With --json you get all of the file."""
    if not isinstance(config, dict):
        return []
    about: dict[Any, Any] = config
    kind = text_in(about, "model_type") or "of an unknown type"
    listed = about.get("architectures")
    names: list[Any] = listed if isinstance(listed, list) else []
    known = ", ".join(shorten(n, _VALUE_WIDTH) for n in names[:3] if isinstance(n, str))
    return [f"model: {printable(kind)}{f' ({printable(known)})' if known else ''}"]


def files_table(source: Source) -> list[str]:
    """Every file with the device, process and host that wrote it."""
    table = Table(
        ("file", "device", "process", "host", "size"), right=("device", "process", "size")
    )
    hosts, files = hosts_of(source.saved), source.files()
    for file in files:
        device = "parity" if file.device is None else f"{file.device}"
        host = hosts.get(file.process, "unknown")
        name = file.name.rpartition("/")[2]
        table.add(name, device, f"{file.process}", host, human_size(file.nbytes))
    return [*table.lines(), *directory_lines([file.name for file in files])]


def directory_lines(names: Sequence[str]) -> list[str]:
    """A line that names the directory of files below the checkpoint, if they are in one."""
    directories = {name.rpartition("/")[0] for name in names} - {""}
    return [f"files are in {printable(name)}/" for name in directories]


def _took(writer: Mapping[str, Any]) -> list[str]:
    """The duration of the save and of its phases, if `_METADATA` has it."""
    found = read_timeline(writer)
    if found is None:
        return []
    total, phases = found.total_s, found.phases.items()
    shown = ", ".join(f"{printable(name)} {human_seconds(seconds)}" for name, seconds in phases)
    rate = ""
    if found.bytes is not None and total > 0:
        rate = f", {human_size(int(found.bytes / total))}/s"
    return [f"took {human_seconds(total)}{rate} ({shown})"]


# For scripts


def describe(
    source: Source,
    rows: Sequence[LeafRow],
    chosen: Sequence[LeafRow],
    found: Mapping[int, Statistics],
) -> dict[str, object]:
    """A checkpoint as JSON, with the statistics of arrays by number."""
    saved = source.saved
    hosts = hosts_of(saved)
    leaves = [describe_row(saved, row) for row in chosen]
    for leaf, row in zip(leaves, chosen, strict=True):
        if row.number is not None and row.number in found:
            leaf["statistics"] = describe_statistics(found[row.number])
    return {
        "path": source.location,
        "id": saved.id,
        "writer": saved.writer,
        "metadata": saved.user,
        "meshes": [
            dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)) for mesh in saved.meshes
        ],
        "leaves": leaves,
        "files": [
            {
                "file": file.name,
                "device": file.device,
                "process": file.process,
                "host": hosts.get(file.process),
                "bytes": file.nbytes,
            }
            for file in source.files()
        ],
        "totals": totals(source, rows),
    }


def describe_row(saved: Saved, row: LeafRow) -> dict[str, object]:
    """A leaf as JSON."""
    if isinstance(row.value, Kept):
        return {"path": row.path, "kind": "kept", "name": row.value.name}
    if isinstance(row.value, UnreadableLeaf):
        return {"path": row.path, "kind": "lost", "why": row.value.why}
    if row.number is None:
        value = row.value
        plain = value is None or isinstance(value, bool | int | float | str)
        shown = json_number(value) if plain else show_value(value)
        return {"path": row.path, "kind": "value", "type": type(value).__name__, "value": shown}
    leaf = saved.leaves[row.number]
    shared = {} if row.same_as is None else {"same_as": row.same_as}
    return {
        "path": row.path,
        **shared,
        "kind": leaf.kind,
        "dtype": leaf.dtype,
        "shape": leaf.shape,
        "spec": leaf.partition if leaf.mesh >= 0 else None,
        "mesh": leaf.mesh if leaf.mesh >= 0 else None,
        "prng": leaf.prng,
        "per_process": leaf.per_process,
        "memory": leaf.memory,
        "bytes": row.nbytes,
    }


def describe_statistics(found: Statistics) -> dict[str, object]:
    """Statistics as JSON."""
    return {name: json_number(value) for name, value in asdict(found).items()}
