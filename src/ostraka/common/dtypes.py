"""Dtypes: their names, their sizes, how safetensors calls them, and how sub-byte ones are packed.

Several elements of a sub-byte dtype share a byte in files and have one each in memory. The first
element is in the lowest bits. The last byte of a box is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


_PACKED_AT_ONCE = 1 << 19
"""So many elements stay in the cache. A multiple of those in a byte."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """The form of one dtype in a shard file."""

    name: str
    bits: int
    code: str
    """The safetensors dtype, or U8 if safetensors has no name for it."""

    opaque: bool = False
    """True if safetensors has no name for the dtype, so that the file shows bytes."""
    packed: bool = False
    """True if several elements share a byte."""

    def nbytes(self, elements: int) -> int:
        return (elements * self.bits + 7) // 8


def _dtype_table() -> dict[str, Dtype]:
    named = {
        "bool": (8, "BOOL"),
        **{f"int{b}": (b, f"I{b}") for b in (8, 16, 32, 64)},
        **{f"uint{b}": (b, f"U{b}") for b in (8, 16, 32, 64)},
        **{f"float{b}": (b, f"F{b}") for b in (16, 32, 64)},
        "bfloat16": (16, "BF16"),
        "complex64": (64, "C64"),
        "float8_e4m3fn": (8, "F8_E4M3"),
        "float8_e5m2": (8, "F8_E5M2"),
        "float8_e8m0fnu": (8, "F8_E8M0"),
        "float8_e4m3fnuz": (8, "F8_E4M3FNUZ"),
        "float8_e5m2fnuz": (8, "F8_E5M2FNUZ"),
    }
    opaque = {
        "complex128": 128,
        **{f"float8_{f}": 8 for f in ("e3m4", "e4m3", "e4m3b11fnuz")},
        **{f"float6_{f}": 8 for f in ("e2m3fn", "e3m2fn")},
        "float4_e2m1fn": 4,
        **{f"{sign}{bits}": bits for sign in ("int", "uint") for bits in (2, 4)},
    }
    table = {name: Dtype(name, bits, code) for name, (bits, code) in named.items()}
    return table | {name: Dtype(name, bits, "U8", True, bits < 8) for name, bits in opaque.items()}


DTYPES = _dtype_table()


@cache
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype of that name, from ml_dtypes if numpy lacks it."""
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


@cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype, cached because numpy builds it for each call."""
    return dtype.name


def is_inexact(name: str) -> bool:
    """True if a dtype is floating-point or complex, packed ones included."""
    return name in DTYPES and name.startswith(("float", "bfloat", "complex"))


def is_floating(name: str) -> bool:
    """True if a save or a restore can cast from and to this dtype."""
    is_float = name.startswith(("float", "bfloat"))
    return is_float and name in DTYPES and not DTYPES[name].packed


def to_bytes(array: Array) -> Array:
    """The bytes of an array as a file has them, in row-major order. A view if possible."""
    import numpy as np  # slow to import, and not every command needs it

    dtype = DTYPES.get(dtype_name(array.dtype))
    contiguous = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    stored = contiguous.reshape(-1).view(np.uint8)
    if dtype is None or not dtype.packed:
        return stored
    return _pack(stored, dtype.bits)


def _pack(elements: Array, bits: int) -> Array:
    """The low bits of each byte, several in a byte. It takes little memory beside the result."""
    import numpy as np

    per_byte, mask = 8 // bits, (1 << bits) - 1
    packed = np.zeros(-(-elements.size // per_byte), np.uint8)
    for start in range(0, elements.size, _PACKED_AT_ONCE):
        some = elements[start : start + _PACKED_AT_ONCE]
        out = packed[start // per_byte :]
        for lane in range(per_byte):
            part = some[lane::per_byte] & mask
            out[: len(part)] |= part << (lane * bits)
    return packed


def from_bytes(stored: Array, dtype: str, shape: Sequence[int]) -> Array:
    """The array that `to_bytes` made these bytes from. A view unless they are packed."""
    import numpy as np

    if DTYPES[dtype].packed:
        bits = DTYPES[dtype].bits
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        elements = (stored[:, np.newaxis] >> shifts) & ((1 << bits) - 1)
        stored = np.ascontiguousarray(elements.reshape(-1)[: prod(shape)])
    return stored.view(numpy_dtype(dtype)).reshape(shape)
