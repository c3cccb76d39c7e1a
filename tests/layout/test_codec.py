"""Blocks to what is stored of them and back, and what a rule for compression may be."""

import struct
import sys
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import ostraka
from ostraka.errors import UnsupportedFormat
from ostraka.layout import codec as _codec
from ostraka.layout.codec import Undecodable, Zstd, decode
from ostraka.layout.spec import LeafSpec

FOR_FLOATS = Zstd(None)
BLOCK = 4 << 20


def bytes_of(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def joined(pieces: list[Any]) -> np.ndarray:
    return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])


def ratio_of(array: Any, codec: Zstd = FOR_FLOATS) -> float:
    """The stored size of a block over its own, seen to come back as it was."""
    data = bytes_of(array)
    pieces = codec.encode(data, np.asarray(array).dtype.itemsize)
    assert pieces is not None
    stored = joined(pieces)
    out = np.empty_like(data)
    decode(stored, out)
    assert (out == data).all()
    return stored.size / data.size


# There and back


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 16),
    count=st.integers(1, 60_000),
    values=st.integers(1, 256),
    level=st.sampled_from([None, 1, 3, 19]),
    seed=st.integers(0, 1000),
)
def test_what_is_stored_comes_back(width: int, count: int, values: int, level: Any, seed: int):
    numbers = np.random.default_rng(seed)
    data = np.stack(
        [numbers.integers(0, 1 + (values * place) % 256, count) for place in range(width)], axis=1
    )
    data = data.astype(np.uint8).reshape(-1)
    pieces = Zstd(level).encode(data, width)
    if pieces is None:
        return
    stored = joined(pieces)
    assert stored.size < data.size
    out = np.empty_like(data)
    decode(stored, out)
    assert (out == data).all()


def test_a_block_that_does_not_get_smaller_is_not_compressed():
    noise = np.random.default_rng(0).integers(0, 256, BLOCK, np.uint8)
    assert all(FOR_FLOATS.encode(noise, width) is None for width in (1, 2, 4, 8))
    assert FOR_FLOATS.encode(noise[:1], 1) is None


