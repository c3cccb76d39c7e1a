"""Memory is used again when the last array in it is gone, and not before."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ostraka
from ostraka.common.memory import Recycled, current, is_recycled, recycling
from ostraka.formats.buffers import Buffers, Scratch, recycled_or_fresh
from ostraka.layout.spec import LeafSpec, Target

MIB = 1 << 20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_its_last_array_is_gone():
    memory = Recycled(64 * MIB)
    first = memory.take(5 * MIB)
    place = address(first)
    view = first[MIB:].view(np.float32).reshape(-1, 4).T[1:]
    del first
    assert address(memory.take(5 * MIB)) != place
    del view
    assert address(memory.take(5 * MIB)) == place


def test_memory_is_writable_and_at_the_beginning_of_a_page():
    found = Recycled(64 * MIB).take(3 * MIB + 7)
    assert found.nbytes == 3 * MIB + 7
    assert address(found) % 4096 == 0
    found[:] = 3
    assert int(found.sum(dtype=np.int64)) == 3 * found.nbytes


def test_much_larger_memory_is_not_given_for_little():
    memory = Recycled(64 * MIB)
    place = address(memory.take(40 * MIB))
    assert address(memory.take(8 * MIB)) != place
    assert address(memory.take(36 * MIB)) == place


def test_idle_memory_is_bounded():
    memory = Recycled(32 * MIB)
    for size in range(8, 40, 4):
        memory.take(size * MIB)
    idle = sum(map(len, [*memory._idle, *memory._returned]))
    assert idle <= 64 * MIB


def test_many_threads_never_share_memory():
    memory = Recycled(64 * MIB)

    def fill(number: int) -> bool:
        for _ in range(50):
            found = memory.take(2 * MIB)
            found[:] = number
            gc.collect(0)
            if not (found == number).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fill, range(8)))


def test_only_what_is_asked_for_is_recycled(tmp_path: Path):
    memory = Recycled(64 * MIB)
    assert current() is None
    with recycling(memory):
        assert current() is memory
        buffers = Buffers([Target(0, ((0, MIB),))], [LeafSpec("w", "numpy", "float32", (MIB,))])
    assert current() is None
    buffers.allocate([0])
    assert is_recycled(buffers.take(0))
    assert is_recycled(Scratch(memory).take(MIB))
    assert not is_recycled(Scratch().take(MIB))
    assert not is_recycled(recycled_or_fresh(100, memory))
    ostraka.save(tmp_path / "a", {"w": np.zeros(MIB, np.float32)})
    assert not is_recycled(ostraka.restore(tmp_path / "a")["w"])
    with pytest.raises(ValueError, match="no more"), recycling(Recycled(MIB)):
        raise ValueError("no more")
    assert current() is None
