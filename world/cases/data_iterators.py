"""grain's iterators beside a model: training must go on with the very next batch."""

from __future__ import annotations

from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from world.case import Program, Registry

CASES = Registry()
WIDTH = 8
NO_SHAPES = {
    "abstract": "an iterator has no abstract form: use it as its own template, as with like"
}


class Rows:
    """What grain reads from."""

    def __len__(self) -> int:
        return 64

    def __repr__(self) -> str:
        return "Rows()"  # grain compares it with the one that a state was taken from

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.random.default_rng(int(index)).uniform(-1, 1, WIDTH).astype(np.float32)


def with_iterator(make_iterator: Any) -> Program:
    def make() -> Any:
        model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        return {"model": model, "optimizer": optimizer, "data": make_iterator()}

    @nnx.jit
    def update(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x[:, ::-1]) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def step(state: Any, i: int) -> Any:
        return state, update(state["model"], state["optimizer"], next(state["data"]))

    return Program(make, step)


@CASES.case(
    "grain", "Dataset: shuffle, repeat, batch, mix", "an iterator's state", left_out=NO_SHAPES
)
def dataset() -> Program:
    def iterator() -> Any:
        one = grain.MapDataset.source(Rows()).shuffle(seed=1).repeat()
        two = grain.MapDataset.source(Rows()).map(lambda x: -x).shuffle(seed=2).repeat()
        return iter(grain.MapDataset.mix([one, two], [0.7, 0.3]).batch(4).to_iter_dataset())

    return with_iterator(iterator)


@CASES.case(
    "grain", "DataLoader with IndexSampler", "an iterator's state as bytes", left_out=NO_SHAPES
)
def loader() -> Program:
    def iterator() -> Any:
        return iter(
            grain.DataLoader(
                data_source=Rows(),
                sampler=grain.samplers.IndexSampler(64, shuffle=True, seed=3, num_epochs=None),
                operations=[grain.transforms.Batch(4)],
                worker_count=0,
            )
        )

    return with_iterator(iterator)