def test_a_group_is_compressed_or_kept_as_it_is():
    weights = np.random.default_rng(0).standard_normal(BLOCK // 4).astype(np.float32)
    pieces = FOR_FLOATS.encode(bytes_of(weights), 4)
    assert pieces is not None
    width, *lengths = struct.unpack("<B4I", pieces[0])
    assert width == 4
    assert lengths[:3] == [BLOCK // 4] * 3  # of the mantissa, as they are
    assert lengths[3] == (1 << 31) + len(pieces[4])
    assert len(pieces[4]) < BLOCK // 4 // 2
    assert zstandard.ZstdDecompressor().decompress(pieces[4]) == bytes_of(weights)[3::4].tobytes()


def test_groups_that_do_not_compress_are_sampled_only():
    class Counted:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def compress(self, data: np.ndarray) -> bytes:
            self.sizes.append(data.size)
            return zstandard.compress(data.tobytes())

    compressor = Counted()
    numbers = np.random.default_rng(0)
    noise = numbers.integers(0, 256, 1 << 20, np.uint8)
    assert _codec._compress(noise, compressor) is None
    assert compressor.sizes == [16 << 10]
    assert _codec._compress(noise % 4, compressor) is not None
    assert compressor.sizes == [16 << 10, 16 << 10, 1 << 20]


# How small


@pytest.mark.parametrize(
    ("dtype", "most"), [(ml_dtypes.bfloat16, 0.70), (np.float32, 0.86), (np.float16, 0.95)]
)
@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_normal_weights(dtype: Any, most: float, scale: float):
    weights = np.random.default_rng(0).standard_normal(BLOCK // 4) * scale
    assert ratio_of(weights.astype(dtype)) <= most


def test_what_is_all_alike_takes_nothing():
    assert ratio_of(np.zeros(BLOCK // 4, np.float32)) < 0.001
    assert ratio_of(np.full(BLOCK // 4, 1e-8, np.float32)) < 0.001
    assert ratio_of(np.arange(BLOCK // 4, dtype=np.int32)) < 0.01


def test_a_level_is_that_of_zstd():
    words = b"the quick brown fox jumps over the lazy dog".split()
    chosen = np.random.default_rng(0).choice(words, BLOCK // 80)
    text = np.frombuffer(b" ".join(chosen), np.uint8)
    assert ratio_of(text, Zstd(19)) < ratio_of(text, Zstd(1)) < ratio_of(text)


# What is stored may lie


def frame(data: bytes, size: int) -> bytes:
    """A frame of zstd that claims to hold `size` bytes."""
    claimed = zstandard.ZstdCompressor(level=1).compress(data)
    assert claimed[4] >> 6 in (0, 1, 2)
    body = zstandard.ZstdCompressor(write_content_size=False, level=1).compress(data)
    # The descriptor says "8 bytes of size, no window", and the size follows.
    window_bytes = 1 if not body[4] & 0x20 else 0
    head = body[:4] + bytes([0b11100000]) + size.to_bytes(8, "little")
    return head + body[5 + window_bytes :]


def block(groups: list[bytes], flags: list[int], lengths: list[int] | None = None) -> np.ndarray:
    lengths = lengths or [len(group) for group in groups]
    numbers = [length | flag << 31 for length, flag in zip(lengths, flags, strict=True)]
    head = struct.pack(f"<B{len(groups)}I", len(groups), *numbers)
    return np.frombuffer(head + b"".join(groups), np.uint8)


HALF = 1 << 16
ZEROS = zstandard.ZstdCompressor().compress(bytes(HALF))
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(b"a")
LIES = {
    "no width": (np.zeros(9, np.uint8), "begin with the byte 0"),
    "a width of 255": (np.full(1000, 255, np.uint8), "begin with the byte 255"),
    "a width that does not divide": (block([b"a"] * 3, [0] * 3), "elements of 3 bytes"),
    "no lengths": (np.array([16, 0, 0], np.uint8), "elements of 16 bytes"),
    "a group too short": (block([ZEROS, b"a"], [1, 0]), "has 1 bytes, not 65,536"),
    "a group too long": (block([ZEROS, bytes(HALF + 1)], [1, 0]), "has 65,537 bytes"),
    "a length past the end": (
        block([ZEROS] * 2, [1, 1], [len(ZEROS), 2**31 - 1]),
        "groups 2,147,4",
    ),
    "bytes after the last": (block([ZEROS, ZEROS + b"a"], [1, 1], [len(ZEROS)] * 2), "its groups"),
    "bytes after a frame": (block([ZEROS, ZEROS + b"a"], [1, 1]), "zstd can't read it"),
    "no frame": (block([ZEROS, b"a" * 30], [1, 1]), "zstd can't read it"),
    "an empty frame": (block([ZEROS, b""], [1, 1]), "zstd can't read it|another length"),
    "a frame of a terabyte": (block([ZEROS, frame(bytes(HALF), 1 << 40)], [1, 1]), "another len"),
    "a frame with more": (block([ZEROS, frame(bytes(1 << 24), HALF)], [1, 1]), "zstd can't read"),
    "a frame with less": (block([ZEROS, frame(b"abc", HALF)], [1, 1]), "zstd can't read it"),
    "a frame that does not say": (block([ZEROS, UNSIZED], [1, 1]), "another length"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_stored_may_lie(lie: str):
    stored, found = LIES[lie]
    with pytest.raises(Undecodable, match=found):
        decode(stored, np.empty(2 * HALF, np.uint8))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2000), st.integers(0, 255))
def test_any_changed_byte_gives_an_error_or_other_bytes(position: int, value: int):
    """Never more than the block: whether the bytes are right is seen by their digest."""
    data = np.arange(40_000, dtype=np.int32).view(np.uint8)
    stored = joined(FOR_FLOATS.encode(data, 4) or [])
    stored[position % stored.size] = value
    out = np.empty_like(data)
    with suppress(Undecodable):
        decode(stored, out)


# Rules


def leaves(*paths: str) -> list[LeafSpec]:
    return [LeafSpec(path, "numpy", "float32", (1 << 20,)) for path in paths]


def test_rules():
    tree = leaves("model/a", "model/b", "optimizer/mu")
    assert _codec.codecs_of(None, tree) == {}
    assert _codec.codecs_of("zstd", tree) == dict.fromkeys(range(3), FOR_FLOATS)
    assert _codec.codecs_of(("zstd", 7), tree) == dict.fromkeys(range(3), Zstd(7))
    rule = {"model/b": None, "model": "zstd", "**/mu": ["zstd", 3]}
    _codec.check_compress(rule, tree)
    assert _codec.codecs_of(rule, tree) == {0: FOR_FLOATS, 2: Zstd(3)}
    assert _codec.codecs_of({"model": "zstd"}, tree) == dict.fromkeys(range(2), FOR_FLOATS)


@pytest.mark.parametrize(
    "rule",
    ["lz4", "ZSTD", True, 3, ("zstd",), ("zstd", 0), ("zstd", 23), ("zstd", True), ("lz4", 3)],
)
def test_rules_that_are_none(rule: Any):
    for given_rule in (rule, {"a": rule}):
        with pytest.raises(ValueError, match=r"compress is .*; it must be None, 'zstd', \('zstd'"):
            _codec.check_compress(given_rule, leaves("a"))


def test_a_pattern_that_matches_nothing():
    with pytest.raises(
        ValueError, match=r"compress=.'modle': …. matches no array .*\(did you mean 'model'\?\)"
    ):
        _codec.check_compress({"modle": "zstd"}, leaves("model/a"))


def test_small_leaves_are_left_alone():
    small = LeafSpec("a", "numpy", "float32", ((1 << 14) - 1,))
    assert _codec.codecs_of("zstd", [small]) == {}


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedFormat, match="pip install zstandard"):
        _codec.check_compress("zstd")
    _codec.check_compress(None)


def test_another_codec_is_one_entry_of_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    @dataclass(frozen=True)
    class Zlib:
        level: int | None
        name: ClassVar[str] = "zlib"
        levels: ClassVar[range] = range(1, 10)
        first_bytes: ClassVar[range] = range(0x78, 0x79)

        def encode(self, data: Any, width: int) -> list[Any] | None:
            packed = zlib.compress(data.tobytes(), self.level or 6)
            return [packed] if len(packed) < data.size else None

        @staticmethod
        def decode(stored: Any, out: Any) -> None:
            out[:] = np.frombuffer(zlib.decompress(stored.tobytes()), np.uint8)

        @staticmethod
        def check_installed() -> None: ...

    monkeypatch.setitem(_codec.CODECS, "zlib", Zlib)
    tree = {"w": np.arange(1 << 18, dtype=np.int32), "v": np.ones(1 << 18)}
    ostraka.save(tmp_path / "c", tree, compress={"w": ("zlib", 9), "v": "zstd"})
    restored = ostraka.restore(tmp_path / "c")
    assert all(np.array_equal(restored[name], tree[name]) for name in tree)
    assert ostraka.verify(tmp_path / "c").ok
    shards = [file.read_bytes() for file in (tmp_path / "c").glob("shards-*/*.safetensors")]
    assert sum(map(len, shards)) < 1 << 20
    assert any(b'\\"codec\\":\\"zlib\\"' in shard[:4096] for shard in shards)
    with pytest.raises(ValueError, match=r"'zlib', \('zlib', level\) with a level from 1 to 9"):
        ostraka.save(tmp_path / "d", tree, compress=("zlib", 10))
