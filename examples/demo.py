"""A short tour: plan a checkpoint, save it with 4 processes, look at it, restore it, repair it.

Run it with `make demo`. Every process is a real JAX process with CPU devices of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.markup import escape

import ostraka
from ostraka.testing import ProcessesFailed, run_processes

CHECKPOINT = Path(__file__).resolve().parents[1] / "demo-checkpoint"
AXES = ("fsdp", "tp")
VOCABULARY, WIDTH, LAYERS = 16384, 256, 4
STEP = 1000
LEAF = "params/embedding"


# The model: shapes, dtypes and how each array is cut over the mesh


@dataclass(frozen=True)
class Array:
    shape: tuple[int, ...]
    spec: P
    dtype: Any = jnp.bfloat16


def describe_state() -> dict[str, Any]:
    """A small transformer with its Adam moments."""

    def norm() -> Array:
        return Array((WIDTH,), P(), jnp.float32)

    layer = {
        "attention": {
            "norm": norm(),
            "qkv": Array((WIDTH, 3 * WIDTH), P("fsdp", "tp")),
            "out": Array((WIDTH, WIDTH), P("tp", "fsdp")),
        },
        "mlp": {
            "norm": norm(),
            "up": Array((WIDTH, 4 * WIDTH), P("fsdp", "tp")),
            "down": Array((4 * WIDTH, WIDTH), P("tp", "fsdp")),
        },
    }
    params = {
        "embedding": Array((VOCABULARY, WIDTH), P("tp", "fsdp")),
        "layers": [layer] * LAYERS,
        "norm": norm(),
    }
    moments = jax.tree.map(lambda array: Array(array.shape, array.spec, jnp.float32), params)
    return {"params": params, "adam": {"mu": moments, "nu": moments}}


def make_values() -> dict[str, Any]:
    """The same numbers on every process, in plain memory: what everything is compared with."""

    def fill(path: Any, array: Array) -> np.ndarray:
        random = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return random.standard_normal(array.shape, np.float32).astype(array.dtype)

    return jax.tree_util.tree_map_with_path(fill, describe_state())


def make_state(mesh: Mesh) -> dict[str, Any]:
    """The state of a training run, each array on all devices of all processes."""

    def place(array: Array, values: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, array.spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: values[index])

    arrays = jax.tree.map(place, describe_state(), make_values())
    return {**arrays, "rng": jax.random.key(42), "step": STEP}


# What the processes run


def save_state(path: str, mesh_shape: tuple[int, int]) -> float:
    state = make_state(jax.make_mesh(mesh_shape, AXES))
    begin = time.perf_counter()
    ostraka.save(path, state, parity=1, metadata={"made by": "examples/demo.py"})
    return time.perf_counter() - begin


def restore_state(path: str, mesh_shape: tuple[int, int] | None) -> dict[str, float]:
    """Restore without a template and compare what this process holds, bit for bit."""
    mesh = None if mesh_shape is None else jax.make_mesh(mesh_shape, AXES)
    begin = time.perf_counter()
    state = ostraka.restore(path, mesh=mesh)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - begin
    if state.pop("step") != STEP:
        raise AssertionError("the step differs")
    key = jax.random.key_data(state.pop("rng")).addressable_data(0)
    if not np.array_equal(key, jax.random.key_data(jax.random.key(42))):
        raise AssertionError("the PRNG key differs")
    held = jax.tree.leaves(jax.tree_util.tree_map_with_path(compare, state, make_values()))
    return {"seconds": seconds, "arrays": len(held), "bytes": sum(held)}


def compare(path: Any, array: jax.Array, expected: np.ndarray) -> int:
    """The bytes of an array that this process holds, after comparing them."""
    name = jax.tree_util.keystr(path)
    if array.shape != expected.shape or array.dtype != expected.dtype:
        raise AssertionError(f"{name} came back as {array.dtype}{array.shape}")
    boxes = {str(shard.index): shard for shard in array.addressable_shards}
    for shard in boxes.values():
        if np.asarray(shard.data).tobytes() != expected[shard.index].tobytes():
            raise AssertionError(f"{name} differs at {shard.index}")
    return sum(shard.data.nbytes for shard in boxes.values())


def restore_damaged(path: str) -> tuple[dict[str, float], str]:
    """Restore a checkpoint that has lost a file. Returns the result and the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = restore_state(path, None)
    if not caught:
        raise AssertionError("a damaged checkpoint was restored without a word")
    return result, str(caught[0].message)


