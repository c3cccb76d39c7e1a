"""The command as tests call it, and checkpoints for it to look at."""

import os
import pty
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

PROGRAM = "from ostraka.cli import main; main()"
"""The command in a Python of its own."""
_OF_TERMINALS = ("PAGER", "OSTRAKA_PAGER", "LESS", "LINES", "COLUMNS", "NO_COLOR", "FORCE_COLOR")


@jax.tree_util.register_dataclass
@dataclass
class Holder:
    """A class of its own: a function in it is left to the template."""

    function: Any


def run(*arguments: object, **environment: str | None) -> Result:
    strings = [str(argument) for argument in arguments]
    return CliRunner(env=environment).invoke(main, strings)


def run_on_terminal(*arguments: object, keys: str = "", **environment: str) -> tuple[int, str]:
    """The exit code and the screen of the command on a terminal where somebody types `keys`.

    The terminal has 80 columns and 24 lines.
    """
    terminal, end = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in _OF_TERMINALS}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        stdin=end,
        stdout=end,
        stderr=end,
        env={**clean, "TERM": "xterm", **environment},
    )
    os.close(end)
    os.write(terminal, keys.encode())
    shown = read_screen(terminal)
    return process.wait(), shown


def read_screen(terminal: int) -> str:
    """All that a terminal shows until its other end is closed. Closes it."""
    shown = b""
    try:
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    except OSError:  # how Linux tells that the other end is closed
        pass
    finally:
        os.close(terminal)
    return shown.decode()


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
