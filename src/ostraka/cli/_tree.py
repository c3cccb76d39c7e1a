"""The leaves of a checkpoint as rows, and totals over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from ostraka._nodes import ArrayNumber, Kept, Lost, leaves_of
from ostraka._source import CONFIG, Saved, Source, StoredFile
from ostraka._spec import LeafSpec, show_partition
from ostraka.cli._text import (
    Table,
    count_of,
    human_bytes,
    human_seconds,
    json_number,
    json_text,
    printable,
    shorten,
    show_shape,
    shown_value,
)

if TYPE_CHECKING:
    from ostraka.cli._statistics import Statistics

_VALUE_WIDTH = 60
_MOST_HOSTS = 4
_MOST_SECONDS = 1e9
"""No save takes longer."""
_KEPT = "not saved"
"""For functions and the like, which only a template can provide."""
UNKNOWN_HOST = "unknown"


@dataclass(frozen=True, slots=True)
class Row:
    """A leaf, or all leaves below a name."""

    path: str
    cells: tuple[str, ...]
    """What a table shows: all of its columns, or path, type and value."""
    nbytes: int = 0
    leaves: int = 1
    number: int | None = None
    """The number of an array leaf."""
    same_as: str | None = None
    """The path where the array is shown and counted, if it has several and this is another."""
    value: Any = None


def rows_of(source: Source) -> list[Row]:
    saved = source.saved
    rows: list[Row] = []
    # A model has few kinds of leaves and many of each.
    kinds: dict[tuple[object, ...], tuple[tuple[str, ...], int]] = {}
    for leaf in leaves_of(source.tree):
        if isinstance(leaf.value, ArrayNumber):
            number = leaf.value.number
            spec = saved.leaves[number]
            placed = (spec.mesh, spec.partition, spec.memory, spec.per_process)
            kind = (spec.dtype, spec.shape, spec.prng, *placed)
            known = kinds.get(kind)
            if known is None:
                known = kinds[kind] = _cells(saved, spec), spec.nbytes
            cells, nbytes = known
            if leaf.path != spec.path:
                shown = (printable(leaf.path), f"= {printable(spec.path)}")
                rows.append(Row(leaf.path, shown, number=number, same_as=spec.path))
                continue
            rows.append(Row(leaf.path, (printable(leaf.path), *cells), nbytes, number=number))
        elif isinstance(leaf.value, Kept):
            cells = (printable(leaf.path), _KEPT, printable(leaf.value.name))
            rows.append(Row(leaf.path, cells, value=leaf.value))
        elif isinstance(leaf.value, Lost):
            cells = (printable(leaf.path), "lost", printable(leaf.value.why))
            rows.append(Row(leaf.path, cells, value=leaf.value))
        else:
            shown = shorten(printable(shown_value(leaf.value)), _VALUE_WIDTH)
            cells = (printable(leaf.path), type(leaf.value).__name__, shown)
            rows.append(Row(leaf.path, cells, value=leaf.value))
    return rows


def _cells(saved: Saved, leaf: LeafSpec) -> tuple[str, ...]:
    """What a table shows of an array beside its path."""
    return (
        printable(dtype_of(leaf)),
        show_shape(shape_of(leaf)),
        printable(placement(saved, leaf)),
        human_bytes(leaf.nbytes),
    )


def dtype_of(leaf: LeafSpec) -> str:
    return leaf.dtype if leaf.prng is None else f"key<{leaf.prng}>"


def shape_of(leaf: LeafSpec) -> tuple[int, ...]:
    """The shape that its user knows: of keys, not of their data; of one process."""
    return leaf.logical_shape


def placement(saved: Saved, leaf: LeafSpec) -> str:
    if leaf.per_process:
        return f"one for each of {leaf.shape[0]} processes"
    if leaf.mesh < 0:
        return "host memory"
    memory = "" if leaf.memory is None else f" in {leaf.memory}"
    if not saved.meshes[leaf.mesh].axis_names:
        return f"one device{memory}"
    return f"{show_partition(leaf.partition)}{memory}"


def summed_up(rows: Sequence[Row], depth: int) -> list[Row]:
    """The rows, with all that are deeper than `depth` names summed up in one."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        names = row.path.split("/")
        above = "/".join(names[:depth])
        groups.setdefault(f"{above}/" if len(names) > depth else row.path, []).append(row)
    return [
        _sum_up(path, group) if path.endswith("/") else group[0] for path, group in groups.items()
    ]


