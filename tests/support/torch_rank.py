"""One of several PyTorch processes that load shard files with PyTorch's own reader.

Runs in an environment with torch, numpy and safetensors, and no JAX. Standard input is JSON:
`directory` with shard files, `arrays` (path → [shape, torch dtype, file with the expected bytes]),
`foreign` (paths that must raise). Every rank loads each array sharded along its last dimension,
compares its part with what is expected, and prints a line of JSON.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false
from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def main(rank: int, ranks: int, meeting: str) -> None:
    task = json.load(sys.stdin)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    reader = HuggingFaceStorageReader(task["directory"])
    state: dict[str, Any] = {}
    expected: dict[str, bytes] = {}
    for path, (shape, dtype, file) in task["arrays"].items():
        whole = torch.from_numpy(np.load(file)).view(getattr(torch, dtype)).reshape(shape)
        is_cut = bool(shape) and shape[-1] % ranks == 0
        own = whole.chunk(ranks, -1)[rank] if is_cut else whole
        expected[path] = bytes_of(own)
        empty = torch.zeros(own.shape, dtype=whole.dtype)
        placement = Shard(len(shape) - 1) if is_cut else Replicate()
        state[path] = DTensor.from_local(empty, mesh, [placement], run_check=False)
    dcp.load(state, storage_reader=reader)
    wrong = [path for path in state if bytes_of(state[path].to_local()) != expected[path]]
    raised = {}
    for path, shape in task["foreign"].items():
        target = {path: torch.zeros(shape)}
        try:
            dcp.load(target, storage_reader=HuggingFaceStorageReader(task["directory"]))
        except BaseException as error:  # DCP's own error is none of Exception's.
            raised[path] = str(error).strip().splitlines()[-1]
    dist.barrier()
    print(json.dumps({"rank": rank, "wrong": wrong, "raised": raised}), flush=True)
    # Without PyTorch's own shutdown, which aborts now and then when the machine is busy.
    os._exit(0)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
