"""Compressed blocks: which leaves have them, and their bytes to what is stored and back. No JAX.

The bytes of a block are grouped by their place in the element: all first bytes, all second bytes,
and so on. Of floats only the groups with sign and exponent compress, so each group is compressed
with zstd, or kept as it is. docs/format.md says how they are stored.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from ostraka import _pattern
from ostraka._format import LEAST_COMPRESSED_BYTES
from ostraka._spec import DTYPES, LeafSpec
from ostraka.errors import UnsupportedFormat

Array = np.ndarray[Any, Any]
CompressRule = Any
"""None, "zstd", ("zstd", level), or a mapping from path patterns to these."""

_MOST_LEVEL = 22
_MOST_WIDTH = 16
_IS_COMPRESSED = 1 << 31
"""Set in the length of a group that is compressed."""
_LEAST_SAVED = 16
"""A group is compressed if that saves a 16th of it: less is not worth the time of every restore."""
_INTEGERS = {width: np.dtype(f"<u{width}") for width in (2, 4, 8)}
_PUT_ELEMENTS = 1 << 17
"""How much of a group is put into its place at a time: what is made of it stays in the cache."""
_SAMPLES, _SAMPLE_BYTES = 4, 4096
"""What is tried of a group before all of it is."""


class Zstd(NamedTuple):
    """How a leaf is compressed; without a level, in the way that was made for floats."""

    level: int | None

    @property
    def name(self) -> str:
        return "zstd"


class Undecodable(ValueError):
    """What is stored is no compressed block."""


def check_compress(rule: CompressRule, leaves: Sequence[LeafSpec] | None = None) -> None:
    """As `check_rule`; raises UnsupportedFormat if what the rule needs is not installed."""
    check_rule(rule, leaves)
    if rule is not None:
        _zstandard()


def check_rule(rule: CompressRule, leaves: Sequence[LeafSpec] | None = None) -> None:
    """Raise ValueError for a rule that is none, or whose patterns match none of the leaves."""
    for found in cast("dict[str, Any]", rule).values() if isinstance(rule, dict) else [rule]:
        _codec(found)
    if leaves is not None and isinstance(rule, dict):
        paths = [leaf.path for leaf in leaves]
        for pattern in _pattern.unmatched(cast("dict[str, Any]", rule), paths):
            raise ValueError(f"compress has {pattern}, which matches no array of the tree")


def codecs_of(rule: CompressRule, leaves: Sequence[LeafSpec]) -> dict[int, Zstd]:
    """The numbers of the leaves that a rule compresses, and how.

    Small ones are not compressed.
    """
    codecs: dict[int, Zstd] = {}
    for number, leaf in enumerate(leaves):
        if leaf.nbytes < LEAST_COMPRESSED_BYTES:
            continue
        table = cast("dict[str, Any]", rule)
        codec = _codec(_pattern.lookup(table, leaf.path) if isinstance(rule, dict) else rule)
        if codec is not None:
            codecs[number] = codec
    return codecs


def _codec(rule: Any) -> Zstd | None:
    if rule is None:
        return None
    if rule == "zstd":
        return Zstd(None)
    if isinstance(rule, tuple | list):
        given = cast("Sequence[Any]", rule)
        is_level = len(given) == 2 and type(given[1]) is int and 1 <= given[1] <= _MOST_LEVEL
        if is_level and given[0] == "zstd":
            return Zstd(given[1])
    raise ValueError(
        f"compress is {rule!r}; it must be None, 'zstd', ('zstd', level) with a level from 1 to "
        f"{_MOST_LEVEL}, or a dict from path patterns to these"
    )


def element_bytes(dtype: str) -> int:
    """How many groups the bytes of a dtype make."""
    return max(DTYPES[dtype].bits // 8, 1)


def encode(data: Array, width: int, codec: Zstd) -> list[Any] | None:
    """A block of elements of `width` bytes as it is stored, in pieces; None if that is no smaller.

    `data` are its bytes.
    """
    compressor = _thread.compressor(codec.level)
    lengths: list[int] = []
    groups: list[Any] = []
    for place in range(width):
        group = data[place::width]
        packed = _compress(group, compressor)
        groups.append(np.ascontiguousarray(group) if packed is None else packed)
        lengths.append(len(groups[-1]) | (0 if packed is None else _IS_COMPRESSED))
    pieces = [struct.pack(f"<B{width}I", width, *lengths), *groups]
    return pieces if sum(map(len, pieces)) < data.size else None


def _compress(group: Array, compressor: Any) -> bytes | None:
    """None if it is better kept as it is."""
    if group.size > 4 * _SAMPLES * _SAMPLE_BYTES:
        starts = range(0, group.size - _SAMPLE_BYTES, group.size // _SAMPLES)
        sample = np.concatenate([group[start : start + _SAMPLE_BYTES] for start in starts])
        if not _saves_enough(compressor.compress(sample), sample):
            return None
    group = np.ascontiguousarray(group)
    packed = compressor.compress(group)
    return packed if _saves_enough(packed, group) else None


def _saves_enough(packed: bytes, group: Array) -> bool:
    return len(packed) <= group.size - group.size // _LEAST_SAVED


def decode(stored: Array, out: Array) -> None:
    """Fill `out`, the bytes of a block, from what is stored of it.

    No more memory is taken than `out` has, whatever is stored. Raises Undecodable if it is no block
    of that length.
    """
    width = int(stored[0])
    position = 1 + 4 * width
    if not 0 < width <= _MOST_WIDTH or out.size % width or stored.size < position:
        raise Undecodable(f"it can't have elements of {width} bytes")
    count = out.size // width
    groups: list[Array] = []
    for place, number in enumerate(struct.unpack(f"<{width}I", stored[1:position].tobytes())):
        length = number & ~_IS_COMPRESSED
        group = stored[position : position + length]
        if number & _IS_COMPRESSED:
            group = np.frombuffer(_thread.decompress(group, count), np.uint8)
        if group.size != count:
            raise Undecodable(f"a group has {group.size:,} bytes, not {count:,}")
        groups.append(group)
        if width not in _INTEGERS:
            out[place::width] = groups.pop()
        elif len(groups) == 2:
            _put_pair(groups[0], groups[1], out.view(_INTEGERS[2]), place // 2, width // 2)
            groups.clear()
        position += length
    if position != stored.size:
        raise Undecodable(f"it has {stored.size:,} bytes, and its groups {position:,}")


def _put_pair(low: Array, high: Array, out: Array, place: int, width: int) -> None:
    """Put two groups to `place` of elements that have `width` pairs of bytes.

    As whole integers: numpy stores bytes with gaps between them one by one. Those of `high` are
    stored one byte further on, which shifts them.
    """
    pairs = _thread.pairs
    whole = out.view(_INTEGERS[2 * width])
    for start in range(0, low.size, _PUT_ELEMENTS):
        stop = min(start + _PUT_ELEMENTS, low.size)
        made = out[start:stop] if width == 1 else pairs[: stop - start]
        places = made.view(np.uint8)
        places[1:-1].view(_INTEGERS[2])[:] = high[start : stop - 1]
        places[0], places[-1] = 0, high[stop - 1]
        np.bitwise_or(made, low[start:stop], out=made)
        if width > 1 and place == 0:
            whole[start:stop] = made  # The others follow; whole elements are quicker.
        elif width > 1:
            out[start * width + place : stop * width : width] = made


class _Thread(threading.local):
    """What zstd works with; no two threads may share it."""

    def __init__(self) -> None:
        self._compressors: dict[int | None, Any] = {}
        self._decompressor: Any = None
        self.pairs = np.empty(_PUT_ELEMENTS, _INTEGERS[2])
        """For what `_put_pair` makes."""

    def compressor(self, level: int | None) -> Any:
        made = self._compressors.get(level)
        if made is None:
            zstd = _zstandard()
            if level is None:
                made = zstd.ZstdCompressor(compression_params=_parameters_for_floats(zstd))
            else:
                made = zstd.ZstdCompressor(level=level)
            self._compressors[level] = made
        return made

    def decompress(self, packed: Array, count: int) -> bytes:
        """Raises Undecodable unless it is one frame of so many bytes."""
        zstd = _zstandard()
        if self._decompressor is None:
            self._decompressor = zstd.ZstdDecompressor()
        try:
            # What a frame says of its size is what is allocated for it.
            if zstd.frame_content_size(packed) != count:
                raise Undecodable("a group has another length than its block")
            return self._decompressor.decompress(packed, allow_extra_data=False)
        except zstd.ZstdError as error:
            raise Undecodable(f"zstd can't read it ({error})") from error


_thread = _Thread()


def _parameters_for_floats(zstd: Any) -> Any:
    """Entropy coding, and only the matches that runs of equal values make.

    Exponents have few values in no order. Short matches among them are found often, take longer to
    code than their bytes, and take most of the time both ways.
    """
    return zstd.ZstdCompressionParameters(
        strategy=zstd.STRATEGY_FAST,
        window_log=17,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
    )


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UnsupportedFormat(
            "compression needs zstandard, which is not installed; pip install 'ostraka[compress]'"
        ) from error
    return zstandard
