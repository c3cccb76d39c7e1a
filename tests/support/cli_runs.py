"""The command as tests call it, and checkpoints for it to look at."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
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


def as_json(*arguments: object, **environment: str | None) -> Any:
    """The document that the command prints, whatever its exit code."""
    return json.loads(run(*arguments, "--json", **environment).stdout)


def planned(*arguments: object) -> dict[str, Any]:
    """The first variant of `ostraka plan`, as JSON."""
    result = run("plan", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["variants"][0]


def assert_fails(result: Result, *messages: object, code: int = 2) -> None:
    """The command has printed one line on stderr, with these messages, and nothing else."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("ostraka: ")
    assert result.stderr.count("\n") == 1
    for message in messages:
        assert str(message) in result.stderr


@contextmanager
def closed(path: Path, name: str) -> Generator[Path]:
    """A copy of a directory in which we may not open `name`, not even as root.

    It is not below pytest's own directory, which each start of a pytest closes to others. Whoever
    is called has to be loaded already: no other user may be allowed to read it.
    """
    user = os.geteuid()
    with TemporaryDirectory() as outside:
        copy = Path(shutil.copytree(path, Path(outside) / "copy"))
        for directory in (Path(outside), *copy.rglob("*"), copy):
            directory.chmod(directory.stat().st_mode | 0o055)
        (copy / name).chmod(0)
        try:
            if user == 0:
                os.seteuid(65534)
            yield copy
        finally:
            os.seteuid(user)
            (copy / name).chmod(0o700)


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


_RUN_WITHOUT = """
import json, sys
from ostraka.cli import main
for modules, command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as ended:
        assert not ended.code, (command, ended.code)
    assert not sys.modules.keys() & set(modules), (command, sys.modules.keys() & set(modules))
"""


def run_without(*commands: tuple[str, tuple[object, ...]]) -> None:
    """Run commands in one process. Each must succeed; after it no module that it names is there."""
    given = json.dumps([(modules.split(), [*map(str, words)]) for modules, words in commands])
    done = subprocess.run(
        [sys.executable, "-c", _RUN_WITHOUT, given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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
