"""A small transformer in Flax NNX, text for it to learn, and the loop that the examples share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka
from ostraka import sharding

LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 32, 4, 2, 32, 16
ADAM = optax.adamw(3e-3)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.mlp_norm(x)))))


class Transformer(nnx.Module):
    """Predicts the next letter. Its embedding is its output layer too: one variable, two uses."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, letters: jax.Array) -> jax.Array:
        x = self.embed(letters) + self.position[: letters.shape[1]]
        mask = nnx.make_causal_mask(letters)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embed.attend(self.norm(x))


class Sentences:
    """Batches of text that it makes itself. What was taken is its state: it goes on from there."""

    def __init__(self, seed: int = 0):
        self._seed = seed
        self._taken = 0

    def __next__(self) -> np.ndarray:
        self._taken += 1
        random = np.random.default_rng([self._seed, self._taken])
        return np.stack([self._line(random) for _ in range(BATCH)])

    def _line(self, random: np.random.Generator) -> np.ndarray:
        text = ""
        while len(text) <= LENGTH:
            who, what = random.choice(["ann", "ben", "cleo", "dan"], 2, replace=False)
            text += f"{who} {random.choice(['sees', 'hears', 'likes'])} {what}.\n"
        return np.array([LETTERS.index(letter) for letter in text[: LENGTH + 1]], np.int32)

    def get_state(self) -> dict[str, int]:
        return {"taken": self._taken}

    def set_state(self, state: Mapping[str, int]) -> None:
        self._taken = state["taken"]


def make_step(model: nnx.Module, optimizer: nnx.Optimizer) -> Callable[..., jax.Array]:
    """A step of training that takes and gives back the arrays, each where it was."""
    places = [jax.tree.map(lambda x: x.sharding, nnx.state(node)) for node in (model, optimizer)]

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Transformer, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
        def loss_of(model: Transformer) -> jax.Array:
            logits = model(text[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        # Without this XLA may choose other places, and what is restored would compute otherwise.
        for node, place in zip((model, optimizer), places, strict=True):
            nnx.update(node, jax.lax.with_sharding_constraint(nnx.state(node), place))
        return loss

    return step


def make_mesh(**sizes: int) -> Mesh:
    """A mesh such as data=2, model=4, of the first devices there are."""
    return sharding.make_mesh(sizes)


def run(
    path: str | Path,
    mesh: Mesh,
    rules: Any,
    *,
    steps: int,
    every: int = 5,
    keep_data: bool = True,
    say: Callable[[str], None] = print,
) -> tuple[dict[str, Any], list[float]]:
    """Train until `steps` steps are done, from where the checkpoint is if there is one."""
    model, optimizer = sharding.init(lambda: Transformer(nnx.Rngs(0)), mesh, rules, ADAM)
    data = Sentences()
    state = {"model": model, "optimizer": optimizer} | ({"data": data} if keep_data else {})
    if Path(path, "_METADATA").exists():
        ostraka.restore(path, into=state)
        say(f"resumed after step {int(optimizer.step[...])}")
    done = int(optimizer.step[...])
    if not keep_data:
        data.set_state({"taken": done})
    train_step, rows = make_step(model, optimizer), NamedSharding(mesh, P("data"))
    losses: list[float] = []
    for step in range(done + 1, steps + 1):
        text = next(data)
        batch = jax.make_array_from_callback(text.shape, rows, text.__getitem__)
        losses.append(float(train_step(model, optimizer, batch)))
        say(f"step {step}: loss {losses[-1]:.4f}")
        if step % every == 0 or step == steps:
            ostraka.save(path, state)
    return state, losses


def parse_arguments(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Where the checkpoint is, until which step, a save every so many, the sizes of the mesh."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("path", help="where the checkpoint is, or will be")
    for name, size in {"steps": 20, "every": 5, **defaults}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"default: {size}")
    return parser.parse_args()
