"""How far a save pushes the memory of its process beyond the state it saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench.data import few_large
from bench.machine import remove, settle
from bench.rounds import Options, Row, interleave

SAMPLE_S = 0.002
REPEATS = 3


class Apart:
    """A contender that is measured in a fresh process each time."""

    def __init__(self, name: str) -> None:
        self.name = name


def save_memory(options: Options) -> list[Row]:
    """Peak growth of resident memory during a save, by contender."""
    size = few_large(options.scale)
    row = Row(
        "memory",
        f"extra memory of a save of {size.state_bytes / 2**30:.3g} GiB",
        size.state_bytes,
        unit="bytes",
    )
    contenders = [Apart("ostraka"), Apart("orbax"), Apart("orbax_best")]

    def turn(contender: Apart) -> float:
        command = [
            sys.executable,
            "-m",
            "bench.memory",
            contender.name,
            str(options.scale),
            str(options.scratch),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
        return float(json.loads(done.stdout.splitlines()[-1]))

    interleave(row, contenders, min(REPEATS, options.rounds), turn)
    return [row]


def measure(name: str, scale: float, scratch: Path) -> int:
    """Bytes by which this process grew at most while `name` saved."""
    from bench.cases import WARM_UP
    from bench.contenders import BEST_LARGE, hush, make_contenders
    from bench.state import make_tree

    hush()
    found = {c.name: c for c in make_contenders(BEST_LARGE, say=print)}
    contender, path = found[name], scratch / f"memory_{name}"
    remove(path)
    contender.save(path, make_tree(WARM_UP))
    remove(path)
    tree = make_tree(few_large(scale))
    settle()
    try:
        with Peak() as peak:
            contender.save(path, tree)
    finally:
        remove(path)
    return peak.growth_bytes


class Peak:
    """Resident memory: before the block, and at its highest within it.

    The kernel's own high-water mark is used where it can be reset, and samples beside it.
    """

    def __init__(self) -> None:
        self.growth_bytes = 0
        self._done = threading.Event()
        self._highest = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peak:
        self._reset = _reset_high_water()
        self._before = self._highest = _resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        mark = _high_water_bytes() if self._reset else 0
        self.growth_bytes = max(self._highest, mark) - self._before

    def _sample(self) -> None:
        while not self._done.is_set():
            self._highest = max(self._highest, _resident_bytes())
            time.sleep(SAMPLE_S)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    print(measure(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])))
