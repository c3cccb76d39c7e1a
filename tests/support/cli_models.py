"""A model of many equal blocks with its optimizer, as people train it, for the command to show."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import ostraka

WIDTH = 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Transformer(nnx.Module):
    def __init__(self, blocks: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(64, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 64, rngs=rngs)


def save_transformer(path: Any, *, blocks: int = 24, seed: int = 0) -> int:
    """Save a transformer with its optimizer on eight devices. Returns its number of parameters."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))

    def make() -> tuple[Transformer, nnx.Optimizer]:
        model = Transformer(blocks, nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def fill(array: Any) -> Any:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        axes = ("fsdp", *[None] * (array.ndim - 2), "tp") if array.ndim > 1 else ()
        if any(size % 4 for size in array.shape[:1]):
            axes = ()
        values = np.zeros(array.shape, array.dtype)
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    # Not initialised: random numbers take long, and nobody looks at them.
    model, optimizer = nnx.eval_shape(make)
    nnx.update((model, optimizer), jax.tree.map(fill, nnx.state((model, optimizer))))
    ostraka.save(path, {"model": model, "optimizer": optimizer, "step": seed})
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
