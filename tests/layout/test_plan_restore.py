"""Which boxes a process needs: those that JAX gives to its devices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ostraka.layout.spec import LeafSpec, MeshSpec, Partition, needed_boxes

MESH = MeshSpec(("a", "b"), (4, 2), tuple(range(8)))


@pytest.mark.parametrize("devices", [(0,), (2, 3), (1, 6), tuple(range(8))], ids=str)
@pytest.mark.parametrize("partition", [(), (("a",), ("b",)), ((), ("b", "a"))], ids=str)
def test_a_process_needs_what_its_devices_hold(partition: Partition, devices: tuple[int, ...]):
    shape = (8, 16)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    sharding = NamedSharding(mesh, P(*[axes or None for axes in partition]))
    expected = {
        tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
        if device.id in devices
    }
    leaf = LeafSpec("w", "jax", "float32", shape, 0, partition)
    boxes = needed_boxes(leaf, MESH, devices, 0)
    assert len(boxes) == len(set(boxes))
    assert set(boxes) == expected


def test_a_value_for_each_process_is_its_own():
    leaf = LeafSpec("w", "jax", "float32", (3, 8), 0, (("a",),), per_process=True)
    assert needed_boxes(leaf, MESH, (0,), 2) == (((2, 3), (0, 2)),)


def test_host_memory_needs_all():
    leaf = LeafSpec("w", "numpy", "float32", (8, 16))
    assert needed_boxes(leaf, None, (), 0) == (((0, 8), (0, 16)),)
