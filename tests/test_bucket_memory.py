"""What a save to a bucket and a restore from it take in memory, beside the state itself."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka.testing import run_processes

MOST_EXTRA = 512 << 20


def resident_bytes(name: str) -> int:
    """`VmRSS` now, or `VmHWM`, the most since it was reset."""
    found = re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def extra_bytes(path: str, mib: int) -> list[int]:
    """Of a save, and of a restore beyond the arrays that it makes."""
    placed = NamedSharding(jax.make_mesh((8,), ("data",)), P("data"))
    # Two leaves: files that are read and written in one go would be in memory whole.
    shape = (8, (mib << 20) // 2 // 8 // 4)
    tree = {
        name: jax.make_array_from_callback(shape, placed, lambda i: np.ones((1, shape[1]), "f4"))
        for name in "ab"
    }
    jax.block_until_ready(tree)
    ostraka.save(f"{path}-small", {"x": np.zeros(9)})
    found: list[int] = []
    for run in (lambda: ostraka.save(path, tree), lambda: ostraka.restore(path, like=tree)):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        result = run()
        found.append(resident_bytes("VmHWM") - before)
        del result
    return [found[0], found[1] - (mib << 20)]


@pytest.mark.parametrize(
    "mib", [640, pytest.param(4096, marks=pytest.mark.soak)], ids=["640 MiB", "4 GiB"]
)
@pytest.mark.parametrize("bucket", ["seaweed"], indirect=True)
def test_memory_is_bounded(bucket: str, mib: int):
    (result,) = run_processes(
        extra_bytes, f"{bucket}/large", mib, processes=1, devices_per_process=8, timeout_s=600
    )
    print("save, restore, MiB:", [n >> 20 for n in result.value])
    assert max(result.value) <= MOST_EXTRA
