"""Small NNX models, and how trees are compared, for the tests of NNX."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import ostraka


class Block(nnx.Module):
    """Everything that a network has: parameters, statistics, random numbers, a tied variable."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.sequence = nnx.Sequential(
            nnx.Linear(width, width, rngs=rngs), jax.nn.relu, nnx.Linear(width, width, rngs=rngs)
        )
        self.tied = self.first.kernel
        self.table = nnx.data(jnp.arange(3.0))
        self.name = "block"

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.dropout(jax.nn.relu(self.norm(self.first(x))))
        for layer in self.layers:
            x = x + layer(x)
        return self.sequence(x) @ self.tied.T


class Sharded(nnx.Module):
    """Two layers whose variables say how they are to be cut over the axes fsdp and tp."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (width, 4 * width)), out_sharding=P("fsdp", "tp"))
        self.down = nnx.Param(init(rngs.params(), (4 * width, width)), out_sharding=P("tp", "fsdp"))
        self.scale = nnx.Param(jnp.ones(width), out_sharding=P(None))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu((x * self.scale) @ self.up) @ self.down


def make_block(seed: int = 0) -> Block:
    return Block(rngs=nnx.Rngs(seed))


# One object, since a step is compiled anew for each.
ADAM = optax.adamw(1e-2)


def make_optimizer(model: nnx.Module) -> nnx.Optimizer:
    return nnx.Optimizer(model, ADAM, wrt=nnx.Param)


@nnx.jit
def train(model: nnx.Module, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    """One step towards the identity."""

    def loss_of(model: Any) -> jax.Array:
        return jnp.mean((model(x) - x) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@cache
def _trained() -> tuple[Block, nnx.Optimizer]:
    model = make_block(0)
    optimizer = make_optimizer(model)
    for step in range(2):
        train(model, optimizer, jnp.full((2, 4), step + 1.0))
    return model, optimizer


def trained() -> tuple[Block, nnx.Optimizer]:
    """A model and its optimizer after two steps, one's own to change."""
    model, optimizer = _trained()
    return _copy(model), _copy(optimizer)


def _copy(node: Any) -> Any:
    graphdef, state = nnx.split(node)
    return nnx.merge(graphdef, jax.tree.map(lambda array: array.copy(), state))


def bits(tree: Any) -> dict[str, Any]:
    """Each leaf by its path: arrays as type, dtype, shape and bytes, others as they are."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): _bits_of(leaf) for path, leaf in pairs}


def _bits_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        kind = jax.Array if isinstance(leaf, jax.Array) else type(leaf)
        return kind, leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()
    return type(leaf), leaf


def assert_same(found: Any, expected: Any) -> None:
    """The same containers, keys, types, and values bit for bit."""
    assert type(found) is type(expected)
    assert bits(found) == bits(expected)
    if isinstance(expected, nnx.Module):
        _, found_state = nnx.split(found)
        _, expected_state = nnx.split(expected)
        assert kinds(found_state) == kinds(expected_state)


def kinds(state: nnx.State) -> dict[Any, type]:
    """The type of every variable by its path."""
    return {path: type(variable) for path, variable in nnx.to_flat_state(state)}


def paths_of(path: Any) -> set[str]:
    """The paths of the array leaves of a checkpoint."""
    return set(ostraka.open(path))
