"""Orbax's checkpoints read by us and by Orbax itself: `python -m bench.orbax_read`.

64 leaves of 16 MiB and 1,000 leaves of 256 KiB of random float32, sharded over eight devices,
written by Orbax as it comes (zarr2), with zarr3, and without compression; restored onto the mesh
they were on, and onto another. Both read in turns, warm; the medians of seconds and of CPU seconds
are shown.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

_DEVICES = "--xla_force_host_platform_device_count=8"
CASES = {"64 leaves of 16 MiB": (64, (2048, 2048)), "1,000 leaves of 256 KiB": (1000, (256, 256))}
FORMS = {
    "as it comes": {},
    "zarr3": {"use_zarr3": True},
    "not compressed": {"use_compression": False},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="the part of the leaves to take")
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for case, (leaves, shape) in CASES.items():
            count = max(int(leaves * arguments.scale), 1)
            for form, options in FORMS.items():
                path = Path(directory) / "checkpoint"
                for onto, found in measure(path, count, shape, options, arguments.rounds).items():
                    rows.append({"case": case, "form": form, "onto": onto, **found})
                    if not arguments.as_json:
                        print(show(rows[-1]), flush=True)
    if arguments.as_json:
        print(json.dumps(rows, indent=1))


def measure(
    path: Path, count: int, shape: tuple[int, ...], options: dict[str, Any], rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds of both, by the mesh that is restored onto. The checkpoint is gone afterwards."""
    import shutil

    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import ostraka

    devices = np.array(jax.devices())
    saved = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    other = NamedSharding(Mesh(devices.reshape(2, 4), ("x", "y")), PartitionSpec("x", "y"))
    rng = np.random.default_rng(0)
    tree = {
        f"leaf{n}": jax.device_put(rng.standard_normal(shape, np.float32), saved)
        for n in range(count)
    }
    handler: Any = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, tree)
    found: dict[str, dict[str, float]] = {}
    for onto, sharding in (("the same mesh", saved), ("2 × 4 devices", other)):
        like = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for name in tree}

        def ours(like: Any = like) -> Any:
            return ostraka.restore(path, like=like)

        def theirs(like: Any = like) -> Any:
            with ocp.StandardCheckpointer() as reader:
                return reader.restore(path, like)

        for name in (next(iter(tree)), list(tree)[-1]):
            for work in (ours, theirs):
                assert np.array_equal(np.asarray(work()[name]), np.asarray(tree[name]))
        found[onto] = in_turns({"ostraka": ours, "orbax": theirs}, rounds)
    shutil.rmtree(path)
    return found


def in_turns(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    import jax

    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, work in works.items():
            gc.collect()
            begin, cpu = time.perf_counter(), cpu_seconds()
            result = jax.block_until_ready(work())
            seconds.setdefault(f"{name}_s", []).append(time.perf_counter() - begin)
            seconds.setdefault(f"{name}_cpu_s", []).append(cpu_seconds() - cpu)
            del result
    return {name: median(values) for name, values in seconds.items()}


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:24} {row['form']:15} {row['onto']:14} "
        f"ostraka {row['ostraka_s']:6.2f} s ({row['ostraka_cpu_s']:5.2f} s CPU)  "
        f"orbax {row['orbax_s']:6.2f} s ({row['orbax_cpu_s']:5.2f} s CPU)  "
        f"{row['orbax_s'] / row['ostraka_s']:5.2f}× "
        f"({row['orbax_cpu_s'] / row['ostraka_cpu_s']:.2f}× by CPU)"
    )


if __name__ == "__main__":
    main()
