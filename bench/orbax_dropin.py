"""What the drop-in for Orbax adds to our own calls: `python -m bench.orbax_dropin`.

Trees of 10, 100 and 1,000 small JAX arrays, saved and restored by `ostraka.compat.orbax` and by
`ostraka` itself, in turns. Shown are medians of CPU time, and of the differences of turns that
follow each other, in CPU time and in time.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

COUNTS = (10, 100, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--leaves", type=int, action="append", help="other numbers of leaves")
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.disable(logging.CRITICAL)
    rows: list[dict[str, Any]] = []
    for count in arguments.leaves or COUNTS:
        with tempfile.TemporaryDirectory(dir=_in_memory()) as directory:
            for case, pair in cases(Path(directory), count).items():
                row = {"case": case, "leaves": count, **in_turns(*pair, arguments.rounds)}
                rows.append(row)
                if not arguments.as_json:
                    print(show(row), flush=True)
    if arguments.as_json:
        print(json.dumps(rows, indent=1))


def _in_memory() -> str | None:
    """Where files cost least: what is measured is the work of the program."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def cases(root: Path, count: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name, our own call and that of the drop-in."""
    import jax
    import jax.numpy as jnp

    import ostraka
    import ostraka.compat.orbax as ocp

    tree: dict[str, dict[str, Any]] = {}
    for number in range(count):
        layer = tree.setdefault(f"layer{number // 10}", {})
        layer[f"kernel{number % 10}"] = jax.device_put(jnp.full((8, 8), number), jax.devices()[0])

    def outline(array: Any) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    like = jax.tree.map(outline, tree)
    args = ocp.checkpoint_utils.construct_restore_args(like)
    trees, standard = ocp.PyTreeCheckpointer(), ocp.StandardCheckpointer()
    ours, theirs, other = root / "ours", root / "theirs", root / "other"
    ostraka.save(ours, tree)
    trees.save(theirs, tree)

    def anew(save: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            save()
            shutil.rmtree(other)

        return run

    def save_standard() -> None:
        standard.save(other, tree)
        standard.wait_until_finished()

    return {
        "PyTreeCheckpointer.save": (
            anew(lambda: ostraka.save(other, tree)),
            anew(lambda: trees.save(other, tree)),
        ),
        "StandardCheckpointer.save": (
            anew(lambda: ostraka.save_async(other, tree).wait()),
            anew(save_standard),
        ),
        "StandardCheckpointer.restore(template)": (
            lambda: ostraka.restore(ours, like=like),
            lambda: standard.restore(theirs, like),
        ),
        "PyTreeCheckpointer.restore(item, restore_args)": (
            lambda: ostraka.restore(ours, like=like),
            lambda: trees.restore(theirs, item=like, restore_args=args),
        ),
        "PyTreeCheckpointer.restore()": (
            lambda: ostraka.restore(ours),
            lambda: trees.restore(theirs),
        ),
    }


def in_turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Medians in milliseconds. Who comes first alternates."""
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for work in (ours, theirs):
        work()
    for turn in range(rounds):
        pair = [("ours", ours), ("theirs", theirs)]
        for name, work in pair if turn % 2 else pair[::-1]:
            gc.collect()
            begin, cpu = time.perf_counter(), time.process_time()
            work()
            found[name].append((time.perf_counter() - begin, time.process_time() - cpu))
    both = list(zip(found["ours"], found["theirs"], strict=True))
    return {
        "ours_cpu_ms": 1e3 * median(cpu for _, cpu in found["ours"]),
        "dropin_cpu_ms": 1e3 * median(cpu for _, cpu in found["theirs"]),
        "added_cpu_ms": 1e3 * median(b[1] - a[1] for a, b in both),
        "added_ms": 1e3 * median(b[0] - a[0] for a, b in both),
    }


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['leaves']:6,} leaves  {row['case']:48} ostraka {row['ours_cpu_ms']:7.2f} ms CPU  "
        f"drop-in {row['dropin_cpu_ms']:7.2f}  adds {row['added_cpu_ms']:6.2f} ms CPU, "
        f"{row['added_ms']:6.2f} ms"
    )


if __name__ == "__main__":
    main()
