"""Headers of shard files, as safetensors has them: their length, planned, and their text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from json.encoder import encode_basestring_ascii
from typing import Any

from ostraka import _box
from ostraka._box import Box
from ostraka._format import PAGE_BYTES, VERSION, Entry, StoredRange, dumps
from ostraka._spec import DTYPES, Dtype, LeafSpec, StoredLeaf

_OFFSET_DIGITS = 15
_NOWHERE = 10**14
"""Added to where a box begins, if safetensors does not know its dtype: PyTorch's reader of sharded
files takes the array for larger than any, and raises, where it would give bytes for numbers."""
_FREE_BYTES = 64 << 10
_USUAL_BYTES = 1 << 10
_SLACK = 4
"""A header is read whole: it may have so many times what Ostraka itself would plan for it."""
_QUOTED_OFFSETS = len(encode_basestring_ascii('{"saved_offsets":[]},:'))


def _tensor_shape(dtype: Dtype, box: Box, nbytes: int) -> tuple[list[int], list[int]]:
    """The shape that the file shows, and where that begins in the whole array.

    Dtypes that safetensors lacks are shown as bytes.
    """
    if dtype.packed:
        return [nbytes], [_NOWHERE]
    shape = list(_box.shape_of(box))
    starts = [start for start, _ in box]
    if not dtype.opaque:
        return shape, starts
    if dtype.bits > 8:
        shape, starts = [*shape, dtype.bits // 8], [*starts, 0]
    return shape, [start + _NOWHERE for start in starts[:1]] + starts[1:]


def real_starts(shown: Sequence[int]) -> list[int]:
    """Where a box begins, given what a header says; older checkpoints have nothing added."""
    starts = list(shown)
    if starts and starts[0] >= _NOWHERE:
        starts[0] -= _NOWHERE
    return starts


def header_capacity(leaf: LeafSpec, *, compressed: bool) -> int:
    """An upper bound for what one box of this leaf adds to a header, the same for every box.

    Headers are padded anyway; a bound that does not depend on the digits of each offset lets file
    sizes be planned for thousands of devices at once.
    """
    dtype = DTYPES[leaf.dtype]
    key = encode_basestring_ascii(leaf.path)
    quoted = len(encode_basestring_ascii(key))
    shape_digits = sum(map(len, map(str, leaf.shape))) + len(leaf.shape) + 3
    digits = shape_digits + _OFFSET_DIGITS * (dtype.opaque or compressed)
    tensor = len(key) + len('{"dtype":"","shape":[],"data_offsets":[,]},:')
    tensor += len(dtype.code) + digits + 2 * _OFFSET_DIGITS
    sharding = quoted + _QUOTED_OFFSETS + digits
    named = quoted + len(encode_basestring_ascii('"",:')) + len(leaf.dtype) if dtype.opaque else 0
    if compressed:
        # The length of what is stored, and what it really is.
        about = {"codec": "zstd", "dtype": leaf.dtype, "shape": [], "saved_offsets": []}
        named += _OFFSET_DIGITS + quoted + len(encode_basestring_ascii(f"{dumps(about)},:"))
        named += 2 * shape_digits + len('"ostraka_codecs":"{}",')
    return tensor + sharding + named


def header_bytes_for(capacity: Any) -> Any:
    """The size of a header (length prefix and padding included) whose leaves need `capacity`.

    Takes an integer or an array of them.
    """
    return -(-(_header_frame_bytes() + capacity) // PAGE_BYTES) * PAGE_BYTES


def is_header_too_long(header_bytes: int, leaves: Sequence[LeafSpec]) -> bool:
    """Whether a header is far longer than one box of each of these leaves can need."""
    beyond = header_bytes - _FREE_BYTES
    if beyond <= _USUAL_BYTES * len(leaves):  # Most are, and this is quick.
        return False
    return beyond > _SLACK * sum(header_capacity(leaf, compressed=True) for leaf in leaves)


@cache
def _header_frame_bytes() -> int:
    return 8 + len(_header_json([], [], "0" * 16, VERSION, {}))


def encode_header(
    entries: Sequence[Entry],
    leaves: Sequence[StoredLeaf],
    save_id: str,
    header_bytes: int,
    *,
    version: int = VERSION,
    stored: Mapping[int, StoredRange] | None = None,
) -> bytes:
    """The first `header_bytes` of a shard file; `stored` is by leaf, if boxes are compressed."""
    text = _header_json(entries, leaves, save_id, version, stored or {})
    if 8 + len(text) > header_bytes:
        raise AssertionError(f"header of {8 + len(text)} bytes exceeds its plan of {header_bytes}")
    return (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)


def _header_json(
    entries: Sequence[Entry],
    leaves: Sequence[StoredLeaf],
    save_id: str,
    version: int,
    stored: Mapping[int, StoredRange],
) -> bytes:
    """What a header says. Written entry by entry: making one large object of it all is slow."""
    tensors: list[str] = []
    offsets: list[str] = []
    opaque: dict[str, str] = {}
    codecs: dict[str, Any] = {}
    shown: dict[tuple[str, Box], tuple[str, str]] = {}
    for leaf, box, offset, nbytes in entries:
        spec = leaves[leaf].spec
        dtype = DTYPES[spec.dtype]
        texts = shown.get((spec.dtype, box))
        if texts is None:
            shape, starts = _tensor_shape(dtype, box, nbytes)
            texts = shown[spec.dtype, box] = (dumps(shape), dumps(starts))
        code, stop = dtype.code, offset + nbytes
        if stored:
            offset, stop, is_compressed = stored[leaf]
            if is_compressed:
                codecs[spec.path] = _describe_compressed(spec, box)
                code, texts = "U8", (f"[{stop - offset}]", f"[{_NOWHERE}]")
        key = encode_basestring_ascii(spec.path)
        tensors.append(
            f'{key}:{{"dtype":"{code}","shape":{texts[0]},"data_offsets":[{offset},{stop}]}}'
        )
        offsets.append(f'{key}:{{"saved_offsets":{texts[1]}}}')
        if dtype.opaque and spec.path not in codecs:
            opaque[spec.path] = dtype.name
    about = {
        "ostraka": str(version),
        "ostraka_id": save_id,
        "ostraka_dtypes": dumps(opaque),
        "DCP_SHARDING_INFO": f"{{{','.join(offsets)}}}",
    }
    if codecs:
        about["ostraka_codecs"] = dumps(codecs)
    return ("{" + ",".join([f'"__metadata__":{dumps(about)}', *tensors]) + "}").encode()


def _describe_compressed(spec: LeafSpec, box: Box) -> dict[str, Any]:
    """What a box really is that a header shows as the bytes that are stored of it."""
    return {
        "codec": "zstd",
        "dtype": spec.dtype,
        "shape": _box.shape_of(box),
        "saved_offsets": [start for start, _ in box],
    }
