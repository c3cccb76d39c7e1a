"""One of four PyTorch processes that save the same bytes with torch.distributed.checkpoint.

Runs in an environment of its own, which has torch and numpy and no JAX.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.data import BLOCKS, Size, make_rows
from bench.machine import free_memory
from bench.ranks import RANKS, Command, serve

# Four ranks on a few cores: more threads a rank were no faster than two.
TUNED_THREADS = 2


class TorchRank:
    """Holds this rank's rows of every tensor, and does what it is told.

    DCP loads into tensors that exist already: it is spared the fresh memory that the others pay
    for, as it would be in a training run.
    """

    def __init__(self, size: Size, rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        rows = size.rows * (BLOCKS // RANKS) // BLOCKS
        self._state: dict[str, Any] = {}
        for i, name in enumerate(size.names):
            local = torch.from_numpy(make_rows(size, i, rank * rows, (rank + 1) * rows))
            self._state[name] = DTensor.from_local(local, mesh, [Shard(0)])
        self._target = {name: torch.zeros_like(value) for name, value in self._state.items()}

    def prepare(self, _: Command) -> None:
        """Come to rest, and wipe what the last load brought."""
        for value in self._target.values():
            value.to_local().zero_()
        free_memory()

    def save(self, command: Command) -> None:
        """Save as it comes, or with threads and a file for each."""
        if command["name"] == "dcp":
            dcp.save(self._state, checkpoint_id=command["path"])
        else:
            writer = dcp.FileSystemWriter(command["path"], thread_count=TUNED_THREADS)
            dcp.save(self._state, storage_writer=writer)

    def restore(self, command: Command) -> None:
        """Load into the target tensors."""
        dcp.load(self._target, checkpoint_id=command["path"])

    def check(self, command: Command) -> None:
        """Raise unless the last load brought back the state."""
        for name, value in self._state.items():
            want, got = value.to_local(), self._target[name].to_local()
            if not torch.equal(want.view(torch.int32), got.view(torch.int32)):
                raise AssertionError(f"{command['name']}: {name} came back different")


def main() -> None:
    """Join the others, then serve."""
    setup = json.loads(sys.argv[1])
    address = f"tcp://127.0.0.1:{setup['port']}"
    dist.init_process_group("gloo", init_method=address, rank=setup["rank"], world_size=RANKS)
    rank = TorchRank(Size(**setup["size"]), setup["rank"])
    serve(
        {
            "hello": lambda _: None,
            "prepare": rank.prepare,
            "save": rank.save,
            "restore": rank.restore,
            "check": rank.check,
        },
        timed={"save", "restore"},
    )
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
