"""The header of a safetensors file, as checked values: each tensor and its range. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, cast

from ostraka.common.dtypes import DTYPES

_MOST_RANK = 64

BITS = {dtype.code: dtype.bits for dtype in DTYPES.values() if not dtype.opaque} | {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of each safetensors dtype."""
NAMES = {dtype.code: name for name, dtype in DTYPES.items() if not dtype.opaque} | {
    "F4": "float4_e2m1fn"
}
"""Ostraka's names of the dtypes that it reads."""


class Tensor(NamedTuple):
    """A tensor as a header describes it."""

    code: str
    """The dtype, under its safetensors name."""
    shape: tuple[int, ...]
    start: int
    """The offset of its first byte, counted from the end of the header."""
    nbytes: int


def read_header(
    fields: Mapping[str, Any], data_bytes: int
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The metadata and the tensors of a header. `data_bytes` follow it in the file.

    Tensors begin at the end of the header. Raises ValueError, a sentence about "its header", for
    malformed ones.
    """
    metadata = _metadata(fields.get("__metadata__"))
    tensors = {
        name: _tensor(name, about) for name, about in fields.items() if name != "__metadata__"
    }
    _check_places(tensors, data_bytes)
    return metadata, tensors


def is_text(name: str) -> bool:
    """True if a name can be written. JSON can escape halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        if all(isinstance(text, str) for text in found.values()):
            return found
    raise ValueError("the __metadata__ of its header must be text by name")


def _tensor(name: str, about: Any) -> Tensor:
    if not isinstance(about, dict) or not is_text(name):
        raise ValueError(f"its header has no sound description of tensor {name[:200]!r}")
    fields = cast("dict[str, Any]", about)
    code: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(code, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise ValueError(
            f"its header says of tensor {name[:200]!r} what can't be: dtype, shape and "
            "data_offsets must be text and lists of sizes"
        )
    sizes, (start, stop) = tuple(shape), (offsets if len(offsets) == 2 else (1, 0))
    if start > stop or len(sizes) > _MOST_RANK:
        raise ValueError(f"its header has no sound offsets or shape for tensor {name[:200]!r}")
    if code in BITS:
        bits = prod(sizes) * BITS[code]
        if bits % 8 or bits // 8 != stop - start:
            raise ValueError(
                f"its header says that tensor {name[:200]!r}, {code} of the shape "
                f"{list(sizes)}, has {stop - start:,} bytes, not {bits / 8:,.0f}"
            )
    return Tensor(code, sizes, start, stop - start)


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(type(n) is int and 0 <= n < 1 << 63 for n in cast("list[Any]", value))


def _check_places(tensors: Mapping[str, Tensor], data_bytes: int) -> None:
    """Check that tensors fill the file, without holes, and share no bytes."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != position:
            what = "shares bytes with another" if tensor.start < position else "comes after a hole"
            raise ValueError(f"its header says that tensor {name[:200]!r} {what}")
        position += tensor.nbytes
    if position != data_bytes:
        what = "it is cut short" if position > data_bytes else "something is at its end"
        raise ValueError(
            f"its tensors have {position:,} bytes, and the file has {data_bytes:,} for them: {what}"
        )
