"""Examples of this process's shards to global arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from ostraka.common.dtypes import DTYPES, dtype_name
from ostraka.data._rows import RowPlan
from ostraka.errors import InvalidSharding, InvalidTree

Array = np.ndarray[Any, Any]
_NUMPY = (np.ndarray, np.generic)


@dataclass(frozen=True, slots=True)
class ExampleSpec:
    """What all examples have in common."""

    treedef: Any
    names: tuple[str, ...]
    """The paths of the leaves, for people."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    def __str__(self) -> str:
        leaves = zip(self.names, self.dtypes, self.shapes, strict=True)
        return ", ".join(f"{name}: {dtype}{list(shape)}" for name, dtype, shape in leaves)


def describe_example(example: Any) -> ExampleSpec:
    """Return the structure of an example. Raises InvalidTree if JAX has no arrays for a leaf."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(example)
    names = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs)
    arrays: list[Array] = []
    for name, (_, leaf) in zip(names, pairs, strict=True):
        described = f"leaf {name or '.'!r} of an example is a {type(leaf).__name__}"
        remedy = "turn it into numbers, or leave it out with a map"
        try:
            array = np.asarray(leaf)
        except Exception as error:  # A typed key, a tensor of an accelerator.
            raise InvalidTree(
                f"{described}, which numpy can't convert ({error}): {remedy}"
            ) from error
        if dtype_name(array.dtype) not in DTYPES:
            raise InvalidTree(
                f"{described} of the dtype {array.dtype}, which JAX has no arrays for: {remedy}"
            )
        arrays.append(array)
    if not arrays:
        raise InvalidTree(f"an example has no arrays: {example!r:.80}")
    shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
    return ExampleSpec(treedef, names, tuple(shapes), tuple(dtypes))


class Stacker:
    """Stacks the rows of one process and makes global arrays of them.

    The buffers are new for every batch, because JAX may keep their memory.
    """

    def __init__(self, plan: RowPlan):
        self._plan = plan
        self.spec: ExampleSpec | None = None
        """Known once there was an example."""
        # Captured here, since the thread that stacks has settings of its own.
        self._has_x64: bool = cast(Any, jax.config).jax_enable_x64

    def stack(self, rows: Iterable[tuple[int, Any]]) -> Any:
        """Return a pytree of global arrays, from the shard and the example of each local row."""
        flatten = jax.tree_util.tree_flatten
        shards: list[int] = []
        flat: list[list[Any]] = []
        spec = self.spec
        for shard, example in rows:
            if spec is None:
                spec = self._begin(example)
            leaves, treedef = flatten(example)
            if treedef != spec.treedef:
                raise _unlike(shard, f"{treedef}", f"{spec.treedef}")
            shards.append(shard)
            flat.append(leaves)
        assert spec is not None
        columns = zip(*flat, strict=True)
        buffers = [self._stack_leaf(spec, n, column, shards) for n, column in enumerate(columns)]
        with jax.enable_x64(self._has_x64):
            arrays = self._place(buffers)
        return jax.tree_util.tree_unflatten(spec.treedef, arrays)

    def _stack_leaf(
        self, spec: ExampleSpec, leaf: int, column: Sequence[Any], shards: Sequence[int]
    ) -> Array:
        """Return the values of one leaf in all rows as one array."""
        shape, dtype = spec.shapes[leaf], spec.dtypes[leaf]
        arrays = [v if isinstance(v, _NUMPY) else np.asarray(v) for v in column]
        for shard, array in zip(shards, arrays, strict=True):
            if array.shape != shape or array.dtype != dtype:
                found = f"{array.dtype}{list(array.shape)} at {spec.names[leaf] or '.'!r}"
                raise _unlike(shard, found, f"{dtype}{list(shape)}")
        if not shape:
            return np.array(arrays, dtype)
        # As np.stack, which would take several times as long for small rows.
        return np.concatenate(arrays).reshape(len(arrays), *shape)

    def _begin(self, example: Any) -> ExampleSpec:
        spec = self.spec = describe_example(example)
        sharding = self._plan.sharding
        for name, shape in zip(spec.names, spec.shapes, strict=True):
            try:
                sharding.shard_shape((self._plan.batch, *shape))
            except (ValueError, IndexError):  # JAX raises the latter for too few dimensions.
                raise InvalidSharding(
                    f"leaf {name or '.'!r} of the batch has the shape "
                    f"{(self._plan.batch, *shape)}, which {sharding} does not fit: give a sharding "
                    "that splits the rows only"
                ) from None
        return spec

    def _place(self, buffers: list[Array]) -> list[Any]:
        plan = self._plan
        if plan.is_local:
            return jax.device_put(buffers, plan.sharding)
        return [self._place_part(buffer) for buffer in buffers]

    def _place_part(self, buffer: Array) -> Any:
        plan = self._plan

        def rows_of(index: Any) -> Array:
            first, end, _ = index[0].indices(plan.batch)
            here = plan.first_rows[first]
            return buffer[(slice(here, here + end - first), *index[1:])]

        shape = (plan.batch, *buffer.shape[1:])
        return jax.make_array_from_callback(shape, plan.sharding, rows_of)


def _unlike(shard: int, found: str, expected: str) -> InvalidTree:
    return InvalidTree(
        f"an example of shard {shard} has {found}, while the first example of this process has "
        f"{expected}: all examples must have the same structure, shapes and dtypes; pad or pack "
        "them first"
    )
