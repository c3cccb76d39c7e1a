"""docs/reference/format.md is enough to read a checkpoint: here is a reader made from it alone.

The reader, down to the line, uses numpy, json, xxhash and zstandard, and nothing of Ostraka. Dtypes
that numpy lacks come out as their bits, bfloat16 as uint16 and float8 as uint8; int4 comes out as
int8.
"""

import ast
import enum
import json
import math
import re
import struct
from base64 import b64decode
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.testing import run_processes
from places import flip

BITS_AND_CODE = {
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
    "float8_e3m4": (8, "U8"),
    "float8_e4m3": (8, "U8"),
    "float8_e4m3b11fnuz": (8, "U8"),
    "float6_e2m3fn": (8, "U8"),
    "float6_e3m2fn": (8, "U8"),
    "complex128": (128, "U8"),
    **dict.fromkeys(("int4", "uint4", "float4_e2m1fn"), (4, "U8")),
    **dict.fromkeys(("int2", "uint2"), (2, "U8")),
}


def read_runs(runs: list[list[int]]) -> list[int]:
    assert all(count >= 1 for _, _, count in runs)
    assert sum(count for _, _, count in runs) < 1_000_000
    return [start + step * i for start, step, count in runs for i in range(count)]


class Place(NamedTuple):
    """Where a block lies in the data of a file, and where in the file it is stored."""

    start: int
    stop: int
    stored_start: int
    stored_stop: int
    result: str | None


def decompress(stored: bytes, size: int) -> bytes:
    """The data of a compressed block, which has `size` bytes."""
    width = stored[0]
    assert 1 <= width <= 16
    assert size % width == 0
    at, groups = 1 + 4 * width, []
    for number in struct.unpack_from(f"<{width}I", stored, 1):
        length = number & 0x7FFFFFFF
        group = stored[at : at + length]
        at += length
        if number >> 31:
            assert zstandard.frame_content_size(group) == size // width
            group = zstandard.ZstdDecompressor().decompress(group)
        assert len(group) == size // width
        groups.append(np.frombuffer(group, np.uint8))
    assert at == len(stored)
    return np.stack(groups, axis=1).tobytes()


