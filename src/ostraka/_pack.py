"""Dtypes of less than a byte: several elements to a byte in files, one to a byte in memory.

The first element is in the lowest bits. The last byte of a box is filled up with zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ostraka._spec import DTYPES, numpy_dtype

Array = np.ndarray[Any, Any]


def pack(array: Array) -> Array:
    """The packed bytes of an array of a sub-byte dtype, in row-major order."""
    bits = DTYPES[array.dtype.name].bits
    per_byte = 8 // bits
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & ((1 << bits) - 1)
    lanes = np.pad(elements, (0, -elements.size % per_byte)).reshape(-1, per_byte)
    packed = np.zeros(len(lanes), np.uint8)
    for lane in range(per_byte):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def unpack(packed: Array, dtype: str, count: int) -> Array:
    """The first `count` elements of packed bytes."""
    bits = DTYPES[dtype].bits
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    elements = ((packed[:, np.newaxis] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count]
    return np.ascontiguousarray(elements).view(numpy_dtype(dtype))
