"""A `_METADATA` of which no copy is left, as far as the headers of the shards tell. No JAX.

They tell paths, dtypes, and which box lies where; so shapes and layouts follow. They don't tell
values that are no arrays, containers (all become dicts), meshes, which arrays were PRNG keys, and
the user's metadata. Every box of every leaf must be there: what is not is named.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

from ostraka import _box, _format
from ostraka._format import METADATA_NAME, FileEntry
from ostraka._metadata import IndexEntry, Metadata, check_metadata, shard_contents
from ostraka._spec import DTYPES, HOST_LOCAL, Layout, LeafSpec, StoredLeaf
from ostraka._version import __version__
from ostraka.errors import Damaged, Problem, name_few
from ostraka.integrity._read_headers import FoundShard, Unreadable, read_header, shard_numbers
from ostraka.integrity._reindex import find_candidates
from ostraka.integrity._repair_report import Tally
from ostraka.storage import Store

_INDEX = re.compile(r"process_(\d{5,7})\.json")


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A `_METADATA`, and what else had to be made for it."""

    metadata: Metadata
    indexes: Mapping[int, bytes]
    """Indexes that were lost: they have the digests of the files as they are now."""
    notes: tuple[str, ...]


def rebuild_metadata(store: Store, tally: Tally) -> Rebuilt:
    """Make a `_METADATA` from headers. Raises Damaged, naming files and leaves that it can't."""
    directories = [name for name in store.list() if _format.is_shards_directory(name)]
    if len(directories) != 1:
        found = f"it is lost, and the shards of {len(directories)} saves are there, not of one"
        raise Damaged(store.location, [Problem(METADATA_NAME, found)])
    save_id = directories[0].partition("-")[2]
    names = [file.name.rpartition("/")[2] for file in store.files(f"{directories[0]}/")]
    problems: list[Problem] = []
    shards: list[FoundShard] = []
    for numbers in filter(None, map(shard_numbers, names)):
        try:
            shards.append(read_header(store, save_id, *numbers))
        except Unreadable as error:
            name = f"{directories[0]}/{_format.shard_name(*numbers)}"
            problems.append(Problem(name, str(error)))
    indexes = dict(_read_indexes(store, save_id, names))
    there = {shard.name for shard in shards}
    problems += [
        Problem(f"{directories[0]}/{name}", "it is missing")
        for name in sorted({name for files, _ in indexes.values() for name in files} - there)
    ]
    leaves, layouts, notes = _leaves(shards, problems)
    if problems or not shards:
        raise Damaged(store.location, problems or [Problem(METADATA_NAME, "no shards are left")])
    metadata = _assemble(store, save_id, shards, leaves, layouts, indexes)
    made = _make_indexes(store, metadata, indexes, tally)
    known = {p: IndexEntry(len(data), _format.digest(data)) for p, (_, data) in indexes.items()}
    known |= {p: IndexEntry(len(data), _format.digest(data)) for p, data in made.items()}
    if made:
        few = name_few([_format.index_name(process) for process in sorted(made)])
        notes.append(
            f"{few} lost, too: the digests are those of the files as they are, unproved, and "
            "whether the last shards of arrays are gone can't be told: compare their shapes"
        )
    if any(name.startswith("parity_") for name in names):
        notes.append("its parity files are not part of it any more: save it again with parity=")
    notes.insert(0, _NOTE)
    return Rebuilt(replace(metadata, indexes=known), made, tuple(notes))


_NOTE = (
    f"{METADATA_NAME} was made from the headers of the shards: containers are dicts, and values "
    "that are no arrays, meshes, PRNG keys as such and metadata are lost; so is, without a trace, "
    "what a process wrote whose index and shards are all gone"
)


def _read_indexes(
    store: Store, save_id: str, names: Sequence[str]
) -> Iterator[tuple[int, tuple[list[str], bytes]]]:
    """By process, the files that an index names, and its bytes, if it can be read."""
    for found in filter(None, map(_INDEX.fullmatch, names)):
        process = int(found[1])
        try:
            data = store.get(f"{_format.shards_directory(save_id)}/{found[0]}")
            body = cast("dict[str, Any]", json.loads(data))
            if (body["id"], body["process"]) == (save_id, process):
                yield process, (list(_format.decode_index(data)), data)
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            continue


