"""Data parallelism: every device has the whole model, and a part of each batch.

    python examples/train_data_parallel.py runs/dp --steps 20
    python examples/train_data_parallel.py runs/dp --steps 40 --data 2   # goes on, on 2 devices

Stop it whenever you like, kill -9 included: the next call goes on from the last checkpoint. Each
device writes an equal share of the model, although all of them have all of it.
"""

from __future__ import annotations

import jax

from ostraka import sharding
from tiny_transformer import make_mesh, parse_arguments, run


def main() -> None:
    given = parse_arguments(__doc__, data=8)
    jax.config.update("jax_num_cpu_devices", 8)  # simulated, on any machine
    mesh = make_mesh(data=given.data)
    run(given.path, mesh, sharding.data_parallel(), steps=given.steps, every=given.every)


if __name__ == "__main__":
    main()
