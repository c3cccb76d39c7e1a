"""Arrays made of shards: the same values, shardings and properties as JAX's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from ostraka.layout.box import Box
from ostraka.layout.spec import LeafSpec
from ostraka.restoring._assemble import Assembler
from ostraka.restoring.destinations import Destination

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def parts_of(whole: np.ndarray, sharding: Any) -> tuple[tuple[Box, ...], list[np.ndarray]]:
    """The different boxes of the devices, and what is in them."""
    indices = sharding.addressable_devices_indices_map(whole.shape).values()
    boxes = {
        tuple(s.indices(n)[:2] for s, n in zip(index, whole.shape, strict=True)): whole[index]
        for index in indices
    }
    return tuple(boxes), [np.ascontiguousarray(part) for part in boxes.values()]


@pytest.mark.parametrize("spec", [P(), P("a"), P("a", "b"), P(None, ("b", "a"))], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_arrays_of_one_kind_have_each_their_own_values(spec: P, dtype: str):
    """The second and third are made by what was learned from the first."""
    assembler = Assembler()
    sharding = NamedSharding(MESH, spec)
    for start in range(3):
        whole = (np.arange(8 * 16).reshape(8, 16) % 5 + start).astype(jnp.dtype(dtype))
        boxes, arrays = parts_of(whole, sharding)
        leaf = LeafSpec("w", "jax", dtype, whole.shape)
        made = assembler.make(leaf, Destination(0, "w", "jax", sharding, boxes), arrays)
        assert made.sharding == sharding
        assert made.dtype == whole.dtype
        assert made.committed
        np.testing.assert_array_equal(np.asarray(made), whole)


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("weak", [True, False])
def test_commitment_and_weak_types(committed: bool, weak: bool):
    assembler = Assembler()
    sharding = SingleDeviceSharding(jax.devices()[0])
    leaf = LeafSpec("w", "jax", "float32", ())
    found = Destination(0, "w", "jax", sharding, ((),), committed=committed, weak=weak)
    for value in (1.0, 2.0):
        made = assembler.make(leaf, found, [np.full((), value, np.float32)])
        assert (made.committed, made.weak_type, float(made)) == (committed, weak, value)
        dtype = jnp.bfloat16 if weak else jnp.float32  # A weak type gives way.
        assert (made + jnp.ones(3, jnp.bfloat16)).dtype == dtype
