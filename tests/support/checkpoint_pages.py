"""Checkpoints for pages: a transformer, untrusted names, very many leaves or devices."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import ostraka
from ostraka import sharding
from ostraka.layout.metadata import Metadata, encode_metadata
from ostraka.layout.plan_write import plan_write
from ostraka.layout.shard_file import METADATA_NAME
from ostraka.layout.spec import LeafSpec, MeshSpec
from ostraka.tree.json_tree import encode
from ostraka.tree.nodes import ArrayNumber, nested_tree

WIDTH = 32
BLOCKS = 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.query = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, 256, use_bias=False, rngs=rngs)


def save_transformer(path: Path, *, parity: int) -> None:
    """Save a transformer and its optimizer, sharded over fsdp and tp, in the background."""
    rules = sharding.combine(sharding.fsdp("fsdp", min_size=64), sharding.tensor_parallel("tp"))
    mesh = sharding.make_mesh({"fsdp": 4, "tp": 2})
    model, optimizer = sharding.init(
        lambda: Transformer(nnx.Rngs(0)), mesh, rules, optax.adamw(1e-3)
    )
    spoiled = np.array([1.0, np.nan, np.inf, 0.0], np.float32)
    tree = {
        "model": model,
        "optimizer": optimizer,
        "key": jax.random.key(3),
        "spoiled": spoiled,
        "step": 1200,
    }
    metadata = {"ostraka.manager": {"step": 1200, "metrics": {"loss": 2.25}}}
    ostraka.save_async(path, tree, parity=parity, metadata=metadata).wait()


HOSTILE_NAMES = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(2)</script>",
    "javascript:alert(1)",
    "\x1b[31mred\x07\r\n",
    "\u202egnp.exe\u200b",
    "__proto__",
    "constructor",
    "{{7*7}}${1}`",
    "long" * 500,
    "\u0000zero",
    "quote\"and'back\\slash",
)


def save_hostile(path: Path) -> None:
    """Save arrays and values whose names would be markup, scripts or orders to a terminal."""
    tree: dict[str, Any] = {
        name: np.arange(n + 1, dtype=np.float32) for n, name in enumerate(HOSTILE_NAMES)
    }
    ostraka.save(path, {"a": tree, "text": HOSTILE_NAMES[0], "b": {"<b>x</b>": 7}})


def write_planned(
    path: Path, leaves: Sequence[LeafSpec], mesh: MeshSpec, *, per_process: int, lost: int = 0
) -> None:
    """Write the `_METADATA` of a save that was only planned, and sparse files beside it."""
    processes = [device // per_process for device in mesh.devices]
    plan = plan_write(list(leaves), [mesh], processes)
    numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
    tree = nested_tree({name: (name, ArrayNumber(number)) for name, number in numbers.items()})
    metadata = Metadata(
        id="0123456789abcdef",
        writer={
            "ostraka": "0.1.0",
            "time": "2026-11-18T10:00:00.000+00:00",
            "hosts": [f"host-{process:05d}" for process in range(processes[-1] + 1)],
            "timeline": {"capture_s": 0.25, "write_s": 4.0, "blocked_s": 0.5, "bytes": 1},
        },
        process_of=plan.process_of,
        tree=encode(tree, numbers, {}),
        meshes=plan.meshes,
        layouts=plan.layouts,
        leaves=plan.leaves,
        files=plan.files,
        indexes={},
        user={},
    )
    sizes = metadata.file_sizes()
    (path / next(iter(sizes))).parent.mkdir(parents=True)
    (path / METADATA_NAME).write_bytes(encode_metadata(metadata))
    for name, size in list(sizes.items())[lost:]:
        with (path / name).open("wb") as file:
            file.truncate(size)


def many_leaves(count: int) -> list[LeafSpec]:
    """Leaves of many blocks, sharded along x."""
    kinds = ("attention/query", "attention/key", "attention/value", "mlp/up", "mlp/down")
    return [
        LeafSpec(
            f"model/blocks/{n // 10}/{kinds[n // 2 % 5]}/{'kernel' if n % 2 else 'bias'}",
            "jax",
            "float32",
            (64, 512) if n % 2 else (512,),
            0,
            (("x",),) if n % 2 else (),
        )
        for n in range(count)
    ]