# The tour

console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    began = time.perf_counter()
    console.print("[bold]Ostraka[/]: 4 processes save a model, 2 and then 1 restore it.\n")
    try:
        planned = show_plan()
        show_save(planned)
        show_content()
        show_restore(processes=2, devices=4, mesh_shape=(2, 4))
        show_restore(processes=1, devices=1, mesh_shape=None)
        show_loss()
    except (AssertionError, ostraka.errors.OstrakaError, ProcessesFailed) as error:
        console.print(f"[bold red]This is not as it should be:[/] {escape(str(error))}")
        return 1
    took = time.perf_counter() - began
    console.print(f"[bold green]All is as it should be[/], after {took:.0f} s.\n")
    show_files()
    return 0


def show_plan() -> ostraka.Plan:
    title("Plan: what 4 processes × 2 devices will write, before there is a model")
    described = describe_state()
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), described)
    planned = ostraka.plan(
        {**abstract, "rng": jax.random.key(42), "step": STEP},
        mesh=dict(zip(AXES, (4, 2), strict=True)),
        specs={**jax.tree.map(lambda a: a.spec, described), "rng": P()},
        processes=4,
        parity=1,
    )
    say(f"{len(planned.files)} files, {mebibytes(planned.total_bytes)} in all,")
    say(f"{planned.process_spread.skew:.1%} more for the busiest process than for the mean.\n")
    return planned


def show_save(planned: ostraka.Plan) -> None:
    arrays = jax.tree.leaves(describe_state())
    title("Save: 4 processes × 2 devices, as a mesh of fsdp=4 × tp=2")
    say(f"A small transformer with its Adam moments: {len(arrays)} arrays in bfloat16 and float32,")
    say("sharded over both axes or replicated, a PRNG key, and a step. Parity files are extra.")
    with waiting("4 JAX processes start, make the model and save it"):
        seconds = run_values(save_state, str(CHECKPOINT), (4, 2), processes=4, devices=2)
    total = 0
    for index in sorted(CHECKPOINT.glob("shards-*/process_*.json")):
        written = json.loads(index.read_text())
        sizes = [file["size"] for file in written["files"].values()]
        total += sum(sizes)
        process = written["process"]
        took = f"{seconds[process]:.2f} s"
        say(f"process {process} wrote {len(sizes)} files, {mebibytes(sum(sizes))}, in {took}")
    expected = sum(array.dtype.dtype.itemsize * int(np.prod(array.shape)) for array in arrays)
    check(expected <= total < 1.05 * expected, f"{total} bytes were written for {expected}")
    sizes = {f.name: f.stat().st_size for f in CHECKPOINT.rglob("shard_*")}
    shards = {name: size for name, size in planned.files.items() if name in sizes}
    check(shards == sizes, "the files differ from the plan")
    size = (CHECKPOINT / "_METADATA").stat().st_size
    say(f"The processes wrote each byte once: {mebibytes(total)} in all, every file as planned.")
    say(f"Then _METADATA appeared ({size:,} bytes). That commits the checkpoint.\n")


def show_content() -> None:
    title("Look: the tree, and how one array lies over the devices")
    command = str(Path(sys.executable).with_name("ostraka"))
    for arguments in ([], [LEAF]):
        shown = " ".join(["$ ostraka show", short(CHECKPOINT), *arguments])
        say(f"[dim]{shown}[/]")
        sys.stdout.flush()
        subprocess.run([command, "--no-pager", "show", str(CHECKPOINT), *arguments], check=True)
        console.print()


