"""The command as tests call it, and checkpoints for it to look at."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from click.testing import CliRunner, Result
from jax.sharding import NamedSharding, PartitionSpec

import ostraka
from ostraka.cli import main


@jax.tree_util.register_dataclass
@dataclass
class Holder:
    """A class of its own: a function in it is left to the template."""

    function: Any


def run(*arguments: object, **environment: str | None) -> Result:
    strings = [str(argument) for argument in arguments]
    return CliRunner(env=environment).invoke(main, strings)


def run_without(modules: set[str], *arguments: object) -> None:
    """Run the command in a process of its own; it must succeed, and import none of these."""
    program = (
        "import sys\n"
        "from ostraka.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code\n"
        f"assert not {modules!r} & sys.modules.keys()\n"
    )
    command = [sys.executable, "-c", program, *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True)


def put(array: object, *axes: str | None) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))


def save_model(path: Any, *, scale: float = 1.0) -> Any:
    """A checkpoint of a few leaves of many kinds."""
    kernel = (jnp.arange(64 * 32, dtype=jnp.float32) * scale).astype(jnp.bfloat16)
    tree = {
        "kernel": put(kernel.reshape(64, 32), "fsdp", "tp"),
        "key": jax.random.key(7),
        "table": np.ones((3, 5), np.int8),
        "step": 100,
        "rate": float("nan"),
        "note": "x" * 500,
    }
    ostraka.save(path, tree, metadata={"run": "first"})
    return path


def flip(path: Path) -> Path:
    """Change the last byte of the first shard."""
    shard = min(path.glob("shards-*/*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return shard
