"""The metadata files of a zarr array (`.zarray`, `zarr.json`), checked. No I/O, no JAX.

TensorStore reads the chunks. It receives metadata made here from checked parts, so an untrusted
file can only make it read chunks of this array.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostraka.common.dtypes import DTYPES
from ostraka.formats.orbax.files import as_list, as_object, as_sizes, as_text
from ostraka.layout.box import Box

ZARR2, ZARR3 = ".zarray", "zarr.json"
_MOST_DIMENSIONS = 32
"""TensorStore's limit."""
_COMPRESSORS = frozenset({"zstd", "blosc", "zlib", "gzip", "bz2"})
_CODECS = frozenset({"bytes", "zstd", "gzip", "blosc", "crc32c", "transpose", "sharding_indexed"})
_ZARR2_DTYPE = re.compile(r"[<|]([biufc])(1|2|4|8|16)")


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """One array: its shape, dtype and chunks."""

    driver: str
    dtype: str
    shape: tuple[int, ...]
    file_chunk: tuple[int, ...]
    """Shape of a chunk that is stored as one value."""
    read_chunk: tuple[int, ...]
    """Shape of a chunk that is decoded at once. Smaller if file chunks are split again."""
    separator: str
    prefix: str
    metadata: Mapping[str, Any]
    """The checked metadata for TensorStore."""

    def chunk_name(self, box: Box) -> str:
        """The name of the file chunk with the first element of a box."""
        numbers = [start // size for (start, _), size in zip(box, self.file_chunk, strict=True)]
        text = self.separator.join(map(str, numbers))
        if not self.prefix:
            return text or "0"
        return self.separator.join([self.prefix, text]) if text else self.prefix


def parse_zarr2(document: Any) -> ZarrArray:
    """Parse `.zarray`. Raises ValueError, TypeError or KeyError if it is malformed."""
    found = as_object(document)
    shape = as_sizes(found["shape"], least=0)
    chunk = _chunk(found["chunks"], shape)
    text = as_text(found["dtype"])
    dtype = _known_dtype(np.dtype(text).name if _ZARR2_DTYPE.fullmatch(text) else text)
    compressor = found.get("compressor")
    if compressor is not None and as_object(compressor)["id"] not in _COMPRESSORS:
        raise ValueError(f"its compressor is {compressor['id']!r}")
    if found.get("filters") or found["zarr_format"] != 2 or found["order"] not in ("C", "F"):
        raise ValueError("its filters, order or zarr_format are not those that Orbax writes")
    separator = _separator(found.get("dimension_separator", "."))
    metadata = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": found["dtype"],
        "compressor": compressor,
        "filters": None,
        "order": found["order"],
        "fill_value": _fill_value(found.get("fill_value")),
        "dimension_separator": separator,
    }
    return ZarrArray("zarr", dtype, shape, chunk, chunk, separator, "", metadata)


def parse_zarr3(document: Any) -> ZarrArray:
    """Parse `zarr.json`. Raises ValueError, TypeError or KeyError if it is malformed."""
    found = as_object(document)
    shape = as_sizes(found["shape"], least=0)
    grid = found["chunk_grid"]
    chunk = _chunk(as_object(grid["configuration"])["chunk_shape"], shape)
    dtype = _known_dtype(as_text(found["data_type"]))
    codecs = [_codec(codec) for codec in as_list(found["codecs"])]
    encoding = as_object(found["chunk_key_encoding"])
    if grid["name"] != "regular" or encoding["name"] not in ("default", "v2"):
        raise ValueError("its chunks are not cut and named as Orbax does")
    is_default = encoding["name"] == "default"
    about = as_object(encoding.get("configuration") or {})
    separator = _separator(about.get("separator", "/" if is_default else "."))
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {
            "name": encoding["name"],
            "configuration": {"separator": separator},
        },
        "codecs": codecs,
        "fill_value": _fill_value(found["fill_value"]),
    }
    inner = next((c["configuration"] for c in codecs if c["name"] == "sharding_indexed"), None)
    read_chunk = chunk if inner is None else _chunk(inner["chunk_shape"], chunk)
    prefix = "c" if is_default else ""
    return ZarrArray("zarr3", dtype, shape, chunk, read_chunk, separator, prefix, metadata)


def _chunk(value: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of chunks. The shape of the array limits it, so a few bytes can't fill memory."""
    chunk = as_sizes(value, least=1)
    if len(chunk) != len(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"chunks of {list(chunk)} do not fit the shape {list(shape)}")
    if any(size > max(extent, 1) for size, extent in zip(chunk, shape, strict=True)):
        raise ValueError(f"chunks of {list(chunk)} are larger than the shape {list(shape)}")
    return chunk


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"its dtype is {name!r}")
    return name


def _codec(codec: Any) -> dict[str, Any]:
    """A codec with its inner codecs, if all are known. TensorStore checks their settings."""
    found = as_object(codec)
    name = as_text(found["name"])
    if name not in _CODECS:
        raise ValueError(f"it has the codec {name!r}")
    about = dict(as_object(found.get("configuration") or {}))
    for inner in ("codecs", "index_codecs"):
        if inner in about:
            about[inner] = [_codec(one) for one in as_list(about[inner])]
    return {"name": name, "configuration": about} if about else {"name": name}


def _separator(value: Any) -> str:
    if value not in (".", "/"):
        raise ValueError(f"the separator in the names of chunks is {value!r}")
    return value


def _fill_value(value: Any) -> Any:
    """The fill value of missing chunks: a number, or two for a complex one."""
    parts = value if isinstance(value, list) else [value]
    if not all(part is None or isinstance(part, bool | int | float | str) for part in parts):
        raise ValueError(f"its fill_value is {value!r:.80}")
    return value
