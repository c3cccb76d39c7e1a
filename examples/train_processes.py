"""Several real processes, as on several machines: each has its devices, and writes its own part.

    python examples/train_processes.py runs/p --steps 20
    python examples/train_processes.py runs/p --steps 40 --processes 2 --devices 4

FSDP over the processes, tensor parallelism over the devices of each. On a cluster the processes are
started by its own tools and call `jax.distributed.initialize`; here `ostraka.testing` does both.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from ostraka import sharding
from ostraka.testing import run_processes
from tiny_transformer import make_mesh, parse_arguments, run


def train(path: str, steps: int, every: int, say: Callable[[str], None] = print) -> list[float]:
    """What every process runs; the first one says how it goes."""
    mesh = make_mesh(data=jax.process_count(), model=jax.local_device_count())
    rules = sharding.tensor_parallel("model") | sharding.fsdp("data", min_size=256)
    # All processes make the same text, and are at the step of the optimizer in it. That holds for
    # any number of them, which a position that each process keeps for itself would not.
    _, losses = run(
        path,
        mesh,
        rules,
        steps=steps,
        every=every,
        keep_data=False,
        say=say if jax.process_index() == 0 else lambda line: None,
    )
    return losses


def main() -> None:
    given = parse_arguments(__doc__, processes=4, devices=2)
    results = run_processes(
        train,
        given.path,
        given.steps,
        given.every,
        processes=given.processes,
        devices_per_process=given.devices,
    )
    print(results[0].stdout, end="")


if __name__ == "__main__":
    main()
