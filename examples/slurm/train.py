"""A training run for Slurm that is preempted, requeued, and resumes where it was.

    sbatch examples/slurm/train.sbatch runs/slurm

Slurm starts one process for each task. `jax.distributed.initialize()` finds the others by Slurm's
variables. The manager notes SIGTERM, saves the step that all processes agree on, and ends the
program. The next run resumes there.
"""

from __future__ import annotations

import argparse
import logging
import time

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ostraka


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        # Each process holds a part of the kernels.
        across = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
        back = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", None))
        self.inner = nnx.Linear(32, 256, kernel_init=across, rngs=rngs)
        self.outer = nnx.Linear(256, 8, kernel_init=back, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(jax.nn.relu(self.inner(x)))


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    def loss(model: Model) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def batch(step: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Return the data of a step: the same whenever it is asked for."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(16, 32)).astype(np.float32)
    y = np.abs(x[:, :8]).argmax(axis=1).astype(np.int32)
    make = jax.make_array_from_callback
    return (
        make(x.shape, sharding, lambda index: x[index]),
        make(y.shape, sharding, lambda index: y[index]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the directory or bucket of the checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--seconds-per-step", type=float, default=0.0)
    given = parser.parse_args()

    jax.distributed.initialize()
    is_first = jax.process_index() == 0
    logging.basicConfig(level=logging.INFO if is_first else logging.WARNING, format="%(message)s")

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    jax.set_mesh(mesh)
    model = nnx.jit(lambda: Model(nnx.Rngs(0)))()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    state = {"model": model, "optimizer": optimizer}

    with ostraka.Manager(given.path, every=given.every, keep=2) as manager:
        start = manager.resume(state)
        for step in range(start + 1, given.steps + 1):
            loss = train_step(model, optimizer, *batch(step, NamedSharding(mesh, P("data"))))
            time.sleep(given.seconds_per_step)
            if is_first and step % 10 == 0:
                print(f"step {step} of {given.steps}, loss {loss:.6f}", flush=True)
            manager.save(step, state, force=step == given.steps)


if __name__ == "__main__":
    main()
