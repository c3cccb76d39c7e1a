"""Check by headers that the files have every element of every leaf exactly once. Pure.

Ostraka finds boxes by `_METADATA`, and every other tool finds them by the headers of the files.
Both must agree. Then the boxes of each leaf must fill it without gaps and overlaps. This module
shares no code with the planner and the writer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, cast

from ostraka.common.dtypes import DTYPES
from ostraka.common.threads import TooDeep, with_full_stack
from ostraka.layout.box import Box
from ostraka.layout.shard_file import Block, Entry, real_starts, stored_range
from ostraka.layout.spec import StoredLeaf

MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors package accepts."""


class Contradiction(ValueError):
    """A header contradicts `_METADATA` or an index, about the leaf with the path `leaf`."""

    def __init__(self, found: str, leaf: str | None = None):
        super().__init__(found)
        self.leaf = leaf


def boxes_in_header(
    header: bytes | memoryview,
    leaves: Sequence[StoredLeaf],
    entries: Sequence[Entry],
    blocks: Sequence[Block],
) -> dict[int, Box]:
    """The boxes in the header of a file, by the numbers of their leaves.

    A reader expects `entries` and `blocks` in the file. Raises Contradiction if the header differs.
    For a packed dtype a header has the length alone, and its box is taken from `entries`.
    """
    length = int.from_bytes(header[:8], "little")
    if length != len(header) - 8:
        raise Contradiction(f"its header states {length:,} bytes, and has {len(header) - 8:,}")
    tensors = _object(bytes(header[8:]), "its header is")
    about = tensors.pop("__metadata__", {})
    if not isinstance(about, dict):
        raise Contradiction("its header has a `__metadata__` that is not a JSON object")
    starts, codecs = (
        _object(cast(dict[str, Any], about).get(key, "{}"), f"its header has a {key} that is")
        for key in ("DCP_SHARDING_INFO", "ostraka_codecs")
    )
    expected = {leaves[entry.leaf].spec.path: entry for entry in entries}
    for path in tensors.keys() - expected.keys():
        raise Contradiction(f"its header has {path!r}, which {_METADATA} puts nowhere into it")
    boxes: dict[int, Box] = {}
    any_compressed = any(block.result for block in blocks)
    for path, entry in expected.items():
        if path not in tensors:
            raise Contradiction(f"its header lacks {path!r}", path)
        is_compressed = path in codecs
        shown = codecs[path] if is_compressed else tensors[path]
        begin = shown if is_compressed else starts.get(path)
        try:
            offsets = list(map(int, tensors[path]["data_offsets"]))
            box = _box_of(leaves[entry.leaf], entry, shown, begin, is_compressed)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Contradiction(f"its header does not describe {path!r} ({error})", path) from error
        stored = [entry.offset, entry.offset + entry.nbytes]
        if (any_compressed or is_compressed) and entry.nbytes:
            start, stop, is_stored_compressed = stored_range(entry, blocks)
            stored = [start, stop] if is_stored_compressed == is_compressed else []
        is_empty = entry.nbytes == 0 and len(offsets) == 2 and offsets[0] == offsets[1]
        if offsets != stored and not is_empty:
            what = f"its header has {path!r} at {offsets}"
            raise Contradiction(f"{what}, where its index has it at {stored}", path)
        if box != entry.box:
            raise Contradiction(
                f"its header has the box {box} of {path!r}, where {_METADATA} has {entry.box}", path
            )
        boxes[entry.leaf] = entry.box
    return boxes


_METADATA = "_METADATA"


def _object(text: Any, what: str) -> dict[str, Any]:
    """The JSON object in a text. `what` begins the sentence if there is none."""
    try:
        loaded = with_full_stack(lambda: json.loads(text))
    except (ValueError, TypeError, TooDeep) as error:
        raise Contradiction(f"{what} not JSON") from error
    if not isinstance(loaded, dict):
        raise Contradiction(f"{what} not a JSON object")
    return cast(dict[str, Any], loaded)


def _box_of(
    leaf: StoredLeaf, entry: Entry, shown: Any, begin: Any, is_compressed: bool
) -> Box | None:
    """The box in a header, or None if its dtype or size differs."""
    dtype = DTYPES[leaf.spec.dtype]
    starts = real_starts(list(map(int, begin["saved_offsets"])))
    shape = list(map(int, shown["shape"]))
    if shown["dtype"] != (dtype.name if is_compressed else dtype.code):
        return None
    if dtype.packed and not is_compressed:
        return entry.box if (shape, starts) == ([entry.nbytes], [0]) else None
    if dtype.opaque and dtype.bits > 8 and not is_compressed:
        # Shown as bytes, with one more dimension for those of an element.
        if (shape[-1:], starts[-1:]) != ([dtype.bits // 8], [0]):
            return None
        shape, starts = shape[:-1], starts[:-1]
    return tuple((start, start + n) for start, n in zip(starts, shape, strict=True))


def find_gap(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """How boxes fail to cover an array, in words, or None if they have each element once.

    Boxes are the cells of a grid. Their ranges in a dimension adjoin each other, and every
    combination of ranges occurs once.
    """
    if len(set(boxes)) != len(boxes):
        return "a box is there twice"
    if not prod(shape):
        return None if boxes else "it is in no file"
    cells = 1
    for dimension, extent in enumerate(shape):
        ranges = sorted({box[dimension] for box in boxes})
        ends = [(0, 0), *ranges, (extent, extent)]
        if any(before[1] != after[0] for before, after in pairwise(ends)):
            few = ", ".join(f"{start}:{stop}" for start, stop in ranges[:8]) or "nothing"
            more = ", …" if len(ranges) > 8 else ""
            return f"dimension {dimension} of {extent} elements is cut into {few}{more}"
        cells *= len(ranges)
    if len(boxes) != cells:
        return f"{len(boxes)} of {cells} boxes are there"
    return None
