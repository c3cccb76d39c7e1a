"""safetensors headers of shard files: their planned length and their text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from json.encoder import encode_basestring_ascii
from typing import Any

from ostraka.common.dtypes import DTYPES, Dtype
from ostraka.layout import box as _box
from ostraka.layout.box import Box
from ostraka.layout.shard_file import PAGE_BYTES, VERSION, Entry, StoredRange, dumps
from ostraka.layout.spec import LeafSpec, StoredLeaf

DEFAULT_CODEC = "zstd"
_OFFSET_DIGITS = 15
_NOWHERE = 10**14
"""Added to the start of a box if safetensors lacks its dtype. PyTorch's reader of sharded files
then takes the array for too large and raises. Otherwise it would return bytes as numbers."""
_FREE_BYTES = 64 << 10
_USUAL_BYTES = 1 << 10
_SLACK = 4
"""The largest allowed ratio of a header's length to its plan: readers read it whole."""
_QUOTED_OFFSETS = len(encode_basestring_ascii('{"saved_offsets":[]},:'))


def _tensor_shape(dtype: Dtype, box: Box, nbytes: int) -> tuple[list[int], list[int]]:
    """The shape in the header, and its start in the whole array.

    Dtypes that safetensors lacks appear as bytes.
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
    """The start of a box from its header. Older checkpoints have nothing added."""
    starts = list(shown)
    if starts and starts[0] >= _NOWHERE:
        starts[0] -= _NOWHERE
    return starts


def header_capacity(leaf: LeafSpec, codec: str = "") -> int:
    """An upper bound for the bytes of one box of this leaf in a header, the same for every box.

    `codec` is the name of its codec. Headers have padding anyway, and a bound that ignores the
    digits of each offset allows to plan file sizes for thousands of devices at once.
    """
    dtype = DTYPES[leaf.dtype]
    key = encode_basestring_ascii(leaf.path)
    quoted = len(encode_basestring_ascii(key))
    shape_digits = sum(map(len, map(str, leaf.shape))) + len(leaf.shape) + 3
    digits = shape_digits + _OFFSET_DIGITS * (dtype.opaque or bool(codec))
    tensor = len(key) + len('{"dtype":"","shape":[],"data_offsets":[,]},:')
    tensor += len(dtype.code) + digits + 2 * _OFFSET_DIGITS
    sharding = quoted + _QUOTED_OFFSETS + digits
    named = quoted + len(encode_basestring_ascii('"",:')) + len(leaf.dtype) if dtype.opaque else 0
    if codec:
        # The length of what is stored, and what it really is.
        about = {"codec": codec, "dtype": leaf.dtype, "shape": [], "saved_offsets": []}
        named += _OFFSET_DIGITS + quoted + len(encode_basestring_ascii(f"{dumps(about)},:"))
        named += 2 * shape_digits + len('"ostraka_codecs":"{}",')
    return tensor + sharding + named


def header_bytes_for(capacity: Any) -> Any:
    """The size of a header (length prefix and padding included) whose leaves need `capacity`.

    Takes an integer or an array of them.
    """
    return -(-(_header_frame_bytes() + capacity) // PAGE_BYTES) * PAGE_BYTES


def is_header_too_long(header_bytes: int, leaves: Sequence[LeafSpec]) -> bool:
    """True if a header is far longer than one box of each of these leaves can need."""
    beyond = header_bytes - _FREE_BYTES
    if beyond <= _USUAL_BYTES * len(leaves):  # Most are, and this is quick.
        return False
    return beyond > _SLACK * sum(header_capacity(leaf, DEFAULT_CODEC) for leaf in leaves)


@cache
def _header_frame_bytes() -> int:
    return 8 + len(_header_json([], [], "0" * 16, VERSION, {}, {}))


def encode_header(
    entries: Sequence[Entry],
    leaves: Sequence[StoredLeaf],
    save_id: str,
    header_bytes: int,
    *,
    version: int = VERSION,
    stored: Mapping[int, StoredRange] | None = None,
    codecs: Mapping[int, str] | None = None,
) -> bytes:
    """The first `header_bytes` of a shard file.

    For compressed boxes `stored` has their ranges by leaf, and `codecs` their codecs if not zstd.
    """
    text = _header_json(entries, leaves, save_id, version, stored or {}, codecs or {})
    if 8 + len(text) > header_bytes:
        raise AssertionError(f"header of {8 + len(text)} bytes exceeds its plan of {header_bytes}")
    return (header_bytes - 8).to_bytes(8, "little") + text.ljust(header_bytes - 8)


def _header_json(
    entries: Sequence[Entry],
    leaves: Sequence[StoredLeaf],
    save_id: str,
    version: int,
    stored: Mapping[int, StoredRange],
    codecs: Mapping[int, str],
) -> bytes:
    """The text of a header. Written entry by entry: making one large object of it all is slow."""
    tensors: list[str] = []
    offsets: list[str] = []
    opaque: dict[str, str] = {}
    compressed: dict[str, Any] = {}
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
                # What the box really is, whose stored bytes the header shows.
                compressed[spec.path] = {
                    "codec": codecs.get(leaf, DEFAULT_CODEC),
                    "dtype": spec.dtype,
                    "shape": _box.shape_of(box),
                    "saved_offsets": [start for start, _ in box],
                }
                code, texts = "U8", (f"[{stop - offset}]", f"[{_NOWHERE}]")
        key = encode_basestring_ascii(spec.path)
        tensors.append(
            f'{key}:{{"dtype":"{code}","shape":{texts[0]},"data_offsets":[{offset},{stop}]}}'
        )
        offsets.append(f'{key}:{{"saved_offsets":{texts[1]}}}')
        if dtype.opaque and spec.path not in compressed:
            opaque[spec.path] = dtype.name
    about = {
        "ostraka": str(version),
        "ostraka_id": save_id,
        "ostraka_dtypes": dumps(opaque),
        "DCP_SHARDING_INFO": f"{{{','.join(offsets)}}}",
    }
    if compressed:
        about["ostraka_codecs"] = dumps(compressed)
    return ("{" + ",".join([f'"__metadata__":{dumps(about)}', *tensors]) + "}").encode()