def _sum_up(path: str, rows: Sequence[Row]) -> Row:
    arrays = (row for row in rows if row.number is not None and row.same_as is None)
    kinds = dict.fromkeys(row.cells[1] for row in arrays)
    shown = ", ".join(list(kinds)[:3]) + (", …" if len(kinds) > 3 else "")
    nbytes = sum(row.nbytes for row in rows)
    leaves = count_of(len(rows), "leaf")
    cells = (printable(path), shown, leaves, "", human_bytes(nbytes))
    return Row(path, cells, nbytes, leaves=len(rows))


# All of it


def title(source: Source) -> str:
    writer = source.saved.writer
    when = _text_in(writer, "time") or "at an unknown time"
    if when.endswith("+00:00"):
        when = f"{when[:19].replace('T', ' ')} UTC"
    version = _text_in(writer, "ostraka") or "(unknown version)"
    by = f"saved {when} by {_text_in(writer, 'library') or f'ostraka {version}'}"
    if jax := _text_in(writer, "jax"):
        by += f" with jax {jax}"
    return f"{click.style(printable(source.location), bold=True)}  {printable(by)}"


def _text_in(writer: Mapping[str, Any], name: str) -> str:
    """What wrote a checkpoint says of itself, if it is text; not all of a long one."""
    found = writer.get(name)
    return shorten(found, _VALUE_WIDTH) if isinstance(found, str) else ""


def totals(source: Source, rows: Sequence[Row]) -> Mapping[str, int]:
    saved, files = source.saved, source.files()
    return {
        "arrays": len(saved.leaves),
        "values": sum(
            row.number is None and not isinstance(row.value, Kept | Lost) for row in rows
        ),
        "bytes": sum(leaf.nbytes for leaf in saved.leaves),
        "files": len(files),
        "file_bytes": sum(file.nbytes for file in files),
        "processes": saved.process_count,
        "devices": len(saved.process_of),
    }


def totals_lines(source: Source, rows: Sequence[Row]) -> list[str]:
    found = totals(source, rows)
    inside = [count_of(found["arrays"], "array")]
    again = sum(row.same_as is not None for row in rows)
    if again:
        inside[0] += f" at {count_of(found['arrays'] + again, 'path')}"
    if found["values"]:
        inside.append(count_of(found["values"], "value"))
    size = human_bytes(found["bytes"])
    if found["file_bytes"] < found["bytes"]:
        size += f" compressed to {human_bytes(found['file_bytes'])}"
    files = count_of(found["files"], "file")
    processes = count_of(found["processes"], "process")
    devices = count_of(found["devices"], "device")
    lines = [f"{', '.join(inside)}, {size} in {files}, written by {processes} with {devices}"]
    meshes = [printable(str(mesh)) for mesh in source.saved.meshes if mesh.axis_names]
    lines += [f"mesh: {mesh}" for mesh in dict.fromkeys(meshes)]
    lines += _hosts_line(source.saved)
    lines += _took(source.saved.writer.get("timeline"))
    lines += _model_line(source.saved.user.get(CONFIG))
    user = {name: value for name, value in source.saved.user.items() if name != CONFIG}
    if user:
        lines.append(f"metadata: {json_text(user)}")
    return lines


def _model_line(config: Any) -> list[str]:
    """What a model's config.json says that it is; --json has all of it."""
    if not isinstance(config, dict):
        return []
    about: dict[Any, Any] = config
    kind = _text_in(about, "model_type") or "of an unknown type"
    listed = about.get("architectures")
    names: list[Any] = listed if isinstance(listed, list) else []
    known = ", ".join(shorten(n, _VALUE_WIDTH) for n in names[:3] if isinstance(n, str))
    return [f"model: {printable(kind)}{f' ({printable(known)})' if known else ''}"]


