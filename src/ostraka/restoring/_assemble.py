"""Make the values of a restore from the boxes that it has read into host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

# JAX has no public way to make an array whose dtype is weak, but for a few numbers of Python's.
from jax._src.lax.lax import _convert_element_type  # pyright: ignore[reportPrivateUsage]
from jax.experimental.layout import Format

from ostraka.common.dtypes import numpy_dtype
from ostraka.formats.buffers import Array, detached
from ostraka.layout.box import Box
from ostraka.layout.spec import LeafSpec
from ostraka.restoring.destinations import Destination

try:
    from jax._src.interpreters.pxla import batched_device_put
except ImportError:  # pragma: no cover - private, and only there to be quick
    batched_device_put: Any = None


class _Pattern(NamedTuple):
    """The recipe for arrays of one shape, dtype and sharding, taken from the first of them."""

    aval: Any
    devices: list[Any]
    order: list[int]
    """For each device, the number of the box that it holds."""


class Assembler:
    """Makes values. An array like an earlier one takes a third of JAX's own time.

    `make_array_from_callback` works out shape, dtype and sharding anew for each array.
    """

    def __init__(self) -> None:
        self._patterns: dict[Any, _Pattern] = {}

    def make(self, leaf: LeafSpec, destination: Destination, arrays: Sequence[Array]) -> Any:
        """Make the value of a destination from the arrays of its boxes."""
        boxes = destination.boxes
        if leaf.per_process:
            boxes = tuple(box[1:] for box in boxes)
            arrays = [array[0] for array in arrays]
        if destination.cast is not None:  # Most sources have done so on the way.
            arrays = [array.astype(numpy_dtype(destination.cast), copy=False) for array in arrays]
        if destination.host_dtype is not None:
            arrays = [arrays[0].astype(destination.host_dtype)]
        if destination.kind == "numpy":
            return detached(arrays[0])
        if destination.kind == "scalar":
            return arrays[0][()]
        if destination.kind == "python":
            return arrays[0].item()
        made = self._make_array(leaf, destination, boxes, arrays)
        if destination.layout is not None:
            made = jax.device_put(made, Format(destination.layout, made.sharding))
        if destination.kind != "key":
            return made
        return jax.random.wrap_key_data(made, impl=destination.generator or leaf.prng)

    def _make_array(
        self, leaf: LeafSpec, found: Destination, boxes: tuple[Box, ...], arrays: Sequence[Array]
    ) -> jax.Array:
        shape, dtype, sharding = leaf.own_shape, found.cast or leaf.dtype, found.sharding
        key = (shape, dtype, sharding, boxes, found.committed, found.weak)
        pattern = self._patterns.get(key)
        if pattern is not None:
            shards = [arrays[number] for number in pattern.order]
            aval, devices = pattern.aval, pattern.devices
            return batched_device_put(aval, sharding, shards, devices, found.committed)
        by_box = dict(zip(boxes, arrays, strict=True))
        if boxes:
            made = jax.make_array_from_callback(
                shape, sharding, lambda i: by_box[_box_of(i, shape)], dtype=numpy_dtype(dtype)
            )
        else:
            # All of it is on other processes' devices; JAX would ask for a shard all the same.
            made = jax.make_array_from_single_device_arrays(
                shape, sharding, [], dtype=numpy_dtype(dtype)
            )
        if not found.committed:
            made = jnp.asarray(np.asarray(made))
        if found.weak:
            made = cast(jax.Array, _convert_element_type(made, weak_type=True))
        if batched_device_put is not None and boxes and made.dtype == arrays[0].dtype:
            indices = made.sharding.addressable_devices_indices_map(shape)
            order = [boxes.index(_box_of(index, shape)) for index in indices.values()]
            self._patterns[key] = _Pattern(made.aval, list(indices), order)
        return made


def _box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    return tuple(
        (s.start or 0, n if s.stop is None else s.stop)
        for s, n in zip(index or (), shape, strict=True)
    )