def show_restore(*, processes: int, devices: int, mesh_shape: tuple[int, int] | None) -> None:
    which = "1 process × 1 device, no mesh at all"
    if mesh_shape is not None:
        which = (
            f"{processes} processes × {devices} devices, fsdp={mesh_shape[0]} × tp={mesh_shape[1]}"
        )
    title(f"Restore: {which}")
    with waiting("new JAX processes start and restore"):
        results = run_values(
            restore_state, str(CHECKPOINT), mesh_shape, processes=processes, devices=devices
        )
    for process, result in enumerate(results):
        held = f"{result['arrays']} arrays, {mebibytes(result['bytes'])} of them here"
        say(f"process {process}: {held}, in {result['seconds']:.2f} s: [green]equal bit for bit[/]")
    console.print()


def show_loss() -> None:
    title("Loss: a bit flips in one file, and another file is deleted")
    flipped, deleted = sorted(CHECKPOINT.glob("shards-*/shard_*"))[3:5]
    flip_bit(flipped, position_of(LEAF, flipped))
    message = verify_damaged()
    check(flipped.name in message and LEAF in message, f"file or leaf is not named: {message}")
    say(f"verify raises: [red]{escape(message)}[/]")
    say(f"Parity repairs it: [green]{escape(str(ostraka.repair(CHECKPOINT)))}[/]")
    deleted.unlink()
    with waiting("a JAX process restores it without the file"):
        ((result, warning),) = run_values(restore_damaged, str(CHECKPOINT), processes=1, devices=1)
    say(f"restore warns: [yellow]{escape(warning)}[/]")
    say(f"and computes it from parity: {result['arrays']} arrays, [green]equal bit for bit[/]")
    say(f"Repaired again: [green]{escape(str(ostraka.repair(CHECKPOINT)))}[/]")
    say(f"[green]{escape(str(ostraka.verify(CHECKPOINT)))}[/]\n")


def position_of(leaf: str, shard: Path) -> int:
    """A byte in the middle of a leaf, as the header of a safetensors file tells it."""
    data = shard.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8:header_bytes])[leaf]["data_offsets"]
    return header_bytes + (start + stop) // 2


def verify_damaged() -> str:
    try:
        ostraka.verify(CHECKPOINT)
    except ostraka.errors.Damaged as error:
        return str(error)
    raise AssertionError("verify did not see the damage")


def flip_bit(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        (byte,) = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))


def show_files() -> None:
    title(f"The files are in {escape(short(CHECKPOINT))}")
    (shards,) = CHECKPOINT.glob("shards-*")
    names = sorted(file.name for file in shards.iterdir())
    say("_METADATA")
    for start in ("process", "shard"):
        found = [name for name in names if name.startswith(start)]
        say(f"{shards.name}/{found[0]} … {found[-1]}")
    command = Path(sys.executable).with_name("ostraka")
    say(escape(f"All of it at a glance:  {short(command)} show {short(CHECKPOINT)}"))
    planning = f"{short(command)} plan llama-3.1-70b --mesh data=64,model=8 --optimizer adamw"
    say(escape(f"A larger one, in theory:  {planning}"))
    file = short(shards / found[0])
    code = f"from safetensors import safe_open; print(*safe_open('{file}', 'np').keys())"
    say("One shard with the safetensors package (pip install safetensors):")
    say(escape(f'  {short(Path(sys.executable))} -c "{code}"'))


# Small things


def run_values(function: Any, *args: Any, processes: int, devices: int) -> list[Any]:
    results = run_processes(function, *args, processes=processes, devices_per_process=devices)
    return [result.value for result in results]


def check(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def title(text: str) -> None:
    console.print(f"[bold]{text}[/]")


def say(text: str) -> None:
    console.print(f"  {text}")


def waiting(text: str) -> Any:
    """A spinner on a terminal, nothing in a pipe."""
    return console.status(text)


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def short(path: Path) -> str:
    """A path the way one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


if __name__ == "__main__":
    sys.exit(main())
