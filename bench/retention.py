"""Retention in a directory of many steps, and what it costs the next save.

`python -m bench.retention` fills a directory with N tiny steps and L leases, opens a Manager with
`keep=3` and saves a step, whose commit makes nearly all others superfluous. It measures

- the opening of the Manager, `latest()` and `ostraka ls` in the full directory,
- the next save, which begins as soon as the first one is committed,
- the retention, from that commit until `wait` returns.

A directory of few steps takes turns with the full one, round by round. The medians are shown. The
delay is the median of the next save in the full directory minus that in the other.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

CASES = ("800/0", "2000/50", "5000/100")
FEW = 3
BACKLOG = 4
_RENEW_EVERY_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--case", action="append", metavar="STEPS/LEASES", help=f"default: {', '.join(CASES)}"
    )
    parser.add_argument("--json", action="store_true", dest="as_json")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.disable(logging.CRITICAL)
    for case in arguments.case or CASES:
        steps, leases = map(int, case.split("/"))
        found = measure(steps, leases, arguments.rounds)
        print(json.dumps({case: found}) if arguments.as_json else show(case, found), flush=True)


def measure(steps: int, leases: int, rounds: int) -> dict[str, float]:
    """Medians in seconds, by what was done."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ostraka-bench-") as scratch:
        for number in range(rounds + 1):
            few = _turn(Path(scratch) / f"few{number}", FEW, 0)
            full = _turn(Path(scratch) / f"full{number}", steps, leases) if number else {}
            if not number:
                continue  # The first turn has imports and first calls in it.
            times.setdefault("next save, few steps", []).append(few["next save"])
            for name, duration_s in full.items():
                times.setdefault(name, []).append(duration_s)
    found = {name: median(values) for name, values in times.items()}
    found["delay"] = found["next save"] - found["next save, few steps"]
    return found


def _turn(root: Path, steps: int, leases: int) -> dict[str, float]:
    import jax.numpy as jnp

    import ostraka

    tree = {"w": jnp.zeros((8, 8)), "step": 0}
    _fill(root, tree, steps)
    times: dict[str, float] = {}
    with _leased(root, steps, leases):
        start = time.perf_counter()
        manager = ostraka.Manager(root, keep=FEW, on_preemption=False)
        times["open"] = time.perf_counter() - start
        start = time.perf_counter()
        assert manager.latest() == steps
        times["latest"] = time.perf_counter() - start
        times["ostraka ls"] = _list(root)
        manager.save(steps + 1, tree)
        metadata = root / f"step_{steps + 1:08d}" / "_METADATA"
        while not metadata.exists():
            time.sleep(0.0005)
        start = time.perf_counter()
        manager.save(steps + 2, tree)
        times["next save"] = time.perf_counter() - start
        manager.wait()
        times["retention"] = time.perf_counter() - start
        left = len(manager.steps())
        manager.close()
    assert left <= FEW + leases * (BACKLOG + 1), left
    shutil.rmtree(root)
    return times


def _list(root: Path) -> float:
    from ostraka.cli._ls import list_steps

    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        list_steps(str(root), as_json=True, verified=False)
    return time.perf_counter() - start


def _fill(root: Path, tree: object, steps: int) -> None:
    """Copies of one step under the names of many."""
    import ostraka

    first = root / "step_00000001"
    ostraka.save(first, tree)
    for step in range(2, steps + 1):
        shutil.copytree(first, root / f"step_{step:08d}")


@contextmanager
def _leased(root: Path, steps: int, count: int) -> Generator[None]:
    """Readers at steps that are evenly apart, each with its lease."""
    from ostraka.manager.leases import is_lease

    names = [
        f"_LEASE-host.{number}.{number:08x}-backlog-{BACKLOG}-step-{1 + number * steps // count}"
        for number in range(count)
    ]
    for name in names:
        assert is_lease(name)
        (root / name).touch()
    end = threading.Event()

    def renew() -> None:
        while not end.wait(_RENEW_EVERY_S):
            for name in names:
                with contextlib.suppress(OSError):
                    os.utime(root / name)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def show(case: str, found: dict[str, float]) -> str:
    """A line for each time."""
    lines = [f"{case} (steps/leases)"]
    lines += [f"  {name:22} {1000 * duration_s:10.1f} ms" for name, duration_s in found.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
