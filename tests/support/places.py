"""The same tests in a directory and in a bucket: what they do to files, done to objects.

A test that takes the fixture `place` is given a `pathlib.Path` or a `BucketPath`, which has those
methods of a Path that tests use to look at a checkpoint, and to do harm to it. Tests that are about
what only directories have (links, permissions, locks, syncs, renames) take `tmp_path`.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import pytest

from ostraka.storage import MemoryStore, Store, open_store
from ostraka.testing import FaultyStore


@dataclass(frozen=True, order=True)
class BucketPath:
    """A key, or all below it. It is given to Ostraka as it is, and may go to other processes."""

    url: str

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> BucketPath:
        return BucketPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> BucketPath:
        return BucketPath(self.url.rpartition("/")[0])

    @property
    def _above(self) -> Store:
        return open_store(self.parent.url)

    def with_name(self, name: str) -> BucketPath:
        return self.parent / name

    def relative_to(self, other: Place) -> PurePosixPath:
        assert self.url.startswith(f"{other}/")
        return PurePosixPath(self.url[len(f"{other}/") :])

    # Looking

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self._above.look(self.name) is not None

    def is_dir(self) -> bool:
        return open_store(self.url).exists()

    def stat(self) -> Any:
        found = self._above.look(self.name)
        if found is None:
            raise FileNotFoundError(self.url)
        return _Stat(found.size, found.changed_s)

    def iterdir(self) -> Iterator[BucketPath]:
        return iter([self / name for name in open_store(self.url).list()])

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """`*` within a name, and no `**`."""
        wanted = pattern.split("/")
        found = {
            "/".join(parts[: len(wanted)])
            for file in open_store(self.url).files("")
            if len(parts := file.name.split("/")) >= len(wanted)
            and all(map(fnmatch.fnmatchcase, parts, wanted))
        }
        return iter([self / name for name in sorted(found)])

    def rglob(self, pattern: str) -> Iterator[BucketPath]:
        """Files only."""
        files = [file.name for file in open_store(self.url).files("")]
        found = [name for name in files if fnmatch.fnmatchcase(name.rpartition("/")[2], pattern)]
        return iter([self / name for name in found])

    def read_bytes(self) -> bytes:
        return self._above.get(self.name)

    def read_text(self) -> str:
        return self.read_bytes().decode()

    # Changing

    def write_bytes(self, data: bytes | bytearray) -> None:
        self._above.put(self.name, bytes(data))

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def touch(self) -> None:
        self.write_bytes(b"")

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """There are no directories to be made."""

    def unlink(self) -> None:
        if not self.is_file():
            raise FileNotFoundError(self.url)
        self._above.delete(self.name)

    def rename(self, to: Place) -> None:
        copy_tree(self, to)
        remove_tree(self)


@dataclass(frozen=True)
class _Stat:
    st_size: int
    st_mtime: float


Place: TypeAlias = Path | BucketPath


def at(path: str) -> Place:
    """The place of a path that went to another process as text."""
    return BucketPath(path) if "://" in path else Path(path)


def names_of(place: Place) -> list[str]:
    """The names directly in a place, sorted, but for `_RUN`, which nothing depends on."""
    return sorted(inside.name for inside in place.iterdir() if not inside.name.startswith("_RUN"))


def remove_tree(place: Place) -> None:
    if isinstance(place, Path):
        shutil.rmtree(place)
    else:
        place._above.delete(place.name)


def copy_tree(place: Place, to: Place) -> None:
    """A file, or all that is below a place."""
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    for file in files:
        copied = to if file == place else to / str(file.relative_to(place))  # pyright: ignore[reportArgumentType]
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())


def flip(file: Place, offset: int, mask: int = 1) -> None:
    """Change bits of one byte."""
    if isinstance(file, Path):  # without writing the rest again, which may be large
        with file.open("r+b") as opened:
            place = opened.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            changed = bytes([opened.read(1)[0] ^ mask])
            opened.seek(place)
            opened.write(changed)
        return
    data = bytearray(file.read_bytes())
    data[offset] ^= mask
    file.write_bytes(bytes(data))


def in_the_way(path: Place) -> Place:
    """Let another program's file have the name of one of ours there, so that no save succeeds."""
    path.mkdir(parents=True)
    (path / "_METADATA").write_text("{}")
    return path


def place_of_kind(kind: str, name: str, request: pytest.FixtureRequest, directory: Path) -> Any:
    """What a Manager may be given as a place, by kind, for the parameters of a fixture."""
    if kind == "bucket":
        return f"{request.getfixturevalue('bucket')}/{name}"
    unique = uuid.uuid4().hex
    return {
        "directory": directory / name,
        "memory": f"memory://{unique}/{name}",
        "store": MemoryStore(f"{unique}/{name}"),
        "without locks": FaultyStore(directory / name, has_locks=False),
    }[kind]
