"""The floor: the very files of an Ostraka checkpoint, written and read with plain system calls."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

In = TypeVar("In")
Out = TypeVar("Out")

# Buffered writes get slower below 8 MiB a call, and no faster above 64 MiB. Readers take
# 16 MiB a call, within the 1,024 buffers that one `preadv` may fill.
WRITE_BYTES = 64 * 2**20
READ_BYTES = 16 * 2**20
READ_BUFFERS = 1024
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BareFile:
    """One file: its place below the checkpoint, its bytes, and the sizes they are read in."""

    name: str
    content: np.ndarray
    piece_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bare:
    """Writes and reads what `learn` found, file by file, with as many threads as cores."""

    files: tuple[BareFile, ...]
    name: str = "bare"

    @classmethod
    def learn(cls, checkpoint: Path, share: slice = slice(None)) -> Bare:
        """Take the files of a checkpoint (or a share of them) into memory."""
        paths = sorted(p for p in checkpoint.rglob("*") if p.is_file())
        return cls(tuple(_learn_file(p, checkpoint) for p in paths[share]))

    def save(self, path: Path, _: object) -> None:
        """Write and fsync every file, then the directories."""
        folders = {path, *((path / file.name).parent for file in self.files)}
        for folder in sorted(folders):
            folder.mkdir(parents=True, exist_ok=True)
        _in_threads(lambda file: _write(path / file.name, file.content), self.files)
        for folder in (path.parent, *folders):
            _sync_folder(folder)

    def restore(self, path: Path, _: object) -> list[list[np.ndarray]]:
        """Read every file into fresh buffers, one for each box of a shard."""
        return _in_threads(lambda file: _read(path / file.name, file.piece_bytes), self.files)

    def check(self, restored: Sequence[Sequence[np.ndarray]], _: object) -> None:
        """Raise unless the pieces are the content."""
        for file, pieces in zip(self.files, restored, strict=True):
            start = 0
            for piece in pieces:
                if not np.array_equal(piece, file.content[start : start + piece.size]):
                    raise AssertionError(f"bare: {file.name} came back different")
                start += piece.size


def _learn_file(path: Path, checkpoint: Path) -> BareFile:
    content = np.fromfile(path, dtype=np.uint8)
    pieces = _box_bytes(content) if path.suffix == ".safetensors" else (content.size,)
    return BareFile(str(path.relative_to(checkpoint)), content, pieces)


def _box_bytes(content: np.ndarray) -> tuple[int, ...]:
    """The sizes of a safetensors file's header and of its tensors, in the file's order."""
    header_bytes = int(content[:8].view("<u8")[0])
    header = json.loads(content[8 : 8 + header_bytes].tobytes())
    header.pop("__metadata__", None)
    spans = sorted(entry["data_offsets"] for entry in header.values())
    return 8 + header_bytes, *(stop - start for start, stop in spans if stop > start)


def _in_threads(work: Callable[[In], Out], items: Iterable[In]) -> list[Out]:
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(work, items))


def _write(path: Path, content: np.ndarray) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        offset = 0
        while offset < content.size:
            offset += os.pwrite(descriptor, content[offset : offset + WRITE_BYTES].data, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, piece_bytes: Sequence[int]) -> list[np.ndarray]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        pieces = [_aligned(size) for size in piece_bytes]
        offset = 0
        for batch in _batches(pieces):
            offset += _fill(descriptor, batch, offset)
        return pieces
    finally:
        os.close(descriptor)


def _aligned(size: int) -> np.ndarray:
    """Fresh memory at a 64-byte boundary: the kernel copies to others several times more slowly."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def _batches(pieces: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Neighbouring pieces that one `preadv` fills; a large piece comes in parts."""
    batch: list[np.ndarray] = []
    room = READ_BYTES
    for piece in pieces:
        for start in range(0, piece.size, READ_BYTES):
            part = piece[start : start + READ_BYTES]
            if batch and (part.size > room or len(batch) == READ_BUFFERS):
                yield batch
                batch, room = [], READ_BYTES
            batch.append(part)
            room -= part.size
    if batch:
        yield batch


def _fill(descriptor: int, batch: list[np.ndarray], offset: int) -> int:
    want = sum(part.size for part in batch)
    got = os.preadv(descriptor, [part.data for part in batch], offset)
    if got != want:
        raise OSError(f"a read of {want} bytes returned {got}")
    return want
