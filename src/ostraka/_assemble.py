"""Make JAX arrays of the shards that a restore has read into host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

# JAX has no public way to make an array whose dtype is weak, but for a few numbers of Python's.
from jax._src.lax.lax import _convert_element_type  # pyright: ignore[reportPrivateUsage]

from ostraka._box import Box
from ostraka._spec import numpy_dtype

try:
    from jax._src.interpreters.pxla import batched_device_put
except ImportError:  # pragma: no cover - private, and only there to be quick
    batched_device_put: Any = None

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """How arrays of one shape, dtype and sharding are made, learned from the first of them."""

    aval: Any
    devices: list[Any]
    order: list[int]
    """For each device, which of the boxes it holds."""
    committed: bool


class Assembler:
    """Makes arrays. Those like an earlier one cost a third of what `make_array_from_callback` asks.

    That function finds out anew for each array what follows from shape, dtype and sharding alone.
    """

    def __init__(self) -> None:
        self._patterns: dict[Any, _Pattern | None] = {}

    def make(
        self,
        shape: tuple[int, ...],
        dtype: str,
        sharding: Any,
        boxes: tuple[Box, ...],
        arrays: Sequence[Array],
        *,
        committed: bool,
        weak: bool,
    ) -> jax.Array:
        """An array whose boxes, those of this process's devices, are `arrays`."""
        key = (shape, dtype, sharding, boxes, committed, weak)
        pattern = self._patterns.get(key)
        if pattern is not None:
            shards = [arrays[number] for number in pattern.order]
            return batched_device_put(
                pattern.aval, sharding, shards, pattern.devices, pattern.committed
            )
        made = _make(shape, dtype, sharding, boxes, arrays)
        if not committed or weak:
            made = _loosen(made, committed=committed, weak=weak)
        if key not in self._patterns:
            self._patterns[key] = _learn(made, boxes, arrays, committed=committed)
        return made


def _make(
    shape: tuple[int, ...],
    dtype: str,
    sharding: Any,
    boxes: tuple[Box, ...],
    arrays: Sequence[Array],
) -> jax.Array:
    if not boxes:
        # All of it is on other processes' devices; JAX would ask for a shard all the same.
        return jax.make_array_from_single_device_arrays(
            shape, sharding, [], dtype=numpy_dtype(dtype)
        )
    by_box = dict(zip(boxes, arrays, strict=True))
    return jax.make_array_from_callback(
        shape, sharding, lambda index: by_box[_box_of(index, shape)], dtype=numpy_dtype(dtype)
    )


def convert_weakly(array: jax.Array) -> jax.Array:
    return cast(jax.Array, _convert_element_type(array, weak_type=True))


def _loosen(array: jax.Array, *, committed: bool, weak: bool) -> jax.Array:
    """The same array, which JAX may move elsewhere, or whose dtype gives way to that of others."""
    if not committed:
        array = jnp.asarray(np.asarray(array))
    return convert_weakly(array) if weak else array


def _learn(
    made: jax.Array, boxes: tuple[Box, ...], arrays: Sequence[Array], *, committed: bool
) -> _Pattern | None:
    """What can be used again for the next array of this kind; None if nothing can."""
    if batched_device_put is None or not boxes or made.dtype != arrays[0].dtype:
        return None
    numbers = {box: number for number, box in enumerate(boxes)}
    indices = made.sharding.addressable_devices_indices_map(made.shape)
    order = [numbers[_box_of(index, made.shape)] for index in indices.values()]
    return _Pattern(made.aval, list(indices), order, committed)


def _box_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Box:
    return tuple(
        (s.start or 0, n if s.stop is None else s.stop)
        for s, n in zip(index or (), shape, strict=True)
    )
