"""Checkpoints, their arrays and trees of leaves as HTML for notebooks. No JAX, no array is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ostraka.common import html
from ostraka.common.html import Html
from ostraka.common.text import show_shape, show_value
from ostraka.common.units import human_bytes
from ostraka.errors import OstrakaError, count_of
from ostraka.formats.source import Source
from ostraka.layout.spec import HOST_LOCAL, LeafSpec, MeshSpec
from ostraka.reading.metrics import RESERVED_KEY, metrics_in, read_added
from ostraka.reading.show import show_dtype, show_sharding, show_writer
from ostraka.tree.blocks import Block, fold_blocks
from ostraka.tree.nodes import ArrayNumber, UnreadableLeaf

if TYPE_CHECKING:
    from ostraka.reading.lazy import Checkpoint, LazyArray

_MOST_LINES = 400
"""The most lines of a tree, so that the HTML of any checkpoint is small."""
_MOST_CHILDREN = 100
"""The most lines below one name."""
_COLUMNS = 5
_MOST_BOXES = 64
_MOST_ENTRIES = 200_000
"""Look for the files of an array only if that computes no more boxes of all arrays than this."""


@dataclass(frozen=True, slots=True)
class LeafLine:
    """A leaf of a tree for people."""

    path: str
    cells: tuple[str, ...]
    """Dtype, shape and sharding of an array. Type and text of a value. The path of a shared array.
    """
    nbytes: int | None = None
    """The size of an array. None for a value, and for an array that is counted elsewhere."""

    @property
    def kind(self) -> tuple[str, ...]:
        """Equal for leaves that may be one line: values of one type, and all shared arrays."""
        if self.nbytes is not None:
            return self.cells
        return self.cells[:1] if len(self.cells) > 1 else ("=",)


def array_line(path: str, leaf: LeafSpec, meshes: Sequence[MeshSpec]) -> LeafLine:
    """The line of an array."""
    cells = show_dtype(leaf), show_shape(leaf.logical_shape), show_sharding(leaf, meshes)
    return LeafLine(path, cells, leaf.nbytes)


# Trees


def draw_leaves(lines: Sequence[LeafLine]) -> Html:
    """A folded tree of leaves, in which repeated blocks are one line. Empty without leaves."""
    if not lines:
        return Html("")
    root = fold_blocks([line.path for line in lines], [line.kind for line in lines])
    shown = _choose(root)
    inside = _draw_below(root, lines, shown)
    return html.fold(count_of(len(lines), "leaf"), *inside)


def _choose(root: Block) -> dict[int, int]:
    """How many children of each block get a line, from the top down. Blocks without are closed."""
    shown: dict[int, int] = {}
    left = _MOST_LINES
    waiting = deque([root])
    while waiting and left > 0:
        node = waiting.popleft()
        shown[id(node)] = min(len(node.children), _MOST_CHILDREN, left)
        left -= shown[id(node)]
        waiting += [child for child in node.children[: shown[id(node)]] if child.children]
    return shown


def _draw_below(node: Block, lines: Sequence[LeafLine], shown: Mapping[int, int]) -> list[Html]:
    parts: list[Html] = []
    rows: list[Sequence[str]] = []
    drawn = node.children[: shown.get(id(node), 0)]
    for child in drawn:
        if child.leaf is not None:
            rows.append(_cells(child, lines))
            continue
        if rows:
            parts.append(html.grid(rows, _COLUMNS))
            rows = []
        inside = _draw_below(child, lines, shown)
        parts.append(html.fold(child.name, *inside, note=_note(child, lines)))
    if rows:
        parts.append(html.grid(rows, _COLUMNS))
    left_out = sum(len(child.leaves) for child in node.children[len(drawn) :])
    if left_out:
        parts.append(html.remark(f"… and {count_of(left_out, 'leaf')} more, not shown here"))
    return parts


def _cells(block: Block, lines: Sequence[LeafLine]) -> tuple[str, ...]:
    """The cells of a leaf, or of several that are alike."""
    line = lines[block.leaves[0]]
    if line.nbytes is None:
        *kind, shown = line.cells
        if any(lines[number].cells[-1] != shown for number in block.leaves):
            shown = count_of(len(block.leaves), "value" if kind else "shared array")
        return block.name, *kind, shown
    times = f"{len(block.leaves)} × " if len(block.leaves) > 1 else ""
    return block.name, *line.cells, f"{times}{human_bytes(line.nbytes)}"


def _note(block: Block, lines: Sequence[LeafLine]) -> str:
    leaves = count_of(len(block.leaves) // block.repeats, "leaf")
    times = f"{block.repeats} × " if block.repeats > 1 else ""
    size = human_bytes(sum(lines[number].nbytes or 0 for number in block.leaves))
    return f"{times}{leaves}, {size}"


# A checkpoint


def draw_checkpoint(checkpoint: Checkpoint, source: Source, leaves: Mapping[str, Any]) -> str:
    """A checkpoint, or a part of one: what it holds, when it was saved, and its tree."""
    saved = source.saved
    above = f"{checkpoint.within}/" if checkpoint.within else ""
    lines = [_line_of(path, value, above, source) for path, value in leaves.items()]
    arrays = {value.number for value in leaves.values() if isinstance(value, ArrayNumber)}
    used = sorted({saved.leaves[number].mesh for number in arrays} - {HOST_LOCAL})
    meshes = dict.fromkeys(str(saved.meshes[mesh]) for mesh in used)
    entries: dict[str, str | None] = {
        "part": checkpoint.within,
        "parameters": f"{checkpoint.num_params:,}",
        "size": html.size(checkpoint.nbytes),
        "arrays": f"{len(arrays):,}",
        "mesh": "; ".join(meshes),
        "saved": show_writer(saved.writer),
        "metrics": _show_metrics(source),
    }
    user = {name: value for name, value in saved.user.items() if name != RESERVED_KEY}
    about = [(name, show_value(value)) for name, value in user.items()]
    return html.frame(
        "Checkpoint",
        checkpoint.path,
        html.facts(entries),
        draw_leaves(lines),
        html.table("metadata", ("name", "value"), about),
    )


def _line_of(path: str, value: Any, above: str, source: Source) -> LeafLine:
    if isinstance(value, UnreadableLeaf):
        return LeafLine(path, ("unreadable", value.why))
    if not isinstance(value, ArrayNumber):
        return LeafLine(path, (type(value).__name__, show_value(value)))
    leaf = source.saved.leaves[value.number]
    if above + path != leaf.path:
        return LeafLine(path, (f"= {leaf.path}",))
    return array_line(path, leaf, source.saved.meshes)


def _show_metrics(source: Source) -> str:
    """The metrics of a step, those that were added to it included."""
    metrics, problem = metrics_in(source.saved.user), ""
    try:
        metrics = {**metrics, **read_added(source.store, source.saved.id)}
    except (OSError, OstrakaError) as error:
        problem = f" (added metrics can't be read: {error})"
    return ", ".join(f"{name} = {value:g}" for name, value in metrics.items()) + problem


# An array


def draw_array(array: LazyArray, source: Source, number: int) -> str:
    """An array of a checkpoint: its dtype, shape and sharding, and the files that hold it."""
    leaf = source.saved.leaves[number]
    dtype, shape, sharding = array_line(array.path, leaf, source.saved.meshes).cells
    parts = prod(source.grid_of(number))
    entries: dict[str, str | None] = {
        "checkpoint": source.location,
        "dtype": dtype,
        "shape": shape,
        "sharding": sharding,
        "mesh": None if array.mesh is None else str(array.mesh),
        "size": html.size(array.nbytes),
        "files": f"{len(set(source.files_of(number))):,}" if parts <= _MOST_ENTRIES else "",
    }
    files = Html("")
    if parts <= _MOST_BOXES and parts * len(source.saved.leaves) <= _MOST_ENTRIES:
        files = _draw_files(source, number)
    return html.frame("LazyArray", array.path, html.facts(entries), files)


def _draw_files(source: Source, number: int) -> Html:
    try:
        boxes = source.boxes_of(number)
    except (OSError, OstrakaError) as error:
        return html.remark(f"its files can't be listed: {error}")
    rows = [
        (_show_box(stored.box), human_bytes(stored.stored_bytes), stored.file) for stored in boxes
    ]
    return html.table(count_of(len(rows), "slice"), ("slice", "bytes", "file"), rows)


def _show_box(box: Iterable[tuple[int, int]]) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
