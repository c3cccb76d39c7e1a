"""Files that are written past the page cache have the same bytes, whatever the blocks are."""

import os
import random
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import ostraka
from ostraka.storage import LocalStore
from ostraka.storage.file import LocalWriter

MIB = 1 << 20
CUTS = {
    "whole pages": (0, 4096, 4096 + 4 * MIB, 4096 + 8 * MIB),
    "an odd end": (0, 4096, 4096 + 4 * MIB, 4096 + 4 * MIB + 1234567),
    "odd borders": (0, 4096, 4099, 2 * MIB + 7, 4 * MIB + 513, 7 * MIB - 1),
    "larger than the memory": (0, 100, 11 * MIB + 1, 11 * MIB + 5000, 16 * MIB),
    "in one page": (0, MIB + 10, MIB + 20, 3 * MIB),
}


def open_writer(place: Path, size: int, name: str = "file") -> LocalWriter:
    writer = LocalStore(str(place)).direct().create(f"shards/{name}", size)
    if writer._direct is None:
        pytest.skip(f"the file system of {place} names no alignment")
    return writer


def write_blocks(writer: LocalWriter, cuts: tuple[int, ...]) -> bytes:
    """Write random blocks in any order, each in several pieces. Returns the bytes of the file."""
    data = np.random.default_rng(0).integers(0, 256, cuts[-1], np.uint8)
    blocks = list(pairwise(cuts))
    random.Random(0).shuffle(blocks)
    for start, stop in blocks:
        within = [start, start + (stop - start) // 3, start + (stop - start) // 3 + 1, stop]
        writer.write(start, [data[a:b] for a, b in pairwise(within)])
    writer.finish()
    return data.tobytes()


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_a_direct_file_has_its_bytes(tmp_path: Path, cuts: tuple[int, ...]):
    written = write_blocks(open_writer(tmp_path, cuts[-1]), cuts)
    assert (tmp_path / "shards/file").read_bytes() == written


def test_what_a_disk_refuses_goes_through_the_cache(tmp_path: Path):
    cuts = CUTS["odd borders"]
    writer = open_writer(tmp_path, cuts[-1])
    assert writer._direct is not None
    os.close(writer._direct)
    writer._direct = os.open(tmp_path / "shards/file", os.O_RDONLY)
    written = write_blocks(writer, cuts)
    assert (tmp_path / "shards/file").read_bytes() == written


def test_handles_are_closed(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    open_writer(tmp_path, 2 * MIB, "finished").finish()
    open_writer(tmp_path, 2 * MIB, "abandoned").abandon()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("size", "place"), [(MIB - 1, ""), (2 * MIB, "/dev/shm")])
def test_small_files_and_other_file_systems_use_the_cache(tmp_path: Path, size: int, place: str):
    directory = tmp_path
    if place:
        if not os.access(place, os.W_OK):
            pytest.skip(f"{place} is missing")
        directory = Path(place) / f"ostraka-{os.getpid()}"
        directory.mkdir()
    try:
        writer = LocalStore(str(directory)).direct().create("file", size)
        assert writer._direct is None
        writer.write(0, [bytes(size)])
        writer.finish()
        assert (directory / "file").read_bytes() == bytes(size)
    finally:
        (directory / "file").unlink(missing_ok=True)
        if place:
            directory.rmdir()


def is_cached(file: Path) -> bool:
    """True if the middle of a file can be read without waiting for the disk."""
    opened = os.open(file, os.O_RDONLY)
    try:
        os.preadv(opened, [bytearray(4096)], file.stat().st_size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    finally:
        os.close(opened)
    return True


def test_a_background_save_leaves_the_cache_alone(tmp_path: Path):
    open_writer(tmp_path / "look", 2 * MIB).abandon()
    tree = {"w": jnp.arange(2 * MIB, dtype=jnp.float32)}
    ostraka.save(tmp_path / "waited", tree)
    ostraka.save_async(tmp_path / "beside", tree).wait()
    (waited,), (beside,) = ((tmp_path / n).glob("shards-*/shard*") for n in ("waited", "beside"))
    assert is_cached(waited)
    assert not is_cached(beside)
    restored = ostraka.restore(tmp_path / "beside")
    assert (restored["w"] == tree["w"]).all()
