"""Conversions beside what they can't do without: `python -m bench.convert`.

A checkpoint of ours, of 16 arrays of 32 MiB and of one array of 2 GiB of random float32, is
converted to each format, as it is and with each array transposed on the way; in turns with a plain
copy of its files, synced, and with the bare minimum: read everything once and digest it, write and
sync it, read it back and digest it. The medians of seconds and of CPU seconds are shown, and how
many times the CPU seconds of the minimum they are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

CASES = {"16 arrays of 32 MiB": (16, (1024, 8192)), "1 array of 2 GiB": (1, (65536, 8192))}
TARGETS = {"ostraka": "out", "orbax": "out", "hf": "out", "npz": "out.npz"}
MINIMUM = "minimum"
_READ_BYTES, _WRITE_BYTES = 8 << 20, 2 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="the part of the rows to take")
    parser.add_argument("--scratch", type=Path, help="where to write; else a temporary directory")
    parser.add_argument("--arrays", type=int, choices=[1, 16], help="only the case of so many")
    parser.add_argument("--to", action="append", choices=TARGETS, help="only this; may be repeated")
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    targets = {to: TARGETS[to] for to in arguments.to or TARGETS}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        for case, (leaves, (height, width)) in CASES.items():
            if arguments.arrays not in (None, leaves):
                continue
            shape = (max(int(height * arguments.scale), 1), width)
            found = measure(Path(directory), leaves, shape, arguments.rounds, targets)
            for what, taken in found.items():
                rows.append({"case": case, "what": what, **taken})
                if not arguments.as_json:
                    print(show(rows[-1]), flush=True)
    if arguments.as_json:
        print(json.dumps(rows, indent=1))


def measure(
    root: Path, leaves: int, shape: tuple[int, ...], rounds: int, targets: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Seconds of a copy, of the minimum and of each conversion, the medians of all rounds."""
    import numpy as np

    import ostraka

    rng = np.random.default_rng(0)
    source = root / "source"
    ostraka.save(source, {f"w{n}": rng.random(shape, np.float32) for n in range(leaves)})
    works: dict[str, tuple[Path, Callable[[Path], Any]]] = {
        "copy": (root / "out", lambda target: copy(source, target)),
        MINIMUM: (root / "out", lambda target: do_the_minimum(source, target)),
    }
    for to, name in targets.items():
        works[to] = (root / name, partial(convert, source, to=to))
        works[f"{to}, transposed"] = (root / name, partial(convert, source, to=to, names=turned))
    taken: dict[str, list[tuple[float, float]]] = {to: [] for to in works}
    order, chance = list(works.items()), random.Random(0)
    for number in range(rounds + 1):
        chance.shuffle(order)  # What came before has its effect on memory and caches.
        for to, (target, work) in order:
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
    base = medians[MINIMUM]["cpu_s"]
    return {to: {**found, "of_minimum": found["cpu_s"] / base} for to, found in medians.items()}


def turned(path: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"path": path, "transpose": True}


def convert(source: Path, target: Path, to: Any, names: Any = None) -> None:
    import ostraka

    ostraka.convert(source, target, to=to, names=names)


def copy(source: Path, target: Path) -> None:
    """All files as they are, each synced."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)


def do_the_minimum(source: Path, target: Path) -> None:
    """Read and digest each file once, write and sync it, read it back and digest it."""
    import numpy as np
    import xxhash

    from ostraka.storage import LocalStore

    memory = np.empty(_READ_BYTES, np.uint8)

    def pieces(name: str, store: LocalStore) -> Iterator[tuple[int, Any]]:
        with closing(store.open(name)) as reader:
            for at in range(0, reader.size, _READ_BYTES):
                yield at, memory[: reader.read_into(at, [memory])]

    old, new = LocalStore(str(source)), LocalStore(str(target))
    new.prepare()
    for file in old.files(""):
        before, after = xxhash.xxh3_64(), xxhash.xxh3_64()
        writer = new.create(file.name, file.size, beside=1, replace=False)
        for at, piece in pieces(file.name, old):
            before.update(piece)
            for start in range(0, len(piece), _WRITE_BYTES):
                writer.write(at + start, [piece[start : start + _WRITE_BYTES]])
        writer.finish()
        for _, piece in pieces(file.name, new):
            after.update(piece)
        assert before.digest() == after.digest()


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:20} {row['what']:20} {row['s']:6.2f} s {row['cpu_s']:6.2f} s of CPU "
        f"{row['of_minimum']:5.2f} × the minimum"
    )


if __name__ == "__main__":
    main()
