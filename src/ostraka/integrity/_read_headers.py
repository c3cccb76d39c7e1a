"""What the headers of shard files tell: boxes with their leaves, dtypes and places. No JAX."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

from ostraka import _format
from ostraka._box import Box
from ostraka._header import real_starts
from ostraka._spec import DTYPES
from ostraka.integrity._lost import open_or_say
from ostraka.storage import Store

_NAME = re.compile(r"shard_(\d{5,9})(?:-(\d{5,9}))?\.safetensors")
_MOST_HEADER_BYTES = 100 << 20
_MOST_RANK = 64
_BY_CODE = {dtype.code: dtype.name for dtype in DTYPES.values() if not dtype.opaque}


class Unreadable(Exception):
    """A file that is no shard of this save; the text says why."""


@dataclass(frozen=True, slots=True)
class FoundBox:
    """A box as a header shows it."""

    path: str
    dtype: str
    box: Box | None
    """None for a packed dtype, of which a header has only the bytes."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A shard file as its header describes it."""

    device: int
    part: int
    version: int
    header_bytes: int
    size: int
    boxes: tuple[FoundBox, ...]
    """In file order."""

    @property
    def name(self) -> str:
        return _format.shard_name(self.device, self.part)


def shard_numbers(name: str) -> tuple[int, int] | None:
    """The device and the part of a file, by its name; None if it is no shard."""
    found = _NAME.fullmatch(name)
    numbers = None if found is None else (int(found[1]), int(found[2] or 0))
    return numbers if numbers is not None and _format.shard_name(*numbers) == name else None


def read_header(store: Store, save_id: str, device: int, part: int) -> FoundShard:
    """Read the header of a shard file. Raises Unreadable."""
    name = f"{_format.shards_directory(save_id)}/{_format.shard_name(device, part)}"
    opened = open_or_say(store, name)
    if isinstance(opened, str):
        raise Unreadable(opened)
    with closing(opened) as reader:
        size, length = reader.size, bytearray(8)
        reader.read_into(0, [length])
        header_bytes = 8 + int.from_bytes(length, "little")
        if not 8 < header_bytes <= min(size, _MOST_HEADER_BYTES):
            raise Unreadable("it does not begin with a header")
        text = bytearray(header_bytes - 8)
        reader.read_into(8, [text])
    try:
        header = cast("dict[str, Any]", json.loads(text))
        about = cast("dict[str, str]", header.pop("__metadata__"))
        if about["ostraka_id"] != save_id:
            raise Unreadable("it is of another save")
        version = int(about["ostraka"])
        if version not in _format.VERSIONS:
            raise Unreadable("a newer version of Ostraka wrote it")
        boxes = tuple(_boxes(header, about))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"its header can't be read ({type(error).__name__})") from error
    return FoundShard(device, part, version, header_bytes, size, boxes)


def _boxes(header: Mapping[str, Any], about: Mapping[str, str]) -> list[FoundBox]:
    opaque = dict(json.loads(about["ostraka_dtypes"]))
    places = dict(json.loads(about["DCP_SHARDING_INFO"]))
    codecs = dict(json.loads(about.get("ostraka_codecs", "{}")))
    return [
        _box(path, tensor, opaque.get(path), places[path], codecs.get(path))
        for path, tensor in header.items()
    ]


def _box(path: str, tensor: Any, opaque: str | None, place: Any, codec: Any) -> FoundBox:
    start, stop = map(int, tensor["data_offsets"])
    shape, starts = tensor["shape"], place["saved_offsets"]
    if codec is not None:
        shape, starts, opaque = codec["shape"], codec["saved_offsets"], codec["dtype"]
    name = opaque or _BY_CODE[tensor["dtype"]]
    dtype = DTYPES[name]
    if dtype.packed and codec is None:
        return FoundBox(path, name, None, stop - start)
    if dtype.opaque and dtype.bits > 8 and codec is None:
        shape, starts = shape[:-1], starts[:-1]
    numbers = [*shape, *starts]
    if len(shape) != len(starts) or len(shape) > _MOST_RANK:
        raise ValueError("a shape and its place have another rank")
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a shape or a place is no number")
    places = zip(real_starts(starts), shape, strict=True)
    box = tuple((at, at + extent) for at, extent in places)
    return FoundBox(path, name, box, stop - start)