class Reader:
    """A checkpoint, read as docs/reference/format.md says."""

    def __init__(self, path: Path):
        data = (path / "_METADATA").read_bytes()
        self.metadata = json.loads(data)
        text, tail = data[:-46], data[-46:]
        assert tail == b',"digest":"%s"}\n' % xxhash.xxh3_128_hexdigest(text).encode()
        assert self.metadata["format"] == "ostraka"
        assert self.metadata["version"] in (1, 2)
        assert re.fullmatch("[0-9a-f]{16}", self.metadata["id"])
        self.directory = path / f"shards-{self.metadata['id']}"
        self.process_of = read_runs(self.metadata["process_of"])
        self.layouts = [
            (layout["grid"], read_runs(layout["owners"])) for layout in self.metadata["layouts"]
        ]
        self.variables: dict[str, Any] = {}
        self.entries = self._find_entries()
        self.files = self._read_file_table()
        self.indexes = {p: self._read_index(p, *rest) for p, *rest in self.metadata["indexes"]}
        self.places: dict[tuple[int, int], list[Place]] = {}
        self.shards = {key: self._read_shard(*key) for key in self.files}
        self.data = {key: self._read_data(key) for key in self.files}

    def _find_entries(self) -> dict[tuple[int, int], list[tuple[int, Any, int, int]]]:
        """For each file its boxes in order: leaf number, box, offset, size."""
        boxes: dict[tuple[int, int], list[tuple[int, int, Any, int]]] = {}
        for number, leaf in enumerate(self.metadata["leaves"]):
            grid, owners = self.layouts[leaf["layout"]]
            assert len(grid) == len(leaf["shape"])
            assert len(owners) == math.prod(grid)
            turns: dict[int, int] = {}
            for cell, owner in zip(product(*map(range, grid)), owners, strict=True):
                box = tuple(
                    (n * i // k, n * (i + 1) // k)
                    for n, k, i in zip(leaf["shape"], grid, cell, strict=True)
                )
                part = leaf.get("part", 0) + turns.get(owner, 0)
                turns[owner] = turns.get(owner, 0) + 1
                elements = math.prod(stop - start for start, stop in box)
                size = (elements * BITS_AND_CODE[leaf["dtype"]][0] + 7) // 8
                alignment = min(size & -size, 4096)
                boxes.setdefault((owner, part), []).append((-alignment, number, box, size))
        entries: dict[tuple[int, int], list[tuple[int, Any, int, int]]] = {}
        for key, unordered in boxes.items():
            ordered = sorted(unordered)
            ends = accumulate(size for *_, size in ordered)
            entries[key] = [
                (number, box, end - size, size)
                for (_, number, box, size), end in zip(ordered, ends, strict=True)
            ]
        return entries

    def _read_file_table(self) -> dict[tuple[int, int], tuple[int, int]]:
        names = ("device", "part", "header_bytes", "size")
        columns = [read_runs(self.metadata["files"][name]) for name in names]
        files = {(d, p): (header, size) for d, p, header, size in zip(*columns, strict=True)}
        assert files.keys() == self.entries.keys()
        for key, (header_bytes, size) in files.items():
            data_bytes = sum(entry[3] for entry in self.entries[key])
            assert size <= header_bytes + data_bytes
            assert size == header_bytes + data_bytes or self.metadata["version"] == 2
        return files

    def _read_index(self, process: int, size: int, digest: str) -> dict[str, Any]:
        data = (self.directory / f"process_{process:05d}.json").read_bytes()
        assert len(data) == size
        assert xxhash.xxh3_128_hexdigest(data) == digest
        index = json.loads(data)
        assert (index["format"], index["version"]) == ("ostraka-index", self.metadata["version"])
        assert (index["id"], index["process"]) == (self.metadata["id"], process)
        return index["files"]

    def _read_shard(self, device: int, part: int) -> bytes:
        """All of a file, every block of it compared with its digest."""
        name = f"shard_{device:05d}{f'-{part:05d}' if part else ''}.safetensors"
        header_bytes, size = self.files[device, part]
        data = (self.directory / name).read_bytes()
        described = self.indexes[self.process_of[device]][name]
        lengths = read_runs(described["blocks"])
        assert len(data) == size == described["size"] == sum(lengths)
        assert lengths[0] == header_bytes
        digests = described["digests"]
        assert len(digests) == 16 * len(lengths)
        for number, (length, stop) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
            found = xxhash.xxh3_64_hexdigest(data[stop - length : stop])
            assert found == digests[16 * number : 16 * number + 16], f"{name}, block {number}"
        self.places[device, part] = self._find_places(described, lengths)
        return data

    def _find_places(self, described: dict[str, Any], lengths: list[int]) -> list["Place"]:
        """The blocks of a file but the header: where in the data, where in the file."""
        of_data = read_runs(described["data"]) if "data" in described else lengths
        assert of_data[0] == lengths[0]
        results = described.get("results", "")
        places: list[Place] = []
        at, stored_at = 0, lengths[0]
        for length, stored in zip(of_data[1:], lengths[1:], strict=True):
            result = None
            if length != stored:
                assert stored < length <= 16 << 20
                result, results = results[:16], results[16:]
                assert len(result) == 16
            places.append(Place(at, at + length, stored_at, stored_at + stored, result))
            at, stored_at = at + length, stored_at + stored
        assert not results
        return places

    def _read_data(self, key: tuple[int, int]) -> bytes:
        """The boxes of a file, decompressed."""
        blocks: list[bytes] = []
        for place in self.places[key]:
            block = self.shards[key][place.stored_start : place.stored_stop]
            if place.result is not None:
                block = decompress(block, place.stop - place.start)
                assert xxhash.xxh3_64_hexdigest(block) == place.result
            blocks.append(block)
        data = b"".join(blocks)
        assert len(data) == sum(entry[3] for entry in self.entries[key])
        return data

    def _find_stored(self, key: tuple[int, int], offset: int, size: int) -> tuple[int, int, bool]:
        """Where a box is stored, counted from the end of the header; whether it is compressed."""
        header_bytes, file_bytes = self.files[key]
        if not size:
            return file_bytes - header_bytes, file_bytes - header_bytes, False
        places = [p for p in self.places[key] if p.start < offset + size and p.stop > offset]
        for place in places:
            assert place.result is None or offset <= place.start < place.stop <= offset + size
        first, last = places[0], places[-1]
        start = first.stored_start + (0 if first.result else offset - first.start)
        stop = last.stored_stop - (0 if last.result else last.stop - offset - size)
        return start - header_bytes, stop - header_bytes, any(p.result for p in places)

    def read_header(self, device: int, part: int) -> dict[str, Any]:
        header_bytes, _ = self.files[device, part]
        data = self.shards[device, part]
        assert header_bytes % 4096 == 0
        assert int.from_bytes(data[:8], "little") == header_bytes - 8
        return json.loads(data[8:header_bytes])

    def expect_header(self, device: int, part: int) -> dict[str, Any]:
        """What the header must be, from `_METADATA`."""
        tensors: dict[str, Any] = {}
        offsets: dict[str, Any] = {}
        opaque: dict[str, str] = {}
        codecs: dict[str, Any] = {}
        for number, box, offset, size in self.entries[device, part]:
            leaf = self.metadata["leaves"][number]
            bits, code = BITS_AND_CODE[leaf["dtype"]]
            shape, starts = [stop - start for start, stop in box], [start for start, _ in box]
            if bits < 8:
                shape, starts = [size], [0]
            elif leaf["dtype"] == "complex128":
                shape, starts = [*shape, 16], [*starts, 0]
            if code == "U8" and leaf["dtype"] != "uint8" and starts:
                starts[0] += 10**14
            start, stop, is_compressed = self._find_stored((device, part), offset, size)
            if is_compressed:
                codecs[leaf["path"]] = {
                    "codec": "zstd",
                    "dtype": leaf["dtype"],
                    "shape": [stop - start for start, stop in box],
                    "saved_offsets": [start for start, _ in box],
                }
                code, shape, starts = "U8", [stop - start], [10**14]
            elif code == "U8" and leaf["dtype"] != "uint8":
                opaque[leaf["path"]] = leaf["dtype"]
            tensors[leaf["path"]] = {"dtype": code, "shape": shape, "data_offsets": [start, stop]}
            offsets[leaf["path"]] = {"saved_offsets": starts}
        about = {
            "ostraka": str(self.metadata["version"]),
            "ostraka_id": self.metadata["id"],
            "ostraka_dtypes": opaque,
            "DCP_SHARDING_INFO": offsets,
            **({"ostraka_codecs": codecs} if codecs else {}),
        }
        return {"__metadata__": about, **tensors}

    def read_arrays(self) -> list[np.ndarray]:
        """Every array leaf, by number."""
        arrays: list[np.ndarray] = []
        for leaf in self.metadata["leaves"]:
            arrays.append(np.zeros(leaf["shape"], element_type(leaf["dtype"])))
        filled = [0] * len(arrays)
        for key, entries in self.entries.items():
            for number, box, offset, size in entries:
                data = self.data[key][offset : offset + size]
                shape = [stop - start for start, stop in box]
                where = tuple(slice(*pair) for pair in box)
                dtype = self.metadata["leaves"][number]["dtype"]
                arrays[number][where] = decode(data, dtype, math.prod(shape)).reshape(shape)
                filled[number] += math.prod(shape)
        assert filled == [array.size for array in arrays]
        return arrays

    def read_tree(self) -> Any:
        arrays = self.read_arrays()
        paths: list[tuple[int, str]] = []
        tree = self._build(self.metadata["tree"], "", arrays, paths)
        expected = {(number, leaf["path"]) for number, leaf in enumerate(self.metadata["leaves"])}
        assert expected <= set(paths)
        return tree

    def _build(self, node: Any, path: str, arrays: list[Any], paths: list[tuple[int, str]]) -> Any:
        if isinstance(node, int):
            paths.append((node, path or "."))
            return arrays[node]
        if node is not None and "same_as" in node:
            return self._build(self.variables[node["same_as"]], path, arrays, paths)
        if node is None or "items" not in node:
            return decode_value(node)
        if "kept" in node:
            return None
        if "nnx" in node or "variable" in node:
            if "variable" in node:
                self.variables[path] = node
            (item,) = node["items"]
            return self._build(item, path, arrays, paths)
        (kind,) = node.keys() - {"items", "keys", "static", "factory"}
        encoded = node.get("keys")
        if encoded is None:
            is_keyed = "dict" in kind or kind == "state"
            encoded = node[kind] if is_keyed else list(range(len(node["items"])))
        keys = [decode_key(key) for key in encoded]
        items = [
            self._build(item, join(path, show_key(key)), arrays, paths)
            for key, item in zip(encoded, node["items"], strict=True)
        ]
        if kind in ("list", "tuple"):
            return items if kind == "list" else tuple(items)
        static = {name: decode_value(value) for name, value in node.get("static", {}).items()}
        known = ("dict", "ordered_dict", "defaultdict", "namedtuple", "dataclass", "node", "state")
        assert kind in known
        return dict(zip(keys, items, strict=True)) | static


def times_two(element: int) -> int:
    return (element << 1 & 0xFF) ^ (0x1D if element & 0x80 else 0)


def times(one: int, other: int) -> int:
    product = 0
    for bit in range(8):
        if other >> bit & 1:
            shifted = one
            for _ in range(bit):
                shifted = times_two(shifted)
            product ^= shifted
    return product


def scaled(data: np.ndarray, factor: int) -> np.ndarray:
    return np.array([times(element, factor) for element in range(256)], np.uint8)[data]


def divided(data: np.ndarray, factor: int) -> np.ndarray:
    return scaled(data, next(e for e in range(1, 256) if times(e, factor) == 1))


class ParityReader:
    """The parity of a checkpoint that has lost files: needs `_METADATA` and what is there."""

    def __init__(self, path: Path):
        self.metadata = json.loads((path / "_METADATA").read_bytes())
        self.directory = path / f"shards-{self.metadata['id']}"
        table, files = self.metadata["parity"], self.metadata["files"]
        names = ("device", "part", "size")
        rows = list(zip(*(read_runs(files[name]) for name in names), strict=True))
        self.count = table["count"]
        assert self.count in (1, 2)
        members, self.groups = iter(read_runs(table["members"])), []
        for length in read_runs(table["lengths"]):
            assert 1 <= length <= 255
            self.groups.append([rows[next(members)] for _ in range(length)])
        assert sorted(row for group in self.groups for row in group) == sorted(rows)
        places = [(g, s) for g in range(len(self.groups)) for s in range(self.count)]
        columns = [read_runs(table[name]) for name in ("process", "header_bytes", "size")]
        digests = re.findall("[0-9a-f]{16}", table["digests"])
        self.files = dict(zip(places, zip(*columns, digests, strict=True), strict=True))
        process_of = read_runs(self.metadata["process_of"])
        self.copied: list[list[int]] = []
        for group in self.groups:
            of = {process_of[device] for device, _, _ in group}
            self.copied.append(sorted(of - {p for before in self.copied for p in before}))

    @staticmethod
    def name_of(device: int, part: int) -> str:
        return f"shard_{device:05d}{f'-{part:05d}' if part else ''}.safetensors"

    def read_sum(self, group: int, number: int) -> tuple[np.ndarray, dict[str, bytes]] | None:
        """The sum of a parity file and its copies of indexes, all compared; None if it is lost."""
        name = f"parity_{group:05d}{f'-{number:05d}' if number else ''}.safetensors"
        if not (self.directory / name).exists():
            return None
        _, header_bytes, size, digest = self.files[group, number]
        data = (self.directory / name).read_bytes()
        assert len(data) == size
        longest = max(size for _, _, size in self.groups[group])
        indexes = {p: s for p, s, _ in self.metadata["indexes"] if p in self.copied[group]}
        blocks = [*[4 << 20] * (longest // (4 << 20)), longest % (4 << 20)]
        lengths = [header_bytes, *filter(None, blocks), *indexes.values()]
        table = data[sum(lengths) :]
        assert len(table) == 16 * len(lengths)
        assert xxhash.xxh3_64_hexdigest(table) == digest
        for place, (length, stop) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
            found = xxhash.xxh3_64_hexdigest(data[stop - length : stop])
            assert found.encode() == table[16 * place : 16 * place + 16]
        copies, at = {}, header_bytes + longest
        for process, length in indexes.items():
            copies[f"process_{process:05d}.json"] = data[at : at + length]
            at += length
        header = json.loads(data[8:header_bytes])
        about = json.loads(header["__metadata__"]["ostraka_parity"])
        assert (about["group"], about["number"]) == (group, number)
        assert about["members"] == [[self.name_of(d, p), s] for d, p, s in self.groups[group]]
        assert list(header) == ["__metadata__", "parity", *copies, "digests"]
        assert header["parity"] == {"dtype": "U8", "shape": [longest], "data_offsets": [0, longest]}
        return np.frombuffer(data, np.uint8, longest, header_bytes), copies

    def lost_files(self) -> dict[str, bytes]:
        """All that is lost, whole."""
        found: dict[str, bytes] = {}
        for number, group in enumerate(self.groups):
            read = {s: self.read_sum(number, s) for s in range(self.count)}
            sums = {s: both[0].copy() for s, both in read.items() if both is not None}
            for both in read.values():
                copies = {} if both is None else both[1]
                found |= {n: c for n, c in copies.items() if not (self.directory / n).exists()}
            lost: list[tuple[str, int, int]] = []
            factor = 1
            for device, part, size in group:
                file = self.directory / self.name_of(device, part)
                if file.exists():
                    data = np.fromfile(file, np.uint8)
                    for s, rest in sums.items():
                        rest[: len(data)] ^= scaled(data, factor) if s else data
                else:
                    lost.append((file.name, size, factor))
                factor = times_two(factor)
            for (name, size, _), data in zip(lost, self._solve(lost, sums), strict=True):
                found[name] = data[:size].tobytes()
        return found

    @staticmethod
    def _solve(lost: list[tuple[str, int, int]], sums: dict[int, np.ndarray]) -> list[np.ndarray]:
        """The lost members, from what is left of the sums without all others."""
        assert len(lost) <= len(sums)
        if len(lost) == 2:
            one, other = lost[0][2], lost[1][2]
            first = divided(sums[1] ^ scaled(sums[0], other), one ^ other)
            return [first, sums[0] ^ first]
        if len(lost) == 1:
            return [sums[0] if 0 in sums else divided(sums[1], lost[0][2])]
        return []


def decode_key(key: Any) -> Any:
    return decode_value(key) if isinstance(key, dict) else key


def show_key(key: Any) -> str:
    """How a key is written in a path."""
    if not isinstance(key, dict):
        return str(key)
    ((kind, content),) = key.items()
    if kind == "enum":
        return f"{content[1].rpartition('.')[2]}.{content[2]}"
    if kind == "tuple":
        texts = [repr(k["str"]) if k and "str" in k else show_key(k) for k in content]
        return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
    return str(decode_value(key))


def join(path: str, key: str) -> str:
    text = key.replace("~", "~0").replace("/", "~1")
    if key == "__metadata__":
        text = "~2__metadata__"
    return f"{path}/{text}" if path else text or "~"


def decode_value(node: Any) -> Any:
    if node is None:
        return None
    ((kind, content),) = node.items()
    if kind == "int":
        return int(content, 16) if isinstance(content, str) else content
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind == "bytes":
        return b64decode(content)
    if kind == "float64":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind == "complex128":
        return complex(*struct.unpack(">dd", bytes.fromhex(content)))
    if kind == "surrogates":
        return b64decode(content).decode(errors="surrogatepass")
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(map(decode_value, content))
    if kind == "mapping":
        return {decode_value(key): decode_value(value) for key, value in content}
    if kind == "enum":
        return decode_value(content[3])
    if kind == "numpy":
        dtype, data = content
        is_text = dtype in ("str_", "bytes_")
        return decode_value(data) if is_text else decode(bytes.fromhex(data), dtype, 1)[0]
    assert kind in ("bool", "str")
    return content


def element_type(dtype: str) -> str:
    """The numpy dtype in which elements come out."""
    bits, _ = BITS_AND_CODE[dtype]
    if bits < 8:
        return "int8" if dtype.startswith("int") else "uint8"
    if dtype == "bfloat16":
        return "<u2"
    if dtype.startswith(("float8_", "float6_")):
        return "uint8"
    return np.dtype(dtype).newbyteorder("<").str


def decode(data: bytes, dtype: str, elements: int) -> np.ndarray:
    bits, _ = BITS_AND_CODE[dtype]
    if bits >= 8:
        return np.frombuffer(data, element_type(dtype))
    in_order = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    assert not in_order[elements * bits :].any()
    digits = in_order[: elements * bits].reshape(elements, bits).astype(np.int16)
    numbers = digits @ (1 << np.arange(bits, dtype=np.int16))
    if dtype.startswith("int"):
        numbers = np.where(digits[:, -1], numbers - (1 << bits), numbers)
    return numbers.astype(element_type(dtype))


# ------------------------------------------------------------------------------------------------
# What Ostraka saves, read with the above


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclass
class Moments:
    mean: Any
    count: int
    name: str = field(metadata={"static": True})


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("x", "y"))


def bits_of(value: Any) -> np.ndarray:
    """An array as the reader gives it."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    name = array.dtype.name
    if name in ("int2", "int4"):
        return array.astype(np.int8)
    if name in ("uint2", "uint4"):
        return array.astype(np.uint8)
    return array.view(np.uint8) if name == "float4_e2m1fn" else array.view(element_type(name))


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray | np.generic | jax.Array):
        bits = bits_of(expected)
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (bits.dtype, bits.shape)
        assert found.tobytes() == bits.tobytes()
    elif isinstance(expected, Moments):
        assert_same(found, vars(expected))
    elif isinstance(expected, Pair):
        assert_same(found, expected._asdict())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(expected)
        assert repr(found) == repr(expected)  # nan is nan, and -0.0 is not 0.0


def check(path: Path, expected: Any) -> Reader:
    """Read a checkpoint and compare all that the document speaks of."""
    reader = Reader(path)
    assert_same(reader.read_tree(), expected)
    for key in reader.files:
        header = reader.read_header(*key)
        about = header["__metadata__"]
        for name in {"ostraka_dtypes", "DCP_SHARDING_INFO", "ostraka_codecs"} & about.keys():
            about[name] = json.loads(about[name])
        wanted = reader.expect_header(*key)
        assert list(header) == list(wanted)
        assert header == wanted
    return reader


def count(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def make_sharded(mesh: Mesh) -> dict[str, Any]:
    def put(array: np.ndarray, *axes: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*axes)))

    return {
        "both": put(count((16, 6)), "x", "y"),
        "swapped": put(count((6, 16)), "y", "x"),
        "together": put(count((64,), np.int32), ("y", "x")),
        "half": put(count((12, 10)), None, "y"),
        "deep": put(count((2, 4, 6, 3)), None, "x", "y"),
        "replicated": put(count((33, 7))),
        "large and replicated": put(count((512, 300))),
        "one device": jnp.asarray(count((5, 3))),
        "zero dimensions": put(np.array(3.0, np.float32)),
        "empty": put(count((8, 0)), "x"),
        "host": count((1001, 3), np.float64),
        "host scalar": np.int16(-7),
        "fortran": np.asfortranarray(count((9, 5))),
        "big-endian": count((4,), ">f8"),
    }


@pytest.mark.parametrize("max_file_bytes", [4 << 30, 1 << 14, 1 << 13])
def test_sharded_arrays(tmp_path: Path, mesh: Mesh, max_file_bytes: int):
    tree = make_sharded(mesh)
    tree["big-endian"] = tree["big-endian"].astype("<f8")
    ostraka.save(tmp_path / "c", make_sharded(mesh), max_file_bytes=max_file_bytes)
    reader = check(tmp_path / "c", tree)
    leaves = {leaf["path"]: leaf for leaf in reader.metadata["leaves"]}
    assert leaves["together"]["spec"] == [["y", "x"]]
    assert leaves["half"]["spec"] == [[], ["y"]]
    assert leaves["replicated"]["spec"] == []
    described = reader.metadata["meshes"][leaves["both"]["mesh"]]
    assert (described["axes"], described["shape"]) == (["x", "y"], [4, 2])
    assert read_runs(described["devices"]) == [
        jax.devices().index(device) for device in mesh.devices.flat
    ]
    alone = reader.metadata["meshes"][leaves["one device"]["mesh"]]
    assert alone == {"axes": [], "shape": [], "devices": [[0, 0, 1]], "types": []}
    assert "mesh" not in leaves["host"]
    assert {leaf["kind"] for leaf in leaves.values()} == {"jax", "numpy", "scalar"}
    if max_file_bytes < 1 << 20:
        assert max(part for _, part in reader.files) > 1
        assert any(len(owners) > len(set(owners)) for _, owners in reader.layouts)


@pytest.mark.parametrize("max_file_bytes", [4 << 30, 1 << 13])
def test_every_dtype(tmp_path: Path, max_file_bytes: int):
    tree: dict[str, Any] = {}
    random = np.random.default_rng(0)
    for name, (bits, _) in BITS_AND_CODE.items():
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        numbers = random.integers(0, 1 << min(bits, 6), (700, 5))
        if bits < 8 and not name.startswith("float"):
            low = -(1 << (bits - 1)) if name.startswith("int") else 0
            numbers = random.integers(low, low + (1 << bits), (700, 5))
        tree[name] = numbers.astype(dtype)
    ostraka.save(tmp_path / "c", tree, max_file_bytes=max_file_bytes)
    check(tmp_path / "c", tree)


def test_sharded_dtypes_of_less_than_a_byte(tmp_path: Path, mesh: Mesh):
    numbers = np.arange(3200 * 9).reshape(3200, 9) % 16
    tree = {
        str(spec): jax.device_put((numbers - 8).astype(jnp.int4), NamedSharding(mesh, spec))
        for spec in (P(), P("x"), P(("x", "y")), P("y"))
    }
    tree["bits"] = jax.device_put(numbers.astype(jnp.uint4), NamedSharding(mesh, P("x")))
    ostraka.save(tmp_path / "c", tree, max_file_bytes=1 << 13)
    reader = check(tmp_path / "c", tree)
    assert max(part for _, part in reader.files) > 1


def test_keys(tmp_path: Path, mesh: Mesh):
    tree = {
        "one": jax.random.key(1),
        "many": jax.device_put(
            jax.random.split(jax.random.key(2), (8, 3)), NamedSharding(mesh, P("x"))
        ),
        "rbg": jax.random.key(3, impl="rbg"),
    }
    ostraka.save(tmp_path / "c", tree)
    reader = check(tmp_path / "c", tree)
    described = {leaf["path"]: leaf for leaf in reader.metadata["leaves"]}
    assert described["one"]["kind"] == "key"
    assert described["many"]["prng"] == "threefry2x32"
    assert described["many"]["shape"] == [8, 3, 2]
    assert described["many"]["spec"] == [["x"]]
    assert described["rbg"]["shape"] == [4]


def test_containers_and_values(tmp_path: Path):
    tree = {
        "list": [count((3,)), [], [None], (count((2,)), ())],
        "dict": {"z": 1, 7: count((1,)), -1: {}, "": {"": count((4,))}},
        "": {"inside": np.int8(1)},
        "~": np.int8(2),
        "a/b": {"~1": np.int8(3), "__metadata__": np.int8(4)},
        "__metadata__": np.int8(5),
        "ordered": OrderedDict(b=count((2,)), a=2),
        "pair": Pair(count((2, 2)), "right"),
        "moments": Moments(count((2,)), 3, "adam"),
        "unicode": {"é\n\u2028": np.int8(6), "emoji": "🏺"},
        "values": [True, 0, -(1 << 53), 1 << 200, 0.1, -0.0, float("nan"), float("-inf")],
        "others": [complex(1.5, float("inf")), "", b"", bytes(range(256)), None],
    }
    ostraka.save(tmp_path / "c", tree, metadata={"note": ["é", 1.5, None]})
    assert check(tmp_path / "c", tree).metadata["user"] == {"note": ["é", 1.5, None]}


class Shade(enum.Enum):
    DARK = "dark"


def test_keys_of_every_kind_and_values_that_json_lacks(tmp_path: Path):
    keys = [True, 2.5, None, (), ("kernel", ("u", 1)), b"k", 1j, np.int32(3), np.str_("s")]
    minus_nan = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    tree = {
        "keys": {key: count((number,)) for number, key in enumerate(keys)},
        "enum": {Shade.DARK: count((2,))},
        "default": defaultdict(list, {"a": 1}),
        "nan": minus_nan,
        "complex": complex(0.0, minus_nan),
        "text": "\ud83d\ude00",
    }
    ostraka.save(tmp_path / "c", tree)
    read = Reader(tmp_path / "c").read_tree()
    assert struct.pack(">d", read.pop("nan")) == struct.pack(">d", tree.pop("nan"))
    number = tree.pop("complex").imag
    assert struct.pack(">d", read.pop("complex").imag) == struct.pack(">d", number)
    tree["enum"] = {"dark": count((2,))}
    assert_same(read, tree)


def test_what_is_at_several_places(tmp_path: Path):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    array = count((4,))
    odd: Any = len
    tree = {
        "model": model,
        "kernels": [model.kernel],
        "a": array,
        "b": Moments(mean=array, count=odd, name="a function in place of a number"),
    }
    ostraka.save(tmp_path / "c", tree)
    reader = Reader(tmp_path / "c")
    read = reader.read_tree()
    assert [leaf["path"] for leaf in reader.metadata["leaves"]] == [
        "model/bias",
        "model/kernel",
        "a",
    ]
    assert reader.metadata["tree"]["items"][1]["items"] == [{"same_as": "model/kernel"}]
    assert read["kernels"][0] is read["model"]["kernel"]
    assert read["a"] is read["b"]["mean"]
    assert read["b"]["count"] is None


def test_how_arrays_lay(tmp_path: Path):
    pinned = SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
    tree = {
        "free": jnp.zeros(2),
        "weak": jnp.asarray(2.0),
        "pinned": jax.device_put(count((2,)), pinned),
    }
    ostraka.save(tmp_path / "c", tree)
    leaves = {leaf["path"]: leaf for leaf in check(tmp_path / "c", tree).metadata["leaves"]}
    assert {path: leaf.get("uncommitted") for path, leaf in leaves.items()} == {
        "free": True,
        "weak": True,
        "pinned": None,
    }
    assert [path for path, leaf in leaves.items() if leaf.get("weak")] == ["weak"]
    assert {leaf.get("memory") for leaf in leaves.values()} == {None, "pinned_host"}


def test_compressed_blocks(tmp_path: Path, mesh: Mesh):
    numbers = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return numbers.standard_normal(shape, np.float32).astype(dtype)

    tree = {
        **make_sharded(mesh),
        "rows": jax.device_put(normal(2048, 1500), NamedSharding(mesh, P("x", "y"))),
        "whole": jax.device_put(normal(2100, 1024), jax.devices()[1]),
        "bfloat16": jax.device_put(normal(777, 999, dtype=ml_dtypes.bfloat16), jax.devices()[1]),
        "complex128": normal(300, 100).astype(np.complex128),
        "int4": jax.device_put(normal(1031, 999).astype(ml_dtypes.int4), jax.devices()[1]),
        "float8": normal(1100, 1024, dtype=ml_dtypes.float8_e4m3fn),
        "noise": numbers.integers(0, 256, 3 << 20, np.uint8),
        "partly": jax.device_put(
            np.concatenate(
                [np.zeros(9 << 20, np.uint8), numbers.integers(0, 256, 5 << 20, np.uint8)]
            ),
            jax.devices()[1],
        ),
    }
    ostraka.save(tmp_path / "c", tree, compress="zstd")
    tree["big-endian"] = count((4,), np.float64)
    reader = check(tmp_path / "c", tree)
    assert reader.metadata["version"] == 2
    headers = [reader.read_header(*key)["__metadata__"] for key in reader.files]
    shown = set().union(*(json.loads(header.get("ostraka_codecs", "{}")) for header in headers))
    large = {"rows", "whole", "bfloat16", "complex128", "int4", "float8", "partly"}
    assert shown - {"large and replicated"} == large
    assert any(place.result is None for places in reader.places.values() for place in places)


@pytest.mark.parametrize("options", [{}, {"compress": "zstd"}, {"max_file_bytes": 9000}], ids=str)
def test_parity(tmp_path: Path, mesh: Mesh, options: dict[str, Any]):
    tree = make_sharded(mesh) | {"large": jnp.arange(3 << 20, dtype=jnp.float32)}
    del tree["big-endian"]
    if "max_file_bytes" in options:
        del tree["large"]
    ostraka.save(tmp_path / "c", tree, parity=2, **options)
    reader = check(tmp_path / "c", tree)
    blocks = [read_runs(file["blocks"]) for file in reader.indexes[0].values()]
    assert (max(map(len, blocks)) > 2) == ("large" in tree)
    shards = next((tmp_path / "c").glob("shards-*"))
    files = {file.name: file.read_bytes() for file in shards.iterdir()}
    names = sorted(name for name in files if name.startswith("shard_"))
    for lost in (
        [names[0], names[-1]],
        [names[2], "process_00000.json"],
        [names[1], "parity_00000.safetensors"],
        ["parity_00000-00001.safetensors", "process_00000.json"],
    ):
        for name in lost:
            (shards / name).unlink()
        found = ParityReader(tmp_path / "c").lost_files()
        wanted = [name for name in lost if not name.startswith("parity")]
        assert found == {name: files[name] for name in wanted}
        for name in lost:
            (shards / name).write_bytes(files[name])


def test_files_that_are_added_to_a_step(tmp_path: Path):
    ostraka.save(tmp_path / "c", {"a": count((3,))})
    ostraka.annotate(
        tmp_path / "c", metrics={"loss": 0.5, "nan": math.nan, "low": -math.inf}, pinned=True
    )
    reader = check(tmp_path / "c", {"a": count((3,))})
    assert (tmp_path / "c/_PINNED").read_bytes() == b""
    assert json.loads((tmp_path / "c/_METRICS").read_bytes()) == {
        "save": reader.metadata["id"],
        "metrics": {"loss": 0.5, "nan": "nan", "low": "-inf"},
    }


def test_the_examples_of_the_field():
    assert times_two(0x80) == 0x1D
    assert times(0x80, 0x80) == 0x13


def test_the_example_of_groups():
    data = np.array([1, 2, -3], np.float32).tobytes()
    groups = [data[place::4].hex(" ") for place in range(4)]
    text = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text("utf-8")
    assert ", ".join(f"`{group}`" for group in groups) in text


@pytest.mark.parametrize("tree", [count((3, 2)), [{}, ""], 7, [None, 0]])
def test_small_trees(tmp_path: Path, tree: Any):
    ostraka.save(tmp_path / "c", tree)
    check(tmp_path / "c", tree)


def save_with_others(path: str) -> None:
    process = jax.process_index()
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    sharding = NamedSharding(mesh, P("x", "y"))
    whole = count((8, 6))
    tree = {
        "sharded": jax.make_array_from_callback((8, 6), sharding, lambda index: whole[index]),
        "same": count((5, 5)),
        "same on devices": jnp.asarray(count((3,))),
        "own": np.full((3,), process, np.int16),
        "own key": jax.random.key(process),
    }
    ostraka.save(path, tree)


def test_several_processes(tmp_path: Path):
    run_processes(save_with_others, str(tmp_path / "c"), processes=2, devices_per_process=2)
    keys = np.stack([jax.random.key_data(jax.random.key(process)) for process in range(2)])
    expected = {
        "sharded": count((8, 6)),
        "same": count((5, 5)),
        "same on devices": count((3,)),
        "own": np.array([[0] * 3, [1] * 3], np.int16),
        "own key": keys,
    }
    reader = check(tmp_path / "c", expected)
    assert reader.process_of == [0, 0, 1, 1]
    assert sorted(reader.indexes) == [0, 1]
    described = {leaf["path"]: leaf for leaf in reader.metadata["leaves"]}
    assert [path for path, leaf in described.items() if leaf.get("per_process")] == [
        "own",
        "own key",
    ]
    assert [path for path, leaf in described.items() if "mesh" in leaf] == ["sharded"]


@pytest.mark.parametrize("name", ["_METADATA", "process_*.json", "shard_*.safetensors"])
def test_the_reader_finds_damage(tmp_path: Path, name: str):
    ostraka.save(tmp_path / "c", {"a": count((100,))})
    for file in (tmp_path / "c").rglob(name):
        size = file.stat().st_size
        for position in (0, size // 2, size - 1):
            flip(file, position)
            with pytest.raises((AssertionError, ValueError), match=".*"):
                Reader(tmp_path / "c")
            flip(file, position)
    Reader(tmp_path / "c")


def test_the_reader_uses_nothing_of_ostraka():
    source, line, _ = Path(__file__).read_text("utf-8").partition(f"\n# {'-' * 96}\n")
    assert line
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert {"np", "json", "xxhash"} <= names
    assert not {"ostraka", "jax", "jnp", "ml_dtypes", "run_processes", "flip"} & names


def test_the_document_has_every_dtype():
    from ostraka.common.dtypes import DTYPES

    assert {name: (dtype.bits, dtype.code) for name, dtype in DTYPES.items()} == BITS_AND_CODE
    text = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text("utf-8")
    words = {*BITS_AND_CODE, *(code for _, code in BITS_AND_CODE.values())}
    assert [word for word in words if f"`{word}`" not in text] == []
