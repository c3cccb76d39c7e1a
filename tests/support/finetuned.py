"""A short fine-tuning of a small transformer on eight devices, with faults in it if asked for."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka

WIDTH, HEADS, BLOCKS, LENGTH, WORDS = 32, 4, 6, 16, 64
FROZEN, EXPLODING, NAN = 1, 2, 4
"""The blocks with faults."""


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x_in = self.mlp_norm(x)
        return x + self.dropout(self.down(jax.nn.silu(self.gate(x_in)) * self.up(x_in)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _label(path: Any, _: Any) -> str:
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    if names[:2] == ["blocks", str(FROZEN)]:
        return "frozen"
    is_exploding = names[:3] == ["blocks", str(EXPLODING), "up"] and "kernel" in names
    return "exploding" if is_exploding else "usual"


def _optimizer(*, faults: bool) -> optax.GradientTransformation:
    usual = optax.adamw(1e-3, weight_decay=0.01)
    if not faults:
        return usual
    kinds = {
        "usual": usual,
        "frozen": optax.set_to_zero(),
        "exploding": optax.adamw(2.0),
    }
    return optax.multi_transform(kinds, partial(jax.tree_util.tree_map_with_path, _label))


def finetune(directory: Path, *, saves: int = 4, faults: bool = False) -> Path:
    """Train, and save a step before the first and after every second. Returns the run directory."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, _optimizer(faults=faults), wrt=nnx.Param)

    def put(array: Any) -> Any:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return array
        spec = P("data") if array.ndim > 1 and array.shape[0] % 8 == 0 else P()
        return jax.device_put(array, NamedSharding(mesh, spec))

    nnx.update((model, optimizer), jax.tree.map(put, nnx.state((model, optimizer))))

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer, words: jax.Array) -> jax.Array:
        def loss(model: Transformer) -> jax.Array:
            found = optax.softmax_cross_entropy_with_integer_labels(
                model(words[:, :-1]), words[:, 1:]
            )
            return found.mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    random = np.random.default_rng(0)
    for number in range(saves):
        if number:
            for _ in range(2):
                words = random.integers(0, WORDS, (8, LENGTH + 1), dtype=np.int32)
                step(model, optimizer, jax.device_put(words, NamedSharding(mesh, P("data"))))
        if faults and number == saves - 1:
            kernel = model.blocks[NAN].attention.out.kernel
            kernel.set_value(kernel[...].at[0, 0, 0].set(jnp.nan))
        ostraka.save(directory / str(2 * number), {"model": model, "optimizer": optimizer})
    return directory