def _hosts_line(saved: Saved) -> list[str]:
    hosts = list(dict.fromkeys(hosts_of(saved)))
    if not hosts:
        return []
    shown = ", ".join(printable(host) for host in hosts[:_MOST_HOSTS])
    rest = len(hosts) - _MOST_HOSTS
    more = f" and {rest:,} more; --files lists all" if rest > 0 else ""
    return [f"{'host' if len(hosts) == 1 else 'hosts'}: {shown}{more}"]


def hosts_of(saved: Saved) -> list[str]:
    """The host of each process that saved; none if `_METADATA` has no valid list of them."""
    found: Any = saved.writer.get("hosts")
    if not isinstance(found, list):
        return []
    hosts: list[Any] = found
    return hosts if all(isinstance(host, str) for host in hosts) else []


def host_of(hosts: Sequence[str], process: int) -> str | None:
    return hosts[process] if process < len(hosts) else None


def files_table(source: Source) -> list[str]:
    """Every file with who wrote it."""
    table = Table(
        ("file", "device", "process", "host", "size"), right=("device", "process", "size")
    )
    hosts = hosts_of(source.saved)
    files = source.files()
    for file in files:
        host = printable(host_of(hosts, file.process) or UNKNOWN_HOST)
        name = printable(file.name.rpartition("/")[2])
        device = "parity" if file.device is None else f"{file.device}"
        table.add(name, device, f"{file.process}", host, human_bytes(file.nbytes))
    return [*table.lines(), *where_files_are([file.name for file in files])]


def where_files_are(names: Sequence[str]) -> list[str]:
    """A line that names the directory of files, if they lie in one below the checkpoint's own."""
    directories = {name.rpartition("/")[0] for name in names} - {""}
    return [f"files are in {printable(name)}/" for name in directories]


def _took(timeline: Any) -> list[str]:
    """How long the save took, in all and in its phases; nothing if it is not recorded."""
    phases = dict(_phases(timeline))
    if not phases:
        return []
    total = sum(phases.values())
    shown = ", ".join(f"{printable(name)} {human_seconds(s)}" for name, s in phases.items())
    nbytes = timeline.get("bytes")
    rate = ""
    if type(nbytes) is int and 0 <= nbytes < 1 << 63 and total > 0:
        rate = f", {human_bytes(int(nbytes / total))}/s"
    return [f"took {human_seconds(total)}{rate} ({shown})"]


def _phases(timeline: Any) -> Iterator[tuple[str, float]]:
    if not isinstance(timeline, dict):
        return
    given: dict[Any, Any] = timeline
    for name, seconds in given.items():
        is_time = type(seconds) in (int, float) and 0 <= seconds <= _MOST_SECONDS
        if isinstance(name, str) and name.endswith("_s") and is_time:
            yield name.removesuffix("_s"), float(seconds)


# For scripts


def describe(
    source: Source, rows: Sequence[Row], chosen: Sequence[Row], found: Mapping[int, Statistics]
) -> dict[str, object]:
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
        "files": [_describe_file(hosts, file) for file in source.files()],
        "totals": totals(source, rows),
    }


def _describe_file(hosts: Sequence[str], file: StoredFile) -> dict[str, object]:
    return {
        "file": file.name,
        "device": file.device,
        "process": file.process,
        "host": host_of(hosts, file.process),
        "bytes": file.nbytes,
    }


def describe_row(saved: Saved, row: Row) -> dict[str, object]:
    if isinstance(row.value, Kept):
        return {"path": row.path, "kind": "kept", "name": row.value.name}
    if isinstance(row.value, Lost):
        return {"path": row.path, "kind": "lost", "why": row.value.why}
    if row.number is None:
        value = row.value
        plain = value is None or isinstance(value, bool | int | float | str)
        shown = json_number(value) if plain else shown_value(value)
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
    return {name: json_number(value) for name, value in asdict(found).items()}
