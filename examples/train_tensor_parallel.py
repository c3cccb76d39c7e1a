"""Tensor parallelism: layers are cut by heads and hidden units, the rest as FSDP does it.

    python examples/train_tensor_parallel.py runs/tp --steps 20
    python examples/train_tensor_parallel.py runs/tp --steps 40 --data 4 --model 2
    python examples/train_fsdp.py runs/tp --steps 60   # the same checkpoint, cut otherwise

Stop it whenever you like, kill -9 included: the next call goes on from the last checkpoint.
"""

from __future__ import annotations

import jax

from ostraka import sharding
from tiny_transformer import make_mesh, parse_arguments, run


def main() -> None:
    given = parse_arguments(__doc__, data=2, model=4)
    jax.config.update("jax_num_cpu_devices", 8)  # simulated, on any machine
    mesh = make_mesh(data=given.data, model=given.model)
    rules = sharding.tensor_parallel("model") | sharding.fsdp("data", min_size=256)
    run(given.path, mesh, rules, steps=given.steps, every=given.every)


if __name__ == "__main__":
    main()
