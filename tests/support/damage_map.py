"""Which byte of a checkpoint belongs to what, by the safetensors package and json alone.

What Ostraka says about damage is compared with this, so nothing of Ostraka is used here.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors

_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


@dataclass(frozen=True)
class StoredBox:
    """A box of a leaf, and where its bytes lie in a file."""

    leaf: str
    start: int
    stop: int
    shape: tuple[int, ...]
    begins: tuple[int, ...]
    is_compressed: bool
    element_bytes: int

    def index_at(self, position: int) -> tuple[int, ...] | None:
        """The element of the whole leaf that a byte belongs to; None if that can't be told."""
        if self.is_compressed or not self.element_bytes:
            return None
        number = (position - self.start) // self.element_bytes
        index: list[int] = []
        for extent in reversed(self.shape):
            number, at = divmod(number, extent)
            index.append(at)
        return tuple(begin + at for begin, at in zip(self.begins, reversed(index), strict=True))


class DamageMap:
    """The files of a checkpoint on disk, and what is where in them."""

    def __init__(self, path: Path):
        self.path = path
        found = [file for file in path.rglob("*") if file.is_file()]
        names = sorted(str(file.relative_to(path)) for file in found)
        self.files = [name for name in names if not name.endswith("/metadata.json")]
        """All but the second copy of `_METADATA`, which no reader touches."""
        self.sizes = {name: (path / name).stat().st_size for name in self.files}
        self.shards = [name for name in self.files if "/shard_" in name]
        self.indexes = [name for name in self.files if name.endswith(".json")]
        self.boxes = {name: read_boxes(path / name) for name in self.shards}
        """Of each shard, those that have any bytes."""
        self.process_of: dict[str, int] = {}
        """The process that wrote each file, by the indexes."""
        for name in self.indexes:
            index = json.loads((path / name).read_bytes())
            names = [f"{name.rpartition('/')[0]}/{file}" for file in index["files"]]
            self.process_of.update((file, index["process"]) for file in [name, *names])

    def leaves_in(self, file: str, start: int = 0, stop: int = 1 << 62) -> set[str]:
        """The leaves that have bytes in a range of a file."""
        boxes = self.boxes.get(file, [])
        return {box.leaf for box in boxes if box.start < stop and box.stop > start}

    def box_at(self, file: str, position: int) -> StoredBox | None:
        boxes = self.boxes.get(file, [])
        return next((box for box in boxes if box.start <= position < box.stop), None)


def read_boxes(file: Path) -> list[StoredBox]:
    """What a shard file holds, in the order of the bytes: the package must find the same there."""
    data = file.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    with safetensors.safe_open(file, "numpy") as opened:
        about = opened.metadata()
    codecs: dict[str, Any] = json.loads(about.get("ostraka_codecs", "{}"))
    places: dict[str, Any] = json.loads(about["DCP_SHARDING_INFO"])
    names: dict[str, str] = json.loads(about["ostraka_dtypes"])
    boxes: list[StoredBox] = []
    for leaf, tensor in safetensors.deserialize(data):
        start, stop = (begin + offset for offset in header[leaf]["data_offsets"])
        nbytes = stop - start
        assert data[start:stop] == bytes(tensor["data"])
        shown = codecs.get(leaf) or {**places[leaf], "shape": tensor["shape"]}
        shape, begins = tuple(shown["shape"]), tuple(shown["saved_offsets"])
        if begins and begins[0] >= 10**14:  # for PyTorch's reader, see docs/reference/format.md
            begins = (begins[0] - 10**14, *begins[1:])
        count = 1
        for extent in shape:
            count *= extent
        is_packed = names.get(leaf) in _BITS
        element_bytes = 0 if is_packed or not count else nbytes // count
        if nbytes:
            boxes.append(StoredBox(leaf, start, stop, shape, begins, leaf in codecs, element_bytes))
    assert begin + sum(box.stop - box.start for box in boxes) == len(data)
    return sorted(boxes, key=lambda box: box.start)
