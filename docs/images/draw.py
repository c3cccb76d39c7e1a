"""Draw the pictures of the terminal in this folder: `python docs/images/draw.py`.

Real checkpoints are written into a temporary directory, the real commands are run on them, and what
they print is drawn. Nothing is made up; times and sizes are those of the machine that drew them.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from click.testing import CliRunner
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.text import Text

import ostraka
from ostraka.cli import main

FOLDER = Path(__file__).parent
HOME = "/home/me"
"""Shown in the place of the temporary directory."""

STEP = "runs/step_00000300"
LEAF = "model/blocks/1/mlp/kernel"
PICTURES = {
    "show": f"ostraka show {STEP}",
    "leaf": f"ostraka show {STEP} {LEAF} --stats --slice 0:3,:4",
    "diff": f"ostraka diff runs/step_00000200 {STEP} 'model/**' --rtol 1e-3",
    "ls": "ostraka ls runs --verify",
    "plan": "ostraka plan llama-3.1-8b --mesh data=16,model=8 --rules fsdp+tp --optimizer adamw "
    "--write-bandwidth 2GB/s --read-bandwidth 2GB/s",
}


def make_state(step: int) -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))

    def put(seed: int, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
        # Every second leaf is trained; the others are as they were.
        key = jax.random.fold_in(jax.random.key(seed), step if seed % 2 else 0)
        values = jax.random.normal(key, shape, jnp.bfloat16) * 0.02
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    blocks = {
        str(number): {
            "attention": {"kernel": put(10 * number + 2, (512, 1536), "fsdp", "tp")},
            "mlp": {
                "kernel": put(10 * number + 3, (512, 2048), "fsdp", "tp"),
                "bias": put(10 * number + 4, (2048,), "tp"),
            },
        }
        for number in range(2)
    }
    model = {"embedding": put(1, (8192, 512), "tp", "fsdp"), "blocks": blocks}
    return {"model": model, "rng": jax.random.key(step), "step": step, "run": "first try"}


def write_steps(root: str) -> None:
    with ostraka.Manager(root, every=None, keep=None, asynchronous=False) as manager:
        for step in (100, 200, 300):
            manager.save(step, make_state(step), metrics={"loss": round(400 / (100 + step), 3)})
        manager.pin(100)


def run(command: str, columns: int) -> str:
    """What a command prints on a terminal with colours."""
    environment = {"FORCE_COLOR": "1", "COLUMNS": str(columns), "TERM": "xterm-256color"}
    result = CliRunner(env=environment).invoke(main, shlex.split(command)[1:])
    if result.exit_code not in (0, 1):
        raise SystemExit(f"{command}: {result.output}")
    return result.stdout.replace(os.getcwd(), HOME)


def draw(command: str, output: str) -> str:
    """An SVG picture of a command and its output, with no font from elsewhere."""
    text = Text.assemble(("$ ", "bold green"), (command, "bold"), "\n", Text.from_ansi(output))
    width = max(len(line) for line in text.plain.splitlines()) + 1
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(text, no_wrap=True, crop=False)
    svg = console.export_svg(title="ostraka", unique_id="ostraka")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    # Some viewers would drop the spaces that a line begins with.
    svg = svg.replace("<svg ", '<svg xml:space="preserve" ', 1)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main_program() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_steps("runs")
        for name, command in PICTURES.items():
            (FOLDER / f"{name}.svg").write_text(draw(command, run(command, 100)), "utf-8")
        os.chdir("/")


if __name__ == "__main__":
    main_program()
