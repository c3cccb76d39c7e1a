"""Does a file match its digests? One answer, and the same sentences, wherever it is asked."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ostraka
from fuzz import seal
from mounts import lose_sectors
from ostraka.errors import StoreError
from ostraka.formats import open_source
from ostraka.formats.ostraka.damage import (
    BytesLost,
    Comparison,
    index_problem,
    matches,
    unmatched_blocks,
)
from ostraka.formats.ostraka.source import OstrakaSource
from ostraka.layout.metadata import IndexEntry
from ostraka.layout.shard_file import Block, FileDigests, block_digest, digest, dumps
from ostraka.storage import FileReader, open_store

DATA = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
LENGTHS = (1_000, 4_000, 5_000)


def blocks_of(data: Any, lengths: Sequence[int] = LENGTHS) -> list[Block]:
    starts = np.cumsum([0, *lengths])
    digests = [block_digest([data[a:b]]) for a, b in pairwise(starts)]
    return FileDigests(sum(lengths), tuple(lengths), tuple(digests)).blocks()


def opened(tmp_path: Path, data: Any) -> FileReader:
    (tmp_path / "file").write_bytes(bytes(data))
    return open_store(tmp_path).open("file")


def changed(*places: int) -> Any:
    data = DATA.copy()
    data[list(places)] ^= 1
    return data


@pytest.mark.parametrize("piece_bytes", [7, 999, 4_000, 1 << 20])
def test_blocks_of_a_file(tmp_path: Path, piece_bytes: int):
    memory, read = np.empty(piece_bytes, np.uint8), list[int]()
    reader = opened(tmp_path, changed(10, 6_000))
    assert list(unmatched_blocks(reader, blocks_of(DATA), memory, read.append)) == [
        (0, "its header is not as it was written"),
        (2, "bytes 5,000 to 10,000 are not as they were written"),
    ]
    assert sum(read) == 10_000


def test_a_file_that_ends_early(tmp_path: Path):
    reader = opened(tmp_path, DATA[:4_500])
    found = list(unmatched_blocks(reader, blocks_of(DATA), np.empty(900, np.uint8)))
    assert found == [(1, "it ends at byte 4,500"), (2, "it ends at byte 5,000")]


def test_bytes_that_the_disk_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = opened(tmp_path, DATA)
    lose_sectors([tmp_path / "file"], monkeypatch, at=1_500)
    found = list(unmatched_blocks(reader, blocks_of(DATA), np.empty(900, np.uint8)))
    assert found == [(1, "it can't be read: Input/output error")]


def test_other_errors_of_the_store_are_raised():
    class Refusing:
        size = 10_000

        def read_into(self, offset: int, buffers: Any) -> int:
            raise StoreError("the server is gone", errno=errno.ESTALE)

        def close(self) -> None: ...

    with pytest.raises(StoreError, match="the server is gone"):
        list(unmatched_blocks(Refusing(), blocks_of(DATA), np.empty(900, np.uint8)))


@pytest.mark.parametrize("step", [1, 700, 1_000, 9_999, 10_000])
@pytest.mark.parametrize("flipped", [0, 999, 1_000, 4_999, 9_999])
def test_bytes_that_pass_by_in_order(step: int, flipped: int):
    def pass_by(data: Any) -> None:
        comparison = Comparison(blocks_of(DATA))
        for at in range(0, len(data), step):
            comparison.add(at, data[at : at + step])

    pass_by(DATA)
    with pytest.raises(BytesLost, match=r"its header is|bytes .* are not as .* written"):
        pass_by(changed(flipped))


def test_a_block_in_pieces():
    block = blocks_of(DATA)[1]
    assert matches(block, [DATA[1_000:2_000], DATA[2_000:5_000]])
    assert not matches(block, [DATA[1_000:2_000], DATA[2_000:4_999]])


def test_an_index():
    data = b"{}"
    expected = IndexEntry(2, digest(data))
    assert index_problem(data, expected) is None
    assert index_problem(b"{} ", expected) == "it has 3 bytes where 2 were written"
    assert index_problem(b"[]", expected) == "its digest is not the one that was written"


# The places that asked by themselves, and answered differently


def test_a_copy_replaces_a_file_whose_bytes_the_disk_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It raised, where `repair` and `verify` take such bytes for damage of that file."""
    ostraka.save(tmp_path / "a", {"x": np.arange(100_000)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "_METADATA").unlink()
    lost = sorted((tmp_path / "b").glob("shards-*/*.safetensors"))
    with lost[0].open("r+b") as file:
        file.write(b"?")
    lose_sectors(lost, monkeypatch, at=50_000)
    ostraka.copy(tmp_path / "a", tmp_path / "b")
    monkeypatch.undo()  # A new file may have the inode of an old one.
    assert ostraka.verify(tmp_path / "b").ok


def test_the_header_of_a_file_that_only_an_index_names(tmp_path: Path):
    """`verify` called it "bytes 0 to 4,096", and the header of every other file its header."""
    ostraka.save(tmp_path, {"x": np.arange(100_000)})
    source = open_source(open_store(tmp_path))
    assert isinstance(source, OstrakaSource)
    index = tmp_path / source.shards.name_of_index(0)
    document = json.loads(index.read_text())
    name = next(iter(document["files"]))
    document["files"]["other"] = document["files"][name]
    data = json.dumps(document).encode()
    index.write_bytes(data)
    shutil.copy(index.with_name(name), index.with_name("other"))
    with index.with_name("other").open("r+b") as file:
        file.write(b"?")
    index.with_name("metadata.json").unlink()  # a copy of what was
    described = json.loads((tmp_path / "_METADATA").read_text())
    del described["digest"]
    described["indexes"] = [[0, len(data), digest(data)]]
    (tmp_path / "_METADATA").write_bytes(seal(dumps(described).encode()))
    (problem,) = ostraka.verify(tmp_path, raises=False).problems
    assert problem.found == "its header is not as it was written"
