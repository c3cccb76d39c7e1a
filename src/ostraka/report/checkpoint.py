"""A checkpoint as a document: its tree, shards, files, integrity and values. No JAX."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Literal

from ostraka.common.dtypes import DTYPES
from ostraka.common.record import read_timeline
from ostraka.common.text import json_number
from ostraka.errors import Damaged, SourceChanged, count_of, nearest_path
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.formats.safetensors.source import SafetensorsSource
from ostraka.formats.source import Saved as SavedTree
from ostraka.formats.source import Source, StoredBox
from ostraka.layout import box as _box
from ostraka.layout.file_names import PIN_NAME, step_of
from ostraka.layout.runs import encode_runs
from ostraka.layout.spec import HOST_LOCAL, LeafSpec
from ostraka.reading.groups import PARAMETERS, groups_of, totals_by_group
from ostraka.reading.locate import open_at, read_whole
from ostraka.reading.metrics import NO_METRICS, metrics_in, read_added
from ostraka.reading.show import hosts_of, show_dtype, show_leaf_value, show_sharding, show_writer
from ostraka.reading.view import renamed
from ostraka.report.files import describe_files
from ostraka.report.measure import Progress, unseen
from ostraka.report.schema import (
    SCHEMA,
    CheckpointDocument,
    LeafBox,
    LeafDetails,
    LeafTable,
    LeafValues,
    Placement,
    Places,
    Saved,
)
from ostraka.report.texts import encode_texts
from ostraka.storage import PathLike
from ostraka.tree.nodes import ArrayNumber, Leaf, leaves_of

READ_BYTES = 1 << 30
"""Arrays of up to this size together are read, unless the caller decides."""
_DETAIL_BYTES = 3 << 20
"""The most JSON of all details. It is compressed to a third or less in a page."""
_MOST_DETAILS = 2000
_MOST_BOXES = 64
"""The most slices listed for an array."""
_MOST_ENTRIES = 200_000
"""Offsets in files are not worked out for more slices: they depend on all slices before them."""
_MOST_PLACES = 4096


def describe_checkpoint(
    path: PathLike,
    *,
    names: Any = None,
    values: bool | None = None,
    verified: bool = False,
    progress: Progress = unseen,
) -> CheckpointDocument:
    """The document of a checkpoint. `values`: read the arrays; None reads up to 1 GiB."""

    def describe(sources: Sequence[Source]) -> CheckpointDocument:
        source = sources[0]
        found = _describe(source, str(path), values, verified, progress)
        is_damaged = found["integrity"]["problems"] or any(
            one["problem"] or (one["values"] is not None and one["values"]["problem"])
            for one in found["details"].values()
        )
        if is_damaged and not source.is_current():
            raise SourceChanged(f"{source.location} was replaced while it was read")
        return found

    return read_whole([path], describe, partial(_open, names=names))


def describe_leaf_at(path: PathLike, leaf_path: str, *, names: Any = None) -> LeafDetails:
    """One array of the checkpoint at a path in full, with its values, which are read for it.

    Raises KeyError if there is no array with this path.
    """

    def describe(sources: Sequence[Source]) -> LeafDetails:
        source = sources[0]
        found = {leaf.path: leaf.value for leaf in leaves_of(source.tree)}
        value = found.get(leaf_path)
        if not isinstance(value, ArrayNumber):
            hint = nearest_path(leaf_path, list(found))
            raise KeyError(f"{source.location} has no array {leaf_path!r}{hint}")
        return {**describe_leaf(source, value.number, values=True), "path": leaf_path}

    return read_whole([path], describe, partial(_open, names=names))


def describe_leaf(source: Source, number: int, *, values: bool) -> LeafDetails:
    """One array in full, by its number. With `values`, it is read."""
    return _describe_leaves(source, [number], values=values, progress=unseen)[number]


def _open(path: PathLike, names: Any) -> Source:
    """Open a checkpoint whose damage goes into the document, not into warnings."""
    source = open_at(path)
    if isinstance(source, OstrakaSource) and source.shards.parities is not None:
        source.shards.parities.has_warned = True
    return source if names is None else renamed(source, names)


def _describe(
    source: Source, path: str, values: bool | None, verified: bool, progress: Progress
) -> CheckpointDocument:
    saved, groups = source.saved, groups_of(source)
    rows = list(leaves_of(source.tree))
    leaves = _leaf_table(source, rows, groups)
    files, integrity = describe_files(source, path, verified, progress)
    numbers = _first_rows(saved, rows)
    total_bytes = sum(saved.leaves[number].nbytes for number in numbers)
    is_read = total_bytes <= READ_BYTES if values is None else values
    details = _details(source, numbers, values=is_read, progress=progress)
    by_group = totals_by_group(source, groups)
    in_files = saved.in_files
    is_known = "library" not in saved.writer or any(leaf.mesh >= 0 for leaf in in_files.leaves)
    hosts, stored = hosts_of(saved), Counter[str]()
    for file in source.files():
        stored[hosts.get(file.process, "")] += file.nbytes
    by_dtype = Counter[str]()
    for number in numbers:
        by_dtype[show_dtype(saved.leaves[number])] += saved.leaves[number].nbytes
    notes: list[str] = []
    if is_read and len(details) < len(numbers):
        notes.append(
            f"This page has the values of the {count_of(len(details), 'largest array')} of "
            f"{len(numbers):,}. ostraka show --stats reads the others, and so does ostraka board."
        )
    return CheckpointDocument(
        schema=SCHEMA,
        kind="checkpoint",
        path=source.location,
        format=_format_of(source),
        separator="." if isinstance(source, SafetensorsSource) else "/",
        id=saved.id,
        step=step_of(source.location.rstrip("/").rpartition("/")[2]),
        metrics={name: json_number(value) for name, value in _metrics_of(source).items()},
        pinned=source.store.look(PIN_NAME) is not None,
        saved=_describe_save(saved),
        totals={
            "arrays": len(numbers),
            "leaves": len(rows),
            "elements": sum(prod(saved.leaves[number].shape) for number in numbers),
            "parameters": by_group[PARAMETERS].elements if PARAMETERS in by_group else 0,
            "bytes": total_bytes,
            "stored_bytes": sum(file.nbytes for file in source.files()),
            "files": len(source.files()),
        },
        groups={name: total.nbytes for name, total in by_group.items()},
        dtypes=dict(by_dtype.most_common()),
        hosts={} if not hosts else dict(stored),
        places=_places(source, numbers, hosts),
        meshes=[
            {
                "axes": dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
                "devices": encode_runs(mesh.devices),
            }
            for mesh in saved.meshes
        ],
        placements=leaves[1],
        process_of=encode_runs(in_files.process_of) if is_known else [],
        processes=in_files.process_count if is_known else None,
        devices=len(in_files.process_of) if is_known else None,
        leaves=leaves[0],
        files=files,
        integrity=integrity,
        values={
            "read": is_read,
            "arrays": sum(one["values"] is not None for one in details.values()),
            "command": None if is_read else f"ostraka report {shlex.quote(path)} --values",
        },
        details={str(numbers[number]): found for number, found in details.items()},
        notes=notes,
    )


def _format_of(source: Source) -> Literal["ostraka", "orbax", "safetensors"]:
    writer = source.saved.writer
    if "library" not in writer:
        return "ostraka"
    return "orbax" if str(writer["library"]).startswith("Orbax") else "safetensors"


def _metrics_of(source: Source) -> Mapping[str, float]:
    try:
        added = read_added(source.store, source.saved.id)
    except (Damaged, OSError):
        added = NO_METRICS
    return {**metrics_in(source.saved.user), **added}


def _describe_save(saved: SavedTree) -> Saved:
    when, took, hosts = saved.writer.get("time"), read_timeline(saved.writer), hosts_of(saved)
    try:
        at = datetime.fromisoformat(when).timestamp() if isinstance(when, str) else None
    except (ValueError, OverflowError, OSError):
        at = None
    processes = () if took is None else took.processes
    return Saved(
        at=at,
        text=show_writer(saved.writer),
        hosts=list(hosts.values()),
        phases={} if took is None else dict(took.phases),
        blocked_s=None if took is None else took.blocked_s,
        background_s=None if took is None else took.background_s,
        process_bytes=[nbytes for nbytes, _ in processes],
        process_s=[seconds for _, seconds in processes],
    )


# The tree


def _first_rows(saved: SavedTree, rows: Sequence[Leaf]) -> dict[int, int]:
    """By the number of each array, the row of its first path."""
    found: dict[int, int] = {}
    for row, leaf in enumerate(rows):
        if isinstance(leaf.value, ArrayNumber):
            found.setdefault(leaf.value.number, row)
    return found


def _leaf_table(
    source: Source, rows: Sequence[Leaf], groups: Mapping[int, str]
) -> tuple[LeafTable, list[Placement]]:
    """The table of the leaves, and their distinct placements."""
    saved, first = source.saved, _first_rows(source.saved, rows)
    placements: dict[Any, int] = {}
    # A model has few kinds of leaves and many of each.
    shown: dict[Any, tuple[str, str]] = {}
    dtypes: list[str] = []
    shapes: list[list[int] | None] = []
    sizes: list[int] = []
    shardings: list[str | None] = []
    placed: list[int] = []
    same_as: dict[str, int] = {}
    values: dict[str, str] = {}
    for row, leaf in enumerate(rows):
        if not isinstance(leaf.value, ArrayNumber):
            kind, values[str(row)] = show_leaf_value(leaf.value)
            dtypes.append(kind)
            shapes.append(None)
            sizes.append(0)
            shardings.append(None)
            placed.append(-1)
            continue
        spec = saved.leaves[leaf.value.number]
        key = (spec.dtype, spec.prng, *_placed_as(spec), spec.shape[0] if spec.per_process else 0)
        if key not in shown:
            shown[key] = show_dtype(spec), show_sharding(spec, saved.meshes)
        is_again = first[leaf.value.number] != row
        if is_again:
            same_as[str(row)] = first[leaf.value.number]
        dtypes.append(shown[key][0])
        shapes.append(list(spec.logical_shape))
        sizes.append(0 if is_again else spec.nbytes)
        shardings.append(shown[key][1])
        at = placements.setdefault((spec.mesh, spec.partition), len(placements))
        placed.append(-1 if spec.mesh == HOST_LOCAL else at)
    table = LeafTable(
        path=[leaf.path for leaf in rows],
        dtype=encode_texts(dtypes),
        shape=shapes,
        bytes=sizes,
        group=encode_texts(
            groups.get(leaf.value.number) if isinstance(leaf.value, ArrayNumber) else None
            for leaf in rows
        ),
        sharding=encode_texts(shardings),
        placement=placed,
        same_as=same_as,
        values=values,
    )
    return table, [_placement(mesh, partition) for mesh, partition in placements]


def _placed_as(spec: LeafSpec) -> tuple[Any, ...]:
    return spec.mesh, spec.partition, spec.memory, spec.per_process


def _placement(mesh: int, partition: Sequence[Sequence[str]]) -> Placement:
    return {"mesh": mesh, "spec": [list(axes) for axes in partition]}


# Where the bytes are


def _places(source: Source, numbers: Mapping[int, int], hosts: Mapping[int, str]) -> Places:
    """The bytes by host, process or file, and by the first names of the tree."""
    separator = "." if isinstance(source, SafetensorsSource) else "/"
    paths = {number: source.saved.leaves[number].path.split(separator) for number in numbers}
    tops = {path[0] for path in paths.values()}
    depth = 1 if len(tops) > 1 else 2
    by_name = {number: separator.join(path[:depth]) for number, path in paths.items()}
    found: dict[str, Counter[str]] = {}
    unit: Literal["host", "process", "file"] = "file"
    if isinstance(source, OstrakaSource):
        unit = "host" if hosts else "process"
        metadata, layouts = source.metadata, Counter[tuple[int, str]]()
        for number in numbers:
            layout, nbytes = metadata.leaves[number].layout, source.saved.leaves[number].nbytes
            layouts[layout, by_name[number]] += nbytes
        shares: dict[int, Counter[str]] = {}
        for (layout, name), nbytes in layouts.items():
            owners = metadata.layouts[layout].owners
            if layout not in shares:
                writers = Counter(metadata.process_of[owner] for owner in owners)
                shares[layout] = Counter()
                for process, cells in writers.items():
                    shares[layout][hosts.get(process, f"process {process}")] += cells
            for place, cells in shares[layout].items():
                found.setdefault(place, Counter())[name] += nbytes * cells // len(owners)
    else:
        for number in list(numbers)[:_MOST_DETAILS]:
            for stored in _boxes_of(source, number)[:_MOST_BOXES]:
                found.setdefault(stored.file, Counter())[by_name[number]] += stored.nbytes
    largest = sorted(found, key=lambda place: -found[place].total())[:_MOST_PLACES]
    return {"unit": unit, "bytes": {place: dict(found[place]) for place in largest}}


def _boxes_of(source: Source, number: int) -> Sequence[StoredBox]:
    try:
        return source.boxes_of(number)
    except (Damaged, OSError):
        return ()


# Single arrays


def _details(
    source: Source, numbers: Collection[int], *, values: bool, progress: Progress
) -> dict[int, LeafDetails]:
    """The details of the largest arrays, as many as fit."""
    leaves = source.saved.leaves
    largest = sorted(numbers, key=lambda number: (-leaves[number].nbytes, number))[:_MOST_DETAILS]
    described = _describe_leaves(source, largest, values=values, progress=progress)
    found: dict[int, LeafDetails] = {}
    left = _DETAIL_BYTES
    for number in largest:
        left -= len(json.dumps(described[number]))
        if left < 0:
            break
        found[number] = described[number]
    return found


def _describe_leaves(
    source: Source, numbers: Sequence[int], *, values: bool, progress: Progress
) -> dict[int, LeafDetails]:
    rows = {file.name: row for row, file in enumerate(source.files())}
    read: dict[int, LeafValues] = {}
    if values:
        from ostraka.report.values import values_of  # with numpy

        read = values_of(source, numbers, progress)
    located, problem = _locate(source, numbers)

    def describe(number: int) -> LeafDetails:
        leaf, grid = source.saved.leaves[number], source.grid_of(number)
        boxes = located.get(number)
        shown = _grid_boxes(source, number, rows) if boxes is None else _stored(boxes, rows)
        return LeafDetails(
            path=leaf.path,
            placement=_placement(leaf.mesh, leaf.partition),
            grid=list(grid),
            boxes=shown,
            boxes_in_all=prod(grid),
            problem=problem,
            values=read.get(number),
        )

    return {number: describe(number) for number in numbers}


def _locate(
    source: Source, numbers: Sequence[int]
) -> tuple[Mapping[int, Sequence[StoredBox]], str | None]:
    """The first stored slices of some arrays, and the reason why some are unknown."""
    try:
        if not isinstance(source, OstrakaSource):
            return {number: source.boxes_of(number)[:_MOST_BOXES] for number in numbers}, None
        metadata = source.metadata
        layouts = {metadata.leaves[number].layout for number in numbers}
        first = (metadata.layouts[layout].owners[:_MOST_BOXES] for layout in layouts)
        devices = set(chain.from_iterable(first))
        if len(devices) * len(metadata.leaves) > _MOST_ENTRIES:
            return {}, None
        boxes = source.boxes_on({*numbers}, devices)
        return {number: found[:_MOST_BOXES] for number, found in boxes.items()}, None
    except (Damaged, OSError) as error:
        return {}, str(error)


def _stored(boxes: Sequence[StoredBox], rows: Mapping[str, int]) -> list[LeafBox]:
    return [
        {
            "box": [list(span) for span in one.box],
            "file": rows.get(one.file, -1),
            "name": None if one.file in rows else one.file,
            "offset": one.offset if one.file in rows else None,
            "bytes": one.nbytes,
            "stored_bytes": one.stored_bytes,
        }
        for one in boxes
    ]


def _grid_boxes(source: Source, number: int, rows: Mapping[str, int]) -> list[LeafBox]:
    """The first slices of an array by its grid, without their offsets."""
    leaf, grid = source.saved.leaves[number], source.grid_of(number)
    found: list[LeafBox] = []
    for at, file in enumerate(list(source.files_of(number))[:_MOST_BOXES]):
        box = _box.cell(leaf.shape, grid, at)
        nbytes = DTYPES[leaf.dtype].nbytes(_box.count(box))
        found.append(
            {
                "box": [list(span) for span in box],
                "file": _row_of(source, file, rows),
                "name": None,
                "offset": None,
                "bytes": nbytes,
                "stored_bytes": nbytes,
            }
        )
    return found


def _row_of(source: Source, file: Any, rows: Mapping[str, int]) -> int:
    from ostraka.layout.shard_file import shard_name

    if not isinstance(source, OstrakaSource):
        return rows.get(str(file), -1)
    return rows.get(source.shards.path_of(shard_name(*file)), -1)
