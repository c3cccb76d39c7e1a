"""Compression: the rule of `compress=`, and blocks to stored bytes and back. No JAX.

A codec groups the bytes of a block by their place in the element: all first bytes, all second
bytes, and so on. In floats only the groups with sign and exponent compress. So each group is
either compressed with zstd or stored raw. docs/reference/format.md has the encoding.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy as np

from ostraka.common.dtypes import DTYPES
from ostraka.errors import UnsupportedFormat
from ostraka.layout.shard_file import LEAST_COMPRESSED_BYTES
from ostraka.layout.spec import LeafSpec
from ostraka.tree import patterns

Array = np.ndarray[Any, Any]
CompressRule = Any
"""None, "zstd", ("zstd", level), or a mapping from path patterns to these."""

_IS_COMPRESSED = 1 << 31
"""The bit in the length of a compressed group."""
_LEAST_SAVED = 16
"""Compressing a group must save a 16th of it: less is not worth the time of every restore."""
_INTEGERS = {width: np.dtype(f"<u{width}") for width in (2, 4, 8)}
_PUT_ELEMENTS = 1 << 17
"""The elements of one pass over a group, few enough to stay in the cache."""
_SAMPLES, _SAMPLE_BYTES = 4, 4096
"""The samples of a group to compress first, to see if it is worthwhile."""


class Undecodable(ValueError):
    """The stored bytes are no compressed block."""


class Codec(Protocol):
    """A way to compress blocks. To add one, write it in a module and list it in `CODECS`."""

    name: ClassVar[str]
    levels: ClassVar[range]
    """The levels that a rule may ask for."""
    first_bytes: ClassVar[range]
    """The values of the first byte of its blocks. No two codecs share any."""

    def __init__(self, level: int | None) -> None: ...

    def encode(self, data: Array, width: int) -> list[Any] | None:
        """The stored pieces of a block of `width`-byte elements, or None if not smaller."""

    @staticmethod
    def decode(stored: Array, out: Array) -> None:
        """Fill `out` with the bytes of a block. Raises ValueError if it is no such block."""

    @staticmethod
    def check_installed() -> None:
        """Raise UnsupportedFormat if a package that it needs is not installed."""


def check_compress(rule: CompressRule, leaves: Sequence[LeafSpec] | None = None) -> None:
    """As `check_rule`. Raises UnsupportedFormat if a package that it needs is not installed."""
    check_rule(rule, leaves)
    for codec in _codecs_in(rule):
        codec.check_installed()


def check_rule(rule: CompressRule, leaves: Sequence[LeafSpec] | None = None) -> None:
    """Raise ValueError if `rule` is malformed or one of its patterns matches no leaf."""
    _codecs_in(rule)
    if leaves is not None and isinstance(rule, Mapping):
        table, paths = cast("Mapping[str, Any]", rule), [leaf.path for leaf in leaves]
        patterns.refuse_unmatched("compress", table, paths, "array of the tree")


def codecs_of(rule: CompressRule, leaves: Sequence[LeafSpec]) -> dict[int, Codec]:
    """By number, the leaves that a rule compresses, and how. Small ones are not compressed."""
    large = [n for n, leaf in enumerate(leaves) if leaf.nbytes >= LEAST_COMPRESSED_BYTES]
    found = {n: _codec(patterns.lookup(rule, leaves[n].path)) for n in large}
    return {number: codec for number, codec in found.items() if codec is not None}


def _codecs_in(rule: CompressRule) -> list[Codec]:
    return [codec for one in patterns.rules_in(rule) if (codec := _codec(one)) is not None]


def _codec(rule: Any) -> Codec | None:
    if rule is None:
        return None
    given = cast("Sequence[Any]", rule) if isinstance(rule, tuple | list) else (rule, None)
    codec = CODECS.get(given[0]) if len(given) == 2 and isinstance(given[0], str) else None
    if codec is not None:
        is_level = type(given[1]) is int and given[1] in codec.levels
        if is_level or given is not rule:
            return codec(given[1])
    known = ", ".join(
        f"{name!r}, ({name!r}, level) with a level from {codec.levels[0]} to {codec.levels[-1]}"
        for name, codec in CODECS.items()
    )
    raise ValueError(
        f"compress is {rule!r}; it must be None, {known}, or a dict from path patterns to these"
    )


def element_bytes(dtype: str) -> int:
    """The number of byte groups of a dtype."""
    return max(DTYPES[dtype].bits // 8, 1)


def decode(stored: Array, out: Array) -> None:
    """Fill `out` with the bytes of a block, from its stored bytes.

    Takes no more memory than `out` has, even for malformed input. Raises Undecodable if `stored`
    is no block of that length.
    """
    for codec in CODECS.values():
        if int(stored[0]) in codec.first_bytes:
            try:
                return codec.decode(stored, out)
            except (Undecodable, UnsupportedFormat):
                raise
            except ValueError as error:
                raise Undecodable(str(error)) from error
    raise Undecodable(f"no codec writes blocks that begin with the byte {stored[0]}")


@dataclass(frozen=True, slots=True)
class Zstd:
    """zstd on groups of bytes. Without a level it uses parameters for floats.

    Another codec is a class with the same names, and an entry in `CODECS`.
    """

    level: int | None
    name: ClassVar[str] = "zstd"
    levels: ClassVar[range] = range(1, 23)
    """The levels that a rule may ask for."""
    first_bytes: ClassVar[range] = range(1, 17)
    """The values of the first byte of its blocks: the width of their elements.

    No two codecs share any.
    """

    def encode(self, data: Array, width: int) -> list[Any] | None:
        """The stored pieces of a block of `width`-byte elements, or None if not smaller."""
        compressor = _thread.compressor(self.level)
        lengths: list[int] = []
        groups: list[Any] = []
        for place in range(width):
            group = data[place::width]
            packed = _compress(group, compressor)
            groups.append(np.ascontiguousarray(group) if packed is None else packed)
            lengths.append(len(groups[-1]) | (0 if packed is None else _IS_COMPRESSED))
        pieces = [struct.pack(f"<B{width}I", width, *lengths), *groups]
        return pieces if sum(map(len, pieces)) < data.size else None

    @staticmethod
    def decode(stored: Array, out: Array) -> None:
        """Fill `out` with the bytes of a block. Raises ValueError if it is no such block."""
        width = int(stored[0])
        position = 1 + 4 * width
        if out.size % width or stored.size < position:
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

    @staticmethod
    def check_installed() -> None:
        """Raise UnsupportedFormat if a package that it needs is not installed."""
        _zstandard()


def _compress(group: Array, compressor: Any) -> bytes | None:
    """The compressed group, or None if it is better stored raw."""
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


def _put_pair(low: Array, high: Array, out: Array, place: int, width: int) -> None:
    """Put two groups to `place` of elements that have `width` pairs of bytes.

    As whole integers: numpy stores bytes with gaps between them one by one. To store the bytes of
    `high` one byte further on shifts them.
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
    """The zstd objects of one thread: no two may share them."""

    def __init__(self) -> None:
        self._compressors: dict[int | None, Any] = {}
        self._decompressor: Any = None
        self.pairs = np.empty(_PUT_ELEMENTS, _INTEGERS[2])
        """For what `_put_pair` makes."""

    def compressor(self, level: int | None) -> Any:
        if level not in self._compressors:
            zstd = _zstandard()
            params = _parameters_for_floats(zstd) if level is None else None
            how = {"level": level} if params is None else {"compression_params": params}
            self._compressors[level] = zstd.ZstdCompressor(**how)
        return self._compressors[level]

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

    Exponents have few values in no order. Short matches among them are frequent, take longer to
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
            "compression needs zstandard, which is not installed; pip install zstandard"
        ) from error
    return zstandard


CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Zstd,)}
"""All codecs by name."""
