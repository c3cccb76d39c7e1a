"""Files of whole tensors, planned before they are written: safetensors, one or several. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ostraka._format import dumps
from ostraka._spec import DTYPES
from ostraka.interop._work import Item

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
"""What Hugging Face puts into a file at most, unless a single tensor has more."""
_FORMAT: Mapping[str, str] = {"format": "pt"}
"""What Hugging Face's libraries want to find in a file: how its arrays are to be understood."""

Patches = list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file, and where in it the bytes of each tensor go."""

    name: str
    size: int
    places: Mapping[int, int]
    """By the number of each item, where its bytes begin; in the order of the file."""
    fixed: tuple[tuple[int, bytes], ...]
    """What else is in it, and where, as far as that is known before."""
    finish: Callable[[Mapping[int, int]], Patches] | None = None
    """The rest, from the CRC-32 of each item; None if there is none."""


def plan_safetensors(
    items: Sequence[Item], *, for_hugging_face: bool, single: str | None
) -> tuple[list[PlannedFile], bytes | None]:
    """The files for items, and their index if they are several.

    With `single` all are in one file of that name.
    """
    metadata = _FORMAT if for_hugging_face else {}
    if single is not None:
        return [_plan_file(single, items, range(len(items)), metadata)], None
    groups = _split([item.spec.nbytes for item in items])
    if len(groups) == 1:
        return [_plan_file(SINGLE, items, groups[0], metadata)], None
    names = [
        f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for number in range(1, len(groups) + 1)
    ]
    files = [
        _plan_file(name, items, group, metadata) for name, group in zip(names, groups, strict=True)
    ]
    weights = {items[at].name: file.name for file in files for at in file.places}
    total = sum(item.spec.nbytes for item in items)
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    return files, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _split(sizes: Sequence[int]) -> list[list[int]]:
    """The tensors of each file, in their order, as Hugging Face fills files."""
    groups: list[list[int]] = [[]]
    filled = 0
    for number, size in enumerate(sizes):
        if groups[-1] and filled + size > MAX_FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += size
    return groups


def _plan_file(
    name: str, items: Sequence[Item], numbers: Sequence[int], metadata: Mapping[str, str]
) -> PlannedFile:
    # Wide elements first, so that all begin at a multiple of their size; then by name.
    ordered = sorted(numbers, key=lambda at: (-DTYPES[items[at].spec.dtype].bits, items[at].name))
    described: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offsets: dict[int, int] = {}
    end = 0
    for at in ordered:
        spec = items[at].spec
        offsets[at] = end
        end += spec.nbytes
        described[items[at].name] = {
            "dtype": DTYPES[spec.dtype].code,
            "shape": list(spec.shape),
            "data_offsets": [offsets[at], end],
        }
    text = dumps(described).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    places = {at: len(header) + offset for at, offset in offsets.items()}
    return PlannedFile(name, len(header) + end, places, ((0, header),))
