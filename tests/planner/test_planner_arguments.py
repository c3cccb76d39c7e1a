"""Arguments of `plan` that make no sense, and numbers that are easily a few bytes off."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka import plan

TREE = {"x": jnp.ones((8, 8))}


@pytest.mark.parametrize("processes", [0, -1])
def test_no_processes_at_all(processes: int):
    with pytest.raises(ValueError, match="8 devices do not divide evenly among"):
        plan(TREE, mesh={"data": 8}, processes=processes)
    with pytest.raises(ValueError, match="4 devices do not divide evenly among"):
        plan(TREE, mesh={"data": 8}).restore(mesh={"data": 4}, processes=processes)


@pytest.mark.parametrize(
    "optimizer",
    [3, "apply_updates", "contrib", optax.adam],
    ids=["number", "name", "module", "make"],
)
def test_optimizers_that_are_none(optimizer: Any):
    with pytest.raises(TypeError, match="it must be an optax transformation, or the name of one"):
        plan(TREE, optimizer=optimizer)


def test_elements_of_less_than_a_byte_do_not_share_one_between_devices():
    """Three elements of half a byte take two bytes on each device, and in each file."""
    mesh = jax.make_mesh((8,), ("data",))
    sharded = NamedSharding(mesh, P("data"))
    planned = plan({"x": jax.ShapeDtypeStruct((8, 3), jnp.int4, sharding=sharded)})
    lost = planned.lost_process()
    assert lost.held_bytes == lost.sole_bytes == planned.restore().needed_bytes.most == 16
    assert planned.lost_disk().held_elsewhere_bytes == 0


def test_specs_of_a_restore_may_leave_leaves_out(tmp_path: Path):
    """As in `ostraka.restore`: an entry holds for all below it, and the rest is cut as it was."""
    mesh = jax.make_mesh((8,), ("data",))
    halves = NamedSharding(mesh, P("data"))
    tree = {
        "params": {"w": jax.device_put(jnp.ones((64, 64)), halves), "b": jnp.ones(16)},
        "moments": jax.device_put(jnp.ones((64, 32)), halves),
        "table": np.ones(5),
        "key": jax.random.key(0),
    }
    ostraka.save(tmp_path / "c", tree)
    planned = plan(tmp_path / "c")
    specs = {"params": P(None, "data"), "key": None}
    with pytest.raises(ValueError, match="'params/b'"):
        planned.restore(mesh=mesh, specs=specs)
    with pytest.raises(ValueError, match="'params/b'"):
        ostraka.restore(tmp_path / "c", mesh=mesh, specs=specs)
    specs = {"params": {"w": P(None, "data")}}
    restored = ostraka.restore(tmp_path / "c", mesh=mesh, specs=specs)
    targets = planned.restore(mesh=mesh, specs=specs)
    assert restored["params"]["w"].sharding.spec == P(None, "data")
    assert restored["moments"].sharding.spec == P("data")
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf is not tree["key"]) + 8
    assert targets.needed_bytes.most == held
    w = 64 * 64 * 4
    assert planned.restore(mesh=mesh, specs=specs, only="params/w").needed_bytes.most == w
    with pytest.raises(ValueError, match="specs has 'parms', which is no leaf"):
        planned.restore(mesh=mesh, specs={"parms": P()})
    with pytest.raises(ValueError, match="specs has a NamedSharding for 'moments', not a spec"):
        planned.restore(mesh=mesh, specs={"moments": halves})
