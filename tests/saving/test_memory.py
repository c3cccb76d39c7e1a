"""Memory for what is read: aligned as JAX wants it, and never shared between two buffers."""

import numpy as np
import pytest

from ostraka.formats.buffers import Buffers, aligned, detached
from ostraka.layout.spec import LeafSpec, Target


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 1 << 20, 64 << 20])
def test_memory_is_aligned_and_writable(nbytes: int):
    memory = aligned(nbytes)
    assert memory.nbytes == nbytes
    assert not nbytes or memory.ctypes.data % 64 == 0
    memory[:] = 7
    assert not nbytes or int(memory[-1]) == 7


def test_buffers_do_not_overlap():
    leaves = [LeafSpec(f"w{n}", "jax", "float32", (n + 1, 3)) for n in range(300)]
    targets = [Target(n, ((0, n + 1), (0, 3))) for n in range(300)]
    buffers = Buffers(targets, leaves)
    buffers.allocate(range(300))
    for number in range(300):
        buffers.array(number).reshape(-1).view(np.uint8)[:] = number % 251
    taken = [buffers.take(number) for number in range(300)]
    for number, array in enumerate(taken):
        assert array.shape == (number + 1, 3)
        assert array.ctypes.data % 64 == 0
        assert set(array.reshape(-1).view(np.uint8)) == {number % 251}


def test_a_detached_array_shares_no_memory():
    leaves = [LeafSpec("a", "numpy", "float32", (4,)), LeafSpec("b", "numpy", "float32", (4,))]
    buffers = Buffers([Target(0, ((0, 4),)), Target(1, ((0, 4),))], leaves)
    buffers.allocate([0, 1])
    array = buffers.take(0)
    own = detached(array)
    assert not np.shares_memory(own, array)
    assert own.base is None
