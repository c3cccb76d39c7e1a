"""Checkpoints that four processes wrote with Orbax, read by one and by four."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from orbax_cases import (
    ALL_FORMS,
    FORMS,
    Form,
    flat,
    make_arrays,
    make_values,
    mesh_of,
    numbers,
    put,
    write,
)
from ostraka.testing import run_processes

FEW = [FORMS[0], FORMS[2], FORMS[4], FORMS[5]]
LARGE = (1024, 2048)
"""16 MiB of float64, so that a process that read more than its share would show."""


def make_tree() -> dict[str, Any]:
    return {"arrays": make_arrays(mesh_of(x=4, y=2)), "values": make_values()}


def write_and_read(root: str, forms: list[Form]) -> list[int]:
    """Write in every form, and read it again; returns the bytes that each read of the large one."""
    tree = make_tree()
    paths = [write(form, Path(root) / str(form), tree) for form in forms]
    for path in paths:
        assert flat(ostraka.restore(path, like=tree)) == flat(tree)
        found = ostraka.restore(path)
        assert flat(found["arrays"]["cut"]) == flat(tree["arrays"]["cut"])
        check_on_another_mesh(path)
    large = {"large": put(numbers(LARGE, np.float64).view(np.uint32), mesh_of(x=8), "x")}
    form = Form("tree", zarr3=False, ocdbt=True, compressed=False)
    path = write(form, Path(root) / "large", large)
    ostraka.restore(path, like=large)  # which has imported and opened what it needs
    before = bytes_read()
    again = ostraka.restore(path, like=large)
    nbytes = bytes_read() - before
    assert flat(again) == flat(large)
    return [nbytes]


def check_on_another_mesh(path: Path) -> None:
    whole = numbers((8, 12), np.float32, 1)
    sharding = NamedSharding(mesh_of(b=2, a=4), P("a", "b"))
    leaf = jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)
    like: Any = {"arrays": {"cut": leaf}}
    found = ostraka.restore(path, like=like, only="arrays/cut")
    for shard in found["arrays"]["cut"].addressable_shards:
        assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()


def bytes_read() -> int:
    """What this process has read, from disk or the page cache."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def check(root: Path, forms: list[Form]) -> None:
    results = run_processes(
        write_and_read, str(root), forms, processes=4, devices_per_process=2, timeout_s=600
    )
    share = np.prod(LARGE) * 8 // 4
    for (nbytes,) in (result.value for result in results):
        assert share <= nbytes < 1.1 * share
    tree = make_tree()
    for form in forms:
        path = root / str(form) / ("7" if form.api == "step" else "")
        assert flat(ostraka.restore(path, like=tree)) == flat(tree)
        assert ostraka.open(path)["arrays/cut"].mesh is not None
        check_on_another_mesh(path)


def test_four_processes(tmp_path: Path):
    check(tmp_path, FEW)


@pytest.mark.soak
def test_four_processes_in_all_other_forms(tmp_path: Path):
    check(tmp_path, [form for form in ALL_FORMS if form not in FEW])
