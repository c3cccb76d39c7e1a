"""Faults planted in training loops: each is reported at the first audited step, by its cause."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from audit_loops import LOOPS, REACHED, SAVED, State, copied, loop_of, run
from ostraka.errors import ResumeDiverged


def marked(*names: str) -> Any:
    """The suite has the first, soak tests have them all."""
    return [names[0], *(pytest.param(name, marks=pytest.mark.soak) for name in names[1:])]


def find_loop(name: str) -> Any:
    try:
        return loop_of(name)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")


def place_on_mesh(state: State) -> State:
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def place(one: Any) -> Any:
        if not isinstance(one, jax.Array) or not one.ndim or one.size % 8 or one.shape[0] % 8:
            return one
        return jax.device_put(one, NamedSharding(mesh, P("d")))

    placed = {k: jax.tree.map(place, v) for k, v in state.items() if k in ("params", "ema")}
    return {**state, **placed}


@pytest.mark.parametrize("name", marked(*LOOPS))
def test_each_fault_is_named(name: str, tmp_path: Path):
    loop = find_loop(name)
    run(loop, tmp_path / "first", REACHED)
    for number, (fault, expected) in enumerate(loop.faults.values()):
        directory = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", directory)
        with pytest.raises(ResumeDiverged, match=expected) as caught:
            run(loop, directory, REACHED, fault)
        assert caught.value.step == SAVED + 1
    assert run(loop, tmp_path / "first", REACHED) == SAVED  # a right resume is the same run


@pytest.mark.parametrize("name", marked("adam", "diffusion"))
def test_another_mesh_needs_a_tolerance(name: str, tmp_path: Path):
    loop = find_loop(name)
    run(loop, tmp_path, REACHED)
    assert run(loop, tmp_path, REACHED, place=place_on_mesh, audit_rtol=1e-3) == SAVED
    with pytest.raises(ResumeDiverged, match="weights were not restored"):
        run(loop, tmp_path, REACHED, copied("params"), place=place_on_mesh, audit_rtol=1e-3)
