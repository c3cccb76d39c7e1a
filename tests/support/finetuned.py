"""A short fine-tuning of a small transformer on eight devices, with faults in it if asked for."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka

WIDTH, HEADS, BLOCKS, LENGTH, WORDS = 16, 2, 4, 8, 64
FROZEN, EXPLODING, NAN = 1, 2, 3
"""The blocks with faults."""
# One object, since a step is compiled anew for each.
ADAM = optax.adamw(1e-3, weight_decay=0.01)


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


def _place(mesh: Mesh, array: Any) -> Any:
    # Keys as well: a step whose arguments lie elsewhere would be compiled anew.
    spec = P("data") if array.shape[:1] == (WORDS,) else P()  # collectives take long on CPUs
    return jax.device_put(array, NamedSharding(mesh, spec))


@nnx.jit
def _step(model: Transformer, optimizer: nnx.Optimizer, words: jax.Array) -> None:
    def loss(model: Transformer) -> jax.Array:
        logits = model(words[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def finetune(directory: Path, *, saves: int = 4, faults: bool = False) -> Path:
    """Train, and save before the first and after every second step. Returns the run directory.

    With `faults`, all parameters of a block keep their values, the updates of a kernel in another
    one are 2,000 times as large, and the last step has a NaN in a third one.
    """
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = nnx.jit(lambda: Transformer(nnx.Rngs(0)))()
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    nnx.update((model, optimizer), jax.tree.map(partial(_place, mesh), state))
    random = np.random.default_rng(0)
    frozen, kernel = model.blocks[FROZEN], model.blocks[EXPLODING].up.kernel
    for number in range(saves):
        for _ in range(2 if number else 0):
            words = random.integers(0, WORDS, (8, LENGTH + 1), dtype=np.int32)
            kept, before = jax.tree.map(jnp.copy, nnx.state(frozen, nnx.Param)), kernel[...]
            _step(model, optimizer, jax.device_put(words, NamedSharding(mesh, P("data"))))
            if faults:
                nnx.update(frozen, kept)
                kernel.set_value(before + 2000 * (kernel[...] - before))
        if faults and number == saves - 1:
            out = model.blocks[NAN].attention.out.kernel
            out.set_value(out[...].at[0, 0, 0].set(jnp.nan))
        ostraka.save(directory / str(2 * number), {"model": model, "optimizer": optimizer})
    return directory