# Leaves and layouts


@dataclass(slots=True)
class _Cells:
    """All boxes of one leaf, and where they lie."""

    dtype: str
    boxes: dict[_box.Box, tuple[int, int]]
    packed: list[tuple[int, int, int]]
    """Of a packed dtype, whose boxes no header tells: device, part, bytes."""


def _leaves(
    shards: Sequence[FoundShard], problems: list[Problem]
) -> tuple[list[StoredLeaf], list[Layout], list[str]]:
    cells: dict[str, _Cells] = {}
    for shard in shards:
        for found in shard.boxes:
            of_leaf = cells.setdefault(found.path, _Cells(found.dtype, {}, []))
            if found.box is None:
                of_leaf.packed.append((shard.device, shard.part, found.nbytes))
            else:
                of_leaf.boxes[found.box] = (shard.device, shard.part)
    layouts: dict[Layout, int] = {}
    stored: dict[str, StoredLeaf] = {}
    notes: list[str] = []
    for path, found in cells.items():
        try:
            dtype, shape, layout, part = _packed(found) if found.packed else _grid(found)
        except _Incomplete as error:
            problems.append(Problem(METADATA_NAME, str(error), (path,)))
            continue
        if found.packed:
            what = f"leaf {path!r} is {found.dtype}, packed"
            notes.append(f"{what}: its shape is lost, and zeros may follow each of its boxes")
        number = layouts.setdefault(layout, len(layouts))
        stored[path] = StoredLeaf(LeafSpec(path, "numpy", dtype, shape, HOST_LOCAL), number, part)
    order = _in_order(shards, [path for path in cells if path in stored])
    return [stored[path] for path in order], list(layouts), notes


class _Incomplete(Exception):
    """Not all boxes of a leaf are there, or they don't fit."""


def _grid(found: _Cells) -> tuple[str, tuple[int, ...], Layout, int]:
    ranks = {len(box) for box in found.boxes}
    if len(ranks) != 1:
        raise _Incomplete("its boxes have different ranks")
    dimensions = range(ranks.pop())
    shape = tuple(max(box[d][1] for box in found.boxes) for d in dimensions)
    grid = tuple(len({box[d] for box in found.boxes}) for d in dimensions)
    if prod(grid) != len(found.boxes):
        raise _Incomplete(f"only {len(found.boxes)} of its {prod(grid)} boxes are there")
    wanted = [_box.cell(shape, grid, cell) for cell in range(prod(grid))]
    missing = [box for box in wanted if box not in found.boxes]
    if missing:
        raise _Incomplete(f"its box {missing[0]} is not there")
    places = [found.boxes[box] for box in wanted]
    return found.dtype, shape, *_layout(grid, places)


def _packed(found: _Cells) -> tuple[str, tuple[int, ...], Layout, int]:
    """In one dimension, one box after the other."""
    places = sorted(found.packed)
    total, count = sum(nbytes for _, _, nbytes in places), len(places)
    sizes = [_box.cut(total, count, number) for number in range(count)]
    if [stop - start for start, stop in sizes] != [nbytes for _, _, nbytes in places]:
        raise _Incomplete("it is packed, and its boxes have different sizes")
    elements = total * 8 // DTYPES[found.dtype].bits
    layout = _layout((count,), [(device, part) for device, part, _ in places])
    return found.dtype, (elements,), *layout


def _layout(grid: tuple[int, ...], places: Sequence[tuple[int, int]]) -> tuple[Layout, int]:
    """The layout, and the part of the first cell of each device."""
    turns: dict[int, int] = {}
    firsts: set[int] = set()
    for device, part in places:
        firsts.add(part - turns.get(device, 0))
        turns[device] = turns.get(device, 0) + 1
    if len(firsts) != 1:
        raise _Incomplete("its boxes don't lie where they should")
    return Layout(grid, tuple(device for device, _ in places)), firsts.pop()


