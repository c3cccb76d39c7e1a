"""Arguments of `plan` that make no sense, and numbers that are easily a few bytes off."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
