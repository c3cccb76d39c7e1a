"""Conversions beside a plain copy of the same bytes: `python -m bench.convert`.

A checkpoint of ours, of 16 arrays of 32 MiB and of one array of 512 MiB of random float32, is
converted to each format, and its files are copied and synced, in turns. The medians of seconds and
of CPU seconds are shown, and how many times those of the copy they are. A conversion reads
everything, digests it, writes and syncs it, and reads it back.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

CASES = {"16 arrays of 32 MiB": (16, (1024, 8192)), "1 array of 512 MiB": (1, (16384, 8192))}
TARGETS = {"ostraka": "out", "orbax": "out", "hf": "out", "npz": "out.npz"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="the part of the rows to take")
    parser.add_argument("--scratch", type=Path, help="where to write; else a temporary directory")
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        for case, (leaves, (height, width)) in CASES.items():
            shape = (max(int(height * arguments.scale), 1), width)
            for to, found in measure(Path(directory), leaves, shape, arguments.rounds).items():
                rows.append({"case": case, "to": to, **found})
                if not arguments.as_json:
                    print(show(rows[-1]), flush=True)
    if arguments.as_json:
        print(json.dumps(rows, indent=1))


def measure(
    root: Path, leaves: int, shape: tuple[int, ...], rounds: int
) -> dict[str, dict[str, float]]:
    """Seconds of a copy and of each conversion, the medians of all rounds."""
    import numpy as np

    import ostraka

    rng = np.random.default_rng(0)
    source = root / "source"
    ostraka.save(source, {f"w{n}": rng.random(shape, np.float32) for n in range(leaves)})
    works: dict[str, tuple[Path, Callable[[Path], Any]]] = {
        "copy": (root / "out", lambda target: copy(source, target))
    }
    for to, name in TARGETS.items():
        works[to] = (root / name, partial(convert, source, to=to))
    taken: dict[str, list[tuple[float, float]]] = {to: [] for to in works}
    for number in range(rounds + 1):
        for to, (target, work) in works.items():
            begin, cpu = time.perf_counter(), time.process_time()
            work(target)
            spent = (time.perf_counter() - begin, time.process_time() - cpu)
            if number:  # The first round warms the caches.
                taken[to].append(spent)
            remove(target)
    remove(source)
    medians = {
        to: {"s": median(s for s, _ in found), "cpu_s": median(cpu for _, cpu in found)}
        for to, found in taken.items()
    }
    base = medians["copy"]["s"]
    return {to: {**found, "of_copy": found["s"] / base} for to, found in medians.items()}


def convert(source: Path, target: Path, to: Any) -> None:
    import ostraka

    ostraka.convert(source, target, to=to)


def copy(source: Path, target: Path) -> None:
    """All files as they are, each synced."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:22} {row['to']:8} {row['s']:7.2f} s {row['cpu_s']:7.2f} s of CPU "
        f"{row['of_copy']:5.2f} × a copy"
    )


if __name__ == "__main__":
    main()