def _in_order(shards: Sequence[FoundShard], paths: Sequence[str]) -> list[str]:
    """The leaves in an order that gives every file the order that it has.

    A file has boxes of one alignment in the order of the leaves.
    """
    after: dict[str, set[str]] = {path: set() for path in paths}
    waits = dict.fromkeys(paths, 0)
    for shard in shards:
        last: dict[int, str] = {}
        for found in (found for found in shard.boxes if found.path in after):
            alignment = _format.alignment_of(_data_bytes(found.dtype, found.box, found.nbytes))
            before = last.get(alignment)
            if before is not None and found.path not in after[before]:
                after[before].add(found.path)
                waits[found.path] += 1
            last[alignment] = found.path
    ready = [path for path in paths if not waits[path]]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        path = heapq.heappop(ready)
        order.append(path)
        for following in after[path]:
            waits[following] -= 1
            if not waits[following]:
                heapq.heappush(ready, following)
    return order


def _data_bytes(dtype: str, box: _box.Box | None, stored: int) -> int:
    return stored if box is None else DTYPES[dtype].nbytes(_box.count(box))


# All of it


def _assemble(
    store: Store,
    save_id: str,
    shards: Sequence[FoundShard],
    leaves: Sequence[StoredLeaf],
    layouts: Sequence[Layout],
    indexes: Mapping[int, tuple[list[str], bytes]],
) -> Metadata:
    process_of_file = {name: p for p, (files, _) in indexes.items() for name in files}
    unused = next(p for p in range(len(indexes) + 1) if p not in indexes)
    process_of = [0] * (max(shard.device for shard in shards) + 1)
    for shard in shards:
        process_of[shard.device] = process_of_file.get(shard.name, unused)
    files = [FileEntry(s.device, s.part, s.header_bytes, s.size) for s in shards]
    metadata = Metadata(
        id=save_id,
        writer={"ostraka": __version__, "rebuilt": "from the headers of the shards"},
        process_of=tuple(process_of),
        tree=_tree([leaf.spec.path for leaf in leaves]),
        meshes=(),
        layouts=tuple(layouts),
        leaves=tuple(leaves),
        files=tuple(sorted(files, key=lambda file: (file.device, file.part))),
        indexes={},
        user={},
        version=max(shard.version for shard in shards),
    )
    try:
        check_metadata(metadata)
        contents = shard_contents(metadata)
        for shard in shards:
            paths = [leaves[e.leaf].spec.path for e in contents[shard.device, shard.part][1]]
            if paths != [found.path for found in shard.boxes]:
                raise ValueError(f"{shard.name} does not have its boxes in the order it should")
    except ValueError as error:
        found = f"it is lost, and the headers of the shards contradict each other: {error}"
        raise Damaged(store.location, [Problem(METADATA_NAME, found)]) from error
    return metadata


def _make_indexes(
    store: Store,
    metadata: Metadata,
    indexes: Mapping[int, tuple[list[str], bytes]],
    tally: Tally,
) -> dict[int, bytes]:
    """Indexes for files that none names."""
    named = {name for files, _ in indexes.values() for name in files}
    lost = [pair for pair in shard_contents(metadata).values() if pair[0].name not in named]
    if not lost:
        return {}
    candidates = find_candidates([store], metadata, lost, [], tally)
    unread = [Problem(name, "it can't be read") for name, found in candidates.items() if not found]
    if unread:
        raise Damaged(store.location, unread)
    (process,) = {metadata.process_of[file.device] for file, _ in lost}
    files = {name: found[0] for name, found in candidates.items()}
    version = metadata.version
    return {process: _format.encode_index(metadata.id, process, files, version=version)}


def _tree(paths: Sequence[str]) -> Any:
    """A tree of dicts, as `_METADATA` has it."""
    if list(paths) == ["."]:
        return 0
    root: dict[str, Any] = {}
    for number, path in enumerate(paths):
        node = root
        *above, last = path.split("/")
        for segment in above:
            node = node.setdefault(segment, {})
        node[last] = number
    return _encode(root)


def _encode(node: Any) -> Any:
    if isinstance(node, int):
        return node
    branch = cast("dict[str, Any]", node)
    return {"dict": [_key(key) for key in branch], "items": [_encode(v) for v in branch.values()]}


def _key(segment: str) -> str:
    """The key that a part of a path stands for."""
    if segment == "~":
        return ""
    if segment == "~2__metadata__":
        return "__metadata__"
    return segment.replace("~1", "/").replace("~0", "~")
