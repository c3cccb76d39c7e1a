"""FSDP: each device has a part of every large array, of the optimizer's too, and of each batch.

    python examples/train_fsdp.py runs/fsdp --steps 20
    python examples/train_fsdp.py runs/fsdp --steps 40 --data 4   # goes on, on 4 devices

Stop it whenever you like, kill -9 included: the next call goes on from the last checkpoint. What
was cut in 8 parts is read in 4, with no more bytes read than the model has.
"""

from __future__ import annotations

import jax

from ostraka import sharding
from tiny_transformer import make_mesh, parse_arguments, run


def main() -> None:
    given = parse_arguments(__doc__, data=8)
    jax.config.update("jax_num_cpu_devices", 8)  # simulated, on any machine
    mesh = make_mesh(data=given.data)
    rules = sharding.fsdp("data", min_size=256)
    run(given.path, mesh, rules, steps=given.steps, every=given.every)


if __name__ == "__main__":
    main()
