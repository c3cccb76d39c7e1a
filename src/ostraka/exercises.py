"""Three classic exercises on sharded checkpoints, and their exact answers.

Each takes floats where it needs integers, and returns a float32 array, as the exercise asks. A
float32 has 24 bits: from 16,777,217 parameters on the array is rounded. The twin of each,
`…_exact`, answers in Python integers, and takes shapes instead of making arrays.

    >>> orbax_save_count(0.0, jnp.ones((4, 16)), 8.0, 4.0)
    Array([136.,  34.], dtype=float32)
    >>> orbax_save_count_exact(0.0, jnp.ones((4, 10)), 5.0, 3.0)
    SaveCount(total=55, per_shard=18, left_over=1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ostraka.sharding import spec_tree
from ostraka.sharding.specs import array_leaves, parse_state

__all__ = [
    "SaveCount",
    "distributed_save_count",
    "distributed_save_count_exact",
    "orbax_save_count",
    "orbax_save_count_exact",
    "state_to_sharded_layout",
    "state_to_sharded_layout_exact",
]


@dataclass(frozen=True, slots=True)
class SaveCount:
    """The number of parameters in a save: `total == per_shard * num_shards + left_over`.

    Attributes:
        total: Parameters of the whole model.
        per_shard: Parameters in each shard, rounded down.
        left_over: Parameters that remain after an equal split.
    """

    total: int
    per_shard: int
    left_over: int


def orbax_save_count(seed: float, x: Any, features: float, num_shards: float) -> jax.Array:
    """Count the parameters of an `nnx.Linear` and of each of its shards.

    Args:
        seed: Seed of the initial parameters. It does not change the result.
        x: An input batch. Only its last dimension matters.
        features: Number of output features.
        num_shards: Number of shards, at least 1.

    Returns:
        `[total, total / num_shards]` as float32.

    Raises:
        ValueError: If `num_shards` is less than 1.
    """
    return _as_array(_linear(seed, x, features), num_shards)


def orbax_save_count_exact(seed: float, x: Any, features: float, num_shards: float) -> SaveCount:
    """Count as `orbax_save_count` does, in integers and without making arrays.

    Args:
        seed: Seed of the initial parameters. It does not change the result.
        x: An input batch. Only its last dimension matters.
        features: Number of output features.
        num_shards: Number of shards, at least 1.

    Returns:
        The counts, with the remainder of an uneven split.

    Raises:
        ValueError: If `num_shards` is less than 1.
    """
    return _count(jax.eval_shape(lambda: _linear(seed, x, features)), num_shards)


def distributed_save_count(seed: float, x: Any, num_shards: float, features: float) -> jax.Array:
    """Count the parameters of a Linen `Dense` and of each of its shards.

    Args:
        seed: Seed of the initial parameters. It does not change the result.
        x: An input batch. Only its last dimension matters.
        num_shards: Number of shards, at least 1.
        features: Number of output features.

    Returns:
        `[total, total / num_shards]` as float32.

    Raises:
        ValueError: If `num_shards` is less than 1.
    """
    return _as_array(_dense(seed, x, features), num_shards)


def distributed_save_count_exact(
    seed: float, x: Any, num_shards: float, features: float
) -> SaveCount:
    """Count as `distributed_save_count` does, in integers and without making arrays.

    Args:
        seed: Seed of the initial parameters. It does not change the result.
        x: An input batch. Only its last dimension matters.
        num_shards: Number of shards, at least 1.
        features: Number of output features.

    Returns:
        The counts, with the remainder of an uneven split.

    Raises:
        ValueError: If `num_shards` is less than 1.
    """
    return _count(jax.eval_shape(lambda x: _dense(seed, x, features), x), num_shards)


def state_to_sharded_layout(seed: float, x: Any, features: float) -> jax.Array:
    """Count the leaves in the tree of partition specs of an `nnx.Linear`.

    Args:
        seed: Seed of the initial parameters. It does not change the result.
        x: An input batch. Only its last dimension matters.
        features: Number of output features.

    Returns:
        `[leaves]` as float32.
    """
    return jnp.array([float(_layout_leaves(_linear(seed, x, features)))])


def state_to_sharded_layout_exact(seed: float, x: Any, features: float) -> int:
    """Count as `state_to_sharded_layout` does, in an integer and without making arrays.

    Args:
        seed: Seed of the initial parameters. It does not change the result.
        x: An input batch. Only its last dimension matters.
        features: Number of output features.

    Returns:
        The number of leaves.
    """
    return _layout_leaves(jax.eval_shape(lambda: _linear(seed, x, features)))


def _linear(seed: float, x: Any, features: float) -> Any:
    from flax import nnx

    model = nnx.Linear(x.shape[-1], int(features), rngs=nnx.Rngs(int(seed)))
    return nnx.state(model)


def _dense(seed: float, x: Any, features: float) -> Any:
    from flax import linen

    return linen.Dense(int(features)).init(jax.random.PRNGKey(int(seed)), x)["params"]


def _count(state: Any, num_shards: float) -> SaveCount:
    shards = int(num_shards)
    if shards < 1:
        raise ValueError(f"num_shards is {num_shards}; it must be at least 1")
    total = sum(leaf.elements for leaf in array_leaves(parse_state(state)))
    return SaveCount(total, *divmod(total, shards))


def _as_array(state: Any, num_shards: float) -> jax.Array:
    total = _count(state, num_shards).total
    return jnp.array([float(total), total / int(num_shards)])


def _layout_leaves(state: Any) -> int:
    # The kernel is sharded along its output, and the bias likewise.
    kernel, bias = PartitionSpec(None, "model"), PartitionSpec("model")
    specs = spec_tree(state, lambda leaf: kernel if leaf.ndim == 2 else bias)
    return len(jax.tree_util.tree_leaves(specs))
